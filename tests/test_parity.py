"""Training by a plan gives plain Keras' numbers: loss history, weights, statistics, seed states, metrics, optimizer slots."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from parity import DICT_POLICY, MODES, assert_equal, rewriting_off, train, train_plain, train_plain_otherwise
from zoo import ZOO
from zoo_data import BATCH

import keras_sn
from keras_sn.errors import UnsupportedModelError
from keras_sn.settings import MARGIN

rewriting_off()

POLICIES = {
    "all": {"*": "recompute"},
    "offload": "offload",
    "superneurons": "superneurons",
    "dict": DICT_POLICY,
    "recompute": "recompute",
    "none": "none",
}
RTOL = {"float32": 2e-5, "float64": 1e-12, "mixed_float16": 2e-2, "mixed_bfloat16": 4e-2}
"""Under XLA, and for models of `ROUNDED`; else nothing may differ. In other dtypes than float32, plain Keras may differ more from
itself."""
QUICK = {("float32", "graph"): ("dict",)}
SLOW = {"quantized", "conv_lstm", "recurrent"}
EACH_POLICY = {("float32", "graph"): ("all", "offload", "superneurons", "dict")}
MORE_OFTEN = {
    "resnet": EACH_POLICY | {("float32", "eager"): ("dict",)},
    "vae": EACH_POLICY | {("float32", "eager"): ("dict",), ("float32", "xla"): ("dict",)},
    "conv_bn": QUICK | {("float32", "xla"): ("dict",), ("mixed_float16", "graph"): ("dict",)},
}
"""What CI runs of the matrix, for some models and, in `QUICK`, for the others; the rest, and those of `SLOW`, have the mark
`full`."""
ROUNDED = {"inception"}
"""A tensor has four readers in different regions, and their gradients are added in another order (docs/how-it-works.md)."""

UNTRAINABLE = {("unet", "xla", "mixed_float16"), ("unet", "xla", "mixed_bfloat16")}
"""What plain Keras cannot train, either: XLA on a CPU does not compile bilinear resizing in low precision."""


def _marks(name, mode, dtype, policy):
    quick = {} if name in SLOW else MORE_OFTEN.get(name, QUICK)
    yield pytest.mark.xdist_group(f"{name}-{mode}-{dtype}")
    if policy not in quick.get((dtype, mode), ()):
        yield pytest.mark.full


def _cases():
    for name, kind in ZOO.items():
        for mode, dtype, policy in itertools.product(MODES, kind.dtypes, POLICIES):
            if (name, mode, dtype) not in UNTRAINABLE:
                yield pytest.param(name, mode, dtype, policy, marks=list(_marks(name, mode, dtype, policy)))


@pytest.mark.parametrize(("name", "mode", "dtype", "policy"), _cases())
def test_equal_to_plain_keras(name, mode, dtype, policy):
    plain = train_plain(name, mode, dtype)
    trained = train(name, mode, dtype, POLICIES[policy])
    exact = mode != "xla" and name not in ROUNDED
    otherwise = train_plain_otherwise(name, mode, dtype) if not exact and dtype != "float32" else None
    assert_equal(trained, plain, exact=exact, rtol=RTOL[dtype], otherwise=otherwise)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode", "dtype"), sorted(UNTRAINABLE))
def test_what_is_left_out_fails_in_plain_keras_too(name, mode, dtype):
    with pytest.raises(tf.errors.InternalError):
        train_plain(name, mode, dtype)


@pytest.mark.parametrize("name", [one if one == "siamese" else pytest.param(one, marks=pytest.mark.full) for one in ZOO])
def test_equal_at_every_budget(name):
    """From just less than plain Keras needs down to the least that any policy needs."""
    peaks = []
    x, _, _ = keras.utils.unpack_x_y_sample_weight(ZOO[name].data(np.random.default_rng(1)))
    batch = keras.tree.map_structure(lambda array: None if array is None else array[:BATCH], x)
    for policy in ("recompute", "offload", "superneurons"):
        model = keras_sn.SNModel.from_model(ZOO[name].build(), policy=policy)
        model.compile(keras.optimizers.SGD(momentum=0.9), jit_compile=False)
        plan = model.build_plan(BATCH, batch)
        peaks.append(plan.planned_peak_bytes)
    budgets = {plan.plain_peak_bytes - 64, (plan.plain_peak_bytes + max(peaks)) // 2, *peaks}
    plain = train_plain(name, "graph", "float32")
    for room in sorted(budgets):
        if min(peaks) <= room < plan.plain_peak_bytes:
            budget = int(room / (1 - MARGIN)) + 1
            assert_equal(train(name, "graph", "float32", "auto", memory_budget=budget), plain, exact=name not in ROUNDED)


def _planned(inputs, x):
    model = keras.Model(inputs, keras.layers.Dense(2, name="head")(x))
    model = keras_sn.SNModel.from_model(model, policy="recompute")
    model.compile("sgd", "mse", jit_compile=False)
    return model


def test_sparse_input_is_refused():
    inputs = keras.Input((8,), sparse=True, name="x")
    with pytest.raises(UnsupportedModelError, match="sparse"):
        _planned(inputs, keras.layers.Dense(4, name="first")(inputs))


@pytest.mark.parametrize("length", [3, None])
def test_ragged_input_is_refused(length):
    inputs = keras.Input((length,), ragged=True, dtype="int32", name="x")
    embedded = keras.layers.Embedding(5, 4, name="first")(inputs)
    with pytest.raises(UnsupportedModelError, match="ragged"):
        _planned(inputs, keras.layers.GlobalAveragePooling1D(name="pool")(embedded))


def test_axis_that_keras_leaves_open():
    """`EinsumDense` with None in its output shape: Keras does not know the axis, though the input's shape is full."""
    inputs = keras.Input((6, 3), name="x")
    x = keras.layers.EinsumDense("abc,cd->abd", (None, 2), name="first")(inputs)
    model = _planned(inputs, keras.layers.GlobalAveragePooling1D(name="pool")(x))
    model.fit(np.ones((4, 6, 3), "float32"), np.zeros((4, 2), "float32"), verbose=0)
