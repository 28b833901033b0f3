"""The gradient of max pooling in compiled regions: XLA's own, to the last bit, and nothing of it written down."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_sn
from keras_sn import max_pooling
from keras_sn.graph import TensorSpec
from keras_sn.layer_rules import BUILT_IN_RULES

CASES = [
    (L.MaxPooling1D(3, 2), (7,)),
    (L.MaxPooling1D(2, 3, padding="same"), (8,)),
    (L.MaxPooling2D(2), (7, 8)),
    (L.MaxPooling2D(2, padding="same"), (6, 4)),
    (L.MaxPooling2D(3, 2), (9, 7)),
    (L.MaxPooling2D(3, 1), (5, 6)),
    (L.MaxPooling2D((2, 3), (3, 1)), (8, 6)),
    (L.MaxPooling3D(2), (4, 5, 4)),
    (L.MaxPooling3D((1, 3, 2), (1, 1, 2)), (3, 5, 4)),
]


def numbers(shape, kind, dtype):
    random = np.random.default_rng(0)
    x = random.normal(size=shape)
    if kind == "ties":
        x = np.round(x)
    if kind == "not numbers":
        x[random.random(shape) < 0.1] = np.nan
        x[random.random(shape) < 0.1] = -np.inf
    return tf.constant(x, dtype)


def both_gradients(layer, x):
    y = layer(x)
    dy = tf.cast(np.random.default_rng(1).normal(size=y.shape), x.dtype)

    def gradient(make, x, dy):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = make(x)
        return tape.gradient(y, x, output_gradients=dy)

    def fused(x):
        return max_pooling.with_fused_gradient(layer, x, layer(x))

    run = tf.function(gradient, jit_compile=True)
    return run(layer, x, dy), run(fused, x, dy)


@pytest.mark.parametrize("kind", ["different", "ties", "not numbers"])
@pytest.mark.parametrize(("layer", "size"), CASES)
def test_it_is_xlas_gradient_to_the_last_bit(layer, size, kind):
    x = numbers((3, *size, 4), kind, "float32")
    assert max_pooling.is_fused(layer, x.shape, "float32")
    expected, found = both_gradients(layer, x)
    np.testing.assert_array_equal(found, expected)
    assert np.any(np.nan_to_num(expected))


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_other_dtypes(dtype):
    layer = L.MaxPooling2D(2, dtype=dtype)
    expected, found = both_gradients(layer, numbers((2, 4, 6, 3), "ties", dtype))
    np.testing.assert_array_equal(found, expected)


class Own(L.MaxPooling2D):
    pass


@pytest.mark.parametrize(
    ("layer", "shape", "dtype"),
    [
        (L.MaxPooling2D(3, 2, padding="same"), (2, 8, 8, 3), "float32"),  # windows over the edge
        (L.MaxPooling2D(4), (2, 8, 8, 3), "float32"),  # many places
        (L.MaxPooling2D(2, data_format="channels_first"), (2, 3, 8, 8), "float32"),
        (L.MaxPooling2D(3, 2, dtype="bfloat16"), (2, 9, 9, 3), "bfloat16"),  # sums of low precision
        (L.MaxPooling2D(2, dtype="mixed_bfloat16"), (2, 8, 8, 3), "float32"),  # the layer casts
        (L.MaxPooling2D(2), (2, None, 8, 3), "float32"),
        (L.MaxPooling2D(2), (2, 0, 8, 3), "float32"),
        (L.AveragePooling2D(2), (2, 8, 8, 3), "float32"),
        (Own(2), (2, 8, 8, 3), "float32"),
    ],
)
def test_others_are_left_to_xla(layer, shape, dtype):
    assert not max_pooling.is_fused(layer, shape, dtype)


def test_the_rule_counts_places_where_xla_notes_them():
    def places(layer, shape, pooled):
        specs = [[TensorSpec("x", shape, "float32")], [TensorSpec("y", pooled, "float32")]]
        traits = BUILT_IN_RULES[type(layer)](layer, *specs)
        return traits.places_bytes, traits.region_places_bytes

    noted = 4 * (2 * 4 * 4 * 3) * 4
    assert places(L.MaxPooling2D(2), (2, 8, 8, 3), (2, 4, 4, 3)) == (noted, 0)
    assert places(L.MaxPooling2D(3, 2, padding="same"), (2, 8, 8, 3), (2, 4, 4, 3)) == (noted, noted)


def test_gradients_of_gradients():
    layer, x = L.MaxPooling2D(2), numbers((2, 4, 4, 1), "different", "float32")

    def second(make):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(make(x) ** 3)
            gradient = inner.gradient(loss, x)
            total = tf.reduce_sum(gradient**2)
        return outer.gradient(total, x)

    expected = second(layer)
    assert np.any(expected)
    np.testing.assert_allclose(second(lambda x: max_pooling.with_fused_gradient(layer, x, layer(x))), expected, rtol=1e-6)


def trained(is_planned, jit_compile, monkeypatch):
    """Losses and weights, and how often the gradient was made here."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8, 8, 2), batch_size=4)
    x = L.Conv2D(4, 3, padding="same")(inputs)
    x = L.ReLU()(L.MaxPooling2D(2)(x))
    x = L.MaxPooling2D(2)(L.Conv2D(4, 3, padding="same")(x))
    model = keras.Model(inputs, L.Dense(1)(L.Flatten()(x)))
    if is_planned:
        model = keras_sn.SNModel.from_model(model, policy="recompute")
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=jit_compile)
    made, keras_own = [], max_pooling.gradient
    monkeypatch.setattr(max_pooling, "gradient", lambda *arguments: made.append(1) or keras_own(*arguments))
    random = np.random.default_rng(0)
    x, y = random.normal(size=(8, 8, 8, 2)), random.normal(size=(8, 1))
    losses = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0).history["loss"]
    return [*losses, *model.get_weights()], len(made)


@pytest.mark.parametrize("jit_compile", [True, False])
def test_training_equals_plain_keras(jit_compile, monkeypatch):
    expected, _ = trained(False, jit_compile, monkeypatch)
    found, made = trained(True, jit_compile, monkeypatch)
    assert bool(made) == jit_compile
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
