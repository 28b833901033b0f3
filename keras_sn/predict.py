"""The peak memory of a plan of regions, on paper.

The timeline has one slot for each region's forward pass and, in reverse order, one for each region's backward pass. A tensor
occupies the slots in which it is on the device; what a region needs only while it runs is added to its own two slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from keras_sn.backward_memory import known_backward_memory
from keras_sn.fusion import UNPLANNED_SHARE
from keras_sn.gradients import gradient_bytes, until_the_end
from keras_sn.graph import LayerCall, LayerGraph
from keras_sn.plan import DEVICE, HOST, Plan, Region, Saved
from keras_sn.replays import ReplayBytes
from keras_sn.steps import RECOMPUTE


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is predicted to need, beyond the reserved bytes; with the batch that the user feeds."""

    peak_bytes: int
    peak_layer: str
    """The last layer call of the region that makes the peak."""
    offloaded_bytes: int


def predict(graph: LayerGraph, regions: Sequence[Region], copy_window: int = Plan.copy_window) -> Prediction:
    """Runs a plan's regions on paper.

    Args:
        graph: The layer graph.
        regions: The plan's regions in execution order; together they hold every layer call once.
        copy_window: The forward pass of a region waits for the copies of the region this many before it.

    Returns:
        The peak in bytes with the layer call that makes it, and the bytes that leave the device.
    """
    levels = levels_of(graph, regions, copy_window)
    slot = max(range(len(levels)), key=levels.__getitem__) if levels else 0
    region = regions[min(slot, 2 * len(regions) - 1 - slot)] if regions else None
    away = {one.tensor for region in regions for one in region.saved if one.is_away}
    return Prediction(max(levels, default=graph.nbytes(*graph.inputs)), region.layers[-1] if region else "", graph.nbytes(*away))


def levels_of(graph: LayerGraph, regions: Sequence[Region], copy_window: int) -> list[int]:
    """The bytes of `predict`, in each slot: the regions' forward passes, then their backward passes in reverse order."""
    timeline = _Timeline(graph, regions, copy_window)
    timeline.add_tensors()
    for index in range(len(regions)):
        timeline.add_private(index)
    slack, fed = 1 + UNPLANNED_SHARE * graph.is_compiled, graph.nbytes(*graph.inputs)
    return [int(slack * level) + fed for level in accumulate(timeline.change[:-1])]


