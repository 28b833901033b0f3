"""The gradient of max pooling, bit for bit that of XLA's select-and-scatter, in operations that XLA fuses.

XLA on a GPU writes down where each maximum is (a number for each axis), puts these numbers in another order and adds to zeros:
in windows of 2 x 2 twice the memory of what is pooled, at the widest tensors of a network. Here each window is looked at again
where its gradient goes. Where windows overlap, that adds up in the order of the windows, as XLA does on a CPU; on a GPU XLA adds
in any order.
"""

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import Any

import keras
import tensorflow as tf

LAYERS = (keras.layers.MaxPooling1D, keras.layers.MaxPooling2D, keras.layers.MaxPooling3D)
MOST_PLACES = 9
"""Of a window, whose places are all looked at for each number: 3 x 3."""
_SUMMED = (tf.float32, tf.float64)
"""Where windows overlap, XLA may add others up in a wider type."""


def is_fused(layer: Any, shape: Sequence[int | None], dtype: str) -> bool:
    """Whether compiled regions compute the gradient of a layer's output this way.

    Not where windows reach over the edge: which of equal numbers XLA takes there depends on their shape.

    Args:
        layer: Any layer or operation.
        shape: Of its input.
        dtype: Of its input.
    """
    if type(layer) not in LAYERS or layer.data_format != "channels_last" or layer.compute_dtype != dtype:
        return False
    sizes = [size or 0 for size in shape[1:-1]]
    if 0 in sizes or prod(layer.pool_size) > MOST_PLACES:
        return False
    along = list(zip(sizes, layer.pool_size, layer.strides, strict=True))
    if layer.padding == "same" and any((-(-size // s) - 1) * s + k > size for size, k, s in along):
        return False
    overlap = any(k > s for _, k, s in along)
    return tf.as_dtype(dtype).is_floating and (not overlap or tf.as_dtype(dtype) in _SUMMED)


def with_fused_gradient(layer: Any, x: Any, y: Any) -> Any:
    """What a layer for which `is_fused` made of `x`, with this gradient."""

    @tf.custom_gradient
    def pooled(x: Any, y: Any) -> tuple[Any, Any]:
        return tf.identity(y), lambda dy: (gradient(x, dy, layer.pool_size, layer.strides), None)

    return pooled(x, tf.stop_gradient(y))


def gradient(x: Any, dy: Any, window: Sequence[int], strides: Sequence[int]) -> Any:
    """The gradient of what is pooled in windows that lie within it.

    Args:
        x: What is pooled: batch, then an axis for each of `window`, then channels.
        dy: The gradient of the maxima.
        window: Its size along each axis.
        strides: From window to window.

    Returns:
        A tensor like `x`.
    """
    counts, steps, places = dy.shape[1:-1], [1, *strides, 1], list(product(*map(range, window)))
    whole = 1 | 1 << (1 + len(window))  # batch and channels
    slices = [
        ([0, *place, 0], [0, *(o + (n - 1) * s + 1 for o, n, s in zip(place, counts, strides, strict=True)), 0])
        for place in places
    ]
    found = _first_of_largest([tf.strided_slice(x, begin, end, steps, begin_mask=whole, end_mask=whole) for begin, end in slices])
    total, shape = tf.zeros((), dy.dtype), tf.shape(x)
    for index in reversed(range(len(places))):  # so that each number is added to in the order of the windows
        begin, end = slices[index]
        there = tf.where(found == tf.constant(index, tf.int8), dy, tf.zeros((), dy.dtype))
        total += tf.raw_ops.StridedSliceGrad(
            shape=shape, begin=begin, end=end, strides=steps, dy=there, begin_mask=whole, end_mask=whole
        )
    return total


def _first_of_largest(candidates: Sequence[Any]) -> Any:
    """Which candidate is taken, as XLA compares them, which passes over what is not a number."""
    highest, found = candidates[0], tf.constant(0, tf.int8)
    for index, candidate in enumerate(candidates[1:], start=1):
        stays = highest >= candidate
        highest, found = tf.where(stays, highest, candidate), tf.where(stays, found, tf.constant(index, tf.int8))
    return found
