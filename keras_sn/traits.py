"""What a rule says of one layer call. Plain data, shared by the rules and by the tracing of TensorFlow operations."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from keras_sn.graph import TensorSpec


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What a rule says of one layer call."""

    reads_inputs: bool = True
    """The backward step reads the inputs."""
    reads_outputs: bool = True
    """The backward step reads the outputs."""
    flops: int = 0
    internal_bytes: int = 0
    """Held for the backward step beyond inputs and outputs when the layer is not compiled by XLA, in bytes."""
    fused_internal_bytes: int = 0
    """Of `internal_bytes`, what a costly layer holds under XLA: what its matrix products make or read."""
    draws: bool = False
    """What it holds is drawn at random (dropout)."""
    copied_bytes: int = 0
    """Of `fused_internal_bytes`, copies in another layout, which a compiled region makes for the backward step alone."""
    places_bytes: int = 0
    """Where XLA notes the places of the maxima, for a backward step that hands its gradient to them, in bytes."""
    region_places_bytes: int = 0
    """The same in a region's backward function, whose gradient of max pooling may be another (see `max_pooling`)."""
    statistics_bytes: int = 0
    """Sums over the batch that a recomputation is given, in bytes: it need not compute them again."""
    is_costly: bool = False
    is_fusible: bool = False
    """XLA fuses it into its neighbours: element-wise operations, broadcasts, reshapes, normalizations, dropout.

    Recomputing it costs no launch and no traffic of its own.
    """
    gradient_in_place: bool = False
    """The gradient of the input takes the place of the gradient of the output, in the same memory."""
    is_convolution: bool = False
    """Its arithmetic runs at the device's convolution rate, not at its matrix rate."""


Rule = Callable[[Any, Sequence[TensorSpec], Sequence[TensorSpec]], LayerTraits]
"""`(layer, input_specs, output_specs) -> LayerTraits`."""
BuiltInRule = Callable[[Any, Sequence[TensorSpec], Sequence[TensorSpec]], LayerTraits | None]
"""The same, with None for a case that is better measured than told."""


def elements(specs: Sequence[TensorSpec]) -> int:
    return sum(prod(spec.shape) for spec in specs)


def total_bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)
