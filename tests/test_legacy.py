"""Keras 2 models brought over: equal outputs, equal training from where they were, and a sentence for what cannot be."""

import os
import subprocess
import sys
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tf_keras import layers as K
from tf_keras import optimizers as O

from keras_sn.errors import BudgetError, KerasSNError, UnsupportedModelError
from keras_sn.legacy import from_tf_keras
from keras_sn.legacy_config import TensorFlowFunction
from keras_sn.model import SNModel


@pytest.fixture(autouse=True)
def _clean_tf_keras():
    tf_keras.backend.clear_session()
    tf_keras.utils.set_random_seed(1)


# --- models


def _functional(call, *shapes, **options):
    inputs = [tf_keras.Input(shape, name=f"in{place}", **options) for place, shape in enumerate(shapes)]
    return tf_keras.Model(inputs if len(inputs) > 1 else inputs[0], call(*inputs))


def _mlp():
    hidden = K.Dense(4, activation="relu", kernel_regularizer="l2", kernel_constraint="max_norm", input_shape=(5,), name="a/b")
    return tf_keras.Sequential([hidden, K.Dropout(0.2), K.Dense(3, kernel_initializer="he_normal", activation="softmax")])


def _conv():
    rest = [K.DepthwiseConv2D(3), K.SeparableConv2D(3, 2), K.Conv2DTranspose(3, 2), K.LeakyReLU(0.2), K.ThresholdedReLU(0.1)]
    start = [tf_keras.Input((8, 8, 3)), K.Conv2D(4, 3, use_bias=False), K.BatchNormalization(axis=[3]), K.ReLU(6.0)]
    return tf_keras.Sequential([*start, *rest, K.SpatialDropout2D(0.1), K.GlobalAveragePooling2D()])


def _masked(*layers):
    embedding = K.Embedding(9, 4, mask_zero=True, input_length=6)  # of an input of float32, as Keras 2 makes it
    return tf_keras.Sequential([embedding, *layers, K.Dense(2)])


def _bidirectional():
    backward = K.GRU(3, go_backwards=True, return_sequences=True, time_major=False, implementation=1)
    wrapped = K.Bidirectional(K.GRU(3, return_sequences=True), backward_layer=backward, merge_mode="sum")
    return _functional(lambda x: K.LSTM(2, recurrent_activation="hard_sigmoid")(wrapped(K.Masking()(x))), (7, 4))


def _states(x):
    _, *states = K.LSTM(4, return_state=True, unit_forget_bias=False)(x)
    return K.LSTM(4)(x, initial_state=states), K.RNN([K.LSTMCell(3), K.GRUCell(2)])(x)


def _nested():
    x = tf_keras.Input((4,))
    inner = tf_keras.Model(x, K.BatchNormalization()(K.Dense(4, name="shared")(x)), name="inner")
    outer = tf_keras.Sequential([inner, K.Dense(3)], name="outer")
    return _functional(lambda a, b: [K.Add()([inner(a), inner(b)]), outer(inner(b))], (4,), (4,))


def _dicts():
    a, b = tf_keras.Input((3,), name="a"), tf_keras.Input((3,), dtype="int32", name="b")
    looked_up = K.Flatten()(K.Embedding(5, 2)(b))
    return tf_keras.Model({"a": a, "b": b}, {"sum": K.Dense(2)(a), "both": [K.Concatenate()([a, looked_up]), looked_up]})


def _functions(x, y):
    joined = tf.concat([x * 2.0 + y, 1.0 - x], -1)[:, 1:, tf.newaxis, ..., ::2]
    product = tf.einsum("abc,adc->abd", x, y)
    return {"joined": joined, "product": product, "mean": tf.cast(tf.reduce_mean(x, 1), tf.float16), "parts": tf.split(y, 2, 2)}


def _attention(x):
    attended, scores = K.MultiHeadAttention(2, 3, dropout=0.1)(x, x, return_attention_scores=True)
    return K.LayerNormalization()(attended + x), scores, K.Attention(use_scale=True)([x, x])


def _wrapped(x):
    inner = tf_keras.Sequential([K.Dense(3, input_shape=(4,)), K.BatchNormalization()])
    doubled = K.Lambda(lambda t, by=1.0: t * by, arguments={"by": 2.0})(x)
    return K.TimeDistributed(inner)(K.EinsumDense("abc,cd->abd", (None, 4))(doubled))


