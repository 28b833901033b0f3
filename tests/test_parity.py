"""Training by a plan gives plain Keras' numbers: loss history, weights, statistics, seed states, metrics, optimizer slots."""

import keras
import pytest
from parity import DICT_POLICY, assert_equal, rewriting_off, train, train_plain
from zoo import BATCH, ZOO

import keras_sn
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
MODES = {"float32": ("eager", "graph", "xla"), "mixed_float16": ("graph", "eager", "xla")}
QUICK = {
    ("float32", "eager"): ("all", "dict"),
    ("float32", "graph"): ("all", "offload", "superneurons", "dict", "recompute"),
    ("float32", "xla"): ("dict",),
    ("mixed_float16", "graph"): ("dict",),
}
"""What CI runs of the matrix, for each model; the rest has the mark `full`."""


def _cases():
    for name, kind in ZOO.items():
        for dtype in ("float32", "mixed_float16")[: 1 + kind.half_makes_sense]:
            for mode in MODES[dtype]:
                for policy in POLICIES:
                    marks = [pytest.mark.xdist_group(f"{name}-{mode}-{dtype}")]
                    if policy not in QUICK.get((dtype, mode), ()):
                        marks.append(pytest.mark.full)
                    yield pytest.param(name, mode, dtype, policy, marks=marks)


@pytest.mark.parametrize(("name", "mode", "dtype", "policy"), _cases())
def test_equal_to_plain_keras(name, mode, dtype, policy):
    plain = train_plain(name, mode, dtype)
    trained = train(name, mode, dtype, POLICIES[policy])
    assert_equal(trained, plain, exact=mode != "xla", rtol=2e-5 if dtype == "float32" else 5e-3)


@pytest.mark.parametrize("name", ["resnet", "siamese"])
def test_equal_at_every_budget(name):
    """From just less than plain Keras needs down to the least that any policy needs."""
    peaks = []
    for policy in ("recompute", "offload", "superneurons"):
        model = keras_sn.SNModel.from_model(ZOO[name].build(), policy=policy)
        model.compile(keras.optimizers.SGD(momentum=0.9), jit_compile=False)
        plan = model.build_plan(BATCH)
        peaks.append(plan.planned_peak_bytes)
    budgets = {plan.plain_peak_bytes - 64, (plan.plain_peak_bytes + max(peaks)) // 2, *peaks}
    plain = train_plain(name, "graph", "float32")
    for room in sorted(budgets):
        if room < plan.plain_peak_bytes:
            budget = int(room / (1 - MARGIN)) + 1
            assert_equal(train(name, "graph", "float32", "auto", memory_budget=budget), plain, exact=True)
