"""The plans that a model has made, by what they depend on, and the one in force."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sn import device, keras_internals
from keras_sn.compiling import BackgroundCompiler
from keras_sn.errors import BudgetError
from keras_sn.graph import DTYPE_BYTES, LayerGraph
from keras_sn.layer_calls import ModelTrace, variables_of
from keras_sn.plan import Plan
from keras_sn.planner import adopt_plan, make_plan
from keras_sn.settings import MARGIN, PIECES, Settings
from keras_sn.updates import GroupedUpdate, is_shareable, needs_all_gradients

Shapes = tuple[tuple[int, ...], ...]
"""The full shape of each input of a model."""

NOT_SETTLED = object()


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan with the trace that it was made from."""

    plan: Plan
    trace: ModelTrace
    shapes: Shapes
    weights: tuple[int, ...] = ()
    """The ids of the trainable variables."""

    def runs_like(self, other: "Planned | None") -> bool:
        """Whether what runs the other plan can run this one: it has the same regions of the same layers."""
        if other is None:
            return False
        if self.plan.is_plain and other.plan.is_plain:
            return True  # Keras' own step goes on with what it was traced for
        if self.weights != other.weights:
            return False
        return _instructions(self.plan) == _instructions(other.plan)

    def trains(self, variables: Sequence[keras.Variable]) -> bool:
        """Whether the plan was made for a model in which these variables train."""
        return self.weights == tuple(map(id, variables))

    def covers(self, shapes: Sequence[Sequence[int | None]]) -> bool:
        """Whether batches of these shapes need no more memory than those that the plan was made for; None is not known."""
        return len(shapes) == len(self.shapes) and all(
            size is None or size <= most
            for shape, planned in zip(shapes, self.shapes, strict=True)
            for size, most in zip(shape, planned, strict=False)
        )


@dataclass
class InForce:
    """What a model has planned. One object, because Keras tracks the lists and variables among a model's own attributes."""

    plans: dict[Any, Planned] = field(default_factory=dict)
    """By all that a plan depends on: shapes, reserved bytes, XLA, which weights train."""
    planned: Planned | None = None
    settled_for: Any = NOT_SETTLED
    """The compilation of the model for which the plan stands. After another `compile()`, and when `fit()` begins, it must be
    asked again whether it does, which takes a look at all variables."""
    executor: Any = None
    """What runs the plan: a `PlanExecutor`, or `ChildRegions` for a model with its own `call()`."""
    executor_key: Any = None
    region_jit: bool | None = None
    """Whether the regions are compiled by XLA; None before there is a train function."""
    update: GroupedUpdate | None = None
    compiler: BackgroundCompiler | None = None
    """Of regions that XLA compiles by themselves."""
    is_aside: bool = False
    """Whether the model runs as plain Keras for now, to be compared with."""
    is_verified: bool = False
    put_aside: Any = None
    """The train function, while one is in its place that waits for the first batch, to plan for it or to verify it."""
    has_masks: bool = False
    """Whether masks have come with the inputs."""
    waiting_updates: list[tuple[keras.Variable, Any]] | None = None
    """State updates of the training step that is being traced or run; None outside one."""

    @property
    def plan(self) -> Plan | None:
        return self.planned.plan if self.planned else None

    def plan_for(
        self, model: Any, settings: Settings, shapes: Shapes, make_trace: Callable[[], ModelTrace], *, compiled: bool
    ) -> Planned:
        """The plan for batches of these shapes; made if it is the first of its kind."""
        reserved = _reserved(model)
        reserved_bytes = sum(prod(v.shape) * DTYPE_BYTES[keras.backend.standardize_dtype(v.dtype)] for v in reserved)
        weights = tuple(map(id, model.trainable_variables))
        early = _may_update_early(model)
        key = (shapes, reserved_bytes, compiled, weights, early)
        if key not in self.plans:
            traced = make_trace()
            graph = replace(traced.graph, updates_in_backward=early and not _shares_weights(traced))
            plan = _plan(graph, settings, reserved_bytes, compiled, len(reserved))
            self.plans[key] = Planned(plan, traced, shapes, weights)
        return self.plans[key]

    @contextmanager
    def changed(self, **values: Any) -> Iterator[None]:
        """Inside, some of what is noted here has other values."""
        before = {name: getattr(self, name) for name in values}
        vars(self).update(values)
        try:
            yield
        finally:
            vars(self).update(before)

    def executor_for(self, make: Callable[[], Any], *key: Any) -> Any:
        """The executor of the plan in force; a new one after anything changed that it depends on."""
        if self.executor is None or self.executor_key != key:
            self.executor, self.executor_key = make(), key
        return self.executor


