"""The Keras face: `SNModel`, a `keras.Model` whose training calls run by a plan. Everything else is Keras' own code."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.batches import count_samples, first_batch
from keras_sn.errors import PlanError, UnsupportedModelError
from keras_sn.log import log
from keras_sn.plan import Plan
from keras_sn.planning import NOT_SETTLED, InForce, Shapes, has_open_axes, input_shapes
from keras_sn.policies import Policy
from keras_sn.report import MeasuredPeak, plan_line
from keras_sn.runtime import PlanExecutor
from keras_sn.settings import Settings
from keras_sn.trace import check_supported
from keras_sn.updates import GroupedUpdate, grouped_update

_OWN_METHODS = ("train_step", "compute_loss", "compute_metrics", "test_step", "predict_step", "fit")


class SNModel(keras.Model):
    """A `keras.Model` that trains within a memory budget, with the numbers of plain Keras.

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
        host_budget: What the host may hold of it; None means 80 % of the free memory.
        policy: `"auto"` (plain Keras if it fits, else the fastest plan found that does), `"recompute"`, `"offload"`,
            `"superneurons"`, `"none"`, or a dict from patterns of layer names to `"keep"`, `"recompute"` or `"offload"`.
        plan: A plan to run instead of one that is made: a `Plan` (for example `model.plan` of an equal model, edited with
            `dataclasses.replace`) or what its `to_json()` wrote. It is checked step by step before it runs.

    Raises:
        BudgetError: A budget is not a size.
        PlanError: The policy is unknown, or `plan` is none.
        UnsupportedModelError: The model is not built from `inputs` and `outputs`.
    """

    def __new__(cls, *args: Any, **kwargs: Any):
        if cls is SNModel and _is_functional(args, kwargs):
            cls = FunctionalSNModel
        return super().__new__(cls, *args, **kwargs)

    def __init__(self, *args: Any, **kwargs: Any):
        if not _is_functional(args, kwargs):
            raise UnsupportedModelError(
                "This version plans functional and Sequential models only: build the model with "
                f"`keras_sn.SNModel(inputs, outputs)`. Received: {type(self).__name__}() without inputs and outputs"
            )
        _put_functional_under(type(self))
        FunctionalSNModel.__init__(self, *args, **kwargs)

    @classmethod
    def from_model(
        cls,
        model: keras.Model,
        memory_budget: int | str | None = None,
        host_budget: int | str | None = None,
        policy: Policy = "auto",
        plan: Plan | str | None = None,
    ) -> "SNModel":
        """Makes an `SNModel` of an existing functional or Sequential model. The two share layers and weights.

        Args:
            model: The existing model, built. If it is compiled, compile the new one again.
            memory_budget: See the class.
            host_budget: See the class.
            policy: See the class.
            plan: See the class.

        Returns:
            The new model, not compiled.

        Raises:
            UnsupportedModelError: The model is not a built graph of layers, or its class has training methods of its own.
        """
        check_supported(model)
        for name in _OWN_METHODS:
            if getattr(type(model), name).__module__.partition(".")[0] not in ("keras", "keras_sn"):
                raise UnsupportedModelError(
                    f"Class {type(model).__name__} has its own `{name}()`, which a converted model would lose. Derive it from "
                    f"`keras_sn.SNModel` instead of `keras.Model`. Received: {model!r}"
                )
        graph = keras_internals.functional_part(model)
        settings = {"memory_budget": memory_budget, "host_budget": host_budget, "policy": policy, "plan": plan}
        converted = cls(graph.input, graph.output, name=model.name, **settings)
        converted.dtype_policy = model.dtype_policy
        return converted


class FunctionalSNModel(SNModel, keras_internals.Functional):
    """What `SNModel(inputs, outputs)` makes. `SNModel` itself keeps its bases, so that other models can derive from it."""

    def __init__(
        self,
        *args: Any,
        memory_budget: int | str | None = None,
        host_budget: int | str | None = None,
        policy: Policy | None = None,
        plan: Plan | str | None = None,
        **kwargs: Any,
    ):
        settings = Settings(memory_budget, host_budget, "auto" if policy is None else policy, plan)
        with _deep_recursion():
            keras_internals.Functional.__init__(self, *args, **kwargs)
        if settings == Settings():
            settings = _settings_of_clone(self.outputs)
        self.settings = settings
        self._now = InForce()

    # --- planning

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first training step or `build_plan`."""
        return self._now.plan

    def build_plan(self, batch_size: int, inputs: Any = None) -> Plan:
        """Plans the training step for a batch size, and puts the plan in force. `fit` does this by itself.

        Args:
            batch_size: Samples in a batch (of one replica under `tf.distribute`).
            inputs: The inputs of a batch, or specifications with their shapes, for a model that leaves other axes open.

        Returns:
            The plan.

        Raises:
            BudgetError: No plan fits.
            PlanError: The policy names an unknown layer, or the given plan is illegal.
            UnsupportedModelError: A layer or tensor cannot be planned.
        """
        return self._plan_shapes(input_shapes(self, batch_size, inputs))

    def _plan_shapes(self, shapes: Shapes) -> Plan:
        if self.compiled and self.optimizer is not None:
            with self.distribute_strategy.scope():
                keras_internals.build_optimizer(self.optimizer, self.trainable_variables)
        now = self._now
        planned = now.plan_for(self, self.settings, shapes, compiled=self._wants_jit())
        now.settled_for = keras_internals.compilation(self)
        if planned is not now.planned:
            now.planned, now.executor, self.train_function = planned, None, None
            log.info(plan_line(planned.plan))
        return planned.plan

    def _planned_for(self, shapes: Sequence[Sequence[int | None]]) -> Plan:
        """The plan in force; a new one for a batch that needs more than it was made for, or after another `compile()`."""
        planned = self._now.planned
        if planned is not None and planned.covers(shapes):
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

    def _plan_for_batch(self, inputs: Any, replicas: int = 1) -> None:
        size = -(-count_samples(inputs) // replicas)
        self._planned_for(input_shapes(self, size, inputs))

    def _executor_in_force(self) -> PlanExecutor:
        autocast_dtype = self.compute_dtype if self.compute_dtype != self.variable_dtype else None
        jit = self._now.region_jit if self._now.region_jit is not None else self._wants_jit()
        return self._now.executor_for(jit=jit, autocast_dtype=autocast_dtype)

    # --- the forward pass

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        if not self._runs_by_plan(inputs, training):
            return super().call(inputs, training=training, mask=mask, **kwargs)
        flat = keras_internals.standardize_inputs(self, inputs)
        for x, its_mask in zip(flat, [None] * len(flat) if mask is None else keras.tree.flatten(mask), strict=True):
            if its_mask is not None:
                keras_internals.set_mask(x, its_mask)
        if self._planned_for(_shapes(self.inputs, flat)).is_plain:
            return super().call(inputs, training=training, mask=mask, **kwargs)
        result = self._executor_in_force().run(flat)
        for layer, loss in result.losses:
            layer.add_loss(loss)
        if self._now.waiting_updates is None:
            _assign(result.state_updates)
        else:
            self._now.waiting_updates.extend(result.state_updates)
        outputs = keras.tree.pack_sequence_as(self.output, result.outputs)
        return outputs[0] if isinstance(outputs, (list, tuple)) and len(outputs) == 1 else outputs

    def _runs_by_plan(self, inputs: Any, training: bool | None) -> bool:
        if not training or self.settings.policy == "none" or keras_internals.in_stateless_scope():
            return False
        return not any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(inputs))

    # --- the training step

    def fit(self, x: Any = None, y: Any = None, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.compiled and x is not None:
            self._now.settled_for = NOT_SETTLED
            x, inputs = first_batch(x, batch_size, needs_shapes=has_open_axes(self))
            self._plan_for_batch(inputs, self.distribute_strategy.num_replicas_in_sync)
            self._report_measured_peak(kwargs)
        return super().fit(x, y, batch_size, *args, **kwargs)

    fit.__doc__ = keras.Model.fit.__doc__

    def _report_measured_peak(self, arguments: dict[str, Any]) -> None:
        callbacks = arguments.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), MeasuredPeak()]

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.compiled:
            self._plan_for_batch(x)
        return super().train_on_batch(x, y, sample_weight, *args, **kwargs)

    train_on_batch.__doc__ = keras.Model.train_on_batch.__doc__

    def make_train_function(self, force: bool = False) -> Any:
        """Keras' own; where the plan has regions they are compiled by themselves, and the step around them is not."""
        if self._now.plan is None or self._now.plan.is_plain or (self.train_function is not None and not force):
            return super().make_train_function(force)
        outer_jit, self._now.region_jit = self.jit_compile, self._wants_jit()
        self._now.update = GroupedUpdate([body.trainable for body in self._executor_in_force().bodies], jit=self._now.region_jit)
        try:
            self.jit_compile = False
            return super().make_train_function(force)
        finally:
            self.jit_compile = outer_jit

    def _wants_jit(self) -> bool:
        """Whether regions are compiled by XLA: as Keras decides, but a layer that XLA cannot compile counts for its region."""
        asked = keras_internals.asked_for_jit(self) if self.compiled else "auto"
        if asked == "auto":
            return keras_internals.would_jit(self)
        return bool(asked) and not self.run_eagerly

    def train_step(self, data: Any) -> Any:
        """Keras' own; state and weights change together, after all gradients exist (except under `tf.distribute`)."""
        is_keras_own = self._now.plan is None or self._now.plan.is_plain or self.optimizer is None
        if is_keras_own or tf.distribute.has_strategy():  # there, a thread for each replica runs this at the same time
            return super().train_step(data)
        self._now.waiting_updates = []

        def assign_state() -> None:
            _assign(self._now.waiting_updates)
            self._now.waiting_updates.clear()

        try:
            with grouped_update(self.optimizer, self._now.update, before_update=assign_state):
                logs = super().train_step(data)
            assign_state()
        finally:
            self._now.waiting_updates = None
        return logs

    # --- files

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        return config | self.settings.config() if "input_layers" in config else config

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


