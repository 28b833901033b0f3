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


def same(layer):
    return layer


@keras.saving.register_keras_serializable("test_layers")
class SelfBuilt(keras.Model):
    """Builds its layers in its own `build()`, as Keras advises."""

    def __init__(self, recompute=True, **kwargs):
        super().__init__(**kwargs)
        self.recompute = recompute
        wrap = Recompute if recompute else same
        self.up, self.attention = wrap(L.Dense(8, activation="gelu")), wrap(L.MultiHeadAttention(2, 4))
        self.inner = wrap(keras.Sequential([L.Dense(8), L.BatchNormalization()]))
        self.pool, self.head = L.GlobalAveragePooling1D(), L.Dense(2)

    def build(self, shape):
        self.up.build(shape)
        self.attention.build(shape, value_shape=shape)
        self.inner.build(shape)
        self.head.build(self.pool.compute_output_shape(self.inner.compute_output_shape(shape)))

    def call(self, x):
        return self.head(self.pool(self.inner(self.attention(self.up(x), x))))

    def get_config(self):
        return super().get_config() | {"recompute": self.recompute}


def self_built(recompute, seed=5) -> keras.Model:
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(seed)
    model = SelfBuilt(recompute, name="model")
    model.build((None, 6, 8))
    model.compile("adam", "mse", jit_compile=False)
    model.optimizer.build(model.trainable_variables)
    return model


def fit(model, **arguments):
    return model.fit(X, Y, **{"batch_size": 4, "shuffle": False, "verbose": 0} | arguments)


def plain_paths(model) -> list[str]:
    """The paths of the weights, without the names of the layers around them."""
    return ["/".join(part for part in v.path.split("/") if not part.startswith("recompute")) for v in model.variables]


def test_a_models_own_build_builds_it():
    plain, model = self_built(False), self_built(True)
    assert model.count_params() == plain.count_params()
    assert plain_paths(model) == plain_paths(plain)
    for ours, theirs in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert_equal(trained_state(model, fit(model, epochs=2)), trained_state(plain, fit(plain, epochs=2)), exact=True)


def test_weights_load_where_build_alone_has_run(tmp_path):
    trained, built = self_built(True), self_built(True, seed=6)
    fit(trained)
    trained.save_weights(tmp_path / "model.weights.h5")
    built.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(built.predict(X, verbose=0), trained.predict(X, verbose=0))


def test_a_training_is_backed_up_and_resumed(tmp_path):
    backup = keras.callbacks.BackupAndRestore(tmp_path, delete_checkpoint=False)
    straight, resumed = self_built(True), self_built(True, seed=6)
    fit(straight, callbacks=[backup])
    fit(resumed, epochs=2, callbacks=[backup])
    fit(straight)
    np.testing.assert_array_equal(resumed.predict(X, verbose=0), straight.predict(X, verbose=0))


@pytest.mark.parametrize("kind", ["own build", "time distributed"])
def test_a_loaded_model_trains_on(kind, tmp_path):
    def goes_on(recompute):
        model = self_built(recompute) if kind == "own build" else distributed(Recompute if recompute else same)
        fit(model)
        model.save(tmp_path / f"{recompute}.keras")
        keras.utils.set_random_seed(1)  # Keras does not save the seeds of all layers
        loaded = keras.saving.load_model(tmp_path / f"{recompute}.keras")
        history = fit(loaded)
        assert history.history == fit(model).history
        return trained_state(loaded, history)

    assert_equal(goes_on(True), goes_on(False), exact=True)


class Contextual(L.Layer):
    """Has a weight only where it is called with a context, and keeps from Keras what it returns."""

    def __init__(self):
        super().__init__(name="contextual")
        self.own, self.other = L.Dense(4), L.Dense(4)

    def build(self, x_shape, context_shape=None):
        self.own.build(x_shape)
        if context_shape is not None:
            self.other.build(context_shape)

    def call(self, x, context=None):
        y = self.own(x)
        return {"sum": y if context is None else y + self.other(context), "first": y}


@pytest.mark.parametrize("context", [(), ((6, 3),)])
def test_the_first_call_builds_the_layer_for_all_its_arguments(context):
    def weights(wrap):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        layer = wrap(Contextual())
        inputs = [keras.Input(shape) for shape in ((6, 8), *context)]
        model = keras.Model(inputs, layer(*inputs))
        return plain_paths(model), [v.numpy().tolist() for v in model.variables], model.output_shape

    assert weights(Recompute) == weights(same)
    assert len(weights(Recompute)[0]) == 2 + 2 * len(context)


def test_build_takes_what_the_layers_build_takes():
    attention = Recompute(L.MultiHeadAttention(2, 4))
    with pytest.raises(TypeError, match="value_shape"):
        attention.build((None, 6, 8))
    attention.build((None, 6, 8), value_shape=(None, 5, 7))
    assert attention.count_params() == attention.layer.count_params() > 0
    weights = attention.get_weights()
    attention.build((None, 6, 8), (None, 5, 7))  # once is enough
    np.testing.assert_array_equal(attention.get_weights()[0], weights[0])
    sequence = Recompute(L.LSTM(3))
    sequence.build(sequences_shape=(None, 6, 8))
    assert sequence.count_params() == sequence.layer.count_params() > 0


@pytest.mark.parametrize("first", ["build", "call"])
def test_weights_have_the_same_paths_whoever_builds_them(first):
    keras.backend.clear_session(free_memory=False)
    recomputed = Recompute(keras.Sequential([L.Dense(8, name="a"), L.LSTM(3, name="b")], name="layer"))
    recomputed.build((None, 6, 8)) if first == "build" else recomputed(X)
    kernels = [f"recompute_layer/layer/{one}" for one in ("a/kernel", "a/bias", "b/lstm_cell/kernel")]
    assert [v.path for v in recomputed.variables][:3] == kernels


