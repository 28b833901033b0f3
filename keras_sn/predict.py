"""The peak memory of a plan of regions, on paper.

The timeline has one slot for each region's forward pass and, in reverse order, one for each region's backward pass. A tensor
occupies the slots in which it is on the device; what a region needs only while it runs is added to its own two slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

from keras_sn.fusion import UNPLANNED_SHARE
from keras_sn.graph import LayerGraph
from keras_sn.plan import DEVICE, Plan, Region, Saved
from keras_sn.region_bytes import region_bytes
from keras_sn.replays import ReplayBytes
from keras_sn.steps import RECOMPUTE


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a plan is predicted to need, beyond the reserved bytes; with the batch that the user feeds."""

    peak_bytes: int
    peak_layer: str
    """The last layer call of the region that makes the peak."""
    offloaded_bytes: int
    levels: tuple[int, ...]
    """Bytes in each slot: the regions' forward passes, then their backward passes in reverse order."""


def predict(graph: LayerGraph, regions: Sequence[Region], copy_window: int = Plan.copy_window) -> Prediction:
    """Runs a plan's regions on paper.

    Args:
        graph: The layer graph.
        regions: The plan's regions in execution order; together they hold every layer call once.
        copy_window: The forward pass of a region waits for the copies of the region this many before it.

    Returns:
        The peak in bytes with the layer call that makes it, the bytes that leave the device, and the bytes all along.
    """
    return Timeline(graph, regions).prediction(regions, copy_window)


def region_at(slot: int, count: int) -> int:
    """Which of so many regions runs in a slot."""
    return min(slot, 2 * count - 1 - slot)


