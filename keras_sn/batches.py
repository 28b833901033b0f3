"""How many samples the first batch of a data set has, without taking it from the training loop."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


def first_batch_size(x: Any, batch_size: int | None) -> tuple[Any, int]:
    """Finds the batch size that `fit(x, batch_size=...)` will see first.

    Args:
        x: What `fit` takes: arrays, a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator, a torch `DataLoader`.
        batch_size: The argument of `fit`.

    Returns:
        What to train on (`x` itself, or, of an iterator whose first batch had to be taken, one that starts with that batch), and
        the number of samples of the first batch.
    """
    if isinstance(x, tf.data.Dataset):
        static = next((spec.shape[0] for spec in tf.nest.flatten(x.element_spec) if spec.shape.rank), None)
        return x, static if static is not None else count_samples(next(iter(x)))
    if isinstance(x, tf.distribute.DistributedDataset):
        return x, count_samples(next(iter(x)))
    if isinstance(x, keras.utils.PyDataset):
        return x, count_samples(x[0])
    if isinstance(x, Iterator):
        first = next(x)
        return _resumed(first, x), count_samples(first)
    if type(x).__module__.startswith("torch.utils.data"):
        return x, x.batch_size or count_samples(next(iter(x)))
    length = count_samples(x)
    return x, min(batch_size or 32, length)


def _resumed(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """A generator, the only iterator that Keras takes."""
    yield first
    yield from rest


def count_samples(batch: Any) -> int:
    """The length of the first array in a batch; of all replicas together for a distributed one."""
    first = next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None)
    if hasattr(first, "values") and isinstance(first.values, tuple):
        return sum(int(tf.shape(value)[0]) for value in first.values)
    return int(first.shape[0]) if hasattr(first, "shape") else len(first)
