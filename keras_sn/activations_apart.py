"""Layers that end with an activation function, as two layer calls: all that comes before the function, and the function.

The backward step of `gelu` or `silu` needs what the product made. With two calls a plan can save that and run the function alone
again. That of `relu` or `tanh` needs the layer's output alone, so that nothing is gained. Both calls run the layer's own code.
"""

import functools
from dataclasses import dataclass
from typing import Any

import keras
from keras import layers as L

from keras_sn import keras_internals
from keras_sn.activation_rules import activation_of
from keras_sn.rules import has_rule_of_user

_DIVIDED = {
    *(L.Dense, L.EinsumDense, L.Conv1D, L.Conv2D, L.Conv3D, L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose),
    *(L.DepthwiseConv1D, L.DepthwiseConv2D, L.SeparableConv1D, L.SeparableConv2D),
}
"""Their `call` reads `self.activation` once, at its end. Those that derive from them may read it elsewhere."""


class ActivationOf(keras.Operation):
    """The activation function of a layer, without the layer."""

    def __init__(self, layer: Any):
        super().__init__(name=layer.activation.__name__)
        self.layer = layer

    def call(self, x: Any) -> Any:
        activation = self.layer.activation  # whoever changes it means both calls
        y = x if activation is None else activation(x)
        return keras_internals.with_mask_of(y, x)


@dataclass(frozen=True, eq=False)
class Apart:
    """The two parts of a layer."""

    product: Any
    """A layer with the same weights, which ends without an activation."""
    activation: ActivationOf


def apart(operation: Any) -> Apart | None:
    """The parts of a layer, or None for a layer that stays whole and for other operations."""
    if type(operation) not in _DIVIDED:
        return None
    activation = activation_of(operation.activation)
    is_changed = getattr(operation, "lora_enabled", False) or operation.quantization_mode is not None
    stays_whole = (
        activation is None
        or not activation.needs_more_than_output
        or operation.activity_regularizer is not None
        or is_changed
        or not keras_internals.is_called_plainly(operation)
        or has_rule_of_user(operation)
    )
    return None if stays_whole else Apart(_product(operation), ActivationOf(operation))


def _product(layer: Any) -> Any:
    """The layer as a view of it shows it whose activation is none.

    The view has the layer's attributes themselves, so that weights, flags and whatever is changed later are the same in both.
    """
    kind = _without_activation(type(layer))
    view = object.__new__(kind)
    object.__setattr__(view, "__dict__", vars(layer))
    return view


@functools.cache
def _without_activation(kind: type) -> type:
    """The class with an `activation` that comes before the attribute of the layer."""
    none = property(lambda self: keras.activations.linear)
    return type(kind.__name__, (kind,), {"activation": none, "__module__": kind.__module__})
