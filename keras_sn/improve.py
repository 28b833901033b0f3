"""Local search: small changes to a draft, kept when the predicted plan is better."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from keras_sn.candidates import Candidate
from keras_sn.cuts import runs
from keras_sn.drafts import Draft, joined, may_leave
from keras_sn.graph import LayerGraph

MAX_TRIALS = 400
MAX_LOOKED_AT = 2000
"""Layer calls that all trials together may look at."""


def improve(
    graph: LayerGraph,
    best: Candidate,
    try_out: Callable[[Draft], Candidate],
    better: Callable[[Candidate, Candidate], bool],
) -> Candidate:
    """Changes the draft of a candidate step by step as long as that makes it better, or the effort is spent.

    Args:
        graph: The layer graph.
        best: Where to begin; it has a draft.
        try_out: Predicts a draft.
        better: Whether the first candidate is better than the second.

    Returns:
        The best candidate found.
    """
    trials_left = min(MAX_TRIALS, MAX_LOOKED_AT // max(1, len(graph.layers)))
    nearby = _nearby(graph, best.draft) if best.draft else iter(())
    while trials_left > 0 and (changed := next(nearby, None)) is not None:
        trials_left -= 1
        candidate = try_out(changed)
        if better(candidate, best):
            best, nearby = candidate, _nearby(graph, changed)
    return best


def _nearby(graph: LayerGraph, draft: Draft) -> Iterator[Draft]:
    """Drafts that differ in one thing, then those that differ in two."""
    yield from _neighbours(graph, draft)
    for first in _neighbours(graph, draft):
        yield from _neighbours(graph, first)


def _neighbours(graph: LayerGraph, draft: Draft) -> Iterator[Draft]:
    """Drafts that differ in one thing."""
    for tensor in graph.producer:
        yield replace(draft, saved=draft.saved ^ {tensor})
    for tensor in graph.producer:
        if may_leave(graph, tensor):
            yield replace(draft, away=draft.away ^ {tensor})
    may_keep = not graph.is_compiled  # XLA regions save what they keep
    for end in draft.ends if may_keep else ():
        yield replace(draft, kept=draft.kept ^ {end})
    for end in draft.ends[:-1]:
        yield joined(draft, end)
    for run in runs(draft.ends):
        for position in run[:-1]:
            for kept in subsets((position, run[-1])) if may_keep else [()]:
                yield _with(_kept(draft, run[-1], kept), position, is_kept=position in kept)
    for end in draft.ends[:-1]:
        for moved in {end - 1, end + 1} - set(draft.ends) - {-1}:
            yield _with(joined(draft, end), moved, is_kept=end in draft.kept)


def subsets(things: Sequence[int]) -> list[tuple[int, ...]]:
    return [one for size in range(len(things) + 1) for one in combinations(things, size)]


def simple_drafts(graph: LayerGraph) -> list[Draft]:
    """Where else local search may begin: every layer call a region of its own, recomputed or kept."""
    every = tuple(range(len(graph.layers)))
    found = [Draft(every), Draft(every, saved=frozenset(graph.producer))]
    return found if graph.is_compiled else [*found, Draft(every, kept=frozenset(every)), Draft(every, kept=frozenset(every[-1:]))]


def _with(draft: Draft, end: int, *, is_kept: bool) -> Draft:
    return _kept(replace(draft, ends=tuple(sorted({*draft.ends, end}))), end, (end,) if is_kept else ())


def _kept(draft: Draft, end: int, kept: Sequence[int]) -> Draft:
    return replace(draft, kept=draft.kept | {end} if end in kept else draft.kept - {end})
