"""The seconds of a plan of regions, on paper: compute, recomputation, and copies that queue behind each other.

A region's forward or backward pass starts when the one before it is done and the copies of the one `copy_window` before it are. A
copy back that is asked for when a region's backward pass starts begins when that is done, since TensorFlow lets copies wait for
all that it has given the device before (traced on an H200); the next region waits until the tensor is on the host and the copy is
asked for, and each for what it reads.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from weakref import WeakKeyDictionary

from keras_sn.cost import StepCosts
from keras_sn.plan import Plan, Region, Saved
from keras_sn.region_bytes import key_of, region_bytes
from keras_sn.replays import Sources, sources_of, totals
from keras_sn.steps import RECOMPUTE


@dataclass(frozen=True, slots=True)
class Timing:
    """What a plan is predicted to take."""

    seconds: float
    """One training step, without the optimizer's update."""
    recompute_seconds: tuple[float, ...]
    """By region."""
    stall_seconds: float
    """Of `seconds`, waiting for copies."""


def time_regions(
    costs: StepCosts, regions: Sequence[Region], copy_window: int = Plan.copy_window, durations: "Durations | None" = None
) -> Timing:
    """Runs a plan's regions on paper and says how long that takes; `durations`, where they are known, are theirs."""
    durations = durations or Durations(costs, regions)
    clock = _Clock(costs, regions, durations)
    clock.run_forward(copy_window)
    clock.run_backward(copy_window)
    # The host starts one kernel after the other and runs ahead of the device, if that leaves it the time.
    started = durations.kernels * costs.model.host_seconds_per_kernel
    return Timing(max(clock.now, started), tuple(durations.again), clock.stalled)


def schedule_prefetches(costs: StepCosts, regions: Sequence[Region], durations: "Durations | None" = None) -> list[Region]:
    """Starts each copy back as late as it can start and still be there in time, with one link for all of them."""
    durations = durations or Durations(costs, regions)
    backward = [one.backward + again for one, again in zip(durations.parts, durations.again, strict=True)]
    starts = [0.0, *accumulate(reversed(backward))]  # by backward order: the last region starts at 0
    link_is_needed_at = starts[-1]

    def start(index: int, one: Saved) -> int:
        nonlocal link_is_needed_at
        end = min(link_is_needed_at, starts[len(regions) - 1 - index])
        link_is_needed_at = end - costs.model.transfer_seconds(costs.graph.nbytes(one.tensor))
        first = max(0, bisect_left(starts, link_is_needed_at, hi=len(regions) - 1 - index))
        first -= first > 0 and starts[first] > link_is_needed_at
        first = max(0, first - 1)  # a copy begins when the region at whose start it is asked for is done
        # At least while the region before it in the backward pass computes.
        return max(len(regions) - 1 - first, min(index + 2, len(regions) - 1))

    return copied_back(regions, start)  # the first region's backward pass is the last


def copied_back(regions: Sequence[Region], start: Callable[[int, Saved], int | None]) -> list[Region]:
    """The regions with new times for their copies back; `start` says which from the number of a region and what it saves."""

    def timed(index: int, region: Region) -> Region:
        if not any(one.is_away for one in region.saved):
            return region
        saved = (replace(one, prefetch_at=start(index, one)) if one.is_away else one for one in region.saved)
        return replace(region, saved=tuple(saved))

    return [timed(index, region) for index, region in enumerate(regions)]


@dataclass(frozen=True, slots=True)
class _Alone:
    """What one region takes, whatever the other regions do, in seconds and kernels."""

    first: int
    """The position of its first layer call."""
    forward: float
    backward: float
    again: float
    kernels: int
    """Of its forward pass."""
    kernels_again: int


_KNOWN: "WeakKeyDictionary[StepCosts, dict[tuple, _Alone]]" = WeakKeyDictionary()


def _alone(costs: StepCosts, region: Region) -> _Alone:
    known, key = _KNOWN.setdefault(costs, {}), key_of(region)
    if key not in known:
        overhead = costs.region_seconds / 2 * region.recompute  # a kept region is no function
        places, again = [costs.graph.position[name] for name in region.layers], region_bytes(costs.graph, region).again
        known[key] = _Alone(
            first=places[0],
            forward=overhead + sum(costs.forward[place] for place in places),
            backward=overhead + sum(costs.backward[place] for place in places),
            again=sum(costs.again[place] for place in again),
            kernels=sum(costs.kernels[place][0] for place in places),
            kernels_again=sum(costs.kernels_again[place] for place in again),
        )
    return known[key]


