"""Which layers hand the gradient of their output on as that of their input, in the same memory."""

from typing import Any

import keras

_IN_PLACE = (
    keras.layers.Add,
    keras.layers.Reshape,
    keras.layers.Flatten,
    keras.layers.Identity,
    keras.layers.ActivityRegularization,
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.ELU,
    keras.layers.Dropout,
)
"""Additions and reshapes hand on the gradient itself; element-wise ones overwrite it, as TensorFlow and XLA do."""

_OPERATIONS = {"Add", "Reshape", "Relu", "Identity", "Squeeze", "ExpandDims", "ActivationOf"}
"""Class names of `keras.ops` between layers, whose classes are not public, and of what `activations_apart` divides."""

_OF_SHAPES = (keras.layers.Add, keras.layers.Concatenate)


def reads_only_shapes(operation: Any) -> bool:
    """Whether the gradients of an operation's inputs depend on nothing but the gradient of its output and on shapes."""
    return type(operation) in _OF_SHAPES and operation.activity_regularizer is None


def hands_gradient_on(operation: Any) -> bool:
    """Whether the gradient of the input takes the place of the gradient of the output."""
    if isinstance(operation, keras.Layer):
        return isinstance(operation, _IN_PLACE)
    return type(operation).__name__ in _OPERATIONS