def _is_functional(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    return len(args) >= 2 or (len(args) == 1 and "outputs" in kwargs) or {"inputs", "outputs"} <= kwargs.keys()


def _put_functional_under(cls: type) -> type:
    """Puts `FunctionalSNModel` in the place of `SNModel` among the bases of a user's class, as Keras does for its models."""
    if cls is SNModel:
        return FunctionalSNModel
    if issubclass(cls, SNModel) and not issubclass(cls, FunctionalSNModel):
        cls.__bases__ = tuple(_put_functional_under(base) for base in cls.__bases__)
    return cls


def _shapes(symbolic: Sequence[Any], inputs: Sequence[Any]) -> list[tuple[int | None, ...]]:
    """The shapes of inputs as far as they are known; that of the symbolic input for a missing optional one."""
    return [(None, *tensor.shape[1:]) if x is None else tuple(x.shape) for tensor, x in zip(symbolic, inputs, strict=True)]


def _assign(updates: list[tuple[keras.Variable, Any]]) -> None:
    for variable, value in updates:
        variable.assign(value)


@contextmanager
def _deep_recursion() -> Iterator[None]:
    """Keras finds a model's layers by recursion, two frames a layer; these are Python frames, which cost no C stack."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 1_000_000))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)


keras.saving.register_keras_serializable(package="keras_sn", name="SNModel")(FunctionalSNModel)
