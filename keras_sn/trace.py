"""A functional Keras model as a `LayerGraph`, and the layer calls that go with it.

Nested functional and Sequential models are flattened; a shared layer has one call for each use; raw `keras.ops` nodes are calls
like others. Nothing is computed and nothing recurses: 10,000 layer calls take a second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from keras_sn import keras_internals
from keras_sn.errors import UnsupportedModelError
from keras_sn.graph import DTYPE_BYTES, LayerGraph, TensorSpec
from keras_sn.layer_calls import (
    CallNames,
    CastTo,
    ModelTrace,
    PassMask,
    PlacedArguments,
    TracedCall,
    layer_call_of,
    output_names,
)
from keras_sn.order import few_alive


def trace(model: Any, batch_size: int, input_shapes: Sequence[tuple[int, ...]] | None = None) -> ModelTrace:
    """Finds the layer calls of a functional or built Sequential model.

    Args:
        model: A functional or Sequential model whose layers are built.
        batch_size: The number of samples that an unknown first axis stands for.
        input_shapes: The full shape of each input, for models whose inputs have other unknown axes.

    Returns:
        The layer calls with their graph. The order is Keras' own where that keeps about as few bytes alive as the best
        order found, so that sums of gradients round as in Keras.

    Raises:
        UnsupportedModelError: The model is not a graph of layers, or not built, or an axis other than the first is unknown.
    """
    check_supported(model)
    flattening = _Flattening(model, batch_size, input_shapes)
    calls = few_alive(flattening.calls, flattening.specs, flattening.outputs)
    seen: set[int] = set()
    layers = tuple(layer_call_of(call, flattening.specs, seen) for call in calls)
    graph = LayerGraph(layers, flattening.specs, tuple(flattening.inputs), tuple(flattening.outputs))
    return ModelTrace(tuple(calls), graph)


def check_supported(model: Any) -> None:
    """Raises `UnsupportedModelError` if the model is no built graph of layers."""
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(f"keras_sn trains instances of `keras.Model`. Received: {model!r}")
    graph = keras_internals.functional_part(model)
    if isinstance(model, keras.Sequential) and graph is None:
        raise UnsupportedModelError(
            f"Model {model.name!r} is not built, so its layers have no shapes yet. Start it with `keras.Input(shape)`, or call "
            f"`model.build(input_shape)` first. Received: {model!r}"
        )
    if graph is None or not keras_internals.calls_its_graph(model):
        raise UnsupportedModelError(
            f"Model {model.name!r} has its own `call()`, so it cannot be converted: derive its class from `keras_sn.SNModel` "
            "instead of `keras.Model`, or wrap its blocks in `keras_sn.layers.Recompute`. "
            f"Received: an instance of {type(model).__name__}"
        )
    for tensor in graph.inputs:
        if tensor.sparse or getattr(tensor, "ragged", False):
            raise UnsupportedModelError(
                f"Input {tensor.name!r} is sparse or ragged, which regions cannot pass on. Make it dense before the model. "
                f"Received: {tensor!r}"
            )
    for layer in keras_internals.sublayers(model):
        if not layer.built:
            raise UnsupportedModelError(
                f"Layer {layer.name!r} is not built. Call the model on one batch, or `model.build(...)`, first. "
                f"Received: {layer!r}"
            )


@dataclass
class _Flattening:
    """Walks the nodes of a model and of the models inside it."""

    model: Any
    batch_size: int
    input_shapes: Sequence[tuple[int, ...]] | None = None
    calls: list[TracedCall] = field(default_factory=list)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """The id of a symbolic tensor -> the name of the tensor that it stands for."""
    call_name: CallNames = field(default_factory=CallNames)

    def __post_init__(self):
        graph = keras_internals.functional_part(self.model)
        self.has_masks = any(_makes_masks(layer) for layer in keras_internals.sublayers(graph))
        for tensor, shape in zip(graph.inputs, self.input_shapes or [None] * len(graph.inputs), strict=True):
            self.names[id(tensor)] = tensor.name
            self.specs[tensor.name] = self._spec(tensor.name, tensor, kind="input", shape=shape)
        self.inputs = [tensor.name for tensor in graph.inputs]
        self._walk(graph)
        self.outputs = [self.names[id(tensor)] for tensor in graph.outputs]

    def _walk(self, graph: Any) -> None:
        """Visits all nodes; the stack holds the models that are being flattened, so that nesting does not recurse."""
        stack = [("", iter(keras_internals.nodes_in_execution_order(graph)), None)]
        while stack:
            prefix, nodes, leave = stack[-1]
            node = next(nodes, None)
            if node is None:
                stack.pop()
                if leave is not None:
                    leave()
            elif (inner := self._enter(node, prefix)) is not None:
                stack.append(inner)
            else:
                self._add(node, prefix)

    def _enter(self, node: Any, prefix: str) -> tuple[str, Iterator[Any], Any] | None:
        """Steps into a nested model, unless what calling it does cannot be told from its graph."""
        model = node.operation
        if not isinstance(model, keras.Model) or model.activity_regularizer is not None:
            return None
        graph = keras_internals.functional_part(model)
        if graph is None or not keras_internals.runs_its_graph(model) or _given(node.arguments.kwargs) - {"training"}:
            return None
        given = node.input_tensors
        if len(given) != len(graph.inputs) or any(len(a.shape) != len(b.shape) for a, b in zip(given, graph.inputs, strict=True)):
            return None
        path = self.call_name(prefix + model.name)
        given_names = [self.names[id(tensor)] for tensor in given]
        for name, inner in zip(given_names, graph.inputs, strict=True):
            self.names[id(inner)] = self._cast(name, inner.dtype, path)
        produced, outer = graph.outputs, node.outputs

        def leave() -> None:
            for inner, outside in zip(produced, outer, strict=True):
                name = self.names[id(inner)]
                self.names[id(outside)] = self._pass_mask(name, given_names[0], path) if self.has_masks else name

        return path + "/", iter(keras_internals.nodes_in_execution_order(graph)), leave

    def _add(self, node: Any, prefix: str) -> None:
        name = self.call_name(prefix + node.operation.name)
        bindings = tuple((id(tensor), self.names[id(tensor)]) for tensor in node.input_tensors)
        outputs = output_names(name, len(node.outputs))
        known = self._known_shapes(node) if any(None in tensor.shape[1:] for tensor in node.outputs) else [None] * len(outputs)
        for output, tensor, shape in zip(outputs, node.outputs, known, strict=True):
            self.names[id(tensor)] = output
            self.specs[output] = self._spec(output, tensor, shape=shape)
        self.calls.append(TracedCall(name, node.operation, node.arguments, bindings, outputs))

    def _known_shapes(self, node: Any) -> list[tuple[int, ...]]:
        """The shapes of a call's outputs on inputs of known shapes, as Keras infers them."""
        specs = {id(tensor): self.specs[self.names[id(tensor)]] for tensor in node.input_tensors}
        args, kwargs = node.arguments.fill_in({key: keras.KerasTensor(one.shape, one.dtype) for key, one in specs.items()})
        shapes = [tuple(one.shape) for one in keras.tree.flatten(node.operation.compute_output_spec(*args, **kwargs))]
        if any(None in shape for shape in shapes):  # the layer leaves open what TensorFlow knows
            outputs = keras_internals.output_spec(node.operation, *args, **kwargs)
            shapes = [tuple(one.shape) for one in keras.tree.flatten(outputs)]
        return shapes

    def _cast(self, name: str, dtype: Any, path: str) -> str:
        spec = self.specs[name]
        if keras.backend.standardize_dtype(dtype) == spec.dtype:
            return name
        return self._insert(CastTo(keras.backend.standardize_dtype(dtype)), (name,), path, replace(spec, dtype=str(dtype)))

    def _pass_mask(self, name: str, first_input: str, path: str) -> str:
        return self._insert(PassMask(), (name, first_input), path, self.specs[name])

    def _insert(self, operation: Any, inputs: tuple[str, ...], path: str, spec: TensorSpec) -> str:
        name = self.call_name(f"{path}/{type(operation).__name__}")
        self.specs[name] = replace(spec, name=name, kind="activation")
        bindings = tuple(enumerate(inputs))
        self.calls.append(TracedCall(name, operation, PlacedArguments(*range(len(inputs))), bindings, (name,)))
        return name

    def _spec(self, name: str, tensor: Any, kind: str = "activation", shape: tuple | None = None) -> TensorSpec:
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        if dtype not in DTYPE_BYTES:
            raise UnsupportedModelError(
                f"Tensor {name!r} is of a dtype without a size, which regions cannot pass on. Convert it before the model. "
                f"Received: {tensor!r}"
            )
        shape = tuple(tensor.shape if shape is None else shape)
        if shape and shape[0] is None:
            shape = (self.batch_size, *shape[1:])
        if None in shape:
            raise UnsupportedModelError(
                f"Tensor {name!r} has an unknown axis, so its bytes cannot be planned. Give `keras.Input` the full shape; "
                f"`fit` plans by the first batch where the inputs alone are open. Received: shape={shape}"
            )
        return TensorSpec(name, shape, dtype, kind)


def _given(kwargs: dict[str, Any]) -> set[str]:
    """Keras notes the arguments that it fills in too, with None where there is nothing, also inside lists and dicts."""
    return {name for name, value in kwargs.items() if any(leaf is not None for leaf in keras.tree.flatten(value))}


def _makes_masks(layer: Any) -> bool:
    """Whether a layer may attach a mask that its inputs did not have."""
    return bool(getattr(layer, "mask_zero", False)) or type(layer).compute_mask is not keras.Layer.compute_mask
