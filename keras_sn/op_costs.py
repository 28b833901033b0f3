"""The traits of one layer call, measured: its forward and backward step are traced as a TensorFlow graph, which never runs.

What the operations of the backward step read, the layer holds. Composite layers and layers without a rule are measured so, once
for all calls of equal configuration and shapes.
"""

import json
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sn import keras_internals, op_graph
from keras_sn.graph import TensorSpec
from keras_sn.log import log
from keras_sn.traits import LayerTraits, elements

Call = Callable[[list[Any]], Any]
"""Makes the layer call on other tensors: the input tensors in the order of the input specifications -> the outputs."""

_CACHE: dict[Hashable, LayerTraits] = {}


def traced_traits(
    operation: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    call: Call | None = None,
    call_key: Hashable = None,
) -> LayerTraits:
    """Measures one layer call by tracing it; nothing is computed, and no variable or seed state changes.

    Args:
        operation: A built layer, or a `keras.Operation`.
        inputs: The specifications of its input tensors.
        outputs: The specifications of its outputs.
        call: Makes the call, `call(tensors) -> outputs`. Without it, the usual ways to call a layer are tried.
        call_key: What tells this call from others of an equal layer on equal shapes: its remaining arguments. Operations that
            are called through `call` and have no key are traced each time, since their constants are arguments.

    Returns:
        The traits; those of a layer that cannot be traced alone say that its backward step reads all inputs and outputs.
    """
    key = _key(operation, inputs, call, call_key)
    if key is not None and key in _CACHE:
        return _CACHE[key]
    traits = _measure(operation, inputs, call) or LayerTraits(flops=elements(outputs))
    if key is not None:
        _CACHE[key] = traits
    return traits


def clear_cache() -> None:
    """Forgets all measured layers."""
    _CACHE.clear()


def _key(operation: Any, inputs: Sequence[TensorSpec], call: Call | None, call_key: Hashable) -> Hashable | None:
    if call is not None and call_key is None and not isinstance(operation, keras.Layer):
        return None
    try:
        config = keras.saving.serialize_keras_object(operation).get("config")
        config = json.dumps(_anonymous(config, is_layer=True), sort_keys=True)
        weights = tuple((tuple(v.shape), str(v.dtype), v.trainable) for v in _variables(operation))
        key = (type(operation), config, weights, tuple((one.shape, one.dtype) for one in inputs), call_key)
        hash(key)
    except Exception:  # a user's `get_config()` may raise anything; its layer is then measured each time
        return None
    return key


def _anonymous(config: Any, *, is_layer: bool = False) -> Any:
    """A configuration without seeds and without the names of built-in layers, at all depths; a dtype policy is its name."""
    if isinstance(config, dict):
        dropped = {"seed", "build_config", "shared_object_id"} | ({"name"} if is_layer else set())
        holds_layer = str(config.get("module")).startswith(("keras.layers", "keras.models"))
        rest = {key: value for key, value in config.items() if key not in dropped}
        return {key: _anonymous(value, is_layer=holds_layer and key == "config") for key, value in rest.items()}
    return [_anonymous(one) for one in config] if isinstance(config, (list, tuple)) else config


def _variables(operation: Any) -> list[keras.Variable]:
    return list({id(variable): variable for variable in getattr(operation, "variables", [])}.values())


def _measure(operation: Any, inputs: Sequence[TensorSpec], call: Call | None) -> LayerTraits | None:
    """The traits by the first way to call the layer that works."""
    for way in [call] if call is not None else _usual_calls(operation):
        try:
            with keras_internals.losses_forgotten(operation):
                recording = _record(operation, inputs, way)
            return _traits(recording)
        except Exception as error:  # what a layer raises that is called in a way that it was not made for is its own affair
            log.debug("Layer %r cannot be traced alone: %s", getattr(operation, "name", operation), error)
    return None


def _usual_calls(operation: Any) -> list[Call]:
    return [
        lambda tensors: operation(*tensors),
        lambda tensors: operation(tensors),
        lambda tensors: operation(tensors[0], tensors[1:]),  # a recurrent cell with its states
        lambda tensors: operation(tensors[0], tensors[0]),  # self-attention
        lambda tensors: operation([tensors[0], tensors[0]]),
    ]


@dataclass
class _Recording:
    """A traced layer call: its operations, and the symbolic tensors of interest."""

    inputs: list[Any] = field(default_factory=list)
    weights: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    gradients: list[Any] = field(default_factory=list)
    forward: list[Any] = field(default_factory=list)
    backward: list[Any] = field(default_factory=list)


