"""The calls that code makes on symbolic tensors, in their order, by private names of Keras: no public one shows them.

`tests/test_keras_internals.py` fails when one of them changes.
"""

import functools
import operator
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.ops.node import Node
from keras.src.ops.symbolic_arguments import SymbolicArguments
from keras.src.utils.naming import to_snake_case


@dataclass(eq=False)
class SymbolicCall:
    """A call on symbolic tensors, like a node of Keras, but on no list of the operation."""

    operation: Any
    arguments: Any
    structure: Any
    """Of the outputs."""

    @property
    def outputs(self) -> list[Any]:
        return keras.tree.flatten(self.structure)

    @property
    def input_tensors(self) -> list[Any]:
        return self.arguments.keras_tensors

    @property
    def training(self) -> Any:
        """The mode that it is made in, which Keras notes among the arguments of a layer that takes it."""
        mode = self.arguments.kwargs.get("training")
        return True if mode is None else mode

    def with_numbers(self) -> "SymbolicCall":
        """The same call, with numbers in place of the scalar constants among its arguments, which the graph around it owns."""
        given = self.arguments.args, self.arguments.kwargs
        numbers = {id(one): number(one) for one in keras.tree.flatten(given)}
        if all(value is None for value in numbers.values()):
            return self
        args, kwargs = keras.tree.map_structure(lambda one: one if numbers[id(one)] is None else numbers[id(one)], given)
        return SymbolicCall(self.operation, SymbolicArguments(*args, **kwargs), self.structure)


def number(value: Any) -> Any:
    """What a scalar constant in a graph is, also one that is cast there; None for anything else."""
    if not isinstance(value, tf.Tensor) or not hasattr(value, "graph"):
        return None
    known = tf.get_static_value(value) if value.shape.rank == 0 and value.op.type in ("Const", "Cast") else None
    return None if known is None else np.asarray(known)[()]


@contextmanager
def calls_noted() -> Iterator[list[SymbolicCall]]:
    """Inside, the calls that this thread makes on symbolic tensors are noted in their order and leave nothing on the layers.

    Keras makes a node of each call, which it puts on lists of the layers; walking back from the outputs of a model finds them
    again, but not the order of the calls, nor those whose outputs nobody reads. Operations that are no layers get the name of
    their kind: Keras numbers them through the whole program, and its numbers are left as they were.
    """
    calls: list[SymbolicCall] = []
    numbers = global_state.get_global_attribute("object_name_uids")
    numbers_before = None if numbers is None else numbers.copy()
    original, thread = Node.__init__, threading.get_ident()

    def note(self: Any, operation: Any, call_args: Any = None, call_kwargs: Any = None, outputs: Any = None) -> None:
        if threading.get_ident() != thread:
            return original(self, operation, call_args, call_kwargs, outputs)
        if not isinstance(operation, keras.Layer):
            operation.name = to_snake_case(type(operation).__name__)
        if (symbol := _OPERATORS.get(sys._getframe(2).f_code)) is not None:
            operation.__class__ = _as_operator(type(operation), symbol)
        calls.append(SymbolicCall(operation, SymbolicArguments(*call_args, **call_kwargs), outputs))
        return None

    Node.__init__ = note
    try:
        yield calls
    finally:
        Node.__init__ = original
        global_state.set_global_attribute("object_name_uids", numbers_before)


_SYMBOLS = ("add", "sub", "mul", "matmul", "truediv", "pow", "floordiv", "mod", "and", "or", "xor")
_SYMBOLS_OF_ONE_SIDE = ("neg", "abs", "lt", "le", "gt", "ge", "ne", "invert")
_OPERATORS = {
    getattr(keras.KerasTensor, f"__{side}{symbol}__").__code__: symbol
    for symbols, sides in ((_SYMBOLS, ("", "r")), (_SYMBOLS_OF_ONE_SIDE, ("",)))
    for symbol in symbols
    for side in sides
}
"""The code of the methods that run for Python's operators on symbolic tensors -> the operator."""


@functools.cache
def _as_operator(kind: type, symbol: str) -> type:
    """The operation, computed as Python's operator on tensors is: TensorFlow adds where `keras.ops.add` may call `BiasAdd`."""
    compute = getattr(operator, f"__{symbol}__")
    return type(kind.__name__, (kind,), {"call": lambda self, *operands: compute(*operands), "__module__": kind.__module__})


@contextmanager
def computed_by_call(layer: Any) -> Iterator[None]:
    """Inside, a symbolic call of the layer runs its `call` on the symbolic tensors, not on placeholders in a graph of its own.

    So what surrounds it (autocast of the inputs, masks, the mode) is Keras' own code.
    """
    vars(layer)["compute_output_spec"] = layer.call
    try:
        yield
    finally:
        del vars(layer)["compute_output_spec"]