def _instructions(plan: Plan) -> tuple:
    """What a plan tells the runtime to do, without what it says to those who read it."""
    regions = [(one.layers, one.recompute, [(s.tensor, s.tier, s.prefetch_at) for s in one.saved]) for one in plan.regions]
    return regions, plan.copy_window, plan.compiled


def _plan(graph: LayerGraph, settings: Settings, reserved_bytes: int, compiled: bool, variables: int) -> Plan:
    batch_size = next((graph.tensors[name].shape[0] for name in graph.inputs if graph.tensors[name].shape), 1)
    common: dict[str, Any] = {
        "batch_size": batch_size,
        "reserved_bytes": reserved_bytes,
        "compiled": compiled,
        "variables": variables,
    }
    if settings.plan is not None:
        return adopt_plan(graph, settings.plan, budget_bytes=settings.budget_bytes(), cost_model=device.cost_model(), **common)
    common |= {"budget_bytes": settings.budget_bytes(), "host_budget_bytes": settings.host_budget_bytes()}
    make = partial(make_plan, graph, cost_model=device.cost_model(), **common)
    margin = _margin_for_pieces(common["budget_bytes"]) if settings.policy == "auto" else MARGIN
    if margin > MARGIN and make("none").plain_peak_bytes > (1 - MARGIN) * common["budget_bytes"]:
        with suppress(BudgetError):  # then it may still go well
            return make("auto", margin=margin)
    return make(settings.policy, margin=MARGIN)


def _margin_for_pieces(budget_bytes: int | None) -> float:
    """The share of a budget that plans with regions leave free, because the device's memory is given out in pieces."""
    undivided_bytes = device.undivided_bytes()
    return 0.0 if not budget_bytes or undivided_bytes is None else 1 - undivided_bytes / (PIECES * budget_bytes)


def _may_update_early(model: Any) -> bool:
    """Whether a training step updates weights as soon as their own gradients exist."""
    is_own_step = type(model).train_step.__module__ == "keras_sn.training"  # not a user's, who may hold all gradients
    if not is_own_step or not model.compiled or model.optimizer is None or model.run_eagerly:
        return False
    if tf.distribute.has_strategy() or needs_all_gradients(model.optimizer):
        return False
    return is_shareable(model.optimizer, model.trainable_variables)


def _shares_weights(traced: ModelTrace) -> bool:
    """Whether several layer calls use the same weights, whose gradients wait for the last of them."""
    weights = [id(variable) for call in traced.calls for variable in variables_of(call.operation) if variable.trainable]
    return len(set(weights)) < len(weights)


def _reserved(model: Any) -> list[Any]:
    """Weights, state and all that the optimizer keeps (slots, averages, accumulated gradients, loss scale)."""
    optimizer = model.optimizer.variables if model.compiled and model.optimizer is not None else []
    return list({id(variable): variable for variable in [*model.variables, *optimizer]}.values())


def has_open_axes(model: Any) -> bool:
    """Whether inputs leave axes other than the first open, so that only a batch tells their sizes."""
    return any(None in tensor.shape[1:] for tensor in keras_internals.functional_part(model).inputs)


def input_shapes(model: Any, batch_size: int, inputs: Any = None) -> Shapes:
    """The full shapes of a model's inputs.

    Args:
        model: The model.
        batch_size: Samples in a batch.
        inputs: The inputs of a batch, for axes that the model leaves open.
    """
    shapes = [tuple(tensor.shape) for tensor in keras_internals.functional_part(model).inputs]
    if inputs is not None and has_open_axes(model):
        given = keras_internals.standardize_inputs(model, keras.tree.map_structure(_one_sample, inputs))
        shapes = [shape if x is None else tuple(x.shape) for shape, x in zip(shapes, given, strict=True)]
    return tuple((batch_size, *shape[1:]) if shape else shape for shape in shapes)


def _one_sample(leaf: Any) -> Any:
    """One sample of an array, or of what a specification stands for: its axes after the first are the batch's."""
    if isinstance(leaf, tf.TypeSpec):
        return np.zeros((1, *leaf.shape[1:]), leaf.dtype.as_numpy_dtype)
    return leaf[:1] if hasattr(leaf, "shape") else leaf
