"""What a compiled backward function holds at most: what it makes again, gradients, and what it is given and returns.

XLA makes again all that a region needs, from its first layer call to its last, and then gradients, from the last to the first.
The rules below were read off the buffers of the regions of four networks on an H200 (docs/measurements.md):

- What it is given (gradients of the region's outputs) is there all the time and is never written over.
- What it returns (gradients of its inputs and weights) is allocated all the time. Until such a buffer is written, it lends its
  place to one tensor made again that fits in.
- The input of a convolution or product is read for the gradient of the weights before its own gradient is made, and may be gone.
- Additions and activations hand gradients on in place. An addition that hands on what was given writes it once.
- An activation's gradient needs to know where it was positive; XLA computes that again from what the activation was made from.
- Gradients of what is never written (concatenations that only normalizations read) are sums that are never written either: what
  they are the sums of stays until they are read.
- Max pooling notes the places of the maxima, a number for each axis, once more in another order, and adds its gradient to zeros.
  If what it pools is made again, all that happens with it, and the first notes are gone before what follows is made again.
- Convolutions hold their kernels in another layout until their gradients are made.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf

from keras_sn.graph import LayerCall, LayerGraph
from keras_sn.made_again import RegionAgain


@dataclass(frozen=True, slots=True)
class BackwardMemory:
    """Bytes of one backward function, without what it has saved."""

    inside: int
    """At the most at a time, besides what it is given and returns."""
    given: int
    returned: int
    """Gradients of its inputs."""
    of_weights: int

    @property
    def total(self) -> int:
        return self.inside + self.given + self.returned + self.of_weights


def backward_memory(
    graph: LayerGraph, layers: Sequence[LayerCall], saved: frozenset[str], *, is_plain: bool = False
) -> BackwardMemory:
    """Goes through a region's backward pass on paper.

    Args:
        graph: The layer graph, as XLA compiles it.
        layers: The region's layer calls, which follow one another.
        saved: What waits for its backward pass: its inputs, and layer outputs inside it.
        is_plain: It is plain Keras' step.
    """
    region = RegionAgain(graph, tuple(layers), saved)
    given = {t for layer in layers for t in layer.outputs if region.is_crossing(t) and graph.tensors[t].is_differentiable}
    added_to = {t for t in region.inputs if graph.last_use[t] > region.last}
    weights = sum(layer.weight_bytes for layer in layers)
    return BackwardMemory(
        _Backward(region, is_plain=is_plain).peak(), graph.nbytes(*given, *added_to), graph.nbytes(*region.inputs), weights
    )


def gradient_levels(graph: LayerGraph) -> list[int]:
    """By position: bytes of the gradients of activations in the backward step there, if XLA compiled all layer calls as one."""
    if not graph.layers:
        return []
    region = RegionAgain(graph, graph.layers, frozenset(graph.inputs))
    backward = _Backward(region, is_region=False)  # where nothing is made again, the backward step does it all at once
    backward.peak()
    levels = backward.levels([one for one in backward.buffers if one.begin])
    result = []
    for position, layer in enumerate(graph.layers):
        # By the time that an input's gradient is made, the input may be gone; others count it as if it were there.
        gone = (t for t in layer.inputs if region.needed_until.get(t) == region.phase(position, 0))
        before, after = (levels[region.phase(position, step)] for step in (0, 1))
        result.append(max(before, after - graph.nbytes(*gone)))
    return result


@dataclass(slots=True)
class _Buffer:
    nbytes: int
    begin: int
    """The first phase that it is there in."""
    end: int = -1
    """The last one."""
    users: int = 0


class _Backward:
    """The gradients of one region while its backward pass goes on."""

    def __init__(self, region: RegionAgain, *, is_region: bool = True, is_plain: bool = False):
        self.region, self.graph, self.is_region, self.is_plain = region, region.graph, is_region, is_plain
        self.gradients: dict[str, tuple[_Buffer, ...]] = {}
        """Tensor -> the buffers that its gradient is in, or is the sum of; none if it is in what is given or returned."""
        self.buffers: list[_Buffer] = [
            _Buffer(region.graph.nbytes(tensor), 0, until) for tensor, until in region.needed_until.items()
        ]
        self.written: dict[str, int] = {}
        """Those inputs of the region whose gradients have been begun -> when."""

    def peak(self) -> int:
        region, graph = self.region, self.graph
        for position, layer in enumerate(region.layers, region.first):
            copied = layer.copied_bytes * self.is_region
            held = layer.internal_bytes - copied + layer.weight_bytes * layer.is_convolution
            self.buffers.append(_Buffer(held, 0, region.phase(position, 1)))
            if copied:
                self.buffers.append(_Buffer(copied, region.phase(position, 0), region.phase(position, 1)))
            if notes := self.places_bytes(layer):
                self.note_places(layer, position, notes)
            crossing = (t for t in layer.outputs if region.is_crossing(t) and graph.tensors[t].is_differentiable)
            self.gradients.update(dict.fromkeys(crossing, ()))
        for position in range(region.last, region.first - 1, -1):
            self.step(region.layers[position - region.first], region.phase(position, 1))
        last = region.phase(region.first, 1)
        for buffer in self.buffers:
            buffer.end = last if buffer.users else buffer.end
        return self.most_at_once()

    def places_bytes(self, layer: LayerCall) -> int:
        return (layer.places_bytes if self.is_plain else layer.region_places_bytes) * self.is_region

    def note_places(self, layer: LayerCall, position: int, notes: int) -> None:
        """Of max pooling: together with what it pools, if that is made again, else in its own backward step."""
        phase = self.region.phase(position, 1)
        if self.is_made_again(*layer.inputs) and not self.is_plain:  # plain Keras' forward pass is over long before
            made_later = (t for t in self.region.needed_until if self.graph.producer[t] > position)
            self.buffers += [_Buffer(notes, 0, phase), _Buffer(max(0, notes - self.graph.nbytes(*made_later)), 0, 0)]
        else:
            is_input = not self.region.inputs.keys().isdisjoint(layer.inputs)
            self.buffers.append(_Buffer((1 + is_input) * notes, phase, phase))

    def is_made_again(self, *tensors: str) -> bool:
        return all(tensor in self.region.needed_until for tensor in tensors)

    def step(self, layer: LayerCall, phase: int) -> None:
        """The backward step of one layer call."""
        arriving = next((t for t in layer.outputs if t in self.gradients), None)
        if arriving is None:
            return
        inputs = self.region.differentiable(layer)
        if layer.gradient_in_place and len(inputs) > 1:
            self.write_once(arriving, inputs, phase)
        for tensor in inputs:
            self.give(tensor, layer, arriving, phase)
        for tensor in layer.outputs:
            self.set(tensor, (), phase)
            self.gradients.pop(tensor)

    def write_once(self, arriving: str, inputs: Sequence[str], phase: int) -> None:
        """The gradient that an addition hands on to several: in what is returned, or in a buffer of its own."""
        if any(tensor in self.region.inputs for tensor in inputs):
            self.set(arriving, (), phase)
        elif not self.gradients[arriving]:
            self.set(arriving, (self.new(arriving, phase),), phase)

    def give(self, tensor: str, layer: LayerCall, arriving: str, phase: int) -> None:
        """A contribution to the gradient of one of a layer call's inputs."""
        sources, there = self.gradients[arriving], self.gradients.get(tensor)
        # Nothing is written over what an activation with an error function or an exponential reads, too.
        is_simple = layer.gradient_in_place and not layer.internal_bytes
        in_place = is_simple and self.graph.nbytes(arriving) == self.graph.nbytes(tensor)
        if tensor in self.region.inputs:
            if layer.is_fusible and not in_place and not layer.weight_bytes:  # a part of it, taken or added up at the end
                self.set(tensor, (*(there or ()), *sources), phase)
            elif tensor not in self.written:
                self.written[tensor] = phase
            elif not layer.is_fusible:
                self.new(tensor, phase).end = phase  # until it is added to what is there
        elif layer.is_fusible and tensor in self.region.virtual:
            self.set(tensor, (*(there or ()), *sources), phase)
        elif in_place:
            self.set(tensor, there or sources, phase)
        elif not there:
            # Zeros, to which a pooling layer's gradient is added, are written together with what it pools.
            is_there = self.places_bytes(layer) > 0 and self.is_made_again(tensor) and not self.is_plain
            self.set(tensor, (self.new(tensor, 0 if is_there else phase),), phase)

    def set(self, tensor: str, buffers: Sequence[_Buffer], phase: int) -> None:
        """Puts a gradient into these buffers; those that nothing else is in are gone after this phase."""
        for buffer in buffers:
            buffer.users += 1
        for buffer in self.gradients.get(tensor, ()):
            buffer.users -= 1
            buffer.end = phase
        self.gradients[tensor] = tuple(buffers)

    def new(self, tensor: str, phase: int) -> _Buffer:
        self.buffers.append(_Buffer(self.graph.nbytes(tensor), phase))
        return self.buffers[-1]

    def levels(self, buffers: Sequence[_Buffer]) -> list[int]:
        """By phase: the bytes of these buffers."""
        change = [0] * (self.region.phase(self.region.first, 1) + 2)
        for buffer in buffers:
            change[buffer.begin] += buffer.nbytes
            change[buffer.end + 1] -= buffer.nbytes
        return list(accumulate(change[:-1]))

    def most_at_once(self) -> int:
        """The most that all buffers take at a time, without what fits into what is returned and not yet written."""
        levels, most = self.levels(self.buffers), 0
        lenders = sorted(((self.graph.nbytes(t), self.written.get(t, inf)) for t in self.region.inputs), reverse=True)
        for phase in sorted(range(len(levels)), key=levels.__getitem__, reverse=True):
            if levels[phase] <= most:
                break
            most = max(most, levels[phase] - self.lent(lenders, phase))
        return most

    def lent(self, lenders: Sequence[tuple[int, float]], phase: int) -> int:
        """Bytes of what is made again and has its place in a returned gradient: one each, gone when that is written."""
        there = [one for one in self.buffers if one.begin == 0 and phase <= one.end]
        there.sort(key=lambda one: one.nbytes, reverse=True)
        total = 0
        for nbytes, written in lenders:
            if written < phase:
                continue
            place = next((i for i, one in enumerate(there) if one.nbytes <= nbytes and one.end <= written), None)
            total += there.pop(place).nbytes if place is not None else 0
        return total
