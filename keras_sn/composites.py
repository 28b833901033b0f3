"""Composite layers, opened: one whose `call` calls child layers and `keras.ops` becomes those calls, so that plans can cut it.

Its `call` is run once on symbolic tensors, as code that builds a functional model is, and the calls that it makes are noted. They
take its place only if that is sure to change nothing: the layer and those calls are traced, and must ask for the same TensorFlow
operations and the same calls of layers in the same order. Any other layer stays whole. Nothing is computed or changed.
"""

import functools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.equivalence import compute_the_same
from keras_sn.layer_calls import variables_of, variables_of_call
from keras_sn.log import log
from keras_sn.rules import has_rule_of_user
from keras_sn.symbolic_calls import SymbolicCall, calls_noted, computed_by_call, number

_ATTENTION = (keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
"""Built-in layers that are opened like a user's, and so are those that derive from them."""
_PLAIN = (str, int, float, bool, type(None), type(...), slice, tf.DType, np.dtype, np.generic)


class _StaysWhole(Exception):
    """Why a layer is not opened."""


@dataclass(frozen=True, eq=False)
class Opened:
    """The calls inside a composite layer's call."""

    calls: list[SymbolicCall]
    outputs: list[Any]
    """Symbolic tensors, flat."""


def may_be_opened(layer: Any) -> bool:
    """A first look: whether it is attention or a user's layer, with layers inside, and only its `call` says what it computes."""
    if not isinstance(layer, keras.Layer):
        return False
    return (
        (_is_plain_attention(layer) if isinstance(layer, _ATTENTION) else _is_of_user(layer))
        and len(keras_internals.sublayers(layer)) > 1
        and type(layer).compute_mask is keras.Layer.compute_mask
        and not may_make_masks(layer)
        and layer.activity_regularizer is None
        and layer.quantization_mode is None
        and bool(layer.supports_jit)
        and not has_rule_of_user(layer)
    )


def _is_of_user(layer: Any) -> bool:
    bases = [kind for kind in type(layer).__mro__ if kind.__module__.startswith(("keras.", "keras_sn."))]
    return (
        not type(layer).__module__.startswith("keras.")
        and all(issubclass(keras.Model, kind) for kind in bases)  # a subclass of a built-in layer is as opaque as that
        and keras_internals.has_own_call(layer)
    )


def _is_plain_attention(layer: Any) -> bool:
    """Whether a layer of attention, or one that derives from it, computes its projections and attention as Keras made them."""
    inside = keras_internals.sublayers(layer)[1:]
    is_changed = any(one.quantization_mode is not None or getattr(one, "lora_enabled", False) for one in inside)
    has_losses = any(one.activity_regularizer is not None for one in inside)
    return keras_internals.is_called_plainly(layer) and not is_changed and not has_losses


def may_make_masks(layer: Any) -> bool:
    """Whether a layer inside this one may attach a mask, of which the symbolic outputs of this one show nothing."""
    return any(_makes_masks(inner) for inner in keras_internals.sublayers(layer)[1:])


def _makes_masks(layer: Any) -> bool:
    if isinstance(layer, keras.layers.Masking) or getattr(layer, "mask_zero", False):
        return True
    is_own = not type(layer).__module__.startswith("keras.") and not hasattr(layer, "mask_zero")
    return is_own and type(layer).compute_mask is not keras.Layer.compute_mask


def open_call(node: Any, autocast_dtype: str | None) -> Opened | None:
    """The calls that a composite layer's call consists of, if they are sure to do the same.

    Args:
        node: The call: `operation`, `arguments`, `input_tensors`, `outputs`. No mask reaches it.
        autocast_dtype: The dtype to which the regions of the model cast variables, or None.

    Returns:
        The calls, or None if the layer stays whole.
    """
    layer = node.operation
    try:
        opened = _noted(node, autocast_dtype)
        _check(node, opened)
        is_equal = compute_the_same(node, opened.calls, opened.outputs, autocast_dtype)
    except Exception as error:  # whatever a user's `call` raises on symbolic tensors, it stays whole
        log.debug("Layer %r stays whole: %s", layer.name, error)
        return None
    if not is_equal:
        log.debug("Layer %r stays whole: its calls, one by one, are not what it computes", layer.name)
    return opened if is_equal else None


def _noted(node: Any, autocast_dtype: str | None) -> Opened:
    """Runs the layer's `call` on symbolic tensors. It may neither compute nor change anything."""
    layer, kwargs = node.operation, dict(node.arguments.kwargs)
    kwargs["training"] = True

    def refuse(next_creator: Any, **kwargs: Any) -> Any:
        raise _StaysWhole("it makes a variable")

    with (
        _left_as_it_was(layer),
        keras_internals.call_context(autocast_dtype),
        computed_by_call(layer),
        keras_internals.scratch_graph() as graph,
        tf.variable_creator_scope(refuse),
        calls_noted() as calls,
    ):
        outputs = keras.tree.flatten(layer(*node.arguments.args, **kwargs))
        made = [one.type for one in graph.get_operations() if any(number(y) is None for y in one.outputs)]
        if made:
            raise _StaysWhole(f"it computes something without its inputs: {made[-1]}")
    if not calls or calls.pop().operation is not layer:
        raise _StaysWhole("its own call was not noted")
    return Opened([call.with_numbers() for call in _read(calls, outputs)], outputs)


@contextmanager
def _left_as_it_was(layer: Any) -> Iterator[None]:
    """Undoes what runs inside if it changes attributes of the layer or draws by Python's or NumPy's generators, and raises."""
    attributes = dict(vars(layer))
    contents = [(value, _items(value)) for value in attributes.values() if isinstance(value, (list, dict))]
    states, draws = (random.getstate(), np.random.get_state()), _draws()
    try:
        yield
    finally:
        now = vars(layer)
        changed = [key for key in attributes.keys() | now.keys() if attributes.get(key) is not now.get(key)]
        for key in changed:
            now.pop(key, None)
            now.update({key: attributes[key]} if key in attributes else {})
        changed = [key for key in changed if key not in keras_internals.NOTED_IN_CALL]
        touched = [value for value, items in contents if _identities(_items(value)) != _identities(items)]
        for value, items in contents:
            if any(value is one for one in touched):
                value.clear()
                value.update(items) if isinstance(value, dict) else value.extend(items)
        drew = _draws() != draws
        random.setstate(states[0])
        np.random.set_state(states[1])
        if changed or touched or drew:
            raise _StaysWhole(f"its call changes what it remembers, or draws: {changed}")


def _items(value: list | dict) -> list:
    return list(value.items()) if isinstance(value, dict) else list(value)


def _identities(items: list) -> list:
    return [tuple(map(id, item)) if isinstance(item, tuple) else id(item) for item in items]


def _draws() -> tuple:
    """The states of the global generators."""
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["key"].tobytes(), state["pos"]


def _read(calls: Sequence[SymbolicCall], outputs: Sequence[Any]) -> list[SymbolicCall]:
    """Without the operations whose results nobody reads; a layer does something also where nobody reads its outputs."""
    read, found = {id(tensor) for tensor in outputs}, []
    for call in reversed(calls):
        if any(id(tensor) in read for tensor in call.outputs):
            found.append(call)
            read.update(id(tensor) for tensor in call.input_tensors)
        elif isinstance(call.operation, keras.Layer):
            raise _StaysWhole(f"nobody reads what {call.operation.name!r} returns")
    return found[::-1]


def _check(node: Any, opened: Opened) -> None:
    """Raises if the calls cannot take the place of the layer, whatever they compute."""
    inside = {id(layer): layer for layer in keras_internals.sublayers(node.operation)}
    if any(_may_borrow(layer, value) for layer in list(inside.values())[1:] for value in vars(layer).values()):
        raise _StaysWhole("a layer inside holds a function that may read weights of others")
    for call in opened.calls:
        held = [] if isinstance(call.operation, keras.Layer) else _own_attributes(call.operation)
        leaves = keras.tree.flatten((call.arguments.args, call.arguments.kwargs))
        tensors = {id(tensor) for tensor in call.input_tensors}
        if not all(isinstance(one, (*_PLAIN, keras.Variable)) for one in leaves if id(one) not in tensors):
            raise _StaysWhole(f"an argument of {call.operation.name!r} is neither a tensor nor plain")
        if not all(isinstance(one, _PLAIN) for one in held):
            raise _StaysWhole(f"operation {call.operation.name!r} holds more than plain values")
        if isinstance(call.operation, keras.Layer) and id(call.operation) not in inside:
            raise _StaysWhole(f"layer {call.operation.name!r} is not its own")
        is_told = isinstance(node.operation, _ATTENTION)  # a softmax inside hands the mask that it is given on
        if not is_told and any(keras_internals.get_mask(tensor) is not None for tensor in call.outputs):
            raise _StaysWhole(f"{call.operation.name!r} makes a mask")
    if any(keras_internals.get_mask(tensor) is not None for tensor in opened.outputs):
        raise _StaysWhole("it returns a tensor with a mask")
    held = {id(variable) for call in opened.calls for variable in variables_of(call.operation) if not variable.trainable}
    given = [one for call in opened.calls for one in keras.tree.flatten((call.arguments.args, call.arguments.kwargs))]
    if any(isinstance(one, keras.Variable) and id(one) in held for one in given):
        raise _StaysWhole("it reads what a layer inside may assign")
    reached = {id(variable) for call in opened.calls for variable in variables_of_call(call)}
    if not opened.calls or not all(id(variable) in reached for variable in node.operation.trainable_variables):
        raise _StaysWhole("it has weights that no call inside uses")
    for ours, theirs in zip(opened.outputs, node.outputs, strict=True):
        pairs = zip(ours.shape, theirs.shape, strict=True)
        if ours.dtype != theirs.dtype or any(a != b and None not in (a, b) for a, b in pairs):
            raise _StaysWhole(f"it returns other tensors than Keras expects: {ours} instead of {theirs}")


def _may_borrow(layer: Any, value: Any) -> bool:
    """Whether what a layer holds is a function that is bound to another object or closes over something."""
    if isinstance(value, MethodType):
        return value.__self__ is not layer
    if isinstance(value, functools.partial):
        plain = all(isinstance(one, _PLAIN) for one in (*value.args, *value.keywords.values()))
        return not plain or _may_borrow(layer, value.func)
    if not isinstance(value, FunctionType) or value.__globals__["__name__"].startswith("keras."):
        return False  # Keras wraps `build` of each layer
    return bool(value.__closure__)


def _own_attributes(operation: Any) -> list[Any]:
    """What an operation that is no layer was made with."""
    every = vars(keras.Operation(name="any")).keys()
    return keras.tree.flatten([value for key, value in vars(operation).items() if key not in every])
