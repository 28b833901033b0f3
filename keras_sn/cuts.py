"""Where to cut a layer graph into regions: at boundaries that few bytes cross.

A boundary is named by the position of the layer call before it; the last layer call always ends a region.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from keras_sn.graph import LayerCall, LayerGraph


def crossing_bytes(graph: LayerGraph) -> list[int]:
    """For each layer call the bytes of the activations that later calls read and calls up to it made."""
    change = [0] * (len(graph.layers) + 1)
    for tensor, start in graph.producer.items():
        if (end := graph.last_use.get(tensor, start)) > start:
            change[start] += graph.nbytes(tensor)
            change[min(end, len(graph.layers))] -= graph.nbytes(tensor)
    return list(accumulate(change[:-1]))


def held_bytes(graph: LayerGraph, layer: LayerCall) -> int:
    """What one layer call adds to the bytes that its region's backward step holds at once."""
    return layer.internal_bytes + sum(graph.nbytes(t) for t in layer.outputs)


def equal_cuts(graph: LayerGraph, first: int, last: int, count: int, crossing: Sequence[int]) -> list[int]:
    """Cuts layer calls `first` to `last` into about `count` regions that hold about equally many bytes.

    Each cut stands at the narrowest boundary near its ideal place (the nearest of equals).

    Args:
        graph: The layer graph.
        first: Position of the first layer call.
        last: Position of the last layer call.
        count: The number of regions wished for.
        crossing: What `crossing_bytes` says of the graph.

    Returns:
        The positions of the last layer call of each region, ascending; the last one is `last`.
    """
    cumulative = list(accumulate(held_bytes(graph, layer) for layer in graph.layers[first : last + 1]))
    share = cumulative[-1] / count
    ends: list[int] = []
    for index in range(1, count):
        ideal = share * index
        low = first + bisect_left(cumulative, ideal - share / 2)
        high = min(first + bisect_left(cumulative, ideal + share / 2), last - 1)
        window = range(max(low, ends[-1] + 1 if ends else first), high + 1)
        if window:
            ends.append(min(window, key=lambda i: (crossing[i], abs(cumulative[i - first] - ideal))))
    return [*ends, last]


def cuts_after(graph: LayerGraph, ends_region: Callable[[LayerCall], bool]) -> list[int]:
    """Cuts after each layer call for which `ends_region` is true, and after the last one."""
    last = len(graph.layers) - 1
    return [i for i, layer in enumerate(graph.layers) if i == last or ends_region(layer)]


def runs(ends: Sequence[int], first: int = 0) -> list[range]:
    """The positions of each region's layer calls, from where the regions end."""
    starts = [first, *(end + 1 for end in ends[:-1])]
    return [range(start, end + 1) for start, end in zip(starts, ends, strict=True)]
