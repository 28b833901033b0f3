"""What one region of a plan makes again and holds while it runs, whatever the other regions do.

Most regions of a plan are regions of the next plan that is tried, so all of this is computed once for each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from keras_sn.backward_memory import BackwardMemory, backward_memory
from keras_sn.gradients import gradient_bytes, until_the_end
from keras_sn.graph import LayerCall, LayerGraph
from keras_sn.plan import Region


@dataclass(frozen=True, slots=True)
class RegionBytes:
    """Bytes of one region, and what its backward pass reads and runs again."""

    read: frozenset[str]
    """What its backward pass reads and has not saved."""
    again: tuple[int, ...]
    """Positions of the layer calls that its backward function runs again."""
    leaving: int
    """Of what it makes for others."""
    inside: int
    """The most that a layer call of its forward pass reads and writes that does not leave it, and that nothing holds longer."""
    held: int
    """Of what its backward pass reads, and has not saved."""
    statistics: int
    """That wait for its backward pass."""
    forward: int
    """Only in its forward pass."""
    backward: int
    """Only in its backward pass, with all gradients; of `compiled`, where there is one, without others' gradients."""
    of_weights: int
    """Gradients of its weights that are gone once the weights are updated."""
    compiled: BackwardMemory | None
    """What XLA's backward function holds."""


_KNOWN: "WeakKeyDictionary[LayerGraph, dict[tuple, RegionBytes]]" = WeakKeyDictionary()


def region_bytes(graph: LayerGraph, region: Region) -> RegionBytes:
    """What a region holds by itself.

    Args:
        graph: The layer graph.
        region: Consecutive layer calls of it.
    """
    key = key_of(region)
    known = _KNOWN.setdefault(graph, {})
    if key not in known:
        known[key] = _Counting(graph, region, key[2]).counted()
    return known[key]


def key_of(region: Region) -> tuple:
    """What distinguishes a region of a graph from others that may take other bytes or seconds."""
    return region.layers[0], len(region.layers), frozenset([one.tensor for one in region.saved]), region.recompute


class _Counting:
    def __init__(self, graph: LayerGraph, region: Region, saved: frozenset[str]):
        self.graph, self.region, self.saved = graph, region, saved
        self.layers = graph.layers_named(region.layers)
        self.last = graph.position[region.layers[-1]]
        self.read, _ = recomputed(self.layers, saved, graph.virtual)

    def counted(self) -> RegionBytes:
        graph, layers, region = self.graph, self.layers, self.region
        gradients = gradient_bytes(graph)
        of_weights = until_the_end(layers) if graph.updates_in_backward else [0] * len(layers)
        held = peak = forward = 0
        inside = self.inside()
        for layer, own, weights in zip(layers, inside, of_weights, strict=True):
            # What a layer call holds, its backward step and those of all later layer calls find there.
            held += layer.internal_bytes + graph.nbytes(*(t for t in layer.outputs if t in self.read and self.is_own(t)))
            # TensorFlow's convolutions on a CPU put what they read into an order of their own first.
            scratch = graph.nbytes(*layer.inputs, *layer.outputs) * layer.is_convolution
            peak = max(peak, held + weights + gradients[graph.position[layer.name]] + scratch)
            forward = max(forward, own + (0 if region.recompute else held))
        compiled = backward_memory(graph, layers, self.saved, is_plain=not region.recompute) if graph.is_compiled else None
        if compiled:
            # What is kept is no function of its own, and weights are updated while its backward pass goes on.
            peak = compiled.total - compiled.of_weights * (not region.recompute and graph.updates_in_backward)
        leaving = graph.nbytes(*(t for layer in layers for t in layer.outputs if self.is_crossing(t)))
        again = recomputed(layers, self.saved)[1] if region.recompute else []
        return RegionBytes(
            read=frozenset(self.read),
            again=tuple(graph.position[name] for name in again),
            leaving=leaving,
            inside=max(inside),
            held=held,
            statistics=region.recompute * sum(layer.statistics_bytes for layer in layers),
            forward=forward,
            backward=peak,
            of_weights=of_weights[0],
            compiled=compiled,
        )

    def inside(self) -> list[int]:
        """By layer call: what it reads and writes that does not leave the region, and that nothing holds longer."""
        held = set() if self.region.recompute else self.read
        inside = {t for layer in self.layers for t in layer.outputs if not self.is_crossing(t)} - held - self.graph.virtual
        return [self.graph.nbytes(*(t for t in (*layer.inputs, *layer.outputs) if t in inside)) for layer in self.layers]

    def is_crossing(self, tensor: str) -> bool:
        """Whether a later region reads it."""
        return self.last < len(self.graph.layers) - 1 and self.graph.last_use.get(tensor, -1) > self.last

    def is_own(self, tensor: str) -> bool:
        """Whether what a backward step reads and has not saved takes memory of its own in the region."""
        if self.is_crossing(tensor):
            return self.region.recompute  # others say for how long a kept region's is there
        return tensor not in self.graph.virtual


def recomputed(
    layers: Sequence[LayerCall], saved: frozenset[str], virtual: frozenset[str] = frozenset()
) -> tuple[set[str], list[str]]:
    """What the backward pass of a region makes again.

    Args:
        layers: The region's layer calls.
        saved: The tensors that the region has saved: its inputs, and layer outputs inside it.
        virtual: Tensors that are never written inside a region; who reads one reads what it is made of.

    Returns:
        The tensors made again that a backward step reads, and the names of the layer calls that run again, the last one first:
        those whose outputs a backward step reads, those whose backward steps read what they hold, and those that these need.
    """
    read = {tensor for layer in layers for tensor in layer.saved_for_backward} - saved
    needed, again = set(read), []
    for layer in reversed(layers):
        if layer.internal_bytes or needed.intersection(layer.outputs):
            needed.update(set(layer.inputs) - saved)
            again.append(layer.name)
        if not virtual.isdisjoint(layer.outputs) and not read.isdisjoint(layer.outputs):
            read.update(set(layer.inputs) - saved)
    return read, again
