"""The rules of the simple built-in layers. A rule answers None for a case that is better measured than told.

`tests/test_rules.py` compares them with what TensorFlow does. Composite layers (attention, recurrent layers, wrappers,
augmentation) have no rule here.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod
from typing import Any

import keras
from keras import layers as L

from keras_sn import max_pooling
from keras_sn.activation_rules import ACTIVATION_LAYER_RULES, activation_of
from keras_sn.graph import DTYPE_BYTES, TensorSpec
from keras_sn.op_graph import contracted_size
from keras_sn.traits import BuiltInRule, LayerTraits, elements, total_bytes

BUILT_IN_RULES: dict[type, BuiltInRule] = dict(ACTIVATION_LAYER_RULES)

_FLOAT_BYTES = 4


def _rule(*layer_classes: type) -> Callable[[BuiltInRule], BuiltInRule]:
    def register(rule: BuiltInRule) -> BuiltInRule:
        BUILT_IN_RULES.update(dict.fromkeys(layer_classes, rule))
        return rule

    return register


def converts_dtypes(layer: Any, inputs: Sequence[TensorSpec]) -> bool:
    """Whether the layer computes in another dtype than that of its weights or inputs, so that it holds converted copies."""
    if not isinstance(layer, keras.Layer):
        return False
    dtype = layer.compute_dtype
    is_foreign = any(one.is_differentiable and one.dtype != dtype for one in inputs)
    return is_foreign or (dtype != layer.variable_dtype and bool(layer.weights))


def _activated(layer: Any, linear: LayerTraits, outputs: Sequence[TensorSpec]) -> LayerTraits | None:
    """The traits of a layer that ends with an activation; what the activation reads of its input is the layer's own tensor."""
    activation = activation_of(layer.activation)
    if activation is None:
        return None
    before = activation.reads_input
    under_xla = (before or activation.tensors_held > 0) + activation.is_expensive
    return replace(
        linear,
        reads_outputs=activation.reads_output,
        flops=linear.flops + activation.flops * elements(outputs),
        internal_bytes=linear.internal_bytes + before * total_bytes(outputs) + activation.held_bytes(outputs),
        fused_internal_bytes=linear.internal_bytes + under_xla * total_bytes(outputs),
    )


def _is_special(layer: Any) -> bool:
    """Whether the layer multiplies with something else than its kernel, or moves its input around first."""
    is_dilated = any(one != 1 for one in getattr(layer, "dilation_rate", None) or ())
    is_moved = getattr(layer, "data_format", None) == "channels_first" or getattr(layer, "padding", None) == "causal"
    is_changed = getattr(layer, "lora_enabled", False) or getattr(layer, "quantization_mode", None) is not None
    return is_dilated or is_moved or is_changed


@_rule(L.Dense, L.EinsumDense)
def _dense(layer, inputs, outputs):
    if _is_special(layer):
        return None
    kernel = tuple(layer.kernel.shape)
    contracted = contracted_size(layer.equation, [inputs[0].shape, kernel]) if isinstance(layer, L.EinsumDense) else kernel[0]
    linear = LayerTraits(layer.kernel.trainable, False, 2 * elements(outputs) * contracted, is_costly=True)
    return _activated(layer, linear, outputs)


@_rule(L.Conv1D, L.Conv2D, L.Conv3D, L.DepthwiseConv1D, L.DepthwiseConv2D)
def _convolution(layer, inputs, outputs):
    if _is_special(layer):
        return None
    flops = 2 * elements(outputs) // outputs[0].shape[-1] * prod(layer.kernel.shape)
    linear = LayerTraits(layer.kernel.trainable, False, flops, is_costly=True, is_convolution=True)
    if (traits := _activated(layer, linear, outputs)) and inputs[0].shape[-1] <= 4 and max(layer.strides) > 1:
        # XLA computes the first convolution of a ResNet in another layout and holds copies (buffer assignment, H200).
        copies = 2 * total_bytes(outputs)
        traits = replace(traits, fused_internal_bytes=traits.fused_internal_bytes + copies, copied_bytes=copies)
    return traits


