"""Seconds: what a layer call and a copy take, by a roofline of a few numbers per device.

In: layer calls and their graph. Out: seconds. `device.measure_cost_model` measures the numbers.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cached_property
from math import log, prod

import numpy as np

from keras_sn.errors import PlanError
from keras_sn.graph import LayerCall, LayerGraph
from keras_sn.steps import BACKWARD, Step

Rates = tuple[tuple[int, float], ...]
"""Pairs of a contraction length and a rate in flop/s, the lengths ascending."""

LOW_PRECISION = ("float16", "bfloat16")

MAY_BE_ZERO = ("launch_seconds", "host_seconds_per_step", "host_seconds_per_variable", "host_seconds_per_kernel")

REGION_LAUNCHES = 10
"""A compiled function costs about as much as this many launches, beyond its kernels."""

COSTLY_KERNELS, NORMALIZATION_KERNELS, FUSED_KERNELS = (2, 5), (3, 4), (1, 1)
"""That XLA makes of the forward and backward step of a costly layer call (with transposes), of a fusible one with weights (sums
over the batch), of any other. In traces on an H200, less one for the update of each weight, that is 5 % too few for ResNet-50,
3 % too many for DenseNet-121, 14 % too few for U-Net, and 29 % too few for ViT, whose attention takes more."""

SUMS = (2, 1)
"""How often a normalization's forward and backward step read its input once more, for sums over the batch (the same traces)."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """What the device does in a second.

    A layer call takes `launch_seconds` plus the longer of its arithmetic and its memory traffic. Matrix units do more in a second
    the more products each number of the output is the sum of: the contraction length (input channels times kernel size).
    """

    flops_per_second: float
    bytes_per_second: float
    """Of the device's memory."""
    link_bytes_per_second: float
    """Between the device and a tier, one way."""
    launch_seconds: float
    """What one layer call or copy takes at least."""
    convolution_rates: Rates = ()
    """Of forward and recompute steps. None given: `flops_per_second`."""
    convolution_backward_rates: Rates = ()
    """Of both gradients together. None given: `convolution_rates`."""
    copies_overlap: bool = True
    """Whether the device computes while it copies."""
    matrix_rates: Rates = ()
    """None given: `flops_per_second`."""
    low_precision_speedup: float = 1.0
    """How many times more products a second are made of float16 or bfloat16 numbers."""
    host_seconds_per_step: float = 0.0
    """What the host takes for a training step while the device waits."""
    host_seconds_per_variable: float = 0.0
    """Likewise, for each variable of the model and of its optimizer."""
    host_seconds_per_kernel: float = 0.0
    """What the host takes to start a kernel of a compiled function; it runs ahead while the device computes."""

    def __post_init__(self):
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, bool):
                continue
            numbers = [number for pair in value for number in pair] if isinstance(value, (tuple, list)) else [value]
            if not all(number > 0 or (number == 0 and one.name in MAY_BE_ZERO) for number in numbers):
                raise PlanError(f"`{one.name}` of a cost model must be greater than zero. Received: {one.name}={value!r}")

    def forward_seconds(self, layer: LayerCall, graph: LayerGraph) -> float:
        """Seconds of the forward step, and of a recompute step."""
        return self._seconds(layer, graph, 1, graph.nbytes(*layer.inputs, *layer.outputs))

    def backward_seconds(self, layer: LayerCall, graph: LayerGraph) -> float:
        """Seconds of the backward step.

        A layer with weights makes two gradients (of its input and of its weights), so it does its arithmetic twice.
        """
        factor = 2 if layer.is_costly or layer.weight_bytes else 1
        gradients = (*layer.inputs, *layer.outputs)
        return self._seconds(layer, graph, factor, graph.nbytes(*layer.saved_for_backward, *gradients))

    def step_seconds(self, step: Step, graph: LayerGraph) -> float:
        """Seconds of any step of `training_steps(graph)`."""
        layer = graph.layers[graph.position[step.layer]]
        return self.backward_seconds(layer, graph) if step.phase == BACKWARD else self.forward_seconds(layer, graph)

    def transfer_seconds(self, nbytes: int) -> float:
        """Seconds of a copy between the device and a tier."""
        return self.launch_seconds + nbytes / self.link_bytes_per_second

    def host_seconds(self, variables: int) -> float:
        """Seconds of a training step in which the device waits for the host, for a model with so many variables."""
        return self.host_seconds_per_step + variables * self.host_seconds_per_variable

    def _seconds(self, layer: LayerCall, graph: LayerGraph, factor: int, nbytes: int) -> float:
        seconds = factor * layer.flops / self._flops_per_second(layer, graph, is_backward=factor > 1)
        # What it holds inside is written and read by kernels of their own; the backward step writes its gradient too. Of
        # attention it is the scores, with a product, a softmax and another product around them (a trace of ViT on an H200).
        inside = (1 + factor if layer.is_convolution else 4 * factor) * layer.internal_bytes * layer.is_costly
        return self.launch_seconds + max(seconds, nbytes / self.bytes_per_second) + inside / self.bytes_per_second

    def _flops_per_second(self, layer: LayerCall, graph: LayerGraph, *, is_backward: bool) -> float:
        rates = self.matrix_rates if layer.is_costly else ()
        if layer.is_convolution:
            rates = (is_backward and self.convolution_backward_rates) or self.convolution_rates
        made = sum(prod(graph.tensors[tensor].shape) for tensor in layer.outputs)
        is_low = layer.is_costly and any(graph.tensors[tensor].dtype in LOW_PRECISION for tensor in layer.outputs)
        speedup = self.low_precision_speedup if is_low else 1.0
        if not rates or not made or not layer.flops:
            return speedup * self.flops_per_second
        # What a layer of several products holds inside is made of products too.
        made *= max(1.0, layer.internal_bytes / graph.nbytes(*layer.outputs))
        contraction = layer.flops / (2 * made)  # a multiplication and an addition each
        lengths, found = zip(*rates, strict=True)
        return speedup * float(np.interp(log(contraction), [log(length) for length in lengths], found))


