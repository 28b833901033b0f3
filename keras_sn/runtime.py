"""A plan, run in TensorFlow: one custom gradient for each region, driven by an ordinary `tf.GradientTape`.

A region's gradient brings back what the forward pass saved and runs the region's backward function, which recomputes what was not
saved. Nothing is decided here: the plan says which tensors are saved, in which tier, and when each comes back.
"""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.layer_calls import ModelTrace
from keras_sn.passes import Pass, PassResult, Rerun, is_float, save
from keras_sn.plan import Plan, Region
from keras_sn.regions import EAGER, FUNCTION, RegionBody, RegionFunction, RegionLibrary, make_bodies
from keras_sn.steps import RECOMPUTE


class PlanExecutor:
    """Runs the forward pass of a model by a plan, and prepares its backward pass.

    Args:
        trace: The model's layer calls.
        plan: A plan with regions.
        jit: Compile each region with XLA where its layers allow it.
        autocast_dtype: The model's compute dtype if it differs from its variables', else None.
        library: The region functions that there are already, shared with other executors.
        ties: Let what a backward function reads depend on its gradients, because XLA may compile the whole step around it and
            would merge the recomputation with the forward pass.
        owner: TensorFlow may ask for gradients of what it traces as long as this lives; None means the executor.
    """

    def __init__(
        self,
        trace: ModelTrace,
        plan: Plan,
        *,
        jit: bool,
        autocast_dtype: str | None,
        library: RegionLibrary | None = None,
        ties: bool = False,
        owner: Any = None,
    ):
        self.trace, self.plan, self.jit, self.ties = trace, plan, jit, ties
        self.bodies = make_bodies(trace, plan.regions, autocast_dtype)
        self.library = RegionLibrary() if library is None else library
        self._owner = weakref.ref(self if owner is None else owner)
        self._functions: dict[str, list[RegionFunction]] = {}
        self._recomputed = {one.tensor for region in plan.regions for one in region.saved if one.tier == RECOMPUTE}

    def run(self, inputs: Sequence[Any]) -> PassResult:
        """Runs the regions in order.

        Args:
            inputs: One tensor for each graph input, with its Keras mask attached, or None for a missing optional one.

        Returns:
            The outputs (flat, masks attached), the losses and the state updates. Nothing has been assigned.
        """
        mode = EAGER if tf.executing_eagerly() else FUNCTION
        if mode not in self._functions:
            self._functions[mode] = [
                self.library.function_for(body, mode, jit=self.jit, inline=not region.recompute)
                for body, region in zip(self.bodies, self.plan.regions, strict=True)
            ]
        with keras_internals.gradients_forgotten_with(self._owner()) if mode != EAGER else nullcontext():
            return self._run(mode, inputs)

    def _run(self, mode: str, inputs: Sequence[Any]) -> PassResult:
        one_pass = Pass(dict(zip(self.trace.graph.inputs, inputs, strict=True)), mode, self._recomputed, self.ties)
        for index, (region, body) in enumerate(zip(self.plan.regions, self.bodies, strict=True)):
            function = self._functions[mode][index]
            # Without waiting, the forward pass would run ahead of its copies, and all that leaves would still be on the device.
            with tf.control_dependencies(one_pass.stored.pop(index - self.plan.copy_window, [])):
                if region.recompute:
                    _run_recomputed(one_pass, index, region, body, function)
                else:
                    _run_kept(one_pass, index, body, function)
            for name in set(body.inputs) - body.read_later:
                del one_pass.tensors[name]  # in eager mode the name would keep it alive
        outputs = [one_pass.mark(name, one_pass.tensors[name]) for name in self.trace.graph.outputs]
        one_pass.in_tier.clear()
        one_pass.replays.clear()
        one_pass.tensors.clear()  # a gradient function holds the pass, which must not hold the tensors
        return PassResult(outputs, one_pass.losses, list(one_pass.updated.values()))


def _masks(tensors: Sequence[Any]) -> list[Any]:
    return [None if x is None else keras_internals.get_mask(x) for x in tensors]


def _read(one_pass: Pass, body: RegionBody) -> tuple[list[Any], list[Any]]:
    """The values of the region's trainable variables and of its state."""
    with keras_internals.without_autocast():
        trainable = [_current(one_pass, variable) for variable in body.trainable]
        state = [
            one_pass.state[id(variable)] if id(variable) in one_pass.state else tf.convert_to_tensor(variable.value)
            for variable in body.state
        ]
    return trainable, state


def _current(one_pass: Pass, variable: keras.Variable) -> Any:
    """The value of a trainable variable: its own, or what a layer has assigned to it in this pass."""
    value = tf.convert_to_tensor(variable.value)
    return keras_internals.in_place_of(value, one_pass.state[id(variable)]) if id(variable) in one_pass.state else value


def _hand_on(one_pass: Pass, body: RegionBody, function: RegionFunction, result: Any, outputs: list, losses: list, index: int):
    """Gives the region's outputs, masks, losses and new state to the regions after it and to the model."""
    for name, tensor, mask in zip(body.outputs, outputs, result.masks, strict=True):
        if mask is not None:
            keras_internals.set_mask(tensor, mask)
        one_pass.tensors[name] = tensor
    for place, (owner, loss) in enumerate(zip(function.loss_owners, losses, strict=True)):
        one_pass.losses.append((body.layers[owner], one_pass.mark(_loss_name(index, place), loss)))
    for place in function.unmasked:
        keras_internals.set_mask(one_pass.tensors[body.inputs[place]], None)
    for variable, new in zip(body.updatable, result.new_state, strict=True):
        if new is not None:
            one_pass.state[id(variable)] = new
            one_pass.updated[id(variable)] = (variable, new)