class _Timeline:
    def __init__(self, graph: LayerGraph, regions: Sequence[Region], copy_window: int):
        self.graph, self.regions, self.count, self.copy_window = graph, regions, len(regions), copy_window
        self.change = [0] * (2 * self.count + 1)
        self.layers = [graph.layers_named(region.layers) for region in regions]
        self.made_in = {t: index for index, layers in enumerate(self.layers) for layer in layers for t in layer.outputs}
        self.last_reader: dict[str, int] = {}
        self.keepers: dict[str, int] = {}
        """Tensor -> the first of the kept regions whose backward pass reads it."""
        self.savers: dict[str, list[tuple[int, Saved]]] = {}
        for index, (region, layers) in enumerate(zip(regions, self.layers, strict=True)):
            for layer in layers:
                self.last_reader.update(dict.fromkeys(layer.inputs, index))
            for one in region.saved:
                self.savers.setdefault(one.tensor, []).append((index, one))
        self.last_reader.update(dict.fromkeys(graph.outputs, self.count - 1))
        self.gradients, self.virtual = gradient_bytes(graph), graph.virtual
        self.read = [
            recomputed(layers, {one.tensor for one in region.saved}, self.virtual)[0]
            for region, layers in zip(regions, self.layers, strict=True)
        ]
        """By region: what its backward pass reads and has not saved."""
        for index in (index for index, region in enumerate(regions) if not region.recompute):
            for tensor in self.read[index]:
                if self.made_in.get(tensor) != index or self.is_crossing(tensor, index):
                    self.keepers.setdefault(tensor, index)
        self.replays = ReplayBytes(regions, self.made_in, graph.nbytes, self.forward_bytes)

    def backward(self, region: int) -> int:
        return 2 * self.count - 1 - region

    def add(self, nbytes: int, first_slot: int, last_slot: int) -> None:
        if first_slot <= last_slot:
            self.change[first_slot] += nbytes
            self.change[last_slot + 1] -= nbytes

    def add_tensors(self) -> None:
        """Everything that lives longer than one region: saved tensors, and tensors between regions."""
        for tensor, made in self.made_in.items():
            nbytes = self.graph.nbytes(tensor)
            last_reader, savers = self.last_reader.get(tensor, made), self.savers.get(tensor, [])
            tier = savers[0][1].tier if savers else None
            holders = [self.keepers[tensor]] if tensor in self.keepers else []
            if tier == DEVICE:
                holders.append(savers[0][0])
            if holders:
                self.add(nbytes, made, self.backward(min(holders)))
            elif tier == HOST:
                self.add(nbytes, made, min(max(last_reader, savers[0][0] + self.copy_window - 1), self.count - 1))
            elif last_reader > made:
                self.add(nbytes, made, last_reader)
            if tier not in (None, DEVICE):
                for index, one in savers:
                    self.add_return(tensor, nbytes, index, one)

    def add_return(self, tensor: str, nbytes: int, index: int, one: Saved) -> None:
        """A tensor that comes back for the backward pass of one region."""
        start = index if one.tier == RECOMPUTE or one.prefetch_at is None else min(one.prefetch_at, self.count - 1)
        self.add(nbytes, self.backward(start), self.backward(index))

    def forward_bytes(self, index: int) -> int:
        """What a region's forward pass holds at most besides what it reads, with what it makes for others."""
        leaving = (t for layer in self.layers[index] for t in layer.outputs if self.is_crossing(t, index))
        return self.graph.nbytes(*leaving) + max(self.inside_bytes(index))

    def inside_bytes(self, index: int) -> list[int]:
        """By layer call of a region: what it reads and writes that does not leave the region, and that nothing holds longer."""
        layers, held = self.layers[index], set() if self.regions[index].recompute else self.read[index]
        inside = {t for layer in layers for t in layer.outputs if not self.is_crossing(t, index)} - held - self.virtual
        return [self.graph.nbytes(*(t for t in (*layer.inputs, *layer.outputs) if t in inside)) for layer in layers]

    def add_private(self, index: int) -> None:
        """What one region holds only while it runs, and what a kept region holds in between."""
        region, layers, own = self.regions[index], self.layers[index], self.backward(index)
        held = peak = forward = 0
        of_weights = until_the_end(layers) if self.graph.updates_in_backward else [0] * len(layers)
        for layer, inside, weights in zip(layers, self.inside_bytes(index), of_weights, strict=True):
            # What a layer call holds, its backward step and those of all later layer calls find there.
            own_outputs = (t for t in layer.outputs if t in self.read[index] and self.is_own(t, index))
            held += layer.internal_bytes + self.graph.nbytes(*own_outputs)
            peak = max(peak, held + weights + self.gradients[self.graph.position[layer.name]])
            forward = max(forward, inside + (0 if region.recompute else held))
        replaying = self.replays.most(index) - self.graph.nbytes(*self.replays.forgotten[index])
        if self.graph.is_compiled:
            peak, given = self.compiled_bytes(index)
            replaying += given
        self.add(forward, index, index)
        self.add(max(peak, replaying), own, own)
        self.add(of_weights[0], own + 1, min(own + 1, 2 * self.count - 1))  # the update runs beside the next backward pass
        if not region.recompute:
            self.add(held, index + 1, own - 1)

    def compiled_bytes(self, index: int) -> tuple[int, int]:
        """What XLA's backward function of a region holds with all gradients that are there, and those that it is given."""
        region, graph = self.regions[index], self.graph
        memory = known_backward_memory(graph, region)
        others = self.passing_gradients[index]
        if not graph.updates_in_backward:
            others += sum(layer.weight_bytes for layers in self.layers[index + 1 :] for layer in layers)
        of_weights = memory.of_weights * (region.recompute or not graph.updates_in_backward)
        return memory.inside + memory.given + memory.returned + of_weights + others, memory.given + others

    @cached_property
    def passing_gradients(self) -> list[int]:
        """By region: gradients of tensors that earlier regions make and later ones read, and it does not."""
        change = [0] * (self.count + 1)
        read = [{t for layer in layers for t in layer.inputs} for layers in self.layers]
        for tensor, made in self.made_in.items():
            last = self.last_reader.get(tensor, made)
            if last > made + 1 and self.graph.tensors[tensor].is_differentiable:
                nbytes = self.graph.nbytes(tensor)
                change[made + 1] += nbytes
                change[last] -= nbytes
                for index in (index for index in range(made + 1, last) if tensor in read[index]):
                    change[index] -= nbytes
                    change[index + 1] += nbytes
        return list(accumulate(change[:-1]))

    def is_crossing(self, tensor: str, index: int) -> bool:
        return self.last_reader.get(tensor, index) > index

    def is_own(self, tensor: str, index: int) -> bool:
        """Whether what a backward step reads and has not saved takes memory of its own in a region."""
        if self.is_crossing(tensor, index):
            return self.regions[index].recompute  # a kept region has what `keepers` say
        return tensor not in self.virtual


def recomputed(layers: Sequence[LayerCall], saved: set[str], virtual: frozenset[str] = frozenset()) -> tuple[set[str], list[str]]:
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
