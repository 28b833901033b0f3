"""The cheapest regions that fit: dynamic programming over where to cut, what to save, and what to send to the host.

Regions are chosen from front to back. What a region saves waits for all later regions' backward passes, so the bytes that wait
only grow; at each cut the search holds a set of labels `(bytes waiting, seconds)` of which none beats another. A region fits if
what waits, with what only its own backward pass holds, fits. The idea is that of rotor (Herrmann, Beaumont et al. 2019) and POFO
(Beaumont et al. 2021), with labels instead of a table of bytes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import inf

import numpy as np

from keras_sn.cost import CostModel
from keras_sn.drafts import Draft, inputs_of
from keras_sn.spans import KEEP, Span, SpanCosts

STAY, INPUTS_LEAVE, ALL_LEAVE = range(3)
"""What a region sends to the host."""

MAX_LABELS = 32
"""Labels at a cut, for each of: the last region sends nothing to the host, or something."""


FORGOTTEN_TIMES = 4
"""What waits nowhere is taken to cost, in times of making it again: what it is made from is often forgotten, too."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One region, as the search sees it."""

    first: int
    last: int
    level: int
    """Index in `spans.SAVED_SHARES`, or `KEEP`."""
    leaving: int


@dataclass(frozen=True, eq=False)
class RegionSearch:
    """Finds choices of regions for one graph on one device; `find` may be called with many budgets."""

    spans: SpanCosts
    may_offload: bool = True

    @cached_property
    def columns(self) -> "list[_Columns]":
        """By boundary: the spans that end there as columns of numbers for `find`."""
        return [self._columns(index, spans) for index, spans in enumerate(self.spans.candidates)]

    @cached_property
    def seconds_until(self) -> np.ndarray:
        """By position plus one: forward and backward seconds of the layer calls up to it; two rows."""
        costs = self.spans.costs
        return np.array([np.concatenate([[0.0], np.cumsum(row)]) for row in (costs.forward, costs.backward)])

    @cached_property
    def seconds_per_byte(self) -> float:
        """Of making an activation again, on average."""
        return sum(self.spans.costs.forward) / (1 + sum(self.spans.nbytes.values()))

    def find(
        self,
        room_bytes: int,
        *,
        seconds_per_host_byte: float = 0.0,
        count: int = 1,
        waiting_share: float = 1.0,
        ahead: bool = True,
    ) -> list[Draft]:
        """Drafts of the cheapest plans within `room_bytes`, the best first; empty if nothing fits.

        Args:
            room_bytes: What activations and their gradients may take on the device.
            seconds_per_host_byte: What a byte on the host costs, beyond the time of its copies.
            count: How many alternatives are wanted.
            waiting_share: How much is counted of what waits between regions; less than 1 if some of it will be forgotten.
            ahead: Whether copies come back while the region before computes, which takes more memory, or the device waits.
        """
        labels, model = [_Labels.first()], self.spans.costs.model  # by boundary plus one
        price = FORGOTTEN_TIMES * (1 - waiting_share) * self.seconds_per_byte
        for columns in self.columns:
            grown = _grow(labels, columns, room_bytes, model, waiting_share, price, ahead)
            labels.append(grown.best(seconds_per_host_byte))
        final = labels[-1]
        order = np.argsort(final.seconds + 2 * final.copy_seconds + seconds_per_host_byte * final.host_bytes, kind="stable")
        return [self._draft(self._trace_back(labels, int(place))) for place in order[:count]]

    def _columns(self, index: int, spans: Sequence[tuple[int, Span]]) -> "_Columns":
        rows = [self._ways(span) for _, span in spans]
        numbers = np.full((len(rows), max(map(len, rows), default=0), 6), inf)
        for place, ways in enumerate(rows):
            numbers[place, : len(ways)] = ways
        until, end = self.seconds_until, self.spans.ends[index] + 1
        first = np.array([span.first for _, span in spans], dtype=int)
        return _Columns(
            np.array([before for before, _ in spans], dtype=int),
            first,
            np.array([span.input_bytes for _, span in spans], dtype=float),
            [np.array(span.read_before, dtype=float).reshape(-1, 3) for _, span in spans],
            numbers[..., 0],
            numbers[..., 1],
            *np.moveaxis(numbers[..., 2:], -1, 0),
            until[:, end, None] - until[:, first],
        )

    def _ways(self, span: Span) -> list[tuple[float, ...]]:
        """Level, what leaves, bytes that wait, leave and are there only while it runs, seconds; a row for each way."""
        rows: list[tuple[float, ...]] = []
        has_inputs = span.input_bytes > 0 or bool(span.read_before)
        for option in span.options:
            inside = option.saved_bytes
            possible = [(STAY, inside, 0)]
            if option.level != KEEP and self.may_offload:
                possible += [(INPUTS_LEAVE, inside, 0)] * has_inputs + [(ALL_LEAVE, 0, inside)] * (inside > 0)
            transient = max(option.backward_bytes, span.forward_bytes)
            rows += [(option.level, leaving, waits, leaves, transient, option.seconds) for leaving, waits, leaves in possible]
        return rows

    def _draft(self, choices: Sequence[Choice]) -> Draft:
        graph = self.spans.graph
        saved: set[str] = set()
        away: set[str] = set()
        decided: set[str] = set()
        for choice in choices:
            if choice.level == KEEP:
                continue
            layers = graph.layers[choice.first : choice.last + 1]
            places = range(choice.first, choice.last + 1)
            own = {t for p in places if self.spans.saves(choice.level, p) for t in graph.layers[p].outputs}
            inputs = set(inputs_of(layers)) - decided
            away |= {STAY: set(), INPUTS_LEAVE: inputs, ALL_LEAVE: inputs | own}[choice.leaving]
            saved |= own
            decided |= inputs | own
        kept = frozenset(choice.last for choice in choices if choice.level == KEEP)
        return Draft(tuple(choice.last for choice in choices), kept, frozenset(saved), frozenset(away))

    def _trace_back(self, labels: "list[_Labels]", place: int) -> list[Choice]:
        choices, index = [], len(labels) - 1
        while index > 0:
            before, place, level, leaving = (int(one) for one in labels[index].origin[place])
            first = self.spans.ends[before] + 1 if before >= 0 else 0
            choices.append(Choice(first, self.spans.ends[index - 1], level, leaving))
            index = before + 1
        return choices[::-1]


