"""Who reads each symbolic tensor, to tell whether opening a layer keeps the order in which its gradients add up."""

from collections.abc import Iterable, Sequence
from typing import Any

import keras

_ANY_ORDER = 2
"""So many gradients have the same sum in any order; the sum of more is rounded otherwise if they are added in another order."""
_USER = object()
"""Reads what a model returns."""

Pairs = Iterable[tuple[Any, Any]]
"""Tensors that come in or go out, `(inside, outside)`."""


class Readers:
    """The readers of tensors while a model is flattened; a nested model or layer is one until it is entered."""

    def __init__(self, nodes: Sequence[Any], outputs: Sequence[Any]):
        self._of = _readers_in(nodes)
        for tensor in outputs:
            self._of.setdefault(id(tensor), []).append(_USER)

    def enter(self, node: Any, nodes: Sequence[Any], inputs: Pairs, outputs: Pairs) -> None:
        """Notes what the calls inside a nested model or layer read.

        Args:
            node: The call of the model or layer.
            nodes: The calls inside.
            inputs: The tensors that come in.
            outputs: The tensors that go out.
        """
        self._of |= self._inside(node, nodes, inputs, outputs)

    def divided_sums(self, node: Any, nodes: Sequence[Any], outputs: Sequence[Any]) -> list[Any]:
        """The tensors of which more than two gradients would come from several calls if those inside a layer took its place."""
        read_inside = _readers_in(nodes)
        found = self._inside(node, nodes, ((x, x) for x in node.input_tensors), zip(outputs, node.outputs, strict=True))
        own = {id(x) for x in node.input_tensors}  # the call itself is a reader of these, and one call inside may take its place
        tensors = {id(x): x for one in nodes for x in one.input_tensors}
        return [
            tensor
            for key, tensor in tensors.items()
            if len(found[key]) > _ANY_ORDER and len(read_inside[key]) > (key in own)
            if keras.backend.is_float_dtype(tensor.dtype)
        ]

    def is_read(self, tensor: Any) -> bool:
        return bool(self._of.get(id(tensor)))

    def others_come_first(self, node: Any, tensor: Any) -> bool:
        """Whether the gradients of a tensor from all its other readers are sure to be there before the first one from this call.

        That is so for the sum around it, `x + attention(x)`: its gradient must be there before the call's backward step begins.
        """
        others = [one for one in self._of.get(id(tensor), []) if one is not node]
        return all(map(_is_sum_of_two, others)) and {id(one) for one in others} <= self._after(node, others)

    def _after(self, node: Any, sought: Sequence[Any]) -> set[int]:
        """The ids of the calls that read what a call makes, or what is made of it; no more than it takes to find some."""
        missing = {id(one) for one in sought}
        found: set[int] = set()
        stack = [node]
        while stack and not missing <= found:
            for tensor in stack.pop().outputs:
                new = [one for one in self._of.get(id(tensor), []) if one is not _USER and id(one) not in found]
                found.update(map(id, new))
                stack.extend(new)
        return found

    def _inside(self, node: Any, nodes: Sequence[Any], inputs: Pairs, outputs: Pairs) -> dict[int, list[Any]]:
        found = _readers_in(nodes)
        for inside, outside in {(id(inside), id(outside)) for inside, outside in inputs}:
            found[inside] = [*found.get(inside, []), *(one for one in self._of.get(outside, []) if one is not node)]
        for inside, outside in outputs:
            found[id(inside)] = [*found.get(id(inside), []), *self._of.get(id(outside), [])]
        return found


def _readers_in(nodes: Sequence[Any]) -> dict[int, list[Any]]:
    found: dict[int, list[Any]] = {}
    for node in nodes:
        for key in dict.fromkeys(id(tensor) for tensor in node.input_tensors):
            found.setdefault(key, []).append(node)
    return found


def _is_sum_of_two(node: Any) -> bool:
    """One operation, whose backward step hands its gradient on to both at once."""
    if node is _USER or len(node.input_tensors) != 2 or type(node.operation).__name__ != "Add":
        return False
    dtypes = {keras.backend.standardize_dtype(x.dtype) for x in (*node.input_tensors, *node.outputs)}
    return type(node.operation).__module__.startswith("keras.") and len(dtypes) == 1