def _loss_name(region: int, place: int) -> str:
    return f"loss {place} of region {region}"


def _run_kept(one_pass: Pass, index: int, body: RegionBody, function: RegionFunction) -> None:
    """TensorFlow differentiates the region's forward function itself and saves what it needs."""
    inputs = [one_pass.mark(name, one_pass.tensors[name]) for name in body.inputs]
    one_pass.tensors.update(zip(body.inputs, inputs, strict=True))  # See Note: [Threading]
    masks = _masks(inputs)
    trainable, state = _read(one_pass, body)
    result = function.forward(inputs, masks, trainable, state)
    _hand_on(one_pass, body, function, result, result.outputs, result.losses, index)


# Note: [Threading]
# A tensor with several readers gets the sum of their gradients. Keras lets the tape add all of them at once, in the order in
# which they arrive, the last reader's first. To round like that, and to add inside the compiled backward function, a region
# that reads such a tensor returns it to the regions after it: their sum then comes back to this region, which adds its own to it.


def _run_recomputed(one_pass: Pass, index: int, region: Region, body: RegionBody, function: RegionFunction) -> None:
    """The forward function without a tape, inside one custom gradient that saves what the plan says."""
    inputs = [one_pass.tensors[name] for name in body.inputs]
    masks = _masks(inputs)
    trainable, state = _read(one_pass, body)
    wanted = [is_float(x) and keras_internals.is_recorded(x) for x in inputs]
    if not any(wanted) and not any(keras_internals.is_recorded(value) for value in trainable):
        result = function.forward(inputs, masks, trainable, state)
        if not one_pass.recomputed.isdisjoint(body.outputs):
            fetch = save(one_pass, index, region, body, inputs, result)
            one_pass.note(Rerun(body.outputs, function, fetch, masks, trainable, state))
        _hand_on(one_pass, body, function, result, result.outputs, result.losses, index)
        return
    sources = {name: x for name, x, is_wanted in zip(body.inputs, inputs, wanted, strict=True) if is_wanted}
    threaded = [name for name in sources if name in body.read_later]
    results = []

    @tf.custom_gradient
    def call(*_):
        with keras_internals.stop_recording():
            if one_pass.mode == EAGER:
                function.check_once(inputs, masks, trainable, state)
            result = function.forward(inputs, masks, trainable, state)
            results.append(result)
            fetch = save(one_pass, index, region, body, inputs, result)
            rerun = Rerun(body.outputs, function, fetch, masks, trainable, state)
            one_pass.note(rerun)
        names = [name for name, y in zip(body.outputs, result.outputs, strict=True) if is_float(y)]
        losses = [_loss_name(index, place) for place in range(len(result.losses))]
        backward = _Backward(one_pass, index, rerun, wanted, list(sources))
        passed_on = [tf.identity(sources[name]) for name in threaded]
        outputs = [*(y for y in result.outputs if is_float(y)), *result.losses, *passed_on]
        return outputs, lambda *upstream: backward.run(names, losses, threaded, upstream)

    differentiable = list(call(*sources.values(), *trainable))
    result = results[0]
    outputs = [differentiable.pop(0) if is_float(y) else y for y in result.outputs]
    losses = [differentiable.pop(0) for _ in result.losses]
    for name, x in zip(threaded, differentiable, strict=True):
        keras_internals.set_mask(x, keras_internals.get_mask(one_pass.tensors[name]))
        one_pass.tensors[name] = x
    _hand_on(one_pass, body, function, result, outputs, losses, index)


@dataclass(frozen=True, eq=False)
class _Backward:
    """The backward pass of one recomputed region, with what it needs of the forward pass and nothing else."""

    one_pass: Pass
    index: int
    rerun: Rerun
    wanted: list[bool]
    sources: list[str]
    """The inputs whose gradient is wanted."""

    def run(self, outputs: list[str], losses: list[str], threaded: list[str], upstream: Sequence[Any]) -> list[Any]:
        """Gradients of the sources and of the trainable values, from those of the outputs, the losses and what was passed on."""
        connected = self.one_pass.connected
        names = [*outputs, *losses, *threaded]
        real = [g if name in connected else None for name, g in zip(names, upstream, strict=True)]
        gate = next(g for g in real if g is not None)
        if self.one_pass.mode != EAGER:  # eager steps run in order, and a gate would only keep its tensor alive
            self.one_pass.started[self.index] = gate
        rerun = self.rerun
        inputs, inside = rerun.fetch(gate)
        if self.one_pass.ties and self.one_pass.mode != EAGER:
            inputs = [_tied(x, gate) for x in inputs]
        of_outputs, of_losses = real[: len(outputs)], real[len(outputs) : len(outputs) + len(losses)]
        seeds = dict(zip(threaded, real[len(outputs) + len(losses) :], strict=True))
        for_sources, for_trainable = rerun.function.backward(
            inputs,
            rerun.masks,
            inside,
            rerun.trainable,
            rerun.state,
            of_outputs,
            of_losses,
            self.wanted,
            [seeds.get(name) for name in self.sources],
        )
        connected.update(name for name, g in zip(self.sources, for_sources, strict=True) if g is not None)
        return [*for_sources, *for_trainable]


def _tied(tensor: Any, gate: Any) -> Any:
    """The tensor, in a form that no compiler can compute before the gradient `gate` exists."""
    if not is_float(tensor):
        return tensor
    first = tf.reshape(gate, [-1])[:1]
    is_there = tf.reduce_all(tf.equal(first, first))  # else it is not a number, and nothing else is
    return tf.where(is_there, tensor, tf.cast(float("nan"), tensor.dtype))