def _adapted(x):
    normalization = K.Normalization()
    normalization.adapt(np.random.default_rng(0).normal(3.0, 2.0, size=(20, 4)))
    return normalization(x)


MODELS = {
    "mlp": _mlp,
    "conv": _conv,
    "lstm": lambda: _masked(K.LSTM(4, dropout=0.1)),
    "gru": lambda: _masked(K.GRU(4, reset_after=False, return_sequences=True), K.SimpleRNN(3)),
    "bidirectional": _bidirectional,
    "states": lambda: _functional(_states, (5, 3)),
    "nested": _nested,
    "dicts": _dicts,
    "functions": lambda: _functional(_functions, (7, 4), (7, 4)),
    "attention": lambda: _functional(_attention, (7, 4)),
    "wrapped": lambda: _functional(_wrapped, (7, 4)),
    "adapted": lambda: _functional(_adapted, (4,)),
    "open axes": lambda: _functional(lambda x: K.GlobalMaxPool2D()(K.Conv2D(3, 3, strides=2)(x)), (None, None, 3)),
}


def _batch(model, count=4):
    generator = np.random.default_rng(3)
    shapes = {tensor.node.layer.name: [9 if size is None else size for size in tensor.shape[1:]] for tensor in model.inputs}
    has_embedding = any(isinstance(layer, K.Embedding) for layer in model.submodules)
    make = (lambda shape: generator.integers(0, 5, shape)) if has_embedding else lambda shape: generator.normal(size=shape)
    batch = {name: make((count, *shape)).astype("float32") for name, shape in shapes.items()}
    return batch if isinstance(model.input, dict) else list(batch.values()) if len(batch) > 1 else next(iter(batch.values()))


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_equal(name):
    model = MODELS[name]()
    if not model.inputs:
        model.build((None, 6))
    weights = model.get_weights()
    converted = from_tf_keras(model, memory_budget="1GiB")
    batch = _batch(model)
    assert isinstance(converted, SNModel)
    assert not converted.compiled
    expected, outputs = model(batch, training=False), converted.predict(batch, verbose=0)
    for before, after in zip(tf.nest.flatten(expected), keras.tree.flatten(outputs), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)
    for before, after in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(after, before)


def test_names_flags_and_shared_layers_are_kept():
    model = _nested()
    model.get_layer("inner").get_layer("shared").trainable = False
    converted = from_tf_keras(model, policy={"inner": "keep", "*": "recompute"})
    assert converted.name == model.name
    assert {layer.name for layer in converted.layers} == {layer.name for layer in model.layers}
    inner, outer = converted.get_layer("inner"), converted.get_layer("outer")
    assert inner in outer.layers
    assert not inner.get_layer("shared").trainable
    assert len(converted.trainable_variables) == len(model.trainable_variables) == 4
    model.trainable = False
    assert not from_tf_keras(model).trainable_variables
    assert from_tf_keras(_mlp()).get_layer("a_b").kernel_constraint.max_value == 2  # Keras 3 allows no slash


def test_a_call_in_inference_mode_where_nothing_differs():
    frozen = K.BatchNormalization(trainable=False)
    converted = from_tf_keras(_functional(lambda x: K.Dropout(0.0)(frozen(K.Dense(3)(x), training=False), training=False), (4,)))
    assert len(converted.trainable_variables) == 2


def test_functions_are_saved_and_loaded(tmp_path):
    model = _functional(lambda x, y: tf.nn.relu(x[:, ::2] + y[:, -4:]), (7, 4), (7, 4))
    converted = from_tf_keras(model)
    converted.save(tmp_path / "model.keras")
    batch = _batch(model)
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded.predict(batch, verbose=0), converted.predict(batch, verbose=0))


# --- training goes on


def _two_headed():
    x = tf_keras.Input((6,), name="x")
    hidden = K.BatchNormalization()(K.Dense(5, kernel_regularizer="l2", activity_regularizer="l1", bias_constraint="non_neg")(x))
    model = tf_keras.Model(x, [K.Dense(1, name="q")(hidden * 2.0), K.Dense(3, activation="softmax", name="p")(hidden)])
    losses = {"p": "sparse_categorical_crossentropy", "q": tf_keras.losses.Huber()}
    metrics = {"p": ["accuracy", tf_keras.metrics.SparseTopKCategoricalAccuracy(2)], "q": "mae"}
    return model, {"loss": losses, "metrics": metrics, "loss_weights": {"p": 2.0, "q": 0.5}}


