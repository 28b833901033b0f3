"""`policy="auto"` against the optimum: small graphs, whose plans can all be tried."""

from itertools import combinations
from random import Random

import pytest

from keras_sn.candidates import evaluate
from keras_sn.cost import CostModel, StepCosts
from keras_sn.drafts import Draft, regions_of
from keras_sn.errors import BudgetError
from keras_sn.fusion import as_compiled
from keras_sn.graph import LayerCall, LayerGraph, TensorSpec
from keras_sn.planner import make_plan
from keras_sn.predict import predict

MODEL = CostModel(flops_per_second=1e6, bytes_per_second=4e6, link_bytes_per_second=5e5, launch_seconds=1e-4)
NEAR = 1.05


def random_layers(seed: int, count: int, *, is_chain: bool) -> LayerGraph:
    """A chain or a graph with skips; costly and fusible layer calls of all sizes."""
    random = Random(seed)
    tensors = {"x": TensorSpec("x", (8,), "float32", "input")}
    layers: list[LayerCall] = []
    for index in range(count):
        before = list(tensors)
        inputs = [before[-1]]
        if not is_chain and index > 1 and random.random() < 0.5:
            inputs.append(random.choice(before[:-1]))
        name = f"t{index}"
        tensors[name] = TensorSpec(name, (random.choice([400, 800, 1600, 3200]),), "float32")
        costly = random.random() < 0.5
        reads = tuple(t for t in (*dict.fromkeys(inputs), name) if random.random() < 0.65)
        layers.append(
            LayerCall(
                f"l{index}",
                "any",
                tuple(dict.fromkeys(inputs)),
                (name,),
                reads,
                flops=random.randint(1, 20) * (2000 if costly else 100),
                is_costly=costly,
                is_fusible=not costly,
                internal_bytes=random.choice([0, 0, 400]),
            )
        )
    return LayerGraph(tuple(layers), tensors, ("x",), (f"t{count - 1}",))


def subsets(things):
    return (frozenset(one) for size in range(len(things) + 1) for one in combinations(things, size))


def all_plans(graph: LayerGraph, costs: StepCosts, *, with_host: bool) -> list[tuple[int, float]]:
    """`(peak bytes, seconds)` of every draft, and of plain Keras."""
    names = [layer.name for layer in graph.layers]
    last, made = len(names) - 1, list(graph.producer)
    found = [_figures(costs, Draft((last,), kept=frozenset([last])))]
    for cut in subsets(range(last)):
        ends = (*sorted(cut), last)
        for kept in [frozenset()] if graph.is_compiled else subsets(ends):
            for saved in subsets(made):
                for away in subsets(made) if with_host else [frozenset()]:
                    found.append(_figures(costs, Draft(ends, kept, saved, away)))
    return found


def _figures(costs, draft):
    candidate = evaluate(costs, regions_of(costs.graph, draft), float("inf"))
    return candidate.peak_bytes, candidate.seconds


CASES = [
    *[(seed, 5, True, False) for seed in range(80)],  # XLA regions on the device alone
    *[(seed, 3, False, False) for seed in range(80, 140)],  # regions that TensorFlow runs
    *[(seed, 3, True, True) for seed in range(140, 200)],  # with the host
]


SHARES = (0.0, 0.3, 0.6, 0.95)
"""Budgets, between the lowest peak of all plans and that of plain Keras."""


def check_against_all_plans(seed: int, count: int, compiled: bool, with_host: bool, shares=(0.5,)) -> None:
    graph = random_layers(seed, count, is_chain=seed % 2 == 0)
    described = as_compiled(graph) if compiled else graph
    plans = all_plans(described, StepCosts(described, MODEL), with_host=with_host)
    lowest, plain = (
        min(peak for peak, _ in plans),
        predict(described, regions_of(described, Draft((count - 1,), frozenset([count - 1])))),
    )
    host = {} if with_host else {"host_budget_bytes": 0}
    for share in shares:
        budget = int(lowest + share * (plain.peak_bytes - lowest))
        best = min(seconds for peak, seconds in plans if peak <= budget)
        try:
            plan = make_plan(
                graph,
                "auto",
                batch_size=1,
                reserved_bytes=0,
                budget_bytes=budget,
                cost_model=MODEL,
                compiled=compiled,
                **host,
            )
        except BudgetError:
            assert share == 0.0  # checked below
            continue
        assert plan.planned_peak_bytes <= budget
        assert plan.planned_seconds <= NEAR * best + 1e-12, (share, plan.planned_seconds, best)
    with pytest.raises(BudgetError) as error:
        make_plan(
            graph,
            "auto",
            batch_size=1,
            reserved_bytes=0,
            budget_bytes=int(0.5 * lowest),
            cost_model=MODEL,
            compiled=compiled,
            **host,
        )
    needed = int(str(error.value).partition("smallest found needs ")[2].partition(" bytes")[0].replace(",", ""))
    assert needed <= NEAR * lowest


@pytest.mark.parametrize("block", [0, 1, pytest.param(2, marks=pytest.mark.full)])
def test_auto_is_near_the_optimum_of_all_plans(block):
    for case in CASES[block::10]:
        check_against_all_plans(*case)


@pytest.mark.full
@pytest.mark.parametrize("block", range(10))
def test_auto_is_near_the_optimum_of_all_plans_at_every_budget(block):
    for case in CASES[block::10]:
        check_against_all_plans(*case, shares=SHARES)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(200, 212))
def test_auto_is_near_the_optimum_of_all_plans_of_larger_graphs(seed):
    check_against_all_plans(seed, 7, True, False)
    check_against_all_plans(seed, 4, False, False)
    check_against_all_plans(seed, 4, True, True)


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(6, 20))])
def test_the_smallest_budget_works_and_a_byte_less_does_not(seed):
    graph = random_layers(seed, 12, is_chain=seed % 3 == 0)
    arguments = {"batch_size": 1, "reserved_bytes": 1000, "cost_model": MODEL, "compiled": seed % 2 == 0, "margin": 0.04}
    with pytest.raises(BudgetError) as error:
        make_plan(graph, "auto", budget_bytes=1001, **arguments)
    needed = int(str(error.value).partition("smallest found needs ")[2].partition(" bytes")[0].replace(",", ""))
    assert any(f"'{layer.name}'" in str(error.value) for layer in graph.layers)
    plan = make_plan(graph, "auto", budget_bytes=needed, **arguments)
    assert plan.planned_peak_bytes <= needed * 0.96
    with pytest.raises(BudgetError, match=f"needs {needed:,} bytes"):
        make_plan(graph, "auto", budget_bytes=needed - 1, **arguments)
