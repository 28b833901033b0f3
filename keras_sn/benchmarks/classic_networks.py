"""The networks that SuperNeurons (Wang et al. 2018) was measured on beside ResNets: AlexNet, VGG16 and Inception-v4.

Layer for layer those of the paper's test programs, which `paper_networks` has as layer graphs; activations are layers of
their own. They return logits and are not compiled.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any

import keras
from keras import KerasTensor, layers

from keras_sn.benchmarks.network_layers import LocalResponseNormalization

Kernel = int | tuple[int, int]
Convolution = tuple[int, Kernel] | tuple[int, Kernel, int]


def alexnet(
    image_size: int = 227,
    filters: Sequence[int] = (96, 256, 384, 384, 256),
    units: int = 4096,
    classes: int = 1000,
    dropout: float = 0.5,
    softmax: bool = False,
    model_class: type[keras.Model] = keras.Model,
    **model_arguments: Any,
) -> keras.Model:
    """Builds AlexNet (Krizhevsky et al. 2012) in one column, as SuperNeurons does.

    Args:
        image_size: Height and width of the RGB images, in pixels; 67 at least.
        filters: Channels of the five convolutions.
        units: Units of each hidden dense layer.
        classes: Number of classes.
        dropout: Rate of dropout after the hidden dense layers.
        softmax: Whether the model ends with a softmax layer, as the paper counts it, instead of returning logits.
        model_class: `keras.Model` or a subclass that takes `inputs, outputs`.
        **model_arguments: Passed on to `model_class`.

    Returns:
        The model, not compiled.
    """
    images = keras.Input((image_size, image_size, 3), name="images")
    x = images
    for number, channels in enumerate(filters, start=1):
        kernel, stride, padding = {1: (11, 4, "valid"), 2: (5, 1, "same")}.get(number, (3, 1, "same"))
        x = layers.Conv2D(channels, kernel, strides=stride, padding=padding, name=f"conv{number}")(x)
        x = layers.ReLU(name=f"relu{number}")(x)
        if number <= 2:
            x = LocalResponseNormalization(name=f"lrn{number}")(x)
        if number in (1, 2, len(filters)):
            x = layers.MaxPooling2D(3, 2, name=f"pool{number}")(x)
    outputs = _classifier(x, units, classes, dropout)
    if softmax:
        outputs = layers.Softmax(name="softmax")(outputs)
    return model_class(images, outputs, **model_arguments)


def vgg16(
    image_size: int = 224,
    width: int = 64,
    units: int = 4096,
    classes: int = 1000,
    dropout: float = 0.5,
    model_class: type[keras.Model] = keras.Model,
    **model_arguments: Any,
) -> keras.Model:
    """Builds VGG16 (Simonyan and Zisserman 2015).

    Args:
        image_size: Height and width of the RGB images, in pixels; 32 at least.
        width: Channels of the first group of convolutions; the others have up to eight times as many.
        units: Units of each hidden dense layer.
        classes: Number of classes.
        dropout: Rate of dropout after the hidden dense layers.
        model_class: `keras.Model` or a subclass that takes `inputs, outputs`.
        **model_arguments: Passed on to `model_class`.

    Returns:
        The model, not compiled.
    """
    images = keras.Input((image_size, image_size, 3), name="images")
    x = images
    for group, convolutions in enumerate((2, 2, 3, 3, 3), start=1):
        for number in range(1, convolutions + 1):
            channels = width * min(2 ** (group - 1), 8)
            x = layers.Conv2D(channels, 3, padding="same", name=f"conv{group}_{number}")(x)
            x = layers.ReLU(name=f"relu{group}_{number}")(x)
        x = layers.MaxPooling2D(2, name=f"pool{group}")(x)
    return model_class(images, _classifier(x, units, classes, dropout), **model_arguments)


def inception_v4(
    image_size: int = 299,
    width: int = 32,
    blocks: tuple[int, int, int] = (4, 7, 3),
    classes: int = 1000,
    dropout: float = 0.2,
    model_class: type[keras.Model] = keras.Model,
    **model_arguments: Any,
) -> keras.Model:
    """Builds Inception-v4 (Szegedy et al. 2016).

    Args:
        image_size: Height and width of the RGB images, in pixels; 75 at least.
        width: Channels of the first convolution; those of all others are in proportion.
        blocks: How many A, B and C blocks there are.
        classes: Number of classes.
        dropout: Rate of dropout before the classifier.
        model_class: `keras.Model` or a subclass that takes `inputs, outputs`.
        **model_arguments: Passed on to `model_class`.

    Returns:
        The model, not compiled.
    """
    net = _Inception(width)
    images = keras.Input((image_size, image_size, 3), name="images")
    x = net.stem(images)
    for block, times in ((net.a, blocks[0]), (net.reduce_a, 1), (net.b, blocks[1]), (net.reduce_b, 1), (net.c, blocks[2])):
        for _ in range(times):
            x = block(x)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(classes, name="logits")(layers.Dropout(dropout, name="dropout")(x))
    return model_class(images, logits, **model_arguments)


def _classifier(x: KerasTensor, units: int, classes: int, dropout: float) -> KerasTensor:
    """The three dense layers that AlexNet and VGG16 end with."""
    x = layers.Flatten(name="flatten")(x)
    for number in (1, 2):
        x = layers.ReLU(name=f"fc{number}_relu")(layers.Dense(units, name=f"fc{number}")(x))
        x = layers.Dropout(dropout, name=f"fc{number}_dropout")(x)
    return layers.Dense(classes, name="logits")(x)


class _Inception:
    """The blocks of Inception-v4. Filters are written as for `width` 32, which the paper has."""

    def __init__(self, width: int):
        self.width = width
        self.numbers = count(1)

    def chain(self, x: KerasTensor, *convolutions: Convolution) -> KerasTensor:
        """Convolutions in a row, each `(filters, kernel)` or `(filters, kernel, stride)`; a stride means no padding."""
        for filters, kernel, *stride in convolutions:
            name = f"conv{next(self.numbers)}"
            convolution = layers.Conv2D(
                filters * self.width // 32,
                kernel,
                strides=stride[0] if stride else 1,
                padding="valid" if stride else "same",
                use_bias=False,
                name=name,
            )
            x = layers.BatchNormalization(epsilon=1e-3, name=f"{name}_bn")(convolution(x))
            x = layers.ReLU(name=f"{name}_relu")(x)
        return x

    def concat(self, *branches: KerasTensor) -> KerasTensor:
        return layers.Concatenate(name=f"concat{next(self.numbers)}")(branches)

    def average(self, x: KerasTensor) -> KerasTensor:
        return layers.AveragePooling2D(3, 1, padding="same", name=f"pool{next(self.numbers)}")(x)

    def halve(self, x: KerasTensor) -> KerasTensor:
        return layers.MaxPooling2D(3, 2, name=f"pool{next(self.numbers)}")(x)

    def stem(self, x: KerasTensor) -> KerasTensor:
        x = self.chain(x, (32, 3, 2), (32, 3, 1), (64, 3))
        x = self.concat(self.halve(x), self.chain(x, (96, 3, 2)))
        a = self.chain(x, (64, 1), (96, 3, 1))
        x = self.concat(a, self.chain(x, (64, 1), (64, (7, 1)), (64, (1, 7)), (96, 3, 1)))
        return self.concat(self.chain(x, (192, 3, 2)), self.halve(x))

    def a(self, x: KerasTensor) -> KerasTensor:
        a = self.chain(self.average(x), (96, 1))
        b = self.chain(x, (96, 1))
        c = self.chain(x, (64, 1), (96, 3))
        return self.concat(a, b, c, self.chain(x, (64, 1), (96, 3), (96, 3)))

    def reduce_a(self, x: KerasTensor) -> KerasTensor:
        b = self.chain(x, (384, 3, 2))
        return self.concat(self.halve(x), b, self.chain(x, (192, 1), (224, 3), (256, 3, 2)))

    def b(self, x: KerasTensor) -> KerasTensor:
        a = self.chain(self.average(x), (128, 1))
        b = self.chain(x, (384, 1))
        c = self.chain(x, (192, 1), (224, (1, 7)), (256, (7, 1)))
        d = self.chain(x, (192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1)))
        return self.concat(a, b, c, d)

    def reduce_b(self, x: KerasTensor) -> KerasTensor:
        b = self.chain(x, (192, 1), (192, 3, 2))
        c = self.chain(x, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2))
        return self.concat(self.halve(x), b, c)

    def c(self, x: KerasTensor) -> KerasTensor:
        a = self.chain(self.average(x), (256, 1))
        b = self.chain(x, (256, 1))
        c = self.chain(x, (384, 1))
        c, e = self.chain(c, (256, (1, 3))), self.chain(c, (256, (3, 1)))
        d = self.chain(x, (384, 1), (448, (1, 3)), (512, (3, 1)))
        d, f = self.chain(d, (256, (1, 3))), self.chain(d, (256, (3, 1)))
        return self.concat(a, b, c, e, d, f)
