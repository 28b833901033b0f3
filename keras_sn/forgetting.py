"""Lets tensors between regions wait elsewhere, one after the other, until a plan fits: on the host, or nowhere.

The region that makes one that waits nowhere runs again when a later region's backward pass reads it. This costs another forward
pass of a few regions, where a copy to the host and back may cost more. In: a draft. Out: candidates.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import accumulate

from keras_sn.candidates import Candidate
from keras_sn.cost import StepCosts
from keras_sn.cuts import runs
from keras_sn.drafts import Draft, inputs_of, joined, may_leave, with_place
from keras_sn.plan import DEVICE, HOST
from keras_sn.steps import RECOMPUTE

MAX_LOOKED_AT = 60_000
"""Layer calls that all trials of one descent together may look at."""

TryOut = Callable[[Draft], Candidate]
Fits = Callable[[Candidate], bool]


def until_it_fits(costs: StepCosts, draft: Draft, place: str, try_out: TryOut, fits: Fits) -> Candidate | None:
    """Moves one tensor after the other until that fits; None if it never does.

    Args:
        costs: The graph on its device.
        draft: Where to begin.
        place: Where to: to `RECOMPUTE` those first that are cheap to make for their bytes, to `HOST` those that wait longest.
        try_out: Predicts a draft.
        fits: Whether a candidate fits the budgets.
    """
    order = _by_price(costs, draft)
    if place == HOST:
        order = sorted(set(order) - draft.away, key=costs.graph.producer.__getitem__)
    moved = list(accumulate(order, lambda draft, tensor: with_place(draft, tensor, place), initial=draft))
    if not fits(try_out(moved[-1])):
        return None
    return try_out(moved[bisect_left(moved, True, key=lambda draft: fits(try_out(draft)))])


def descend(costs: StepCosts, best: Candidate, try_out: TryOut, fits: Fits) -> Candidate:
    """Joins regions, and moves what waits, one at a time, as long as that makes a plan faster and it still fits."""
    trials_left = MAX_LOOKED_AT // max(1, len(costs.graph.layers))
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


def _moves(costs: StepCosts, best: Candidate) -> Iterator[Callable[[Draft], Draft | None]]:
    """Changes to a draft; None where one does not apply any more."""
    draft = best.draft
    if draft is None:
        return
    for end in draft.ends[-2::-1]:
        yield lambda one, end=end: joined(one, end) if end in one.ends else None
    waiting = sorted(_by_price(costs, draft) + list(draft.forgotten), key=costs.graph.nbytes)
    for tensor in waiting:
        yield lambda one, tensor=tensor: with_place(one, tensor, DEVICE) if tensor in one.away | one.forgotten else None
        yield lambda one, tensor=tensor: with_place(one, tensor, RECOMPUTE) if tensor in one.away else None
    for tensor in waiting:
        yield lambda one, tensor=tensor: with_place(one, tensor, HOST) if tensor in one.forgotten else None


def _by_price(costs: StepCosts, draft: Draft) -> list[str]:
    """What waits between regions, by the seconds of making it again for each byte."""
    graph, price = costs.graph, {}
    for run in runs(draft.ends):
        seconds = sum(costs.forward[position] for position in run)
        for tensor in (tensor for position in run for tensor in graph.layers[position].outputs):
            if may_leave(graph, tensor):
                price[tensor] = seconds / graph.nbytes(tensor)
    waiting = {t for run in runs(draft.ends) for t in inputs_of(graph.layers[run.start : run.stop]) if t in price}
    return sorted(waiting - draft.forgotten, key=price.__getitem__)
