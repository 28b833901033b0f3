"""Networks that SuperNeurons could not gain on: long skips (U-Net, DenseNet) and attention (ViT, BERT).

They return logits and are not compiled. Every size is an argument, so that a test can build a tiny one.
"""

from collections.abc import Sequence
from typing import Any

import keras
from keras import KerasTensor, layers

from keras_sn.benchmarks.network_layers import ClassToken, LearnedPositions


def unet(
    image_size: int = 512,
    width: int = 64,
    depth: int = 4,
    channels: int = 3,
    classes: int = 2,
    model_class: type[keras.Model] = keras.Model,
    **model_arguments: Any,
) -> keras.Model:
    """Builds a U-Net (Ronneberger et al. 2015) with batch normalization, and padding that keeps the size.

    Args:
        image_size: Height and width of the images, in pixels; a multiple of `2**depth`.
        width: Channels of the first level; they double at each level down.
        depth: How many times the images are halved.
        channels: Channels of the images.
        classes: Number of classes of a pixel.
        model_class: `keras.Model` or a subclass that takes `inputs, outputs`.
        **model_arguments: Passed on to `model_class`.

    Returns:
        The model, not compiled; its logits have the images' height and width.
    """
    images = keras.Input((image_size, image_size, channels), name="images")
    x, skips = images, []
    for level in range(depth):
        x = _two_convolutions(x, width * 2**level, name=f"down{level + 1}")
        skips.append(x)
        x = layers.MaxPooling2D(2, name=f"down{level + 1}_pool")(x)
    x = _two_convolutions(x, width * 2**depth, name="bottom")
    for level in reversed(range(depth)):
        name, filters = f"up{level + 1}", width * 2**level
        x = layers.Conv2DTranspose(filters, 2, strides=2, name=f"{name}_transpose")(x)
        x = layers.Concatenate(name=f"{name}_skip")([skips[level], x])
        x = _two_convolutions(x, filters, name=name)
    logits = layers.Conv2D(classes, 1, name="logits")(x)
    return model_class(images, logits, **model_arguments)


