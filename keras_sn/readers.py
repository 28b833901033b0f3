"""How many calls read each symbolic tensor, to tell whether opening a layer keeps the order in which its gradients add up."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import keras

_ANY_ORDER = 2
"""So many gradients have the same sum in any order; the sum of more is rounded otherwise if regions add them up."""


class Readers:
    """Counts the readers of tensors while a model is flattened; a nested model or layer counts as one until it is entered."""

    def __init__(self, nodes: Sequence[Any], outputs: Sequence[Any]):
        self._counts: dict[int, int] = _readers_in(nodes) + Counter(map(id, outputs))

    def enter(self, nodes: Sequence[Any], inputs: Iterable[tuple[Any, Any]], outputs: Iterable[tuple[Any, Any]]) -> None:
        """Notes what the calls inside a nested model or layer read.

        Args:
            nodes: The calls inside.
            inputs: The tensors that come in, `(inside, outside)`.
            outputs: The tensors that go out, likewise.
        """
        self._counts |= self._counts_inside(nodes, inputs, outputs)

    def add_up_alike(self, node: Any, nodes: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Whether no sum of more than two gradients is divided when the calls inside a layer take the place of its call."""
        read_inside = _readers_in(nodes)
        counts = self._counts_inside(nodes, ((x, x) for x in node.input_tensors), zip(outputs, node.outputs, strict=True))
        own = {id(x) for x in node.input_tensors}  # the call itself is a reader of these, and one call inside may take its place
        tensors = {id(x): x for one in nodes for x in one.input_tensors}
        return not any(
            counts[key] > _ANY_ORDER and read_inside[key] > (key in own)
            for key, tensor in tensors.items()
            if keras.backend.is_float_dtype(tensor.dtype)
        )

    def _counts_inside(self, nodes: Sequence[Any], inputs: Iterable[tuple], outputs: Iterable[tuple]) -> dict[int, int]:
        counts = _readers_in(nodes)
        for inside, outside in {(id(inside), id(outside)) for inside, outside in inputs}:
            counts[inside] += self._counts.get(outside, 1) - 1
        for inside, outside in outputs:
            counts[id(inside)] += self._counts.get(id(outside), 0)
        return dict(counts)


def _readers_in(nodes: Sequence[Any]) -> Counter:
    return Counter(key for node in nodes for key in {id(tensor) for tensor in node.input_tensors})
