"""The labels of the search: what a plan up to a cut has come to, and all that come of adding a region to it.

Numbers stand in columns, so that all regions that end at one boundary are added to all labels at once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from keras_sn.cost import CostModel

STAY, INPUTS_LEAVE, ALL_LEAVE = range(3)
"""What a region sends to the host."""

MAX_LABELS = 32
"""Labels at a cut, for each of: the last region sends nothing to the host, or something."""


@dataclass(frozen=True, eq=False)
class Labels:
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
    def first(cls) -> "Labels":
        zero = np.zeros(1)
        return cls(zero, zero, zero, zero, zero, zero, np.zeros((1, 4), dtype=int))

    def best(self, seconds_per_host_byte: float) -> "Labels":
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

    def at(self, places: np.ndarray) -> "Labels":
        return Labels(*(getattr(self, name)[places] for name in self.__dataclass_fields__))


def _thin(places: np.ndarray, price: np.ndarray) -> np.ndarray:
    """At most `MAX_LABELS` of the places, spread evenly over the price; the first and the last stay."""
    if len(places) <= MAX_LABELS:
        return places
    prices = price[places]  # falling
    wanted = np.linspace(prices[0], prices[-1], MAX_LABELS)
    picked = np.searchsorted(-prices, -wanted)
    return places[np.unique(np.clip(picked, 0, len(places) - 1))]


@dataclass(frozen=True, eq=False, slots=True)
class Columns:
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


def grow(
    labels: Sequence[Labels],
    columns: Columns,
    room_bytes: float,
    model: CostModel,
    waiting_share: float,
    seconds_per_forgotten_byte: float,
    ahead: bool,
) -> Labels:
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
    return Labels(
        waiting[old] + columns.waits[kind, way] + waiting_share * staying,
        left,
        np.where(left > 0, model.transfer_seconds(left), 0.0),
        (seconds + not_hidden)[old] + columns.seconds[kind, way] + seconds_per_forgotten_byte * staying,
        host_bytes[old] + left,
        columns.first[kind].astype(float),
        np.column_stack([columns.before[kind], place, columns.level[kind, way], columns.leaving[kind, way]]).astype(int),
    )


_NUMBERS = [name for name in Labels.__dataclass_fields__ if name != "origin"]


def _input_bytes(columns: Columns, span: np.ndarray, start: np.ndarray) -> np.ndarray:
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