def _record(operation: Any, inputs: Sequence[TensorSpec], call: Call) -> _Recording:
    """Traces the forward step in training mode on values in place of all variables, and then its gradient."""
    recording, variables = _Recording(), _variables(operation)

    def step(tensors: list[Any], values: list[Any]) -> None:
        graph = tf.compat.v1.get_default_graph()
        scope = keras.StatelessScope(collect_losses=True)
        for variable, value in zip(variables, values, strict=True):
            scope.add_update((variable, value))  # the scope's constructor would cast it
        sources = [x for x in tensors if x.dtype.is_floating or x.dtype.is_complex]
        sources += [value for variable, value in zip(variables, values, strict=True) if variable.trainable]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            with keras_internals.call_context(None), scope:
                outputs = [tf.convert_to_tensor(y) for y in keras.tree.flatten(call(list(tensors))) if y is not None]
        count = len(graph.get_operations())
        targets = [y for y in [*outputs, *scope.losses] if y.dtype.is_floating or y.dtype.is_complex]
        gradients = tape.gradient(targets, sources) if targets and sources else []
        operations = graph.get_operations()
        recording.forward, recording.backward = operations[:count], operations[count:]
        recording.inputs, recording.weights, recording.outputs = tensors, values, outputs
        recording.gradients = [one for one in tf.nest.flatten(gradients, expand_composites=True) if one is not None]

    specs = [tf.TensorSpec(one.shape, one.dtype) for one in inputs]
    values = [tf.TensorSpec(variable.shape, variable.dtype) for variable in variables]
    tf.function(step, autograph=False).get_concrete_function(specs, values)
    return recording


def _traits(recording: _Recording) -> LayerTraits:
    constants = op_graph.constant_tensors(recording.forward)
    inputs = {id(op_graph.root(x)) for x in recording.inputs}
    outputs = {id(op_graph.root(y)) for y in recording.outputs}
    free = {id(value) for value in recording.weights} | constants
    made = {id(y) for one in recording.forward for y in one.outputs}
    held: dict[int, Any] = {}
    for tensor in op_graph.tensors_read(recording.backward, recording.gradients):
        source = op_graph.root(tensor)
        if id(source) in made and id(source) not in free and not op_graph.is_variable(source):
            held[id(source)] = source
    internal = [source for key, source in held.items() if key not in inputs and key not in outputs]
    fused = _held_when_fused(recording, internal, inputs | outputs | free)
    kinds = op_graph.kinds_of(recording.forward, constants)
    return LayerTraits(
        reads_inputs=any(key in inputs for key in held),
        reads_outputs=any(key in outputs and key not in inputs for key in held),
        flops=op_graph.flops(recording.forward, constants),
        internal_bytes=sum(op_graph.held_bytes(source) for source in [*internal, *_scaled_early(recording, made)]),
        fused_internal_bytes=sum(op_graph.held_bytes(source) for source in fused),
        is_costly=bool(kinds & op_graph.MATRIX_OPERATIONS),
        is_fusible=kinds <= op_graph.FUSIBLE_OPERATIONS,
        is_convolution=bool(kinds & op_graph.CONVOLUTIONS),
    )


def _scaled_early(recording: _Recording, made: set[int]) -> list[Any]:
    """What TensorFlow's graph optimizer (`ConstantPushDown`) has the forward step make of what it makes anyway, and hold.

    It makes (gradient * forward) * constant into gradient * (forward * constant), and the product of the last two is computed as
    soon as it can be: the scores of attention times their scale. It takes the place of what nothing else reads.
    """
    constants = op_graph.constant_tensors([*recording.forward, *recording.backward])
    backward = {id(one) for one in recording.backward}
    found = []
    for one in recording.backward:
        if one.type != "Mul" or not any(id(x) in constants for x in one.inputs):
            continue
        product = next((x.op for x in one.inputs if id(x) not in constants), None)
        if product is None or product.type != "Mul" or len(product.outputs[0].consumers()) != 1:
            continue
        second = op_graph.root(product.inputs[1])
        readers = [one for one in second.consumers() if id(one) in backward]
        if id(second) in made and id(second) not in constants and len(readers) > 1:
            found.append(second)
    return found


def _held_when_fused(recording: _Recording, internal: Sequence[Any], elsewhere: set[int]) -> list[Any]:
    """What a layer holds under XLA: of what its backward step reads, that which a matrix operation makes or reads.

    The rest is computed again where it is read, from what it is made of.
    """
    backward, found, seen = {id(one) for one in recording.backward}, {}, set()
    forward = {id(one) for one in recording.forward}
    stack = list(internal)
    while stack:
        source = op_graph.root(stack.pop())
        if id(source) in seen or id(source) in elsewhere or id(source.op) not in forward:
            continue
        seen.add(id(source))
        if op_graph.is_written(source, backward | forward):
            found[id(source)] = source
        else:
            stack.extend(source.op.inputs)
    return list(found.values())


def key_of_arguments(args: Any, kwargs: Any) -> Hashable | None:
    """A `call_key` from the arguments of a symbolic call, with tensors by the order in which they first appear.

    Returns:
        A string, or None if an argument cannot be compared.
    """
    places: dict[int, int] = {}

    def described(value: Any) -> str:
        if isinstance(value, keras.KerasTensor):
            return f"tensor {places.setdefault(id(value), len(places))}"
        if not isinstance(value, (str, int, float, bool, slice, type(None), type(...), np.generic)):
            raise TypeError(f"An argument cannot be compared. Received: {value!r}")
        return repr(value)

    try:
        return repr(keras.tree.map_structure(described, (args, kwargs)))
    except TypeError:
        return None
