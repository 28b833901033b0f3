"""A model with its own `call()` as a `LayerGraph`: its code is run once on symbolic tensors, and its layer calls are noted.

Raw operations between the layer calls become layer calls of their own, which always run as they are. Loops and branches are seen
as they ran this time; another time the model may call other layers, and then the plan's predictions are off, never the numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.calls import LayerCallOnTensors
from keras_sn.children import watched
from keras_sn.errors import UnsupportedModelError
from keras_sn.graph import DTYPE_BYTES, LayerCall, LayerGraph, TensorSpec
from keras_sn.layer_calls import CallNames, ModelTrace, layer_call_of, output_names
from keras_sn.op_graph import LINEAR_OPERATIONS

OPERATIONS = "operations"


def record_calls(model: Any, args: tuple, kwargs: dict[str, Any]) -> ModelTrace:
    """Notes the calls of a model's direct child layers.

    Args:
        model: The model, built.
        args: The arguments of a call, with a `keras.KerasTensor` of known shape for each tensor.
        kwargs: Likewise.

    Returns:
        The layer calls, and the graph that they make; raw operations are `LayerGraph.fixed`.

    Raises:
        UnsupportedModelError: An axis or a dtype is unknown.
    """
    recording = _Recording()

    def run(*args: Any, **kwargs: Any) -> Any:
        recording.begin(keras.tree.flatten((args, kwargs)))
        outputs = model(*args, **kwargs)
        recording.end(keras.tree.flatten(outputs))
        return outputs

    with watched(model.layers, recording.handler()), keras_internals.losses_forgotten(model):
        keras_internals.output_spec(run, *args, **kwargs)
    fixed = frozenset(layer.name for layer in recording.layers if layer.layer_type == OPERATIONS)
    graph = LayerGraph(tuple(recording.layers), recording.specs, tuple(recording.inputs), tuple(recording.outputs), fixed=fixed)
    return ModelTrace((), graph)


@dataclass(eq=False)
class _Recording:
    layers: list[LayerCall] = field(default_factory=list)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    """The id of a symbolic tensor -> its name."""
    alive: list[Any] = field(default_factory=list)
    """The tensors in `names`; a dead one's id could come again."""
    weights_seen: set[int] = field(default_factory=set)

    def begin(self, tensors: Sequence[Any]) -> None:
        for tensor in tensors:
            if tf.is_tensor(tensor):
                self.inputs.append(self._note(tensor, f"input {len(self.inputs)}", kind="input"))

    def end(self, tensors: Sequence[Any]) -> None:
        self.outputs = list(dict.fromkeys(self._name_of(tensor) for tensor in tensors if tf.is_tensor(tensor)))

    def handler(self) -> Callable[..., Any]:
        name_of = CallNames()

        def handle(layer: Any, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            made = LayerCallOnTensors.inside_keras(layer, args, kwargs)
            inputs = tuple(self._name_of(tensor) for tensor in made.tensors)
            outputs = original(*args, **kwargs)
            self._add(name_of(layer.name), made, inputs, [y for y in keras.tree.flatten(outputs) if tf.is_tensor(y)])
            return outputs

        return handle

    def _add(self, name: str, made: LayerCallOnTensors, inputs: tuple[str, ...], tensors: Sequence[Any]) -> None:
        outputs = output_names(name, len(tensors))
        for output, tensor in zip(outputs, tensors, strict=True):
            self._note(tensor, output)
        call = made.traced(name, inputs, outputs)
        self.layers.append(layer_call_of(call, self.specs, self.weights_seen))

    def _note(self, tensor: Any, name: str, kind: str = "activation") -> str:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype not in DTYPE_BYTES or not isinstance(tensor, tf.Tensor) or not tensor.shape.is_fully_defined():
            raise UnsupportedModelError(
                f"Tensor {name!r} has an unknown axis, is sparse or ragged, or is of a dtype without a size, so its bytes cannot "
                f"be planned. Received: {tensor!r}"
            )
        self.specs[name] = TensorSpec(name, tuple(tensor.shape), dtype, kind)
        self.names[id(tensor)] = name
        self.alive.append(tensor)
        return name

    def _name_of(self, tensor: Any) -> str:
        """The name of a tensor; one that raw operations made becomes the output of a layer call that stands for them."""
        source = _behind_identities(tensor)
        if id(source) in self.names:
            return self.names[id(source)]
        name = f"{OPERATIONS} {sum(layer.layer_type == OPERATIONS for layer in self.layers)}"
        sources, kinds = self._sources(source)
        self._note(source, name)
        read = () if kinds <= LINEAR_OPERATIONS else sources
        self.layers.append(LayerCall(name, OPERATIONS, sources, (name,), read, flops=self.specs[name].nbytes))
        return name

    def _sources(self, tensor: Any) -> tuple[tuple[str, ...], set[str]]:
        """What a tensor is computed from, as far as it has names, and by which kinds of operations."""
        found, seen, stack, kinds = [], set(), list(tensor.op.inputs), {tensor.op.type}
        while stack:
            source = stack.pop()
            if id(source) in seen:
                continue
            seen.add(id(source))
            if id(source) in self.names:
                found.append(self.names[id(source)])
            else:
                kinds.add(source.op.type)
                stack.extend(source.op.inputs)
        return tuple(dict.fromkeys(found)), kinds


def _behind_identities(tensor: Any) -> Any:
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor
