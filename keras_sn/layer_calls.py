"""One call of a layer or operation, ready to be made again on other tensors, and what the planner sees of it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.graph import DTYPE_BYTES, LayerCall, LayerGraph, TensorSpec
from keras_sn.in_place import reads_only_shapes
from keras_sn.op_costs import key_of_arguments
from keras_sn.rules import traits_of


class CastTo(keras.Operation):
    """What a nested model does to an input of another dtype than the one it was built for."""

    def __init__(self, dtype: str):
        super().__init__(name="CastTo")
        self.dtype = dtype

    def call(self, x):
        return tf.cast(x, self.dtype)

    def compute_output_spec(self, x):
        return keras.KerasTensor(x.shape, self.dtype)


class PassMask(keras.Operation):
    """What a nested model does to an output without a mask: it gets the mask of the model's first input."""

    def __init__(self):
        super().__init__(name="PassMask")

    def call(self, output, first_input):
        if keras_internals.get_mask(first_input) is None or keras_internals.get_mask(output) is not None:
            return output
        return keras_internals.with_mask_of(tf.identity(output), first_input)

    def compute_output_spec(self, output, first_input):
        return keras.KerasTensor(output.shape, output.dtype)


@dataclass(frozen=True, eq=False, slots=True)
class TracedCall:
    """One call of a layer or operation, ready to be made again on other tensors."""

    name: str
    operation: Any
    arguments: Any
    """Keras' record of the call's arguments, `fill_in(values by id of the symbolic tensor)` -> `(args, kwargs)`."""
    bindings: tuple[tuple[int, str], ...]
    """The id of each symbolic tensor in `arguments`, and the name of the tensor that takes its place."""
    outputs: tuple[str, ...]
    training: bool | None = True
    """The mode to call it in; None where nobody says."""

    @property
    def inputs(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, name in self.bindings))

    def run_on(self, inputs: Sequence[Any]) -> list[Any]:
        """Calls the operation on tensors in the order of `inputs`; the outputs, flat."""
        return self.run(dict(zip(self.inputs, inputs, strict=True)))

    def run(self, tensors: dict[str, Any]) -> list[Any]:
        """Calls the operation on named tensors; the outputs, flat."""
        args, kwargs = self.arguments.fill_in({key: tensors[name] for key, name in self.bindings})
        if isinstance(self.operation, keras.Layer) and self.training is not None:
            # A layer without such an argument passes it on to the layers that it calls.
            kwargs["training"] = self.training
        return keras.tree.flatten(self.operation(*args, **kwargs))


class PlacedArguments:
    """`TracedCall.arguments` for the two operations that flattening inserts."""

    def __init__(self, *keys: int):
        self.keys = keys
        self.args, self.kwargs = keys, {}

    def fill_in(self, tensors: dict[int, Any]) -> tuple[tuple, dict]:
        return tuple(tensors[key] for key in self.keys), {}


class CallArguments:
    """The arguments of a call, with a `KerasTensor` in the place of each tensor; see `TracedCall.arguments`."""

    def __init__(self, args: tuple, kwargs: dict[str, Any]):
        self.args, self.kwargs = args, kwargs

    def fill_in(self, tensors: dict[int, Any]) -> tuple[tuple, dict]:
        """The arguments with tensors again, by the id of what stands for them."""
        filled: Any = keras.tree.map_structure(lambda leaf: tensors.get(id(leaf), leaf), (self.args, self.kwargs))
        return filled


@dataclass(frozen=True, eq=False)
class ModelTrace:
    """A model's layer calls in execution order, and the same as the planner sees it."""

    calls: tuple[TracedCall, ...]
    graph: LayerGraph
    in_turn: frozenset[str] = frozenset()
    """Tensors whose gradients add up in a given order: that of the last reader first, that of the first one last."""

    def calls_named(self, names: Sequence[str]) -> tuple[TracedCall, ...]:
        return tuple(self.calls[self.graph.position[name]] for name in names)


@dataclass
class CallNames:
    """Names layer calls in the order in which they come: the layer's name, from its second call on with a number."""

    uses: Counter = field(default_factory=Counter)

    def __call__(self, name: str) -> str:
        self.uses[name] += 1
        return name if self.uses[name] == 1 else f"{name}#{self.uses[name]}"


def output_names(call_name: str, count: int) -> tuple[str, ...]:
    """The names of the tensors that a call makes."""
    return (call_name,) if count == 1 else tuple(f"{call_name}:{place}" for place in range(count))


