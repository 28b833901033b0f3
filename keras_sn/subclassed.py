"""What a model with its own `call()` needs to be planned and run: its inputs' shapes, a recording, its children's regions."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.batches import shape_of
from keras_sn.children import ChildRegions, watched
from keras_sn.errors import PlanError, UnsupportedModelError
from keras_sn.layer_calls import ModelTrace
from keras_sn.plan import Plan
from keras_sn.planning import Shapes
from keras_sn.recording import record_calls


class ChildPlanner:
    """Plans and runs the calls of a model's direct child layers.

    Args:
        model: The model.
    """

    def __init__(self, model: Any):
        self._model = model
        self._arguments: tuple[tuple, dict[str, Any]] | None = None
        """Of the call that was planned last, with a `KerasTensor` for each tensor."""

    def signature(self, batch_size: int, inputs: Any) -> Shapes:
        """The shapes of the inputs of a batch; builds the model if nobody has.

        Raises:
            PlanError: No inputs are given, and none were before.
        """
        if inputs is not None:
            self._note(((inputs,), {}), batch_size)
        elif self._arguments is None:
            raise PlanError(
                "A model with its own `call()` is planned from a batch: give `build_plan(batch_size, inputs=...)` the inputs of "
                f"one, or specifications. Received: inputs={inputs!r}"
            )
        return tuple((batch_size, *shape[1:]) if shape else shape for shape in self._shapes())

    def record(self, shapes: Shapes) -> ModelTrace:
        """The layer calls of a training call on inputs of these shapes."""
        given = iter(shapes)
        filled: Any = keras.tree.map_structure(
            lambda leaf: keras.KerasTensor(next(given), leaf.dtype) if isinstance(leaf, keras.KerasTensor) else leaf,
            self._arguments,
        )
        args, kwargs = filled
        if self._model._call_has_training_arg:
            kwargs = kwargs | {"training": True}
        with self._runs_on_symbols():
            return record_calls(self._model, args, kwargs)

    def run_by_plan(
        self, planned_for: Callable[[Any], Plan], wants_jit: Callable[[], bool], args: tuple, kwargs: dict[str, Any]
    ) -> AbstractContextManager:
        """Inside, the calls of the model's children are regions, if a gradient may be asked for and the plan has regions.

        Args:
            planned_for: The plan for inputs of these shapes.
            wants_jit: Whether regions are compiled by XLA.
            args: Of the model's call.
            kwargs: Likewise.
        """
        arrays = [leaf for leaf in keras.tree.flatten((args, kwargs)) if hasattr(leaf, "shape")]
        if not arrays or not self._may_run(arrays):
            return nullcontext()
        if self._arguments is None or len(self._shapes()) != len(arrays):
            self._note((args, {name: value for name, value in kwargs.items() if name != "training"}), None)
        plan = planned_for([tuple(one.shape) for one in arrays])
        if plan.is_plain:
            return nullcontext()
        jit = wants_jit()
        regions = self._model._now.executor_for(lambda: ChildRegions(plan, jit=jit, compiler=self._model._now.compiler), jit)
        return watched(self._model.layers, regions.handler())

    def _may_run(self, arrays: Sequence[Any]) -> bool:
        if self._model.settings.policy == "none" or self._model._now.is_aside or keras_internals.in_stateless_scope():
            return False
        return keras_internals.may_record() and not any(isinstance(one, keras.KerasTensor) for one in arrays)

    def _shapes(self) -> list[tuple[int, ...]]:
        return [tuple(leaf.shape) for leaf in keras.tree.flatten(self._arguments) if isinstance(leaf, keras.KerasTensor)]

    def _note(self, arguments: tuple[tuple, dict[str, Any]], batch_size: int | None) -> None:
        def symbolic(leaf: Any) -> Any:
            if not hasattr(leaf, "shape") and not isinstance(leaf, list):
                return leaf
            shape = shape_of(leaf)
            dtype = keras.backend.standardize_dtype(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)
            if dtype == "float64" and not tf.is_tensor(leaf):
                dtype = keras.config.floatx()  # as Keras' data adapters convert arrays
            return keras.KerasTensor((batch_size or shape[0], *shape[1:]) if shape else shape, dtype)

        self._arguments = keras.tree.map_structure(symbolic, arguments)
        if not self._model.built:
            with self._model.distribute_strategy.scope(), self._runs_on_symbols():
                keras_internals.output_spec(self._model, *self._arguments[0], **self._arguments[1])

    @contextmanager
    def _runs_on_symbols(self) -> Iterator[None]:
        """Says what is wrong if the model's `call()` cannot be traced."""
        model = self._model
        if type(model).call is keras.Model.call:
            raise UnsupportedModelError(
                f"Model {model.name!r} has no `call()`, so there is nothing to plan. Convert the networks that it trains "
                "(`keras_sn.SNModel.from_model`, then `build_plan(batch_size)`), and derive the class from `keras.Model`, or "
                f"give it `policy='none'`. Received: {model!r}"
            )
        try:
            yield
        except (tf.errors.OperatorNotAllowedInGraphError, TypeError, NotImplementedError, AttributeError) as error:
            if isinstance(error, AttributeError) and all(kind not in str(error) for kind in ("KerasTensor", "SymbolicTensor")):
                raise
            raise UnsupportedModelError(
                f"Model {model.name!r} cannot be planned, because its `call()` does not run on symbolic tensors: {error}. "
                "Use `keras.ops.cond` and `keras.ops.while_loop` for what depends on values, or `policy='none'`. "
                f"Received: {model!r}"
            ) from error
