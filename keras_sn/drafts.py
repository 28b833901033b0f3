"""A plan in the making: where regions end, and what waits where. From it the plan's regions are made."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from weakref import WeakKeyDictionary

from keras_sn.cuts import runs
from keras_sn.graph import LayerCall, LayerGraph, virtual_inside
from keras_sn.plan import DEVICE, HOST, Region, Saved
from keras_sn.steps import RECOMPUTE

MIN_OFFLOAD_BYTES = 1024
"""Smaller tensors stay: a copy has a fixed cost (torchtune's default)."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What distinguishes one plan from another."""

    ends: tuple[int, ...]
    """Positions of the last layer call of each region, ascending."""
    kept: frozenset[int] = frozenset()
    """Those of `ends` whose regions run as plain Keras does."""
    saved: frozenset[str] = frozenset()
    """Layer outputs that wait for their region's backward pass if it would make them again."""
    away: frozenset[str] = frozenset()
    """Tensors that go to the host if they wait."""
    forgotten: frozenset[str] = frozenset()
    """Tensors that wait nowhere: for the backward pass of a region that reads one, the region that makes it runs again."""
    remade: frozenset[int] = frozenset()
    """Those of `ends` whose regions do not keep outputs of theirs for themselves that XLA makes again at almost no cost."""


def joined(draft: Draft, end: int) -> Draft:
    """Without the cut behind this position."""
    ends = tuple(one for one in draft.ends if one != end)
    return replace(draft, ends=ends, kept=draft.kept - {end}, remade=draft.remade - {end})


def with_cut(draft: Draft, end: int) -> Draft:
    """With one more cut, behind this position."""
    return replace(draft, ends=tuple(sorted({*draft.ends, end})))


def with_place(draft: Draft, tensor: str, place: str) -> Draft:
    """The draft in which a tensor, if it waits, waits in another of `plan.PLACES`."""
    away, forgotten = ({tensor} if place == one else set() for one in (HOST, RECOMPUTE))
    return replace(draft, away=draft.away - {tensor} | away, forgotten=draft.forgotten - {tensor} | forgotten)


def regions_of(graph: LayerGraph, draft: Draft) -> list[Region]:
    """The regions of a draft; together they hold every layer call once, in order."""
    cut = [stretch(graph, run) for run in runs(draft.ends)]
    staying = _read_by_kept(cut, draft)
    away = {tensor for tensor in draft.away - staying if may_leave(graph, tensor)}
    forgotten = _forgotten(graph, cut, draft, staying)
    inputs = [one.read_again(forgotten) for one in cut]
    waiting = {t for one, own in zip(cut, inputs, strict=True) if one.end not in draft.kept for t in own}
    # What waits on the device for a later region costs nothing here, and need not be made again.
    there = (waiting | staying | set(graph.outputs)) - away - forgotten
    regions = []
    for one, own in zip(cut, inputs, strict=True):
        if one.end in draft.kept:
            regions.append(Region(one.names, recompute=False))
            continue
        kept = [tensor for tensor, is_own in one.wanted_inside(draft) if is_own or tensor in there]
        places = {t: RECOMPUTE if t in forgotten else HOST if t in away else DEVICE for t in (*own, *kept)}
        regions.append(Region(one.names, tuple(Saved(t, place, nbytes=graph.nbytes(t)) for t, place in places.items())))
    return regions


def draft_of(graph: LayerGraph, regions: Sequence[Region]) -> Draft:
    """The draft whose regions are cut and save inside like these."""
    ends = tuple(graph.position[region.layers[-1]] for region in regions)
    kept = frozenset(end for end, region in zip(ends, regions, strict=True) if not region.recompute)
    inside = set()
    for region in regions:
        inputs = set(inputs_of(graph.layers_named(region.layers)))
        inside |= {one.tensor for one in region.saved if one.tensor not in inputs}
    saved = [one for region in regions for one in region.saved]
    away = frozenset(one.tensor for one in saved if one.is_away)
    return Draft(ends, kept, frozenset(inside), away, frozenset(one.tensor for one in saved if one.tier == RECOMPUTE))


def inputs_of(layers: Sequence[LayerCall]) -> list[str]:
    """What the layer calls read from outside, in the order of reading."""
    made = {tensor for layer in layers for tensor in layer.outputs}
    return list(dict.fromkeys(tensor for layer in layers for tensor in layer.inputs if tensor not in made))


def unread_inputs(layers: Sequence[LayerCall]) -> set[str]:
    """Those inputs of a region whose values its backward function needs for nothing, only their shapes."""
    read = {tensor for layer in layers for tensor in layer.inputs}
    of_values = (layer for layer in layers if not (layer.reads_only_shapes and read.isdisjoint(layer.outputs)))
    return set(inputs_of(layers)).difference(tensor for layer in of_values for tensor in layer.inputs)


def may_leave(graph: LayerGraph, tensor: str) -> bool:
    """Whether sending a tensor to the host is of any use."""
    return tensor in graph.producer and graph.nbytes(tensor) >= MIN_OFFLOAD_BYTES


def _forgotten(graph: LayerGraph, cut: Sequence["Stretch"], draft: Draft, staying: set[str]) -> set[str]:
    """What a region can make again: not what the region saves itself, nor what a kept region makes or reads."""
    kept = {position for one in cut if one.end in draft.kept for position in one.run}
    return {t for t in draft.forgotten - draft.saved - staying if t in graph.producer and graph.producer[t] not in kept}


def _read_by_kept(cut: Sequence["Stretch"], draft: Draft) -> set[str]:
    """What the backward passes of kept regions read: TensorFlow holds it on the device."""
    return {tensor for one in cut if one.end in draft.kept for tensor in one.read}


@dataclass(frozen=True, eq=False)
class Stretch:
    """Consecutive layer calls, whatever they save; drafts that are like each other share most of them."""

    run: range
    layers: Sequence[LayerCall]
    last_use: Mapping[str, int]
    virtual: frozenset[str]
    _wanted: dict[tuple, list[tuple[str, bool]]] = field(default_factory=dict, init=False)

    @property
    def end(self) -> int:
        return self.run[-1]

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layers)

    @cached_property
    def outputs(self) -> frozenset[str]:
        return frozenset(tensor for layer in self.layers for tensor in layer.outputs)

    @cached_property
    def read(self) -> frozenset[str]:
        """What the backward steps of its layer calls read."""
        return frozenset(tensor for layer in self.layers for tensor in layer.saved_for_backward)

    @cached_property
    def inputs(self) -> list[str]:
        return inputs_of(self.layers)

    @cached_property
    def read_inputs(self) -> list[str]:
        """Those inputs whose values its backward function needs."""
        unread = unread_inputs(self.layers)
        return [tensor for tensor in self.inputs if tensor not in unread]

    def read_again(self, forgotten: set[str]) -> list[str]:
        """The inputs that a region saves: all that its backward function reads, or its forward function if it runs again."""
        return self.read_inputs if self.outputs.isdisjoint(forgotten) else self.inputs

    def wanted_inside(self, draft: Draft) -> list[tuple[str, bool]]:
        """Outputs that its backward pass would make again and the draft saves; False: a later region may have it."""
        key = self.outputs & draft.saved, self.end in draft.remade
        if key not in self._wanted:
            self._wanted[key] = list(self._find_wanted(*key))
        return self._wanted[key]

    def _find_wanted(self, saved: frozenset[str], is_remade: bool) -> Iterator[tuple[str, bool]]:
        needed = set(self.read)
        remade = virtual_inside(self.layers) if is_remade else frozenset()
        for layer in reversed(self.layers):
            again = layer.internal_bytes > 0
            for tensor in layer.outputs:
                if tensor in needed:
                    is_crossing = self.last_use.get(tensor, -1) > self.end and tensor not in remade
                    is_own = tensor in saved and (is_crossing or tensor not in self.virtual)
                    again = again or not (is_crossing or is_own)
                    if is_crossing or is_own:
                        yield tensor, is_own
            if again:
                needed.update(layer.inputs)


_KNOWN: "WeakKeyDictionary[LayerGraph, dict[range, Stretch]]" = WeakKeyDictionary()


def stretch(graph: LayerGraph, run: range) -> Stretch:
    """The layer calls at consecutive positions; the same object for the same ones."""
    known = _KNOWN.setdefault(graph, {})
    if run not in known:
        layers = graph.layers[run.start : run.stop]
        known[run] = Stretch(run, layers, graph.last_use, graph.virtual)  # not the graph, which it would keep alive
    return known[run]
