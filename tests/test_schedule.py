"""A plan of regions, step by step: what the planner makes is legal, and what a hand may spoil is found."""

import json
from dataclasses import replace

import numpy as np
import pytest
from test_planner_oracle import MODEL, random_layers
from test_planner_properties import random_graph

from keras_sn.errors import BudgetError, PlanError
from keras_sn.fusion import as_compiled
from keras_sn.plan import Plan, Region, Saved
from keras_sn.planner import adopt_plan, make_plan
from keras_sn.policies import POLICIES
from keras_sn.recompute import STRATEGIES
from keras_sn.schedule import check_regions, instructions_of
from keras_sn.settings import Settings
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
            assert Plan.from_json(plan.to_json()) == plan
            assert plan.planned_peak_bytes <= share * plain or policy != "auto"
            if plan.regions:
                check_regions(as_compiled(graph) if plan.compiled else graph, plan.regions)
    for strategy in STRATEGIES:
        check_regions(graph, superneurons_regions(graph, int(0.5 * plain), strategy=strategy))


@pytest.mark.parametrize("seeds", [range(3, 15), pytest.param(range(15, 200), marks=pytest.mark.full)])
def test_any_graph_and_any_budget_give_a_legal_plan_within_it_or_none(seeds):
    for seed in seeds:
        graph = random_graph(seed) if seed % 2 else random_layers(seed, 10, is_chain=False)
        arguments = {"batch_size": 1, "reserved_bytes": 0, "cost_model": MODEL, "compiled": seed % 3 == 0}
        plain = make_plan(graph, "none", **arguments).plain_peak_bytes
        budget = int(np.random.default_rng(seed).uniform(0.2, 1.1) * plain)
        try:
            plan = make_plan(graph, "auto", budget_bytes=budget, **arguments)
        except BudgetError:
            continue
        assert plan.planned_peak_bytes <= budget
        if plan.regions:
            check_regions(as_compiled(graph) if plan.compiled else graph, plan.regions)


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
        case "input away":
            regions[0] = replace(regions[0], saved=(Saved("x", "host"),))
        case "two places":
            regions[1] = replace(regions[1], saved=(*regions[1].saved, Saved("t5", "host")))
        case "saved twice":
            regions[1] = replace(regions[1], saved=(*regions[1].saved, Saved("t2", "host", 1)))
        case "saved and kept":
            regions[2] = replace(regions[2], recompute=False)
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
        ("input away", r"stays on the device. Received: 'x'"),
        ("two places", r"same place. Received: 't5'"),
        ("saved twice", r"Region 1 saves a tensor more than once.*Received: 't2'"),
        ("saved and kept", r"Region 2 is kept.*Received: 't5'"),
        ("one layer too many", r"has not. Received: 'l99'"),
    ],
)
def test_a_spoiled_plan_is_refused_with_its_step_and_tensor(which, message):
    graph, regions = spoiled(which)
    with pytest.raises(PlanError, match=message):
        check_regions(graph, regions)


def plan_of_chain(**fields):
    return replace(Plan("dict", 1, tuple(chain()[1]), 0, 0, 0), **fields)


def edited(name, value):
    """The plan with another value in one field: of the plan, of its region 1, or of what that saves."""
    plan = plan_of_chain()
    if hasattr(plan, name):
        return replace(plan, **{name: value})
    region = plan.regions[1]
    is_own = hasattr(region, name)
    region = replace(region, **{name: value} if is_own else {"saved": (replace(region.saved[0], **{name: value}),)})
    return replace(plan, regions=(plan.regions[0], region, plan.regions[2]))


