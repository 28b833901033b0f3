"""What people reported of Keras and TensorFlow about random numbers, traces, shapes and what stays in memory: not here."""

import gc
import random
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from keras import ops
from parity import rewriting_off
from reports import RECOMPUTE_EACH, X, Y, assert_trains_equal, compiled, converted, fit, stack

import keras_sn
from keras_sn.errors import UnsupportedModelError

rewriting_off()


class Noisy(L.Layer):
    """Has no rule, so that it is measured by tracing, and changes all kinds of state."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(1)
        self.counter = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.counter.assign_add(1.0)
        self.add_loss(0.1 * ops.mean(x))
        return x + keras.random.normal(ops.shape(x), seed=self.generator)


def test_planning_draws_no_random_number_and_changes_no_state():
    """keras#17548: to look at a model advanced its seeds."""
    model = stack(keras.Input((6, 8)), L.Dropout(0.5), Noisy(), L.BatchNormalization())
    keras.random.normal((1,))  # makes the global seed
    before = [*(np.array(v) for v in model.variables), np.array(keras.random.normal((3,), seed=1))]
    keras.utils.set_random_seed(9)
    expected = [random.random(), np.random.rand(), keras.random.normal((2,)), tf.random.normal((2,))]
    keras.utils.set_random_seed(9)
    for policy in ("auto", "recompute", "offload", "superneurons", RECOMPUTE_EACH):
        compiled(converted(model, policy)).build_plan(4)
    drawn = [random.random(), np.random.rand(), keras.random.normal((2,)), tf.random.normal((2,))]
    for value, old in zip(drawn, expected, strict=True):
        np.testing.assert_array_equal(value, old)
    for variable, old in zip(model.variables, before[:-1], strict=True):
        np.testing.assert_array_equal(variable, old)
    assert not model.losses


def test_a_hundred_steps_with_offload():
    """torchtune#1867: offloaded activations came back wrong or as NaN after some steps."""

    def build():
        return stack(
            keras.Input((6, 8)),
            *[part for _ in range(3) for part in (L.Dense(8, "relu"), L.Dropout(0.1), L.LayerNormalization())],
        )

    logs = assert_trains_equal(
        build, lambda model: fit(compiled(model), np.tile(X, (5, 1, 1)), np.tile(Y, (5, 1)), epochs=10), ("offload",)
    )
    assert np.all(np.isfinite(logs["history/loss"]))
    assert logs["history/loss"][-1] < logs["history/loss"][0]


def _traces(policy):
    model = converted(stack(keras.Input((None, 8)), L.Dense(8, "relu"), L.LayerNormalization(), L.Dense(8)), policy)
    traced, real = [], model.train_step
    model.train_step = lambda data: traced.append(tuple(data[0].shape)) or real(data)
    compiled(model)
    for length in (3, 6, 4, 6, 3):
        fit(model, X[:, :length], epochs=2, batch_size=3)  # of eight samples, two are left
    return traced, model


def test_new_lengths_and_last_batches_are_not_traced_more_often():
    """tensorflow#31842: each new shape traced the step anew, and each epoch."""
    plain, _ = _traces(None)
    planned, _ = _traces(RECOMPUTE_EACH)
    assert len(planned) <= len(plain)


@pytest.mark.parametrize("policy", [RECOMPUTE_EACH, "recompute", "offload"])
def test_an_optional_input_may_come_and_go(policy):
    class AddIfGiven(L.Layer):
        def call(self, x, extra=None):
            return x if extra is None else x + ops.mean(extra, axis=-1, keepdims=True)

    def build():
        x, extra = keras.Input((8,), name="x"), keras.Input((6,), name="extra", optional=True)
        hidden = AddIfGiven()(L.Dense(8, "tanh")(x), extra)
        return keras.Model({"x": x, "extra": extra}, L.Dense(2)(L.Dropout(0.2)(L.Dense(8, "relu")(hidden))))

    def train(model):
        compiled(model)
        given = X[:, 0], X[:, 1, :6]
        logs = {}
        for turn, extra in enumerate((None, given[1], None, given[1])):
            logs |= {f"{turn}/{key}": one for key, one in fit(model, {"x": given[0], "extra": extra}).items()}
        return logs

    assert_trains_equal(build, train, (policy,))


