from dataclasses import replace
from fractions import Fraction

import keras
import numpy as np
import pytest
from keras import layers as L

from keras_sn.cost import ON_CPU, ON_GPU, StepCosts
from keras_sn.errors import BudgetError, PlanError
from keras_sn.graph import LayerCall, LayerGraph, TensorSpec
from keras_sn.plan import DEVICE, HOST, Plan
from keras_sn.planner import make_plan
from keras_sn.predict import predict
from keras_sn.superneurons import superneurons_regions
from keras_sn.timing import time_regions
from keras_sn.trace import trace

NAN, INF = float("nan"), float("inf")


def _chain(blocks=8, width=64, batch_size=2048):
    inputs = x = keras.Input((width,))
    for i in range(blocks):
        x = L.ReLU(name=f"block_{i}_relu")(L.BatchNormalization(name=f"block_{i}_bn")(L.Dense(width, name=f"block_{i}_dense")(x)))
    return trace(keras.Model(inputs, L.Dense(2, name="head")(x)), batch_size).graph


@pytest.fixture(scope="module")
def graph():
    return _chain()


def _plan(graph, policy, **arguments):
    return make_plan(graph, policy, **{"batch_size": 2048, "reserved_bytes": 1000} | arguments)


@pytest.mark.parametrize("policy", ["recompute", "offload", "superneurons", {"block_1*": "recompute", "head": "offload"}])
def test_every_layer_call_is_in_one_region_and_saved_tensors_are_its_own(graph, policy):
    plan = _plan(graph, policy)
    assert [name for region in plan.regions for name in region.layers] == [layer.name for layer in graph.layers]
    for region in plan.regions:
        layers = [graph.layers[graph.position[name]] for name in region.layers]
        touched = {t for layer in layers for t in (*layer.inputs, *layer.outputs)}
        assert {one.tensor for one in region.saved} <= touched
        assert len({one.tensor for one in region.saved}) == len(region.saved)


def test_recompute_needs_far_less_memory_and_not_much_more_time(graph):
    plan = _plan(graph, "recompute")
    assert plan.planned_peak_bytes < 0.55 * plan.plain_peak_bytes
    assert 1.05 < plan.slowdown < 1.6
    assert plan.offloaded_bytes == 0


def test_offload_recomputes_nothing(graph):
    plan = _plan(graph, "offload")
    holds = {layer.name for layer in graph.layers if layer.internal_bytes}  # what a layer holds inside, no plan can send away
    assert all(region.recompute_seconds == 0 for region in plan.regions if holds.isdisjoint(region.layers))
    assert plan.offloaded_bytes > 0.5 * plan.plain_peak_bytes
    assert plan.planned_peak_bytes < 0.5 * plan.plain_peak_bytes


