"""A plan in the making: where regions end, and what waits where. From it the plan's regions are made."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    cut = runs(draft.ends)
    staying = _read_by_kept(graph, draft)
    inside = [dict(_wanted_inside(graph, run, draft)) for run in cut]
    away = {tensor for tensor in draft.away - staying if may_leave(graph, tensor)}
    forgotten = _forgotten(graph, draft, staying)
    inputs = [_read_again(graph.layers[run.start : run.stop], forgotten) for run in cut]
    waiting = {t for run, own in zip(cut, inputs, strict=True) if run[-1] not in draft.kept for t in own}
    regions = []
    for run, own, wanted in zip(cut, inputs, inside, strict=True):
        layers = graph.layers[run.start : run.stop]
        names = tuple(layer.name for layer in layers)
        if run[-1] in draft.kept:
            regions.append(Region(names, recompute=False))
            continue
        # What waits on the device for a later region costs nothing here, and need not be made again.
        there = (waiting | staying | set(graph.outputs)) - away - forgotten
        kept = [tensor for tensor, is_own in wanted.items() if is_own or tensor in there]
        places = {t: RECOMPUTE if t in forgotten else HOST if t in away else DEVICE for t in (*own, *kept)}
        saved = tuple(Saved(t, place, nbytes=graph.nbytes(t)) for t, place in places.items())
        regions.append(Region(names, saved))
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


def _read_again(layers: Sequence[LayerCall], forgotten: set[str]) -> list[str]:
    """The inputs that a region saves: all that its backward function reads, or its forward function if it runs again."""
    runs_again = any(tensor in forgotten for layer in layers for tensor in layer.outputs)
    unread = set() if runs_again else unread_inputs(layers)
    return [tensor for tensor in inputs_of(layers) if tensor not in unread]


def may_leave(graph: LayerGraph, tensor: str) -> bool:
    """Whether sending a tensor to the host is of any use."""
    return tensor in graph.producer and graph.nbytes(tensor) >= MIN_OFFLOAD_BYTES


def _forgotten(graph: LayerGraph, draft: Draft, staying: set[str]) -> set[str]:
    """What a region can make again: not what the region saves itself, nor what a kept region makes or reads."""
    kept = {position for run in runs(draft.ends) if run[-1] in draft.kept for position in run}
    return {t for t in draft.forgotten - draft.saved - staying if t in graph.producer and graph.producer[t] not in kept}


def _read_by_kept(graph: LayerGraph, draft: Draft) -> set[str]:
    """What the backward passes of kept regions read: TensorFlow holds it on the device."""
    kept = (run for run in runs(draft.ends) if run[-1] in draft.kept)
    return {tensor for run in kept for position in run for tensor in graph.layers[position].saved_for_backward}


def _wanted_inside(graph: LayerGraph, run: range, draft: Draft) -> Iterator[tuple[str, bool]]:
    """Outputs that the region's backward pass would make again and the draft saves; False: a later region may have it."""
    if run[-1] in draft.kept:
        return
    needed = {tensor for position in run for tensor in graph.layers[position].saved_for_backward}
    virtual = graph.virtual
    remade = virtual_inside(graph.layers[run.start : run.stop]) if run[-1] in draft.remade else frozenset()
    for position in reversed(run):
        layer = graph.layers[position]
        again = layer.internal_bytes > 0
        for tensor in layer.outputs:
            if tensor in needed:
                is_crossing = graph.last_use.get(tensor, -1) > run[-1] and tensor not in remade
                is_own = tensor in draft.saved and (is_crossing or tensor not in virtual)
                again = again or not (is_crossing or is_own)
                if is_crossing or is_own:
                    yield tensor, is_own
        if again:
            needed.update(layer.inputs)
