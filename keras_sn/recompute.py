"""Segments, and rewriting the training step so that their activations are dropped and recomputed.

In: the steps of a training step and the checkpoints, which are kept. Out: the same steps with recompute steps between.
Follows Wang et al. 2018 (SuperNeurons, section 3.4): speed-centric, memory-centric and cost-aware recomputation, where
"cost" is bytes. A replay is made only of what a backward step reads, which gives the counts of the paper's table 1.
Left out: any notion of seconds; `planner` has it.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from keras_sn.errors import PlanError
from keras_sn.graph import LayerCall, LayerGraph
from keras_sn.liveness import working_set_bytes
from keras_sn.steps import BACKWARD, RECOMPUTE, Step, tensor_bytes

SPEED_CENTRIC = "speed-centric"
MEMORY_CENTRIC = "memory-centric"
COST_AWARE = "cost-aware"
STRATEGIES = (SPEED_CENTRIC, MEMORY_CENTRIC, COST_AWARE)

MAX_STEPS = 1_000_000
"""Memory-centric recomputation of a segment of n layer calls takes about n^2 / 2 steps; past this it is refused."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Layer calls between checkpoints, whose outputs are dropped after their last forward use."""

    layers: tuple[str, ...]
    sources: tuple[str, ...]
    """The checkpoints and graph inputs that they are recomputed from."""


def choose_checkpoints(graph: LayerGraph) -> tuple[str, ...]:
    """The tensors that the paper keeps: outputs of costly layer calls, of joins and of forks, and graph outputs.

    A fork is a tensor that several layer calls read. Without joins and forks a segment would run through the whole
    network along its skip connections.
    """
    readers: dict[str, int] = {}
    for layer in graph.layers:
        for tensor in set(layer.inputs):
            readers[tensor] = readers.get(tensor, 0) + 1
    kept = dict.fromkeys(tensor for tensor in graph.outputs if tensor in graph.producer)
    for layer in graph.layers:
        is_join = len(set(layer.inputs)) > 1 or len(layer.outputs) > 1
        if layer.is_costly or is_join or any(readers.get(tensor, 0) > 1 for tensor in layer.outputs):
            kept |= dict.fromkeys(layer.outputs)
    return tuple(sorted(kept, key=lambda tensor: graph.producer[tensor]))


def find_segments(graph: LayerGraph, checkpoints: Iterable[str]) -> tuple[Segment, ...]:
    """Groups the layer calls whose outputs are dropped: neighbours without a checkpoint between them are one segment.

    Args:
        graph: The layer graph.
        checkpoints: The tensors to keep. All outputs of a layer call are kept if one is; graph outputs always are.

    Returns:
        The segments, by their first layer call.

    Raises:
        PlanError: A checkpoint is not a tensor of the graph.
    """
    kept = {*checkpoints, *graph.outputs}
    if unknown := sorted(kept - graph.tensors.keys()):
        raise PlanError(f"A checkpoint must be a tensor of the graph. Received: {unknown[0]!r}")
    parent = {index: index for index, layer in enumerate(graph.layers) if kept.isdisjoint(layer.outputs)}

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = index = parent[parent[index]]
        return index

    for index in parent:
        for tensor in graph.layers[index].inputs:
            if (producer := graph.producer.get(tensor, -1)) in parent:
                first, second = sorted((root(index), root(producer)))
                parent[second] = first
    members: dict[int, list[LayerCall]] = {}
    for index in parent:
        members.setdefault(root(index), []).append(graph.layers[index])
    return tuple(_segment(layers) for _, layers in sorted(members.items()))


def insert_recomputation(
    steps: Sequence[Step], graph: LayerGraph, segments: Sequence[Segment], *, strategy: str = COST_AWARE
) -> tuple[Step, ...]:
    """Puts recompute steps before the backward steps that read dropped tensors.

    Args:
        steps: `training_steps(graph)`.
        graph: The layer graph.
        segments: What to drop, from `find_segments`.
        strategy: `"speed-centric"` replays a segment once, at its first backward use, and keeps the result: O(N) extra
            steps. `"memory-centric"` replays for each backward step only what that step reads: O(N^2). `"cost-aware"`
            is speed-centric where that does not raise the peak above `layer_peak_bytes`.

    Returns:
        The steps; between its last forward use and its recompute step a tensor is dead.

    Raises:
        PlanError: The strategy is unknown, or the result would have more than `MAX_STEPS` steps.
    """
    if strategy not in STRATEGIES:
        raise PlanError(f"The recomputation strategy must be one of {STRATEGIES}. Received: strategy={strategy!r}")
    home, at_once = _homes(graph, segments), in_one_go(strategy, steps, graph, segments)
    needed = _needed_layers(steps, graph, home)
    replays: dict[int, Step] = {}
    held: set[str] = set()
    result: list[Step] = []
    for step in steps:
        missing = (step.reads & home.keys()) - held if step.phase == BACKWARD else set()
        for number in sorted({home[tensor] for tensor in missing}):
            wanted = {tensor for tensor in missing if home[tensor] == number}
            if at_once[number]:
                replayed = [index for index in _positions(graph, segments[number]) if index in needed]
                wanted = {tensor for index in replayed for tensor in graph.layers[index].outputs}
            else:
                replayed = _ancestors(graph, wanted, home, held)
            _check_length(len(result) + len(replayed), strategy, segments)
            result.extend(_recompute_step(graph, index, held, replays) for index in replayed)
            held |= wanted
        result.append(step)
    return tuple(result)


