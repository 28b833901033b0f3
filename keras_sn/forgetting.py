"""Makes a plan smaller, one change after the other, until it fits, and then faster, for as long as it fits.

What waits between regions may wait on the host, or nowhere: the region that makes it then runs again when a later region's
backward pass reads it. This costs another forward pass of a few regions, where a copy to the host and back may cost more. And a
region may be cut in two, so that less is made again at once. In: a draft. Out: candidates.
"""

from collections.abc import Callable, Iterator
from itertools import pairwise

from keras_sn.candidates import Candidate
from keras_sn.cost import StepCosts
from keras_sn.cuts import runs
from keras_sn.drafts import Draft, inputs_of, joined, may_leave, with_cut, with_place
from keras_sn.plan import DEVICE, HOST
from keras_sn.predict import region_at
from keras_sn.steps import RECOMPUTE

LOOKED_AT, THOROUGHLY = 100_000, 500_000
"""Layer calls that all trials of one search together may look at: two or three seconds, ten or twenty."""

DETOURS = 8
"""Changes that save nothing by themselves, but may make room for others that do."""

TryOut = Callable[[Draft], Candidate]
Fits = Callable[[Candidate], bool]
Move = Callable[[Draft], Draft | None]
"""A change to a draft; None where it does not apply any more."""


def until_it_fits(
    costs: StepCosts, draft: Draft, room_bytes: float, may_offload: bool, try_out: TryOut, *, thoroughly: bool = False
) -> Candidate | None:
    """Makes that change which costs the fewest seconds for the bytes that it saves where there is no room, until there is room.

    Args:
        costs: The graph on its device.
        draft: Where to begin.
        room_bytes: What activations and their gradients may take on the device.
        may_offload: Whether tensors may go to the host.
        try_out: Predicts a draft.
        thoroughly: Try more, and cut single layer calls out where nothing else helps.

    Returns:
        A candidate whose peak is at most `room_bytes`, or None.
    """
    trials_left, detours_left = _trials(costs, thoroughly), DETOURS
    best, seen = try_out(draft), {draft}
    while best.peak_bytes > room_bytes:
        missing = _missing_bytes(best, room_bytes)
        saved, better = [], []
        for moves in (_relieving(costs, best, may_offload), *([_isolating(best)] if thoroughly else [])):
            moves = [move for move in moves if move not in seen]
            trials_left -= len(moves)
            tried = [try_out(move) for move in moves] if trials_left > 0 else []
            saved += [(missing - _missing_bytes(one, room_bytes), one) for one in tried]
            better = [(max(0.0, one.seconds - best.seconds) / nbytes, one) for nbytes, one in saved if nbytes > 0]
            if better:
                break
        if not better and (detours_left == 0 or not saved):
            return None
        detours_left -= not better
        best = min(better, key=lambda pair: pair[0])[1] if better else max(saved, key=lambda pair: pair[0])[1]
        seen.add(best.draft)
    return best


def _trials(costs: StepCosts, thoroughly: bool) -> int:
    return (THOROUGHLY if thoroughly else LOOKED_AT) // max(1, len(costs.graph.layers))


def _missing_bytes(candidate: Candidate, room_bytes: float) -> float:
    """By how much a plan exceeds the room, over all regions' forward and backward passes."""
    return sum(level - room_bytes for level in candidate.prediction.levels if level > room_bytes)


def _relieving(costs: StepCosts, candidate: Candidate, may_offload: bool) -> Iterator[Draft]:
    """Drafts in which less is there at the peak: something waits elsewhere, or the region there is cut in two."""
    draft, region = candidate.draft, _at_peak(candidate)
    if draft is None:
        return
    read_early = {one.tensor for other in candidate.regions[:region] for one in other.saved if one.tier == DEVICE}
    read_late = {one.tensor for other in candidate.regions[region + 1 :] for one in other.saved if one.tier == DEVICE}
    for tensor in sorted((read_early | read_late) - draft.saved):
        if may_leave(costs.graph, tensor):
            yield with_place(draft, tensor, RECOMPUTE)
            if may_offload:
                yield with_place(draft, tensor, HOST)
    for end in runs(draft.ends)[region][:-1]:
        yield with_cut(draft, end)


def _isolating(candidate: Candidate) -> Iterator[Draft]:
    """Drafts in which a layer call of the region at the peak, which may hold more than all others, is a region of its own."""
    draft = candidate.draft
    if draft is None:
        return
    for before, end in pairwise(runs(draft.ends)[_at_peak(candidate)][:-1]):
        yield with_cut(with_cut(draft, before), end)


def _at_peak(candidate: Candidate) -> int:
    """The region that runs when most is there."""
    levels = candidate.prediction.levels
    return region_at(levels.index(max(levels)), len(candidate.regions))


def descend(costs: StepCosts, best: Candidate, try_out: TryOut, fits: Fits, *, thoroughly: bool = False) -> Candidate:
    """Joins and cuts regions and moves what waits, one at a time, as long as that makes a plan faster and it still fits."""
    trials_left = _trials(costs, thoroughly)
    changed = True
    while changed:
        changed = False
        for move in _moves(costs, best):
            if trials_left == 0:
                return best
            trials_left -= 1
            if (draft := move(best.draft)) is None:
                continue
            candidate = try_out(draft)
            if fits(candidate) and candidate.seconds < best.seconds:
                best, changed = candidate, True
    return best


def _moves(costs: StepCosts, best: Candidate) -> Iterator[Move]:
    draft = best.draft
    if draft is None:
        return
    for end in draft.ends[-2::-1]:
        yield lambda one, end=end: joined(one, end) if end in one.ends else None
    waiting = sorted(_waiting(costs, draft) | draft.forgotten, key=lambda tensor: (costs.graph.nbytes(tensor), tensor))
    for tensor in waiting:
        yield lambda one, tensor=tensor: with_place(one, tensor, DEVICE) if tensor in one.away | one.forgotten else None
        yield lambda one, tensor=tensor: with_place(one, tensor, RECOMPUTE) if tensor in one.away else None
    for tensor in waiting:
        yield lambda one, tensor=tensor: with_place(one, tensor, HOST) if tensor in one.forgotten else None
    for end in sorted(set(range(len(costs.graph.layers) - 1)) - set(draft.ends)):
        yield lambda one, end=end: with_cut(one, end)


def _waiting(costs: StepCosts, draft: Draft) -> set[str]:
    """What waits between regions and may wait elsewhere."""
    layers = costs.graph.layers
    read = {tensor for run in runs(draft.ends) for tensor in inputs_of(layers[run.start : run.stop])}
    return {tensor for tensor in read if may_leave(costs.graph, tensor)} - draft.forgotten
