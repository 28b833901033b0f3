"""Whether a composite layer and the calls inside it are the same computation: both are traced, and what they ask for is compared.

Layers inside are not run: what is compared is that they are called with the same arguments in the same mode. Everything else must
be the same TensorFlow operations with the same attributes on the same tensors, in the same order, so that gradients add up alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.bodies import RegionBody
from keras_sn.children import watched
from keras_sn.graph import TensorSpec
from keras_sn.layer_calls import TracedCall, output_names
from keras_sn.regions import EAGER, RegionFunction
from keras_sn.symbolic_calls import SymbolicCall, number

_UNLIKE = ("_gradient_op_type", "_output_shapes", "_XlaMustCompile")
"""Attributes of TensorFlow operations that differ between equal ones."""


def compute_the_same(node: Any, calls: Sequence[SymbolicCall], outputs: Sequence[Any], autocast_dtype: str | None) -> bool:
    """Whether a layer's call and the calls inside ask TensorFlow, and the layers inside, for the same in the same order.

    Args:
        node: The layer's call: `operation`, `arguments`, `input_tensors`, `outputs`.
        calls: The calls that are to take its place, with the same input tensors.
        outputs: Those of their symbolic outputs that stand for the layer's.
        autocast_dtype: The dtype to which the regions of the model cast variables, or None.
    """
    names, specs = named_inputs(node)
    whole = (_traced(node, "whole", dict(names), True),)
    inner = tuple(_traced(call, f"call {place}", names, call.training) for place, call in enumerate(calls))
    both = (whole, whole[0].outputs), (inner, tuple(names[id(tensor)] for tensor in outputs))
    bodies = [RegionBody(calls, specs, outputs, (), frozenset(), autocast_dtype) for calls, outputs in both]
    with keras_internals.losses_forgotten(node.operation):
        one, other = (_Record(calls).of(body) for body in bodies)
    return one == other


def named_inputs(node: Any) -> tuple[dict[int, str], tuple[TensorSpec, ...]]:
    """The input tensors of a call: their names by id, and their specifications, in which axes may be open."""
    names = {id(tensor): f"input {place}" for place, tensor in enumerate(node.input_tensors)}
    given = {names[id(tensor)]: tensor for tensor in node.input_tensors}
    return names, tuple(TensorSpec(name, tuple(x.shape), keras.backend.standardize_dtype(x.dtype)) for name, x in given.items())


def placeholders_of(body: RegionBody) -> tuple[list[Any], list[Any], list[Any]]:
    """What stands for the inputs, the weights and the state of a region in the present graph."""
    inputs = [tf.compat.v1.placeholder(spec.dtype, spec.shape) for spec in body.input_specs]
    weights, state = ([_placeholder(one) for one in variables] for variables in (body.trainable, body.state))
    return inputs, weights, state


def _traced(call: Any, name: str, names: dict[int, str], training: bool | None) -> TracedCall:
    bindings = tuple((id(tensor), names[id(tensor)]) for tensor in call.input_tensors)
    outputs = output_names(name, len(call.outputs))
    names.update(zip(map(id, call.outputs), outputs, strict=True))
    return TracedCall(name, call.operation, call.arguments, bindings, outputs, training)


@dataclass(eq=False)
class _Asked:
    """What a layer inside was asked for."""

    what: tuple
    read: list[Any]
    outputs: list[Any]


class _Record:
    """What a region computes: TensorFlow's operations, and calls of layers, which are not run where Keras knows their outputs."""

    def __init__(self, calls: Sequence[SymbolicCall]):
        self.waiting: dict[int, list[SymbolicCall]] = {}
        for call in calls:
            if isinstance(call.operation, keras.Layer) and _tells_its_outputs(call.operation):
                self.waiting.setdefault(id(call.operation), []).append(call)
        self.layers = list({id(call.operation): call.operation for call in calls if id(call.operation) in self.waiting}.values())
        self.asked: dict[str, _Asked] = {}
        """By the operation that stands for an output."""

    def answer(self, layer: Any, original: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Takes the place of a layer's `call`."""
        if not self.waiting[id(layer)]:
            raise ValueError(f"{layer.name!r} is called more often than on symbolic tensors")
        call = self.waiting[id(layer)].pop(0)
        outputs = [tf.compat.v1.placeholder(y.dtype, y.shape) for y in call.outputs]
        leaves = keras.tree.flatten((args, kwargs))
        plain = [(type(one), repr(one)) for one in leaves if not tf.is_tensor(one)]
        structure = repr(keras.tree.map_structure(tf.is_tensor, (args, kwargs)))
        mode = keras_internals.training_mode(), keras_internals.autocast_dtype()
        asked = _Asked((id(layer), plain, structure, mode), [one for one in leaves if tf.is_tensor(one)], outputs)
        self.asked.update((output.op.name, asked) for output in outputs)
        return keras.tree.pack_sequence_as(call.structure, outputs)

    def of(self, body: RegionBody) -> list[Any]:
        """All that a region computes, in a form that is equal for equal regions."""
        function = RegionFunction(body, EAGER)
        with keras_internals.scratch_graph() as graph, keras_internals.gradients_forgotten_with(function):
            inputs, weights, state = placeholders_of(body)
            with watched(self.layers, self.answer):
                result = function.forward(inputs, [None] * len(inputs), weights, state)
        new = {id(v): tensor for v, tensor in zip(body.updatable, result.new_state, strict=True) if tensor is not None}
        results = [*result.outputs, *result.losses, *(new[key] for key in sorted(new))]
        known: dict[str, Any] = {x.name: name for x, name in zip(inputs, body.inputs, strict=True)}
        known |= {x.name: id(v) for x, v in zip([*weights, *state], [*body.trainable, *body.state], strict=True)}
        known |= {inside.name: id(outside) for outside, inside in graph.captures}
        rows = self._rows(results, graph, known)
        return [rows, [known[one.name] for one in results], sorted(new), [id(body.layers[one]) for one in function.loss_owners]]

    def _rows(self, results: Sequence[Any], graph: Any, known: dict[str, Any]) -> list[tuple]:
        """What leads to the results, in its order. A tensor is known by its row; it is added to `known`."""
        rows: list[tuple] = []
        for operation in self._leading_to(results, graph):
            asked = self.asked.get(operation.name)
            outputs, sources = (operation.outputs, operation.inputs) if asked is None else (asked.outputs, asked.read)
            if outputs and outputs[0].name in known:
                continue  # an input, or another output of a layer
            if asked is None and outputs and (value := number(outputs[0])) is not None:
                known[outputs[0].name] = str(value.dtype), value.tobytes()
                continue
            read = tuple(known[tensor.name] for tensor in sources)
            if operation.type == "Identity":
                known[operation.outputs[0].name] = read[0]
                continue
            known.update((tensor.name, (len(rows), place)) for place, tensor in enumerate(outputs))
            rows.append((asked.what if asked else (operation.type, _attributes(operation)), read))
        return rows

    def _leading_to(self, results: Sequence[Any], graph: Any) -> list[Any]:
        """The operations that tensors are computed from, in the order in which they were made."""
        found, stack = set(), [tensor.op for tensor in results]
        while stack:
            operation = stack.pop()
            if operation.name in found:
                continue
            found.add(operation.name)
            asked = self.asked.get(operation.name)
            stack.extend(tensor.op for tensor in (operation.inputs if asked is None else [*asked.read, *asked.outputs]))
        return [operation for operation in graph.get_operations() if operation.name in found]


def _tells_its_outputs(layer: Any) -> bool:
    """Whether Keras knows the shapes and dtypes that the layer returns: by its own code, or by having traced the layer."""
    kind, inside = type(layer), keras_internals.sublayers(layer)
    if kind.compute_output_shape is keras.Layer.compute_output_shape:
        return kind.compute_output_spec is keras.Layer.compute_output_spec
    return all(type(one).__module__.startswith("keras.") and not isinstance(one, keras.layers.Lambda) for one in inside)


def _placeholder(variable: keras.Variable) -> Any:
    return tf.compat.v1.placeholder(keras.backend.standardize_dtype(variable.dtype), variable.shape)


def _attributes(operation: Any) -> list[tuple[str, bytes]]:
    """Of a TensorFlow operation, without the names of functions, which each trace makes anew."""
    attributes = operation.node_def.attr.items()
    return sorted(
        (key, value.SerializeToString(deterministic=True))
        for key, value in attributes
        if key not in _UNLIKE and not value.HasField("func")
    )