class Durations:
    """What the regions of a plan take to compute, whenever its copies are made.

    Args:
        costs: The graph on its device.
        regions: The plan's regions. When their copies come back is no matter here.
        sources: By region, those that run again before its backward pass, where that is known.
    """

    def __init__(self, costs: StepCosts, regions: Sequence[Region], sources: Sources | None = None):
        self.parts = [_alone(costs, region) for region in regions]
        self.again = [one.again for one in self.parts]
        self.kernels = costs.kernel_count + sum(one.kernels_again for one in self.parts)
        if any(one.tier == RECOMPUTE for region in regions for one in region.saved):
            self._add_replays(costs, regions, sources)

    def _add_replays(self, costs: StepCosts, regions: Sequence[Region], sources: Sources | None) -> None:
        """The regions that run again before a region's backward pass, and the copies that these wait for."""
        if sources is None:
            region_of = [index for index, region in enumerate(regions) for _ in region.layers]
            sources = sources_of(regions, {tensor: region_of[at] for tensor, at in costs.graph.producer.items()})
        copies = (
            sum(costs.model.transfer_seconds(costs.graph.nbytes(one.tensor)) for one in region.saved if one.is_away)
            for region in regions
        )
        seconds = totals(sources, [one.forward + more for one, more in zip(self.parts, copies, strict=True)])
        self.again = [one + more for one, more in zip(self.again, seconds, strict=True)]
        self.kernels += sum(totals(sources, [one.kernels for one in self.parts]))


class _Clock:
    def __init__(self, costs: StepCosts, regions: Sequence[Region], durations: Durations):
        self.costs, self.regions, self.parts, self.again = costs, regions, durations.parts, durations.again
        self.now = self.stalled = self.link_free_at = 0.0
        self.stored: dict[str, float] = {}
        """What has left, and when it is on the host."""

    def wait_until(self, time: float) -> None:
        self.stalled += max(0.0, time - self.now)
        self.now = max(self.now, time)

    def copy(self, tensor: str, earliest: float) -> float:
        """Puts a copy into the link's queue; when it is done."""
        if not self.costs.model.copies_overlap:
            earliest = self.now  # and the device waits
        self.link_free_at = max(self.link_free_at, earliest)
        self.link_free_at += self.costs.model.transfer_seconds(self.costs.graph.nbytes(tensor))
        if not self.costs.model.copies_overlap:
            self.wait_until(self.link_free_at)
        return self.link_free_at

    def run_forward(self, copy_window: int) -> None:
        self.done = [0.0] * len(self.regions)
        for index, region in enumerate(self.regions):
            if index >= copy_window:
                self.wait_until(self.done[index - copy_window])
            start, self.now = self.now, self.now + self.parts[index].forward
            for one in region.saved:
                if one.is_away and one.tensor not in self.stored:
                    is_made_here = self.costs.graph.producer.get(one.tensor, -1) >= self.parts[index].first
                    self.done[index] = self.stored[one.tensor] = self.copy(one.tensor, self.now if is_made_here else start)

    def run_backward(self, copy_window: int) -> None:
        asked: dict[int, list[tuple[int, str]]] = {}
        last = len(self.regions) - 1
        for index in range(last, -1, -1):
            for one in self.regions[index].saved:
                if one.is_away:
                    start = index if one.prefetch_at is None else min(one.prefetch_at, last)
                    asked.setdefault(start, []).append((index, one.tensor))
        arrived = [0.0] * len(self.regions)
        self.link_free_at = 0.0  # the link's other direction
        asked_before = 0.0
        for index in range(last, -1, -1):
            self.wait_until(asked_before)  # the next region is not queued before the copies are
            if 0 <= 2 * last + 1 - index - copy_window <= last:
                self.wait_until(self.done[2 * last + 1 - index - copy_window])
            for _, tensor in (one for one in asked.get(index, ()) if one[0] == index):
                arrived[index] = max(arrived[index], self.copy(tensor, max(self.now, self.stored[tensor])))
            self.wait_until(arrived[index])
            self.now += self.parts[index].backward + self.again[index]
            for region, tensor in (one for one in asked.get(index, ()) if one[0] != index):
                asked_before = max(asked_before, self.stored[tensor])
                arrived[region] = max(arrived[region], self.copy(tensor, max(self.now, self.stored[tensor])))
