"""A region that is recomputed: it runs without a tape, with one gradient of its own, which reads what the plan saves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.bodies import RegionBody
from keras_sn.differentiation import may_be_asked_later, noting, with_gradient
from keras_sn.passes import Pass, hand_on, is_float, masks_of, read_state, read_trainable
from keras_sn.plan import DEVICE, Region
from keras_sn.regions import EAGER, RegionFunction, RegionResult
from keras_sn.reruns import Rerun, save


def run_recomputed(one_pass: Pass, index: int, region: Region, body: RegionBody, function: RegionFunction) -> None:
    """Runs a region, and prepares its backward pass if a gradient may be asked for.

    Raises:
        BorrowedWeights: See there. Nothing has been handed on.
    """
    forward = _Forward(one_pass, index, region, body, function)
    sources = {name: x for name, x in zip(body.inputs, forward.inputs, strict=True) if is_float(x) and _may_be_asked_for(x)}
    if not any(_may_be_asked_for(x) for x in [*sources.values(), *forward.trainable]):
        result = forward.run()
        if not one_pass.recomputed.isdisjoint(body.outputs):
            forward.save(result)
        hand_on(one_pass, body, function, result, result.outputs, result.losses)
        return
    already_away, names = set(one_pass.in_tier), list(sources)
    passed_on = [place for place, name in enumerate(names) if name in body.read_later]  # See Note: [Threading]
    results: list[RegionResult] = []
    made: list[_Backward] = []

    def compute() -> list[Any]:
        result = forward.run_looked_at()
        rerun = forward.save(result)
        outputs = [y for y in result.outputs if is_float(y)]
        results.append(result)
        made.append(_Backward(one_pass, index, rerun, names, body.inputs, passed_on, len(outputs)))
        return [*outputs, *result.losses]

    def gradient(upstream: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        return made[0].run(upstream, wanted)

    differentiable = with_gradient(compute, [*sources.values(), *forward.trainable], gradient, passed_on)
    if len(differentiable) > 1:
        differentiable = [noting(y, made[0].arrival_of(place)) for place, y in enumerate(differentiable)]
    first = len(differentiable) - len(passed_on)
    _pass_on(one_pass, [names[place] for place in passed_on], differentiable[first:])
    own = iter(differentiable)
    outputs = [next(own) if is_float(y) else y for y in results[0].outputs]
    hand_on(one_pass, body, function, results[0], outputs, differentiable[made[0].outputs : first])
    _record_copies(one_pass, already_away)


def _pass_on(one_pass: Pass, names: Sequence[str], tensors: Sequence[Any]) -> None:
    for name, x in zip(names, tensors, strict=True):
        one_pass.tensors[name] = keras_internals.with_mask_of(x, one_pass.tensors[name])


def _may_be_asked_for(tensor: Any) -> bool:
    """Whether somebody may want the tensor's gradient."""
    return may_be_asked_later() or keras_internals.is_recorded(tensor)


def _record_copies(one_pass: Pass, already_away: set[str]) -> None:
    """Tells the tapes what has been put into tiers: those for gradients of gradients see the backward pass read it."""
    for name, stored in one_pass.in_tier.items():
        if name not in already_away and name in one_pass.tensors:
            keras_internals.record_operation([stored], [one_pass.tensors[name]], lambda gradient: [gradient])


