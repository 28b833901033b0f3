"""`verify="first_step"`: the first training step both ways, by plain Keras and by the plan, before anything is changed.

For users' own layers: one that does something else each time it runs cannot be recomputed, and nothing but running it shows that.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.children import watched
from keras_sn.cost import LOW_PRECISION
from keras_sn.errors import UnsupportedModelError, VerificationError
from keras_sn.layer_calls import CallNames, TracedCall, variables_of
from keras_sn.log import log
from keras_sn.passes import assign_all
from keras_sn.region_library import autocast_dtype_of

TOLERANCE = 2e-3
"""Of the largest value of an array. XLA, graph rewriting and TF32 round; half precision rounds more."""
HALF_TOLERANCE = 5e-2

Figures = dict[str, np.ndarray | None]
"""What one training step computes, in words -> as an array; None for a gradient that there is not."""


def verify_first_step(model: Any, calls: Sequence[TracedCall], batch: tuple[Any, Any, Any]) -> None:
    """Compares one training step by the plan with plain Keras', on the same batch and from the same seeds.

    Args:
        model: An `SNModel`, compiled, its plan in force. It is left as it was.
        calls: Its layer calls, if it is a graph of layers.
        batch: `(x, y, sample_weight)`.

    Raises:
        UnsupportedModelError: It is called in the scope of a `tf.distribute` strategy.
        VerificationError: The loss, an output, a gradient or a new state differs; the message names the first layer that does.
    """
    if model.plan is None or model.plan.is_plain:
        return
    if tf.distribute.has_strategy():
        raise UnsupportedModelError(
            "`verify` runs a step without replicas, which the scope of a `tf.distribute` strategy does not allow. Make and "
            "compile the model in the scope, and call `fit` after it. "
            f"Received: {type(tf.distribute.get_strategy()).__name__}"
        )
    jit = bool(model.jit_compile) and not model.run_eagerly  # as plain Keras has it: XLA draws other random numbers
    with model.plan_set_aside():
        plain = _figures(model, batch, jit)
    with model.regions_compiled(jit):
        planned = _figures(model, batch, False)
    is_half = any(keras.backend.standardize_dtype(layer.compute_dtype) in LOW_PRECISION for layer in model.layers)
    tolerance = HALF_TOLERANCE if is_half else TOLERANCE
    wrong = next((what for what in plain if not _are_near(planned[what], plain[what], tolerance)), None)
    if wrong is None:
        log.info("verified: the first training step by the plan equals plain Keras' (loss %.6g)", float(plain["loss"]))
        return
    x = batch[0]
    unsteady = _first_unsteady(model, calls, x, tolerance) if calls else _first_unsteady_child(model, x, tolerance)
    place = f", at layer {unsteady!r}, which gives other outputs each time it runs" if unsteady else ""
    raise VerificationError(
        f"By the plan, the {wrong} of the first training step differs from plain Keras'{place}. What a layer remembers in Python "
        "(counters, tensors) cannot be recomputed: make it a `keras.Variable` of the layer, or keep the layer by a dict policy. "
        f"Received: model {model.name!r} with policy {model.plan.policy!r}"
    )


def _figures(model: Any, batch: tuple[Any, Any, Any], jit: bool) -> Figures:
    x, y, sample_weight = batch

    def run() -> tuple[Any, list[Any], list[Any]]:
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = model.compute_loss(x=x, y=y, y_pred=outputs, sample_weight=sample_weight, training=True)
        return loss, keras.tree.flatten(outputs), tape.gradient(loss, model.trainable_variables)

    with _restored(_state(model)):
        loss, outputs, gradients = run() if model.run_eagerly else tf.function(run, autograph=False, jit_compile=jit)()
        pairs = zip(model.trainable_variables, gradients, strict=True)
        return {
            "loss": _array(loss),
            **{f"output {place}": _array(one) for place, one in enumerate(outputs)},
            **{f"new value of {v.path!r}": _array(v.value) for v in model.non_trainable_variables},
            # The last layers come first: a gradient is wrong in all layers below the one that is to blame.
            **{f"gradient of {v.path!r}": g if g is None else _array(g) for v, g in reversed(list(pairs))},
        }


def _state(layer: Any) -> list[keras.Variable]:
    """All that a training call of a layer or model may change."""
    return [*variables_of(layer), keras_internals.global_seed_state()]


@contextmanager
def _restored(variables: Sequence[keras.Variable]) -> Iterator[None]:
    """Gives the variables back their values."""
    values = [tf.identity(tf.convert_to_tensor(variable.value)) for variable in variables]
    try:
        yield
    finally:
        assign_all(zip(variables, values, strict=True))


def _array(value: Any) -> np.ndarray:
    array = np.asarray(tf.convert_to_tensor(value))  # of the rows of an embedding, too
    return array if array.dtype.kind in "biu" else array.astype("float64")


def _are_near(ours: np.ndarray | None, theirs: np.ndarray | None, tolerance: float) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    scale = np.abs(theirs, where=np.isfinite(theirs), out=np.zeros_like(theirs)).max(initial=0)
    return bool(np.allclose(ours, theirs, rtol=0, atol=tolerance * max(1e-6, float(scale)), equal_nan=True))


def _first_unsteady(model: Any, calls: Sequence[TracedCall], x: Any, tolerance: float) -> str | None:
    """The first layer call that gives other outputs when it runs again on the same inputs, states and seeds."""
    tensors = dict(zip((spec.name for spec in model.inputs), keras_internals.standardize_inputs(model, x), strict=True))
    for call in calls:
        found = []
        for _ in range(3):
            with keras.StatelessScope(), keras_internals.call_context(autocast_dtype_of(model)):
                found.append(call.run(tensors))
        if not _are_steady(found, tolerance):
            return call.name
        tensors |= dict(zip(call.outputs, found[0], strict=True))
    return None


def _first_unsteady_child(model: Any, x: Any, tolerance: float) -> str | None:
    """The same for a model with its own `call()`: the first call of a child layer."""
    unsteady, name_of = [], CallNames()

    def handle(layer: Any, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        name, found = name_of(layer.name), []
        for _ in range(3):
            with _restored(_state(layer)):
                found.append(original(*args, **kwargs))
        if not _are_steady([keras.tree.flatten(one) for one in found], tolerance):
            unsteady.append(name)
        return found[0]

    with model.plan_set_aside(), _restored(_state(model)), watched(model.layers, handle):
        model(x, training=True)
    return next(iter(unsteady), None)


def _are_steady(found: Sequence[Sequence[Any]], tolerance: float) -> bool:
    return all(_are_near(_array(b), _array(a), tolerance) for again in found for a, b in zip(found[0], again, strict=True))