def distributed(wrap, make=lambda: L.Dense(8, activation="gelu"), mode="graph") -> keras.Model:
    """A model of a wrapped layer for each step in time; the steps of each row of the data have another mask."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    inputs = keras.Input((6, 8))
    x = L.Masking()(L.Multiply()([inputs, keras.ops.cast(inputs[..., :1] > -0.5, "float32")]))
    x = L.TimeDistributed(wrap(make()))(x)
    model = keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling1D()(x)))
    model.compile("adam", "mse", **MODES[mode])
    model.optimizer.build(model.trainable_variables)
    return model


STEPS = {
    "single": lambda: L.Dense(8, activation="gelu"),
    "nested": lambda: keras.Sequential([L.Dense(8), L.BatchNormalization(), L.Dropout(0.2)]),
    "masked": L.BatchNormalization,
}


@pytest.mark.parametrize(("kind", "mode"), [("single", "graph"), ("nested", "graph"), ("masked", "graph"), ("masked", "eager")])
def test_in_time_distributed(kind, mode):
    models = [distributed(wrap, STEPS[kind], mode) for wrap in (Recompute, same)]
    assert models[0].count_params() == models[1].count_params()
    ours, theirs = (trained_state(model, fit(model, epochs=2)) for model in models)
    assert_equal(ours, theirs, exact=True)


def test_in_a_sequential_model_whose_optimizer_is_built_first():
    def train_sequential(wrap):
        keras.utils.set_random_seed(5)
        model = keras.Sequential([wrap(L.Dense(8, activation="gelu")), wrap(L.LSTM(4)), L.Dense(2)])
        assert model.compute_output_shape((None, 6, 8)) == (None, 2)
        model.build((None, 6, 8))
        model.compile("adam", "mse", jit_compile=False)
        model.optimizer.build(model.trainable_variables)
        return trained_state(model, fit(model))

    assert_equal(train_sequential(Recompute), train_sequential(same), exact=True)


SHAPE = (None, 6, 8)
TOLD = {
    "one": (lambda: L.Conv1D(4, 3, strides=2), [SHAPE]),
    "states": (lambda: L.LSTM(3, return_sequences=True, return_state=True), [SHAPE]),
    "nested states": (lambda: L.RNN([L.LSTMCell(3), L.GRUCell(4)], return_state=True), [SHAPE]),
    "two inputs": (lambda: L.MultiHeadAttention(2, 4), [SHAPE, (None, 5, 7)]),
    "list": (L.Concatenate, [[SHAPE, (None, 6, 3)]]),
    "nested": (lambda: keras.Sequential([L.Dense(5), L.LSTM(2)]), [SHAPE]),
    "twice": (lambda: Recompute(L.Bidirectional(L.GRU(3, return_state=True))), [SHAPE]),
}


@pytest.mark.parametrize("built", [False, True])
@pytest.mark.parametrize("kind", TOLD)
def test_outputs_are_told_as_by_the_layer(kind, built):
    make, shapes = TOLD[kind]

    def told(wrap):
        layer = wrap(make())
        tensors = [keras.tree.map_shape_structure(lambda shape: keras.Input(shape[1:]), shape) for shape in shapes]
        if built:
            layer.build(*shapes)
        specs = layer(*tensors), layer.compute_output_spec(*tensors)
        return layer.compute_output_shape(*shapes), keras.tree.map_structure(lambda one: (one.shape, one.dtype), specs)

    assert told(Recompute) == told(same)


def test_outputs_that_the_layer_does_not_tell_are_traced():
    x = keras.Input((6, 8))
    recomputed = Recompute(Contextual())
    assert {name: one.shape for name, one in recomputed(x).items()} == {"sum": (None, 6, 4), "first": (None, 6, 4)}
    with pytest.raises(NotImplementedError, match="Contextual"):
        recomputed.compute_output_shape((None, 6, 8))


def nested_blocks(recompute) -> keras.Model:
    wrap = Recompute if recompute else same
    return model_of(lambda: keras.Sequential([L.Dense(8), L.BatchNormalization()]), wrap)


@pytest.mark.parametrize("make", [self_built, nested_blocks])
@pytest.mark.parametrize("saved", [True, False])
def test_weight_files_between_models_with_it_and_without_it_are_refused(make, saved, tmp_path):
    source, target = make(saved), make(not saved)
    source.save_weights(tmp_path / "model.weights.h5")
    with pytest.raises(ValueError, match="could not be loaded"):
        target.load_weights(tmp_path / "model.weights.h5")
    target.set_weights(source.get_weights())
    np.testing.assert_array_equal(target.predict(X, verbose=0), source.predict(X, verbose=0))


def test_inputs_of_a_functional_model_are_cast_by_its_layers():
    """Keras casts the inputs of other layers, and of a functional model only in front of each layer."""
    data, losses = np.random.default_rng(0).normal(size=(8, 6)).astype("float32"), []
    for wrap in (lambda layer: layer, Recompute):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(1)
        keras.config.set_dtype_policy("mixed_bfloat16")
        try:
            first = keras.Input((6,))
            inner = keras.Model(first, L.Dense(8)(L.Dense(8, dtype="float32", activation="tanh")(first)))
            inputs = keras.Input((6,))
            model = keras.Model(inputs, L.Dense(2, dtype="float32")(wrap(inner)(inputs)))
        finally:
            keras.config.set_dtype_policy("float32")
        model.compile("sgd", "mse", jit_compile=False)
        losses.append(model.fit(data, data[:, :2], batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"])
    assert losses[0] == losses[1]
