"""The tensor cache: which tensors stay on a device of a given size. Byte-exact, with locks.

Follows Wang et al. 2018 (SuperNeurons, section 3.3.2, algorithm 2), which evicts the least recently used tensor. Two
more evictions stand beside it: Belady's (farthest next use, known because the schedule is) and that of Kirisame et al.
2021 (DTR: least seconds per byte and staleness). It decides only; `offload` turns the decisions into instructions.
"""

import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from keras_sn.errors import BudgetError
from keras_sn.steps import Step


class Eviction(Protocol):
    """Decides which tensor leaves first."""

    def touch(self, tensor: str, nbytes: int, now: int) -> None:
        """A tensor is used at step `now`."""

    def forget(self, tensor: str) -> None:
        """A tensor left the cache."""

    def candidates(self, now: int) -> Iterator[str]:
        """The tensors in the cache, the first to leave first."""
        ...


class LRU:
    """Least recently used first: the paper's, because a backward pass reads the most recent tensors first."""

    def __init__(self):
        self._order: OrderedDict[str, None] = OrderedDict()

    def touch(self, tensor: str, nbytes: int, now: int) -> None:
        self._order[tensor] = None
        self._order.move_to_end(tensor)

    def forget(self, tensor: str) -> None:
        del self._order[tensor]

    def candidates(self, now: int) -> Iterator[str]:
        return iter(self._order)


class Belady:
    """Farthest next use first: fewest misses for tensors of one size."""

    def __init__(self, steps: Sequence[Step]):
        self._never = len(steps)
        self._uses: dict[str, list[int]] = {}
        for index, step in enumerate(steps):
            for tensor in step.reads | step.writes:
                self._uses.setdefault(tensor, []).append(index)
        self._next_use: dict[str, int] = {}
        self._farthest: list[tuple[int, str]] = []

    def touch(self, tensor: str, nbytes: int, now: int) -> None:
        uses = self._uses[tensor]
        later = bisect_right(uses, now)
        self._next_use[tensor] = uses[later] if later < len(uses) else self._never
        heapq.heappush(self._farthest, (-self._next_use[tensor], tensor))

    def forget(self, tensor: str) -> None:
        del self._next_use[tensor]

    def candidates(self, now: int) -> Iterator[str]:
        seen = []
        try:
            while self._farthest:
                entry = heapq.heappop(self._farthest)
                # An entry whose tensor has left or was used again is out of date.
                if self._next_use.get(entry[1]) == -entry[0]:
                    seen.append(entry)
                    yield entry[1]
        finally:
            for entry in seen:
                heapq.heappush(self._farthest, entry)


class CostPerByteStaleness:
    """Least seconds / (bytes * staleness) first: what is cheap to bring back, large, and long unused.

    An eviction looks at all tensors in the cache.

    Args:
        seconds: Tensor -> seconds to bring it back, by copy or by recomputation.
    """

    def __init__(self, seconds: Mapping[str, float]):
        self._seconds = seconds
        self._last: dict[str, tuple[int, int]] = {}

    def touch(self, tensor: str, nbytes: int, now: int) -> None:
        self._last[tensor] = (nbytes, now)

    def forget(self, tensor: str) -> None:
        del self._last[tensor]

    def candidates(self, now: int) -> Iterator[str]:
        def score(tensor: str) -> tuple[float, str]:
            nbytes, last = self._last[tensor]
            return self._seconds[tensor] / max(1, nbytes * (now - last)), tensor

        return iter(sorted(self._last, key=score))


class Access(NamedTuple):
    """What one use of a tensor did."""

    hit: bool
    evicted: tuple[str, ...] = ()


class TensorCache:
    """The tensors on a device of `capacity_bytes`.

    Args:
        capacity_bytes: What the tensors may take together.
        eviction: Who leaves first; `LRU()` is the paper's.
    """

    def __init__(self, capacity_bytes: int, eviction: Eviction | None = None):
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._eviction = eviction or LRU()
        self._nbytes: dict[str, int] = {}
        self._locked: set[str] = set()

    def __contains__(self, tensor: str) -> bool:
        return tensor in self._nbytes

    def lock(self, *tensors: str) -> None:
        """Keeps tensors from eviction while a layer call uses them, whether they are in the cache yet or not."""
        self._locked.update(tensors)

    def unlock(self, *tensors: str) -> None:
        self._locked.difference_update(tensors)

    def check(self, tensor: str, nbytes: int, now: int) -> Access:
        """Uses a tensor at step `now`; puts it into the cache if it is not there (the paper's `Check`, `in`, `out`).

        Raises:
            BudgetError: The locked tensors leave too little room for it.
        """
        hit = tensor in self
        evicted = () if hit else self._make_room(tensor, nbytes, now)
        if not hit:
            self._nbytes[tensor] = nbytes
            self.used_bytes += nbytes
        self._eviction.touch(tensor, nbytes, now)
        return Access(hit, evicted)

    def remove(self, tensor: str) -> None:
        """Frees a tensor that nobody needs any more, or that is evicted."""
        self.used_bytes -= self._nbytes.pop(tensor)
        self._eviction.forget(tensor)

    def _make_room(self, tensor: str, nbytes: int, now: int) -> tuple[str, ...]:
        missing_bytes = self.used_bytes + nbytes - self.capacity_bytes
        if missing_bytes <= 0:
            return ()
        victims = []
        for candidate in self._eviction.candidates(now):
            if candidate not in self._locked and self._nbytes[candidate]:
                victims.append(candidate)
                missing_bytes -= self._nbytes[candidate]
                if missing_bytes <= 0:
                    break
        else:
            locked_bytes = sum(size for name, size in self._nbytes.items() if name in self._locked)
            raise BudgetError(
                f"The tensor cache has no room for {tensor!r} ({nbytes:,} bytes): {locked_bytes:,} bytes are locked. "
                f"Give it more. Received: capacity_bytes={self.capacity_bytes:,}"
            )
        for victim in victims:
            self.remove(victim)
        return tuple(victims)