@dataclass(frozen=True, eq=False)
class _Labels:
    """The labels at one cut, as columns."""

    waiting: np.ndarray
    """Bytes on the device that wait for backward passes."""
    leaving: np.ndarray
    """Bytes that the last region sends to the host."""
    copy_seconds: np.ndarray
    """Of the last region's copies, one way."""
    seconds: np.ndarray
    """Recomputation and waiting, so far."""
    host_bytes: np.ndarray
    start: np.ndarray
    """Position of the last region's first layer call."""
    origin: np.ndarray
    """A row each: boundary before, label there, level, what leaves."""

    @classmethod
    def first(cls) -> "_Labels":
        zero = np.zeros(1)
        return cls(zero, zero, zero, zero, zero, zero, np.zeros((1, 4), dtype=int))

    def best(self, seconds_per_host_byte: float) -> "_Labels":
        """The labels of which none beats another, thinned to `MAX_LABELS` of each kind."""
        price = self.seconds + self.copy_seconds + seconds_per_host_byte * self.host_bytes
        kept = []
        for sends in (False, True):
            places = np.flatnonzero((self.leaving > 0) == sends)
            places = places[np.lexsort((price[places], self.waiting[places]))]
            lowest = np.minimum.accumulate(price[places]) if len(places) else price[:0]
            better = np.concatenate([[True], lowest[1:] < lowest[:-1]]) if len(places) else np.zeros(0, dtype=bool)
            kept.append(_thin(places[better], price))
        return self.at(np.concatenate(kept))

    def at(self, places: np.ndarray) -> "_Labels":
        return _Labels(*(getattr(self, name)[places] for name in self.__dataclass_fields__))


