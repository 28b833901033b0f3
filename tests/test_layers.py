"""`keras_sn.layers.Recompute`: any layer inside any model, with the numbers that the layer alone gives."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from parity import MODES, assert_equal, rewriting_off
from trained import trained_state

import keras_sn
from keras_sn.layers import Recompute

rewriting_off()

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(8, 6, 8)).astype("float32"), RANDOM.normal(size=(8, 2)).astype("float32")


@keras.saving.register_keras_serializable("test_layers")
class Block(L.Layer):
    """A transformer block without a `training` argument, with dropout, an added loss and a statistic."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.attention = L.MultiHeadAttention(2, 4, dropout=0.2)
        self.norm, self.drop = L.BatchNormalization(), L.Dropout(0.3)
        self.up, self.down = L.Dense(16, activation="gelu"), L.Dense(8)

    def call(self, x):
        x = x + self.drop(self.attention(x, x))
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(keras.ops.cast(x, "float32"))))
        return self.norm(x + self.down(self.up(x)))


def nested() -> keras.Model:
    inputs = keras.Input((6, 8))
    return keras.Model(inputs, L.Dropout(0.2)(L.Dense(8, activation="tanh")(inputs)))


def masked() -> keras.Model:
    return keras.Sequential([L.Masking(), L.SimpleRNN(8, return_sequences=True, recurrent_dropout=0.2)])


BLOCKS = {"composite": Block, "nested": nested, "masked": masked, "single": lambda: L.Dense(8, activity_regularizer="l2")}


def model_of(make, wrap, count=2) -> keras.Model:
    inputs = keras.Input((6, 8))
    x = L.Dense(8)(inputs)
    for _ in range(count):
        x = wrap(make())(x)
    return keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling1D()(x)))


def train(make, wrap, mode, dtype="float32"):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy(dtype)
    try:
        model = model_of(make, wrap)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", **MODES[mode])
        model.optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
        x = X * (np.arange(6) < 4)[:, None]  # for the masks
        history = model.fit(x, Y, batch_size=4, epochs=1 if mode == "xla" else 2, shuffle=False, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    return trained_state(model, history)


CASES = [(kind, mode, False) for kind in BLOCKS for mode in ("graph", "eager", "xla")]
CASES += [(kind, mode, True) for kind in BLOCKS for mode in ("graph", "eager")]  # XLA cannot offload
QUICK = {("composite", "graph", True), ("composite", "eager", False), ("masked", "graph", False), ("nested", "xla", False)}


@pytest.mark.parametrize(
    ("kind", "mode", "offload"), [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.full]) for one in CASES]
)
def test_equal_to_the_layer_alone(kind, mode, offload):
    plain = train(BLOCKS[kind], lambda layer: layer, mode)
    wrapped = train(BLOCKS[kind], lambda layer: Recompute(layer, offload=offload), mode)
    assert_equal(wrapped, plain, exact=mode != "xla")


@pytest.mark.full
def test_equal_in_mixed_precision():
    plain = train(Block, lambda layer: layer, "graph", "mixed_float16")
    assert_equal(train(Block, Recompute, "graph", "mixed_float16"), plain, exact=True)


def test_xla_does_not_merge_the_recomputation_with_the_forward_pass():
    def build(wrap):
        inputs = keras.Input((6, 8))
        block = keras.Sequential([L.Dense(16, "tanh"), L.Dense(16, "tanh"), L.Dense(8, "tanh")])
        return keras.Model(inputs, L.Dense(2)(wrap(block)(inputs)))

    def optimized_products(model):
        @tf.function(jit_compile=True)
        def step(x):
            with tf.GradientTape() as tape:
                y = tf.reduce_mean(model(x, training=True) ** 2)
            return tape.gradient(y, model.trainable_variables)

        text = step.experimental_get_compiler_ir(tf.constant(X))(stage="optimized_hlo")
        return text.count(" dot(") + text.count("__onednn$matmul") + text.count("__cpu$runtime")

    assert optimized_products(build(Recompute)) == optimized_products(build(lambda layer: layer)) + 3


def test_it_does_what_recompute_grad_does():
    dense = L.Dense(8, activation="tanh")
    dense.build((None, 8))
    x = tf.constant(X[:, 0])
    ours = Recompute(dense)

    def gradients(function):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tf.reduce_sum(function(x) ** 2)
        return tape.gradient(y, [x, *dense.trainable_variables])

    theirs = gradients(tf.recompute_grad(lambda x: dense(x)))
    for a, b in zip(gradients(lambda x: ours(x, training=True)), theirs, strict=True):
        np.testing.assert_array_equal(a, b)


def test_save_and_load(tmp_path):
    model = model_of(Block, Recompute, count=1)
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, epochs=1, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded.layers[2], Recompute)
    assert isinstance(loaded.layers[2].layer, Block)
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))


def test_several_inputs_keyword_arguments_and_masks():
    keras.utils.set_random_seed(1)
    attention = L.MultiHeadAttention(2, 4)
    ours = Recompute(attention)
    x, mask = tf.constant(X), tf.constant(RANDOM.random((8, 6, 6)) < 0.5)
    expected = attention(x, x, attention_mask=mask)
    np.testing.assert_array_equal(ours(x, x, attention_mask=mask, training=True), expected)
    np.testing.assert_array_equal(ours(x, x, attention_mask=mask), expected)
    output, scores = ours(x, x, return_attention_scores=True, training=True)
    assert (output.shape, scores.shape) == ((8, 6, 8), (8, 2, 6, 6))


def test_inside_a_planned_model():
    def train_planned(wrap):
        keras.utils.set_random_seed(5)
        model = keras_sn.SNModel.from_model(model_of(Block, wrap, count=1), policy="recompute")
        model.compile("sgd", "mse", jit_compile=False)
        return trained_state(model, model.fit(X, Y, batch_size=4, shuffle=False, verbose=0))

    assert_equal(train_planned(Recompute), train_planned(lambda layer: layer), exact=True)


def test_only_layers_are_taken():
    with pytest.raises(TypeError, match=r"Received: layer=3"):
        Recompute(3)
