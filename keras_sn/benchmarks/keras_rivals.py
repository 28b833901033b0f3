"""Plain Keras models, and the rivals that recompute with what Keras and TensorFlow have themselves.

- `keras-remat`: the network is built under `keras.RematScope(mode="full")`, so that Keras recomputes each layer. Keras 3.15 on
  TensorFlow can train none of the benchmarks' networks so, except eagerly: it hands `training` to layers as a keyword, and inside
  a `tf.function` custom gradients take no keywords. The row then says so.
- `keras-recompute-grad`: block by block, each call inside `tf.recompute_grad`, as written by hand; see `RecomputedBlocks`.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import keras
import tensorflow as tf
from keras import KerasTensor, Operation, layers

_IN_BLOCK = re.compile(r".*block\d+")
_COLOR = re.compile(r"\x1b\[\d*m")


class RecomputedBlocks(keras.Model):
    """A functional model that is trained block by block, each under `tf.recompute_grad`.

    Its faults are those of `tf.recompute_grad`, and left as they are: a block's second run changes state again, so that
    BatchNormalization's moving statistics are updated twice, and dropout draws another mask than in the first run, which makes
    the gradients wrong.

    Args:
        inputs: The input tensor.
        outputs: The output tensor.
        **arguments: Those of `keras.Model`.
    """

    def __init__(self, inputs: KerasTensor, outputs: KerasTensor, **arguments: Any):
        super().__init__(inputs, outputs, **arguments)
        borders = [inputs, *block_ends(self), outputs]
        self.blocks = [keras.Model(start, end) for start, end in pairwise(borders)]

    def call(self, inputs: Any, training: bool | None = None, mask: Any = None) -> Any:
        if not training:
            return super().call(inputs, training=training, mask=mask)
        x = inputs
        for block in self.blocks:
            x = tf.recompute_grad(lambda x, block=block: block(x, training=True))(x)
        return x


def block_ends(model: keras.Model) -> Iterator[KerasTensor]:
    """The tensors between blocks: alone they cross from the layers before to those behind, and a block's end shows.

    Those are ends that several layers read (of a residual block, or of Inception's), and the outputs of pooling layers, but none
    inside one block by the names of its layers (the attention of a transformer's block).
    """
    operations = [operation for operation in model.operations if not isinstance(operation, layers.InputLayer)]
    readers: dict[str, list[Operation]] = {}
    for operation in operations:
        for name in _names(operation.input):
            readers.setdefault(name, []).append(operation)
    waiting = Counter({name: len(readers[name]) for name in _names(model.input)})
    for operation in operations:
        waiting.subtract(_names(operation.input))
        waiting = +waiting  # without those that have no reader left
        waiting.update({name: len(readers.get(name, ())) for name in _names(operation.output)})
        if len(waiting) == 1 and _is_end(operation, readers.get(operation.output.name, [])):
            yield operation.output


def _names(tensors: Any) -> set[str]:
    return {tensor.name for tensor in keras.tree.flatten(tensors)}


def _is_end(operation: Operation, readers: list[Operation]) -> bool:
    block = _IN_BLOCK.match(operation.name)
    if block and all(reader.name.startswith(f"{block[0]}_") for reader in readers):
        return False
    return len(readers) > 1 or (bool(readers) and isinstance(operation, (layers.MaxPooling2D, layers.AveragePooling2D)))


def build(engine: str, make: Callable[..., keras.Model]) -> keras.Model:
    """The model of an engine that is Keras', not compiled.

    Args:
        engine: One of `engines.PLAIN` or `engines.KERAS_RIVALS`.
        make: Builds the network from a `model_class`.
    """
    if engine.startswith("keras-recompute-grad"):
        return make(model_class=RecomputedBlocks)
    if engine.startswith("keras-remat"):
        with keras.RematScope(mode="full"):
            model = make(model_class=keras.Model)
        # The model made inside the scope would be recomputed itself, as a whole, and so save nothing.
        return keras.Model(model.input, model.output)
    return make(model_class=keras.Model)


def reason_of(error: Exception) -> str:
    """An error of Keras in one line, without the arguments that it lists."""
    return " ".join(_COLOR.sub("", str(error).partition("Arguments received")[0]).split())
