"""A plan of regions with what it is predicted to need and to take, its copies timed as well as the room allows."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from keras_sn.cost import StepCosts
from keras_sn.drafts import Draft, regions_of
from keras_sn.plan import Plan, Region
from keras_sn.predict import Prediction, Timeline
from keras_sn.timing import Durations, Timing, copied_back, schedule_prefetches, time_regions

COPY_WINDOWS = (8, 4, Plan.copy_window)
"""Regions that the forward pass may run ahead of its copies: the more, the less it waits, and the more is on the device."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan of regions and its predictions."""

    regions: tuple[Region, ...]
    copy_window: int
    prediction: Prediction
    timing: Timing
    draft: Draft | None = None
    """What it was made from, if from a draft."""

    @property
    def peak_bytes(self) -> int:
        return self.prediction.peak_bytes

    @property
    def seconds(self) -> float:
        return self.timing.seconds

    def fits(self, room_bytes: float, host_bytes: int | None) -> bool:
        return self.peak_bytes <= room_bytes and (host_bytes is None or self.prediction.offloaded_bytes <= host_bytes)


def evaluate(costs: StepCosts, regions: Sequence[Region], room_bytes: float) -> Candidate:
    """Predicts a plan's peak and seconds.

    Where copies are made, they start back as early as they should if there is room, and the forward pass runs as far ahead of
    them as there is room.

    Args:
        costs: The graph on its device.
        regions: The plan's regions.
        room_bytes: What activations and their gradients may take on the device.
    """
    timeline = Timeline(costs.graph, regions)
    durations = Durations(costs, regions, timeline.replays.sources)
    if not any(one.is_away for region in regions for one in region.saved):
        return _timed(costs, timeline, durations, regions, Plan.copy_window)
    if not costs.model.copies_overlap:  # nothing is won by copying early
        return _timed(costs, timeline, durations, when_read(regions), Plan.copy_window)
    timed = schedule_prefetches(costs, regions, durations)
    least = timeline.prediction(timed, 1).peak_bytes
    if least > room_bytes:
        later = in_time(timeline, timed, room_bytes), when_read(regions)
        least, timed = min(((timeline.prediction(one, 1).peak_bytes, one) for one in later), key=lambda pair: pair[0])
    windows = (window for window in COPY_WINDOWS if timeline.prediction(timed, window).peak_bytes <= room_bytes)
    return _timed(costs, timeline, durations, timed, next(windows, 1) if least <= room_bytes else 1)


def from_draft(costs: StepCosts, draft: Draft, room_bytes: float) -> Candidate:
    """The candidate of a draft; where there is no room for it, XLA's regions do not keep their own outputs for themselves."""
    found = evaluate(costs, regions_of(costs.graph, draft), room_bytes)
    if not costs.graph.is_compiled or found.peak_bytes <= room_bytes:
        return replace(found, draft=draft)
    in_backward = found.prediction.levels[: len(draft.ends) - 1 : -1]
    full = (end for end, level in zip(draft.ends, in_backward, strict=True) if level > room_bytes)
    smaller = replace(draft, remade=frozenset(full))
    candidate = evaluate(costs, regions_of(costs.graph, smaller), room_bytes)
    return replace(candidate, draft=smaller) if candidate.peak_bytes < found.peak_bytes else replace(found, draft=draft)


def in_time(timeline: Timeline, timed: Sequence[Region], room_bytes: float) -> list[Region]:
    """Puts off copies back until there is room for them, if need be until they are read."""
    last = len(timed) - 1
    levels = timeline.prediction(timed, 1).levels
    starts = {
        (index, one.tensor): one.prefetch_at
        for index, region in enumerate(timed)
        for one in region.saved
        if one.is_away and one.prefetch_at is not None
    }
    for full in range(last, 0, -1):
        if levels[2 * last + 1 - full] > room_bytes:  # a copy that is put off is still there in the next slot
            starts |= {key: full - 1 for key, start in starts.items() if key[0] < full <= start}
    return copied_back(timed, lambda index, one: starts.get((index, one.tensor)))


def one_ahead(regions: Sequence[Region]) -> list[Region]:
    """Each copy back is asked for when the region before its own starts in the backward pass (section 3.3 of the paper)."""
    return copied_back(regions, lambda index, _: min(index + 1, len(regions) - 1))


def when_read(regions: Sequence[Region]) -> list[Region]:
    """Each copy back starts when its region's backward pass does, which waits for it."""
    return copied_back(regions, lambda index, _: index)


def as_given(costs: StepCosts, regions: Sequence[Region], copy_window: int) -> Candidate:
    """Predicts a plan as it is, its copies at the times that it says."""
    timeline = Timeline(costs.graph, regions)
    return _timed(costs, timeline, Durations(costs, regions, timeline.replays.sources), regions, copy_window)


def _timed(costs: StepCosts, timeline: Timeline, durations: Durations, regions: Sequence[Region], copy_window: int) -> Candidate:
    prediction = timeline.prediction(regions, copy_window)
    return Candidate(tuple(regions), copy_window, prediction, time_regions(costs, regions, copy_window, durations))
