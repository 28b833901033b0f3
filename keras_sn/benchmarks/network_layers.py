"""Layers that the benchmark networks need and Keras does not have. The planner knows them by `register_rule`."""

from math import prod
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from keras_sn.graph import DTYPE_BYTES
from keras_sn.rules import LayerTraits, register_rule


@keras.saving.register_keras_serializable(package="keras_sn")
class LocalResponseNormalization(keras.Layer):
    """Divides each number by what its neighbours in the channels amount to (Krizhevsky et al. 2012, section 3.3).

    Args:
        radius: Neighbours on each side.
        bias: Added to the sum of squares, k in the paper.
        alpha: Factor of the sum of squares; it is not divided by the number of neighbours.
        beta: The power that the sum is raised to.
        **arguments: Those of `keras.Layer`.
    """

    def __init__(self, radius: int = 2, bias: float = 2.0, alpha: float = 1e-4, beta: float = 0.75, **arguments: Any):
        super().__init__(**arguments)
        self.radius, self.bias, self.alpha, self.beta = radius, bias, alpha, beta

    def call(self, x):
        # TensorFlow has no kernel for bfloat16, and on GPUs none for float16.
        y = tf.nn.local_response_normalization(tf.cast(x, "float32"), self.radius, self.bias, self.alpha, self.beta)
        return tf.cast(y, x.dtype)

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        settings = {"radius": self.radius, "bias": self.bias, "alpha": self.alpha, "beta": self.beta}
        return {**super().get_config(), **settings}


@register_rule(LocalResponseNormalization)
def _local_response_normalization(layer, inputs, outputs):
    elements = sum(prod(spec.shape) for spec in outputs)
    copies = 0 if inputs[0].dtype == "float32" else 2
    return LayerTraits(
        reads_inputs=True,
        reads_outputs=True,
        # A square and a sum for each neighbour, then a power and a division.
        flops=2 * (2 * layer.radius + 2) * elements,
        internal_bytes=copies * elements * DTYPE_BYTES["float32"],
    )


@keras.saving.register_keras_serializable(package="keras_sn")
class ClassToken(keras.Layer):
    """Puts a learned token before the others: `(batch, tokens, width)` to `(batch, 1 + tokens, width)`."""

    def build(self, input_shape):
        self.token = self.add_weight(shape=(1, 1, input_shape[-1]), initializer="zeros", name="token")

    def call(self, x):
        token = ops.broadcast_to(self.token, (ops.shape(x)[0], 1, x.shape[-1]))
        return ops.concatenate([token, x], axis=1)

    def compute_output_shape(self, input_shape):
        return (input_shape[0], input_shape[1] + 1, input_shape[2])


@keras.saving.register_keras_serializable(package="keras_sn")
class LearnedPositions(keras.Layer):
    """Adds a learned vector for each position to `(batch, tokens, width)`.

    Args:
        positions: Rows of the table; the longest sequence that the layer takes.
        **arguments: Those of `keras.Layer`.
    """

    def __init__(self, positions: int, **arguments: Any):
        super().__init__(**arguments)
        self.positions = positions

    def build(self, input_shape):
        if input_shape[1] > self.positions:
            raise ValueError(f"A sequence has at most {self.positions} positions here. Received: input_shape={input_shape}")
        initializer = keras.initializers.RandomNormal(stddev=0.02)
        self.table = self.add_weight(shape=(self.positions, input_shape[-1]), initializer=initializer, name="table")

    def call(self, x):
        return x + self.table[: x.shape[1]]

    def compute_output_shape(self, input_shape):
        return input_shape

    def get_config(self):
        return {**super().get_config(), "positions": self.positions}


@register_rule(ClassToken, LearnedPositions)
def _adds_weights(layer, inputs, outputs):
    # The gradients of a sum and of a concatenation are parts and sums of the incoming one.
    return LayerTraits(reads_inputs=False, reads_outputs=False, is_fusible=True)
