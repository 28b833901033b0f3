"""The Keras face: `SNModel`, a `keras.Model` whose training calls run by a plan. Everything else is Keras' own code.

What is particular to graphs of layers is in `functional`, to models with their own `call()` in `subclassed`.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_sn import device, files, keras_internals
from keras_sn.batches import count_samples, first_inputs, replayed, taken, unpacked, whole_batch
from keras_sn.compiling import BackgroundCompiler
from keras_sn.differentiation import asked_here
from keras_sn.errors import PlanError
from keras_sn.layer_calls import ModelTrace
from keras_sn.log import log
from keras_sn.passes import assign_all
from keras_sn.plan import Plan
from keras_sn.planning import NOT_SETTLED, InForce, Shapes
from keras_sn.policies import Policy
from keras_sn.report import MeasuredPeak, out_of_memory_explained, plan_line
from keras_sn.settings import Settings
from keras_sn.subclassed import ChildPlanner
from keras_sn.supported import check_supported
from keras_sn.updates import GroupedUpdate, grouped_update
from keras_sn.verification import verify_first_step


class SNModel(keras.Model):
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

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first training step or `build_plan`."""
        return self._now.plan

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

    # --- the training step

    def fit(self, x: Any = None, y: Any = None, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.compiled and x is not None and self._is_planned():
            if self.run_eagerly or self.train_function is None:  # a traced step goes on with what it was traced for
                self._now.settled_for = NOT_SETTLED
            x = self._plan_or_wait(x, y, batch_size, kwargs)
            self._report_measured_peak(kwargs)
        try:
            with out_of_memory_explained(lambda: self.plan):
                return super().fit(x, y, batch_size, *args, **kwargs)
        finally:
            self._stop_waiting()

    fit.__doc__ = keras.Model.fit.__doc__

    def _plan_or_wait(self, x: Any, y: Any, batch_size: int | None, arguments: dict[str, Any]) -> Any:
        """Plans, if it is known what batches will look like; else, the first of them will tell. Returns what to train on."""
        inputs = first_inputs(x, batch_size, needs_shapes=self._needs_shapes())
        with self.distribute_strategy.scope():
            is_distributed = tf.distribute.has_strategy()
        if is_distributed:  # an iterator over replicas cannot be put back to its first batch
            x, batch = whole_batch(x, y, arguments.get("sample_weight"), batch_size) if self._needs_batch(inputs) else (x, None)
            self._plan_for_batch(inputs if batch is None else batch[0], self.distribute_strategy.num_replicas_in_sync)
            self._verify(*(batch or ()))
            return x
        if inputs is not None:
            self._plan_for_batch(inputs)
        self._now.waits_for_batch = self._needs_batch(inputs)
        return x

    def _needs_batch(self, inputs: Any) -> bool:
        return inputs is None or (self.settings.verify is not None and not self._now.is_verified)

    def _train_on_first_batch(self, iterator: Any) -> Any:
        """The first call of the training loop, in the place of `train_function`: plans for the batch that has come."""
        self._stop_waiting()
        batches = taken(iterator, self.steps_per_execution)
        x, y, sample_weight = unpacked(batches[0])
        self._plan_for_batch(x)
        self._verify(x, y, sample_weight)
        self.make_train_function()
        train: Any = self.train_function
        return train(replayed(batches, iterator))

    def _stop_waiting(self) -> None:
        if self._now.waits_for_batch:
            self.train_function, self._now.waits_for_batch = self._now.put_aside, False
            self._now.put_aside = None

    def _verify(self, *batch: Any) -> None:
        if self.settings.verify is not None and not self._now.is_verified:
            verify_first_step(self, self._now.planned.trace.calls, batch)
            self._now.is_verified = True

    @contextmanager
    def plan_set_aside(self) -> Iterator[None]:
        """Inside, the model runs as plain Keras."""
        self._now.is_aside = True
        try:
            yield
        finally:
            self._now.is_aside = False

    @contextmanager
    def regions_compiled(self, jit: bool) -> Iterator[None]:
        """Inside, regions are compiled by XLA, or none is."""
        before, self._now.region_jit = self._now.region_jit, jit
        try:
            yield
        finally:
            self._now.region_jit = before

    def _report_measured_peak(self, arguments: dict[str, Any]) -> None:
        callbacks = arguments.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), MeasuredPeak()]

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.compiled and self._is_planned():
            self._plan_for_batch(x)
            self._verify(x, y, sample_weight)
        with out_of_memory_explained(lambda: self.plan):
            return super().train_on_batch(x, y, sample_weight, *args, **kwargs)

    train_on_batch.__doc__ = keras.Model.train_on_batch.__doc__

    def make_train_function(self, force: bool = False) -> Any:
        """Keras' own; where the plan has regions they are compiled by themselves, and the step around them is not."""
        if self._now.waits_for_batch:
            self._now.put_aside, self.train_function = self.train_function, self._train_on_first_batch
            return None
        if self._now.plan is None or self._now.plan.is_plain or (self.train_function is not None and not force):
            return super().make_train_function(force)
        outer_jit, self._now.region_jit = self.jit_compile, self._wants_jit()
        # On a CPU XLA tries nothing out, and a call on zeros takes about as long as compiling it.
        compiles_ahead = self._now.region_jit and device.has_gpu()
        self._now.compiler = BackgroundCompiler() if compiles_ahead else None
        self._now.update = GroupedUpdate(self._region_weights(), jit=self._now.region_jit)
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
        with asked_here():
            return self._train_step(data)

    def _train_step(self, data: Any) -> Any:
        is_keras_own = self._now.plan is None or self._now.plan.is_plain or self.optimizer is None
        if is_keras_own or tf.distribute.has_strategy():  # there, a thread for each replica runs this at the same time
            return super().train_step(data)
        self._now.waiting_updates = []

        def assign_state() -> None:
            assign_all(self._now.waiting_updates)
            self._now.waiting_updates.clear()

        try:
            with grouped_update(self.optimizer, self._now.update, before_update=assign_state):
                logs = super().train_step(data)
            assign_state()
        finally:
            self._now.waiting_updates = None
            if self._now.compiler is not None:
                self._now.compiler.wait()
                device.reset_peak()  # of what XLA has tried out
        return logs


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