class _Forward:
    """The forward pass of one region."""

    def __init__(self, one_pass: Pass, index: int, region: Region, body: RegionBody, function: RegionFunction):
        self._pass, self._index, self._region, self._body, self._function = one_pass, index, region, body, function
        self.inputs = [one_pass.tensors[name] for name in body.inputs]
        self._masks = masks_of(self.inputs)
        self.trainable = read_trainable(one_pass, body)
        with keras_internals.stop_recording():  # a weight that has been frozen is still trainable to TensorFlow
            self._state = read_state(one_pass, body)

    def run(self) -> RegionResult:
        return self._function.forward(self.inputs, self._masks, self.trainable, self._state)

    def run_looked_at(self) -> RegionResult:
        """Runs it, and refuses what would be lost when it is run again."""
        if self._pass.mode == EAGER:
            self._function.check_once(self.inputs, self._masks, self.trainable, self._state)
        result = self.run()
        self._function.refuse_borrowed()
        return result

    def save(self, result: RegionResult) -> Rerun:
        """Saves what the plan says, and returns what holds no more than that."""
        fetch = save(self._pass, self._index, self._region, self._body, self.inputs, result)
        statistics = [] if may_be_asked_later() else result.statistics
        again = self._function, fetch, self._masks, self.trainable, self._state, statistics
        rerun = Rerun(self._body.outputs, *again, brings_back=any(one.tier != DEVICE for one in self._region.saved))
        self._pass.note(rerun)
        return rerun


@dataclass(frozen=True, eq=False)
class _Backward:
    """The backward pass of one recomputed region, with what it needs of the forward pass and nothing else."""

    one_pass: Pass
    index: int
    rerun: Rerun
    sources: list[str]
    """The inputs whose gradients may be wanted."""
    inputs: tuple[str, ...]
    passed_on: list[int]
    """Places of sources that are handed on behind the outputs and the losses."""
    outputs: int
    """How many of its outputs have gradients."""
    arrived: set[int] = field(default_factory=set)
    """Of several outputs, losses and sources that are passed on, the places of those whose gradients are real. TensorFlow fills
    in zeros for the others, where Keras has None. Each question to a tape notes its own."""

    def arrival_of(self, place: int) -> Callable[[], None]:
        return lambda: self.arrived.add(place)

    def run(self, upstream: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
        """Gradients of the sources and of the trainable values, from those of the outputs, the losses and what was passed on."""
        real = [g if place in self.arrived or len(upstream) == 1 else None for place, g in enumerate(upstream)]
        self.arrived.clear()
        place = next(place for place, g in enumerate(real) if g is not None)
        others = [g for g in real if g is not None and g is not real[place]]
        real[place] = gate = self.one_pass.start_backward(self.index, real[place], others, brings_back=self.rerun.brings_back)
        rerun = self.rerun
        inputs, inside = rerun.fetch_for_backward(gate)
        if self.one_pass.ties and self.one_pass.mode != EAGER:
            inputs = [_tied(x, gate) for x in inputs]
        # Statistics that are given have no gradients, which those who ask for gradients of gradients want.
        again = any(x is not None and keras_internals.is_recorded(x) for x in (*inputs, *rerun.trainable, *real))
        first = len(real) - len(self.passed_on)
        names = [name for name, is_wanted in zip(self.sources, wanted, strict=False) if is_wanted]
        later = {self.sources[place]: g for place, g in zip(self.passed_on, real[first:], strict=True)}
        with self.one_pass.in_order(gate):
            for_sources, for_trainable = rerun.function.backward(
                inputs,
                rerun.masks,
                inside,
                rerun.trainable,
                rerun.state,
                [] if again else rerun.statistics,
                real[: self.outputs],
                real[self.outputs : first],
                [name in names for name in self.inputs],
                [later.get(name) for name in names],
            )
        if self.one_pass.mode != EAGER:
            self.one_pass.ended = next((g for g in (*for_sources, *for_trainable) if g is not None), None)
        found = dict(zip(names, for_sources, strict=True))
        return [*(found.get(name) for name in self.sources), *for_trainable]


def _tied(tensor: Any, gate: Any) -> Any:
    """The tensor, in a form that no compiler can compute before the gradient `gate` exists."""
    if not is_float(tensor):
        return tensor
    first = tf.reshape(gate, [-1])[:1]
    is_there = tf.reduce_all(tf.equal(first, first))  # else it is not a number, and nothing else is
    return tf.where(is_there, tensor, tf.cast(float("nan"), tensor.dtype))
