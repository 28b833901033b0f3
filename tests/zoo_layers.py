"""Layers of a user's own, for the models of the zoo: state, metrics, control flow, gradients, shared weights."""

import keras
import tensorflow as tf
from keras import layers as L
from keras import ops

_register = keras.saving.register_keras_serializable("zoo")


@_register
class Sampling(L.Layer):
    """The VAE's sampling step, with its KL divergence as an added loss."""

    def __init__(self, seed=3, **kwargs):
        super().__init__(**kwargs)
        self.seed = seed
        self.generator = keras.random.SeedGenerator(seed)

    def call(self, mean, log_var):
        divergence = -0.5 * ops.mean(1 + log_var - ops.square(mean) - ops.exp(log_var))
        self.add_loss(0.1 * divergence)
        noise = keras.random.normal(ops.shape(mean), dtype=mean.dtype, seed=self.generator)
        return mean + ops.exp(0.5 * log_var) * noise

    def get_config(self):
        return super().get_config() | {"seed": self.seed}


@_register
class Jitter(L.Layer):
    """Draws twice from one seed generator in each call."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(11)

    def call(self, x):
        factor = keras.random.uniform(ops.shape(x), 0.9, 1.1, dtype=x.dtype, seed=self.generator)
        return x * factor + keras.random.normal(ops.shape(x), stddev=0.1, dtype=x.dtype, seed=self.generator)


@_register
class UnseededJitter(L.Layer):
    """Draws twice from Keras' global seed."""

    def call(self, x):
        factor = keras.random.uniform(ops.shape(x), 0.9, 1.1, dtype=x.dtype)
        return x * factor + keras.random.normal(ops.shape(x), stddev=0.1, dtype=x.dtype)


@_register
class Monitor(L.Layer):
    """Passes its input on and keeps a metric of it, and a count of its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.magnitude = keras.metrics.Mean(name=f"{self.name}_magnitude")

    def build(self, _):
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def call(self, x):
        self.magnitude.update_state(ops.abs(x))
        self.count.assign_add(1)
        return x


@_register
class AddIfGiven(L.Layer):
    def call(self, x, extra=None):
        return x if extra is None else x + extra


@_register
class Branching(L.Layer):
    """`tf.cond` with a weight inside one branch."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        scale = ops.convert_to_tensor(self.scale)
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x * tf.cast(scale, x.dtype), lambda: tf.sin(x))


@_register
class Iterating(L.Layer):
    """`tf.while_loop` with a weight inside."""

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")

    def call(self, x):
        kernel = tf.cast(ops.convert_to_tensor(self.kernel), x.dtype)
        return tf.while_loop(
            lambda step, _: step < 3,
            lambda step, y: (step + 1, tf.tanh(tf.matmul(y, kernel)) + x),
            (tf.constant(0), x),
            maximum_iterations=3,
        )[1]


@tf.custom_gradient
def _clipped_gradient(x):
    return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.01, 0.01)


@ops.custom_gradient
def _straight_through(x):
    def gradient(*args, upstream=None):
        return args[0] if upstream is None else upstream

    return ops.round(4 * x) / 4, gradient


@_register
class ClippedGradient(L.Layer):
    def call(self, x):
        return _clipped_gradient(x)


@_register
class Rounded(L.Layer):
    def call(self, x):
        return _straight_through(x)


@_register
class Constant(L.Layer):
    """Depends on the shape of its input alone."""

    def build(self, shape):
        self.row = self.add_weight(shape=(shape[-1],), initializer="ones", name="row")

    def call(self, x):
        return ops.broadcast_to(ops.cast(self.row, x.dtype), ops.shape(x))


@_register
class TiedLogits(L.Layer):
    """Projects by the weights of an embedding, which it holds."""

    def __init__(self, embedding, **kwargs):
        super().__init__(**kwargs)
        self.embedding = embedding

    def call(self, x):
        return ops.matmul(x, ops.cast(ops.transpose(self.embedding.embeddings), x.dtype))
