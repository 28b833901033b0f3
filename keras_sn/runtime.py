"""A plan, run in TensorFlow: one custom gradient for each region, driven by an ordinary `tf.GradientTape`.

A region's gradient brings back what the forward pass saved and runs the region's backward function, which recomputes what was not
saved. Nothing is decided here: the plan says which tensors are saved, in which tier, and when each comes back.
"""

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.bodies import BorrowedWeights, RegionBody, UsesGlobalSeed, make_bodies
from keras_sn.compiling import BackgroundCompiler
from keras_sn.layer_calls import ModelTrace, variables_of
from keras_sn.passes import Pass, PassResult, hand_on, is_float, masks_of, read_state, read_trainable
from keras_sn.plan import Plan
from keras_sn.recomputed import run_recomputed
from keras_sn.region_library import RegionLibrary
from keras_sn.regions import EAGER, FUNCTION, RegionFunction
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
        compiler: Compiles region functions before they first run, in the background; None to leave it to TensorFlow.
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
        compiler: BackgroundCompiler | None = None,
    ):
        self.trace, self.plan, self.jit, self.ties = trace, plan, jit, ties
        self.bodies = make_bodies(trace, plan.regions, autocast_dtype)
        self.library = RegionLibrary(compiler) if library is None else library
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
            self._functions[mode] = [self._function(index, mode) for index in range(len(self.bodies))]
        with keras_internals.gradients_forgotten_with(self._owner()) if mode != EAGER else nullcontext():
            return self._run(mode, inputs)

    def _run(self, mode: str, inputs: Sequence[Any]) -> PassResult:
        tensors = dict(zip(self.trace.graph.inputs, inputs, strict=True))
        one_pass = Pass(tensors, mode, self._recomputed, self.ties, len(self.plan.regions), self.plan.copy_window)
        for index in range(len(self.plan.regions)):
            body = self.bodies[index]
            one_pass.wait_for_copies(index, body.inputs)
            self._run_region(one_pass, index)
            for name in set(body.inputs) - body.read_later:
                del one_pass.tensors[name]  # in eager mode the name would keep it alive
        outputs = [one_pass.tensors[name] for name in self.trace.graph.outputs]
        one_pass.in_tier.clear()
        one_pass.replays.clear()
        one_pass.tensors.clear()  # a gradient function holds the pass, which must not hold the tensors
        return PassResult(outputs, one_pass.losses, list(one_pass.updated.values()))

    def _function(self, index: int, mode: str) -> RegionFunction:
        is_kept = not self.plan.regions[index].recompute
        return self.library.function_for(self.bodies[index], mode, jit=self.jit, inline=is_kept)

    def _run_region(self, one_pass: Pass, index: int) -> None:
        """Runs a region; once more if it turns out to use variables that its layers do not own."""
        region, functions = self.plan.regions[index], self._functions[one_pass.mode]
        try:
            if region.recompute:
                run_recomputed(one_pass, index, region, self.bodies[index], functions[index])
            else:
                _run_kept(one_pass, self.bodies[index], functions[index])
        except (BorrowedWeights, UsesGlobalSeed) as error:
            borrowed = (error.state,) if isinstance(error, UsesGlobalSeed) else self._owned_elsewhere(error)
            body = self.bodies[index]
            self.bodies[index] = replace(body, borrowed=(*body.borrowed, *borrowed))
            functions[index] = self._function(index, one_pass.mode)
            self._run_region(one_pass, index)

    def _owned_elsewhere(self, error: BorrowedWeights) -> tuple[keras.Variable, ...]:
        """The variables of other layers that a region's layers use; if it is not known whose they are, the error is raised."""
        known = {id(variable): variable for call in self.trace.calls for variable in variables_of(call.operation)}
        with keras_internals.without_autocast():
            borrowed = [v for v in known.values() if any(v.value is weight for weight in error.weights)]
        if len(borrowed) < len(error.weights):
            raise error
        return tuple(borrowed)


def _run_kept(one_pass: Pass, body: RegionBody, function: RegionFunction) -> None:
    """TensorFlow differentiates the region's forward function itself and saves what it needs."""
    for name in body.inputs:
        if name in body.read_later and is_float(one_pass.tensors[name]):  # See Note: [Threading]
            one_pass.tensors[name] = keras_internals.with_mask_of(tf.identity(one_pass.tensors[name]), one_pass.tensors[name])
    inputs = [one_pass.tensors[name] for name in body.inputs]
    masks = masks_of(inputs)
    result = function.forward_differentiable(inputs, masks, read_trainable(one_pass, body), read_state(one_pass, body))
    for name, tensor in zip(body.inputs_in_turn, result.passed_on, strict=bool(result.passed_on)):
        one_pass.tensors[name] = tensor
    hand_on(one_pass, body, function, result, result.outputs, result.losses)


# Note: [Threading]
# A tensor with several readers gets the sum of their gradients. Keras lets the tape add all of them at once, in the order in
# which they arrive, the last reader's first. To round like that, and to add inside the compiled backward function, a region
# that reads such a tensor returns it to the regions after it: their sum then comes back to this region, which adds its own to it.
