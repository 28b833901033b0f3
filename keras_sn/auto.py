"""`policy="auto"`: of all plans that fit, the one predicted to take the fewest seconds. `"recompute"` is one of them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import inf

from keras_sn.annealing import anneal
from keras_sn.candidates import Candidate, evaluate, from_draft
from keras_sn.cost import StepCosts
from keras_sn.cuts import held_bytes
from keras_sn.drafts import Draft, draft_of
from keras_sn.exact_spans import ExactSpanCosts
from keras_sn.forgetting import Fits, TryOut, descend, until_it_fits
from keras_sn.graph import LayerGraph
from keras_sn.improve import improve, simple_drafts
from keras_sn.plan import DEVICE, PLACES, Region
from keras_sn.repeats import compiled_calls, equal_cuts_through, kinds, repeated
from keras_sn.rooms import RoomSearch
from keras_sn.search import RegionSearch
from keras_sn.spans import SpanCosts
from keras_sn.steps import RECOMPUTE

LARGE_GRAPH = 1_500
"""Layer calls; beyond them predicting a plan takes long enough to try fewer."""
IMPROVED_GRAPH = 24
"""Layer calls; in a larger graph a local change makes too little difference for the time it takes."""
TINY_GRAPH = 8
"""Layer calls; in so small a graph a bad choice of one region can cost much, so local search begins in several places."""
FORGETFUL_GRAPH = 800
"""Layer calls; in a larger graph it takes too long to try what may be forgotten."""
SLOW, NOT_SO_SLOW = 1.25, 1.05
"""Times plain Keras; where a plan is faster than this, there is little to win by other kinds of plans."""
WAITING_SHARES = (0.6, 0.3)
"""Of what waits, counted in drafts that fit once something in them is forgotten."""

REPEATED_GRAPH = 300
"""Layer calls; a larger graph is better cut into equal regions, if it has repeated blocks."""
REGION_COUNTS = (8, 16, 32, 64)
NEARLY = 0.03
"""Of the seconds: what a plan of equal regions may take longer."""

SMALLER = 0.9
"""Of the bytes of the smallest plan found: what the next one may take."""

RELAXED_GRAPH = 100
"""Layer calls; in a larger graph it takes too long to look at what would be best with more room."""
LARGER = (1.03, 1.07, 1.12)

ANNEALINGS = 4
"""One after the other, each from what the one before has found."""

STARTS = 2
"""Plans that local search begins with."""


@dataclass(frozen=True, eq=False)
class Auto:
    """Plans one graph on one device.

    Args:
        spans: The possible regions of the graph on its device.
        host_bytes: What the host may hold; None for no limit, 0 for plans that recompute only.
        named: Plans of other policies, none of which a plan found here may be worse than.
    """

    spans: SpanCosts
    host_bytes: int | None = None
    named: Sequence[Sequence[Region]] = ()
    _tried: dict[tuple[Draft, float], Candidate] = field(default_factory=dict, init=False)
    """The same drafts come up again and again, from searches of close rooms and as neighbours of neighbours."""
    _named: dict[int, list[Candidate]] = field(default_factory=dict, init=False)
    """By room."""

    @property
    def costs(self) -> StepCosts:
        return self.spans.costs

    @property
    def graph(self) -> LayerGraph:
        return self.costs.graph

    @property
    def is_large(self) -> bool:
        return len(self.graph.layers) > LARGE_GRAPH

    @property
    def is_tiny(self) -> bool:
        return len(self.graph.layers) <= TINY_GRAPH

    @property
    def is_middling(self) -> bool:
        """Whether the graph is too large for local search, and small enough for many changes to be tried."""
        return IMPROVED_GRAPH < len(self.graph.layers) <= FORGETFUL_GRAPH

    @property
    def is_exact(self) -> bool:
        return isinstance(self.spans, ExactSpanCosts)

    @cached_property
    def search(self) -> RegionSearch:
        return RegionSearch(self.spans, may_offload=self.host_bytes != 0)

    @cached_property
    def rooms(self) -> RoomSearch:
        return RoomSearch(self.spans, self.search, self.host_bytes, self._try_out, is_large=self.is_large)

    @cached_property
    def on_device(self) -> "Auto":
        """The search for plans that send nothing to the host; asked too, so that none of its plans is missed."""
        return Auto(self.spans, host_bytes=0)

    def cheapest(self, room_bytes: int) -> Candidate | None:
        """The fastest plan found whose activations and gradients take at most `room_bytes`; None if none fits."""
        fastest = self._fastest(room_bytes)
        found = [fastest] if fastest else []
        if self.exactly and self._is_slow(found, room_bytes):
            fastest = self.exactly._fastest(room_bytes)
            found += [fastest] if fastest else []
        best = min(found, key=lambda one: one.seconds, default=None)
        if best is None:
            return self._of_smallest_at_any_price(room_bytes)
        if len(self.graph.layers) > REPEATED_GRAPH:
            return self._of_equal_regions(best, room_bytes)
        return self._annealed(best, room_bytes) if len(self.graph.layers) > IMPROVED_GRAPH else best

    @cached_property
    def exactly(self) -> "Auto | None":
        """The search for the same, with possible regions counted buffer by buffer; None where that is no use, or too slow."""
        if not self.graph.is_compiled or not self.is_middling:
            return None
        return Auto(ExactSpanCosts(self.costs, self.spans.forced), self.host_bytes)

    def _fastest(self, room_bytes: int) -> Candidate | None:
        tried = [*self.rooms.within(room_bytes), *(self._try_out(draft_of(self.graph, one), room_bytes) for one in self.named)]
        if self.host_bytes != 0 and self._is_slow(tried, room_bytes):
            tried += self.rooms.within(room_bytes, ahead=False)
        if self.is_tiny:
            tried += self._made_to_fit((one.draft for one in tried), room_bytes)
        found = self._improved(tried, room_bytes, lambda one: (one.seconds, one.peak_bytes))
        found += self._named_within(room_bytes)
        alone = self.on_device._fastest(room_bytes) if self.host_bytes != 0 else None
        found += [alone] if alone else []
        if alone is None:
            found += self._with_less_waiting(room_bytes, found)
        fitting = [one for one in found if one.fits(room_bytes, self.host_bytes)]
        looks_at_small = self.is_tiny or (alone is None and len(self.graph.layers) <= FORGETFUL_GRAPH)
        if not fitting or (looks_at_small and self._is_slow(fitting, room_bytes)):
            fitting += self._of_smallest(room_bytes)
        return min(fitting, key=lambda one: one.seconds, default=None)

    def _named_within(self, room_bytes: int) -> list[Candidate]:
        """The plans of other policies, each predicted once for a room."""
        if room_bytes not in self._named:
            self._named[room_bytes] = [evaluate(self.costs, regions, room_bytes) for regions in self.named]
        return self._named[room_bytes]

    def _annealed(self, best: Candidate, room_bytes: int) -> Candidate:
        """The plan, or a faster one like it, where that is worth the time."""
        worth = NOT_SO_SLOW if len(self.graph.layers) <= RELAXED_GRAPH else SLOW
        if not room_bytes or not best.seconds:  # all tensors have zero size
            return best
        if best.draft is None or best.seconds < worth * self.costs.plain_step_seconds:
            return best
        places = PLACES if self.host_bytes != 0 else (DEVICE, RECOMPUTE)
        for seed in range(ANNEALINGS):
            best = anneal(self.costs, best, room_bytes, places, *self._ways(room_bytes), seed=seed)
        return best

    def _ways(self, room_bytes: float) -> tuple[TryOut, Fits]:
        """How searches from draft to draft predict one, and whether what comes of it may be the result."""
        try_out = partial(self._try_out, room_bytes=room_bytes)
        return try_out, partial(Candidate.fits, room_bytes=room_bytes, host_bytes=self.host_bytes)

    def _of_equal_regions(self, best: Candidate, room_bytes: int) -> Candidate:
        """A plan of fewer different regions, which compile sooner, if there is one that is nearly as fast."""
        of_kind = kinds(self.graph)
        runs = repeated(of_kind)
        held = [held_bytes(self.graph, layer) for layer in self.graph.layers]
        cuts = {equal_cuts_through(runs, self.spans.crossing, held, sum(held) / count): None for count in REGION_COUNTS}
        found = [best]
        for forced in cuts if runs else ():
            equal = Auto(SpanCosts(self.costs, forced), self.host_bytes)
            found += [one for one in equal.rooms.within(room_bytes) if one.fits(room_bytes, self.host_bytes)]
        others = [one for one in self._named_within(room_bytes) if one.fits(room_bytes, self.host_bytes)]
        if self.host_bytes != 0 and not self.is_large and not self._is_slow(found, room_bytes):
            others += [one for one in [self.on_device.cheapest(room_bytes)] if one]  # what recomputation alone comes to
        allowed = min([(1 + NEARLY) * min(one.seconds for one in found), *(one.seconds for one in others)])
        nearly = [one for one in (*found, *others) if one.seconds <= allowed]
        return min(nearly, key=lambda one: (compiled_calls(self.graph, one.regions, of_kind), one.seconds))

    @cached_property
    def smallest(self) -> Candidate:
        """The plan with the lowest predicted peak that was found."""
        return min(self._smallest, key=lambda one: one.peak_bytes)

    @cached_property
    def smallest_at_any_price(self) -> Candidate:
        """A plan that is made smaller for as long as that goes, however often something runs again for it."""
        best = self.smallest
        if len(self.graph.layers) > FORGETFUL_GRAPH:
            return best
        draft: Draft | None = best.draft or draft_of(self.graph, best.regions)
        while draft is not None:
            found = self._made_to_fit([draft], SMALLER * best.peak_bytes, thoroughly=True)
            best, draft = (found[0], found[0].draft) if found else (best, None)
        return best

    def _of_smallest_at_any_price(self, room_bytes: int) -> Candidate | None:
        """The smallest plan made faster, where no other fits."""
        smallest = self.smallest_at_any_price
        if not smallest.fits(room_bytes, self.host_bytes):
            return None
        if smallest.draft is None or not self.is_middling:
            return smallest
        faster = self._annealed(self._descended([smallest], room_bytes, thoroughly=True), room_bytes)
        return self._descended([faster], room_bytes, thoroughly=True)

    @cached_property
    def _smallest(self) -> list[Candidate]:
        found = self._improved(list(self.rooms.ever_smaller()), inf, lambda one: (one.peak_bytes, one.seconds))
        found += self._named_within(0)
        found += [] if self.host_bytes == 0 else self.on_device._smallest
        return [one for one in found if one.fits(inf, self.host_bytes)]

    def _of_smallest(self, room_bytes: int) -> list[Candidate]:
        """What the search for the smallest plans found, and how much faster that becomes within the room."""
        fitting = [one for one in self._smallest if one.fits(room_bytes, self.host_bytes)]
        drafts = [one for one in fitting if one.draft is not None]
        return fitting + self._improved(drafts, room_bytes, lambda one: (one.seconds, one.peak_bytes))

    def _with_less_waiting(self, room_bytes: int, found: Sequence[Candidate]) -> Iterator[Candidate]:
        """Plans in which tensors between regions wait on the host or nowhere, where the plans found so far are slow."""
        if not self.is_middling or not self._is_slow(found, room_bytes):
            return
        drafts = [draft for share in WAITING_SHARES for draft in self.search.find(room_bytes, waiting_share=share)]
        found_here = [one for one in self._smallest if one.draft]  # not another policy's, from which less can be won
        drafts += [min(found_here, key=lambda one: one.peak_bytes).draft] if found_here else []
        drafts += self._of_larger_rooms(room_bytes) if len(self.graph.layers) <= RELAXED_GRAPH else []
        starts = self._made_to_fit(drafts, room_bytes)
        yield from starts
        starts += [one for one in found if one.draft and one.fits(room_bytes, self.host_bytes)]
        if starts:
            yield self._descended(starts, room_bytes)

    def _of_larger_rooms(self, room_bytes: int) -> Iterator[Draft]:
        """What would be best with a little more room."""
        for room in (int(share * room_bytes) for share in LARGER):
            relieved = self._made_to_fit(self.search.find(room, waiting_share=WAITING_SHARES[0]), room)
            found = [one for one in (*self.rooms.within(room), *relieved) if one.fits(room, self.host_bytes)]
            best = self._descended(found, room).draft if found else None
            yield from [best] if best else []

    def _made_to_fit(self, drafts: Iterable[Draft | None], room_bytes: float, *, thoroughly: bool = False) -> list[Candidate]:
        """What comes of drafts, each once, that are changed until they fit."""
        (try_out, fits), may_offload, thoroughly = self._ways(room_bytes), self.host_bytes != 0, thoroughly or self.is_exact
        different = dict.fromkeys(draft for draft in drafts if draft)
        found = (until_it_fits(self.costs, draft, room_bytes, may_offload, try_out, thoroughly=thoroughly) for draft in different)
        return [one for one in found if one and fits(one)]

    def _descended(self, starts: Sequence[Candidate], room_bytes: float, *, thoroughly: bool = False) -> Candidate:
        """What comes of the fastest of some candidates that fit by changes that make it faster."""
        best = min(starts, key=lambda one: one.seconds)
        return descend(self.costs, best, *self._ways(room_bytes), thoroughly=thoroughly or self.is_exact)

    def _is_slow(self, found: Sequence[Candidate], room_bytes: int) -> bool:
        seconds = min((one.seconds for one in found if one.fits(room_bytes, self.host_bytes)), default=inf)
        return seconds >= SLOW * self.costs.plain_step_seconds

    def _try_out(self, draft: Draft, room_bytes: float) -> Candidate:
        if (draft, room_bytes) not in self._tried:
            self._tried[draft, room_bytes] = from_draft(self.costs, draft, room_bytes)
        return self._tried[draft, room_bytes]

    def _improved(self, tried: Sequence[Candidate], room_bytes: float, rank: Callable[[Candidate], tuple]) -> list[Candidate]:
        """The candidates that fit, in a small graph the best ones also after local search."""
        fitting = sorted((one for one in tried if one.fits(room_bytes, self.host_bytes)), key=rank)
        if len(self.graph.layers) > IMPROVED_GRAPH:
            return fitting
        starts = list({one.draft: one for one in fitting}.values())[: STARTS if self.is_tiny else 1]
        simple = simple_drafts(self.graph) if self.is_tiny else []
        simple = [self._try_out(draft, room_bytes if room_bytes < inf else 0) for draft in simple]
        starts += [one for one in simple if one.fits(room_bytes, self.host_bytes)]
        return fitting + [
            improve(
                self.graph,
                one,
                lambda draft: self._try_out(draft, room_bytes if room_bytes < inf else 0),
                lambda new, old: new.fits(room_bytes, self.host_bytes) and rank(new) < rank(old),
            )
            for one in starts
        ]
