"""Drafts for rooms: the search knows bytes only roughly, so it is asked again until what comes of it uses a room well."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

from keras_sn.candidates import Candidate
from keras_sn.drafts import Draft
from keras_sn.search import RegionSearch
from keras_sn.spans import SpanCosts

ROUNDS = 6
"""Searches, each with a room corrected by what the one before was off."""
CLOSE = 0.01
"""A peak that is less than this share below the room uses it well enough."""
ALTERNATIVES = 3
HALVINGS = 9


@dataclass(frozen=True, eq=False)
class RoomSearch:
    """Candidates for one graph on one device.

    Args:
        spans: The possible regions of the graph on its device.
        search: Finds drafts among them.
        host_bytes: What the host may hold; None for no limit.
        try_out: Predicts a draft for a room.
        is_large: Whether the graph is too large for many predictions.
    """

    spans: SpanCosts
    search: RegionSearch
    host_bytes: int | None
    try_out: Callable[[Draft, float], Candidate]
    is_large: bool

    def within(self, room_bytes: int, *, ahead: bool = True) -> Iterator[Candidate]:
        """Drafts whose predicted peaks come close to the room; the search itself knows them only roughly."""
        room, low, high = float(room_bytes), 0.0, inf
        for _ in range(ROUNDS // (1 + self.is_large)):
            tried = [self.try_out(draft, room_bytes) for draft in self.find(int(room), ahead=ahead)]
            yield from tried
            off = room_bytes - min((one.peak_bytes for one in tried), default=0.95 * room_bytes)
            if tried and 0 <= off < CLOSE * room_bytes:
                return
            low, high = (max(low, room), high) if off > 0 else (low, min(high, room))
            room += off if off > 0 else 1.5 * off
            if not low < room < high:
                room = (low + high) / 2

    def ever_smaller(self) -> Iterator[Candidate]:
        """Drafts for ever smaller rooms, until there are none."""
        held = sum(layer.weight_bytes + layer.internal_bytes for layer in self.spans.graph.layers)
        low, high = 0, 3 * sum(self.spans.nbytes.values()) + held
        for _ in range(HALVINGS):
            middle = (low + high) // 2
            tried = [self.try_out(draft, 0) for draft in self.find(middle)]
            yield from tried
            low, high = (low, middle) if tried else (middle, high)

    def find(self, room_bytes: int, *, ahead: bool = True) -> list[Draft]:
        """Drafts for a room; where the host is short, a byte there gets a price that keeps enough of them away."""
        count = 1 if self.is_large else ALTERNATIVES
        found = self.search.find(room_bytes, count=count, ahead=ahead)
        if self.host_bytes is None or not found or self._host_bytes(found[0]) <= self.host_bytes:
            return found
        price = self.spans.costs.plain_seconds / (1 + sum(self.spans.nbytes.values()))
        for _ in range(HALVINGS):
            found = self.search.find(room_bytes, seconds_per_host_byte=price, count=count, ahead=ahead)
            if self._host_bytes(found[0]) <= self.host_bytes:
                break
            price *= 4
        return found

    def _host_bytes(self, draft: Draft) -> int:
        return self.spans.graph.nbytes(*(tensor for tensor in draft.away if tensor in self.spans.graph.producer))
