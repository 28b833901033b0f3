"""The Keras face: `SNModel`, a `keras.Model` whose training calls run by a plan. Everything else is Keras' own code.

How it trains is in `training`; what is particular to graphs of layers in `functional`, to models with their own `call()` in
`subclassed`, and to files and copies in `files`.
"""

import functools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
import tensorflow as tf

from keras_sn import files, keras_internals
from keras_sn.batches import count_samples
from keras_sn.errors import PlanError
from keras_sn.layer_calls import ModelTrace
from keras_sn.log import log
from keras_sn.plan import Plan
from keras_sn.planning import InForce, Shapes
from keras_sn.policies import Policy
from keras_sn.report import plan_line
from keras_sn.settings import Settings
from keras_sn.subclassed import ChildPlanner
from keras_sn.supported import check_supported
from keras_sn.training import PlannedTraining


class SNModel(PlannedTraining):
    """A `keras.Model` that trains within a memory budget, with the numbers of plain Keras.

    A subclass with its own `call()` takes the same arguments; there each call of a direct child layer is recomputed, offloaded or
    kept as a whole.

    ```python
    model = keras_sn.SNModel(inputs, outputs, memory_budget="12GiB")
    model = keras_sn.SNModel.from_model(existing, memory_budget="12GiB")
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=64)
    print(model.plan)
    ```

    Args:
        inputs: As in `keras.Model`.
        outputs: As in `keras.Model`.
        memory_budget: What the device may hold during a training step: bytes, or text such as `"12GiB"`. None means what the
            device has.
        host_budget: What `"auto"` may let the host hold of it; None means 80 % of the free memory, and nothing without a GPU,
            where it is the same memory.
        policy: `"auto"` (plain Keras if it fits, else the fastest plan found that does), `"recompute"`, `"offload"`,
            `"superneurons"`, `"none"`, or a dict from patterns of layer names to `"keep"`, `"recompute"` or `"offload"`.
        plan: A plan to run instead of one that is made: a `Plan` (for example `model.plan` of an equal model, edited with
            `dataclasses.replace`) or what its `to_json()` wrote. It is checked step by step before it runs.
        verify: `"first_step"` runs the first training step by plain Keras too, before anything is changed, and compares. It takes
            the memory that plain Keras takes.

    Raises:
        BudgetError: A budget is not a size.
        PlanError: The policy is unknown, or `plan` is none.
    """

    def __new__(cls, *args: Any, **kwargs: Any):
        if cls is SNModel and _is_functional(args, kwargs):
            cls = _functional_class()
        return super().__new__(cls, *args, **kwargs)

    def __init__(
        self,
        *args: Any,
        memory_budget: int | str | None = None,
        host_budget: int | str | None = None,
        policy: Policy | None = None,
        plan: Plan | str | None = None,
        verify: str | None = None,
        **kwargs: Any,
    ):
        given = {"memory_budget": memory_budget, "host_budget": host_budget, "policy": policy, "plan": plan, "verify": verify}
        if _is_functional(args, kwargs):
            _put_functional_under(type(self))
            _functional_class().__init__(self, *args, **given, **kwargs)
            return
        super().__init__(*args, **kwargs)
        self.settings = Settings.taken_from(given)
        self._now = InForce()
        self._children = ChildPlanner(self)

    @classmethod
    def from_model(
        cls,
        model: keras.Model,
        memory_budget: int | str | None = None,
        host_budget: int | str | None = None,
        policy: Policy = "auto",
        plan: Plan | str | None = None,
        verify: str | None = None,
    ) -> "SNModel":
        """Makes an `SNModel` of an existing functional or Sequential model. The two share layers and weights.

        Args:
            model: The existing model, built. If it is compiled, compile the new one again. A class of its own keeps its methods
                and attributes (`train_step`, `fit`, `generate`, …).
            memory_budget: See the class.
            host_budget: See the class.
            policy: See the class.
            plan: See the class.
            verify: See the class.

        Returns:
            The new model, not compiled.

        Raises:
            UnsupportedModelError: The model is not a built graph of layers.
        """
        check_supported(model)
        graph = keras_internals.functional_part(model)
        settings = {"memory_budget": memory_budget, "host_budget": host_budget, "policy": policy, "plan": plan, "verify": verify}
        own = files.user_class(type(model))
        if own.__module__.partition(".")[0] in ("keras", "keras_sn"):
            converted = cls(graph.input, graph.output, name=model.name, **settings)
        else:
            converted = _with_methods_of(own, _put_functional_under(cls), graph, name=model.name, **settings)
            own_attributes = {name: value for name, value in vars(model).items() if name not in vars(converted)}
            vars(converted).update(own_attributes)
        converted.dtype_policy = model.dtype_policy
        return converted

    # --- files, pickles and copies

    def __init_subclass__(cls, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        files.keep_settings(cls)

    @files.writes_settings
    @functools.wraps(keras.Model.get_config)  # with Keras' mark of a default, for which it records constructor arguments
    def get_config(self) -> dict[str, Any]:
        return super().get_config()

    @files.reads_settings
    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Mapping[str, Any] | None = None) -> "SNModel":
        return super().from_config(config, custom_objects)

    from_config.__func__.__doc__ = keras.Model.from_config.__doc__

    def __reduce__(self) -> tuple:
        return files.reduced(self, *super().__reduce__())

    # --- the plan

    def build_plan(self, batch_size: int, inputs: Any = None) -> Plan:
        """Plans the training step for a batch size, and puts the plan in force. `fit` does this by itself.

        Args:
            batch_size: Samples in a batch (of one replica under `tf.distribute`).
            inputs: The inputs of a batch, or specifications with their shapes, for a model that leaves other axes open or has its
                own `call()`.

        Returns:
            The plan.

        Raises:
            BudgetError: No plan fits.
            PlanError: The policy names an unknown layer, or the given plan is illegal.
            UnsupportedModelError: A layer or tensor cannot be planned.
        """
        return self._plan_shapes(self._signature(batch_size, inputs))

    def _plan_shapes(self, shapes: Shapes) -> Plan:
        if self.compiled and self.optimizer is not None:
            with self.distribute_strategy.scope():
                keras_internals.build_optimizer(self.optimizer, self.trainable_variables)
        now = self._now
        planned = now.plan_for(self, self.settings, shapes, lambda: self._trace(shapes), compiled=self._wants_jit())
        now.settled_for = keras_internals.compilation(self)
        if planned is not now.planned:
            if not planned.runs_like(now.planned):
                now.executor, self.train_function = None, None
            now.planned = planned
            log.info(plan_line(planned.plan))
        return planned.plan

    def _planned_for(self, shapes: Sequence[Sequence[int | None]]) -> Plan:
        """The plan in force; a new one for a batch that needs more than it was made for, or after another `compile()`."""
        planned = self._now.planned
        if planned is not None and planned.covers(shapes):
            if tf.inside_function() and not planned.trains(self.trainable_variables):
                return self._planned_again(planned.shapes)  # Keras traces its step again, for the weights that train now
            if self._now.settled_for is keras_internals.compilation(self) or tf.inside_function():
                return planned.plan
            return self._plan_shapes(planned.shapes)  # the same, unless for another optimizer, XLA or not, or other weights
        if any(None in shape for shape in shapes):
            raise PlanError(
                "The batch size or another axis is not known, so no plan can be made. Call "
                "`model.build_plan(batch_size=..., inputs=...)` before the training loop, or give the data a fixed shape. "
                f"Received: shapes {[tuple(shape) for shape in shapes]}"
            )
        return self._plan_shapes(tuple(tuple(int(size) for size in shape if size is not None) for shape in shapes))

    def _planned_again(self, shapes: Shapes) -> Plan:
        """A new plan for a step that is being traced, which goes on."""
        train_function = self.train_function
        plan = self._plan_shapes(shapes)
        self.train_function = train_function
        return plan

    def _plan_for_batch(self, inputs: Any, replicas: int = 1) -> None:
        size = -(-count_samples(inputs) // replicas)
        self._planned_for(self._signature(size, inputs))

    def _region_jit(self) -> bool:
        return self._wants_jit() if self._now.region_jit is None else self._now.region_jit

    def _wants_jit(self) -> bool:
        """Whether regions are compiled by XLA: as Keras decides, but a layer that XLA cannot compile counts for its region."""
        asked = keras_internals.asked_for_jit(self) if self.compiled else "auto"
        if asked == "auto":
            return keras_internals.would_jit(self)
        return bool(asked) and not self.run_eagerly

    def plan_set_aside(self) -> AbstractContextManager:
        """Inside, the model runs as plain Keras."""
        return self._now.changed(is_aside=True)

    def regions_compiled(self, jit: bool) -> AbstractContextManager:
        """Inside, regions are compiled by XLA, or none is."""
        return self._now.changed(region_jit=jit)

    # --- models with their own `call()`; graphs of layers override these

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._children_run_by_plan(args, kwargs):
            return super().__call__(*args, **kwargs)

    def _children_run_by_plan(self, args: tuple, kwargs: dict[str, Any]) -> AbstractContextManager:
        return self._children.run_by_plan(self._planned_for, self._region_jit, args, kwargs)

    def _signature(self, batch_size: int, inputs: Any) -> Shapes:
        return self._children.signature(batch_size, inputs)

    def _trace(self, shapes: Shapes) -> ModelTrace:
        return self._children.record(shapes)

    def _needs_shapes(self) -> bool:
        return True

    def _is_planned(self) -> bool:
        """Whether training asks for a plan; without one, a `call()` need not run on symbolic tensors."""
        return self.settings.policy != "none"

    def _region_weights(self) -> list[list[keras.Variable]]:
        return [layer.trainable_variables for layer in self.layers]


def _is_functional(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    return len(args) >= 2 or (len(args) == 1 and "outputs" in kwargs) or {"inputs", "outputs"} <= kwargs.keys()


def _functional_class() -> type:
    from keras_sn.functional import FunctionalSNModel  # here, because it derives from `SNModel`

    return FunctionalSNModel


def _with_methods_of(own: type, planned: type, graph: keras.Model, **kwargs: Any) -> Any:
    """A planned model of a graph, with the methods of a user's functional class; its constructor is not called again."""
    kind = files.converted_class(own, planned)
    files.name_in_files(kind)
    files.name_in_files(_functional_class())  # which loads the files of all
    converted = planned.__new__(kind)
    planned.__init__(converted, graph.input, graph.output, **kwargs)
    return converted


def _put_functional_under(cls: type) -> type:
    """Puts `FunctionalSNModel` in the place of `SNModel` among the bases of a user's class, as Keras does for its models."""
    if cls is SNModel:
        return _functional_class()
    if issubclass(cls, SNModel) and not issubclass(cls, _functional_class()):
        cls.__bases__ = tuple(_put_functional_under(base) for base in cls.__bases__)
    return cls
