"""`SNModel(inputs, outputs)`: a graph of layers, cut into regions anywhere."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras

from keras_sn import files, keras_internals
from keras_sn.layer_calls import ModelTrace
from keras_sn.model import SNModel
from keras_sn.passes import assign_all
from keras_sn.planning import InForce, Shapes, has_open_axes, input_shapes
from keras_sn.region_library import autocast_dtype_of
from keras_sn.runtime import PlanExecutor
from keras_sn.settings import Settings
from keras_sn.trace import trace


class FunctionalSNModel(SNModel, keras_internals.Functional):
    """What `SNModel(inputs, outputs)` makes. `SNModel` itself keeps its bases, so that other models can derive from it."""

    def __init__(self, *args: Any, **kwargs: Any):
        settings = Settings.taken_from(kwargs)
        with _deep_recursion():
            keras_internals.Functional.__init__(self, *args, **kwargs)
        if settings == Settings():
            settings = _settings_of_clone(self.outputs)
        self.settings = settings
        self._now = InForce()

    # --- planning

    def _children_run_by_plan(self, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager:
        return nullcontext()

    def _signature(self, batch_size: int, inputs: Any) -> Shapes:
        return input_shapes(self, batch_size, inputs)

    def _trace(self, shapes: Shapes) -> ModelTrace:
        return trace(self, shapes[0][0] if shapes and shapes[0] else 1, shapes, has_masks=self._now.has_masks)

    def _needs_shapes(self) -> bool:
        return has_open_axes(self)

    def _is_planned(self) -> bool:
        return True

    def _region_weights(self) -> list[list[keras.Variable]]:
        return [body.trainable for body in self._executor_in_force().bodies]

    def _executor_in_force(self) -> PlanExecutor:
        mixed = autocast_dtype_of(self)
        jit = self._region_jit()

        def make() -> PlanExecutor:
            now = self._now
            options = {"jit": jit, "autocast_dtype": mixed, "owner": now, "compiler": now.compiler}
            return PlanExecutor(now.planned.trace, now.planned.plan, **options)

        return self._now.executor_for(make, jit, mixed)

    # --- the forward pass

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        if not self._runs_by_plan(inputs, training):
            return super().call(inputs, training=training, mask=mask, **kwargs)
        flat = keras_internals.standardize_inputs(self, inputs)
        for x, its_mask in zip(flat, [None] * len(flat) if mask is None else keras.tree.flatten(mask), strict=True):
            if its_mask is not None:
                keras_internals.set_mask(x, its_mask)
        self._plan_for_masks(flat)
        if self._planned_for(_shapes(self.inputs, flat)).is_plain:
            return super().call(inputs, training=training, mask=mask, **kwargs)
        result = self._executor_in_force().run(flat)
        result.add_losses()
        if self._now.waiting_updates is None:
            assign_all(result.state_updates)
        else:
            self._now.waiting_updates.extend(result.state_updates)
        outputs = keras.tree.pack_sequence_as(self.output, result.outputs)
        return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs

    def _plan_for_masks(self, inputs: Sequence[Any]) -> None:
        """Plans anew when masks come with the inputs for the first time: layers that they reach are then not cut inside."""
        if self._now.has_masks or all(x is None or keras_internals.get_mask(x) is None for x in inputs):
            return
        self._now.has_masks = True
        self._now.plans.clear()
        if self._now.planned is not None:
            self._planned_again(self._now.planned.shapes)

    def _runs_by_plan(self, inputs: Any, training: bool | None) -> bool:
        if not training or self.settings.policy == "none" or self._now.is_aside or keras_internals.in_stateless_scope():
            return False
        return not any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(inputs))

    # --- files

    @files.writes_settings
    def get_config(self) -> dict[str, Any]:  # no default in Keras' sense, as that of its functional models is none
        return super().get_config()

    def _run_through_graph(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        outputs = super()._run_through_graph(inputs, *args, **kwargs)
        if "call_fn" in kwargs:
            # `clone_model` gives this argument with symbolic inputs, and makes the clone of these tensors and a name.
            for tensor in keras.tree.flatten(outputs):
                if isinstance(tensor, keras.KerasTensor):
                    tensor._keras_sn_settings = self.settings
        return outputs


def _settings_of_clone(outputs: list[Any]) -> Settings:
    return next((tensor._keras_sn_settings for tensor in outputs if hasattr(tensor, "_keras_sn_settings")), Settings())


def _shapes(symbolic: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[int | None, ...]]:
    """The shapes of inputs as far as they are known; that of the symbolic input for a missing optional one."""
    return [(None, *tensor.shape[1:]) if x is None else tuple(x.shape) for tensor, x in zip(symbolic, inputs, strict=True)]


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Keras finds a model's layers by recursion, two frames a layer; these are Python frames, which cost no C stack."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 1_000_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


files.name_in_files(FunctionalSNModel)
