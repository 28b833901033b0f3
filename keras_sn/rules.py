"""Per layer type: what its backward step reads, what it computes, and whether SuperNeurons would keep its output.

`register_rule` adds a rule for a layer class; the rule of the nearest base class applies. A layer without a rule gets the safe
default: its backward step reads all its inputs and outputs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import keras

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
    is_costly: bool = False


Rule = Callable[[Any, Sequence[TensorSpec], Sequence[TensorSpec]], LayerTraits]
_RULES: dict[type, Rule] = {}


def register_rule(*layer_classes: type) -> Callable[[Rule], Rule]:
    """Registers a rule for layer or operation classes.

    Args:
        layer_classes: Classes of layers or operations; subclasses inherit the rule.

    Returns:
        A decorator for a function `(layer, input_specs, output_specs) -> LayerTraits`.
    """

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(layer_classes, rule))
        return rule

    return register


def traits_of(operation: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> LayerTraits:
    """The traits of one layer call, by the rule of the nearest class in its method resolution order."""
    for layer_class in type(operation).__mro__:
        if (rule := _RULES.get(layer_class)) is not None:
            return rule(operation, inputs, outputs)
    return LayerTraits(flops=_elements(outputs))


def _elements(specs: Sequence[TensorSpec]) -> int:
    return sum(prod(spec.shape) for spec in specs)


def _bytes(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.nbytes for spec in specs)


def _has_activation(layer: Any) -> bool:
    return getattr(layer, "activation", None) not in (None, keras.activations.linear)


def _kernel_flops(layer: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """Two floating-point operations per output element and kernel element that it is made of."""
    kernels = [weight for weight in layer.trainable_weights + layer.non_trainable_weights if len(weight.shape) >= 2]
    if not kernels or not outputs or not outputs[0].shape:
        return _elements(outputs)
    channels = outputs[0].shape[-1] if getattr(layer, "data_format", "") != "channels_first" else outputs[0].shape[1]
    positions = _elements(outputs) // max(1, channels)
    return 2 * positions * sum(prod(kernel.shape) for kernel in kernels)


_LINEAR = (
    keras.layers.Conv1D,
    keras.layers.Conv2D,
    keras.layers.Conv3D,
    keras.layers.Conv1DTranspose,
    keras.layers.Conv2DTranspose,
    keras.layers.Conv3DTranspose,
    keras.layers.DepthwiseConv1D,
    keras.layers.DepthwiseConv2D,
    keras.layers.SeparableConv1D,
    keras.layers.SeparableConv2D,
    keras.layers.Dense,
    keras.layers.EinsumDense,
)


@register_rule(*_LINEAR)
def _linear(layer, inputs, outputs):
    activated = _has_activation(layer)
    return LayerTraits(True, activated, _kernel_flops(layer, inputs, outputs), is_costly=True)


@register_rule(keras.layers.RNN, keras.layers.Bidirectional, keras.layers.TimeDistributed)
def _recurrent(layer, inputs, outputs):
    steps = inputs[0].shape[1] if inputs and len(inputs[0].shape) > 1 else 1
    kernels = sum(prod(weight.shape) for weight in layer.weights if len(weight.shape) >= 2)
    batch = inputs[0].shape[0] if inputs else 1
    state = sum(weight.shape[-1] for weight in layer.weights if len(weight.shape) >= 2)
    # A gate's input, its activation and the products of the cell stay for each time step.
    return LayerTraits(True, True, 2 * batch * steps * kernels, 3 * batch * steps * state * 4, is_costly=True)


@register_rule(keras.layers.MultiHeadAttention, keras.layers.GroupQueryAttention)
def _attention(layer, inputs, outputs):
    query = inputs[0]
    key_length = inputs[1].shape[1] if len(inputs) > 1 and len(inputs[1].shape) > 1 else query.shape[1]
    config = layer.get_config()
    heads = config.get("num_heads") or config.get("num_query_heads") or 1
    scores = query.shape[0] * heads * query.shape[1] * key_length
    width = heads * (config.get("key_dim") or config.get("head_dim") or 1)
    positions = query.shape[0] * query.shape[1]
    item = max(1, query.nbytes // max(1, prod(query.shape)))
    projections = 2 * positions * sum(prod(weight.shape) for weight in layer.weights if len(weight.shape) >= 2)
    # Scores, their softmax and its dropout; query, key, value and the weighted values.
    internal = (3 * scores + 4 * positions * width) * item
    return LayerTraits(True, False, projections + 4 * scores * width // max(1, heads), internal, is_costly=True)


@register_rule(keras.layers.BatchNormalization, keras.layers.LayerNormalization, keras.layers.GroupNormalization)
def _normalization(layer, inputs, outputs):
    return LayerTraits(True, False, 8 * _elements(outputs), internal_bytes=0)


@register_rule(keras.layers.ReLU, keras.layers.Softmax)
def _output_activation(layer, inputs, outputs):
    return LayerTraits(False, True, _elements(outputs))


@register_rule(keras.layers.Activation)
def _activation(layer, inputs, outputs):
    # TensorFlow's gradients of these read the output alone.
    by_output = {"relu", "sigmoid", "tanh", "softmax", "elu", "selu"}
    name = getattr(layer.activation, "__name__", "")
    if name == "linear":
        return LayerTraits(False, False)
    return LayerTraits(name not in by_output, name in by_output, 4 * _elements(outputs))


@register_rule(
    keras.layers.Add,
    keras.layers.Subtract,
    keras.layers.Average,
    keras.layers.Concatenate,
    keras.layers.Reshape,
    keras.layers.Flatten,
    keras.layers.Permute,
    keras.layers.RepeatVector,
    keras.layers.ZeroPadding1D,
    keras.layers.ZeroPadding2D,
    keras.layers.ZeroPadding3D,
    keras.layers.Cropping1D,
    keras.layers.Cropping2D,
    keras.layers.Cropping3D,
    keras.layers.UpSampling1D,
    keras.layers.UpSampling2D,
    keras.layers.UpSampling3D,
    keras.layers.GlobalAveragePooling1D,
    keras.layers.GlobalAveragePooling2D,
    keras.layers.GlobalAveragePooling3D,
    keras.layers.AveragePooling1D,
    keras.layers.AveragePooling2D,
    keras.layers.AveragePooling3D,
    keras.layers.Identity,
    keras.layers.ActivityRegularization,
)
def _reads_nothing(layer, inputs, outputs):
    return LayerTraits(False, False, _elements(outputs))


@register_rule(keras.layers.Embedding)
def _embedding(layer, inputs, outputs):
    return LayerTraits(True, False, _elements(outputs))


@register_rule(keras.layers.Dropout, keras.layers.SpatialDropout1D, keras.layers.SpatialDropout2D)
def _dropout(layer, inputs, outputs):
    # The mask, one byte an element, and its multiple in the dtype of the input.
    return LayerTraits(False, False, 8 * _elements(outputs), internal_bytes=_bytes(outputs) + _elements(outputs))
