"""Trains a model of the zoo with and without a plan, and compares everything that training changes (design: exactness)."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import keras
import numpy as np
import tensorflow as tf
from trained import arrays, logged
from zoo import ZOO, ZooModel
from zoo_data import BATCH

import keras_sn
from keras_sn import drafts

MODES = {
    "eager": {"run_eagerly": True},
    "graph": {"jit_compile": False},
    "steps4": {"jit_compile": False, "steps_per_execution": 4},
    "xla": {"jit_compile": True},
}
DICT_POLICY = {"front_*": "recompute", "mid_*": "offload", "head_*": "keep", "*": "recompute"}


def rewriting_off() -> None:
    """The graph optimizer fuses operations, which rounds differently from the same operations in a function of their own."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})


@contextmanager
def small_tensors_leave() -> Iterator[None]:
    """Inside, plans send tensors of any size to the host; the tensors of small models would stay otherwise."""
    with patch.object(drafts, "MIN_OFFLOAD_BYTES", 1):
        yield


def train(
    name: str,
    mode: str,
    dtype: str,
    policy: Any,
    *,
    memory_budget: int | None = None,
    **compile_options: Any,
) -> dict[str, Any]:
    """Trains for two epochs (under XLA: one step) and returns every number that training changes."""
    keras.backend.clear_session(free_memory=False)
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(7)
    kind = ZOO[name]
    try:
        model = kind.build()
        if policy is not None:
            model = keras_sn.SNModel.from_model(model, policy=policy, memory_budget=memory_budget, host_budget="1GiB")
        trained = _fit(model, kind, mode, compile_options, "")
        for count, change in enumerate(kind.before_further_fits, start=2):
            change(model)
            trained |= _fit(model, kind, mode, compile_options, f"fit {count}/")
        if policy is not None and policy != "none":
            assert model.plan.regions
        if isinstance(policy, dict):
            assert any(region.recompute for region in model.plan.regions)
        if policy == "offload" or (policy == DICT_POLICY and name != "operations"):  # where no layer's name starts with "mid_"
            assert model.plan.offloaded_bytes
    finally:
        keras.config.set_dtype_policy("float32")
    return trained | arrays("model", model.variables, by_path=True)


def _fit(model: keras.Model, kind: ZooModel, mode: str, compile_options: dict[str, Any], label: str) -> dict[str, Any]:
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    options = {"metrics": kind.metrics} | kind.compile | MODES[mode] | compile_options
    model.compile(optimizer, kind.loss, **options)
    if not isinstance(model, keras_sn.SNModel):
        optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
    data = kind.data(np.random.default_rng(1))
    if mode == "xla":
        data = keras.tree.map_structure(lambda array: None if array is None else array[:BATCH], data)
    epochs = 1 if mode == "xla" else 2
    x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
    size = BATCH // 2 if mode == "steps4" else BATCH  # five steps: four at once, and the one that is left
    options = {"batch_size": size, "epochs": epochs, "shuffle": False, "verbose": 0} | kind.fit
    with small_tensors_leave():
        trained = logged(model.fit(x, y, sample_weight=sample_weight, **options), label)
    trained |= arrays(f"{label}optimizer", model.optimizer.variables)
    return trained | arrays(f"{label}metrics", model.metrics_variables)


@functools.lru_cache(maxsize=4)
def train_plain(name: str, mode: str, dtype: str) -> dict[str, Any]:
    trained = train(name, mode, dtype, None)
    assert np.isfinite(trained["history/loss"]).all()
    return trained


@functools.lru_cache(maxsize=4)
def train_plain_otherwise(name: str, mode: str, dtype: str) -> dict[str, Any]:
    """Plain Keras once more, rounded in other places: without XLA, or else in float32."""
    return train(name, mode, dtype, None, jit_compile=False) if mode == "xla" else train(name, mode, "float32", None)


def assert_equal(
    trained: dict[str, Any],
    plain: dict[str, Any],
    *,
    exact: bool,
    rtol: float = 2e-5,
    otherwise: dict[str, Any] | None = None,
) -> None:
    """Bit for bit, or to rounding: each array within `rtol` of its largest value, or as near as plain Keras comes to itself.

    That is four times the distance of `plain` from `otherwise`, the same training rounded in other places: some arrays are
    rounding alone, as the gradient of a bias before a batch normalization.
    """
    assert trained.keys() == plain.keys()
    for key, expected in plain.items():
        if exact:
            np.testing.assert_array_equal(trained[key], expected, err_msg=key)
        else:
            allowed = rtol * max(1e-3, float(np.abs(expected).max(initial=0)))
            if otherwise is not None and np.shape(otherwise.get(key)) == np.shape(expected):
                allowed = max(allowed, 4 * float(np.abs(expected - otherwise[key]).max(initial=0)))
            np.testing.assert_allclose(trained[key], expected, rtol=0, atol=allowed, err_msg=key)
