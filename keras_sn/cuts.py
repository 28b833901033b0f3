"""Where to cut a layer graph into regions: at boundaries that few bytes cross.

A boundary is named by the position of the layer call before it; the last layer call always ends a region.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from keras_sn.graph import LayerCall, LayerGraph

MAX_BOUNDARIES = 200
LOOKED_AT = 400_000
"""Layer calls that all spans together may be grown by; it bounds the longest span."""
MIN_LENGTH = 8


def crossing_bytes(graph: LayerGraph) -> list[int]:
    """For each layer call the bytes of the activations that later calls read and calls up to it made."""
    change = [0] * (len(graph.layers) + 1)
    for tensor, start in graph.producer.items():
        if (end := graph.last_use.get(tensor, start)) > start:
            change[start] += graph.nbytes(tensor)
            change[min(end, len(graph.layers))] -= graph.nbytes(tensor)
    return list(accumulate(change[:-1]))


def boundaries(graph: LayerGraph, crossing: Sequence[int], limit: int = MAX_BOUNDARIES) -> list[int]:
    """Positions of layer calls after which a region may end: all in a small graph, the narrow ones in a large graph."""
    last, reach = len(graph.layers) - 1, 0
    found = list(range(last))
    while len(found) > limit and reach < 64:
        reach = 2 * reach + 1
        found = [i for i in found if crossing[i] <= min(crossing[max(0, i - reach) : i + reach + 1])]
    if len(found) > limit:  # thinned evenly: where layer calls repeat, so do the cuts
        found = found[:: -(-len(found) // limit)]
    return [*found, last]


def lengths(count: int, layer_calls: int) -> list[int]:
    """How many stretches between boundaries a region may have: every number up to 16, then growing by a quarter."""
    most = max(MIN_LENGTH, min(96, LOOKED_AT // layer_calls))
    found = list(range(1, min(count, 16, most) + 1))
    while found[-1] < min(count, most):
        found.append(min(count, found[-1] + found[-1] // 4))
    return sorted({*found, count} if count <= 64 else set(found))


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