ON_GPU = CostModel(
    flops_per_second=3.6e14,
    bytes_per_second=3.5e12,
    link_bytes_per_second=5.4e10,
    launch_seconds=2e-6,
    convolution_rates=((576, 2.0e14),),
    convolution_backward_rates=((576, 1.2e14),),
    low_precision_speedup=2.0,
    host_seconds_per_step=2.5e-3,
    host_seconds_per_variable=1e-5,
    host_seconds_per_kernel=8.5e-6,
)
"""A data-centre GPU of 2022 with TF32 (about as measured on an H200), where nothing was measured."""
ON_CPU = CostModel(1.0e11, 2.0e10, 1.0e10, 2e-5, copies_overlap=False)
"""A few cores of a CPU, where nothing was measured."""


@dataclass(frozen=True, eq=False)
class StepCosts:
    """Seconds of each layer call of one graph on one device.

    Where XLA compiles the layer calls (`LayerGraph.is_compiled`), a fusible one only reads what a layer call that is not fusible
    made, and writes what such a one, or the user, reads; and each kernel is a launch.

    Args:
        graph: The layer graph.
        model: The device.
    """

    graph: LayerGraph
    model: CostModel

    @cached_property
    def kernels(self) -> tuple[tuple[int, int], ...]:
        """By position, how many kernels the forward (or recompute) step and the backward step are."""
        return tuple(_kernels(layer) if self.graph.is_compiled else (1, 1) for layer in self.graph.layers)

    @cached_property
    def kernel_count(self) -> int:
        """All kernels of one step that runs nothing again."""
        return sum(map(sum, self.kernels))

    @cached_property
    def forward(self) -> tuple[float, ...]:
        """By position, seconds of the forward step."""
        pairs = zip(self.graph.layers, self.kernels, strict=True)
        return tuple(self._seconds(layer, kernels, 1, self.model.forward_seconds) for layer, (kernels, _) in pairs)

    @cached_property
    def kernels_again(self) -> tuple[int, ...]:
        """By position, how many kernels a recompute step is."""
        pairs = zip(self.graph.layers, self.kernels, strict=True)
        return tuple(min(kernels, FUSED_KERNELS[0]) if layer.statistics_bytes else kernels for layer, (kernels, _) in pairs)

    @cached_property
    def again(self) -> tuple[float, ...]:
        """By position, seconds of a recompute step."""
        pairs = zip(self.graph.layers, self.kernels_again, strict=True)
        alone = self.model.forward_seconds
        return tuple(self._seconds(layer, kernels, 1, alone, has_sums=layer.statistics_bytes > 0) for layer, kernels in pairs)

    @cached_property
    def backward(self) -> tuple[float, ...]:
        """By position, seconds of the backward step. A fused one reads its input again and passes two gradients on."""
        pairs = zip(self.graph.layers, self.kernels, strict=True)
        return tuple(self._seconds(layer, kernels, 2, self.model.backward_seconds) for layer, (_, kernels) in pairs)

    @cached_property
    def plain_seconds(self) -> float:
        """One training step in which nothing is recomputed and nothing moves, without the optimizer's update."""
        return sum(self.forward) + sum(self.backward)

    @property
    def plain_step_seconds(self) -> float:
        """The same, or what the host takes to start its kernels, if that is longer."""
        return max(self.plain_seconds, self.kernel_count * self.model.host_seconds_per_kernel)

    @property
    def region_seconds(self) -> float:
        """What one more region costs, for its forward and its backward function together."""
        return 2 * REGION_LAUNCHES * self.model.launch_seconds

    @cached_property
    def _materialized(self) -> frozenset[str]:
        """The tensors that exist in memory although fusible layer calls make or read them."""
        made_or_read = {t for layer in self.graph.layers if not layer.is_fusible for t in (*layer.inputs, *layer.outputs)}
        return frozenset({*made_or_read, *self.graph.outputs, *self.graph.inputs})

    def _seconds(
        self,
        layer: LayerCall,
        kernels: int,
        passes: int,
        alone: Callable[[LayerCall, LayerGraph], float],
        *,
        has_sums: bool = False,
    ) -> float:
        """Of a step of so many kernels: so many passes over its bytes if it is fused, else what it takes alone."""
        launch = self.model.launch_seconds
        if self.graph.is_compiled and layer.is_fusible:
            sums = SUMS[passes - 1] * self.graph.nbytes(*layer.inputs) if layer.weight_bytes and not has_sums else 0
            return kernels * launch + (passes * self._fused_bytes(layer) + sums) / self.model.bytes_per_second
        return alone(layer, self.graph) + (kernels - 1) * launch  # which has one launch in it

    def _fused_bytes(self, layer: LayerCall) -> int:
        return self.graph.nbytes(*(t for t in (*layer.inputs, *layer.outputs) if t in self._materialized))


def _kernels(layer: LayerCall) -> tuple[int, int]:
    if not layer.is_fusible:
        return COSTLY_KERNELS if layer.is_costly else FUSED_KERNELS
    return NORMALIZATION_KERNELS if layer.weight_bytes else FUSED_KERNELS
