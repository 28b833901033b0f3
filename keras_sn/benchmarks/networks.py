"""The benchmarks' networks by name, and bottleneck ResNets of any depth, for `keras.Model` and its subclasses.

The family is He et al. 2016 (ResNet v1, bottleneck blocks) as Wang et al. 2018 (SuperNeurons) deepen it: stage 3 grows
and the others stay.
"""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import KerasTensor, layers

from keras_sn.benchmarks.classic_networks import alexnet, inception_v4, vgg16
from keras_sn.benchmarks.modern_networks import bert, densenet, unet, vit

RESNET_50 = (3, 4, 6, 3)
RESNET_101 = (3, 4, 23, 3)
RESNET_152 = (3, 8, 36, 3)
RESNET_122 = (3, 12, 22, 3)


def depth(blocks: Sequence[int]) -> int:
    """Layers with weights as He et al. count them: three a block, the stem and the classifier."""
    return 3 * sum(blocks) + 2


def resnet(
    blocks: Sequence[int],
    *,
    image_size: int = 224,
    classes: int = 1000,
    width: int = 64,
    model_class: type[keras.Model] = keras.Model,
    **model_arguments: Any,
) -> keras.Model:
    """Builds a bottleneck ResNet that returns logits.

    Args:
        blocks: The number of blocks of each stage.
        image_size: Height and width of the RGB images, in pixels.
        classes: Number of classes.
        width: Channels of the stem; stage `k` has `width * 2**(k - 1)` inside its blocks, four times that between them.
        model_class: `keras.Model` or a subclass that takes `inputs, outputs`.
        **model_arguments: Passed on to `model_class`.

    Returns:
        The model, not compiled.
    """
    images = keras.Input((image_size, image_size, 3), name="images")
    x = layers.Conv2D(width, 7, strides=2, padding="same", use_bias=False, name="stem_conv")(images)
    x = layers.ReLU(name="stem_relu")(_normalize(x, "stem_bn"))
    x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(x)
    for stage, count in enumerate(blocks, start=1):
        for block in range(1, count + 1):
            is_first = block == 1
            stride = 2 if is_first and stage > 1 else 1
            name = f"stage{stage}_block{block}"
            x = _bottleneck(x, width * 2 ** (stage - 1), stride=stride, has_projection=is_first, name=name)
    x = layers.GlobalAveragePooling2D(name="pool")(x)
    logits = layers.Dense(classes, name="logits")(x)
    return model_class(images, logits, **model_arguments)


def deep_resnet(n3: int, **arguments: Any) -> keras.Model:
    """SuperNeurons' depth benchmark: a ResNet of 6, 32, `n3` and 6 blocks. Arguments as in `resnet`."""
    return resnet((6, 32, n3, 6), **arguments)


def resnet50(**arguments: Any) -> keras.Model:
    """A ResNet of 50 layers. Arguments as in `resnet`."""
    return resnet(RESNET_50, **arguments)


def resnet101(**arguments: Any) -> keras.Model:
    """A ResNet of 101 layers. Arguments as in `resnet`."""
    return resnet(RESNET_101, **arguments)


def resnet152(**arguments: Any) -> keras.Model:
    """A ResNet of 152 layers. Arguments as in `resnet`."""
    return resnet(RESNET_152, **arguments)


def _bottleneck(x: KerasTensor, channels: int, *, stride: int, has_projection: bool, name: str) -> KerasTensor:
    shortcut = x
    if has_projection:
        projection = layers.Conv2D(4 * channels, 1, strides=stride, use_bias=False, name=f"{name}_projection")(x)
        shortcut = _normalize(projection, f"{name}_projection_bn")
    y = layers.Conv2D(channels, 1, strides=stride, use_bias=False, name=f"{name}_conv1")(x)
    y = layers.ReLU(name=f"{name}_relu1")(_normalize(y, f"{name}_bn1"))
    y = layers.Conv2D(channels, 3, padding="same", use_bias=False, name=f"{name}_conv2")(y)
    y = layers.ReLU(name=f"{name}_relu2")(_normalize(y, f"{name}_bn2"))
    y = layers.Conv2D(4 * channels, 1, use_bias=False, name=f"{name}_conv3")(y)
    y = _normalize(y, f"{name}_bn3")
    return layers.ReLU(name=f"{name}_relu3")(layers.Add(name=f"{name}_add")([shortcut, y]))


def _normalize(x: KerasTensor, name: str) -> KerasTensor:
    return layers.BatchNormalization(epsilon=1e-5, name=name)(x)


NETWORKS: dict[str, Callable[..., keras.Model]] = {
    builder.__name__: builder
    for builder in (alexnet, vgg16, inception_v4, resnet, resnet50, resnet101, resnet152, densenet, unet, vit, bert)
}
"""Each builds its network, at the published size unless arguments say otherwise."""
