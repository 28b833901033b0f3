"""The peak memory of a plan of regions, and its extra arithmetic, on paper.

The timeline has one slot for each region's forward pass and, in reverse order, one for each region's backward pass. A tensor
occupies the slots in which it is on the device; what a region needs only while it runs is added to its own two slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from keras_sn.graph import LayerCall, LayerGraph
from keras_sn.plan import DEVICE, Plan, Region, Saved

COPY_WINDOW = Plan.copy_window


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is predicted to need, beyond the reserved bytes."""

    peak_bytes: int
    peak_layer: str
    """The last layer call of the region that makes the peak."""
    offloaded_bytes: int
    slowdown: float
    """Arithmetic of a step over plain Keras' arithmetic; a backward step counts as two forward steps."""


def predict(graph: LayerGraph, regions: Sequence[Region]) -> Prediction:
    """Runs a plan's regions on paper.

    Args:
        graph: The layer graph.
        regions: The plan's regions in execution order; together they hold every layer call once.

    Returns:
        The peak in bytes with the layer call that makes it, the bytes that leave the device, and the slow-down.
    """
    timeline = _Timeline(graph, regions)
    timeline.add_tensors()
    again = sum(timeline.add_private(index) for index in range(len(regions)))
    peak, slot = timeline.peak()
    region = regions[min(slot, 2 * len(regions) - 1 - slot)] if regions else None
    saved = {one.tensor: one for region in regions for one in region.saved}
    offloaded = sum(graph.nbytes(name) for name, one in saved.items() if one.tier != DEVICE)
    total = 3 * sum(layer.flops for layer in graph.layers)
    return Prediction(peak, region.layers[-1] if region else "", offloaded, 1 + again / total if total else 1.0)


class _Timeline:
    def __init__(self, graph: LayerGraph, regions: Sequence[Region]):
        self.graph, self.regions, self.count = graph, regions, len(regions)
        self.change = [0] * (2 * self.count + 1)
        self.region_of = {name: index for index, region in enumerate(regions) for name in region.layers}
        self.made_in = {
            tensor: self.region_of[layer.name]
            for layer in graph.layers
            for tensor in layer.outputs
            if layer.name in self.region_of
        }
        self.readers: dict[str, list[int]] = {}
        self.keepers: dict[str, list[int]] = {}
        """Tensor -> the kept regions whose backward pass reads it."""
        for layer in graph.layers:
            for tensor in layer.inputs:
                self.readers.setdefault(tensor, []).append(self.region_of[layer.name])
            if not regions[self.region_of[layer.name]].recompute:
                for tensor in layer.saved_for_backward:
                    self.keepers.setdefault(tensor, []).append(self.region_of[layer.name])

    def backward(self, region: int) -> int:
        return 2 * self.count - 1 - region

    def add(self, nbytes: int, first_slot: int, last_slot: int) -> None:
        if first_slot <= last_slot:
            self.change[first_slot] += nbytes
            self.change[last_slot + 1] -= nbytes

    def add_tensors(self) -> None:
        """Everything that lives longer than one region: saved tensors, tensors between regions, and their gradients."""
        saved: dict[str, tuple[int, Saved]] = {}
        for index, region in enumerate(self.regions):
            for one in region.saved:
                saved.setdefault(one.tensor, (index, one))
        for tensor, made in self.made_in.items():
            nbytes = self.graph.nbytes(tensor)
            readers = self.readers.get(tensor, [])
            last_reader = self.count - 1 if tensor in self.graph.outputs else max(readers, default=made)
            if last_reader > made and self.graph.tensors[tensor].is_differentiable:
                self.add(nbytes, self.backward(last_reader), self.backward(made))
            kept_for = self.keepers.get(tensor, [])
            if tensor in saved and saved[tensor][1].tier != DEVICE:
                first_saver, one = saved[tensor]
                self.add(nbytes, made, min(max(last_reader, first_saver + COPY_WINDOW - 1), self.count - 1))
                starts = max([one.prefetch_at or 0, *(r for r in readers)])
                self.add(nbytes, self.backward(min(starts, self.count - 1)), self.backward(first_saver))
            elif tensor in saved or kept_for:
                holders = kept_for + ([saved[tensor][0]] if tensor in saved else [])
                self.add(nbytes, made, self.backward(min(holders)))
            elif last_reader > made:
                self.add(nbytes, made, last_reader)

    def add_private(self, index: int) -> int:
        """What one region holds only while it runs, and what a kept region holds in between; its recomputed flops."""
        region = self.regions[index]
        layers = [self.graph.layers[self.graph.position[name]] for name in region.layers]
        inside = {t for layer in layers for t in layer.outputs if max(self.readers.get(t, [index])) <= index}
        transient = max((self._inside_bytes(layer, inside) for layer in layers), default=0)
        internal = sum(layer.internal_bytes for layer in layers)
        gradients = max((self.graph.nbytes(*layer.inputs, *layer.outputs) for layer in layers), default=0)
        self.add(transient, index, index)
        if not region.recompute:
            self.add(internal, index, self.backward(index))
            self.add(gradients, self.backward(index), self.backward(index))
            return 0
        required, flops = recomputed(layers, {one.tensor for one in region.saved})
        held = self.graph.nbytes(*(t for t in required if t in self.made_in))
        self.add(held + internal + gradients, self.backward(index), self.backward(index))
        return flops

    def _inside_bytes(self, layer: LayerCall, inside: set[str]) -> int:
        return self.graph.nbytes(*(t for t in (*layer.inputs, *layer.outputs) if t in inside))

    def peak(self) -> tuple[int, int]:
        levels = list(accumulate(self.change[:-1]))
        slot = max(range(len(levels)), key=levels.__getitem__) if levels else 0
        return (levels[slot] if levels else 0), slot


def recomputed(layers: Sequence[LayerCall], saved: set[str]) -> tuple[set[str], int]:
    """What the backward pass of a region makes again.

    Args:
        layers: The region's layer calls.
        saved: The tensors that the region has saved: its inputs, and layer outputs inside it.

    Returns:
        The tensors made again that a backward step reads, and the floating-point operations of the layer calls that run
        again: those whose outputs a backward step reads, and those that these need.
    """
    read = {tensor for layer in layers for tensor in layer.saved_for_backward} - saved
    needed, flops = set(read), 0
    for layer in reversed(layers):
        if needed.intersection(layer.outputs):
            needed.update(set(layer.inputs) - saved)
            flops += layer.flops
    return read, flops
