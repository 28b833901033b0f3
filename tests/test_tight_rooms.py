"""Where memory is short: regions counted buffer by buffer, layer calls cut out, the smallest plan made faster."""

from dataclasses import replace
from functools import cache

import pytest
from test_frontier import TINY

from keras_sn import auto, forgetting
from keras_sn.auto import Auto
from keras_sn.benchmarks.frontier import Frontier
from keras_sn.candidates import evaluate
from keras_sn.cost import ON_GPU, StepCosts
from keras_sn.drafts import Draft, regions_of
from keras_sn.exact_spans import ExactSpanCosts
from keras_sn.fusion import as_compiled
from keras_sn.policies import keep_all
from keras_sn.region_bytes import region_bytes
from keras_sn.spans import SpanCosts


@cache
def costs_of(name, model=ON_GPU):
    return StepCosts(as_compiled(Frontier.of(name, TINY[name], compiled=True).graph), model)


def test_a_counted_option_holds_what_the_region_holds():
    costs = costs_of("resnet50")
    graph, exact, rough = costs.graph, ExactSpanCosts(costs), SpanCosts(costs)
    ends, found, differ = exact.ends, 0, 0
    for counted, scanned in zip(exact.candidates, rough.candidates, strict=True):
        for (before, span), (_, other) in zip(counted, scanned, strict=True):
            for option, guess in zip(span.options, other.options, strict=True):
                own = {
                    t for p in range(span.first, span.last + 1) if exact.saves(option.level, p) for t in graph.layers[p].outputs
                }
                around = {span.last, len(graph.layers) - 1, *([ends[before]] if before >= 0 else [])}
                regions = regions_of(graph, Draft(tuple(sorted(around)), saved=frozenset(own)))
                region = regions[int(before >= 0)]
                held = region_bytes(graph, region).backward
                later = [t for t in (one.tensor for one in region.saved) if graph.producer.get(t, -1) >= span.first]
                crossing = graph.nbytes(*(t for t in later if graph.last_use[t] > span.last))
                assert option.backward_bytes == held + crossing
                found, differ = found + 1, differ + (option.backward_bytes != guess.backward_bytes)
    assert found > 100
    assert differ > found / 4


@pytest.mark.parametrize(("slow", "counts"), [(0.0, True), (float("inf"), False)])
def test_regions_are_counted_where_plans_are_slow(monkeypatch, slow, counts):
    costs, seen = costs_of("resnet50"), []
    keep = ExactSpanCosts._counted
    monkeypatch.setattr(ExactSpanCosts, "_counted", lambda *arguments: seen.append(1) or keep(*arguments))
    monkeypatch.setattr(auto, "SLOW", slow)
    room = int(0.7 * evaluate(costs, [keep_all(costs.graph)], 0).peak_bytes)
    assert Auto(SpanCosts(costs), None).cheapest(room).fits(room, None)
    assert bool(seen) == counts


def test_a_layer_call_is_cut_out_where_one_cut_does_not_help(monkeypatch):
    costs = costs_of("inception_v4")
    with_it = Auto(SpanCosts(costs), None).smallest_at_any_price.peak_bytes
    monkeypatch.setattr(forgetting, "_isolating", lambda candidate: iter(()))
    assert with_it < 0.95 * Auto(SpanCosts(costs), None).smallest_at_any_price.peak_bytes


def test_the_smallest_plan_is_made_faster():
    costs = costs_of("inception_v4")
    search = Auto(SpanCosts(costs), None)
    smallest = search.smallest_at_any_price
    found = search.cheapest(smallest.peak_bytes)
    assert found.fits(smallest.peak_bytes, None)
    assert found.seconds < smallest.seconds
    assert search.cheapest(smallest.peak_bytes // 2) is None


def test_plans_that_wait_for_the_host_are_not_slow():
    costs = costs_of("densenet", replace(ON_GPU, host_seconds_per_kernel=1e-3))
    search = Auto(SpanCosts(costs), None)
    plain = evaluate(costs, [keep_all(costs.graph)], 0)
    assert costs.plain_step_seconds == pytest.approx(plain.seconds)
    assert plain.seconds > 2 * costs.plain_seconds
    assert not search._is_slow([plain], plain.peak_bytes)