@_rule(L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose)
def _transposed_convolution(layer, inputs, outputs):
    if _is_special(layer):
        return None
    flops = 2 * elements(inputs) // inputs[0].shape[-1] * prod(layer.kernel.shape)
    linear = LayerTraits(layer.kernel.trainable, False, flops, is_costly=True, is_convolution=True)
    return _activated(layer, linear, outputs)


@_rule(L.SeparableConv1D, L.SeparableConv2D)
def _separable_convolution(layer, inputs, outputs):
    if _is_special(layer):
        return None
    depthwise, pointwise = layer.depthwise_kernel.shape, layer.pointwise_kernel.shape
    positions = elements(outputs) // outputs[0].shape[-1]
    between = positions * prod(depthwise[-2:]) * DTYPE_BYTES[outputs[0].dtype]
    flops = 2 * positions * (prod(depthwise) + prod(pointwise))
    linear = LayerTraits(layer.trainable, False, flops, between * layer.trainable, is_costly=True, is_convolution=True)
    return _activated(layer, linear, outputs)


@_rule(L.Embedding)
def _embedding(layer, inputs, outputs):
    if _is_special(layer):
        return None
    # The indices, with negative ones counted from the end.
    return LayerTraits(False, False, 2 * elements(outputs), total_bytes(inputs), is_fusible=True)


@_rule(L.BatchNormalization)
def _batch_normalization(layer, inputs, outputs):
    if len(inputs) > 1 or inputs[0].dtype != "float32":
        return None
    vectors = inputs[0].shape[layer.axis] * _FLOAT_BYTES
    if not layer.trainable:  # Keras then uses the moving statistics
        return LayerTraits(False, False, 2 * elements(outputs), vectors, is_fusible=True)
    kept = 0 if layer.synchronized else 2 * vectors
    return LayerTraits(True, False, 4 * elements(outputs), 5 * vectors, is_fusible=True, statistics_bytes=kept)


@_rule(L.GroupNormalization)
def _group_normalization(layer, inputs, outputs):
    if inputs[0].dtype != "float32":
        return None
    groups = layer.groups if layer.groups != -1 else inputs[0].shape[layer.axis]
    statistics = (3 * inputs[0].shape[0] * groups + inputs[0].shape[layer.axis]) * _FLOAT_BYTES
    return LayerTraits(True, False, 4 * elements(outputs), statistics, is_fusible=True)


@_rule(L.LayerNormalization, L.RMSNormalization, L.UnitNormalization)
def _row_normalization(layer, inputs, outputs):
    if inputs[0].dtype != "float32" or getattr(layer, "rms_scaling", False):
        return None
    axes = layer.axis if isinstance(layer.axis, (list, tuple)) else (layer.axis,)
    rows = elements(inputs) // prod(inputs[0].shape[axis] for axis in axes)
    numbers = {L.LayerNormalization: 3, L.RMSNormalization: 1, L.UnitNormalization: 2}
    per_row = next(count for layer_class, count in numbers.items() if isinstance(layer, layer_class))
    is_scaled = isinstance(layer, L.RMSNormalization) or getattr(layer, "scale", False)
    internal = per_row * rows * _FLOAT_BYTES + is_scaled * total_bytes(outputs)
    return LayerTraits(True, False, 6 * elements(outputs), internal, is_fusible=True)


@_rule(L.Dropout)
def _dropout(layer, inputs, outputs):
    shape = [size or full for size, full in zip(layer.noise_shape or outputs[0].shape, outputs[0].shape, strict=True)]
    # The mask, one byte an element.
    return _noise(layer, outputs, held=prod(shape))


@_rule(L.SpatialDropout1D, L.SpatialDropout2D, L.SpatialDropout3D)
def _spatial_dropout(layer, inputs, outputs):
    is_first = getattr(layer, "data_format", "channels_last") == "channels_first"
    return _noise(layer, outputs, held=outputs[0].shape[0] * outputs[0].shape[1 if is_first else -1])


