"""The planner's figures, by hand: gradients, what XLA never writes, copies in time."""

from dataclasses import replace

import pytest

from keras_sn.candidates import in_time
from keras_sn.cost import CostModel, StepCosts
from keras_sn.fusion import UNPLANNED_SHARE, as_compiled
from keras_sn.gradients import gradient_bytes
from keras_sn.graph import LayerCall, LayerGraph, TensorSpec
from keras_sn.plan import Region, Saved
from keras_sn.predict import Timeline, predict
from keras_sn.timing import schedule_prefetches, time_regions

MIB = 2**20


def graph_of(*layers: LayerCall, sizes: dict[str, int]) -> LayerGraph:
    """Layer calls on tensors of so many bytes; `x` is the input, the last output the model's."""
    tensors = {
        name: TensorSpec(name, (size // 4,), "float32", "input" if name == "x" else "activation") for name, size in sizes.items()
    }
    return LayerGraph(layers, tensors, ("x",), layers[-1].outputs)


def call(name, inputs, output, reads=(), **more):
    return LayerCall(name, "any", tuple(inputs), (output,), tuple(reads), **more)


def residual(**of_add):
    """conv -> bn -> relu, added to the convolution's own input."""
    return graph_of(
        call("start", "x", "a", ["x"], flops=400, is_costly=True, weight_bytes=40),
        call("conv", "a", "b", ["a"], flops=400, is_costly=True, weight_bytes=8),
        call("bn", "b", "c", ["b"], is_fusible=True),
        call("relu", "c", "d", ["d"], is_fusible=True, gradient_in_place=True),
        call("add", "ad", "e", is_fusible=True, **of_add),
        call("end", "e", "f", ["e"], flops=400, is_costly=True),
        sizes={"x": 4, "a": 400, "b": 400, "c": 400, "d": 400, "e": 400, "f": 4},
    )


def test_an_addition_hands_its_gradient_on():
    """Without sharing both inputs of the addition get gradients of their own."""
    alone, shared = gradient_bytes(residual()), gradient_bytes(residual(gradient_in_place=True))
    weights = [48, 8, 0, 0, 0, 0]  # of the backward steps that have come before, the last layer call first
    # From the right. end: f, e. add: e, and a, d where not shared. relu: c in place of d, a. bn: c, b, a. conv: b, and a grows.
    assert [one - w for one, w in zip(alone, weights, strict=True)] == [400, 800, 1200, 800, 1200, 404]
    assert [one - w for one, w in zip(shared, weights, strict=True)] == [400, 800, 800, 400, 400, 404]


def test_xla_writes_no_tensor_between_fusible_layer_calls():
    graph = as_compiled(residual(gradient_in_place=True))
    assert graph.virtual == {"c", "d"}  # e is read by a costly layer call
    assert not residual().virtual


def test_weight_gradients_wait_for_nobody_where_weights_are_updated_in_the_backward_pass():
    """400 bytes for each layer call, and those of two regions at most: the update runs beside the next region's backward pass."""
    graph = graph_of(
        call("first", "x", "a", ["x"], weight_bytes=400),
        call("second", "a", "b", ["a"], weight_bytes=400),
        call("third", "b", "c", ["b"], weight_bytes=400),
        sizes={"x": 4, "a": 8, "b": 8, "c": 8},
    )
    regions = [Region((layer.name,), (Saved(layer.inputs[0], nbytes=8),)) for layer in graph.layers]
    late = predict(graph, regions)
    early = predict(replace(graph, updates_in_backward=True), regions)
    assert (late.peak_bytes, late.peak_layer) == (1200 + 8 + 4, "first")  # weights, the gradient of a, x
    assert (early.peak_bytes, early.peak_layer) == (800 + 8 + 16 + 4, "second")  # and a itself, the gradients of a and b
    assert sum(gradient_bytes(graph)) - sum(gradient_bytes(replace(graph, updates_in_backward=True))) == 400 * (1 + 2 + 3)
    together = [Region(("first", "second", "third"), (Saved("x", nbytes=4),))]
    assert predict(graph, together) == predict(replace(graph, updates_in_backward=True), together)


def test_what_a_region_holds_in_its_backward_pass():
    graph = residual(gradient_in_place=True)
    names = [layer.name for layer in graph.layers]
    whole = Region(tuple(names), (Saved("x"),))
    # At `end`: a, b, d and e made again, gradients of e and f.
    assert predict(graph, [whole]).peak_bytes == 4 + 4 * 400 + 404
    compiled = predict(as_compiled(graph), [whole])
    # At `bn`: a and b, the gradients of a and b, and what is given and returned: those of f and of the weights.
    assert compiled.peak_bytes == 4 + int((1 + UNPLANNED_SHARE) * (2 * 400 + 2 * 400 + 4 + 48))
    assert compiled.peak_layer == "end"


def chain_of_eight(size):
    names = ["x", *(f"t{i}" for i in range(8))]
    layers = [call(f"l{i}", [names[i]], names[i + 1], [names[i]], flops=100) for i in range(8)]
    return graph_of(*layers, sizes=dict.fromkeys(names, size) | {"x": 4})


def test_a_tensor_in_a_tier_is_there_only_around_its_copies():
    layers = [
        call(f"l{i}", ["x" if i == 0 else f"t{i - 1}"], f"t{i}", ["x" if i == 0 else f"t{i - 1}"], flops=100) for i in range(8)
    ]
    graph = graph_of(*layers, sizes={"x": 4} | {f"t{i}": 4 * MIB for i in range(8)})
    kept = [Region((layer.name,), (Saved(layer.inputs[0]),)) for layer in layers]
    away = [Region(r.layers, (Saved(r.saved[0].tensor, "host", i + 1),)) if 0 < i < 7 else r for i, r in enumerate(kept)]
    assert predict(graph, away).peak_bytes < 0.6 * predict(graph, kept).peak_bytes
    assert predict(graph, away).offloaded_bytes == 6 * 4 * MIB
    assert predict(graph, away, copy_window=8).peak_bytes > predict(graph, away, copy_window=2).peak_bytes


@pytest.fixture
def costs():
    """Eight layer calls of one second forward and one backward; a copy of a tensor takes half a second."""
    layers = [
        call(f"l{i}", ["x" if i == 0 else f"t{i - 1}"], f"t{i}", ["x" if i == 0 else f"t{i - 1}"], flops=100) for i in range(8)
    ]
    graph = graph_of(*layers, sizes={"x": 4} | {f"t{i}": 400 for i in range(8)})

    def make(link=800.0, copies_overlap=True):
        return StepCosts(graph, CostModel(100, 1e9, link, 0.0, copies_overlap=copies_overlap))

    return make


def each_away(costs, distance):
    layers = costs.graph.layers
    return [
        Region((layer.name,), (Saved(layer.inputs[0], *(("host", min(i + distance, 7)) if i else ())),))
        for i, layer in enumerate(layers)
    ]


def test_copies_hide_behind_compute_if_the_link_is_fast_enough(costs):
    # A copy that is asked for one region ahead begins when that region is done: it hides behind nothing.
    assert time_regions(costs(), each_away(costs(), 1)).seconds == pytest.approx(16 + 7 * 0.5)
    # The last region has nothing before it, and the one before that only the last.
    assert time_regions(costs(), each_away(costs(), 2)).seconds == pytest.approx(16 + 2 * 0.5)
    blocked = time_regions(costs(copies_overlap=False), each_away(costs(), 1))
    assert blocked.seconds == pytest.approx(16 + 2 * 7 * 0.5)
    assert blocked.stall_seconds == pytest.approx(7)
    slow = time_regions(costs(link=200), each_away(costs(), 1))
    assert slow.seconds > 16 + 2 * 7 - 3  # two seconds a copy, one of compute to hide it


def test_prefetches_start_as_late_as_they_can(costs):
    regions = schedule_prefetches(costs(link=200), each_away(costs(), 1))
    starts = [one.prefetch_at for region in regions for one in region.saved if one.tier == "host"]
    assert all(start >= index for index, start in enumerate(starts, 1))
    assert max(start - index for index, start in enumerate(starts, 1)) > 1  # a slow link is asked earlier
    fast = schedule_prefetches(costs(link=8e5), each_away(costs(), 1))
    assert [one.prefetch_at for region in fast for one in region.saved if one.tier == "host"] == [3, 4, 5, 6, 7, 7, 7]


def test_a_replay_costs_its_whole_chain(costs):
    """Each region recomputes its input from the first: 0 + 1 + 2 … forward passes."""
    layers = costs().graph.layers
    regions = [Region((layer.name,), (Saved(layer.inputs[0], "recompute" if i else "device"),)) for i, layer in enumerate(layers)]
    timing = time_regions(costs(), regions)
    assert timing.recompute_seconds == tuple(range(8))
    assert timing.seconds == pytest.approx(16 + sum(range(8)))


def test_copies_of_a_replay_are_waited_for_and_are_there_all_at_once(costs):
    """The fifth region makes `t3` again from `t2`, and that from `t1`, which is on the host; a copy takes half a second."""
    layers = costs().graph.layers
    tiers = {1: "host", 2: "host", 3: "recompute", 4: "recompute"}
    regions = [
        Region((layer.name,), (Saved(layer.inputs[0], tiers.get(i, "device"), i if tiers.get(i) == "host" else None),))
        for i, layer in enumerate(layers)
    ]
    timing = time_regions(costs(), regions)
    assert timing.recompute_seconds[:6] == pytest.approx((0, 0, 0, 1.5, 2.5, 0))
    large = replace(costs().graph, tensors=costs().graph.tensors | {"t1": TensorSpec("t1", (1000,), "float32")})
    in_backward = predict(large, regions, 2).levels[8:][::-1]
    assert [nbytes > 4000 for nbytes in in_backward] == [False, True, True, True, True, False, False, False]


def test_a_gradient_from_later_regions_is_added_up_in_memory_of_its_own():
    """`b` is read inside its region and after it, so its gradient arrives and is added to."""
    graph = graph_of(
        call("first", "x", "a", ["x"], flops=400, is_costly=True),
        call("second", "a", "b", ["a"], flops=400, is_costly=True),
        call("third", "b", "c", ["b"], flops=400, is_costly=True),
        call("last", "bc", "d", ["b", "c"], flops=400, is_costly=True),
        sizes={"x": 4, "a": 400, "b": 400, "c": 400, "d": 4},
    )
    regions = [Region(("first", "second", "third"), (Saved("x"),)), Region(("last",), (Saved("b"), Saved("c")))]
    compiled = predict(replace(graph, is_compiled=True), regions, 2).levels[-1] - 4
    # Given: the gradients of b and c. At `third`: a, and b, which is gone when the sum for its gradient is made.
    assert compiled == int((1 + UNPLANNED_SHARE) * (2 * 400 + 2 * 400))


def test_copies_come_back_when_there_is_room_for_them(costs):
    regions = each_away(costs(), 3)
    early, late = (max(predict(costs().graph, one, 1).levels) for one in (regions, each_away(costs(), 0)))
    assert late < early
    assert max(predict(costs().graph, in_time(Timeline(costs().graph, regions), regions, late), 1).levels) == late
    assert in_time(Timeline(costs().graph, regions), regions, early) == regions
    between = (early + late) // 2
    timed = in_time(Timeline(costs().graph, regions), regions, between)
    assert max(predict(costs().graph, timed, 1).levels) <= between
    assert timed != in_time(Timeline(costs().graph, regions), regions, 0) == each_away(costs(), 0)


def test_what_has_not_left_by_the_end_of_the_forward_pass_is_still_there(costs):
    """The last region's input leaves when the pass is over; the wider the window, the longer nobody waits for that."""
    graph = costs().graph
    regions = [Region((layer.name,), (Saved(layer.inputs[0]),)) for layer in graph.layers]
    regions[6] = Region(regions[6].layers, (Saved("t5", "host", 6),))
    narrow, wide = (predict(graph, regions, window).levels for window in (1, 3))
    assert [b - a for a, b in zip(narrow, wide, strict=True)] == [0] * 7 + [400] * 2 + [0] * 7


def test_what_is_asked_for_first_has_to_leave_first(costs):
    """It is asked for before it has left, and what comes after it waits; that is not so where a later region asks for it."""
    regions = [Region((layer.name,), (Saved(layer.inputs[0]),)) for layer in costs().graph.layers]

    def seconds(prefetch_at: int) -> float:
        away = Region(regions[4].layers, (Saved("t3", "host", prefetch_at),))
        return time_regions(costs(link=400 / 4.5), [*regions[:4], away, *regions[5:]], 8).seconds

    # It is there at 4 seconds, and has left at 8.5: the second backward pass waits for that, and the fourth for the way back.
    assert seconds(7) == pytest.approx(8 + 1 + 4.5 + 5)
    assert seconds(6) == pytest.approx(8 + 2 + 4.5 + 5)


def normalized(statistics_bytes):
    """conv -> batch normalization -> conv, compiled, in one region that saves its input."""
    graph = graph_of(
        call("conv", "x", "a", ["x"], flops=400, is_costly=True, weight_bytes=8),
        call("bn", "a", "b", ["a"], is_fusible=True, weight_bytes=8, statistics_bytes=statistics_bytes),
        call("end", "b", "c", ["b"], flops=400, is_costly=True, weight_bytes=8),
        sizes={"x": 400, "a": 400, "b": 400, "c": 400},
    )
    return as_compiled(graph), [Region(("conv", "bn", "end"), (Saved("x"),))]


def test_statistics_that_are_kept_wait_on_the_device_and_are_not_summed_again():
    (kept, regions), (summed, _) = normalized(80), normalized(0)
    more = [one - other for one, other in zip(predict(kept, regions).levels, predict(summed, regions).levels, strict=True)]
    assert more == [pytest.approx(80 * (1 + UNPLANNED_SHARE), abs=1)] * 2
    model = CostModel(400.0, 400.0, 400.0, 1.0)
    kept, summed = StepCosts(kept, model), StepCosts(summed, model)
    assert kept.forward == summed.forward
    # Two passes over 400 bytes and two launches less.
    assert summed.again[1] - kept.again[1] == pytest.approx(2 * 400 / 400 + 2)
    assert (kept.again[0], kept.again[2]) == (summed.again[0], summed.again[2])
    assert summed.again == summed.forward
    assert time_regions(summed, regions).recompute_seconds[0] - time_regions(kept, regions).recompute_seconds[0] == pytest.approx(
        4
    )
