"""Possible regions whose backward passes are counted buffer by buffer, where the scan of `spans` is too rough.

That takes some milliseconds a region instead of microseconds, so it is worth it only where memory is short.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from keras_sn.drafts import Draft, stretch
from keras_sn.plan import Region, Saved
from keras_sn.region_bytes import region_bytes
from keras_sn.spans import KEEP, Option, Span, SpanCosts


@dataclass(frozen=True, eq=False)
class ExactSpanCosts(SpanCosts):
    """`SpanCosts` that know of every option what a plan's region with the same layer calls would hold."""

    def ending_at(self, last: int, starts: Sequence[int]) -> Iterator[Span]:
        """Spans from each of `starts` (descending) to `last`."""
        for span in super().ending_at(last, starts):
            options = (one if one.level == KEEP else self._counted(span, one) for one in span.options)
            yield replace(span, options=tuple(options))

    def _counted(self, span: Span, option: Option) -> Option:
        run, graph = range(span.first, span.last + 1), self.graph
        own = (t for position in run if self.saves(option.level, position) for t in graph.layers[position].outputs)
        layers = stretch(graph, run)
        kept = [tensor for tensor, _ in layers.wanted_inside(Draft((span.last,), saved=frozenset(own)))]
        region = Region(layers.names, tuple(Saved(tensor) for tensor in (*layers.read_inputs, *kept)))
        # Those that a later region saves, too, are there all along, but nobody has counted them up to here.
        crossing = sum(self.nbytes[tensor] for tensor in kept if graph.last_use.get(tensor, -1) > span.last)
        return replace(option, backward_bytes=region_bytes(graph, region).backward + crossing)
