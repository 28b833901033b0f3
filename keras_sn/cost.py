"""Seconds: what a layer call and a copy take, by a roofline of four numbers per device.

In: a `LayerCall` and its graph. Out: seconds. `device.measure_cost_model` measures the four numbers.
"""

from dataclasses import dataclass, fields

from keras_sn.errors import PlanError
from keras_sn.graph import LayerCall, LayerGraph
from keras_sn.steps import BACKWARD, Step


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the device does in a second.

    A layer call takes `launch_seconds` plus the longer of its arithmetic and its memory traffic.
    """

    flops_per_second: float
    bytes_per_second: float
    """Of the device's memory."""
    link_bytes_per_second: float
    """Between the device and a tier, one way."""
    launch_seconds: float
    """What one layer call or copy takes at least."""

    def __post_init__(self):
        for one in fields(self):
            value = getattr(self, one.name)
            if not (value > 0 or (value == 0 and one.name == "launch_seconds")):
                raise PlanError(f"`{one.name}` of a cost model must be greater than zero. Received: {one.name}={value!r}")

    def forward_seconds(self, layer: LayerCall, graph: LayerGraph) -> float:
        """Seconds of the forward step, and of a recompute step."""
        return self._seconds(layer.flops, graph.nbytes(*layer.inputs, *layer.outputs))

    def backward_seconds(self, layer: LayerCall, graph: LayerGraph) -> float:
        """Seconds of the backward step.

        A layer with weights makes two gradients (of its input and of its weights), so it does its arithmetic twice.
        """
        factor = 2 if layer.is_costly or layer.weight_bytes else 1
        gradients = (*layer.inputs, *layer.outputs)
        return self._seconds(factor * layer.flops, graph.nbytes(*layer.saved_for_backward, *gradients))

    def step_seconds(self, step: Step, graph: LayerGraph) -> float:
        """Seconds of any step of `training_steps(graph)`."""
        layer = graph.layers[graph.position[step.layer]]
        return self.backward_seconds(layer, graph) if step.phase == BACKWARD else self.forward_seconds(layer, graph)

    def transfer_seconds(self, nbytes: int) -> float:
        """Seconds of a copy between the device and a tier."""
        return self.launch_seconds + nbytes / self.link_bytes_per_second

    def _seconds(self, flops: int, nbytes: int) -> float:
        return self.launch_seconds + max(flops / self.flops_per_second, nbytes / self.bytes_per_second)
