"""Small models, data and training for `test_reports_of_others` and `test_reports_of_state`."""

import keras
import numpy as np
from keras import layers as L
from keras import ops
from parity import assert_equal, small_tensors_leave
from trained import array, arrays, logged

import keras_sn

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(8, 6, 8)).astype("float32"), RNG.normal(size=(8, 2)).astype("float32")
IMAGES = RNG.normal(size=(8, 8, 8, 3)).astype("float32")
TOKENS = np.where(np.arange(6) < RNG.integers(2, 7, (8, 1)), RNG.integers(1, 11, (8, 6)), 0).astype("int32")
RECOMPUTE_EACH = {"*": "recompute"}


def stack(x, *layers, pool=True):
    """A model from an input through layers to two numbers."""
    y = x
    for layer in layers:
        y = layer(y)
    y = ops.mean(y, axis=tuple(range(1, len(y.shape) - 1))) if pool else y
    return keras.Model(x, L.Dense(2, dtype="float32", name="head")(y))


def converted(model, policy):
    return model if policy is None else keras_sn.SNModel.from_model(model, policy=policy)


def compiled(model, **arguments):
    model.compile(**{"optimizer": keras.optimizers.SGD(0.05, momentum=0.9), "loss": "mse", "jit_compile": False} | arguments)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
    return model


def changed_by_training(model):
    return {f"model/{v.path}": array(v) for v in model.variables} | arrays("optimizer", model.optimizer.variables)


def fit(model, x, y=Y, **arguments):
    return logged(model.fit(x, y, **{"batch_size": 4, "verbose": 0, "shuffle": False} | arguments))


def _numbers(build, train, policy):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    model = converted(build(), policy)
    with small_tensors_leave():
        logs = train(model)
    if policy is not None:
        assert model.plan.regions
        assert model.plan.offloaded_bytes or policy != "offload"
    return logs | changed_by_training(model)


def assert_trains_equal(build, train, policies=(RECOMPUTE_EACH,)):
    """Training by each policy gives plain Keras' logs, weights, state and slots, bit for bit; returns them."""
    plain = _numbers(build, train, None)
    for policy in policies:
        assert_equal(_numbers(build, train, policy), plain, exact=True)
    return plain
