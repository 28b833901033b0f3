"""What people reported of Keras, TensorFlow, PyTorch and their libraries, where memory is saved or models are built: not here."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from keras import ops
from parity import rewriting_off
from reports import IMAGES, RECOMPUTE_EACH, TOKENS, X, Y, assert_trains_equal, compiled, converted, fit, stack

rewriting_off()


def _dense_block(x, growth=4, count=2):
    for _ in range(count):
        y = L.Conv2D(2 * growth, 1, use_bias=False)(L.ReLU()(L.BatchNormalization()(x)))
        y = L.Conv2D(growth, 3, padding="same", use_bias=False)(L.ReLU()(L.BatchNormalization()(y)))
        x = L.Concatenate()([x, y])
    return x


def test_a_densenet_as_backbone_with_a_default_fit():
    """keras#21207: fails inside a functional model."""

    def build():
        inside = keras.Input((8, 8, 3))
        backbone = keras.Model(inside, _dense_block(L.Conv2D(4, 3, padding="same")(inside)), name="backbone")
        return stack(keras.Input((8, 8, 3)), backbone, L.Dropout(0.2))

    def train(model):
        model.compile("rmsprop", "mse", metrics=["mae"])
        history = model.fit(IMAGES, Y, verbose=0).history
        return {f"history/{key}": np.array(values) for key, values in history.items()}

    assert_trains_equal(build, train, ("recompute",))


@pytest.mark.full
def test_the_whole_densenet_121_as_backbone():
    """keras#21207, with the model of the report."""
    images = np.random.default_rng(0).normal(size=(8, 32, 32, 3)).astype("float32")

    def build():
        backbone = keras.applications.DenseNet121(weights=None, include_top=False, input_shape=(32, 32, 3))
        return stack(keras.Input((32, 32, 3)), backbone)

    assert_trains_equal(build, lambda model: fit(compiled(model), images, Y), ("recompute",))


def test_every_weight_of_dense_blocks_has_a_gradient_and_memory_falls():
    """tensorflow#36981: recomputed BN-ReLU-convolution blocks lost gradients, and saved nothing."""
    model = converted(stack(keras.Input((8, 8, 3)), _dense_block, L.AveragePooling2D(2), _dense_block), "recompute")
    plan = compiled(model).build_plan(8)
    assert plan.planned_peak_bytes < 0.7 * plan.plain_peak_bytes
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(IMAGES, training=True) - Y) ** 2)
    for gradient in tape.gradient(loss, model.trainable_variables):
        assert gradient is not None
        assert np.any(gradient != 0)


class Scaled(L.Layer):
    """Takes tensors by keyword and in a dict, and returns a dict."""

    def call(self, x, *, scale, more):
        return {"scaled": x * scale[:, None], "shifted": x + more["shift"][:, None]}


def test_inputs_in_dicts_and_by_keyword():
    """keras#21094: tensors in dicts and keyword arguments are lost or in another order."""

    def build():
        x, scale, shift = keras.Input((6, 8), name="x"), keras.Input((8,), name="scale"), keras.Input((8,), name="a_shift")
        hidden = L.Dense(8, activation="tanh")(x)
        inside = {"b": keras.Input((6, 8), name="b"), "a": keras.Input((6, 8), name="a")}
        nested = keras.Model(inside, {"z": inside["a"] - 2.0 * L.Dense(8)(inside["b"])})
        for _ in range(2):
            both = Scaled()(hidden, scale=L.Dense(8)(scale), more={"shift": shift})
            hidden = L.Dropout(0.1)(nested({"a": both["scaled"], "b": both["shifted"]})["z"])
        inputs = {"x": x, "scale": scale, "a_shift": shift}
        return keras.Model(inputs, {"size": L.Dense(2)(ops.mean(hidden, 1)), "another": ops.mean(hidden, 1)})

    x = {"scale": X[:, 0], "x": X, "a_shift": X[:, 1]}
    y = {"size": Y, "another": X[:, 2]}
    assert_trains_equal(build, lambda model: fit(compiled(model, loss={"another": "mae", "size": "mse"}), x, y))


def test_raw_operations_between_layers():
    """keras#23106: operations that are no layers."""

    def operations(x):
        y = ops.where(x > 0, x, 0.1 * x)[:, ::-1, None, 1:]
        first, second = ops.split(ops.squeeze(y, 2), [3], axis=-1)
        y = ops.einsum("bij,bkj->bik", first, ops.concatenate([second[..., :2], first[..., :1]], -1))
        y = ops.softmax(y / np.float32(3.0)) @ (x - ops.mean(x, axis=1, keepdims=True))
        return ops.reshape(ops.stack([y, -y, abs(x)], axis=1), (-1, 3 * x.shape[1], 8)) + np.linspace(0, 1, 8, dtype="float32")

    def build():
        return stack(keras.Input((6, 8)), L.Dense(8), operations, L.Dense(8, activation="gelu"), operations, L.Dense(4))

    assert_trains_equal(build, lambda model: fit(compiled(model), X), (RECOMPUTE_EACH, "offload"))


def test_attention_draws_its_dropout_once():
    """tensorflow#30265, tensorflow#30418, bert4keras#521: a recomputed attention drew another mask."""

    def build():
        attention = [L.MultiHeadAttention(2, 4, dropout=0.5, seed=i) for i in range(2)]
        return stack(keras.Input((6, 8)), *[lambda x, a=a: x + a(x, x) for a in attention])

    trained = assert_trains_equal(build, lambda model: fit(compiled(model), X), (RECOMPUTE_EACH, "offload"))
    states = [value for key, value in trained.items() if "seed" in key]
    assert len(states) == 2
    for place, state in enumerate(states):
        np.testing.assert_array_equal(state, [place, 2])  # two steps