class Timeline:
    """What is on the device all along, whenever the plan's copies are made.

    Args:
        graph: The layer graph.
        regions: The plan's regions. When their copies come back is no matter here.
    """

    def __init__(self, graph: LayerGraph, regions: Sequence[Region]):
        self.graph, self.regions, self.count = graph, regions, len(regions)
        self.region_of = [index for index, region in enumerate(regions) for _ in region.layers]
        """By position of the layer call."""
        self.made_in = {tensor: self.region_of[position] for tensor, position in graph.producer.items()}
        after_last = [*self.region_of, self.count - 1]
        self.last_reader = {tensor: after_last[position] for tensor, position in graph.last_use.items()}
        self.keepers: dict[str, int] = {}
        """Tensor -> the first of the kept regions whose backward pass reads it."""
        self.savers: dict[str, list[tuple[int, Saved]]] = {}
        for index, region in enumerate(regions):
            for one in region.saved:
                self.savers.setdefault(one.tensor, []).append((index, one))
        self.parts = [region_bytes(graph, region) for region in regions]
        for index in (index for index, region in enumerate(regions) if not region.recompute):
            for tensor in self.parts[index].read:
                if self.made_in.get(tensor) != index or self.is_crossing(tensor, index):
                    self.keepers.setdefault(tensor, index)
        self.replays = ReplayBytes(regions, self.made_in, graph.nbytes, [one.leaving + one.inside for one in self.parts])
        self.change = [0] * (2 * self.count + 1)
        self.copied: list[tuple[str, int, int, int]] = []
        """What is copied away: the tensor, the region that makes it, the last that reads it, the first that saves it."""
        self.returning = [
            (index, place)
            for index, region in enumerate(regions)
            for place, one in enumerate(region.saved)
            if one.is_away and one.tensor in self.made_in
        ]
        """What is copied back: the region, and the place among what it saves."""
        self.add_tensors()
        for index in range(self.count):
            self.add_private(index)
        self.without_copies = self.change
        self.offloaded_bytes = graph.nbytes(*(tensor for tensor, savers in self.savers.items() if savers[0][1].is_away))

    def prediction(self, regions: Sequence[Region], copy_window: int) -> Prediction:
        """What is predicted for the regions, whose copies come back at the times that they say."""
        self.change = list(self.without_copies)
        back: dict[str, int] = {}
        """What comes back -> the first slot in which it does."""
        for index, place in self.returning:
            one = regions[index].saved[place]
            start = index if one.prefetch_at is None else min(one.prefetch_at, self.count - 1)
            back[one.tensor] = min(self.backward(start), back.get(one.tensor, len(self.change)))
            self.add(self.graph.nbytes(one.tensor), self.backward(start), self.backward(index))
        for tensor, made, last_reader, saver in self.copied:
            # It must have left before it is asked for, and in the same slot it can have gone and come.
            left = min(saver + copy_window, back[tensor]) - 1
            self.add(self.graph.nbytes(tensor), made, max(last_reader, left))
        slack, fed = 1 + UNPLANNED_SHARE * self.graph.is_compiled, self.graph.nbytes(*self.graph.inputs)
        levels = tuple(int(slack * level) + fed for level in accumulate(self.change[:-1]))
        peak_layer = regions[region_at(levels.index(max(levels)), len(regions))].layers[-1] if regions else ""
        return Prediction(max(levels, default=fed), peak_layer, self.offloaded_bytes, levels)

    def backward(self, region: int) -> int:
        return 2 * self.count - 1 - region

    def add(self, nbytes: int, first_slot: int, last_slot: int) -> None:
        if first_slot <= last_slot:
            self.change[first_slot] += nbytes
            self.change[last_slot + 1] -= nbytes

    def add_tensors(self) -> None:
        """Everything that lives longer than one region: saved tensors, and tensors between regions."""
        for tensor, made in self.made_in.items():
            last_reader, savers = self.last_reader.get(tensor, made), self.savers.get(tensor, [])
            if last_reader == made and not savers and tensor not in self.keepers:
                continue
            nbytes = self.graph.nbytes(tensor)
            tier = savers[0][1].tier if savers else None
            holders = [self.keepers[tensor]] if tensor in self.keepers else []
            if tier == DEVICE:
                holders.append(savers[0][0])
            if holders:
                self.add(nbytes, made, self.backward(min(holders)))
            elif tier not in (None, RECOMPUTE):
                self.copied.append((tensor, made, last_reader, savers[0][0]))
            elif last_reader > made:
                self.add(nbytes, made, last_reader)
            for index, _ in savers if tier == RECOMPUTE else ():
                self.add(nbytes, self.backward(index), self.backward(index))

    def add_private(self, index: int) -> None:
        """What one region holds only while it runs, and what a kept region holds in between."""
        own, part = self.backward(index), self.parts[index]
        replaying = self.replays.most(index) - self.graph.nbytes(*self.replays.forgotten[index])
        backward = part.backward
        if part.compiled:
            backward += self.others_gradients[index]
            replaying += part.compiled.given + self.others_gradients[index]
        self.add(part.forward, index, index)
        self.add(max(backward, replaying), own, own)
        self.add(part.of_weights, own + 1, min(own + 1, 2 * self.count - 1))  # the update runs beside the next backward pass
        self.add(part.statistics, index, own)
        if not self.regions[index].recompute:
            self.add(part.held, index + 1, own - 1)

    @cached_property
    def others_gradients(self) -> list[int]:
        """By region: gradients that are there in its backward pass, and are none that its function is given or returns."""
        waiting = [0] * self.count
        if not self.graph.updates_in_backward:
            of_weights = [0] * self.count
            for index, layer in zip(self.region_of, self.graph.layers, strict=True):
                of_weights[index] += layer.weight_bytes
            waiting = [total - own for total, own in zip(list(accumulate(of_weights[::-1]))[::-1], of_weights, strict=True)]
        return [one + more for one, more in zip(self.passing_gradients, waiting, strict=True)]

    @cached_property
    def passing_gradients(self) -> list[int]:
        """By region: gradients of tensors that earlier regions make and later ones read, and it does not."""
        change = [0] * (self.count + 1)
        for tensor, made in self.made_in.items():
            last = self.last_reader.get(tensor, made)
            if last > made + 1 and self.graph.tensors[tensor].is_differentiable:
                nbytes = self.graph.nbytes(tensor)
                change[made + 1] += nbytes
                change[last] -= nbytes
                for index in {self.region_of[position] for position in self.graph.readers[tensor]} - {made, last}:
                    change[index] -= nbytes
                    change[index + 1] += nbytes
        return list(accumulate(change[:-1]))

    def is_crossing(self, tensor: str, index: int) -> bool:
        return self.last_reader.get(tensor, index) > index
