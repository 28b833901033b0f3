"""A plan of regions, step by step: what the planner makes is legal, and what a hand may spoil is found."""

from dataclasses import replace

import pytest
from test_planner_oracle import MODEL, random_layers
from test_planner_properties import random_graph

from keras_sn.errors import BudgetError, PlanError
from keras_sn.fusion import as_compiled
from keras_sn.plan import Plan, Region, Saved
from keras_sn.planner import make_plan
from keras_sn.recompute import STRATEGIES
from keras_sn.schedule import check_regions, instructions_of
from keras_sn.simulate import simulate
from keras_sn.steps import tensor_bytes
from keras_sn.superneurons import superneurons_regions


@pytest.mark.parametrize("seed", range(3))
def test_every_planned_schedule_is_legal(seed):
    graph = random_graph(seed) if seed % 2 else random_layers(seed, 14, is_chain=False)
    plain = make_plan(graph, "none", batch_size=1, reserved_bytes=0, cost_model=MODEL).plain_peak_bytes
    for policy in ("auto", "recompute", "offload", "superneurons"):
        for share in (0.7, 0.4):
            arguments = {"batch_size": 1, "reserved_bytes": 0, "cost_model": MODEL, "compiled": seed % 3 == 0}
            try:
                plan = make_plan(graph, policy, budget_bytes=int(share * plain), **arguments)
            except BudgetError:
                continue
            if plan.regions:
                check_regions(as_compiled(graph) if plan.compiled else graph, plan.regions)
    for strategy in STRATEGIES:
        check_regions(graph, superneurons_regions(graph, int(0.5 * plain), strategy=strategy))


def chain() -> tuple:
    graph = random_layers(4, 8, is_chain=True)
    graph = replace(graph, layers=tuple(replace(one, saved_for_backward=(*one.inputs, *one.outputs)) for one in graph.layers))
    names = [layer.name for layer in graph.layers]
    regions = [
        Region(tuple(names[:3]), (Saved("x"),)),
        Region(tuple(names[3:6]), (Saved("t2", "host", 2),)),
        Region(tuple(names[6:]), (Saved("t5"),)),
    ]
    return graph, regions


def test_a_good_plan_passes_and_its_instructions_show_the_copy():
    graph, regions = chain()
    check_regions(graph, regions)
    timeline = simulate(instructions_of(graph, regions), tensor_bytes(graph))
    assert timeline.offloaded_bytes == timeline.prefetched_bytes == graph.nbytes("t2")


def spoiled(which):
    graph, regions = chain()
    match which:
        case "freed too early":
            regions[2] = replace(regions[2], saved=())
        case "prefetched too late":
            regions[1] = replace(regions[1], saved=(Saved("t2", "host", 0),))
        case "recomputed from a freed tensor":
            regions[0] = replace(regions[0], saved=())
            regions[1] = replace(regions[1], saved=(Saved("t2", "recompute"),))
            regions[0] = replace(regions[0], layers=regions[0].layers[:1], saved=(Saved("x"),))
            regions.insert(1, Region(("l1", "l2"), ()))
        case "missing layer":
            regions[1] = replace(regions[1], layers=regions[1].layers[1:])
        case "order":
            regions[0], regions[1] = regions[1], regions[0]
        case "foreign tensor":
            regions[2] = replace(regions[2], saved=(Saved("t5"), Saved("t0")))
        case "unknown place":
            regions[2] = replace(regions[2], saved=(Saved("t5", "disk"),))
        case "input away":
            regions[0] = replace(regions[0], saved=(Saved("x", "host"),))
        case "two places":
            regions[1] = replace(regions[1], saved=(*regions[1].saved, Saved("t5", "host")))
        case "one layer too many":
            regions[2] = replace(regions[2], layers=(*regions[2].layers, "l99"))
    return graph, regions


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("freed too early", r"Step 'l6'.*'t5', which was freed too early"),
        ("prefetched too late", r"Step 'l3'.*'t2', which is prefetched too late"),
        ("recomputed from a freed tensor", r"Step 'l1' \(recompute\) is recomputed from 't0', which was freed too early"),
        ("missing layer", r"'l3' is expected as number 3.*Received: 'l4'"),
        ("order", r"'l0' is expected as number 0.*Received: 'l3'"),
        ("foreign tensor", r"Region 2 saves a tensor that it neither reads nor makes. Received: 't0'"),
        ("unknown place", r"waits in one of .*Received: 't5' in 'disk'"),
        ("input away", r"stays on the device. Received: 'x'"),
        ("two places", r"same place. Received: 't5'"),
        ("one layer too many", r"has not. Received: 'l99'"),
    ],
)
def test_a_spoiled_plan_is_refused_with_its_step_and_tensor(which, message):
    graph, regions = spoiled(which)
    with pytest.raises(PlanError, match=message):
        check_regions(graph, regions)


def test_plans_survive_json():
    graph, _ = chain()
    plan = make_plan(graph, "recompute", batch_size=1, reserved_bytes=0, cost_model=MODEL)
    assert Plan.from_json(plan.to_json()) == plan
