"""`verify="first_step"`: equal models pass and are left as they were; a layer that changes its mind is named."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_sn
from keras_sn.errors import PlanError, UnsupportedModelError, VerificationError

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(8, 6)).astype("float32"), RANDOM.normal(size=(8, 2)).astype("float32")


class Fickle(L.Layer):
    """Does something else each time it is called, unless `is_steady`."""

    def __init__(self, is_steady=False, **kwargs):
        super().__init__(**kwargs)
        self.is_steady, self.calls = is_steady, [0]

    def call(self, x):
        self.calls[0] += not self.is_steady
        return x * float(self.calls[0])


def fickle(is_steady=False, **settings):
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    x = L.Dropout(0.3)(L.BatchNormalization()(L.Dense(8, activation="relu", name="first")(inputs)))
    x = L.Dense(8, name="second")(Fickle(is_steady, name="fickle")(x))
    model = keras_sn.SNModel(inputs, L.Dense(2, name="head")(x), policy={"*": "recompute"}, verify="first_step", **settings)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
    return model


class Net(keras_sn.SNModel):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.block, self.out = keras.Sequential([L.Dense(8, activation="relu"), L.Dropout(0.5)]), L.Dense(2)

    def call(self, x, training=None):
        return self.out(self.block(x, training=training))


class Unseeded(L.Layer):
    def call(self, x):
        return x * keras.random.uniform(keras.ops.shape(x), dtype=x.dtype)


@pytest.mark.parametrize("jit", [False, True])
def test_dropout_is_verified_with_and_without_xla(jit, caplog):
    """XLA draws other masks, so both steps must be compiled by it, or neither."""
    inputs = keras.Input((6,))
    x = L.Dropout(0.4)(L.Dense(8, activation="tanh")(inputs))
    for model in (
        keras_sn.SNModel(inputs, L.Dense(2)(x), policy={"*": "recompute"}, verify="first_step"),
        Net(policy="recompute", verify="first_step"),
    ):
        model.compile("sgd", "mse", jit_compile=jit)
        caplog.clear()
        with caplog.at_level("INFO", "keras_sn"):
            model.fit(X, Y, batch_size=4, verbose=0)
        assert "verified" in caplog.text


class FickleNet(keras_sn.SNModel):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.first, self.drop, self.fickle = L.Dense(8, activation="tanh"), L.Dropout(0.3), Fickle(name="fickle")
        self.out = L.Dense(2)

    def call(self, x):
        for layer in (self.first, self.drop, self.fickle, self.out):
            x = layer(x)
        return x


def test_a_layer_that_changes_its_mind_is_named_in_a_model_with_its_own_call():
    keras.utils.set_random_seed(1)
    model = FickleNet(policy="recompute", verify="first_step")
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(VerificationError, match="at layer 'fickle', which gives other outputs each time"):
        model.fit(X, Y, verbose=0)
    assert model.optimizer.iterations == 0
    assert np.array(model.drop.seed_generator.state)[1] == 0  # no draw was taken


def test_layers_that_draw_from_the_global_seed_are_verified():
    inputs = keras.Input((6,))
    model = keras_sn.SNModel(inputs, L.Dense(2)(Unseeded()(L.Dense(6)(inputs))), policy="recompute", verify="first_step")
    model.compile("sgd", "mse", jit_compile=False)
    keras.utils.set_random_seed(2)  # the seed is made anew
    model.fit(X, Y, verbose=0)


def test_replicas_are_verified(caplog):
    # TensorFlow's collective operations of a second strategy in a process may meet those of the first.
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"], tf.distribute.ReductionToOneDevice())
    with strategy.scope():
        inputs = keras.Input((6,))
        x = L.Dropout(0.2)(L.BatchNormalization()(L.Dense(6)(inputs)))
        model = keras_sn.SNModel(inputs, L.Dense(2)(x), policy="recompute", verify="first_step")
        model.compile("sgd", "mse", jit_compile=False)
    with strategy.scope(), pytest.raises(UnsupportedModelError, match=r"call `fit` after it. Received: MirroredStrategy"):
        model.fit(X, Y, verbose=0)
    with caplog.at_level("INFO", "keras_sn"):
        model.fit(X, Y, verbose=0)
    assert "verified" in caplog.text


@pytest.mark.parametrize("feed", ["arrays", "generator", "train_on_batch"])
def test_a_layer_that_changes_its_mind_is_named(feed):
    model = fickle()
    before = [np.array(variable) for variable in model.variables]
    train = {
        "arrays": lambda: model.fit(X, Y, verbose=0),
        "generator": lambda: model.fit((batch for batch in [(X, Y)]), verbose=0),
        "train_on_batch": lambda: model.train_on_batch(X, Y),
    }
    with pytest.raises(VerificationError, match=r"(loss|gradient).*at layer 'fickle'.*Received: model.*policy 'dict'"):
        train[feed]()
    for variable, old in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(variable, old)


def test_an_equal_model_is_left_as_it_was():
    def train(verify):
        keras.utils.set_random_seed(1)
        model = Net(policy="recompute", verify=verify)
        model.compile("adam", "mse", metrics=["mae"], jit_compile=False)
        history = model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0).history
        assert model.plan.regions
        return history

    assert train("first_step") == train(None)


def test_the_first_batch_is_verified_once_and_trained_on(caplog):
    model = fickle(is_steady=True)
    seen = []

    def batches():
        for start in (0, 4):
            seen.append(start)
            yield X[start : start + 4], Y[start : start + 4]

    with caplog.at_level("INFO", logger="keras_sn"):
        model.fit(batches(), verbose=0)
        model.fit(X, Y, verbose=0)
    assert seen == [0, 4]
    assert model.optimizer.iterations == 3
    assert sum("verified" in record.message for record in caplog.records) == 1


def test_only_one_word_is_known():
    with pytest.raises(PlanError, match=r"Received: verify='always'"):
        Net(verify="always")
