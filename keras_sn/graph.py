"""What the planner knows of a model: layer calls and the tensors between them. Plain data, no Keras, no TensorFlow.

A `LayerGraph` is made by `keras_sn.trace` from a Keras model and read by everything that decides. Layer calls stand in
an order in which each comes after the producers of its inputs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from numbers import Integral

from keras_sn.errors import PlanError, shown

DTYPE_BYTES = {"bool": 1, "string": 0, "bfloat16": 2, "float16": 2, "half": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
DTYPE_BYTES |= {f"{kind}{bits}": bits // 8 for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}
DTYPE_BYTES |= {"complex64": 8, "complex128": 16, "int4": 1, "uint4": 1}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor between layer calls."""

    name: str
    shape: tuple[int, ...]
    """With the batch axis; every axis known, where bytes are asked for."""
    dtype: str
    kind: str = "activation"
    """`"input"` (fed by the user; nobody can free or recompute it) or `"activation"`."""

    @property
    def nbytes(self) -> int:
        if None in self.shape:
            raise PlanError(
                f"Tensor {self.name!r} has an axis of unknown size, so its bytes cannot be planned. Give the full shape. "
                f"Received: shape={self.shape!r}"
            )
        return prod(self.shape) * DTYPE_BYTES[self.dtype]

    @property
    def is_differentiable(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "half", "complex"))


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer or operation."""

    name: str
    layer_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    saved_for_backward: tuple[str, ...] = ()
    """Which of its own inputs and outputs the backward step reads."""
    flops: int = 0
    """Floating-point operations of the forward step; the backward step of a layer with weights does about twice as many."""
    workspace_bytes: int = 0
    """Scratch memory during the call, in bytes."""
    is_costly: bool = False
    """Convolutions, dense layers, attention: what SuperNeurons keeps (section 3.4) because recomputing it is dear."""
    internal_bytes: int = 0
    """What the layer itself holds for its backward step beyond its inputs and outputs, in bytes, outside XLA."""
    weight_bytes: int = 0
    """Its trainable weights, in bytes; a shared layer counts them at its first call."""
    is_fusible: bool = False
    """XLA fuses it into its neighbours: it has no launch of its own, and memory traffic only where its neighbours have not."""
    fused_internal_bytes: int = 0
    """Of `internal_bytes`, what it holds under XLA: what its convolutions and matrix products make or read."""
    draws: bool = False
    """What it holds is drawn at random (dropout)."""
    copied_bytes: int = 0
    """Of `fused_internal_bytes`, copies in another layout, which a compiled region makes for the backward step alone."""
    places_bytes: int = 0
    """Where XLA notes the places of the maxima that it takes (max pooling), for the backward step."""
    region_places_bytes: int = 0
    """The same in a region's backward function, which may do without."""
    statistics_bytes: int = 0
    """Sums over the batch that wait for its recomputation, which need not compute them again."""
    is_convolution: bool = False
    """Its arithmetic runs at the device's rate for convolutions."""
    reads_only_shapes: bool = False
    """Its backward step needs no values: an addition, a concatenation."""
    gradient_in_place: bool = False
    """The gradient of the input overwrites the gradient of the output (activations, LRN and softmax in the paper)."""


@dataclass(frozen=True, eq=False)
class LayerGraph:
    """Layer calls in execution order, and the tensors that they read and write."""

    layers: tuple[LayerCall, ...]
    tensors: Mapping[str, TensorSpec]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    is_compiled: bool = False
    """The layer calls are described as XLA runs them; see `fusion`."""
    updates_in_backward: bool = False
    """A region's weights are updated as soon as its backward pass has run: its weight gradients wait for no others."""
    fixed: frozenset[str] | None = None
    """Of a model that is not a graph of layers, each layer call is a region; these, raw operations, run as they are. None for a
    graph of layers, which can be cut anywhere."""

    def __post_init__(self):
        known = set(self.inputs)
        names = set()
        for layer in self.layers:
            if layer.name in names:
                raise PlanError(f"Two layer calls have one name. Received: {layer.name!r}")
            names.add(layer.name)
            for tensor in layer.inputs:
                if tensor not in known:
                    raise PlanError(
                        f"Layer call {layer.name!r} reads a tensor that nothing before it makes. Received: {tensor!r}"
                    )
            known.update(layer.outputs)
            for tensor in layer.saved_for_backward:
                if tensor not in known:
                    raise PlanError(
                        f"Layer call {layer.name!r} saves a tensor for its backward step that it neither reads nor makes. "
                        f"Received: {tensor!r}"
                    )
        for tensor in (*known, *self.outputs):
            if tensor not in known or tensor not in self.tensors:
                raise PlanError(f"A tensor is produced by no layer call or has no specification. Received: {tensor!r}")
        for shape, tensor in {tuple(spec.shape): name for name, spec in self.tensors.items()}.items():  # a deep network has few
            # Open axes are for graphs of which nobody asks the bytes, as that of a layer on a batch of unknown size.
            if not all(size is None or (isinstance(size, Integral) and size >= 0) for size in shape):
                raise PlanError(f"The axes of tensor {tensor!r} must be integers, at least 0. Received: shape={shown(shape)}")

    @cached_property
    def position(self) -> dict[str, int]:
        """Layer call name -> its place in the execution order."""
        return {layer.name: index for index, layer in enumerate(self.layers)}

    @cached_property
    def producer(self) -> dict[str, int]:
        """Tensor name -> the position of the layer call that makes it; graph inputs are missing."""
        return {tensor: index for index, layer in enumerate(self.layers) for tensor in layer.outputs}

    @cached_property
    def last_use(self) -> dict[str, int]:
        """Tensor name -> the position of its last reader; `len(layers)` for graph outputs; missing if nobody reads it."""
        uses = {tensor: index for index, layer in enumerate(self.layers) for tensor in layer.inputs}
        return uses | {tensor: len(self.layers) for tensor in self.outputs}

    @cached_property
    def readers(self) -> dict[str, list[int]]:
        """Tensor name -> the positions of its readers, ascending."""
        found: dict[str, list[int]] = {tensor: [] for tensor in self.tensors}
        for index, layer in enumerate(self.layers):
            for tensor in dict.fromkeys(layer.inputs):
                found[tensor].append(index)
        return found

    @cached_property
    def virtual(self) -> frozenset[str]:
        """Tensors that only fusible layer calls make and read: XLA computes them wherever they are read, inside a region."""
        if not self.is_compiled:
            return frozenset()
        return frozenset(virtual_inside(self.layers) - set(self.outputs))

    def layers_named(self, names: Iterable[str]) -> list[LayerCall]:
        """The layer calls of these names, in their order."""
        return [self.layers[self.position[name]] for name in names]

    def nbytes(self, *tensors: str) -> int:
        """Bytes of the given tensors together."""
        return sum(map(self._nbytes_of.__getitem__, tensors))

    @cached_property
    def _nbytes_of(self) -> dict[str, int]:
        return {name: spec.nbytes for name, spec in self.tensors.items()}


def virtual_inside(layers: Sequence[LayerCall]) -> set[str]:
    """What only fusible layer calls of a region make and read: XLA computes it where it is read, and never writes it in there."""
    found = {t for layer in layers if layer.is_fusible for t in layer.outputs}
    return found - {t for layer in layers if not layer.is_fusible for t in layer.inputs}
