"""Batch normalizations whose statistics a recomputation is given: the same numbers, and no sums."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_sn
from keras_sn import keras_internals
from keras_sn.batch_statistics import batch_statistics
from keras_sn.plan import Region, Saved

RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(8, 6, 6, 3)).astype("float32")
Y = RANDOM.normal(size=(8, 1)).astype("float32")


def gradients_of(layer, x, given):
    """What a normalization makes, its new state, and all gradients, in a graph."""

    @tf.function
    def run(x, given):
        with batch_statistics([layer], given) as noted, tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, training=True)
            loss = tf.reduce_sum(y**3)
        return y, noted, tape.gradient(loss, [x, *layer.trainable_variables])

    state = [v.numpy() for v in layer.non_trainable_variables]
    result = run(x, given)
    updated = [v.numpy() for v in layer.non_trainable_variables]
    for variable, before in zip(layer.non_trainable_variables, state, strict=True):
        variable.assign(before)
    return [np.asarray(one) for one in tf.nest.flatten((result[0], result[2]))] + updated, result[1], run


@pytest.mark.parametrize("axis", [-1, 1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_given_statistics_give_the_same_numbers_to_the_last_bit(axis, dtype):
    """Fails when Keras or TensorFlow computes moments in another way."""
    layer = L.BatchNormalization(axis=axis, dtype=dtype)
    x = tf.constant(X, dtype)
    layer.build(x.shape)
    plain, noted, _ = gradients_of(layer, x, [])
    again, _, _ = gradients_of(layer, x, list(noted))
    assert len(noted) == 2
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_array_equal(one, other)


def test_of_given_statistics_nothing_is_summed_again():
    layer = L.BatchNormalization()
    layer.build(X.shape)
    x = tf.constant(X)
    _, noted, _ = gradients_of(layer, x, [])
    *_, run = gradients_of(layer, x, list(noted))
    y, *_ = run.get_concrete_function(x, list(noted)).structured_outputs
    assert operations(y)
    assert not operations(y) & {"Mean", "SquaredDifference"}
    y, *_ = run.get_concrete_function(x, []).structured_outputs
    assert operations(y) >= {"Mean", "SquaredDifference"}


def operations(tensor):
    """The types of the operations that a tensor of a graph is made by."""
    reached, stack = set(), [tensor.op]
    while stack:
        operation = stack.pop()
        if operation not in reached:
            reached.add(operation)
            stack += [one.op for one in operation.inputs]
    return {operation.type for operation in reached}


def test_a_layer_is_as_before_afterwards():
    layer = L.BatchNormalization()
    layer.build(X.shape)
    with batch_statistics([layer]):
        assert "_moments" in vars(layer)
    assert "_moments" not in vars(layer)
    with pytest.raises(ZeroDivisionError), batch_statistics([layer]):
        raise ZeroDivisionError
    assert "_moments" not in vars(layer)


def test_others_compute_their_statistics_themselves():
    class Own(L.BatchNormalization):
        def _moments(self, inputs, mask):
            return super()._moments(inputs, mask)

    assert keras_internals.batch_moments_of(L.BatchNormalization()) is not None
    changed = L.BatchNormalization()
    changed._moments = lambda inputs, mask: (inputs[0], inputs[1])
    others = (Own(), changed, L.BatchNormalization(synchronized=True), L.LayerNormalization(), L.Dense(1))
    assert [keras_internals.batch_moments_of(layer) for layer in others] == [None] * 5


def convolutions(x, shared):
    for _ in range(2):
        x = L.Conv2D(4, 3, padding="same")(x)
        x = L.Activation("tanh")(shared(x))
    return x


def network(kind):
    keras.utils.set_random_seed(1)
    inputs = keras.Input(X.shape[1:])
    if kind == "shared":
        x = convolutions(inputs, L.BatchNormalization())
    elif kind == "renorm":
        x = convolutions(inputs, L.BatchNormalization(renorm=True))
    elif kind == "masked":
        x = L.Masking()(L.Reshape((36, 3))(inputs))
        x = L.BatchNormalization()(L.Dense(5, activation="tanh")(x))
        x = L.Reshape((6, 6, 5))(x)
    elif kind == "frozen":
        frozen = L.BatchNormalization()
        frozen.trainable = False
        x = convolutions(inputs, frozen)
    elif kind == "bfloat16":
        x = L.Conv2D(4, 3, dtype="mixed_bfloat16")(inputs)
        x = L.BatchNormalization(dtype="mixed_bfloat16")(x)
        x = L.Activation("tanh", dtype="float32")(x)
    return keras.Model(inputs, L.Dense(1)(L.GlobalAveragePooling2D()(x)))


def trained(model, **options):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", jit_compile=False)
    model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0, **options)
    return model.get_weights()


@pytest.mark.parametrize("kind", ["shared", "renorm", "masked", "frozen", "bfloat16"])
def test_training_equals_plain_keras(kind):
    plain = trained(network(kind))
    model = keras_sn.SNModel.from_model(network(kind), policy="recompute")
    own = trained(model)
    assert any(region.recompute for region in model.plan.regions)
    for one, other in zip(plain, own, strict=True):
        np.testing.assert_array_equal(one, other)


def region_of_all(plain):
    """The model as one region that recomputes everything."""
    planned = keras_sn.SNModel.from_model(keras.models.clone_model(plain), policy="recompute")
    planned.compile("sgd", "mse", jit_compile=False)
    planned.build_plan(4)
    names = tuple(name for region in planned.plan.regions for name in region.layers)
    regions = (Region(names, (Saved(planned.plan.regions[0].saved[0].tensor),)),)
    return replace(planned.plan, regions=regions)


def test_the_training_step_gives_statistics_to_the_backward_function(monkeypatch):
    seen = []
    run = keras_sn.regions.RegionFunction._backward

    def backward(self, inputs, masks, saved, trainable, state, statistics, *rest):
        seen.append([tuple(one.shape) for one in statistics])
        return run(self, inputs, masks, saved, trainable, state, statistics, *rest)

    monkeypatch.setattr(keras_sn.regions.RegionFunction, "_backward", backward)
    plain = network("shared")
    model = keras_sn.SNModel.from_model(plain, plan=region_of_all(plain))
    trained(model)
    assert [(4,)] * 4 in seen


class Penalized(keras.Model):
    """Asks for gradients of gradients in its training step."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as outer:
            with tf.GradientTape() as inner:
                inner.watch(x)
                prediction = self(x, training=True)
            penalty = tf.reduce_sum(inner.gradient(prediction, x) ** 2)
            loss = self.compute_loss(x, y, prediction) + penalty
        variables = self.trainable_variables
        self.optimizer.apply(outer.gradient(loss, variables), variables)
        return {"loss": loss}


def test_gradients_of_gradients_go_through_the_statistics():
    plain = network("shared")
    weights = trained(Penalized(plain.inputs, plain.outputs))
    other = network("shared")
    own = trained(keras_sn.SNModel.from_model(Penalized(other.inputs, other.outputs), policy="recompute"))
    for one, also in zip(weights, own, strict=True):
        np.testing.assert_allclose(one, also, rtol=2e-5, atol=1e-6)
