"""What a person reads of a plan: every region has its row, and the totals are those of the plan's own data."""

import re
from dataclasses import replace
from functools import cache

import keras
import pytest
from keras import layers as L

from keras_sn.cost import ON_GPU
from keras_sn.plan import DEVICE, HOST, Plan, Region, Saved
from keras_sn.planner import make_plan
from keras_sn.report import MAX_ROWS, SHOWN_ROWS, format_plan, format_seconds, place_of, plan_line
from keras_sn.sizes import format_bytes
from keras_sn.steps import RECOMPUTE
from keras_sn.trace import trace

POLICIES = ["recompute", "offload", "superneurons", "auto", {"block_1*": "offload", "block_2*": "recompute", "*": "keep"}]
TITLES = {DEVICE: "on device", HOST: "on host", RECOMPUTE: "recomputed"}
BATCH = 512
WIDE = 200
"""Characters: no cell is wrapped."""


@pytest.fixture(scope="module")
def graph():
    inputs = x = keras.Input((64,))
    for i in range(8):
        y = L.BatchNormalization(name=f"block_{i}_bn")(L.Dense(64, name=f"block_{i}_dense")(x))
        x = L.Add(name=f"block_{i}_add")([x, L.ReLU(name=f"block_{i}_relu")(y)])
    return trace(keras.Model(inputs, L.Dense(2, name="head")(x)), BATCH).graph


def plan_of(graph, policy, share=0.7):
    return cached_plan(graph, tuple(policy.items()) if isinstance(policy, dict) else policy, share)


@cache
def cached_plan(graph, policy, share):
    policy = dict(policy) if isinstance(policy, tuple) else policy
    arguments = {"batch_size": BATCH, "reserved_bytes": 1000, "cost_model": ON_GPU}
    plain = make_plan(graph, "none", **arguments)
    return make_plan(graph, policy, budget_bytes=int(share * plain.plain_peak_bytes), **arguments)


def columns_of(text):
    """Heading -> the cells under it and the total's; columns are where two blanks are above each other in all rows."""
    lines = text.splitlines()
    rows = [lines[1], *(line for line in lines[3:] if re.match(r" *(\d+  |total,)", line))]
    width = max(map(len, rows))
    inked = "".join("x" if any(row.ljust(width)[place] != " " for row in rows) else " " for place in range(width))
    spans = [match.span() for match in re.finditer(r"x+( x+)*", inked)]
    cells = [[row[begin:end].strip() for row in rows] for begin, end in spans]
    return {column[0]: column[1:] for column in cells}


def summary_of(text):
    names = "totals|regions|reserved|planned peak|budget|plain peak|to the host|step|copy window"
    return dict(re.findall(rf"^({names})  +(.*)$", text, re.MULTILINE))


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_each_region_has_its_row(graph, policy):
    plan = plan_of(graph, policy)
    text = format_plan(plan, WIDE)
    rows = [line for line in text.splitlines() if re.match(r" *\d+  ", line)]
    assert len(rows) == len(plan.regions) <= MAX_ROWS
    for index, (row, region) in enumerate(zip(rows, plan.regions, strict=True)):
        assert row.split()[0] == str(index)
        assert region.layers[0] in row
        assert region.layers[-1] in row
        assert re.search(rf" {len(region.layers)}  (keep|recompute|restore)\b", row)
        assert ("  keep" in row) == (not region.recompute)
        if region.recompute_seconds:
            assert format_seconds(region.recompute_seconds) in row
        for place in TITLES:
            nbytes = [one.nbytes for one in region.saved if place_of(one) == place]
            assert not nbytes or f"{len(nbytes)} · {format_bytes(sum(nbytes))}" in row
        starts = [one.prefetch_at for one in region.saved if one.tier == HOST]
        if starts:
            assert row.endswith(f"at {starts[0]}" if len(set(starts)) == 1 else f"{min(starts)}-{max(starts)}")


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_the_totals_are_the_plans(graph, policy):
    plan = plan_of(graph, policy)
    text = format_plan(plan, WIDE)
    (total,) = (line for line in text.splitlines() if f"total, {len(plan.regions)} regions" in line)
    assert int(re.search(r"regions +(\d+)", total)[1]) == len(graph.layers)
    for place, title in TITLES.items():
        tensors = {one.tensor for region in plan.regions for one in region.saved if one.tier == place}
        expected = f"{len(tensors)} · {format_bytes(graph.nbytes(*tensors))}"
        assert (expected in total) if tensors else title not in text.splitlines()[1]
    away = {one.tensor for region in plan.regions for one in region.saved if one.tier == HOST}
    assert graph.nbytes(*away) == plan.offloaded_bytes
    if again := sum(region.recompute_seconds for region in plan.regions):
        assert format_seconds(again) in total


def test_the_lines_under_the_table(graph):
    plan = plan_of(graph, "superneurons")
    said = summary_of(format_plan(plan, WIDE))
    assert said["reserved"].startswith("1000 B,")
    assert said["planned peak"] == f"{format_bytes(plan.planned_peak_bytes)}, at {plan.peak_layer}"
    assert said["plain peak"].startswith(format_bytes(plan.plain_peak_bytes))
    assert said["to the host"].startswith(format_bytes(plan.offloaded_bytes))
    assert format_seconds(plan.planned_seconds) in said["step"]
    assert format_seconds(plan.plain_seconds) in said["step"]
    assert f"{plan.slowdown:.2f}x" in said["step"]
    assert said["copy window"].startswith(f"{plan.copy_window} regions")
    left = plan.budget_bytes - plan.planned_peak_bytes
    assert said["budget"] == f"{format_bytes(plan.budget_bytes)}, of which {format_bytes(left)} left"
    over = replace(plan, budget_bytes=plan.planned_peak_bytes - 2048)
    assert summary_of(format_plan(over, WIDE))["budget"].endswith("2.00 KiB less than planned")
    assert summary_of(format_plan(replace(plan, budget_bytes=None), WIDE))["budget"] == "none"


