"""What one region is run again with, and how what it has saved comes back for that."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from keras_sn.passes import Pass
from keras_sn.plan import Region
from keras_sn.pool import TIERS
from keras_sn.regions import EAGER, RegionBody, RegionFunction, RegionResult, shape_of
from keras_sn.steps import RECOMPUTE


@dataclass(frozen=True, eq=False)
class Rerun:
    """What a region is run again with: for its own gradient, or for tensors that wait nowhere."""

    names: tuple[str, ...]
    """Its outputs."""
    function: RegionFunction
    fetch: "Fetch"
    masks: list[Any]
    trainable: list[Any]
    state: list[Any]
    statistics: list[Any]
    """Of the batch normalizations inside, for its backward function."""
    brings_back: bool
    """Whether something that it has saved waits elsewhere than on the device."""

    def fetch_for_backward(self, gate: Any) -> tuple[list[Any], list[Any]]:
        """The region's inputs, and what it has saved inside, once the tensor `gate` exists."""
        return self.fetch(Replays(gate))


@dataclass(eq=False)
class Replays:
    """What runs again before one region's backward pass: each region once, and one after the other, which takes less memory."""

    gate: Any
    """A tensor; what begins waits until it exists."""
    _made: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By the identity of a rerun, its outputs by name."""

    def output(self, rerun: Rerun, name: str) -> Any:
        """One of a region's outputs, made again."""
        if id(rerun) not in self._made:
            inputs, _ = rerun.fetch(self)
            with tf.control_dependencies([self.gate]):
                result = rerun.function.forward(inputs, rerun.masks, rerun.trainable, rerun.state)
            self._made[id(rerun)] = dict(zip(rerun.names, result.outputs, strict=True))
            self.gate = result.outputs[0]
        return self._made[id(rerun)][name]


Fetch = Callable[[Replays], tuple[list[Any], list[Any]]]


def save(one_pass: Pass, index: int, region: Region, body: RegionBody, inputs: list[Any], result: RegionResult) -> Fetch:
    """Puts what the region saves where the plan says; returns the function that fetches it for the backward pass.

    Only what the returned function holds stays alive until then.
    """
    values = dict(zip(body.outputs, result.outputs, strict=True)) | dict(zip(body.inside_only, result.saved, strict=True))
    values |= dict(zip(body.inputs, inputs, strict=True))
    names_inputs, names_inside = body.inputs, body.saved_inside
    values = {name: values[name] for name in (*names_inputs, *names_inside)}
    places = {one.tensor: one for one in region.saved}
    replays = {name: one_pass.replays[name] for name in values if name in places and places[name].tier == RECOMPUTE}
    in_tier = {name for name in values if name in places and places[name].tier in TIERS}
    new = {name: TIERS[places[name].tier].put(values[name]) for name in in_tier - one_pass.in_tier.keys()}
    one_pass.in_tier.update(new)
    if new and one_pass.mode != EAGER:  # eager steps run in order
        one_pass.stored[index] = list(new.values())
    stored = {name: one_pass.in_tier.get(name, value) for name, value in values.items() if name not in replays}
    stored.update((name, shape_of(values[name])) for name in body.unread)
    for name in in_tier if one_pass.mode != EAGER else ():
        if places[name].prefetch_at not in (None, index):
            one_pass.asked.setdefault(places[name].prefetch_at, []).append((places[name].tier, name, stored[name]))
    started = one_pass.started

    def fetch(again: Replays) -> tuple[list[Any], list[Any]]:
        def back(name: str) -> Any:
            if name in replays:
                return again.output(replays[name], name)
            if name not in in_tier:
                return stored[name]
            after = started.get(places[name].prefetch_at, again.gate)
            if one_pass.mode != EAGER and after.graph is not again.gate.graph:
                after = again.gate  # of another backward pass, as of a loop
            return one_pass.fetch(places[name].tier, name, stored[name], after)

        return [back(name) for name in names_inputs], [back(name) for name in names_inside]

    return fetch
