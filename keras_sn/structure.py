"""When two regions are the same: equal layer classes and configurations (names and initial seeds aside), wiring, shapes, dtypes
and trainable flags. A layer whose configuration cannot be compared equals nothing but itself.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sn.graph import TensorSpec
from keras_sn.layer_calls import PlacedArguments, TracedCall, variables_of, variables_of_call

_PLAIN = (str, int, float, bool, type(None))
_BOOKKEEPING = {"name", "_name", "path", "_path", "_auto_config", "_inbound_nodes", "_outbound_nodes", "_parent_path"}
"""Attributes of a layer that differ between equal layers and do not change what it computes."""


class Incomparable(Exception):
    """Nothing can be said about an attribute or argument, so its layer is never shared."""


def structure_of(
    calls: Sequence[TracedCall], inputs: Sequence[TensorSpec], outputs: Sequence[str], in_turn: Iterable[str] = ()
) -> Any:
    """A hashable value that is equal for regions that may share their functions, or None if this one may not.

    Args:
        calls: The region's layer calls.
        inputs: The specifications of its input tensors.
        outputs: The names of the tensors that it returns.
        in_turn: The names of those that its calls read in turn.
    """
    index = {spec.name: place for place, spec in enumerate(inputs)}
    layers: dict[int, int] = {}
    rows = []
    try:
        for call in calls:
            is_first = id(call.operation) not in layers
            place = layers.setdefault(id(call.operation), len(layers))
            rows.append((place, _operation(call.operation) if is_first else None, _arguments(call, index), call.training))
            for name in call.outputs:
                index[name] = len(index)
    except Incomparable:
        return None
    shapes = tuple((spec.shape[1:], spec.dtype, len(spec.shape)) for spec in inputs)
    places = tuple(index[name] for name in outputs), tuple(sorted(index[name] for name in in_turn))
    return tuple(rows), shapes, places, _variable_sharing(calls)


def _variable_sharing(calls: Sequence[TracedCall]) -> tuple[int, ...]:
    """Which variables of the calls are one and the same."""
    places: dict[int, int] = {}
    variables = (v for call in calls for v in variables_of_call(call))
    return tuple(places.setdefault(id(variable), len(places)) for variable in variables)


def _operation(operation: Any) -> tuple:
    is_built_in = type(operation).__module__.startswith(("keras.", "keras_sn."))
    if not isinstance(operation, keras.Layer):
        return type(operation), _attributes(operation)
    if isinstance(operation, (keras.layers.Lambda, keras.Model)):
        raise Incomparable  # their configuration holds code, or layers with names inside
    weights = tuple((tuple(v.shape), str(v.dtype), v.trainable) for v in variables_of(operation))
    own = () if is_built_in else _attributes(operation)
    return type(operation), _config(operation, keep_seeds=not is_built_in), weights, operation.trainable, own


def _config(layer: Any, *, keep_seeds: bool) -> str:
    try:
        config = layer.get_config()
        plain = keras.saving.serialize_keras_object(config)
        return json.dumps(_without_names(plain, keep_seeds, is_layer=True), sort_keys=True)
    except (TypeError, ValueError, NotImplementedError, AttributeError) as error:
        raise Incomparable from error


def _without_names(config: Any, keep_seeds: bool, *, is_layer: bool = False) -> Any:
    """The configuration without the names of layers and, for layers that draw through a seed state, without seeds."""
    if isinstance(config, dict):
        dropped = ({"name"} if is_layer else set()) | {"build_config", "shared_object_id"} | (set() if keep_seeds else {"seed"})
        inside_layer = config.get("module") == "keras.layers"
        return {
            key: _without_names(value, keep_seeds, is_layer=inside_layer and key == "config")
            for key, value in config.items()
            if key not in dropped
        }
    if isinstance(config, (list, tuple)):
        return [_without_names(value, keep_seeds) for value in config]
    return config


def _attributes(operation: Any) -> tuple:
    """The attributes of an operation or of a user's layer, since its configuration may leave some out."""
    rows = []
    for key, value in sorted(vars(operation).items()):
        is_of_every_layer = isinstance(operation, keras.Layer) and key in _LAYER_ATTRIBUTES
        if key in _BOOKKEEPING or is_of_every_layer or key.startswith("_self_"):  # `_self_`: TensorFlow's checkpointing
            continue
        rows.append((key, _comparable(value)))
    return tuple(rows)


def _comparable(value: Any) -> Any:
    if isinstance(value, _PLAIN):
        return type(value).__name__, value
    if isinstance(value, (list, tuple)):
        return tuple(_comparable(one) for one in value)
    if isinstance(value, dict):
        return tuple((str(key), _comparable(one)) for key, one in value.items())
    if isinstance(value, (np.ndarray, np.generic)):
        return value.shape, str(value.dtype), value.tobytes()
    if isinstance(value, keras.Variable):
        return "variable", tuple(value.shape), str(value.dtype), value.trainable
    if isinstance(value, keras.random.SeedGenerator):
        return ("seed generator",)
    if isinstance(value, keras.Layer):
        return _operation(value)
    raise Incomparable


def _arguments(call: TracedCall, index: dict[str, int]) -> tuple:
    """The call's arguments: the place of each tensor, and the values of the rest."""
    places = {key: index[name] for key, name in call.bindings}
    flat = keras.tree.flatten((call.arguments.args, call.arguments.kwargs))
    structure = repr(keras.tree.map_structure(lambda _: None, (call.arguments.args, call.arguments.kwargs)))
    if isinstance(call.arguments, PlacedArguments):
        return tuple(places.values()), structure
    rows = [("tensor", places[id(one)]) if id(one) in places else _comparable(_plain_dtype(one)) for one in flat]
    return tuple(rows), structure


def _plain_dtype(value: Any) -> Any:
    return [("slice", value.start, value.stop, value.step)] if isinstance(value, slice) else value


_LAYER_ATTRIBUTES = frozenset(vars(keras.layers.Identity(name="keras_sn_probe"))) | {
    "_build_shapes_dict",
    "_lock",
    "built",
}
"""What every Keras layer has; the configuration and the variables speak for it."""