NAN = float("nan")
NO_COUNTS = (-1, "8", True, 2.5, NAN, [1])
WRONG = {
    "policy": (3, "bogus", None, {"*": "keep"}),
    "regions": (None, "abc", {"a": 1}, 3),
    **dict.fromkeys(("batch_size", "reserved_bytes", "plain_peak_bytes", "offloaded_bytes"), (*NO_COUNTS, None, 10**400)),
    "copy_window": (*NO_COUNTS, None, -3, "a"),
    "budget_bytes": NO_COUNTS,
    **dict.fromkeys(("planned_seconds", "plain_seconds", "recompute_seconds"), (-1, "x", None, True, NAN, float("inf"))),
    **dict.fromkeys(("compiled", "recompute"), ("no", None, 1)),
    "peak_layer": (None, 3),
    "layers": ((), "abc", None, (1,), (["l3"],), 3),
    "saved": (None, "abc", 3),
    "tensor": ([], {}, None, 3),
    "tier": (None, ["host"], "disk", 3),
    "prefetch_at": (*NO_COUNTS, "3", 3, 10**6),
    "nbytes": (*NO_COUNTS, None, "many"),
}
"""Field -> what it cannot hold."""


def adopt(graph, plan):
    limits = {"batch_size": 1, "reserved_bytes": 0, "budget_bytes": None}
    return adopt_plan(graph, plan, cost_model=MODEL, compiled=False, **limits)


DOORS = {
    "from_json": lambda graph, plan: Plan.from_json(plan.to_json()),
    "Settings": lambda graph, plan: Settings(plan=plan),
    "Settings from text": lambda graph, plan: Settings(plan=plan.to_json()),
    "adopt_plan": adopt,
}
"""Where a plan comes in; `SNModel(..., plan=...)` makes `Settings`."""


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("name", WRONG)
def test_a_field_that_holds_what_it_cannot_is_named_with_its_region(name, door):
    graph, _ = chain()
    owner = "the plan" if name in Plan.__dataclass_fields__ else ".*region 1"
    for value in WRONG[name]:
        with pytest.raises(PlanError, match=rf"`{name}` of {owner} must be .*Received: {name}="):
            DOORS[door](graph, edited(name, value))


@pytest.mark.parametrize("name", ["layers", "saved", "recompute", "tensor", "tier", "prefetch_at"])
def test_regions_are_checked_without_their_plan_too(name):
    graph, _ = chain()
    for value in WRONG[name]:
        with pytest.raises(PlanError, match=rf"`{name}` of .*region 1 must be"):
            check_regions(graph, edited(name, value).regions)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("policy", policy) for policy in (*POLICIES, "dict")),
        *(("copy_window", window) for window in (0, 1, 100, 10**9)),  # of its own copies, and of none
        *(("prefetch_at", start) for start in (None, 1, 2)),
        *(("budget_bytes", budget) for budget in (None, 0, 10**30)),
        ("batch_size", 0),
        ("planned_seconds", 1),
    ],
)
def test_legal_fields_pass_every_door(name, value):
    graph, _ = chain()
    plan = edited(name, value)
    assert Plan.from_json(plan.to_json()) == plan
    for door in DOORS.values():
        door(graph, plan)


def test_lists_are_as_good_as_tuples():
    graph, regions = chain()
    lists = [replace(region, layers=list(region.layers), saved=list(region.saved)) for region in regions]
    for door in DOORS.values():
        door(graph, plan_of_chain(regions=lists))


def spoiled_text(**of_region):
    fields = json.loads(plan_of_chain().to_json())
    fields["regions"][1] |= of_region
    return json.dumps(fields)


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "[]", "3", '"abc"', "{}", '{"regions": [1]}', "\x00", None, 3),
        *(pytest.param(text, id=text[:12]) for text in ("[" * 100_000, '{"regions":' * 50_000, '{"batch_size":' + "9" * 5000)),
        plan_of_chain().to_json().replace("{", '{"zzz": 1, ', 1),
        *(spoiled_text(**{name: ["l3"]}) for name in ("colour", "saved")),
        spoiled_text(saved=[{"tensor": "t2", "colour": 1}]),
    ],
)
def test_a_text_that_is_no_plan(text):
    with pytest.raises(PlanError, match="Received: ") as raised:
        Plan.from_json(text)
    assert len(str(raised.value)) < 400


def test_plans_survive_json():
    graph, _ = chain()
    plan = make_plan(graph, "recompute", batch_size=1, reserved_bytes=0, cost_model=MODEL)
    assert Plan.from_json(plan.to_json()) == plan
