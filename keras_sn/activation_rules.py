"""What TensorFlow's gradient of each activation function reads and holds, and the rules of the activation layers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
from keras import layers as L

from keras_sn.graph import TensorSpec
from keras_sn.traits import BuiltInRule, LayerTraits, elements, total_bytes


@dataclass(frozen=True, slots=True)
class Activation:
    """One activation function; tensors and masks have the shape of its output, and a mask has one byte an element."""

    reads_input: bool = False
    reads_output: bool = False
    tensors_held: int = 0
    masks_held: int = 0
    flops: int = 1
    is_expensive: bool = False
    """XLA does not compute it again where it is read: it keeps the error function, exponential or the like."""

    @property
    def needs_more_than_output(self) -> bool:
        """Whether its backward step reads its input or holds something made of it."""
        return self.reads_input or self.tensors_held > 0 or self.masks_held > 0

    def held_bytes(self, outputs: Sequence[TensorSpec]) -> int:
        return self.tensors_held * total_bytes(outputs) + self.masks_held * elements(outputs)

    def traits(self, outputs: Sequence[TensorSpec]) -> LayerTraits:
        """The traits of a layer that is this activation and nothing else."""
        flops = self.flops * elements(outputs)
        held = {"internal_bytes": self.held_bytes(outputs), "fused_internal_bytes": self.is_expensive * total_bytes(outputs)}
        return LayerTraits(self.reads_input, self.reads_output, flops, **held, is_fusible=True)


_OF_OUTPUT = Activation(reads_output=True)
_OF_INPUT = Activation(reads_input=True)
LINEAR = Activation(flops=0)
THRESHOLD = Activation(masks_held=1, flops=2)
ACTIVATIONS = {
    **dict.fromkeys(("relu", "relu6", "sigmoid", "tanh", "elu", "selu", "log_softmax", "exponential", "softmax"), _OF_OUTPUT),
    **dict.fromkeys(("softplus", "softsign", "leaky_relu"), _OF_INPUT),
    "linear": LINEAR,
    "silu": Activation(reads_input=True, flops=3, is_expensive=True),
    # The products x / 2 and x / sqrt(2) and the error function of the latter.
    "gelu": Activation(tensors_held=3, flops=5, is_expensive=True),
    "hard_sigmoid": Activation(tensors_held=1, flops=3),
    "hard_silu": Activation(reads_input=True, tensors_held=2, flops=4),
    "hard_tanh": Activation(reads_input=True, tensors_held=1, flops=2),
    "hard_shrink": Activation(masks_held=1, flops=3),
    "soft_shrink": Activation(masks_held=2, flops=6),
    "tanh_shrink": Activation(tensors_held=1, flops=2),
    "mish": Activation(reads_input=True, tensors_held=1, flops=3, is_expensive=True),
    "celu": Activation(reads_input=True, tensors_held=1, flops=6),
    "squareplus": Activation(reads_input=True, tensors_held=1, flops=5),
    "sparse_plus": Activation(tensors_held=1, masks_held=2, flops=7),
    "sparse_sigmoid": Activation(masks_held=2, flops=6),
    "log_sigmoid": Activation(tensors_held=1, flops=3),
}


def activation_of(function: Callable | None) -> Activation | None:
    """What is known of an activation function of Keras with its default arguments; None for any other function."""
    if function is None:
        return LINEAR
    name = getattr(function, "__name__", "")
    return ACTIVATIONS.get(name) if getattr(keras.activations, name, None) is function else None


def relu_with(layer: Any) -> Activation | None:
    """`ReLU` with its options; None for the rare combinations."""
    slope, threshold, limit = float(layer.negative_slope), float(layer.threshold), layer.max_value
    if slope:
        return _OF_INPUT if limit is None and not threshold else None
    if threshold:
        return THRESHOLD if limit is None else None
    return _OF_OUTPUT if limit in (None, 6) else Activation(tensors_held=2, flops=3)


def softmax_over(axis: Any, rank: int) -> Activation | None:
    """The softmax of the last axis is one operation; None for other axes, which are moved around."""
    return _OF_OUTPUT if axis in (-1, rank - 1) else None


def traits_or_none(activation: Activation | None, outputs: Sequence[TensorSpec]) -> LayerTraits | None:
    return activation.traits(outputs) if activation is not None else None


def _activation(layer, inputs, outputs):
    return traits_or_none(activation_of(layer.activation), outputs)


def _relu(layer, inputs, outputs):
    return traits_or_none(relu_with(layer), outputs)


def _softmax(layer, inputs, outputs):
    has_mask = len(inputs) > 1
    return traits_or_none(None if has_mask else softmax_over(layer.axis, len(inputs[0].shape)), outputs)


def _leaky_relu(layer, inputs, outputs):
    return _OF_INPUT.traits(outputs)


def _elu(layer, inputs, outputs):
    is_plain = float(layer.alpha) == 1
    return (_OF_OUTPUT if is_plain else Activation(tensors_held=1, masks_held=1, flops=4)).traits(outputs)


def _prelu(layer, inputs, outputs):
    traits = Activation(tensors_held=2, flops=5).traits(outputs)
    slopes = TensorSpec("alpha", tuple(layer.alpha.shape), outputs[0].dtype)
    return replace(traits, internal_bytes=traits.internal_bytes + slopes.nbytes)


ACTIVATION_LAYER_RULES: dict[type, BuiltInRule] = {
    L.Activation: _activation,
    L.ReLU: _relu,
    L.Softmax: _softmax,
    L.LeakyReLU: _leaky_relu,
    L.ELU: _elu,
    L.PReLU: _prelu,
}
