"""`from_tf_keras`: a Keras 2 model (package `tf_keras`) as an `SNModel`, with its weights and its optimizer."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sn.errors import KerasSNError
from keras_sn.legacy_config import described, keras3_name, refusal
from keras_sn.legacy_graph import Conversion, calls_of, fill, keras3_arguments
from keras_sn.legacy_training import compile_like
from keras_sn.model import SNModel
from keras_sn.policies import Policy

_OWN_METHODS = ("call", "compile", "train_step", "compute_loss", "compute_metrics", "test_step", "predict_step", "fit")
_TOLERANCE, _SHORT_TOLERANCE = 1e-4, {"float16": 2e-2, "bfloat16": 5e-2}
"""How far outputs may be apart, relative to the largest one: Keras 2 and Keras 3 may add up in another order. The second is for
models that compute in these dtypes."""
_OPEN_AXIS = 32
"""Stands for an axis of unknown length. A network for images halves them up to five times."""


def from_tf_keras(
    model: Any,
    memory_budget: int | str | None = None,
    host_budget: int | str | None = None,
    policy: Policy = "auto",
    custom_objects: Mapping[str, Any] | None = None,
) -> SNModel:
    """Makes an `SNModel` of a functional or Sequential Keras 2 model, with its weights; the Keras 2 model is left as it is.

    If it is compiled, so is the new one, with equal optimizer, loss and metrics; the optimizer goes on where it was. Both models
    must agree on a random input. Slashes in layer names become underscores, since Keras 3 does not allow them.

    ```python
    model = keras_sn.from_tf_keras(tf_keras.models.load_model("old.h5"), memory_budget="12GiB")
    ```

    Args:
        model: The `tf_keras` model, built.
        memory_budget: See `SNModel`.
        host_budget: See `SNModel`.
        policy: See `SNModel`.
        custom_objects: Names of Keras 2 classes and functions of your own (layers, losses, metrics, ...) -> their Keras 3
            counterparts. A layer is made by its class's `from_config()`, and must have the same weights in the same order.

    Returns:
        The new model.

    Raises:
        KerasSNError: `tf_keras` is not installed.
        UnsupportedModelError: The model, or a part of it that the message names, cannot be brought over.
        BudgetError: A budget is not a size.
        PlanError: The policy is unknown.
    """
    _check_model(model)
    objects = dict(custom_objects or {})
    settings = {"memory_budget": memory_budget, "host_budget": host_budget, "policy": policy}
    with keras.saving.custom_object_scope(objects):
        return _converted(model, objects, settings)


def _converted(model: Any, custom_objects: Mapping[str, Any], settings: Mapping[str, Any]) -> SNModel:
    conversion = Conversion(custom_objects)
    inputs, outputs = conversion.graph(model)
    converted = SNModel(inputs, outputs, name=keras3_name(model.name), **settings)
    converted.dtype_policy = keras.DTypePolicy(model.dtype_policy.name)
    conversion.models.insert(0, (model, converted))
    weights = conversion.bring_weights()
    with _exact_matrices():
        _check_outputs(model, converted, conversion)
    compile_like(model, converted, weights, custom_objects)
    return converted


def _check_model(model: Any) -> None:
    if isinstance(model, keras.Model):
        raise refusal("This is a Keras 3 model already. Call `keras_sn.SNModel.from_model(model)`.", repr(model))
    try:
        import tf_keras
    except ImportError as error:
        raise KerasSNError(
            f"Keras 2 models need the package tf_keras. Install it: `pip install 'keras-sn[legacy]'`. Received: {model!r}"
        ) from error
    if not isinstance(model, tf_keras.Model):
        raise refusal("`model` must be a functional or Sequential model of the package tf_keras.", repr(model))
    for name in _OWN_METHODS:
        if getattr(type(model), name).__module__.partition(".")[0] != "tf_keras":
            raise refusal(
                f"Class {type(model).__name__} has its own `{name}()`, which cannot be brought over. Build the model with "
                "`tf_keras.Model(inputs, outputs)`, or write the class for Keras 3 and derive it from `keras_sn.SNModel`.",
                repr(model),
            )
    if not model.outputs:
        raise refusal(
            f"Model {model.name!r} is not a built graph of layers. Call it on one batch, or `model.build(input_shape)`, first.",
            repr(model),
        )


# --- the comparison


@contextmanager
def _exact_matrices() -> Iterator[None]:
    """Without TF32, which rounds to 10 bits, so that the same layer by two kernels would seem to be two layers."""
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    tf.config.experimental.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)


def _check_outputs(model: Any, converted: keras.Model, conversion: Conversion) -> None:
    """Raises `UnsupportedModelError`, with the first layer whose outputs differ, unless both models agree on a random input."""
    inputs = _random_inputs(model)
    structured = fill(model.input, {id(tensor): value for tensor, value in zip(model.inputs, inputs, strict=True)})
    try:
        before = tf.nest.flatten(model(structured, training=False))
        with tf.GradientTape() as tape:
            after = keras.tree.flatten(converted(structured, training=False))
    except Exception as error:  # a class of the user's may raise anything
        shapes = [(tuple(one.shape), one.dtype.name) for one in inputs]
        sentence = f"The models cannot be compared, since a random input makes one of them fail ({error})."
        raise refusal(f"{sentence} Make the Keras 2 model accept random numbers of these shapes.", f"inputs {shapes}") from error
    tolerance = max((_SHORT_TOLERANCE.get(layer.compute_dtype, _TOLERANCE) for _, layer, _ in conversion.layers), default=0.0)
    if _gap(before, after, tolerance):
        path, layer, gap = _first_difference(model, conversion, inputs, inputs, tolerance) or (model.name, model, "")
        raise refusal(
            f"Layer {path!r} gives other outputs in Keras 3 than in Keras 2{gap}. Replace it by a layer that does not, or name a "
            f"Keras 3 class that computes the same: `custom_objects={{{type(layer).__name__!r}: YourLayer}}`.",
            described(layer),
        )
    _check_added_losses(model, converted)
    own = {id(variable.value) for variable in converted.variables}
    for variable in tape.watched_variables():
        if id(variable) not in own:
            raise refusal(
                f"The model reads variable {variable.name!r} outside the layer that owns it, so the new model would not train "
                "it. Read it in `call()` of a layer of your own (for tied weights: that has both uses).",
                f"a Lambda layer or TensorFlow function that reads {variable.name!r}",
            )


def _check_added_losses(model: Any, converted: keras.Model) -> None:
    before, after = (float(sum(tf.reduce_sum(tf.cast(loss, "float32")) for loss in one.losses)) for one in (model, converted))
    if not np.isclose(before, after, rtol=1e-3, atol=1e-6):
        raise refusal(
            "The losses that layers add (regularizers, `add_loss`) differ. Give regularizers to the layers themselves, and add "
            "losses in `call()` of a layer, not with `model.add_loss()`.",
            f"{before:g} in Keras 2, {after:g} in Keras 3",
        )


def _random_inputs(model: Any) -> list[tf.Tensor]:
    """A small batch; with an embedding anywhere all inputs are small integers that each can look up, 0 being padding."""
    import tf_keras

    generator = np.random.default_rng(0)
    sizes = [layer.input_dim for layer in model.submodules if isinstance(layer, tf_keras.layers.Embedding)]
    sizes += [layer.num_tokens for layer in model.submodules if isinstance(layer, tf_keras.layers.CategoryEncoding)]
    values = []
    for tensor in model.inputs:
        shape = [(2 if place == 0 else _OPEN_AXIS) if size is None else size for place, size in enumerate(tensor.shape)]
        if sizes or not tensor.dtype.is_floating:
            value = generator.integers(0, 2 if tensor.dtype == tf.bool else min(8, *sizes, 8), shape)
        else:
            value = generator.normal(size=shape)
            value[:1, -1:] *= len(shape) < 3  # the end of a sequence, as padding for `Masking`
        values.append(tf.cast(tf.constant(value), tensor.dtype))
    return values


def _gap(before: Sequence[Any], after: Sequence[Any], tolerance: float) -> str:
    """How much flat outputs differ, as text for an error; empty if they agree."""
    for old, new in zip(before, after, strict=True):
        a, b = keras.ops.convert_to_numpy(old), keras.ops.convert_to_numpy(new)
        if a.shape != b.shape:
            return f": they have the shapes {a.shape} and {b.shape}"
        if not old.dtype.is_floating:
            if not np.array_equal(a, b):
                return ": they are not the same integers"
            continue
        a, b = a.astype("float64"), b.astype("float64")
        largest = max(np.abs(a[np.isfinite(a)]).max(initial=0), 1e-3)
        if not np.allclose(a, b, rtol=0, atol=tolerance * largest, equal_nan=True):
            return f": they are up to {np.nanmax(np.abs(a - b)):.2g} apart, and up to {largest:.2g} large"
    return ""


def _first_difference(
    model: Any, conversion: Conversion, before: Sequence[Any], after: Sequence[Any], tolerance: float, path: str = ""
) -> tuple[str, Any, str] | None:
    """Runs both models layer by layer, each on its own values; the first layer that differs, and by how much."""
    olds = {id(tensor): value for tensor, value in zip(model.inputs, before, strict=True)}
    news = {id(tensor): value for tensor, value in zip(model.inputs, after, strict=True)}
    for call in calls_of(model):
        args, kwargs = call.on(olds)
        old = tf.nest.flatten(call.layer(*args, **kwargs))
        operation, name = conversion.made[id(call.layer)], path + call.layer.name
        new_args, new_kwargs = keras3_arguments(call, operation, name, *call.on(news))
        new = keras.tree.flatten(operation(*new_args, **new_kwargs))
        if gap := _gap(old, new, tolerance):
            inner = None
            if isinstance(operation, keras.Model):
                flat = tf.nest.flatten(args[0]), tf.nest.flatten(new_args[0])
                inner = _first_difference(call.layer, conversion, *flat, tolerance, f"{name}/")
            return inner or (name, call.layer, gap)
        olds.update(zip(map(id, call.outputs), old, strict=True))
        news.update(zip(map(id, call.outputs), new, strict=True))
    return None
