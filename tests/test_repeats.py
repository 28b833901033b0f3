"""`repeats`: blocks that repeat, and plans whose regions are equal there."""

from dataclasses import replace

import pytest

from keras_sn.auto import REPEATED_GRAPH
from keras_sn.cost import ON_GPU
from keras_sn.cuts import crossing_bytes
from keras_sn.graph import LayerCall, LayerGraph, TensorSpec
from keras_sn.planner import make_plan
from keras_sn.repeats import Run, compiled_calls, equal_cuts_through, kinds, repeated


def chain(blocks, block=(4, 1, 4), first=(2,), last=(8,)):
    """A chain of layer calls; a number stands for the size of what a call makes, and a small one is cheap."""
    sizes = [*first, *(blocks * list(block)), *last]
    layers = [
        LayerCall(
            name=f"layer_{place}",
            layer_type="Dense",
            inputs=(f"t{place}",),
            outputs=(f"t{place + 1}",),
            saved_for_backward=(f"t{place}",),
            flops=size * 10**9,
            is_costly=True,
        )
        for place, size in enumerate(sizes)
    ]
    tensors = {f"t{place}": TensorSpec(f"t{place}", (size * 2**18,), "float32") for place, size in enumerate([1, *sizes])}
    return LayerGraph(tuple(layers), tensors, ("t0",), (f"t{len(sizes)}",))


@pytest.mark.parametrize(
    ("letters", "found"),
    [
        ("abcabcabcabcd", [Run(0, 3, 4)]),
        ("xyabababzz", [Run(2, 2, 3)]),
        ("aaaa", [Run(0, 1, 4)]),
        ("abcabc", []),
        ("aabaabaabcdcdcd", [Run(0, 3, 3), Run(9, 2, 3)]),
        ("abababcababab", [Run(0, 2, 3), Run(7, 2, 3)]),
        ("", []),
    ],
)
def test_repeated_blocks(letters, found):
    assert repeated([ord(letter) for letter in letters]) == found


def test_layer_calls_of_a_kind_do_the_same_and_are_wired_the_same():
    graph = chain(3)
    found = kinds(graph)
    assert found[1:4] == found[4:7]
    assert len({found[1], found[2]}) == 2
    fork = replace(graph.layers[5], inputs=("t3", "t5"))
    assert kinds(replace(graph, layers=(*graph.layers[:5], fork, *graph.layers[6:])))[5] != found[2]


def test_cuts_go_through_the_narrow_places_at_equal_distances():
    graph = chain(6)
    runs = repeated(kinds(graph))
    held = [graph.nbytes(*layer.outputs) for layer in graph.layers]
    cuts = equal_cuts_through(runs, crossing_bytes(graph), held, 2 * sum(held[1:4]))
    assert [list(one) for one in cuts] == [[2, 8, 14]]
    assert all(graph.tensors[graph.layers[p].outputs[0]].shape == (2**18,) for p in cuts[0])


def test_a_deep_network_gets_a_few_different_regions():
    """A hundred blocks and more; each function is compiled once."""
    graph = chain(120)
    assert len(graph.layers) > REPEATED_GRAPH
    plain = make_plan(graph, "none", batch_size=1, reserved_bytes=0, cost_model=ON_GPU, compiled=True)
    budget = int(0.4 * plain.plain_peak_bytes)
    plan = make_plan(graph, "auto", batch_size=1, reserved_bytes=0, budget_bytes=budget, cost_model=ON_GPU, compiled=True)
    assert plan.planned_peak_bytes <= budget
    assert [name for region in plan.regions for name in region.layers] == [layer.name for layer in graph.layers]
    assert compiled_calls(graph, plan.regions, kinds(graph)) < len(graph.layers) / 3
    assert plan.planned_seconds < 1.3 * plan.plain_seconds


def test_regions_are_equal_if_they_save_the_same():
    graph = chain(4)
    layers = [layer.name for layer in graph.layers]
    plan = make_plan(graph, "recompute", batch_size=1, reserved_bytes=0)
    same = [replace(plan.regions[0], layers=tuple(layers[first : first + 3]), saved=()) for first in (1, 4, 7)]
    assert compiled_calls(graph, same, kinds(graph)) == 3
    saving = replace(same[1], saved=(replace(plan.regions[0].saved[0], tensor="t6"),)) if plan.regions[0].saved else None
    assert saving is None or compiled_calls(graph, [same[0], saving, same[2]], kinds(graph)) == 6