def test_batch_normalization_counts_each_batch_once():
    """pytorch#96136: recomputation updates the statistics a second time, and evaluation differs."""

    def build():
        return stack(keras.Input((6, 8)), *[part for _ in range(2) for part in (L.Dense(8), L.BatchNormalization(momentum=0.5))])

    def train(model):
        logs = fit(compiled(model, metrics=["mae"]), X)
        return logs | {"evaluated": np.array(model.evaluate(X, Y, verbose=0)), "predicted": model.predict(X, verbose=0)}

    assert_trains_equal(build, train)


class Unaware(L.Layer):
    """Composite layers whose `call()` knows nothing of `training`."""

    def __init__(self, depth=1, **kwargs):
        super().__init__(**kwargs)
        self.inner = Unaware(depth - 1) if depth else keras.Sequential([L.Dense(8, activation="relu"), L.GaussianNoise(0.1)])
        self.drop, self.norm = L.Dropout(0.3), L.BatchNormalization()

    def build(self, shape):
        self.inner.build(shape)
        self.norm.build(shape)

    def call(self, x):
        return x + self.drop(self.norm(self.inner(x)))


def test_layers_inside_a_layer_that_does_not_know_of_training():
    """Composite layers were recomputed, or run, as in inference."""
    trained = assert_trains_equal(
        lambda: stack(keras.Input((6, 8)), Unaware(), Unaware(0)),
        lambda model: fit(compiled(model), X),
        (RECOMPUTE_EACH, "recompute"),
    )
    assert all(np.any(value != 0) for key, value in trained.items() if "moving_mean" in key)


class ReadsMask(L.Layer):
    """Its result is another one without the mask."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_masking = True

    def call(self, x, mask=None):
        assert mask is not None
        return x * ops.cast(mask, x.dtype)[..., None] + ops.mean(ops.cast(mask, x.dtype))


def test_masks_reach_recomputed_layers():
    """Masks were lost on the way through recomputed blocks."""

    def build():
        attention = L.MultiHeadAttention(2, 4)
        layers = [
            ReadsMask(),
            L.LSTM(8, return_sequences=True),
            ReadsMask(),
            L.TimeDistributed(L.Dense(8)),
            lambda x: attention(x, x),
        ]
        return stack(
            keras.Input((6,), dtype="int32"), L.Embedding(11, 8, mask_zero=True), *layers, L.GlobalAveragePooling1D(), pool=False
        )

    assert_trains_equal(build, lambda model: fit(compiled(model), TOKENS), (RECOMPUTE_EACH, "offload"))


@pytest.mark.parametrize("dtype", ["mixed_float16", pytest.param("mixed_bfloat16", marks=pytest.mark.full)])
def test_mixed_precision(dtype):
    """tf-keras#197: recomputation in another precision than the forward pass."""

    def build():
        keras.config.set_dtype_policy(dtype)
        attention = L.MultiHeadAttention(2, 4, dropout=0.1)
        return stack(keras.Input((6, 8)), L.Dense(8, activation="gelu"), lambda x: attention(x, x), L.LayerNormalization())

    try:
        assert_trains_equal(build, lambda model: fit(compiled(model), X), (RECOMPUTE_EACH,))
    finally:
        keras.config.set_dtype_policy("float32")


def test_logs_show_the_unscaled_loss_and_overflows_skip_the_same_steps():
    """keras#19479: the loss in the logs was multiplied by the scale."""

    def build():
        keras.config.set_dtype_policy("mixed_float16")
        return stack(keras.Input((6, 8)), L.Dense(16, activation="relu"), L.BatchNormalization(), L.Dense(8))

    def train(model):
        scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**18, dynamic_growth_steps=2)
        logs = fit(compiled(model, optimizer=scaled), X, epochs=4)
        assert int(scaled.inner_optimizer.iterations) < 8, "no step overflowed"
        assert int(scaled.inner_optimizer.iterations) > 0, "all steps overflowed"
        return logs

    try:
        logs = assert_trains_equal(build, train, (RECOMPUTE_EACH, "offload"))
    finally:
        keras.config.set_dtype_policy("float32")
    assert np.all(logs["history/loss"] < 10)


def test_frozen_embeddings_and_a_frozen_first_half():
    """transformers#23170: nothing behind frozen layers had a gradient."""

    def build():
        frozen = [L.Embedding(11, 8, name="frozen_a"), L.Dense(8, "relu", name="frozen_b"), L.BatchNormalization(name="frozen_c")]
        for layer in frozen:
            layer.trainable = False
        return stack(keras.Input((6,), dtype="int32"), *frozen, L.Dense(8, "relu"), L.Dropout(0.2), L.BatchNormalization())

    trained = assert_trains_equal(build, lambda model: fit(compiled(model), TOKENS), (RECOMPUTE_EACH, "recompute"))
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    before = {f"model/{v.path}": keras.ops.convert_to_numpy(v) for v in build().variables}
    for key, value in before.items():
        assert np.array_equal(trained[key], value) == ("frozen" in key), key


@pytest.mark.parametrize("uses", [pytest.param(2, marks=pytest.mark.full), 3])
def test_a_weight_in_several_regions(uses):
    """pytorch#24005: only one of the gradients of a shared weight arrived."""

    def build():
        shared = L.Dense(8, activation="tanh")
        return stack(keras.Input((6, 8)), *[part for _ in range(uses) for part in (shared, L.LayerNormalization())])

    assert_trains_equal(build, lambda model: fit(compiled(model), X), (RECOMPUTE_EACH, "recompute"))
