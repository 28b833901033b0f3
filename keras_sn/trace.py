"""A functional Keras model as a `LayerGraph`, and the layer calls that go with it.

Nested functional and Sequential models are flattened, and composite layers where their `call` can be told from its calls (see
`composites`); a shared layer has one call for each use; raw `keras.ops` nodes are calls like others. Nothing is computed and
nothing recurses: 10,000 layer calls take a second.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import keras

from keras_sn import keras_internals
from keras_sn.activations_apart import apart
from keras_sn.composites import may_be_opened, may_make_masks, open_call
from keras_sn.errors import UnsupportedModelError
from keras_sn.graph import DTYPE_BYTES, LayerGraph, TensorSpec
from keras_sn.layer_calls import (
    CallNames,
    CastTo,
    ModelTrace,
    PassMask,
    PlacedArguments,
    TracedCall,
    known_shapes,
    layer_call_of,
    output_names,
    specs_of_calls,
)
from keras_sn.log import log
from keras_sn.order import few_alive
from keras_sn.readers import Readers
from keras_sn.region_library import autocast_dtype_of
from keras_sn.sums import Sums
from keras_sn.supported import check_supported


def trace(
    model: Any, batch_size: int, input_shapes: Sequence[tuple[int, ...]] | None = None, *, has_masks: bool = False
) -> ModelTrace:
    """Finds the layer calls of a functional or built Sequential model.

    Args:
        model: A functional or Sequential model whose layers are built.
        batch_size: The number of samples that an unknown first axis stands for.
        input_shapes: The full shape of each input, for models whose inputs have other unknown axes.
        has_masks: Whether Keras masks may come with the inputs.

    Returns:
        The layer calls with their graph. The order is Keras' own where that keeps about as few bytes alive as the best
        order found, so that sums of gradients round as in Keras.

    Raises:
        UnsupportedModelError: The model is not a graph of layers, or not built, or an axis other than the first is unknown.
    """
    check_supported(model)
    flattening = _Flattening(model, batch_size, input_shapes, has_masks)
    calls = few_alive(flattening.calls, flattening.specs, flattening.outputs, flattening.in_turn)
    seen: set[int] = set()
    layers = tuple(layer_call_of(call, flattening.specs, seen) for call in calls)
    graph = LayerGraph(layers, flattening.specs, tuple(flattening.inputs), tuple(flattening.outputs))
    return ModelTrace(tuple(calls), graph, frozenset(flattening.in_turn))


@dataclass
class _Flattening:
    """Walks the nodes of a model, of the models inside it, and the calls inside composite layers."""

    model: Any
    batch_size: int
    input_shapes: Sequence[tuple[int, ...]] | None = None
    masked_inputs: bool = False
    calls: list[TracedCall] = field(default_factory=list)
    specs: dict[str, TensorSpec] = field(default_factory=dict)
    names: dict[int, str] = field(default_factory=dict)
    """The id of a symbolic tensor -> the name of the tensor that it stands for."""
    masked: set[str] = field(default_factory=set)
    """Tensors that may carry a Keras mask."""
    in_turn: set[str] = field(default_factory=set)
    """Tensors whose readers must stay in their order."""
    inferred: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """By the id of a symbolic tensor inside a composite layer, its shape."""
    call_name: CallNames = field(default_factory=CallNames)

    def __post_init__(self):
        graph = keras_internals.functional_part(self.model)
        self.autocast_dtype = autocast_dtype_of(self.model)
        self.has_masks = any(_makes_masks(layer) for layer in keras_internals.sublayers(graph))
        for tensor, shape in zip(graph.inputs, self.input_shapes or [None] * len(graph.inputs), strict=True):
            self.names[id(tensor)] = tensor.name
            self.specs[tensor.name] = self._spec(tensor.name, tensor, kind="input", shape=shape)
        self.inputs = [tensor.name for tensor in graph.inputs]
        self.masked.update(self.inputs if self.masked_inputs else ())
        nodes = keras_internals.nodes_in_execution_order(graph)
        self.readers = Readers(nodes, graph.outputs)
        self.sums = Sums(self.readers, self.autocast_dtype)
        self._walk(nodes)
        self.outputs = [self.names[id(tensor)] for tensor in graph.outputs]

    def _walk(self, nodes: Sequence[Any]) -> None:
        """Visits all nodes; the stack holds what is being flattened, so that nesting does not recurse."""
        stack: list[tuple[str, Iterator[Any], Any]] = [("", iter(nodes), None)]
        while stack:
            prefix, rest, leave = stack[-1]
            node = next(rest, None)
            if node is None:
                stack.pop()
                if leave is not None:
                    leave()
            elif (inner := self._enter(node, prefix)) is not None:
                stack.append(inner)
            else:
                self._add(node, prefix)

    def _enter(self, node: Any, prefix: str) -> tuple[str, Iterator[Any], Any] | None:
        """Steps into a nested model or a composite layer, unless what calling it does cannot be told from the calls inside."""
        if getattr(node, "training", True) is not True:
            return None
        if isinstance(node.operation, keras.Model) and (entered := self._enter_model(node, prefix)) is not None:
            return entered
        return self._enter_composite(node, prefix) if may_be_opened(node.operation) else None

    def _enter_model(self, node: Any, prefix: str) -> tuple[str, Iterator[Any], Any] | None:
        model = node.operation
        if model.activity_regularizer is not None:
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
        produced, outer, nodes = graph.outputs, node.outputs, keras_internals.nodes_in_execution_order(graph)
        self.readers.enter(node, nodes, zip(graph.inputs, given, strict=True), zip(produced, outer, strict=True))

        def leave() -> None:
            for inner, outside in zip(produced, outer, strict=True):
                name = self.names[id(inner)]
                self.names[id(outside)] = self._pass_mask(name, given_names[0], path) if self.has_masks else name

        return path + "/", iter(nodes), leave

    def _enter_composite(self, node: Any, prefix: str) -> tuple[str, Iterator[Any], Any] | None:
        if any(self.names[id(tensor)] in self.masked for tensor in node.input_tensors):
            return None
        opened = open_call(node, self.autocast_dtype)
        if opened is None or (inferred := specs_of_calls(opened.calls, self._known(node), self.batch_size)) is None:
            return None
        if (ordered := self.sums.in_turn(node, opened.calls, opened.outputs)) is None:
            log.debug("Layer %r stays whole: Keras may add up gradients of what it reads in another order", node.operation.name)
            return None
        self.in_turn.update(self.names[id(tensor)] for tensor in ordered.tensors)
        self.inferred |= {key: spec.shape for key, spec in inferred.items()}
        through = zip(node.input_tensors, node.input_tensors, strict=True)
        self.readers.enter(node, opened.calls, through, zip(opened.outputs, node.outputs, strict=True))

        def leave() -> None:
            for inner, outside in zip(opened.outputs, node.outputs, strict=True):
                self.names[id(outside)] = self.names[id(inner)]
                self.masked.discard(self.names[id(inner)])  # its symbolic outputs, unlike those of layers, show all masks

        return self.call_name(prefix + node.operation.name) + "/", iter(ordered.calls), leave

    def _known(self, node: Any) -> dict[int, TensorSpec]:
        return {id(tensor): self.specs[self.names[id(tensor)]] for tensor in node.input_tensors}

    def _add(self, node: Any, prefix: str) -> None:
        name = self.call_name(prefix + node.operation.name)
        bindings = tuple((id(tensor), self.names[id(tensor)]) for tensor in node.input_tensors)
        outputs = output_names(name, len(node.outputs))
        shapes = [self.inferred.get(id(tensor)) for tensor in node.outputs]
        if None in shapes:
            shapes = known_shapes(node, self._known(node), self.batch_size)
        for output, tensor, shape in zip(outputs, node.outputs, shapes, strict=True):
            self.names[id(tensor)] = output
            self.specs[output] = self._spec(output, tensor, shape=shape)
            if keras_internals.get_mask(tensor) is not None:
                self.masked.add(output)
        if may_make_masks(node.operation) or any(given in self.masked for _, given in bindings):
            self.masked.update(outputs)
        parts = apart(node.operation)
        made_by = node.operation if parts is None else parts.product
        self.calls.append(TracedCall(name, made_by, node.arguments, bindings, outputs, getattr(node, "training", True)))
        if parts is not None:
            (output,) = outputs
            self.names[id(node.outputs[0])] = self._insert(parts.activation, (output,), name, self.specs[output])

    def _cast(self, name: str, dtype: Any, path: str) -> str:
        spec = self.specs[name]
        if keras.backend.standardize_dtype(dtype) == spec.dtype:
            return name
        return self._insert(CastTo(keras.backend.standardize_dtype(dtype)), (name,), path, replace(spec, dtype=str(dtype)))

    def _pass_mask(self, name: str, first_input: str, path: str) -> str:
        return self._insert(PassMask(), (name, first_input), path, self.specs[name])

    def _insert(self, operation: Any, inputs: tuple[str, ...], path: str, spec: TensorSpec) -> str:
        name = self.call_name(f"{path}/{operation.name}")
        self.specs[name] = replace(spec, name=name, kind="activation")
        bindings = tuple(enumerate(inputs))
        if any(given in self.masked for given in inputs):
            self.masked.add(name)
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
