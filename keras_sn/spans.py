"""What each possible region would cost: bytes held, and seconds of recomputation, for several sets of saved tensors.

A span is a run of layer calls that may become a region. All spans that end at one layer call are found in one backward scan,
so a layer call is looked at once for each span that begins with it, however long the span.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from keras_sn.cost import StepCosts
from keras_sn.cuts import boundaries, crossing_bytes, lengths
from keras_sn.gradients import gradient_bytes
from keras_sn.graph import LayerCall, LayerGraph

SAVED_SHARES = (0.0, 0.2, 0.4, 0.7, 1.0)
"""Shares of all activation bytes; at each a span saves those of its outputs that are dearest to recompute for their bytes."""
KEEP = len(SAVED_SHARES)
"""The option to run a span as plain Keras does."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to treat a span."""

    level: int
    """Index in `SAVED_SHARES`, or `KEEP`."""
    saved_bytes: int
    """Layer outputs inside it that wait for its backward pass."""
    backward_bytes: int
    """On the device only during its backward pass, beyond what waits."""
    seconds: float
    """Of recomputation, and of one more region."""


@dataclass(frozen=True, slots=True)
class Span:
    """A possible region: layer calls `first` to `last`."""

    first: int
    last: int
    input_bytes: int
    """Its inputs that no layer call before it reads."""
    read_before: tuple[tuple[int, int, int], ...]
    """Its other inputs: position of the producer, position of the last reader before `first`, bytes."""
    forward_bytes: int
    """On the device only during its forward pass: tensors inside, and tensors that only later regions save."""
    options: tuple[Option, ...]


@dataclass(frozen=True, eq=False)
class SpanCosts:
    """Computes spans of one graph on one device."""

    costs: StepCosts
    forced: tuple[range, ...] = ()
    """Positions after which a region must end. Between two of one range no region ends, elsewhere regions end where they like."""

    @property
    def graph(self) -> LayerGraph:
        return self.costs.graph

    @cached_property
    def nbytes(self) -> dict[str, int]:
        """Bytes of each activation; what the user feeds costs nothing."""
        return {tensor: self.graph.nbytes(tensor) for tensor in self.graph.producer}

    @cached_property
    def crossing(self) -> list[int]:
        """By position: bytes of activations that are made up to it and read after it."""
        return crossing_bytes(self.graph)

    def density(self, position: int) -> float:
        """Seconds of recomputing a layer call for each byte of its outputs."""
        return self.costs.again[position] / (1 + sum(self.nbytes[t] for t in self.graph.layers[position].outputs))

    @cached_property
    def thresholds(self) -> tuple[float, ...]:
        """By level: a span saves the outputs of layer calls that are at least so dear for their bytes."""
        order = sorted(range(len(self.graph.layers)), key=self.density, reverse=True)
        total, cumulative = 0, []
        for position in order:
            total += sum(self.nbytes[t] for t in self.graph.layers[position].outputs)
            cumulative.append(total)
        found = [float("inf")]
        for share in SAVED_SHARES[1:-1]:
            place = min(bisect_left(cumulative, share * total), len(order) - 1)
            found.append(self.density(order[place]) if order else 0.0)
        return (*found, 0.0)

    @cached_property
    def ends(self) -> list[int]:
        """Positions after which a region may end."""
        free = boundaries(self.graph, self.crossing)
        return sorted({p for p in free if not any(one[0] < p < one[-1] for one in self.forced)}.union(*self.forced))

    @cached_property
    def candidates(self) -> list[list[tuple[int, Span]]]:
        """By boundary: the spans that end there, each with the index of the boundary before it (-1: none)."""
        found, possible, forced = [], lengths(len(self.ends), len(self.graph.layers)), {p for one in self.forced for p in one}
        least = -1
        for index, end in enumerate(self.ends):
            before = [index - length for length in possible if least <= index - length]
            least = index if end in forced else least
            starts = [self.ends[one] + 1 if one >= 0 else 0 for one in before]
            found.append(list(zip(before, self.ending_at(end, starts), strict=True)))
        return found

    def ending_at(self, last: int, starts: Sequence[int]) -> Iterator[Span]:
        """Spans from each of `starts` (descending) to `last`."""
        scan = _Scan(self, last)
        for first in starts:
            while scan.first > first:
                scan.add()
            yield scan.span()

    def saves(self, level: int, position: int) -> bool:
        return self.density(position) >= self.thresholds[level]


@dataclass
class _Level:
    """What one level has come to in a scan."""

    needed: set[str] = field(default_factory=set)
    saved_bytes: int = 0
    backward_bytes: int = 0
    """The most that is made again and read at once, with gradients."""
    seconds: float = 0.0


