"""The Keras face: `SNModel`, a `keras.Model` whose training calls run by a plan. Everything else is Keras' own code."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any

import keras
import tensorflow as tf

from keras_sn import device, keras_internals
from keras_sn.batches import count_samples, first_batch_size
from keras_sn.errors import PlanError, UnsupportedModelError
from keras_sn.graph import DTYPE_BYTES
from keras_sn.log import log
from keras_sn.plan import Plan
from keras_sn.planner import make_plan
from keras_sn.policies import Policy
from keras_sn.report import MeasuredPeak, plan_line
from keras_sn.runtime import PlanExecutor
from keras_sn.settings import MARGIN, Settings
from keras_sn.trace import check_supported, trace
from keras_sn.updates import GroupedUpdate, grouped_update

_OWN_METHODS = ("train_step", "compute_loss", "compute_metrics", "test_step", "predict_step", "fit")


@dataclass
class _InForce:
    """What a model has planned. One object, because Keras tracks the lists and variables among a model's own attributes."""

    plans: dict[int, Plan] = field(default_factory=dict)
    """By batch size."""
    plan: Plan | None = None
    executor: PlanExecutor | None = None
    executor_key: Any = None
    region_jit: bool | None = None
    """Whether the regions are compiled by XLA; None before there is a train function."""
    update: GroupedUpdate | None = None
    waiting_updates: list[tuple[keras.Variable, Any]] | None = None
    """State updates of the training step that is being traced or run; None outside one."""


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
        policy: `"auto"` (the first that fits of plain Keras, recomputation, recomputation and offload), `"recompute"`,
            `"offload"`, `"superneurons"`, `"none"`, or a dict from patterns of layer names to `"keep"`, `"recompute"` or
            `"offload"`.

    Raises:
        BudgetError: A budget is not a size.
        PlanError: The policy is unknown.
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
    ) -> "SNModel":
        """Makes an `SNModel` of an existing functional or Sequential model. The two share layers and weights.

        Args:
            model: The existing model, built. If it is compiled, compile the new one again.
            memory_budget: See the class.
            host_budget: See the class.
            policy: See the class.

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
        settings = {"memory_budget": memory_budget, "host_budget": host_budget, "policy": policy}
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
        **kwargs: Any,
    ):
        settings = Settings(memory_budget, host_budget, "auto" if policy is None else policy)
        with _deep_recursion():
            keras_internals.Functional.__init__(self, *args, **kwargs)
        if settings == Settings():
            settings = _settings_of_clone(self.outputs)
        self.settings = settings
        self._now = _InForce()

    # --- planning

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first training step or `build_plan`."""
        return self._now.plan

    def build_plan(self, batch_size: int) -> Plan:
        """Plans the training step for a batch size, and puts the plan in force. `fit` does this by itself.

        Args:
            batch_size: Samples in a batch (of one replica under `tf.distribute`).

        Returns:
            The plan.

        Raises:
            BudgetError: No plan fits.
            PlanError: The policy names an unknown layer.
            UnsupportedModelError: A layer or tensor cannot be planned.
        """
        if self.compiled and self.optimizer is not None:
            with self.distribute_strategy.scope():
                keras_internals.build_optimizer(self.optimizer, self.trainable_variables)
        if batch_size not in self._now.plans:
            traced, budget_bytes = trace(self, batch_size), self.settings.budget_bytes()
            self._now.plans[batch_size] = make_plan(
                traced.graph,
                self.settings.policy,
                batch_size=batch_size,
                reserved_bytes=self._reserved_bytes(),
                budget_bytes=budget_bytes,
                margin=MARGIN,
                host_budget_bytes=self.settings.host_budget_bytes(),
                cost_model=device.cost_model(),
                compiled=self._wants_jit(),
            )
        plan = self._now.plans[batch_size]
        if plan is not self._now.plan:
            self._now.plan, self._now.executor, self.train_function = plan, None, None
            log.info(plan_line(plan))
        return plan

    def _reserved_bytes(self) -> int:
        """Weights, state and optimizer slots, in bytes."""
        optimizer = self.optimizer.variables if self.compiled and self.optimizer is not None else []
        return _nbytes([*self.variables, *optimizer])

    def _planned_for(self, batch_size: int | None) -> Plan:
        """The plan in force, or a new one for a batch larger than it was made for."""
        if batch_size is None and self._now.plan is None:
            raise PlanError(
                "The batch size is not known, so no plan can be made. Call `model.build_plan(batch_size=...)` before "
                "the training loop, or give the data a fixed batch size. Received: a batch axis of unknown size"
            )
        if self._now.plan is None or (batch_size is not None and batch_size > self._now.plan.batch_size):
            return self.build_plan(batch_size)
        return self._now.plan

    def _executor_in_force(self) -> PlanExecutor:
        """The executor of the plan; a new one after anything changed that it depends on."""
        autocast_dtype = self.compute_dtype if self.compute_dtype != self.variable_dtype else None
        jit = self._now.region_jit if self._now.region_jit is not None else self._wants_jit()
        key = (id(self._now.plan), jit, autocast_dtype, tuple(id(v) for v in self.trainable_variables))
        if self._now.executor is None or key != self._now.executor_key:
            traced = trace(self, self._now.plan.batch_size)
            self._now.executor = PlanExecutor(traced, self._now.plan, jit=jit, autocast_dtype=autocast_dtype)
            self._now.executor_key = key
        return self._now.executor

    # --- the forward pass

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        if not self._runs_by_plan(inputs, training):
            return super().call(inputs, training=training, mask=mask, **kwargs)
        flat = keras_internals.standardize_inputs(self, inputs)
        for x, its_mask in zip(flat, [None] * len(flat) if mask is None else keras.tree.flatten(mask), strict=True):
            if its_mask is not None:
                keras_internals.set_mask(x, its_mask)
        if self._planned_for(flat[0].shape[0]).is_plain:
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
            x, size = first_batch_size(x, batch_size)
            self._planned_for(-(-size // self.distribute_strategy.num_replicas_in_sync))
            self._report_measured_peak(kwargs)
        return super().fit(x, y, batch_size, *args, **kwargs)

    fit.__doc__ = keras.Model.fit.__doc__

    def _report_measured_peak(self, arguments: dict[str, Any]) -> None:
        callbacks = arguments.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), MeasuredPeak()]

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.compiled:
            self._planned_for(count_samples(x))
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


def _nbytes(variables: list[keras.Variable]) -> int:
    return sum(prod(v.shape) * DTYPE_BYTES[keras.backend.standardize_dtype(v.dtype)] for v in variables)


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
