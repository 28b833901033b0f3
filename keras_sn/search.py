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

from keras_sn.drafts import Draft, inputs_of
from keras_sn.labels import ALL_LEAVE, INPUTS_LEAVE, STAY, Columns, Labels, grow
from keras_sn.spans import KEEP, Span, SpanCosts

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
    def columns(self) -> "list[Columns]":
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
        labels, model = [Labels.first()], self.spans.costs.model  # by boundary plus one
        price = FORGOTTEN_TIMES * (1 - waiting_share) * self.seconds_per_byte
        for columns in self.columns:
            grown = grow(labels, columns, room_bytes, model, waiting_share, price, ahead)
            labels.append(grown.best(seconds_per_host_byte))
        final = labels[-1]
        order = np.argsort(final.seconds + 2 * final.copy_seconds + seconds_per_host_byte * final.host_bytes, kind="stable")
        return [self._draft(self._trace_back(labels, int(place))) for place in order[:count]]

    def _columns(self, index: int, spans: Sequence[tuple[int, Span]]) -> "Columns":
        rows = [self._ways(span) for _, span in spans]
        numbers = np.full((len(rows), max(map(len, rows), default=0), 6), inf)
        for place, ways in enumerate(rows):
            numbers[place, : len(ways)] = ways
        until, end = self.seconds_until, self.spans.ends[index] + 1
        first = np.array([span.first for _, span in spans], dtype=int)
        return Columns(
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

    def _trace_back(self, labels: "list[Labels]", place: int) -> list[Choice]:
        choices, index = [], len(labels) - 1
        while index > 0:
            before, place, level, leaving = (int(one) for one in labels[index].origin[place])
            first = self.spans.ends[before] + 1 if before >= 0 else 0
            choices.append(Choice(first, self.spans.ends[index - 1], level, leaving))
            index = before + 1
        return choices[::-1]
