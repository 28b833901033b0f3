"""The unified tensor pool: a tensor is put into a tier outside the device and fetched from it (SuperNeurons, section 3.3).

TensorFlow's graph optimizer removes an `Identity` whose producer and readers are on another device, and with it the whole
transfer. It must keep an `EnsureShape`, which hands its input on as it is: what the device's copy engine has written into
page-locked memory is what it reads again. (A `Snapshot`, likewise kept, would copy it to other memory on the host first.)
`tests/test_runtime.py` counts them in the optimized graph.
"""

from dataclasses import dataclass
from typing import Any

import tensorflow as tf


@dataclass(frozen=True, slots=True)
class Tier:
    """A place outside the device."""

    name: str
    tensorflow_device: str

    def put(self, tensor: Any) -> Any:
        """Copies a tensor into the tier. The device copy is free as soon as nothing else reads it."""
        with tf.device(self.tensorflow_device):
            return tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape)

    def get(self, stored: Any, after: Any) -> Any:
        """Copies a tensor back to the device that reads it, once the tensor `after` is there; see Note: [Order]."""
        with tf.device(self.tensorflow_device):
            return behind(stored, after)


def behind(tensor: Any, *first: Any) -> Any:
    """The tensor, in a form that is handed on only once the tensors `first`, all of one device, are there; see Note: [Order]."""
    sizes = [-1 if size is None else size for size in tensor.shape] if tensor.shape.rank is not None else [-1, -1]
    if sizes.count(-1) > 1 or (-1 in sizes and 0 in sizes):  # not all sizes can be told from the others
        with tf.control_dependencies(first):
            return tf.raw_ops.EnsureShape(input=tensor, shape=tensor.shape)
    # In a graph the device need not be known yet; then None, since "" would leave them on the tier's.
    with tf.device(first[0].device or None), tf.control_dependencies(first):
        opaque = tf.raw_ops.PlaceholderWithDefault(input=tf.constant(sizes, tf.int32), shape=[len(sizes)])
    handed_on = tf.reshape(tensor, opaque)
    handed_on.set_shape(tensor.shape)
    return handed_on


# Note: [Order]
# TensorFlow queues the work of a GPU long before the GPU does it, and memory is given out in that order. A control dependency
# from the GPU to the host is a copy of nothing, in the queue behind all work before it: it tells the host that the GPU is done,
# by which time all later work has been queued, and a copy queued now waits for that: it hides behind nothing. The sizes of a
# tensor, though, are on the host from the start, on whatever device they are "computed". So `behind` makes the sizes by an
# operation that waits for `first` to be queued, and reshapes the tensor to them, which it has already. The placeholder keeps the
# graph optimizer from seeing that. (Of two reshapes in a row it removes the first, and of one before an `EnsureShape` too.)


TIERS = {"host": Tier("host", "/CPU:0")}
"""The tiers that a plan may name."""