def layer_peak_bytes(steps: Sequence[Step], graph: LayerGraph, segments: Sequence[Segment]) -> int:
    """The paper's l_peak: the most that one step needs, in bytes (section 3.4).

    Counts what the step reads and writes, and the checkpoints that those of its tensors that are dropped are replayed
    from. The paper's code reaches the same value for AlexNet by counting a gradient made in place twice.
    """
    home = _homes(graph, segments)
    nbytes = tensor_bytes(graph)
    sources = [frozenset(segment.sources) for segment in segments]
    source_bytes = [_sum(one, nbytes) for one in sources]
    peak = 0
    for step in steps:
        needed = working_set_bytes(step, nbytes)
        numbers = {home[tensor] for tensor in step.reads & home.keys()} if step.phase == BACKWARD else set()
        for number in numbers:
            needed += source_bytes[number] - _sum((step.reads | step.writes) & sources[number], nbytes)
        peak = max(peak, needed)
    return peak


def in_one_go(strategy: str, steps: Sequence[Step], graph: LayerGraph, segments: Sequence[Segment]) -> list[bool]:
    """Per segment: whether a strategy replays it speed-centric.

    Args:
        strategy: One of `STRATEGIES`.
        steps: `training_steps(graph)`.
        graph: The layer graph.
        segments: What is dropped, from `find_segments`.
    """
    if strategy != COST_AWARE:
        return [strategy == SPEED_CENTRIC] * len(segments)
    limit = layer_peak_bytes(steps, graph, segments)
    return [peak <= limit for peak in _speed_centric_bytes(steps, graph, segments)]


def _check_length(length: int, strategy: str, segments: Sequence[Segment]) -> None:
    if length > MAX_STEPS:
        longest = max(len(segment.layers) for segment in segments)
        raise PlanError(
            f"{strategy} recomputation makes more than {MAX_STEPS:,} steps. Keep more checkpoints or recompute "
            f"speed-centric. Received: a segment of {longest:,} layer calls"
        )


def _recompute_step(graph: LayerGraph, index: int, held: set[str], replays: dict[int, Step]) -> Step:
    """The recompute step of a layer call; leaves out outputs that are held. Shared in `replays`: there may be many."""
    layer = graph.layers[index]
    if index not in replays:
        replays[index] = Step(layer.name, RECOMPUTE, frozenset(layer.inputs), frozenset(layer.outputs))
    step = replays[index]
    return step if held.isdisjoint(step.writes) else replace(step, writes=step.writes - held)


def _speed_centric_bytes(steps: Sequence[Step], graph: LayerGraph, segments: Sequence[Segment]) -> list[int]:
    """Per segment: what it holds at its worst backward step if it is replayed in one go, in bytes.

    That is its sources, its outputs that are still to be read, and the gradients of that step.
    """
    home = _homes(graph, segments)
    needed = _needed_layers(steps, graph, home)
    nbytes = tensor_bytes(graph)
    around: list[list[Step]] = [[] for _ in segments]
    for step in steps:
        if step.phase == BACKWARD:
            for number in {home[tensor] for tensor in step.reads if tensor in home}:
                around[number].append(step)
    result = []
    for segment, readers in zip(segments, around, strict=True):
        dropped = {tensor for index in _positions(graph, segment) for tensor in graph.layers[index].outputs}
        last_reader = {tensor: step for step in readers for tensor in step.reads & dropped}
        live = sum(graph.nbytes(*graph.layers[i].outputs) for i in _positions(graph, segment) if i in needed)
        sources = frozenset(segment.sources)
        peak = source_bytes = _sum(sources, nbytes)
        for step in readers:
            gradients = (step.reads | step.writes) - dropped - sources
            peak = max(peak, source_bytes + live + _sum(gradients, nbytes))
            live -= graph.nbytes(*(tensor for tensor in step.reads & dropped if last_reader[tensor] is step))
        result.append(peak)
    return result


def _sum(tensors: Iterable[str], nbytes: Mapping[str, int]) -> int:
    """Bytes of those tensors that are managed."""
    return sum(nbytes.get(tensor, 0) for tensor in tensors)


def _segment(layers: Sequence[LayerCall]) -> Segment:
    own = {tensor for layer in layers for tensor in layer.outputs}
    sources = dict.fromkeys(tensor for layer in layers for tensor in layer.inputs if tensor not in own)
    return Segment(tuple(layer.name for layer in layers), tuple(sources))


def _positions(graph: LayerGraph, segment: Segment) -> Iterator[int]:
    return (graph.position[name] for name in segment.layers)


def _homes(graph: LayerGraph, segments: Sequence[Segment]) -> dict[str, int]:
    """Dropped tensor -> the number of its segment."""
    return {
        tensor: number
        for number, segment in enumerate(segments)
        for index in _positions(graph, segment)
        for tensor in graph.layers[index].outputs
    }


def _needed_layers(steps: Sequence[Step], graph: LayerGraph, home: Mapping[str, int]) -> set[int]:
    """Positions of the dropped layer calls that some backward step needs, itself or through another dropped one."""
    wanted = {tensor for step in steps if step.phase == BACKWARD for tensor in step.reads if tensor in home}
    needed = set()
    for index in range(len(graph.layers) - 1, -1, -1):
        layer = graph.layers[index]
        if not wanted.isdisjoint(layer.outputs):
            needed.add(index)
            wanted.update(tensor for tensor in layer.inputs if tensor in home)
    return needed


def _ancestors(graph: LayerGraph, wanted: set[str], home: Mapping[str, int], held: set[str]) -> list[int]:
    """Positions of the layer calls to replay for the wanted tensors, from sources and held tensors, in order."""
    found = set()
    stack = list(wanted)
    while stack:
        index = graph.producer[stack.pop()]
        if index not in found:
            found.add(index)
            stack.extend(tensor for tensor in graph.layers[index].inputs if tensor in home and tensor not in held)
    return sorted(found)
