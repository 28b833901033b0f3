"""Small models of many kinds, with data and compile arguments. Layer names start with `front_`, `mid_` or `head_`."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import zoo_cases as cases
import zoo_more as more
from keras import layers as L
from zoo_data import (
    Data,
    classified,
    floats,
    four_targets,
    image_and_number,
    missing_number,
    next_tokens,
    padded_series,
    tokens,
    two_languages,
    weighted_image_and_number,
)
from zoo_layers import Sampling

FLOAT32, ALL_DTYPES = ("float32",), ("float32", "mixed_float16", "mixed_bfloat16")


@dataclass(frozen=True)
class ZooModel:
    build: Callable[[], keras.Model]
    data: Data
    loss: Any = "mse"
    metrics: Any = None
    dtypes: tuple[str, ...] = ALL_DTYPES
    fit: dict = field(default_factory=dict)
    compile: dict = field(default_factory=dict)
    before_further_fits: tuple[Callable[[keras.Model], None], ...] = ()
    """Each changes the model, which is then compiled anew and trained again."""


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


def half_frozen() -> keras.Model:
    model = resnet()
    for layer in model.layers:
        if layer.name.startswith("front"):
            layer.trainable = False
    return model


_CLASSES = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
_IMAGE, _VECTOR, _FRAMES = (8, 8, 3), (8,), (3, 6, 6, 2)
_EXACTLY = (*ALL_DTYPES, "float64")
ZOO = {
    "resnet": ZooModel(resnet, classified(_IMAGE), _CLASSES, ["accuracy"], fit={"class_weight": {0: 1.0, 1: 2.0, 2: 0.5}}),
    "transformer": ZooModel(transformer, tokens),
    "masked_lstm": ZooModel(masked_lstm, tokens),
    "vae": ZooModel(vae, floats(_VECTOR), dtypes=FLOAT32),
    "siamese": ZooModel(siamese, floats(_VECTOR), metrics=["mae"]),
    "two_in_two_out": ZooModel(two_in_two_out, image_and_number, {"kind": _CLASSES, "size": "mse"}, {"size": ["mae"]}),
    "half_frozen": ZooModel(half_frozen, classified(_IMAGE), _CLASSES),
    "mlp": ZooModel(more.mlp, floats(_VECTOR)),
    "conv_bn": ZooModel(more.conv_bn, classified(_IMAGE), _CLASSES, ["accuracy"], dtypes=_EXACTLY),
    "densenet": ZooModel(more.densenet, classified(_IMAGE), _CLASSES),
    "dense_sums": ZooModel(more.dense_sums, floats(_VECTOR)),
    "unet": ZooModel(more.unet, floats(_IMAGE, (8, 8, 1))),
    "mobilenet": ZooModel(more.mobilenet, classified(_IMAGE), _CLASSES),
    "squeeze_excite": ZooModel(more.squeeze_excite, classified(_IMAGE), _CLASSES),
    "inception": ZooModel(more.inception, classified(_IMAGE), _CLASSES),
    "conv1d": ZooModel(more.conv1d, floats((8, 3))),
    # TensorFlow pools no volumes of float16 on a CPU.
    "conv3d": ZooModel(more.conv3d, floats((4, 4, 4, 2)), dtypes=("float32", "mixed_bfloat16")),
    "autoencoder": ZooModel(more.autoencoder, floats(_IMAGE, (8, 8, 1))),
    "recurrent": ZooModel(more.recurrent, padded_series),
    "time_distributed": ZooModel(more.time_distributed, floats(_FRAMES)),
    "conv_lstm": ZooModel(more.conv_lstm, floats(_FRAMES)),
    "encoder_decoder": ZooModel(more.encoder_decoder, two_languages, _CLASSES, ["accuracy"]),
    "tied_embedding": ZooModel(cases.tied_embedding, next_tokens, _CLASSES),
    "tied_logits": ZooModel(cases.tied_logits, next_tokens, _CLASSES),
    "optional_input": ZooModel(cases.optional_input, missing_number),
    "sample_weights": ZooModel(
        two_in_two_out,
        weighted_image_and_number,
        {"kind": _CLASSES, "size": "huber"},
        compile={"loss_weights": {"kind": 0.5, "size": 2.0}, "weighted_metrics": {"kind": ["accuracy"], "size": ["mae"]}},
    ),
    # In mixed precision Keras adds up regularizers of two dtypes, which TensorFlow refuses.
    "activity_regularized": ZooModel(cases.activity_regularized, floats(_VECTOR), dtypes=FLOAT32),
    "spectral": ZooModel(cases.spectral, classified(_IMAGE), _CLASSES),
    "metric_layers": ZooModel(cases.metric_layers, floats(_VECTOR), metrics=["mae"]),
    "toggled": ZooModel(cases.toggled, floats(_VECTOR), before_further_fits=(cases.toggle_front, cases.toggle_front)),
    "lora": ZooModel(cases.lora, tokens),
    "lambdas": ZooModel(cases.lambdas, floats(_VECTOR)),
    "operations": ZooModel(cases.operations, floats(_VECTOR)),
    "random_layers": ZooModel(cases.random_layers, classified(_IMAGE), _CLASSES),
    "unseeded": ZooModel(cases.unseeded, floats(_VECTOR)),
    "control_flow": ZooModel(cases.control_flow, floats(_VECTOR)),
    "custom_gradients": ZooModel(cases.custom_gradients, floats(_VECTOR)),
    "several_dtypes": ZooModel(cases.several_dtypes, floats(_VECTOR), dtypes=FLOAT32),
    "quantized": ZooModel(cases.quantized, floats(_VECTOR), dtypes=FLOAT32),
    "zero_size": ZooModel(cases.zero_size, floats(_VECTOR)),
    "constant_branches": ZooModel(cases.constant_branches, floats(_VECTOR)),
    "odd_outputs": ZooModel(cases.odd_outputs, four_targets, ["mse", "mae", "mse", "mse"]),
}
