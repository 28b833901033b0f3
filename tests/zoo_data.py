"""Random data for the models of the zoo."""

from collections.abc import Callable

import numpy as np

SAMPLES, BATCH = 10, 4  # the last batch is partial

Data = Callable[[np.random.Generator], tuple]


def _normal(rng, shape):
    return rng.normal(size=(SAMPLES, *shape)).astype("float32")


def floats(x_shape: tuple[int, ...], y_shape: tuple[int, ...] = (2,)) -> Data:
    return lambda rng: (_normal(rng, x_shape), _normal(rng, y_shape))


def classified(x_shape: tuple[int, ...]) -> Data:
    return lambda rng: (_normal(rng, x_shape), rng.integers(0, 3, SAMPLES))


def _padded_tokens(rng, length, padding):
    tokens = rng.integers(1, 11, (SAMPLES, length))
    tokens[:, length - padding :] = 0
    return tokens.astype("int32")


def tokens(rng):
    return _padded_tokens(rng, 6, 2), _normal(rng, (2,))


def next_tokens(rng):
    return _padded_tokens(rng, 6, 2), rng.integers(0, 12, (SAMPLES, 6))


def two_languages(rng):
    x = {"source": _padded_tokens(rng, 5, 2), "target": _padded_tokens(rng, 4, 1)}
    return x, rng.integers(0, 12, (SAMPLES, 4))


def padded_series(rng):
    x = _normal(rng, (6, 3))
    x[:, 4:] = 0
    x[0, 2:] = 0
    return x, _normal(rng, (2,))


def image_and_number(rng):
    x = {"image": _normal(rng, (8, 8, 3)), "number": _normal(rng, (2,))}
    return x, {"kind": rng.integers(0, 3, SAMPLES), "size": _normal(rng, (1,))}


def weighted_image_and_number(rng):
    weights = {"kind": rng.uniform(0, 2, SAMPLES), "size": rng.uniform(0, 2, SAMPLES)}
    return (*image_and_number(rng), weights)


def missing_number(rng):
    return {"x": _normal(rng, (8,)), "extra": None}, _normal(rng, (2,))


def four_targets(rng):
    x = _normal(rng, (8,))
    return x, [_normal(rng, (2,)), _normal(rng, (2,)), _normal(rng, (6,)), _normal(rng, (8,))]
