"""The unified tensor pool: a tensor is put into a tier outside the device and fetched from it (SuperNeurons, section 3.3).

TensorFlow's graph optimizer removes an `Identity` whose producer and readers are on another device, and with it the whole
transfer. `Snapshot` is a copy that it must keep; `tests/test_runtime.py` counts them in the optimized graph.
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
            return tf.raw_ops.Snapshot(input=tensor)

    def get(self, stored: Any, after: Any) -> Any:
        """Copies a tensor back to the device that reads it, once the tensor `after` has been computed."""
        with tf.device(self.tensorflow_device), tf.control_dependencies([after]):
            return tf.raw_ops.Snapshot(input=stored)


TIERS = {"host": Tier("host", "/CPU:0")}
"""The tiers that a plan may name."""
