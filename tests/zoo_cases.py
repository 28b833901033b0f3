"""Models of the zoo for one feature each: shared weights, odd inputs and outputs, dtypes, state, code between the layers."""

import keras
from keras import layers as L
from keras import ops
from zoo_layers import (
    AddIfGiven,
    Branching,
    ClippedGradient,
    Constant,
    Iterating,
    Jitter,
    Monitor,
    Rounded,
    TiedLogits,
    UnseededJitter,
)


def _start(width=8):
    inputs = keras.Input((width,), name="x")
    return inputs, L.Dense(6, activation="relu", name="front_dense")(inputs)


def _end(inputs, x) -> keras.Model:
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(x))


def tied_embedding() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    embedding = L.ReversibleEmbedding(12, 8, mask_zero=True, name="front_embedding")
    x = L.Dense(8, activation="tanh", name="mid_dense")(embedding(inputs))
    return keras.Model(inputs, L.Activation("linear", dtype="float32", name="head_cast")(embedding(x, reverse=True)))


def tied_logits() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    embedding = L.Embedding(12, 8, name="front_embedding")
    x = L.Dense(8, activation="tanh", name="mid_dense")(embedding(inputs))
    return keras.Model(inputs, TiedLogits(embedding, name="head_logits")(x))


def optional_input() -> keras.Model:
    x, extra = keras.Input((8,), name="x"), keras.Input((6,), name="extra", optional=True)
    y = L.Dense(6, activation="relu", name="front_dense")(x)
    y = L.Dense(6, activation="relu", name="mid_dense")(AddIfGiven(name="mid_add")(y, extra))
    return _end({"x": x, "extra": extra}, y)


def activity_regularized() -> keras.Model:
    inputs = keras.Input((8,), name="x")
    x = L.Dense(6, activation="relu", activity_regularizer="l2", name="front_dense")(inputs)
    x = L.ActivityRegularization(l1=0.01, name="mid_activity")(L.Dense(6, name="mid_dense")(x))
    x = L.Dense(6, activation="tanh", activity_regularizer="l1", kernel_regularizer="l2", name="mid_dense2")(x)
    return _end(inputs, x)


def spectral() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.SpectralNormalization(L.Conv2D(4, 3, activation="relu"), name="front_conv")(inputs)
    x = L.Flatten(name="mid_flat")(x)
    x = L.SpectralNormalization(L.Dense(6), power_iterations=2, name="mid_dense")(x)
    return keras.Model(inputs, L.Dense(3, dtype="float32", name="head_dense")(x))


def metric_layers() -> keras.Model:
    inputs, x = _start()
    x = Monitor(name="front_monitor")(x)
    x = L.Dense(6, activation="tanh", name="mid_dense")(x)
    return _end(inputs, Monitor(name="mid_monitor")(x))


def toggled() -> keras.Model:
    inputs, x = _start()
    x = L.BatchNormalization(name="front_bn")(x)
    x = L.Dropout(0.2, name="mid_drop")(L.Dense(6, activation="relu", name="mid_dense")(x))
    return _end(inputs, L.BatchNormalization(name="mid_bn")(x))


def toggle_front(model) -> None:
    for layer in model.layers:
        if layer.name.startswith("front"):
            layer.trainable = not layer.trainable


def lora() -> keras.Model:
    inputs = keras.Input((6,), dtype="int32", name="tokens")
    x = L.Embedding(12, 8, lora_rank=2, name="front_embedding")(inputs)
    x = L.EinsumDense("abc,cd->abd", (6, 6), bias_axes="d", lora_rank=2, activation="relu", name="mid_einsum")(x)
    x = L.Dense(6, lora_rank=2, activation="gelu", name="mid_dense")(x)
    x = L.GlobalAveragePooling1D(name="head_pool")(x)
    return keras.Model(inputs, L.Dense(2, dtype="float32", name="head_dense")(x))


def lambdas() -> keras.Model:
    inputs, x = _start()
    x = L.Lambda(lambda x: x * 2 - 1, name="front_affine")(x)
    x = L.Dense(6, name="mid_dense")(x)
    x = L.Lambda(lambda x: ops.concatenate([x, ops.sin(x)], axis=-1), name="mid_features")(x)
    return _end(inputs, x)


