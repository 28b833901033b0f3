"""What a compiled region's backward function makes again, and until when that is there.

In: layer calls that follow one another, and what is saved for them. Out: tensors with the step that reads them last.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from keras_sn.graph import LayerCall, LayerGraph, virtual_inside


@dataclass(frozen=True, eq=False)
class RegionAgain:
    """A region whose backward function XLA compiles."""

    graph: LayerGraph
    layers: tuple[LayerCall, ...]
    saved: frozenset[str]

    @cached_property
    def first(self) -> int:
        return self.graph.position[self.layers[0].name]

    @cached_property
    def last(self) -> int:
        return self.first + len(self.layers) - 1

    @cached_property
    def producer(self) -> dict[str, LayerCall]:
        return {tensor: layer for layer in self.layers for tensor in layer.outputs}

    @cached_property
    def inputs(self) -> dict[str, None]:
        """Those whose gradients it returns."""
        return dict.fromkeys(t for layer in self.layers for t in self.differentiable(layer) if t not in self.producer)

    def differentiable(self, layer: LayerCall) -> list[str]:
        """Those inputs of a layer call that have gradients."""
        graph = self.graph
        return [t for t in dict.fromkeys(layer.inputs) if t in graph.producer and graph.tensors[t].is_differentiable]

    def is_crossing(self, tensor: str) -> bool:
        return self.graph.last_use.get(tensor, -1) > self.last

    @cached_property
    def virtual(self) -> set[str]:
        return virtual_inside(self.layers)

    def phase(self, position: int, step: int) -> int:
        """When a backward step computes gradients of weights (0) or of inputs (1), in the order of the backward pass."""
        return 2 * (self.last - position) + step

    @cached_property
    def needed_until(self) -> dict[str, int]:
        """What is made again and written -> the phase that reads it last."""
        until: dict[str, int] = {}
        seen: dict[bool, set[str]] = {False: set(), True: set()}
        for position, layer in enumerate(self.layers, self.first):  # the first that reads it in the model is the last in the pass
            for tensor in reversed(layer.saved_for_backward):
                for one in self._made_from(tensor, is_derived=layer.is_fusible, seen=seen[layer.is_fusible]):
                    until.setdefault(one, self.phase(position, 0 if layer.is_costly and tensor in layer.inputs else 1))
        until = dict(reversed(until.items()))
        for layer in self.layers:  # what adds up several normalizations hands one gradient to all, and XLA runs them at once
            siblings = [self.producer[t] for t in layer.inputs if t in self.producer and self.producer[t].is_fusible]
            if layer.gradient_in_place and len(siblings) > 1:
                last = self.phase(min(self.graph.position[one.name] for one in siblings), 1)
                read = {t for sibling in siblings for t in sibling.saved_for_backward if t in until}
                until |= {tensor: max(last, until[tensor]) for tensor in read}
        for tensor in self._pooled.intersection(until):  # an activation that is there anyway tells where it was positive
            until[tensor] = max(until[tensor], self.phase(self._made_by_fusion_from(tensor), 1))
        return until

    @property
    def _pooled(self) -> set[str]:
        """What a pooling layer and later regions read."""
        read = {t for layer in self.layers if not (layer.is_fusible or layer.is_costly) for t in layer.inputs}
        return {tensor for tensor in read if tensor in self.producer and self.is_crossing(tensor)}

    def _made_by_fusion_from(self, tensor: str) -> int:
        """The position of the first of the fusible layer calls that lead to a tensor."""
        layer = self.producer[tensor]
        while made := [self.producer[t] for t in layer.inputs if t in self.producer and self.producer[t].is_fusible]:
            layer = made[0]
        return self.graph.position[layer.name]

    def _made_from(self, tensor: str, *, is_derived: bool, seen: set[str]) -> Iterator[str]:
        """The tensors in memory that are read where a tensor is read; its own computation is repeated if it is fusible.

        Args:
            tensor: What is read.
            is_derived: Whether fusible computations are repeated for who reads it.
            seen: What has been found for such readers, and is not found again; more is added.
        """
        pending = [tensor]
        while pending:
            one = pending.pop()
            if one in seen or one in self.saved or one not in self.producer:
                continue
            seen.add(one)
            if one in self.virtual or (is_derived and self.producer[one].is_fusible):
                pending.extend(self.producer[one].inputs)
            else:
                yield one