def _sequences():
    layers = [K.Embedding(9, 4, mask_zero=True), K.LSTM(3, return_sequences=True), K.Dense(1)]
    return tf_keras.Sequential([tf_keras.Input((6,)), *layers]), {"loss": tf_keras.losses.mean_squared_error}


def _data(model):
    generator = np.random.default_rng(2)
    if len(model.outputs) == 1:
        return generator.integers(0, 9, (20, 6)), generator.normal(size=(20, 6, 1))
    return generator.normal(size=(20, 6)), [generator.normal(size=(20, 1)), generator.integers(0, 3, 20)]


@pytest.mark.parametrize(
    ("build", "optimizer", "policy"),
    [
        (
            _two_headed,
            lambda: O.SGD(O.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9, nesterov=True, clipnorm=1.0),
            "auto",
        ),
        (_two_headed, lambda: O.Adam(0.01, amsgrad=True), "recompute"),
        (_sequences, lambda: O.SGD(0.1, momentum=0.9), "recompute"),
    ],
    ids=["SGD", "Adam", "masked"],
)
def test_training_goes_on_from_where_it_was(build, optimizer, policy):
    model, arguments = build()
    model.compile(optimizer(), **arguments, jit_compile=False)
    x, y = _data(model)
    how = {"batch_size": 10, "shuffle": False, "verbose": 0}
    model.fit(x, y, **how)
    converted = from_tf_keras(model, policy=policy)
    assert int(converted.optimizer.iterations) == 2
    expected, history = model.fit(x, y, **how).history, converted.fit(x, y, **how).history
    assert history.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(history[key], values, rtol=1e-4, err_msg=key)
    for before, after in zip(model.get_weights(), converted.get_weights(), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-3, atol=1e-5)


def test_mixed_precision_with_its_loss_scale():
    tf_keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        x = tf_keras.Input((6,))
        model = tf_keras.Model(x, K.Activation("softmax", dtype="float32")(K.Dense(3)(K.Dense(4)(x) * 2.0)))
        inner = O.Adam(0.01)
        model.compile(tf_keras.mixed_precision.LossScaleOptimizer(inner, dynamic_growth_steps=2), "mse", jit_compile=False)
    finally:
        tf_keras.mixed_precision.set_global_policy("float32")
    x, y = np.random.default_rng(0).normal(size=(2, 30, 6)).astype("float32")
    how = {"batch_size": 10, "shuffle": False, "verbose": 0}
    model.fit(x, y[:, :3], **how)
    converted = from_tf_keras(model)
    assert converted.compute_dtype == "float16"
    assert float(converted.optimizer.dynamic_scale) == float(model.optimizer.loss_scale) == 2.0**16
    assert int(converted.optimizer.step_counter) == 1
    expected, history = model.fit(x, y[:, :3], **how).history, converted.fit(x, y[:, :3], **how).history
    np.testing.assert_allclose(history["loss"], expected["loss"], rtol=2e-3)
    assert float(converted.optimizer.dynamic_scale) == float(model.optimizer.loss_scale)


def _without_bias_decay():
    optimizer = O.AdamW(O.schedules.CosineDecay(0.1, 10), weight_decay=0.5)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    return optimizer


