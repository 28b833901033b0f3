"""How many bytes of gradients are on the device while each layer call's backward step runs.

The gradient of a tensor exists from the backward step of its last reader, which comes first, to that of its producer. Layer calls
that work in place (`LayerCall.gradient_in_place`) hand their output's gradient on as their input's; an addition hands it to all
its inputs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

from keras_sn.backward_memory import gradient_levels
from keras_sn.graph import LayerCall, LayerGraph

_KNOWN: "WeakKeyDictionary[LayerGraph, tuple[int, ...]]" = WeakKeyDictionary()
"""Every prediction of a plan of a graph asks for the same bytes."""


def gradient_bytes(graph: LayerGraph) -> tuple[int, ...]:
    """By position: the bytes of all gradients that exist during the backward step of the layer call there.

    Gradients of weights count from the backward step that makes them to the end, unless weights are updated in the backward pass:
    then they are their region's (`LayerGraph.updates_in_backward`). What the user feeds has none.
    """
    if graph not in _KNOWN:
        of_weights = [0] * len(graph.layers) if graph.updates_in_backward else until_the_end(graph.layers)
        of_activations = gradient_levels(graph) if graph.is_compiled else _of_activations(graph)
        _KNOWN[graph] = tuple(map(sum, zip(of_activations, of_weights, strict=True)))
    return _KNOWN[graph]


def _of_activations(graph: LayerGraph) -> list[int]:
    count = len(graph.layers)
    buffers = _Buffers()
    for tensor in graph.outputs:
        if tensor in graph.producer and graph.tensors[tensor].is_differentiable:
            buffers.make(tensor, graph.nbytes(tensor), count - 1)
    for position in range(count - 1, -1, -1):
        layer = graph.layers[position]
        arriving = [tensor for tensor in layer.outputs if tensor in buffers.of]
        if not arriving:
            continue
        buffers.touch(arriving, position)
        for tensor in dict.fromkeys(layer.inputs):
            if tensor not in graph.producer or not graph.tensors[tensor].is_differentiable:
                continue
            nbytes = graph.nbytes(tensor)
            if tensor in buffers.of:
                buffers.add_to(tensor, nbytes, position)
            elif layer.gradient_in_place and graph.nbytes(arriving[0]) == nbytes:
                buffers.share(tensor, arriving[0])
            else:
                buffers.make(tensor, nbytes, position)
        for tensor in arriving:
            buffers.drop(tensor)
    change = [0] * (count + 1)
    for first, last, nbytes in zip(buffers.first, buffers.last, buffers.nbytes, strict=True):
        change[first] += nbytes
        change[last + 1] -= nbytes
    return list(accumulate(change[:-1]))


def until_the_end(layers: Sequence[LayerCall]) -> list[int]:
    """By layer call: the bytes of the weight gradients that its backward step and those before it (of later layer calls) make."""
    return list(accumulate(layer.weight_bytes for layer in reversed(layers)))[::-1]


@dataclass
class _Buffers:
    """Gradients in memory; positions fall as the backward pass goes on."""

    of: dict[str, int] = field(default_factory=dict)
    """Tensor -> the buffer of its gradient, or of what has come of it so far."""
    first: list[int] = field(default_factory=list)
    last: list[int] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)
    users: list[int] = field(default_factory=list)

    def make(self, tensor: str, nbytes: int, position: int) -> None:
        self.of[tensor] = len(self.nbytes)
        self.first.append(position)
        self.last.append(position)
        self.nbytes.append(nbytes)
        self.users.append(1)

    def share(self, tensor: str, owner: str) -> None:
        self.of[tensor] = self.of[owner]
        self.users[self.of[owner]] += 1

    def add_to(self, tensor: str, nbytes: int, position: int) -> None:
        """One more contribution; where others use the buffer too, the sum needs a new one."""
        self.touch([tensor], position)
        if self.users[self.of[tensor]] > 1:
            self.drop(tensor)
            self.make(tensor, nbytes, position)

    def touch(self, tensors: list[str], position: int) -> None:
        for tensor in tensors:
            self.first[self.of[tensor]] = position

    def drop(self, tensor: str) -> None:
        self.users[self.of.pop(tensor)] -= 1
