"""The means and variances of batch normalizations, kept from the forward pass for the recomputation.

They take two passes over what is normalized, and a few hundred bytes. With them, what is recomputed of a batch normalization
is arithmetic on single numbers, which XLA fuses into what reads it.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from keras_sn import keras_internals

_EXACT = (tf.float32, tf.float64)
"""Keras computes the statistics of others in float32 and rounds them."""


@contextmanager
def batch_statistics(layers: Sequence[Any], given: Sequence[Any] = ()) -> Iterator[list[Any]]:
    """Inside, the batch normalizations among the layers use the given statistics, if there are some, else theirs are noted.

    Args:
        layers: All layers that may be called inside.
        given: What was noted when the same calls were made before: the mean and the variance of each.

    Yields:
        The list of what is noted, complete at the end.
    """
    noted: list[Any] = []
    remaining = iter(given)

    def moments(layer: Any, keras_own: Callable[..., tuple[Any, Any]], inputs: Any, mask: Any) -> tuple[Any, Any]:
        if mask is not None or inputs.dtype not in _EXACT:  # a mask weighs the examples
            return keras_own(inputs, mask)
        if given:
            return _moments_given(inputs, layer.axis, next(remaining), next(remaining))
        found = keras_own(inputs, mask)
        noted.extend(found)
        return found

    with ExitStack() as replaced:
        for layer in layers:
            if keras_own := keras_internals.batch_moments_of(layer):
                replaced.enter_context(keras_internals.replaced_batch_moments(layer, partial(moments, layer, keras_own)))
        yield noted


def _moments_given(x: Any, axis: int, mean: Any, variance: Any) -> tuple[Any, Any]:
    """What `tf.nn.moments` returns, whose values are known, with its gradients; nothing reads the sums."""
    shape = [1] * x.shape.rank
    shape[axis] = -1
    axes = [one for one in range(x.shape.rank) if one != axis % x.shape.rank]
    means = keras_internals.in_place_of(tf.reduce_mean(x, axes, keepdims=True), tf.reshape(mean, shape))
    squares = tf.math.squared_difference(x, tf.stop_gradient(means))
    variances = keras_internals.in_place_of(tf.reduce_mean(squares, axes, keepdims=True), tf.reshape(variance, shape))
    return tf.squeeze(means, axes), tf.squeeze(variances, axes)
