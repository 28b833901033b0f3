"""Blocks of layer calls that repeat, and cuts at equal distances through them.

XLA compiles equal regions once. In a deep network that decides how long the first training step takes: regions of as many equal
blocks each share one function, where freely chosen ones need one each.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from keras_sn.graph import LayerGraph
from keras_sn.plan import Region

LONGEST_BLOCK = 400
"""Layer calls."""
FEWEST_BLOCKS = 3
LOOKED_AT = 4
"""How many of the next layer calls of the same kind are tried as the beginning of the next block."""


@dataclass(frozen=True, slots=True)
class Run:
    """Equal blocks of layer calls, one after the other."""

    first: int
    """Position of the first layer call."""
    length: int
    """Layer calls in a block."""
    count: int
    """Blocks."""


def kinds(graph: LayerGraph) -> list[int]:
    """By position, a number that is the same for layer calls that do the same and are wired the same."""
    known: dict[Any, int] = {}
    return [known.setdefault(_look(graph, position), len(known)) for position in range(len(graph.layers))]


def _look(graph: LayerGraph, position: int) -> tuple:
    layer = graph.layers[position]
    made = [graph.producer.get(tensor) for tensor in layer.inputs]
    read = [graph.last_use.get(tensor, position) - position for tensor in layer.outputs]
    shapes = [graph.tensors[tensor].shape for tensor in layer.outputs]
    wiring = tuple(None if one is None else position - one for one in made), tuple(read), tuple(shapes)
    return wiring, layer.flops, layer.weight_bytes, layer.internal_bytes, layer.is_fusible, layer.is_costly


def repeated(of_kind: Sequence[int]) -> list[Run]:
    """Runs of at least `FEWEST_BLOCKS` equal blocks, from front to back; none overlaps another."""
    places: dict[int, list[int]] = {}
    for position, kind in enumerate(of_kind):
        places.setdefault(kind, []).append(position)
    found: list[Run] = []
    position = 0
    while position < len(of_kind):
        same = places[of_kind[position]]
        later = same[bisect_right(same, position) :][:LOOKED_AT]
        runs = [_run(of_kind, position, place - position) for place in later if place - position <= LONGEST_BLOCK]
        runs = [run for run in runs if run.count >= FEWEST_BLOCKS]
        if runs:
            found.append(max(runs, key=lambda run: (run.length * run.count, -run.length)))
        position += found[-1].length * found[-1].count if runs else 1
    return found


def _run(of_kind: Sequence[int], first: int, length: int) -> Run:
    end = first
    while end + length < len(of_kind) and of_kind[end] == of_kind[end + length]:
        end += 1
    return Run(first, length, 1 + (end - first) // length)


def equal_cuts_through(runs: Sequence[Run], crossing: Sequence[int], held: Sequence[int], nbytes: float) -> tuple[range, ...]:
    """For each run the positions after which regions of whole blocks end.

    Args:
        runs: What repeats.
        crossing: By position, the bytes that cross a cut after it; cuts go through the narrowest place of a block.
        held: By position, the bytes that a layer call adds to what its region holds.
        nbytes: What a region should hold, about.
    """
    cuts = []
    for run in runs:
        block = range(run.first, run.first + run.length)
        narrowest = min(block, key=lambda position: crossing[position])
        blocks = max(1, min(run.count - 1, round(nbytes / max(1, sum(held[position] for position in block)))))
        cuts.append(range(narrowest, narrowest + run.length * run.count, run.length * blocks))
    return tuple(cuts)


def compiled_calls(graph: LayerGraph, regions: Sequence[Region], of_kind: Sequence[int]) -> int:
    """How many layer calls the functions of all regions hold, equal regions counted once."""
    sizes: dict[Any, int] = {}
    for region in regions:
        first = graph.position[region.layers[0]]
        saved = sorted(graph.producer[one.tensor] - first for one in region.saved if one.tensor in graph.producer)
        sizes[tuple(of_kind[graph.position[name]] for name in region.layers), tuple(saved)] = len(region.layers)
    return sum(sizes.values())
