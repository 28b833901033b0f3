"""What the first batch of a data set looks like, without taking it from the training loop."""

from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf


def first_batch(x: Any, batch_size: int | None, *, needs_shapes: bool) -> tuple[Any, Any]:
    """Finds the inputs of the first batch that `fit(x, batch_size=...)` will see.

    Args:
        x: What `fit` takes: arrays, a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator, a torch `DataLoader`.
        batch_size: The argument of `fit`.
        needs_shapes: Whether the full shapes matter, and not the batch size alone. Nothing is read of a data set that says what
            matters: reading loads a batch, and may draw from the generator that shuffles.

    Returns:
        What to train on (`x` itself, or, of an iterator whose first batch had to be taken, one that starts with that batch), and
        the inputs of the first batch, or specifications in their place.
    """
    if isinstance(x, tf.data.Dataset):
        specs = tf.nest.flatten(x.element_spec)
        if needs_shapes:
            is_known = all(spec.shape.is_fully_defined() for spec in specs)
        else:
            is_known = bool(specs[0].shape.rank) and specs[0].shape[0] is not None
        if is_known:
            return x, inputs_of_batch(x.element_spec)
    if not needs_shapes and _is_torch_loader(x) and x.batch_size:
        return x, tf.TensorSpec((x.batch_size,))
    if not needs_shapes and _is_array(x):
        return x, tf.TensorSpec((min(batch_size or 32, count_samples(x)),))
    x, batch = _peeked(x, (x,), batch_size)
    return x, inputs_of_batch(batch)


def whole_batch(x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> tuple[Any, tuple[Any, Any, Any]]:
    """The first batch that `fit` will see, and what to train on, as in `first_batch`.

    Args:
        x: As in `first_batch`.
        y: The targets, if `x` are arrays.
        sample_weight: Their weights, likewise.
        batch_size: The argument of `fit`.

    Returns:
        What to train on, and `(x, y, sample_weight)` of the first batch.
    """
    x, batch = _peeked(x, (x, y, sample_weight), batch_size)
    return x, keras.utils.unpack_x_y_sample_weight(batch)


def _peeked(x: Any, arrays: tuple, batch_size: int | None) -> tuple[Any, Any]:
    """What to train on, and its first batch; of `arrays` if `x` is no data set."""
    if isinstance(x, Iterator):
        first = next(x)
        return _resumed(first, x), first
    if isinstance(x, keras.utils.PyDataset):
        return x, x[0]
    if not _is_array(x):
        return x, next(iter(x))
    size = min(batch_size or 32, count_samples(x))
    return x, keras.tree.map_structure(lambda array: None if array is None else array[:size], arrays)


def _is_array(x: Any) -> bool:
    """Whether `x` is an array, or a structure of arrays, and no data set."""
    datasets = (tf.data.Dataset, tf.distribute.DistributedDataset, keras.utils.PyDataset, Iterator)
    return not isinstance(x, datasets) and not _is_torch_loader(x)


def _is_torch_loader(x: Any) -> bool:
    return type(x).__module__.startswith("torch.utils.data")


def inputs_of_batch(batch: Any) -> Any:
    """The inputs of a batch `(x, y, sample_weight)`, `(x, y)`, `(x,)` or `x`, as `keras.utils` unpacks it."""
    return batch[0] if isinstance(batch, tuple) else batch


def _resumed(first: Any, rest: Iterator[Any]) -> Iterator[Any]:
    """A generator, the only iterator that Keras takes."""
    yield first
    yield from rest


def shape_of(one: Any) -> tuple[int, ...]:
    """The shape of an array, tensor or specification; of all replicas together for a distributed one."""
    if hasattr(one, "values") and isinstance(one.values, tuple):
        return sum(int(tf.shape(value)[0]) for value in one.values), *one.values[0].shape[1:]
    return tuple(one.shape) if hasattr(one, "shape") else (len(one),)


def count_samples(batch: Any) -> int:
    """The length of the first array in a batch; of all replicas together for a distributed one."""
    return int(shape_of(next(leaf for leaf in keras.tree.flatten(batch) if leaf is not None))[0])