def test_one_line_on_an_existing_model():
    """keras-hub#2158: less memory for a model that someone else has built, compiled and trained."""
    existing = stack(keras.Input((6, 8)), L.Dense(8, "relu", name="a"), L.BatchNormalization(), L.Dropout(0.1))
    fit(compiled(existing), X)
    layers, config, predicted = list(existing.layers), existing.get_config(), existing.predict(X, verbose=0)
    model = keras_sn.SNModel.from_model(existing, policy="recompute")
    np.testing.assert_array_equal(model.predict(X, verbose=0), predicted)
    fit(compiled(model), X)
    assert existing.layers == layers
    assert existing.get_config() == config
    assert np.any(existing.predict(X, verbose=0) != predicted)
    np.testing.assert_array_equal(model.predict(X, verbose=0), existing.predict(X, verbose=0))
    fit(existing, X)  # and it still trains


def test_an_axis_of_size_zero():
    """tensorflow#89851: empty tensors broke the step."""

    def build():
        x, nothing = keras.Input((6, 8)), keras.Input((6, 0))
        hidden = L.Concatenate()([L.Dense(8, "relu")(x), L.Activation("relu")(nothing)])
        empty = L.Dropout(0.2)(hidden[:, 3:3])  # no steps
        hidden = L.Concatenate(axis=1)([L.Dense(8, "relu")(empty), L.LayerNormalization()(hidden)])
        return keras.Model([x, nothing], L.Dense(2)(ops.mean(hidden, axis=1)))

    policies = (RECOMPUTE_EACH, "recompute", "offload", "superneurons")
    assert_trains_equal(build, lambda model: fit(compiled(model), [X, X[..., :0]]), policies)


def _live(kind):
    return sum(isinstance(one, kind) for one in gc.get_objects())


@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.full)])
def test_models_that_are_dropped_leave_nothing_behind(count):
    """keras#17458: memory grew with each model that was built and dropped."""

    def build_and_drop(count):
        dropped = []
        for _ in range(count):
            model = converted(
                stack(keras.Input((6, 8)), L.Dense(8, "relu"), L.Dropout(0.1), L.LayerNormalization()), RECOMPUTE_EACH
            )
            compiled(model).train_on_batch(X[:4], Y[:4])
            dropped += [weakref.ref(model), weakref.ref(model.plan), *(weakref.ref(v) for v in model.variables)]
            del model
            keras.backend.clear_session(free_memory=False)
        for _ in range(3):  # what a finalizer lets go of is found the next time
            gc.collect()
        return [one() for one in dropped if one() is not None]

    build_and_drop(1)
    kinds = (keras.Variable, tf.Variable, type(tf.function(lambda: None)))
    before = [_live(kind) for kind in kinds]
    assert not build_and_drop(count)
    assert [_live(kind) for kind in kinds] <= before


RECURRENT = {
    "lstm": lambda: L.LSTM(6, stateful=True, name="remembers"),
    "both ways": lambda: L.Bidirectional(L.GRU(6, stateful=True, dropout=0.2), name="remembers"),
}


@pytest.mark.parametrize("verify", [None, "first_step"])
@pytest.mark.parametrize("kind", RECURRENT)
def test_stateful_recurrent_layers_remember_once(kind, verify):
    """Keras does not count what they remember among their variables."""
    series = np.random.default_rng(2).normal(size=(8, 6, 3)).astype("float32")
    losses = []
    for convert in (lambda model: model, lambda model: keras_sn.SNModel.from_model(model, policy=RECOMPUTE_EACH, verify=verify)):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(4)
        inputs = keras.Input(batch_shape=(4, 6, 3))
        x = RECURRENT[kind]()(L.Dense(5, activation="tanh")(inputs))
        model = convert(keras.Model(inputs, L.Dense(2)(x)))
        model.compile("sgd", "mse", jit_compile=False)
        losses.append(model.fit(series, Y[:8], batch_size=4, epochs=3, shuffle=False, verbose=0).history["loss"])
    assert all(region.recompute for region in model.plan.regions)
    assert losses[0] == losses[1]


def test_a_layer_that_updates_a_variable_of_nobody_is_named():
    foreign = keras.Variable(0.0, trainable=False)

    class Counting(L.Layer):
        def call(self, x):
            foreign.assign_add(1.0)
            return x

    inputs = keras.Input((8,))
    x = L.Activation("tanh")(Counting(name="counting")(L.Dense(8)(inputs)))
    model = keras_sn.SNModel(inputs, L.Dense(2)(x), policy=RECOMPUTE_EACH)
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(UnsupportedModelError, match=r"Layer 'counting' updates a variable .*Received: layer call 'counting'"):
        model.fit(np.ones((4, 8), "float32"), np.ones((4, 2), "float32"), verbose=0)
