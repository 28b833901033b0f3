"""What XLA makes of a layer graph: what it never writes to memory, and what its fused backward steps hold longer.

Compared with XLA's own buffer assignments on an H200 (docs/measurements.md).
"""

from dataclasses import replace

from keras_sn.graph import LayerCall, LayerGraph

UNPLANNED_SHARE = 0.025
"""Of the predicted bytes: XLA's buffers are not packed without gaps, and its order is not always the best for memory."""


def as_compiled(graph: LayerGraph) -> LayerGraph:
    """The graph as XLA runs it: `is_compiled`, and layer calls that hold what their fused operations hold."""
    return replace(graph, layers=tuple(_fused(graph, layer) for layer in graph.layers), is_compiled=True)


def _fused(graph: LayerGraph, layer: LayerCall) -> LayerCall:
    if not layer.is_fusible:
        return replace(layer, internal_bytes=layer.fused_internal_bytes)
    reads, held_bytes = layer.saved_for_backward, layer.internal_bytes if layer.draws else layer.fused_internal_bytes
    # What it holds is computed again where it is read, from its inputs. Statistics are too small to show that they are read.
    is_derived = layer.internal_bytes >= graph.nbytes(*layer.inputs) / 4 > 0
    if is_derived and not layer.draws and not reads:
        reads = tuple(tensor for tensor in layer.inputs if graph.tensors[tensor].is_differentiable)
    return replace(layer, internal_bytes=held_bytes, saved_for_backward=reads)
