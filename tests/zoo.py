"""Small models of many kinds, with data and compile arguments. Layer names start with `front_`, `mid_` or `head_`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras import layers as L

SAMPLES, BATCH = 10, 4  # the last batch is partial


@dataclass(frozen=True)
class ZooModel:
    build: Callable[[], keras.Model]
    data: Callable[[np.random.Generator], tuple]
    loss: Any = "mse"
    metrics: Any = None
    half_makes_sense: bool = True
    fit: dict = field(default_factory=dict)


def _image_data(rng):
    return rng.normal(size=(SAMPLES, 8, 8, 3)).astype("float32"), rng.integers(0, 3, SAMPLES)


def _token_data(rng):
    tokens = rng.integers(1, 11, (SAMPLES, 6))
    tokens[:, 4:] = 0  # padding
    return tokens.astype("int32"), rng.normal(size=(SAMPLES, 2)).astype("float32")


def _vector_data(rng):
    return rng.normal(size=(SAMPLES, 8)).astype("float32"), rng.normal(size=(SAMPLES, 2)).astype("float32")


def resnet() -> keras.Model:
    def conv_bn(x, filters, name, activate=True):
        x = L.Conv2D(filters, 3, padding="same", use_bias=False, name=f"{name}_conv")(x)
        x = L.BatchNormalization(name=f"{name}_bn")(x)
        return L.ReLU(name=f"{name}_relu")(x) if activate else x

    inputs = keras.Input((8, 8, 3), name="image")
    x = conv_bn(inputs, 4, "front_stem")
    for block in ("front_block", "mid_block", "mid_block2"):
        y = conv_bn(conv_bn(x, 4, f"{block}_a"), 4, f"{block}_b", activate=False)
        x = L.ReLU(name=f"{block}_out")(L.Add(name=f"{block}_add")([x, y]))
    x = L.GlobalAveragePooling2D(name="head_pool")(x)
    return keras.Model(inputs, L.Dense(3, dtype="float32", name="head_dense")(x))


def transformer() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    x = L.Embedding(12, 8, name="front_embedding")(inputs)
    for block in ("front", "mid"):
        attended = L.MultiHeadAttention(2, 4, dropout=0.2, name=f"{block}_attention")(x, x, use_causal_mask=True)
        x = L.LayerNormalization(name=f"{block}_norm1")(x + L.Dropout(0.3, name=f"{block}_drop1")(attended))
        y = L.Dense(16, activation="gelu", name=f"{block}_up")(x)
        y = L.Dropout(0.3, name=f"{block}_drop2")(L.Dense(8, name=f"{block}_down")(y))
        x = L.LayerNormalization(name=f"{block}_norm2")(L.Add(name=f"{block}_add")([x, y]))
    x = keras.ops.mean(x, axis=1)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(x))


def masked_lstm() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    x = L.Embedding(12, 8, mask_zero=True, name="front_embedding")(inputs)
    x = L.LSTM(6, return_sequences=True, recurrent_dropout=0.2, name="front_lstm")(x)
    x = L.Dropout(0.2, name="mid_drop")(x)
    x = L.GlobalAveragePooling1D(name="mid_pool")(x)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(x))


@keras.saving.register_keras_serializable("zoo")
class Sampling(L.Layer):
    """The VAE's sampling step, with its KL divergence as an added loss."""

    def __init__(self, seed=3, **kwargs):
        super().__init__(**kwargs)
        self.seed = seed
        self.generator = keras.random.SeedGenerator(seed)

    def call(self, mean, log_var):
        divergence = -0.5 * keras.ops.mean(1 + log_var - keras.ops.square(mean) - keras.ops.exp(log_var))
        self.add_loss(0.1 * divergence)
        noise = keras.random.normal(keras.ops.shape(mean), dtype=mean.dtype, seed=self.generator)
        return mean + keras.ops.exp(0.5 * log_var) * noise

    def get_config(self):
        return super().get_config() | {"seed": self.seed}


def vae() -> keras.Model:
    inputs = keras.Input((8,), name="x")
    x = L.Dense(8, activation="relu", name="front_dense")(inputs)
    mean, log_var = L.Dense(3, name="mid_mean")(x), L.Dense(3, name="mid_log_var")(x)
    z = Sampling(name="mid_sampling")(mean, log_var)
    y = L.Dense(8, activation="relu", kernel_regularizer="l2", name="head_dense")(z)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_out")(y))


def siamese() -> keras.Model:
    encoder_in = keras.Input((4,), name="encoder_in")
    e = L.Dropout(0.2, name="mid_drop")(L.BatchNormalization(name="mid_bn")(L.Dense(6, name="mid_dense")(encoder_in)))
    encoder = keras.Model(encoder_in, L.ReLU(name="mid_relu")(e), name="mid_encoder")
    inputs = keras.Input((8,), name="both")
    both = L.Dense(8, name="front_first")(inputs)
    left, right = encoder(both[:, :4]), encoder(both[:, 4:])
    distance = keras.ops.abs(left - right)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(distance))


def two_in_two_out() -> keras.Model:
    image, number = keras.Input((8, 8, 3), name="image"), keras.Input((2,), name="number")
    x = L.Conv2D(4, 3, strides=2, activation="relu", name="front_conv")(image)
    x = L.Flatten(name="front_flatten")(x)
    joined = L.Concatenate(name="mid_join")([x, L.Dense(4, name="front_number")(number)])
    joined = L.Dropout(0.1, name="mid_drop")(L.Dense(8, activation="tanh", name="mid_dense")(joined))
    kind = L.Dense(3, dtype="float32", name="head_kind")(joined)
    size = L.Dense(1, dtype="float32", name="head_size")(joined)
    return keras.Model({"image": image, "number": number}, {"kind": kind, "size": size})


def _two_data(rng):
    x = {
        "image": rng.normal(size=(SAMPLES, 8, 8, 3)).astype("float32"),
        "number": rng.normal(size=(SAMPLES, 2)).astype("float32"),
    }
    y = {"kind": rng.integers(0, 3, SAMPLES), "size": rng.normal(size=(SAMPLES, 1)).astype("float32")}
    return x, y


def half_frozen() -> keras.Model:
    model = resnet()
    for layer in model.layers:
        if layer.name.startswith("front"):
            layer.trainable = False
    return model


_CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
ZOO = {
    "resnet": ZooModel(resnet, _image_data, _CLASSES, ["accuracy"], fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
    "transformer": ZooModel(transformer, _token_data),
    "masked_lstm": ZooModel(masked_lstm, _token_data, half_makes_sense=False),
    "vae": ZooModel(vae, _vector_data, half_makes_sense=False),
    "siamese": ZooModel(siamese, _vector_data, metrics=["mae"]),
    "two_in_two_out": ZooModel(
        two_in_two_out,
        _two_data,
        {"kind": _CLASSES, "size": "mse"},
        {"size": ["mae"]},
    ),
    "half_frozen": ZooModel(half_frozen, _image_data, _CLASSES),
}
