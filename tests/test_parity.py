"""Training by a plan gives plain Keras' numbers: loss history, weights, statistics, seed states, metrics, optimizer slots."""

import pytest
from parity import DICT_POLICY, assert_equal, rewriting_off, train, train_plain
from zoo import ZOO

rewriting_off()

POLICIES = ("none", "recompute", "offload", "superneurons", DICT_POLICY)
CASES = [
    pytest.param(name, mode, dtype, policy, marks=pytest.mark.xdist_group(f"{name}-{mode}-{dtype}"))
    for name, kind in ZOO.items()
    for mode in ("eager", "graph", "xla")
    for dtype in ("float32", "mixed_float16")[: 1 + kind.half_makes_sense]
    for policy in POLICIES
]


@pytest.mark.parametrize(("name", "mode", "dtype", "policy"), CASES)
def test_equal_to_plain_keras(name, mode, dtype, policy):
    plain = train_plain(name, mode, dtype)
    trained = train(name, mode, dtype, policy)
    assert_equal(trained, plain, exact=mode != "xla", rtol=2e-5 if dtype == "float32" else 5e-3)