def test_a_tensor_of_two_regions_is_one_tensor():
    both = Saved("x", nbytes=1024)
    plan = replace(PLAN, regions=(Region(("a",), (both,)), Region(("b",), (both, Saved("y", HOST, nbytes=2048)))))
    cells = columns_of(format_plan(plan))
    assert cells["on device"] == ["1 · 1.00 KiB", "1 · 1.00 KiB", "1 · 1.00 KiB"]
    assert cells["on host"] == ["", "1 · 2.00 KiB", "1 · 2.00 KiB"]
    assert cells["prefetch"] == ["", "at 1", ""]
    assert "counts once" in summary_of(format_plan(plan))["totals"]
    assert "totals" not in summary_of(format_plan(replace(PLAN, regions=PLAN.regions[:1])))


PLAN = Plan(
    policy="dict",
    batch_size=8,
    regions=(
        Region(("a", "b"), (Saved("x"), Saved("y", HOST, prefetch_at=3), Saved("z", HOST, prefetch_at=2)), True, 2e-6),
        Region(("c",), recompute=False),
        Region(("d", "e"), (Saved("c"), Saved("d:1", nbytes=2048)), True, 1.5),
    ),
    reserved_bytes=10,
    plain_peak_bytes=4096,
    planned_peak_bytes=2048,
    planned_seconds=0.5,
    plain_seconds=0.5,
)


def test_a_plan_edited_by_hand_may_lack_bytes():
    cells = columns_of(format_plan(PLAN))
    assert cells["layer calls"] == ["a … b", "c", "d … e", "total, 3 regions"]
    assert cells["calls"] == ["2", "1", "2", "5"]
    assert cells["what"] == ["recompute", "keep", "restore", ""]
    assert cells["on device"] == ["1", "", "2", "3"]
    assert cells["on host"] == ["2", "", "", "2"]
    assert cells["again"] == ["2.00 µs", "", "1.50 s", "1.50 s"]
    assert cells["prefetch"] == ["2-3", "", "", ""]
    assert "recomputed" not in cells


def test_a_deep_plan_is_cut():
    def deep(count):
        return replace(PLAN, regions=tuple(Region((f"layer{index}",), (Saved(f"t{index}", nbytes=1),)) for index in range(count)))

    for count in (1, MAX_ROWS, MAX_ROWS + 1, 5000):
        text = format_plan(deep(count))
        shown = [int(one) for one in re.findall(r"^ *\d+  layer(\d+) ", text, re.MULTILINE)]
        is_cut = count > MAX_ROWS
        every = list(range(count))
        assert shown == (every[:SHOWN_ROWS] + every[-SHOWN_ROWS:] if is_cut else every)
        assert (f"({count - 2 * SHOWN_ROWS} regions left out)" in text) == is_cut
        assert f"total, {count} regions" in text
        assert f"{count} · {format_bytes(count)}" in text


@pytest.mark.parametrize("policy", ["none", *POLICIES], ids=str)
def test_a_plan_from_json_prints_the_same(graph, policy):
    plan = plan_of(graph, policy)
    assert format_plan(Plan.from_json(plan.to_json())) == format_plan(plan) == str(plan)


@pytest.mark.parametrize("width", [40, 60, 80, 100, 160])
@pytest.mark.parametrize("policy", ["none", *POLICIES], ids=str)
def test_the_width_is_kept(graph, policy, width):
    plan = plan_of(graph, policy, share=0.5)
    text = format_plan(plan, width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert f"{len(graph.layers)}" in text or plan.is_plain


def test_no_number_is_cut_off(graph):
    """At 80 characters and in a table with all columns."""
    plan = plan_of(graph, "superneurons", share=0.5)
    for width in (80, 100):
        text = format_plan(plan, width)
        for region in plan.regions:
            if region.recompute_seconds:
                assert format_seconds(region.recompute_seconds) in text


def test_plain_keras_is_one_sentence(graph):
    plan = plan_of(graph, "none", share=2)
    assert format_plan(plan) == plan_line(plan)
    assert "plain Keras fits" in plan_line(plan)
    assert "plain Keras does not fit" in plan_line(plan_of(graph, "none", share=0.5))


def test_a_plan_in_one_line(graph):
    plan = plan_of(graph, "recompute")
    assert re.search(rf"{100 * (plan.slowdown - 1):.0f} % slower \(planned\)$", plan_line(plan))
    assert "\n" not in plan_line(plan)
    assert plan_line(PLAN).endswith("0 % slower (planned)")
    assert "less than planned" not in plan_line(plan)
    assert ", 2.00 KiB less than planned | " in plan_line(replace(plan, budget_bytes=plan.planned_peak_bytes - 2048))
    assert plan_line(replace(PLAN, planned_seconds=0.4)).endswith("20 % faster (planned)")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.00 µs"), (2.5e-7, "0.25 µs"), (1.234e-5, "12.3 µs"), (0.0012, "1.20 ms"), (0.25, "250 ms"), (61.2, "61.2 s")],
)
def test_seconds_as_text(seconds, text):
    assert format_seconds(seconds) == text


def test_a_layer_name_is_no_markup():
    plan = replace(PLAN, policy="[red]", regions=(Region(("[bold]a[/bold]",), ()),), peak_layer="[b]")
    assert "[bold]a[/bold]" in format_plan(plan)
    assert "[b]" in format_plan(plan)
    assert "[red]" in format_plan(plan)