def operations() -> keras.Model:
    inputs, x = _start()
    left, right = ops.split(L.Dense(8, name="mid_dense")(x), 2, axis=-1)
    y = ops.sigmoid(left) * ops.tanh(right) + ops.where(left > 0, left, 0.1 * left)
    y = ops.concatenate([y[:, ::2], y[..., -3:], ops.expand_dims(y[:, 0], -1)], axis=-1)
    y = ops.reshape(ops.transpose(ops.reshape(y, (-1, 2, 3)), (0, 2, 1)), (-1, 6))
    y = y - ops.logsumexp(y, axis=-1, keepdims=True) + ops.cast(ops.argmax(y, axis=-1, keepdims=True), y.dtype)
    return _end(inputs, ops.einsum("bi,bj->bi", y, x) / 3 + x)


def random_layers() -> keras.Model:
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.RandomContrast(0.3, name="front_contrast")(L.RandomFlip(name="front_flip")(inputs))
    x = L.GaussianNoise(0.1, name="front_noise")(x)
    x = L.SpatialDropout2D(0.2, name="mid_spatial")(L.Conv2D(4, 3, activation="relu", name="mid_conv")(x))
    x = L.GaussianDropout(0.2, name="mid_gaussian")(Jitter(name="mid_jitter")(x))
    x = L.AlphaDropout(0.1, name="mid_alpha")(x)
    return keras.Model(inputs, L.Dense(3, dtype="float32", name="head_dense")(L.Flatten(name="head_flat")(x)))


def unseeded() -> keras.Model:
    inputs, x = _start()
    x = UnseededJitter(name="front_jitter")(x)
    x = L.Dropout(0.2, name="mid_dropout")(L.Dense(6, activation="tanh", name="mid_dense")(x))
    return _end(inputs, L.Dense(6, name="mid_last")(UnseededJitter(name="mid_jitter")(x)))


def control_flow() -> keras.Model:
    inputs, x = _start()
    x = Branching(name="front_branch")(x)
    x = Iterating(name="mid_loop")(L.Dense(6, name="mid_dense")(x))
    return _end(inputs, Branching(name="mid_branch")(x))


def custom_gradients() -> keras.Model:
    inputs, x = _start()
    x = ClippedGradient(name="front_clip")(x)
    x = Rounded(name="mid_round")(L.Dense(6, activation="tanh", name="mid_dense")(x))
    return _end(inputs, x)


def several_dtypes() -> keras.Model:
    inputs, x = _start()
    x = L.Dense(6, activation="tanh", dtype="mixed_bfloat16", name="front_bfloat16")(x)
    x = L.BatchNormalization(dtype="float64", name="mid_float64")(x)
    x = L.Dense(6, activation="relu", dtype="float64", name="mid_dense64")(x)
    return _end(inputs, L.LayerNormalization(dtype="mixed_float16", name="mid_float16")(x))


def quantized() -> keras.Model:
    inputs, x = _start()
    x = L.Dense(6, activation="relu", name="mid_dense")(x)
    x = L.EinsumDense("ab,bc->ac", (6,), bias_axes="c", name="mid_einsum")(x)
    model = _end(inputs, L.LayerNormalization(name="mid_norm")(x))
    model.quantize("int8")
    return model


def zero_size() -> keras.Model:
    inputs, x = _start()
    nothing = L.Dense(6, activation="relu", name="front_empty")(inputs[:, :0])
    x = L.Concatenate(name="mid_join")([L.Add(name="mid_add")([x, nothing]), ops.tanh(x[:, 6:])])
    return _end(inputs, L.BatchNormalization(name="mid_bn")(x))


def constant_branches() -> keras.Model:
    inputs, x = _start()
    constant = Constant(name="front_constant")(inputs)
    frozen = ops.stop_gradient(L.Dense(8, name="front_unused")(inputs))
    x = L.Concatenate(name="mid_join")([x, constant, frozen, ops.zeros_like(x), ops.ones((8,)) * inputs])
    L.Dense(3, name="mid_dead_end")(x)
    return _end(inputs, L.Dense(6, activation="relu", name="mid_dense")(x))


def odd_outputs() -> keras.Model:
    """One output twice, one that inner layers read, one that is the input."""
    inputs, x = _start()
    y = L.Dense(6, activation="tanh", name="mid_dense")(x)
    y = L.Dense(2, dtype="float32", name="head_dense")(L.Add(name="mid_add")([x, y]))
    return keras.Model(inputs, [y, y, x, inputs])
