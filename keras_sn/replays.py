"""Regions that run again because something that they make waits nowhere: which ones, in which order, and what they hold.

Before a region's backward pass begins, the regions that make its forgotten inputs run again, and before them those that make
theirs: each once, from front to back, one at a time.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from keras_sn.plan import Region
from keras_sn.steps import RECOMPUTE

Sources = list[tuple[int, ...]]
"""By region: the regions that make its forgotten inputs."""


def sources_of(regions: Sequence[Region], made_in: Mapping[str, int]) -> Sources:
    """By region, the earlier ones that make what it saves nowhere.

    Args:
        regions: The plan's regions.
        made_in: Tensor -> the number of the region that makes it.
    """
    found = ({made_in[one.tensor] for one in region.saved if one.tier == RECOMPUTE} for region in regions)
    return [tuple(sorted(source for source in one if source < index)) for index, one in enumerate(found)]


def run_again(sources: Sources, index: int) -> list[int]:
    """All regions that run again for a region's backward pass, in order."""
    found: set[int] = set()
    pending = list(sources[index])
    while pending:
        one = pending.pop()
        if one not in found:
            found.add(one)
            pending.extend(sources[one])
    return sorted(found)


def totals(sources: Sources, own: Sequence[float]) -> list[float]:
    """By region, the sum of what the regions that run again for it cost, if one costs `own`."""
    found: list[float] = []
    for index, direct in enumerate(sources):
        if len(direct) > 1:
            found.append(sum(own[one] for one in run_again(sources, index)))
        else:  # a chain may be as long as the model
            found.append(sum(found[one] + own[one] for one in direct))
    return found


class ReplayBytes:
    """What regions that run again hold.

    Args:
        regions: The plan's regions.
        made_in: Tensor -> the number of the region that makes it.
        nbytes: Bytes of tensors together.
        while_running: By region, the bytes that only its own forward pass holds, with all that it makes.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        made_in: Mapping[str, int],
        nbytes: Callable[..., int],
        while_running: Sequence[int],
    ):
        self.regions, self.made_in, self.nbytes, self.while_running = regions, made_in, nbytes, while_running
        self.sources = sources_of(regions, made_in)
        self.forgotten = [{one.tensor for one in region.saved if one.tier == RECOMPUTE} for region in regions]
        self._known: dict[int, int] = {}

    def most(self, index: int) -> int:
        """The most that is held before a region's backward pass begins, with the forgotten inputs that are there then."""
        if not self.sources[index]:
            return self.nbytes(*self.forgotten[index])
        pending = [index]
        while pending:
            one = pending[-1]
            waiting = [source for source in self.sources[one] if source not in self._known] if len(self.sources[one]) == 1 else []
            if waiting:
                pending.extend(waiting)
            else:
                self._known[one] = self._most(one)
                pending.pop()
        return self._known[index]

    def _most(self, index: int) -> int:
        own = self.nbytes(*self.forgotten[index])
        if len(self.sources[index]) == 1:  # before the last one of a chain runs, only what it reads is left of the others
            (source,) = self.sources[index]
            return max(own, self._known[source], self._running(source, self.forgotten[source]))
        order, most = run_again(self.sources, index), own
        needed_until = {tensor: place for place, one in enumerate(order) for tensor in self.forgotten[one]}
        needed_until |= dict.fromkeys(self.forgotten[index], len(order))
        there: set[str] = set()
        made: dict[int, list[str]] = {}
        for tensor in needed_until:
            made.setdefault(self.made_in[tensor], []).append(tensor)
        for place, one in enumerate(order):
            most = max(most, self._running(one, there))
            there = {tensor for tensor in (*there, *made.get(one, ())) if needed_until[tensor] > place}
        return max(most, self.nbytes(*there))

    def _running(self, index: int, there: Iterable[str]) -> int:
        away = (one.tensor for one in self.regions[index].saved if one.is_away)
        return self.nbytes(*there, *away) + self.while_running[index]