def known_shapes(call: Any, known: dict[int, Any], batch_size: int) -> list[tuple[int | None, ...]]:
    """The shapes of a call's outputs on inputs of known shapes, as Keras infers them; None for an axis that it leaves open.

    Args:
        call: `operation`, `arguments`, `input_tensors` and `outputs`, symbolic, maybe with open axes.
        known: By the id of each symbolic input, `shape` and `dtype` with all axes known.
        batch_size: What an open first axis stands for, as long as layers call layers.
    """

    def filled(tensor: Any) -> tuple[int | None, ...]:
        shape = tuple(tensor.shape)
        return (batch_size, *shape[1:]) if shape and shape[0] is None else shape

    if not any(None in tensor.shape for tensor in call.outputs):
        return [tuple(tensor.shape) for tensor in call.outputs]
    shapes = [filled(tensor) for tensor in call.outputs]
    has_batch_axes = all(tuple(known[id(tensor)].shape) == filled(tensor) for tensor in call.input_tensors)
    if isinstance(call.operation, keras.Layer) and has_batch_axes and not any(None in shape for shape in shapes):
        return shapes
    filled_in = {key: keras.KerasTensor(known[key].shape, known[key].dtype) for key in map(id, call.input_tensors)}
    args, kwargs = call.arguments.fill_in(filled_in)
    shapes = [tuple(one.shape) for one in keras.tree.flatten(call.operation.compute_output_spec(*args, **kwargs))]
    if any(None in shape for shape in shapes):  # the layer leaves open what TensorFlow knows
        outputs = keras_internals.output_spec(call.operation, *args, **kwargs)
        shapes = [tuple(one.shape) for one in keras.tree.flatten(outputs)]
    return shapes


def specs_of_calls(calls: Sequence[Any], known: dict[int, Any], batch_size: int) -> dict[int, TensorSpec] | None:
    """By id, the specifications of all tensors that calls read and make, or None if their bytes cannot be told.

    See `known_shapes`.
    """
    known = dict(known)
    for call in calls:
        shapes = known_shapes(call, known, batch_size)
        dtypes = [keras.backend.standardize_dtype(tensor.dtype) for tensor in call.outputs]
        if any(None in shape for shape in shapes) or not DTYPE_BYTES.keys() >= set(dtypes):
            return None
        made = zip(call.outputs, shapes, dtypes, strict=True)
        known |= {id(tensor): TensorSpec("", shape, dtype) for tensor, shape, dtype in made}
    return known


def variables_of(operation: Any) -> list[keras.Variable]:
    """All variables of a layer, those of metrics inside it too; none for an operation that is no layer."""
    recurrent = [layer for layer in keras_internals.sublayers(operation) if isinstance(layer, keras.layers.RNN)]
    # Keras does not count what a stateful layer remembers among its variables.
    states = keras.tree.flatten([layer.states for layer in recurrent if layer.stateful])
    remembered = [one for one in states if isinstance(one, keras.Variable)]
    return [*getattr(operation, "variables", []), *getattr(operation, "metrics_variables", []), *remembered]


def variables_of_call(call: Any) -> list[keras.Variable]:
    """The variables of a call's operation, and those among its arguments, each once."""
    arguments = keras.tree.flatten((call.arguments.args, call.arguments.kwargs))
    found = [*variables_of(call.operation), *(one for one in arguments if isinstance(one, keras.Variable))]
    return list({id(variable): variable for variable in found}.values())


def layer_call_of(call: TracedCall, specs: dict[str, TensorSpec], seen: set[int]) -> LayerCall:
    """A layer call as the planner sees it.

    Args:
        call: The call.
        specs: By name, the tensors that it reads and makes.
        seen: The ids of the weights of the calls before it, which it does not count again; those of its own are added.
    """
    inputs, outputs = [specs[name] for name in call.inputs], [specs[name] for name in call.outputs]
    key = key_of_arguments(call.arguments.args, call.arguments.kwargs)
    traits = traits_of(call.operation, inputs, outputs, call.run_on, key)
    own = {id(weight) for weight in getattr(call.operation, "trainable_variables", variables_of_call(call))}
    weights = [w for w in variables_of_call(call) if w.trainable and id(w) in own and id(w) not in seen]
    seen.update(id(weight) for weight in weights)
    return LayerCall(
        name=call.name,
        layer_type=type(call.operation).__name__,
        inputs=call.inputs,
        outputs=call.outputs,
        saved_for_backward=call.inputs * traits.reads_inputs + call.outputs * traits.reads_outputs,
        flops=traits.flops,
        is_costly=traits.is_costly,
        is_fusible=traits.is_fusible,
        is_convolution=traits.is_convolution,
        internal_bytes=traits.internal_bytes,
        fused_internal_bytes=traits.fused_internal_bytes,
        draws=traits.draws,
        copied_bytes=traits.copied_bytes,
        places_bytes=traits.places_bytes,
        region_places_bytes=traits.region_places_bytes,
        statistics_bytes=traits.statistics_bytes,
        gradient_in_place=traits.gradient_in_place,
        reads_only_shapes=reads_only_shapes(call.operation),
        weight_bytes=sum(prod(w.shape) * DTYPE_BYTES[keras.backend.standardize_dtype(w.dtype)] for w in weights),
    )
