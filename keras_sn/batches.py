"""What the first batch of a data set looks like, without taking it from the training loop."""

import functools
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import keras
import tensorflow as tf


def first_inputs(x: Any, batch_size: int | None, *, needs_shapes: bool) -> Any:
    """What is known of the inputs of the first batch that `fit(x, batch_size=...)` will see, with nothing read.

    Reading would load a batch, draw from the generator that shuffles, or take from what can be read but once.

    Args:
        x: What `fit` takes: arrays, a `tf.data.Dataset`, a `keras.utils.PyDataset`, a generator, a torch `DataLoader`.
        batch_size: The argument of `fit`.
        needs_shapes: Whether the full shapes matter, and not the batch size alone.

    Returns:
        The inputs, or specifications in their place; None if only the batch itself tells.
    """
    if isinstance(x, tf.data.Dataset):
        specs = tf.nest.flatten(x.element_spec)
        if needs_shapes:
            is_known = all(spec.shape.is_fully_defined() for spec in specs)
        else:
            is_known = bool(specs[0].shape.rank) and specs[0].shape[0] is not None
        return inputs_of_batch(x.element_spec) if is_known else None
    if _is_torch_loader(x):
        return tf.TensorSpec((x.batch_size,)) if x.batch_size and not needs_shapes else None
    if not _is_array(x):
        return None
    size = min(batch_size or 32, count_samples(x))
    return _first_samples(x, size) if needs_shapes else tf.TensorSpec((size,))


def taken(iterator: Any, count: int) -> list[Any]:
    """The next batches of an iterator, at most `count`.

    Raises:
        StopIteration: There is none.
    """
    return [next(iterator), *islice(iterator, count - 1)]


def replayed(batches: Sequence[Any], iterator: Any) -> Any:
    """An iterator over batches that were taken from another; a function that is traced for the one takes the other."""
    if not isinstance(iterator, tf.data.Iterator):
        return iter(batches)
    data = functools.reduce(tf.data.Dataset.concatenate, map(tf.data.Dataset.from_tensors, batches))
    # By itself it would say the shapes of these very batches.
    return iter(tf.data.experimental.from_variant(tf.data.experimental.to_variant(data), iterator.element_spec))


def unpacked(batch: Any) -> tuple[Any, Any, Any]:
    """`(x, y, sample_weight)` of a batch of an iterator that Keras made, where None is an empty `tf.experimental.Optional`."""
    batch = keras.tree.map_structure(lambda one: None if isinstance(one, tf.experimental.Optional) else one, batch)
    return keras.utils.unpack_x_y_sample_weight(batch)


def whole_batch(x: Any, y: Any, sample_weight: Any, batch_size: int | None) -> tuple[Any, tuple[Any, Any, Any]]:
    """The first batch that `fit` will see, read, and what to train on: `x`, or an iterator that begins with that batch.

    Args:
        x: As in `first_inputs`.
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
    return x, _first_samples(arrays, min(batch_size or 32, count_samples(x)))


def _first_samples(arrays: Any, size: int) -> Any:
    return keras.tree.map_structure(lambda array: None if array is None else array[:size], arrays)


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
