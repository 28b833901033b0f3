"""Trains a model of the zoo with and without a plan, and compares everything that training changes (design: exactness)."""

import functools
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from zoo import BATCH, ZOO

import keras_sn

MODES = {"eager": {"run_eagerly": True}, "graph": {"jit_compile": False}, "xla": {"jit_compile": True}}
DICT_POLICY = {"front_*": "recompute", "mid_*": "offload", "head_*": "keep", "*": "recompute"}


def rewriting_off() -> None:
    """The graph optimizer fuses operations, which rounds differently from the same operations in a function of their own."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


def train(
    name: str,
    mode: str,
    dtype: str,
    policy: Any,
    *,
    memory_budget: int | None = None,
    steps_per_execution: int = 1,
) -> dict[str, Any]:
    """Trains for two epochs (under XLA: one step) and returns every number that training changes."""
    keras.backend.clear_session()
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(7)
    kind = ZOO[name]
    try:
        model = kind.build()
        if policy is not None:
            model = keras_sn.SNModel.from_model(model, policy=policy, memory_budget=memory_budget)
        optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
        model.compile(optimizer, kind.loss, metrics=kind.metrics, steps_per_execution=steps_per_execution, **MODES[mode])
        x, y = kind.data(np.random.default_rng(1))
        if mode == "xla":
            x, y = keras.tree.map_structure(lambda array: array[:BATCH], (x, y))
        epochs = 1 if mode == "xla" else 2
        history = model.fit(x, y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **kind.fit).history
        if policy is not None and policy != "none":
            assert model.plan.regions
    finally:
        keras.config.set_dtype_policy("float32")
    trained = {f"history/{key}": np.array(values) for key, values in history.items()}
    trained |= {f"model/{v.path}": _numpy(v) for v in model.variables}
    return trained | {f"optimizer/{i}": _numpy(v) for i, v in enumerate(model.optimizer.variables)}


@functools.lru_cache(maxsize=4)
def train_plain(name: str, mode: str, dtype: str) -> dict[str, Any]:
    return train(name, mode, dtype, None)


def _numpy(variable: keras.Variable) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable)).astype("float64")


def assert_equal(trained: dict[str, Any], plain: dict[str, Any], *, exact: bool, rtol: float = 2e-5) -> None:
    """Bit for bit, or to rounding: each array within `rtol` of its largest value."""
    assert trained.keys() == plain.keys()
    for key, expected in plain.items():
        if exact:
            np.testing.assert_array_equal(trained[key], expected, err_msg=key)
        else:
            scale = max(1e-3, float(np.abs(expected).max(initial=0)))
            np.testing.assert_allclose(trained[key] / scale, expected / scale, rtol=0, atol=rtol, err_msg=key)