def test_superneurons_sends_checkpoints_away_only_when_memory_is_short(graph):
    costly = {layer.name for layer in graph.layers if layer.is_costly}
    roomy = _plan(graph, "superneurons", budget_bytes=10 * _plan(graph, "none").plain_peak_bytes)
    assert costly <= {region.layers[-1] for region in roomy.regions}  # and each layer call of a memory-centric segment
    assert roomy.offloaded_bytes == 0
    tight = _plan(graph, "superneurons", budget_bytes=roomy.planned_peak_bytes // 2)
    away = {one.tensor for region in tight.regions for one in region.saved if one.tier == HOST}
    assert away <= costly
    assert 0 < tight.planned_peak_bytes <= roomy.planned_peak_bytes // 2
    assert all(one.prefetch_at is not None for region in tight.regions for one in region.saved if one.tier == HOST)


def test_memory_centric_segments_are_recomputed_from_their_checkpoint_for_each_layer_call():
    graph = _chain(24)
    speed, memory = (superneurons_regions(graph, strategy=strategy) for strategy in ("speed-centric", "memory-centric"))
    assert len(memory) > len(speed)
    again = [one for region in memory for one in region.saved if one.tier == "recompute"]
    assert len(again) == 2 * 24  # BatchNormalization and ReLU outputs
    assert not any(one.tier == "recompute" for region in speed for one in region.saved)
    assert predict(graph, memory).peak_bytes <= 1.05 * predict(graph, speed).peak_bytes
    costs = StepCosts(graph, ON_CPU)
    assert time_regions(costs, memory).seconds > time_regions(costs, speed).seconds


def test_auto_takes_plain_keras_if_it_fits_and_lets_tensors_wait_elsewhere_only_if_it_must(graph):
    plain = _plan(graph, "none").plain_peak_bytes
    recompute = _plan(graph, "recompute").planned_peak_bytes
    assert _plan(graph, "auto").is_plain
    assert _plan(graph, "auto", budget_bytes=plain).is_plain
    middle = _plan(graph, "auto", budget_bytes=plain - 1)
    assert not middle.is_plain
    assert middle.offloaded_bytes == 0
    tight = _plan(graph, "auto", budget_bytes=int(0.7 * recompute))
    assert {one.tier for region in tight.regions for one in region.saved} & {"host", "recompute"}
    assert tight.planned_peak_bytes <= 0.7 * recompute


def test_what_a_fast_link_hides_leaves(graph):
    """At a budget that leaves no room for what waits, copies that nothing waits for are cheaper than running regions again."""
    fast = replace(ON_GPU, link_bytes_per_second=1e12)
    budget = int(0.7 * _plan(graph, "recompute").planned_peak_bytes)
    assert _plan(graph, "auto", budget_bytes=budget, cost_model=fast).offloaded_bytes > 0


def test_auto_is_never_worse_than_another_policy_at_equal_bytes(graph):
    for policy in ("recompute", "offload", "superneurons"):
        for compiled in (False, True):
            budget = {} if policy != "superneurons" else {"budget_bytes": _plan(graph, "none").plain_peak_bytes // 2}
            other = _plan(graph, policy, compiled=compiled, **budget)
            auto = _plan(graph, "auto", compiled=compiled, budget_bytes=other.planned_peak_bytes)
            assert auto.planned_peak_bytes <= other.planned_peak_bytes
            assert auto.planned_seconds <= other.planned_seconds + 1e-9


def test_the_margin_stays_free(graph):
    plain = _plan(graph, "none").plain_peak_bytes
    plan = _plan(graph, "auto", budget_bytes=plain, margin=0.05)
    assert not plan.is_plain
    assert plan.planned_peak_bytes <= 0.95 * plain


def test_zero_negative_and_huge_budgets():
    graph = _chain(2)
    for budget in (0, -1):
        with pytest.raises(BudgetError, match=f"Received: memory_budget={budget}"):
            _plan(graph, "auto", budget_bytes=budget)
    assert _plan(graph, "auto", budget_bytes=10**30).is_plain


@pytest.mark.parametrize(
    ("argument", "number"),
    [
        *(("budget_bytes", number) for number in (NAN, INF, -INF, "abc", True, [])),
        *(("host_budget_bytes", number) for number in (-1, NAN, INF, "abc", False)),
        *(("reserved_bytes", number) for number in (-5, NAN, INF, "x", None)),
        *(("margin", number) for number in (-1, 1, 1.0, 2, NAN, "a", None)),
        *(pytest.param(name, 10**400, id=name) for name in ("budget_bytes", "host_budget_bytes", "reserved_bytes")),
    ],
)
def test_limits_that_are_no_such_numbers(argument, number):
    graph = _chain(2)
    for policy in ("auto", "superneurons", "recompute", "offload", "none", {"*": "recompute"}):
        with pytest.raises(BudgetError, match=rf"`{argument}` must be .* Received: {argument}="):
            _plan(graph, policy, **{"budget_bytes": 10**6} | {argument: number})


def test_limits_may_be_any_whole_or_broken_numbers():
    graph = _chain(2)
    for number in (10_000_000.5, 1e30, np.int64(10**7), Fraction(10**7, 3)):
        plan = _plan(graph, "auto", budget_bytes=number, host_budget_bytes=number)
        assert plan.budget_bytes == int(number)
        assert Plan.from_json(plan.to_json()) == plan


def _one_call(saved=(), shape=(4,)):
    tensors = {"x": TensorSpec("x", (4,), "float32", "input"), "y": TensorSpec("y", shape, "float32")}
    return LayerGraph((LayerCall("one", "any", ("x",), ("y",), saved),), tensors, ("x",), ("y",))


def test_a_layer_call_saves_no_tensor_that_there_is_not():
    with pytest.raises(PlanError, match=r"'one' saves a tensor.*Received: 'z'"):
        _one_call(("x", "z"))


@pytest.mark.parametrize("shape", [(-4,), (3, -1), (2.5,), ("4",), (3, NAN)])
def test_axes_that_are_no_sizes(shape):
    with pytest.raises(PlanError, match=r"axes of tensor 'y'.*Received: shape="):
        _one_call(shape=shape)


def test_an_open_axis_is_refused_when_its_bytes_are_asked_for():
    graph = _one_call(shape=(None, 3))  # as the graph of one `layers.Recompute` has them
    for policy in ("auto", "recompute", "offload", "superneurons", "none"):
        with pytest.raises(PlanError, match=r"'y' has an axis of unknown size.*Received: shape=\(None, 3\)"):
            _plan(graph, policy)


def test_zero_size_tensors():
    inputs = keras.Input((4, 0, 3))
    x = L.Dense(5, name="a")(inputs)
    graph = trace(keras.Model(inputs, L.ReLU(name="b")(x)), 2).graph
    for policy in ("auto", "recompute", "offload", "superneurons"):
        assert _plan(graph, policy, budget_bytes=5000).planned_peak_bytes <= 5000


@pytest.mark.parametrize("count", [1_000, *(pytest.param(one, marks=pytest.mark.full) for one in (2_000, 12_000, 100_000))])
def test_very_many_layer_calls(count):
    tensors, before, layers = {"x": TensorSpec("x", (8, 100), "float32", "input")}, "x", []
    for index in range(count):
        name, costly = f"t{index}", index % 3 == 0
        tensors[name] = TensorSpec(name, (8, 100), "float32")
        layers.append(
            LayerCall(f"l{index}", "any", (before,), (name,), (before, name), 2000, is_costly=costly, is_fusible=not costly)
        )
        before = name
    graph = LayerGraph(tuple(layers), tensors, ("x",), (before,))
    plain = _plan(graph, "none").plain_peak_bytes
    plan = _plan(graph, "auto", budget_bytes=plain // 4, compiled=True)
    assert plan.planned_peak_bytes <= plain // 4
    assert sum(len(region.layers) for region in plan.regions) == count


def test_a_budget_that_nothing_fits_names_the_layer_and_the_bytes(graph):
    with pytest.raises(BudgetError, match=r"smallest found needs [\d,]+ bytes .* at layer '.*Received: memory_budget=20,000"):
        _plan(graph, "auto", budget_bytes=20_000)
    with pytest.raises(BudgetError, match=r"need 1,000 bytes.*Received: memory_budget=999"):
        _plan(graph, "auto", budget_bytes=999)
    with pytest.raises(BudgetError, match=r"host_budget=10"):
        _plan(graph, "auto", budget_bytes=_plan(graph, "recompute").planned_peak_bytes // 2, host_budget_bytes=10)


def test_policies_that_are_none():
    graph = _chain(2)
    for policy in ("fast", {}, {"*": "drop"}, {3: "keep"}, {"*": ["keep"]}, 3, None):
        with pytest.raises(PlanError, match="Received: policy="):
            _plan(graph, policy)
    with pytest.raises(PlanError, match=r"block_1_dense.*Received"):
        _plan(graph, {"block_1_dens": "recompute"})


def test_patterns_match_names_with_and_without_models_around_them():
    inner_in = keras.Input((4,))
    inner = keras.Model(inner_in, L.Dense(4, name="dense")(inner_in), name="inner")
    outer_in = keras.Input((4,))
    graph = trace(keras.Model(outer_in, inner(inner(outer_in))), 2).graph
    for pattern in ("dense", "inner/dense", "inner*", "den*"):
        assert any(region.recompute for region in _plan(graph, {pattern: "recompute"}).regions)


def test_a_tensor_is_in_one_place_only():
    inputs = keras.Input((64,))
    skip = L.Dense(64, name="a")(inputs)
    x = L.Dense(64, name="b")(skip)
    x = L.Add(name="c")([x, skip])
    graph = trace(keras.Model(inputs, L.Dense(64, name="d")(x)), 8).graph
    for policy in ({"b": "offload", "c": "recompute", "*": "keep"}, "superneurons", "offload"):
        tiers = {}
        for region in _plan(graph, policy).regions:
            for one in region.saved:
                tiers.setdefault(one.tensor, set()).add(one.tier == DEVICE)
        assert all(len(places) == 1 for places in tiers.values())


def test_graphs_of_no_and_one_layer():
    empty = LayerGraph((), {}, (), ())
    for policy in ("auto", "recompute", "offload", "superneurons", "none"):
        assert _plan(empty, policy, budget_bytes=2000).is_plain
    inputs = keras.Input((4,))
    single = trace(keras.Model(inputs, L.Dense(3, name="only")(inputs)), 2).graph
    assert [region.layers for region in _plan(single, "recompute").regions] == [("only",)]


def test_the_prediction_of_a_hand_made_chain():
    """Three layers of 100 bytes each and the batch, in one region: all three outputs are read, and one gradient at a time."""
    inputs = x = keras.Input((25,))
    for name in "abc":
        x = L.ReLU(name=name)(x)
    graph = trace(keras.Model(inputs, x), 1).graph
    region = _plan(graph, {"*": "recompute"}).regions[0]
    assert predict(graph, [region.__class__(("a", "b", "c"), region.saved)]).peak_bytes == 100 + 3 * 100 + 100


def test_plans_survive_json(graph):
    for policy in ("recompute", "offload", "none"):
        plan = _plan(graph, policy)
        assert Plan.from_json(plan.to_json()) == plan
    for text in ("", "[]", "{}", '{"regions": [1]}'):
        with pytest.raises(PlanError, match="Received"):
            Plan.from_json(text)


def test_a_plan_prints_as_a_table(graph):
    text = str(_plan(graph, "superneurons"))
    assert "block_3_dense" in text
    assert "planned peak" in text