class _Scan:
    """Grows a span to the front, one layer call at a time."""

    def __init__(self, of: SpanCosts, last: int):
        self.of, self.last, self.first = of, last, last + 1
        self.read: set[str] = set()
        self.written: set[str] = set()
        """What layer calls read that are not fusible."""
        self.levels = [_Level() for _ in SAVED_SHARES]
        self.inputs: set[str] = set()
        """Those that it saves."""
        self.read_inside: set[str] = set()
        self.kept_bytes = 0
        self.internal_bytes = self.largest_gradients = self.largest_inside = self.weight_bytes = self.given_bytes = 0
        self.gradients = gradient_bytes(of.graph)

    def add(self) -> None:
        self.first -= 1
        layer = self.of.graph.layers[self.first]
        self.weight_bytes += layer.weight_bytes * self.of.graph.updates_in_backward
        self.read.update(layer.saved_for_backward)
        self.written.update(layer.inputs if not layer.is_fusible else ())
        if any(tensor in self.read and self.is_virtual(tensor, layer) for tensor in layer.outputs):
            self.read.update(layer.inputs)  # who reads a tensor that is never written reads what it is made of
        self.add_inputs(layer)
        for level_index, level in enumerate(self.levels):
            self.add_to_level(level, level_index, layer)
        nbytes = self.of.nbytes
        virtual, last_use = self.of.graph.virtual, self.of.graph.last_use
        inside = sum(nbytes[t] for t in layer.outputs if last_use.get(t, -1) <= self.last and t not in virtual)
        read = sum(nbytes.get(t, 0) for t in layer.inputs if t not in virtual)
        self.largest_inside = max(self.largest_inside, inside + read)
        crossing = (t for t in layer.outputs if self.of.graph.last_use.get(t, -1) > self.last and self.of.graph.is_compiled)
        self.given_bytes += sum(nbytes[t] for t in crossing if self.of.graph.tensors[t].is_differentiable)
        self.largest_gradients = max(self.largest_gradients, self.gradients[self.first] + self.weight_bytes)
        self.internal_bytes += layer.internal_bytes

    def add_inputs(self, layer: LayerCall) -> None:
        self.inputs.difference_update(layer.outputs)
        if not layer.reads_only_shapes or not self.read_inside.isdisjoint(layer.outputs):
            self.inputs.update(tensor for tensor in layer.inputs if tensor in self.of.nbytes)
        self.read_inside.update(layer.inputs)
        self.kept_bytes += sum(self.of.nbytes[tensor] for tensor in layer.outputs if tensor in self.read)

    def add_to_level(self, level: _Level, index: int, layer: LayerCall) -> None:
        nbytes, last_use = self.of.nbytes, self.of.graph.last_use
        is_saved, again, held = self.of.saves(index, self.first), layer.internal_bytes > 0, layer.internal_bytes
        for tensor in layer.outputs:
            if tensor not in self.read and tensor not in level.needed:
                continue
            if last_use.get(tensor, -1) > self.last and not self.is_virtual(tensor, layer):
                held += nbytes[tensor]  # a later region saves it as its input, so it is there
            elif self.is_virtual(tensor, layer):
                again = True
            elif is_saved:
                level.saved_bytes += nbytes[tensor]
            else:
                again = True
                held += nbytes[tensor] * (tensor in self.read)
        # What this layer call holds is there in the backward steps of all later ones.
        level.backward_bytes = held + max(level.backward_bytes, self.gradients[self.first] + self.weight_bytes)
        if again:
            level.seconds += self.of.costs.again[self.first]
            level.needed.update(layer.inputs)

    def is_virtual(self, tensor: str, layer: LayerCall) -> bool:
        """Whether XLA computes a layer call's output where it is read in the span, and never writes it there."""
        return self.of.graph.is_compiled and layer.is_fusible and tensor not in self.written

    def span(self) -> Span:
        overhead = self.of.costs.region_seconds
        options = [  # XLA writes nothing over the gradients that its function is given
            Option(index, one.saved_bytes, one.backward_bytes + self.given_bytes, one.seconds + overhead)
            for index, one in enumerate(self.levels)
        ]
        if not self.of.graph.is_compiled:
            options.append(Option(KEEP, self.kept_bytes + self.internal_bytes, self.largest_gradients, 0.0))
        input_bytes, read_before, passing_bytes = 0, [], self.of.crossing[self.last]
        for tensor in self.inputs:
            nbytes, readers = self.of.nbytes[tensor], self.of.graph.readers[tensor]
            place = bisect_left(readers, self.first)
            if place:
                read_before.append((self.of.graph.producer[tensor], readers[place - 1], nbytes))
            else:
                input_bytes += nbytes
            if self.of.graph.last_use[tensor] > self.last:
                passing_bytes -= nbytes
        forward = self.largest_inside + passing_bytes
        return Span(self.first, self.last, input_bytes, tuple(read_before), forward, tuple(_distinct(options)))


def _distinct(options: Sequence[Option]) -> Iterator[Option]:
    """Without the options that another one equals or beats."""
    for index, one in enumerate(options):
        others = (other for place, other in enumerate(options) if place != index)
        if not any(_beats(other, one) and (not _beats(one, other) or other.level < one.level) for other in others):
            yield one


def _beats(one: Option, other: Option) -> bool:
    return (
        one.saved_bytes <= other.saved_bytes
        and one.saved_bytes + one.backward_bytes <= other.saved_bytes + other.backward_bytes
        and one.seconds <= other.seconds
    )
