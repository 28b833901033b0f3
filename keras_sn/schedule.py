"""A plan of regions as instructions, step by step, so that `simulate` can check it before it runs.

Nothing is put right here: what a plan forgets to save is freed after its last use in the forward pass, and a copy that comes back
too late comes back too late.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from keras_sn.errors import PlanError
from keras_sn.graph import LayerGraph
from keras_sn.plan import DEVICE, Free, Instruction, Offload, Prefetch, Region, Run, Saved, check_fields
from keras_sn.region_bytes import recomputed
from keras_sn.simulate import simulate
from keras_sn.steps import RECOMPUTE, Step, tensor_bytes, training_steps


def check_regions(graph: LayerGraph, regions: Sequence[Region]) -> None:
    """Checks a plan that somebody may have edited.

    Args:
        graph: The layer graph.
        regions: The plan's regions.

    Raises:
        PlanError: A field holds what it cannot (see `plan.check_plan`); the regions do not hold every layer call once and in
            order, or name unknown tensors; or the plan frees a tensor too early, prefetches one too late, or recomputes from a
            freed one. The message names the step and the tensor.
    """
    check_fields(regions)
    _check_layers(graph, regions)
    _check_saved(graph, regions)
    simulate(instructions_of(graph, regions), tensor_bytes(graph))


def _check_layers(graph: LayerGraph, regions: Sequence[Region]) -> None:
    planned = [name for region in regions for name in region.layers]
    expected = [layer.name for layer in graph.layers]
    for place, name in enumerate(expected):
        found = planned[place] if place < len(planned) else None
        if found != name:
            raise PlanError(
                f"The plan's regions must hold every layer call of the model once, in its order: {name!r} is expected as number "
                f"{place}. Make a plan of this model with `build_plan()` and edit that. Received: {found!r}"
            )
    if len(planned) > len(expected):
        raise PlanError(f"The plan has a layer call that the model has not. Received: {planned[len(expected)]!r}")


def _check_saved(graph: LayerGraph, regions: Sequence[Region]) -> None:
    tiers: dict[str, str] = {}
    home = {name: index for index, region in enumerate(regions) for name in region.layers}
    for index, region in enumerate(regions):
        layers = graph.layers_named(region.layers)
        own = {tensor for layer in layers for tensor in (*layer.inputs, *layer.outputs)}
        for one in region.saved:
            if one.tensor not in own:
                raise PlanError(f"Region {index} saves a tensor that it neither reads nor makes. Received: {one.tensor!r}")
            if one.tensor in graph.inputs and one.tier != DEVICE:
                raise PlanError(f"What the user feeds stays on the device. Received: {one.tensor!r} in {one.tier!r}")
            if one.tier == RECOMPUTE:
                _check_made_again(one.tensor, index, regions, home[graph.layers[graph.producer[one.tensor]].name])
            if tiers.setdefault(one.tensor, one.tier) != one.tier:
                raise PlanError(
                    f"All regions that save a tensor must keep it in the same place. Received: {one.tensor!r} in {one.tier!r} "
                    f"and {tiers[one.tensor]!r}"
                )


def _check_made_again(tensor: str, index: int, regions: Sequence[Region], source: int) -> None:
    """Checks a tensor that region `index` has made again by the forward pass of region `source`."""
    if source == index:
        raise PlanError(
            f"Region {index} makes {tensor!r} itself, and its own forward pass cannot make it again for it: leave it out of "
            f"`saved`, or save it in another place. Received: {tensor!r} in {RECOMPUTE!r}"
        )
    if not regions[source].recompute:
        raise PlanError(
            f"Region {index} has {tensor!r} made again by region {source}, which is kept and cannot run again: let that region "
            f"recompute, or save the tensor in another place. Received: {tensor!r} in {RECOMPUTE!r}"
        )


def instructions_of(graph: LayerGraph, regions: Sequence[Region]) -> list[Instruction]:
    """What a plan of regions does in one training step."""
    plain = replace(graph, layers=tuple(replace(layer, gradient_in_place=False) for layer in graph.layers))
    return list(_Writer(plain, regions).write())


@dataclass
class _Writer:
    graph: LayerGraph
    regions: Sequence[Region]
    device: set[str] = field(default_factory=set)
    """What is on the device at the instruction that is being written."""

    def __post_init__(self):
        count, steps = len(self.graph.layers), training_steps(self.graph)
        self.forward = {step.layer: step for step in steps[:count]}
        # The loss reads the model's outputs before the first backward step.
        self.backward = {
            step.layer: replace(step, reads=step.reads - (set(self.graph.outputs) - set(layer.saved_for_backward)))
            for step, layer in zip(steps[count:], reversed(self.graph.layers), strict=True)
        }
        self.home = {name: index for index, region in enumerate(self.regions) for name in region.layers}
        self.last_use: dict[str, str] = {}
        """Gradient or model output -> the layer whose backward step is the last to touch it."""
        for step in self.backward.values():
            self.last_use.update(dict.fromkeys(step.reads | step.writes, step.layer))
        self.waits: dict[str, int] = {}
        """Tensor on the device between the passes -> the first region whose backward pass needs it."""
        for index, region in enumerate(self.regions):
            saved = {one.tensor for one in region.saved if one.tier == DEVICE}
            if not region.recompute:
                saved = {t for name in region.layers for t in self.layer(name).saved_for_backward}
            for tensor in saved:
                self.waits.setdefault(tensor, index)
        self.returns: dict[int, list[tuple[int, Saved]]] = {}
        """Region -> what comes back from a tier when its backward pass starts, with the region that needs it."""
        for index, region in enumerate(self.regions):
            for one in region.saved:
                if one.is_away:
                    start = index if one.prefetch_at is None else one.prefetch_at
                    self.returns.setdefault(start, []).append((index, one))

    def layer(self, name: str):
        return self.graph.layers[self.graph.position[name]]

    def write(self) -> Iterator[Instruction]:
        for index, region in enumerate(self.regions):
            yield from self.run_forward(index, region)
        for index in range(len(self.regions) - 1, -1, -1):
            yield from self.run_backward(index, self.regions[index])

    def run(self, step: Step) -> Iterator[Instruction]:
        self.device |= step.writes
        yield Run(step)

    def free(self, tensors: Sequence[str] | set[str]) -> Iterator[Instruction]:
        for tensor in sorted(set(tensors) & self.device - set(self.graph.inputs)):
            self.device.remove(tensor)
            yield Free(tensor)

    def run_forward(self, index: int, region: Region) -> Iterator[Instruction]:
        away = [one for one in region.saved if one.is_away]
        for name in region.layers:
            yield from self.run(self.forward[name])
            yield from (Offload(one.tensor, one.tier) for one in away if one.tensor in self.forward[name].writes)
        yield from (Offload(one.tensor, one.tier) for one in away if one.tensor in self.device and self.made_before(one, index))
        end = self.graph.position[region.layers[-1]]
        done = {t for t in self.device if self.graph.last_use.get(t, -1) <= end and t not in self.waits}
        yield from self.free(done)

    def made_before(self, one: Saved, index: int) -> bool:
        """Whether a region's saved tensor is its input, and the first that saves it sends it away."""
        savers = [place for place, region in enumerate(self.regions) if one.tensor in {other.tensor for other in region.saved}]
        made_in = self.home[self.graph.layers[self.graph.producer[one.tensor]].name]
        return made_in < index and savers[0] == index

    def run_backward(self, index: int, region: Region) -> Iterator[Instruction]:
        before = set(self.device)
        for _, one in self.returns.get(index, ()):
            if one.tensor not in self.device:
                self.device.add(one.tensor)
                yield Prefetch(one.tensor, one.tier)
        for one in region.saved:
            if one.tier == RECOMPUTE and one.tensor not in self.device:
                yield from self.replay(self.home[self.graph.layers[self.graph.producer[one.tensor]].name], {one.tensor})
        saved = {one.tensor for one in region.saved}
        names = recomputed([self.layer(name) for name in region.layers], saved)[1] if region.recompute else []
        for name in reversed(names):
            yield from self.again(name)
        for name in reversed(region.layers):
            yield from self.run(self.backward[name])
            yield from self.free(
                {t for t in self.backward[name].reads | self.backward[name].writes if self.is_over(t, name, index)}
            )
        fetched_early = {one.tensor for later, one in self.all_returns() if later < index}
        own = {t for t in self.device - before if not t.startswith("grad:")} | saved
        yield from self.free({t for t in own if self.waits.get(t, index) >= index and t not in fetched_early})

    def all_returns(self) -> Iterator[tuple[int, Saved]]:
        return (pair for pairs in self.returns.values() for pair in pairs)

    def is_over(self, tensor: str, layer: str, index: int) -> bool:
        """Whether nothing touches a gradient, or what a kept region holds, any more."""
        if tensor.startswith("grad:"):
            return self.last_use[tensor] == layer
        return not self.regions[index].recompute and self.last_use[tensor] == layer and self.waits.get(tensor, index) >= index

    def again(self, name: str) -> Iterator[Instruction]:
        step = self.forward[name]
        missing = step.writes - self.device
        yield from self.run(Step(name, RECOMPUTE, step.reads, missing))

    def replay(self, source: int, wanted: set[str]) -> Iterator[Instruction]:
        """A region's forward pass once more, for tensors that wait nowhere."""
        region, before = self.regions[source], set(self.device)
        for one in region.saved:
            made_in = self.graph.producer.get(one.tensor)
            if one.tier == RECOMPUTE and one.tensor not in self.device and made_in is not None:
                home = self.home[self.graph.layers[made_in].name]
                if home != source:
                    yield from self.replay(home, {one.tensor})
            elif one.is_away and one.tensor not in self.device:
                self.device.add(one.tensor)
                yield Prefetch(one.tensor, one.tier)
        for name in region.layers:
            yield from self.again(name)
        yield from self.free(self.device - before - wanted)