def vit(
    image_size: int = 224,
    patch: int = 16,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    mlp: int = 3072,
    classes: int = 1000,
    dropout: float = 0.0,
    model_class: type[keras.Model] = keras.Model,
    **model_arguments: Any,
) -> keras.Model:
    """Builds a vision Transformer (Dosovitskiy et al. 2021), ViT-B/16 by default; its blocks normalize first.

    Args:
        image_size: Height and width of the RGB images, in pixels; a multiple of `patch`.
        patch: Height and width of a patch, in pixels.
        width: Numbers in a token.
        depth: Number of blocks.
        heads: Attention heads; a divisor of `width`.
        mlp: Units of the hidden layer in each block.
        classes: Number of classes.
        dropout: Rate of dropout after the positions, each attention and each dense layer.
        model_class: `keras.Model` or a subclass that takes `inputs, outputs`.
        **model_arguments: Passed on to `model_class`.

    Returns:
        The model, not compiled.
    """
    images = keras.Input((image_size, image_size, 3), name="images")
    tokens = (image_size // patch) ** 2
    x = layers.Conv2D(width, patch, strides=patch, name="patches")(images)
    x = layers.Reshape((tokens, width), name="tokens")(x)
    x = LearnedPositions(tokens + 1, name="positions")(ClassToken(name="class_token")(x))
    x = _drop(x, dropout, "dropout")
    for block in range(1, depth + 1):
        name = f"block{block}"
        y = _attention(_layer_norm(x, f"{name}_norm1"), heads, dropout, name)
        x = layers.Add(name=f"{name}_add1")([x, y])
        y = _perceptron(_layer_norm(x, f"{name}_norm2"), mlp, dropout, name)
        x = layers.Add(name=f"{name}_add2")([x, y])
    logits = layers.Dense(classes, name="logits")(_layer_norm(x, "norm")[:, 0])
    return model_class(images, logits, **model_arguments)


def bert(
    length: int = 128,
    vocabulary: int = 30522,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    mlp: int = 3072,
    classes: int = 2,
    dropout: float = 0.1,
    positions: int = 512,
    model_class: type[keras.Model] = keras.Model,
    **model_arguments: Any,
) -> keras.Model:
    """Builds BERT (Devlin et al. 2019) as a classifier of single sequences; its blocks normalize last.

    Every sequence has its full length and is one segment, so there is no mask and no embedding of segments.

    Args:
        length: Tokens in a sequence, at most `positions`.
        vocabulary: Number of different tokens.
        width: Numbers in a token's vector.
        depth: Number of blocks.
        heads: Attention heads; a divisor of `width`.
        mlp: Units of the hidden layer in each block.
        classes: Number of classes.
        dropout: Rate of dropout after the embeddings, each attention, each block's last dense layer and the pooler.
        positions: The longest sequence that the weights are made for.
        model_class: `keras.Model` or a subclass that takes `inputs, outputs`.
        **model_arguments: Passed on to `model_class`.

    Returns:
        The model, not compiled; its input `tokens` is int32.
    """
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    initializer = keras.initializers.TruncatedNormal(stddev=0.02)
    x = layers.Embedding(vocabulary, width, embeddings_initializer=initializer, name="embedding")(tokens)
    x = _layer_norm(LearnedPositions(positions, name="positions")(x), "norm", epsilon=1e-12)
    x = _drop(x, dropout, "dropout")
    for block in range(1, depth + 1):
        name = f"block{block}"
        y = layers.Add(name=f"{name}_add1")([x, _attention(x, heads, dropout, name, attention_dropout=dropout)])
        x = _layer_norm(y, f"{name}_norm1", epsilon=1e-12)
        y = layers.Add(name=f"{name}_add2")([x, _perceptron(x, mlp, dropout, name, drops_hidden=False)])
        x = _layer_norm(y, f"{name}_norm2", epsilon=1e-12)
    x = layers.Dense(width, activation="tanh", name="pooler")(x[:, 0])
    logits = layers.Dense(classes, name="logits")(_drop(x, dropout, "pooler_dropout"))
    return model_class(tokens, logits, **model_arguments)


def densenet(
    blocks: Sequence[int] = (6, 12, 24, 16),
    growth: int = 32,
    image_size: int = 224,
    classes: int = 1000,
    width: int = 64,
    model_class: type[keras.Model] = keras.Model,
    **model_arguments: Any,
) -> keras.Model:
    """Builds a DenseNet (Huang et al. 2017) with bottlenecks and transitions that halve, DenseNet-121 by default.

    Args:
        blocks: Layers of each dense block.
        growth: Channels that a layer adds.
        image_size: Height and width of the RGB images, in pixels.
        classes: Number of classes.
        width: Channels of the stem.
        model_class: `keras.Model` or a subclass that takes `inputs, outputs`.
        **model_arguments: Passed on to `model_class`.

    Returns:
        The model, not compiled.
    """
    images = keras.Input((image_size, image_size, 3), name="images")
    x = layers.Conv2D(width, 7, strides=2, padding="same", use_bias=False, name="stem_conv")(images)
    x = layers.MaxPooling2D(3, 2, padding="same", name="stem_pool")(_norm_relu(x, "stem"))
    for block, count in enumerate(blocks, start=1):
        x = _dense_block(x, count, growth, name=f"block{block}")
        if block < len(blocks):
            name = f"transition{block}"
            x = layers.Conv2D(x.shape[-1] // 2, 1, use_bias=False, name=f"{name}_conv")(_norm_relu(x, name))
            x = layers.AveragePooling2D(2, name=f"{name}_pool")(x)
    x = layers.GlobalAveragePooling2D(name="pool")(_norm_relu(x, "last"))
    logits = layers.Dense(classes, name="logits")(x)
    return model_class(images, logits, **model_arguments)


def _two_convolutions(x: KerasTensor, filters: int, *, name: str) -> KerasTensor:
    for number in (1, 2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"{name}_conv{number}")(x)
        x = _norm_relu(x, f"{name}_{number}")
    return x


def _norm_relu(x: KerasTensor, name: str) -> KerasTensor:
    return layers.ReLU(name=f"{name}_relu")(layers.BatchNormalization(epsilon=1e-5, name=f"{name}_bn")(x))


def _dense_block(x: KerasTensor, count: int, growth: int, *, name: str) -> KerasTensor:
    """Each layer reads the concatenation of what all layers before it made."""
    made = [x]
    for number in range(1, count + 1):
        layer = f"{name}_layer{number}"
        y = layers.Conv2D(4 * growth, 1, use_bias=False, name=f"{layer}_conv1")(_norm_relu(x, f"{layer}_1"))
        y = layers.Conv2D(growth, 3, padding="same", use_bias=False, name=f"{layer}_conv2")(_norm_relu(y, f"{layer}_2"))
        made.append(y)
        x = layers.Concatenate(name=f"{layer}_concat")(made)
    return x


def _layer_norm(x: KerasTensor, name: str, *, epsilon: float = 1e-6) -> KerasTensor:
    return layers.LayerNormalization(epsilon=epsilon, name=name)(x)


def _drop(x: KerasTensor, rate: float, name: str) -> KerasTensor:
    return layers.Dropout(rate, name=name)(x) if rate else x


def _attention(x: KerasTensor, heads: int, dropout: float, name: str, *, attention_dropout: float = 0.0) -> KerasTensor:
    attention = layers.MultiHeadAttention(heads, x.shape[-1] // heads, dropout=attention_dropout, name=f"{name}_attention")
    return _drop(attention(x, x), dropout, f"{name}_dropout1")


def _perceptron(x: KerasTensor, units: int, dropout: float, name: str, *, drops_hidden: bool = True) -> KerasTensor:
    y = layers.Dense(units, activation="gelu", name=f"{name}_dense1")(x)
    y = _drop(y, dropout if drops_hidden else 0.0, f"{name}_dropout_hidden")
    return _drop(layers.Dense(x.shape[-1], name=f"{name}_dense2")(y), dropout, f"{name}_dropout2")