def _thin(places: np.ndarray, price: np.ndarray) -> np.ndarray:
    """At most `MAX_LABELS` of the places, spread evenly over the price; the first and the last stay."""
    if len(places) <= MAX_LABELS:
        return places
    prices = price[places]  # falling
    wanted = np.linspace(prices[0], prices[-1], MAX_LABELS)
    picked = np.searchsorted(-prices, -wanted)
    return places[np.unique(np.clip(picked, 0, len(places) - 1))]


@dataclass(frozen=True, eq=False, slots=True)
class _Columns:
    """The spans that end at one boundary, a row each, with a column for each way to treat one; infinite where it has fewer."""

    before: np.ndarray
    """The boundary before it; -1: none."""
    first: np.ndarray
    """Position of its first layer call."""
    input_bytes: np.ndarray
    read_before: list[np.ndarray]
    """Its other inputs, as in `Span`."""
    level: np.ndarray
    leaving: np.ndarray
    """What leaves."""
    waits: np.ndarray
    """Bytes inside that wait on the device for its backward pass."""
    leaves: np.ndarray
    """Bytes inside that leave."""
    transient: np.ndarray
    """Bytes of its own forward or backward pass, whichever are more."""
    seconds: np.ndarray
    compute_seconds: np.ndarray
    """Two rows: of the layer calls, forward and backward: what copies of the region before can hide behind."""


def _grow(
    labels: Sequence[_Labels],
    columns: _Columns,
    room_bytes: float,
    model: CostModel,
    waiting_share: float,
    seconds_per_forgotten_byte: float,
    ahead: bool,
) -> _Labels:
    """All labels that come of adding each span, in each of its ways, to each label at the boundary before it, and that fit."""
    span = np.repeat(np.arange(len(columns.before)), [len(labels[before + 1].start) for before in columns.before])
    joined = [np.concatenate([getattr(labels[before + 1], name) for before in columns.before]) for name in _NUMBERS]
    waiting, leaving, copy_seconds, seconds, host_bytes, start = joined
    inputs = _input_bytes(columns, span, start)[:, None]
    stays = columns.leaving[span] == STAY
    left = columns.leaves[span] + np.where(stays, 0.0, inputs)
    staying = np.where(stays, inputs, 0.0)
    # What the region before sends away is still there in the forward pass, and on its way back in the backward pass.
    own = columns.waits[span] + staying + columns.transient[span]
    needed = waiting[:, None] + own + left + leaving[:, None] * ahead
    old, way = np.nonzero(needed <= room_bytes)
    hidden = columns.compute_seconds[:, span] * np.array([[model.copies_overlap], [model.copies_overlap and ahead]])
    not_hidden = np.maximum(0.0, copy_seconds - hidden).sum(axis=0)
    kind, left, staying = span[old], left[old, way], staying[old, way]
    place = old - np.searchsorted(span, kind)  # among the labels of its boundary
    return _Labels(
        waiting[old] + columns.waits[kind, way] + waiting_share * staying,
        left,
        np.where(left > 0, model.transfer_seconds(left), 0.0),
        (seconds + not_hidden)[old] + columns.seconds[kind, way] + seconds_per_forgotten_byte * staying,
        host_bytes[old] + left,
        columns.first[kind].astype(float),
        np.column_stack([columns.before[kind], place, columns.level[kind, way], columns.leaving[kind, way]]).astype(int),
    )


_NUMBERS = [name for name in _Labels.__dataclass_fields__ if name != "origin"]


def _input_bytes(columns: _Columns, span: np.ndarray, start: np.ndarray) -> np.ndarray:
    """For each pair of a span and a label, the bytes of those inputs that the region before has not saved."""
    found = columns.input_bytes[span]
    ends = np.searchsorted(span, np.arange(len(columns.before) + 1))
    for place, others in enumerate(columns.read_before):
        if len(others):
            producer, reader, nbytes = others.T
            starts = start[ends[place] : ends[place + 1], None]
            is_saved = (producer < starts) & (starts <= reader)  # by the region before, which reads it
            found[ends[place] : ends[place + 1]] += (~is_saved) @ nbytes
    return found