@_rule(L.GaussianDropout, L.AlphaDropout)
def _factor_dropout(layer, inputs, outputs):
    return None if getattr(layer, "noise_shape", None) else _noise(layer, outputs, held=total_bytes(outputs))


def _noise(layer: Any, outputs: Sequence[TensorSpec], held: int) -> LayerTraits:
    is_active = layer.rate > 0
    return LayerTraits(False, False, 8 * elements(outputs) * is_active, held * is_active, is_fusible=True, draws=True)


@_rule(L.Multiply, L.Maximum, L.Minimum)
def _pairwise(layer, inputs, outputs):
    # From the third input on, the results of the pairs before.
    between = max(0, len(inputs) - 2) * total_bytes(outputs)
    return LayerTraits(True, False, max(1, len(inputs) - 1) * elements(outputs), between, is_fusible=True)


@_rule(L.Dot)
def _dot(layer, inputs, outputs):
    if layer.normalize:
        return None
    axes = layer.axes if isinstance(layer.axes, (list, tuple)) else (layer.axes,)
    return LayerTraits(True, False, 2 * elements(outputs) * inputs[0].shape[axes[0]], is_costly=True)


@_rule(L.GlobalMaxPooling1D, L.GlobalMaxPooling2D, L.GlobalMaxPooling3D)
def _global_max_pooling(layer, inputs, outputs):
    return LayerTraits(True, True, elements(inputs), is_fusible=True)


@_rule(L.MaxPooling1D, L.MaxPooling2D, L.MaxPooling3D, L.AveragePooling1D, L.AveragePooling2D, L.AveragePooling3D)
def _pooling(layer, inputs, outputs):
    if layer.data_format == "channels_first":
        return None
    reads = isinstance(layer, max_pooling.LAYERS)
    places = reads * len(outputs[0].shape) * elements(outputs) * _FLOAT_BYTES  # a number for each axis
    of_regions = 0 if max_pooling.is_fused(layer, inputs[0].shape, inputs[0].dtype) else places
    return LayerTraits(
        reads, reads, elements(outputs) * prod(layer.pool_size), places_bytes=places, region_places_bytes=of_regions
    )


@_rule(L.ActivityRegularization)
def _activity_regularization(layer, inputs, outputs):
    return LayerTraits(bool(layer.l1 or layer.l2), False, 2 * elements(inputs), is_fusible=True)


@_rule(L.Masking)
def _masking(layer, inputs, outputs):
    return LayerTraits(False, False, 3 * elements(outputs), elements(outputs) // outputs[0].shape[-1], is_fusible=True)


@_rule(L.UpSampling2D)
def _up_sampling(layer, inputs, outputs):
    return _moves_data(layer, inputs, outputs) if layer.interpolation == "nearest" else None


@_rule(L.Add, L.Subtract, L.Average)
def _sums(layer, inputs, outputs):
    return LayerTraits(False, False, len(inputs) * elements(outputs), is_fusible=True)


@_rule(
    *(L.Concatenate, L.Reshape, L.Flatten, L.Permute, L.RepeatVector, L.Identity, L.Rescaling, L.Normalization),
    *(L.ZeroPadding1D, L.ZeroPadding2D, L.ZeroPadding3D, L.Cropping1D, L.Cropping2D, L.Cropping3D),
    *(L.UpSampling1D, L.UpSampling3D, L.GaussianNoise),
    *(L.GlobalAveragePooling1D, L.GlobalAveragePooling2D, L.GlobalAveragePooling3D),
)
def _moves_data(layer, inputs, outputs):
    return LayerTraits(False, False, max(elements(inputs), elements(outputs)), is_fusible=True)


@_rule(
    *(L.AdaptiveAveragePooling1D, L.AdaptiveAveragePooling2D, L.AdaptiveAveragePooling3D),
    *(L.CategoryEncoding, L.Discretization, L.Hashing, L.HashedCrossing),
    *(L.IntegerLookup, L.StringLookup, L.TextVectorization),
)
def _reads_nothing(layer, inputs, outputs):
    return LayerTraits(False, False, elements(inputs) + elements(outputs))
