"""The paper's policy as regions: checkpoints stay or go to the host, the rest is recomputed (Wang et al. 2018, section 3).

Checkpoints are the outputs of costly layer calls, joins and forks. Segments between them are replayed speed-centric (a segment is
one region) or memory-centric (a region for each layer call, whose input is recomputed from the checkpoint each time). The tensor
cache sends the least recently used checkpoints to the host when the room is short, and none before.
"""

from collections.abc import Sequence

from keras_sn.candidates import one_ahead
from keras_sn.cuts import runs
from keras_sn.drafts import inputs_of, may_leave
from keras_sn.errors import BudgetError
from keras_sn.graph import LayerGraph
from keras_sn.offload import insert_cached_transfers
from keras_sn.plan import DEVICE, HOST, Offload, Region, Saved
from keras_sn.predict import predict
from keras_sn.recompute import COST_AWARE, Segment, choose_checkpoints, find_segments, in_one_go, insert_recomputation
from keras_sn.steps import RECOMPUTE, Step, tensor_bytes, training_steps

CACHE_SHARES = (1.0, 0.8, 0.6, 0.4, 0.0)
"""Of the room, for the cache; a region holds more at once than a step of the paper's does. With no room all checkpoints leave."""


def superneurons_regions(graph: LayerGraph, room_bytes: int | None = None, *, strategy: str = COST_AWARE) -> list[Region]:
    """The regions of the paper's policy.

    Args:
        graph: The layer graph, with at least one layer call.
        room_bytes: What activations and their gradients may take on the device; None for no limit.
        strategy: One of `recompute.STRATEGIES`.

    Returns:
        Regions in the order of the layer calls. They may need more than `room_bytes`.
    """
    checkpoints = choose_checkpoints(graph)
    segments = find_segments(graph, checkpoints)
    ends = _ends(graph, set(checkpoints), segments, strategy)
    regions = _regions(graph, ends, checkpoints, away=set())
    if room_bytes is None or predict(graph, regions).peak_bytes <= room_bytes:
        return regions
    steps = insert_recomputation(training_steps(graph), graph, segments, strategy=strategy)
    found = []
    for share in CACHE_SHARES:
        evicted = _evicted(graph, steps, int(share * room_bytes)) & set(checkpoints)
        away = one_ahead(_regions(graph, ends, checkpoints, away=evicted))
        peak_bytes = predict(graph, away).peak_bytes
        if peak_bytes <= room_bytes:
            return away
        found.append((peak_bytes, away))
    return min(found, key=lambda one: one[0])[1]


def _ends(graph: LayerGraph, checkpoints: set[str], segments: Sequence[Segment], strategy: str) -> list[int]:
    """Positions after which a region ends: where a checkpoint is made, and everywhere in a memory-centric segment."""
    at_once = in_one_go(strategy, training_steps(graph), graph, segments)
    step_by_step = {
        name for segment, is_at_once in zip(segments, at_once, strict=True) if not is_at_once for name in segment.layers
    }
    last = len(graph.layers) - 1
    return [
        position
        for position, layer in enumerate(graph.layers)
        if position == last or layer.name in step_by_step or not checkpoints.isdisjoint(layer.outputs)
    ]


def _regions(graph: LayerGraph, ends: Sequence[int], checkpoints: Sequence[str], away: set[str]) -> list[Region]:
    kept, regions = {*checkpoints, *graph.inputs}, []
    for run in runs(ends):
        layers = graph.layers[run.start : run.stop]
        saved = []
        for tensor in inputs_of(layers):
            place = HOST if tensor in away and may_leave(graph, tensor) else DEVICE
            saved.append(Saved(tensor, place if tensor in kept else RECOMPUTE, nbytes=graph.nbytes(tensor)))
        regions.append(Region(tuple(layer.name for layer in layers), tuple(saved)))
    return regions


def _evicted(graph: LayerGraph, steps: Sequence[Step], room_bytes: int) -> set[str]:
    """What the tensor cache sends to the host; every tensor if one step alone does not fit."""
    nbytes = tensor_bytes(graph)
    if room_bytes <= 0:
        return set(nbytes)
    try:
        instructions = insert_cached_transfers(steps, nbytes, room_bytes)
    except BudgetError:
        return set(nbytes)
    return {one.tensor for one in instructions if isinstance(one, Offload)}
