"""One layer call as a region of its own, for models that are not graphs.

The call is traced as a graph of one layer call and run by the same executor as a plan's regions. Calls of one layer with equal
arguments on equal shapes have one executor; calls of equal layers share their compiled functions.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.compiling import BackgroundCompiler
from keras_sn.graph import LayerCall, LayerGraph, TensorSpec
from keras_sn.layer_calls import CallArguments, ModelTrace, TracedCall
from keras_sn.passes import assign_all
from keras_sn.plan import DEVICE, HOST, Plan, Region, Saved
from keras_sn.region_library import RegionLibrary, autocast_dtype_of
from keras_sn.runtime import PlanExecutor

_NAME = "call"
_COMPARABLE = (str, int, float, bool, type(None), np.number, np.bool_)


@dataclass(frozen=True, eq=False)
class _CallExecutor:
    executor: PlanExecutor
    structure: Any
    """Of the outputs: a `KerasTensor` for each tensor, and None, numbers and texts as they are."""


class _TensorsOf(TracedCall):
    """A call whose outputs are the tensors that the layer returns; it may return None, numbers and texts beside them."""

    def run(self, tensors: dict[str, Any]) -> list[Any]:
        return [y for y in super().run(tensors) if _is_tensor(y)]


def _is_tensor(leaf: Any) -> bool:
    return tf.is_tensor(leaf) or isinstance(leaf, keras.KerasTensor)


class CallRunner:
    """Runs layer calls as regions that save their inputs and recompute the rest.

    Args:
        jit: Compile the calls with XLA where their layers allow it.
        ties: XLA may compile the whole step around them; see `PlanExecutor`.
        compiler: Compiles them before they first run, in the background; None to leave it to TensorFlow.
    """

    def __init__(self, *, jit: bool, ties: bool, compiler: BackgroundCompiler | None = None):
        self.jit, self.ties = jit, ties
        self.library = RegionLibrary(compiler)
        self._executors: dict[Hashable, _CallExecutor | None] = {}

    def run(self, call: "LayerCallOnTensors", *, offload: bool) -> Any:
        """Makes a call.

        Args:
            call: The call.
            offload: Let its inputs wait on the host.

        Returns:
            What the layer returns. Its state has been updated and its losses have been added, once.
        """
        key = call.key()
        if key is None:
            return call.layer(*call.args, **call.kwargs, training=call.training)
        if (key, offload) not in self._executors:
            self._executors[key, offload] = self._executor(call, offload)
        called = self._executors[key, offload]
        if called is None:
            return call.layer(*call.args, **call.kwargs, training=call.training)
        result = called.executor.run(call.tensors)
        result.add_losses()
        assign_all(result.state_updates)
        made = iter(result.outputs)
        return keras.tree.map_structure(lambda leaf: next(made) if _is_tensor(leaf) else leaf, called.structure)

    def _executor(self, call: "LayerCallOnTensors", offload: bool) -> _CallExecutor | None:
        """What runs calls like this one; None if they return no tensor."""
        trace, structure = call.trace()
        if not trace.graph.outputs:
            return None
        saved = tuple(Saved(name, HOST if offload else DEVICE) for name in trace.graph.inputs)
        plan = Plan("dict", 0, (Region((_NAME,), saved),), 0, 0, 0)
        options = {"jit": self.jit, "library": self.library, "ties": self.ties, "owner": self}
        executor = PlanExecutor(trace, plan, autocast_dtype=autocast_dtype_of(call.layer), **options)
        return _CallExecutor(executor, structure)


@dataclass(frozen=True, eq=False)
class LayerCallOnTensors:
    """One call of a layer."""

    layer: Any
    args: tuple
    """Tensors may be anywhere inside lists, tuples and dicts."""
    kwargs: dict[str, Any]
    """Without `training`."""
    training: bool | None
    """The mode."""

    @classmethod
    def inside_keras(cls, layer: Any, args: tuple, kwargs: dict[str, Any]) -> "LayerCallOnTensors":
        """What Keras' `Layer.__call__` is about to hand to `layer.call`; that has the mode only if it takes one."""
        rest = {name: value for name, value in kwargs.items() if name != "training"}
        return cls(layer, args, rest, keras_internals.training_mode())

    @cached_property
    def leaves(self) -> list[Any]:
        return keras.tree.flatten((self.args, self.kwargs))

    @cached_property
    def tensors(self) -> list[Any]:
        """The different tensors among the arguments."""
        return list({id(leaf): leaf for leaf in self.leaves if tf.is_tensor(leaf)}.values())

    def key(self) -> Hashable | None:
        """What tells it from other calls; None if it cannot be a region, because of what its arguments are."""
        places = {id(one): place for place, one in enumerate(self.tensors)}
        is_dense = all(isinstance(one, tf.Tensor) for one in self.tensors)  # ragged and sparse ones have no buffer to save
        if not places or not is_dense or not all(id(one) in places or isinstance(one, _COMPARABLE) for one in self.leaves):
            return None
        values = tuple(("tensor", places[id(one)]) if id(one) in places else (type(one), one) for one in self.leaves)
        structure = repr(keras.tree.map_structure(lambda _: None, (self.args, self.kwargs)))
        specs = tuple((tuple(one.shape), one.dtype) for one in self.tensors)
        trainable = tuple(id(variable) for variable in self.layer.trainable_variables)
        return id(self.layer), structure, values, specs, trainable, self.training

    def traced(self, name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> TracedCall:
        """The call, ready to be made again on other tensors. `inputs` are names for `tensors`."""
        places = {id(one): keras.KerasTensor(one.shape, one.dtype.name) for one in self.tensors}
        args, kwargs = CallArguments(self.args, self.kwargs).fill_in(places)
        bindings = tuple((id(place), given) for place, given in zip(places.values(), inputs, strict=True))
        return _TensorsOf(name, self.layer, CallArguments(args, kwargs), bindings, outputs, self.training)

    def trace(self) -> tuple[ModelTrace, Any]:
        """The call as a graph of one layer call, whose inputs are its tensors; and the structure of what it returns."""
        inputs = tuple(f"input {number}" for number in range(len(self.tensors)))
        arguments = self.traced(_NAME, inputs, ()).arguments
        with keras_internals.losses_forgotten(self.layer):
            structure = keras_internals.output_spec(self.layer, *arguments.args, **arguments.kwargs, training=self.training)
        outputs = [leaf for leaf in keras.tree.flatten(structure) if _is_tensor(leaf)]
        made = tuple(f"output {number}" for number in range(len(outputs)))
        specs = {n: TensorSpec(n, tuple(x.shape), x.dtype.name, "input") for n, x in zip(inputs, self.tensors, strict=True)}
        specs |= {name: TensorSpec(name, tuple(one.shape), one.dtype) for name, one in zip(made, outputs, strict=True)}
        graph = LayerGraph((LayerCall(_NAME, type(self.layer).__name__, inputs, made),), specs, inputs, made)
        return ModelTrace((self.traced(_NAME, inputs, made),), graph), structure