OPTIMIZERS = {
    "SGD": lambda: O.SGD(0.1, clipvalue=0.5, weight_decay=0.1),
    "Adam": lambda: O.Adam(0.1, global_clipnorm=0.5),
    "Adam with averages": lambda: O.Adam(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=4),
    "AdamW": _without_bias_decay,
    "RMSprop": lambda: O.RMSprop(0.1, momentum=0.5, centered=True),
    "Adagrad": lambda: O.Adagrad(O.schedules.PiecewiseConstantDecay([2], [0.1, 0.2])),
    "Adadelta": lambda: O.Adadelta(1.0),
    "Adamax": lambda: O.Adamax(0.1),
    "Nadam": lambda: O.Nadam(0.1),
    "Ftrl": lambda: O.Ftrl(0.1, l1_regularization_strength=0.01),
    "Lion": lambda: O.Lion(0.1),
    "legacy SGD": lambda: O.legacy.SGD(0.1, momentum=0.9, decay=0.1, clipvalue=0.5),
    "legacy Adam": lambda: O.legacy.Adam(0.1, amsgrad=True, clipnorm=0.5),
    "legacy RMSprop": lambda: O.legacy.RMSprop(0.1, momentum=0.5, centered=True),
    "legacy RMSprop without momentum": lambda: O.legacy.RMSprop(0.1),
    "legacy Adagrad": lambda: O.legacy.Adagrad(0.1),
    "legacy Adadelta": lambda: O.legacy.Adadelta(1.0),
    "legacy Adamax": lambda: O.legacy.Adamax(0.1),
    "legacy Ftrl": lambda: O.legacy.Ftrl(0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_go_on_from_where_they_were(name):
    model = tf_keras.Sequential([tf_keras.Input((3,)), K.Dense(2, bias_initializer="ones")])
    model.compile(OPTIMIZERS[name](), "mse")
    gradients = [[np.random.default_rng(step).normal(size=w.shape).astype("float32") for w in model.weights] for step in range(5)]

    def steps(one, which):
        for step in which:
            one.optimizer.apply_gradients(zip(map(tf.constant, gradients[step]), one.trainable_variables, strict=True))

    steps(model, range(3))
    converted = from_tf_keras(model)
    for one in (model, converted):
        steps(one, range(3, 5))
    for before, after in zip(model.get_weights(), converted.get_weights(), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5 file")
def test_a_compiled_model_from_a_file(tmp_path):
    model, arguments = _two_headed()
    model.compile(O.legacy.Adam(0.01), **arguments)
    x, y = _data(model)
    model.train_on_batch(x, y)
    model.save(tmp_path / "old.h5")
    converted = from_tf_keras(tf_keras.models.load_model(tmp_path / "old.h5"))
    expected, logs = model.train_on_batch(x, y, return_dict=True), converted.train_on_batch(x, y, return_dict=True)
    assert logs.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(logs[key], value, rtol=1e-5, err_msg=key)
    for before, after in zip(model.get_weights(), converted.get_weights(), strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-4, atol=1e-6)


def test_a_fixed_loss_scale():
    model = tf_keras.Sequential([tf_keras.Input((3,)), K.Dense(2)])
    model.compile(tf_keras.mixed_precision.LossScaleOptimizer(O.SGD(0.1), dynamic=False, initial_scale=8), "mse")
    converted = from_tf_keras(model)
    assert isinstance(converted.optimizer, keras.optimizers.SGD)
    assert converted.optimizer.loss_scale_factor == 8.0


def test_losses_and_metrics_by_configuration_and_name():
    model = tf_keras.Sequential([tf_keras.Input((3,)), K.Dense(2)])
    losses, metrics = tf_keras.losses, tf_keras.metrics
    loss = losses.BinaryCrossentropy(from_logits=True, label_smoothing=0.1, reduction="sum")
    model.compile(
        "rmsprop", loss, [metrics.mae, "acc", metrics.AUC(name="area"), _own], weighted_metrics=["mse"], run_eagerly=True
    )
    config = from_tf_keras(model, custom_objects={"_own": _own}).get_compile_config()
    settings = config["loss"]["config"]
    assert (settings["from_logits"], settings["label_smoothing"], settings["reduction"]) == (True, 0.1, "sum")
    assert config["metrics"][:2] == ["mean_absolute_error", "acc"]
    assert config["metrics"][2]["config"]["name"] == "area"
    assert config["weighted_metrics"] == ["mse"]
    assert config["run_eagerly"]


def _own(y, outputs):
    return tf.reduce_mean((y - outputs) ** 2, axis=-1)


# --- what is refused


class _Scale(K.Layer):
    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=shape[-1:], initializer="ones")

    def call(self, x):
        return x * self.scale


class _Scale3(keras.Layer):
    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=shape[-1:], initializer="zeros")

    def call(self, x):
        return x * self.scale


class _WrongScale(_Scale3):
    def call(self, x):
        return x * self.scale + 0.1


class _WiderScale(_Scale3):
    def build(self, shape):
        super().build(shape)
        self.offset = self.add_weight(name="offset", shape=(2,))


def _own_activation(x):
    return x + 0.1


class _OwnCall(tf_keras.Model):
    def call(self, x):
        return x


class _OwnStep(tf_keras.Model):
    def train_step(self, data):
        return super().train_step(data)


def _scaled():
    inner = tf_keras.Sequential([tf_keras.Input((4,)), K.Dense(4), _Scale(name="scale")], name="inner")
    return _functional(lambda x: K.Dense(2)(inner(x)), (4,))


def _with_added_loss(*, symbolic):
    layer = K.Dense(3)
    model = _functional(layer, (4,))
    model.add_loss(tf.reduce_sum(model.output) if symbolic else lambda: tf.reduce_sum(layer.kernel**2) + 1.0)
    return model


def _tied(x):
    embedding = K.Embedding(9, 5)
    return tf.matmul(embedding(x), embedding.embeddings, transpose_b=True)


def _compiled(optimizer="sgd", loss="mse", metrics=None):
    model = tf_keras.Sequential([tf_keras.Input((3,)), K.Dense(3)])
    model.compile(optimizer, loss, metrics)
    return model


def _one(layer, shape=(4, 3), **options):
    return lambda: _functional(layer, shape, **options)


class _OwnOptimizer(O.SGD):
    pass


REFUSALS = {
    "Keras 3": (lambda: keras.Sequential([keras.Input((3,))]), r"SNModel\.from_model.* Received: <Sequential"),
    "no model": (lambda: 3, "of the package tf_keras. Received: 3"),
    "unbuilt": (lambda: tf_keras.Sequential([K.Dense(3)], name="net"), r"Model 'net' is not a built.*build\(input_shape\)"),
    "own call": (_OwnCall, r"_OwnCall has its own `call\(\)`"),
    "own step": (lambda: _OwnStep(x := tf_keras.Input((3,)), K.Dense(2)(x)), r"_OwnStep has its own `train_step\(\)`"),
    "own call inside": (lambda: _functional(_OwnCall(name="own"), (3,)), "Layer 'own'.* class _OwnCall.*custom_objects="),
    "own layer": (_scaled, "Layer 'inner/scale'.* no counterpart of layer class _Scale.*custom_objects={'_Scale'"),
    "unknown layer": (_one(K.LocallyConnected1D(2, 2, name="local")), "Layer 'local'.*LocallyConnected1D"),
    "time major": (_one(K.LSTM(3, time_major=True, name="rnn")), "Layer 'rnn' cannot be made.*time_major.*Received: LSTM"),
    "stateful": (lambda: _functional(K.GRU(3, stateful=True, name="rnn"), (4, 3), batch_size=2), "Layer 'rnn': .*stateful=False"),
    "ragged": (_one(K.LSTM(3), (None, 3), ragged=True), "Input 'in0' is sparse, ragged.*RaggedTensorSpec"),
    "sparse": (_one(K.Dense(3), (3,), sparse=True), "Input 'in0' is sparse, ragged.*SparseTensorSpec"),
    "strings": (_one(K.StringLookup(vocabulary=["a"]), (1,), dtype="string"), "Input 'in0' .*of strings.*Received: TensorSpec"),
    "own activation": (_one(K.Dense(3, _own_activation, name="own")), r"Layer 'own' .*'_own_activation'.*Received: Dense\("),
    "dropout between": (
        _one(lambda x: tf.nn.dropout(x, 0.1)),
        r"Layer 'tf\.nn\.dropout': .*SeedGenerator.*Received: tf\.nn\.dropout",
    ),
    "in training": (_one(lambda x: K.Dropout(0.1, name="drop")(x, training=True)), "Layer 'drop' is called with training=True"),
    "in inference": (_one(lambda x: K.BatchNormalization(name="bn")(x, training=False)), "Layer 'bn' .*training=False.*freeze"),
    "added loss": (lambda: _with_added_loss(symbolic=True), r"Layer 'tf\.math\.reduce_sum.*' is not between"),
    "loss function": (
        lambda: _with_added_loss(symbolic=False),
        r"losses that layers add.*Received: [\d.]+ in Keras 2, 0 in Keras 3",
    ),
    "tied weights": (lambda: _functional(_tied, (4,), dtype="int32"), "variable 'embedding/embeddings:0' outside the layer"),
    "failing": (
        _one(lambda x: tf.ensure_shape(x, (7, 4, 3))),
        r"a random input makes one of them fail.*Received: inputs \[\(\(2, 4, 3\)",
    ),
    "own loss": (lambda: _compiled(loss=_own), "no counterpart of loss '_own'.*custom_objects"),
    "metric": (lambda: _compiled(metrics=[tf_keras.metrics.MeanRelativeError([1.0])]), "metric 'MeanRelativeError'"),
    "own optimizer": (
        lambda: _compiled(_OwnOptimizer()),
        "Optimizer _OwnOptimizer cannot be made.*Received: _OwnOptimizer with {",
    ),
    "legacy Nadam": (lambda: _compiled(O.legacy.Nadam()), "Optimizer Nadam .*schedule_decay"),
    "decay twice": (
        lambda: _compiled(O.legacy.SGD(O.schedules.ExponentialDecay(1.0, 1, 0.5), decay=0.1)),
        "SGD .*schedule and `decay`",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_says_what_is_wrong(name):
    build, sentence = REFUSALS[name]
    with pytest.raises(UnsupportedModelError, match=f"(?s){sentence}") as caught:
        from_tf_keras(build())
    assert " Received: " in str(caught.value)


def test_layers_of_ones_own():
    model = _scaled()
    scale = model.get_layer("inner").get_layer("scale")
    scale.set_weights([np.array([1.0, 2.0, 3.0, 4.0])])
    converted = from_tf_keras(model, custom_objects={"_Scale": _Scale3})
    np.testing.assert_array_equal(converted.get_layer("inner").get_layer("scale").scale, [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(UnsupportedModelError, match=r"Layer 'inner/scale' gives other outputs.*apart.*Received: _Scale\("):
        from_tf_keras(model, custom_objects={"_Scale": _WrongScale})
    with pytest.raises(UnsupportedModelError, match=r"weights of layer 'inner/scale' do not fit.*Received: .*\[\(4,\)\], not "):
        from_tf_keras(model, custom_objects={"_Scale": _WiderScale})


def test_a_budget_that_is_none():
    with pytest.raises(BudgetError, match="memory_budget"):
        from_tf_keras(_mlp(), memory_budget="much")


def test_functions_that_do_more_than_compute_are_refused():
    for function in ("random.normal", "load_op_library", "io.write_file", "nn.experimental.stateless_dropout", "py_function"):
        with pytest.raises(UnsupportedModelError, match="cannot be brought over"):
            TensorFlowFunction(function)


def test_tf_keras_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "tf_keras", None)
    with pytest.raises(KerasSNError, match=r"pip install 'keras-sn\[legacy\]'.* Received: "):
        from_tf_keras(SimpleNamespace())


def test_keras_sn_beside_keras_2():
    """With `TF_USE_LEGACY_KERAS` `tf.keras` is Keras 2, and keras_sn still trains Keras 3 models."""
    script = """
import keras_sn, keras, numpy as np, tensorflow as tf
from keras_sn.legacy import from_tf_keras
x, y = np.ones((4, 3)), np.ones((4, 2))
existing = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
model = keras_sn.SNModel.from_model(existing, policy="recompute")
old = tf.keras.Sequential([tf.keras.Input((3,)), tf.keras.layers.Dense(2)])
assert type(old).__module__.startswith("tf_keras"), type(old)
old.compile("sgd", "mse")
model.compile("sgd", "mse", jit_compile=False)
for one in (model, from_tf_keras(old)):
    assert np.isfinite(one.fit(x, y, verbose=0).history["loss"]).all()
assert model.plan.regions
"""
    environment = {**os.environ, "TF_USE_LEGACY_KERAS": "1", "CUDA_VISIBLE_DEVICES": "-1"}
    subprocess.run([sys.executable, "-c", script], check=True, env=environment, timeout=300)


def test_from_model_says_how_to_bring_a_model_of_keras_2_over():
    with pytest.raises(UnsupportedModelError, match=r"from_tf_keras\(model\)`. Received: <tf_keras"):
        SNModel.from_model(tf_keras.Sequential([K.Dense(2, input_shape=(3,))]))
