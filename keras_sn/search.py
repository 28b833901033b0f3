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
    def columns(self) -> "list[list[_Columns]]":
        """The candidates as columns of numbers for `find`."""
        return [
            [self._columns(before, index, span) for before, span in spans] for index, spans in enumerate(self.spans.candidates)
        ]

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
        for spans in self.columns:
            grown = [
                _grow(labels[columns.before + 1], columns, room_bytes, model, waiting_share, price, ahead)
                for columns in spans
                if labels[columns.before + 1].least_waiting + columns.least_bytes <= room_bytes
            ]
            labels.append(_Labels.best(grown, seconds_per_host_byte))
        final = labels[-1]
        order = np.argsort(final.seconds + 2 * final.copy_seconds + seconds_per_host_byte * final.host_bytes, kind="stable")
        return [self._draft(self._trace_back(labels, int(place))) for place in order[:count]]

    def _columns(self, before: int, index: int, span: Span) -> "_Columns":
        rows, ways = [], []
        has_inputs = span.input_bytes > 0 or bool(span.read_before)
        for option in span.options:
            inside = option.saved_bytes
            possible = [(STAY, inside, 0)]
            if option.level != KEEP and self.may_offload:
                possible += [(INPUTS_LEAVE, inside, 0)] * has_inputs + [(ALL_LEAVE, 0, inside)] * (inside > 0)
            for leaving, waits, leaves in possible:
                rows.append((waits, leaves, max(option.backward_bytes, span.forward_bytes), option.seconds))
                ways.append((option.level, leaving))
        seconds = self.seconds_until[:, self.spans.ends[index] + 1] - self.seconds_until[:, span.first]
        waits, leaves, transient, own_seconds = np.array(rows, dtype=float).T
        least = float((waits + leaves + transient).min()) + span.input_bytes
        return _Columns(before, span, np.array(ways, dtype=int), waits, leaves, transient, own_seconds, seconds, least)

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

    @cached_property
    def least_waiting(self) -> float:
        return float(self.waiting.min(initial=inf))

    @classmethod
    def best(cls, grown: "Sequence[_Labels]", seconds_per_host_byte: float) -> "_Labels":
        """The labels of which none beats another, thinned to `MAX_LABELS` of each kind."""
        if not grown:
            return cls(*[np.zeros(0)] * 6, np.zeros((0, 4), dtype=int))
        joined = {name: np.concatenate([getattr(one, name) for one in grown]) for name in cls.__dataclass_fields__}
        price = joined["seconds"] + joined["copy_seconds"] + seconds_per_host_byte * joined["host_bytes"]
        kept = []
        for sends in (False, True):
            places = np.flatnonzero((joined["leaving"] > 0) == sends)
            places = places[np.lexsort((price[places], joined["waiting"][places]))]
            lowest = np.minimum.accumulate(price[places]) if len(places) else price[:0]
            better = np.concatenate([[True], lowest[1:] < lowest[:-1]]) if len(places) else np.zeros(0, dtype=bool)
            kept.append(_thin(places[better], price))
        places = np.concatenate(kept)
        return cls(**{name: column[places] for name, column in joined.items()})


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
    """A span with a column for each way to treat it."""

    before: int
    """The boundary before it; -1: none."""
    span: Span
    ways: np.ndarray
    """A row each: level, what leaves."""
    waits: np.ndarray
    """Bytes inside that wait on the device for its backward pass."""
    leaves: np.ndarray
    """Bytes inside that leave."""
    transient: np.ndarray
    """Bytes of its own forward or backward pass, whichever are more."""
    seconds: np.ndarray
    compute_seconds: np.ndarray
    """Of the layer calls, forward and backward: what copies of the region before can hide behind."""
    least_bytes: float
    """That the span takes at least while it runs."""


def _grow(
    labels: _Labels,
    columns: _Columns,
    room_bytes: float,
    model: CostModel,
    waiting_share: float,
    seconds_per_forgotten_byte: float,
    ahead: bool,
) -> _Labels:
    """All labels that come of adding one span, in each of its ways, to each label, and that fit."""
    inputs = np.full(len(labels.start), float(columns.span.input_bytes))
    for producer, reader, nbytes in columns.span.read_before:
        is_saved = (producer < labels.start) & (labels.start <= reader)  # by the region before, which reads it
        inputs += nbytes * ~is_saved
    stays = columns.ways[:, 1] == STAY
    staying = inputs[:, None] * stays
    waiting = labels.waiting[:, None] + columns.waits + waiting_share * staying
    leaving = columns.leaves + inputs[:, None] * ~stays
    # What the region before sends away is still there in the forward pass, and on its way back in the backward pass.
    own = columns.waits + staying + columns.transient
    needed = labels.waiting[:, None] + own + leaving + labels.leaving[:, None] * ahead
    old, way = np.nonzero(needed <= room_bytes)
    hidden = columns.compute_seconds * (model.copies_overlap, model.copies_overlap and ahead)
    not_hidden = sum(np.maximum(0.0, labels.copy_seconds - one) for one in hidden)
    left = leaving[old, way]
    return _Labels(
        waiting[old, way],
        left,
        np.where(left > 0, model.transfer_seconds(left), 0.0),
        (labels.seconds + not_hidden)[old] + columns.seconds[way] + (seconds_per_forgotten_byte * staying)[old, way],
        labels.host_bytes[old] + left,
        np.full(len(old), float(columns.span.first)),
        np.column_stack([np.full(len(old), columns.before), old, columns.ways[way]]),
    )
