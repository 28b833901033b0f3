"""Functions for XLA that are compiled as soon as they are traced, while others are traced, before the first step runs.

TensorFlow compiles a function when it first runs it, and the last ones while all that the step saves is on the device. The
compiler tries algorithms out on arrays of their own, and each that it finds no room for waits ten seconds.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import tensorflow as tf

from keras_sn import op_graph
from keras_sn.log import log

Shape = Sequence[int] | None


class BackgroundCompiler:
    """Compiles functions in a thread, one after the other, each by one call on zeros, whose outcome nobody reads.

    Of several at a time, each would try out the same algorithms for the same convolutions, on a device that only one can use.
    """

    def __init__(self):
        self._thread: ThreadPoolExecutor | None = None
        self._pending: list[Future] = []

    def submit(self, call: Callable[[], Any]) -> None:
        """Runs a call in the background."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="keras_sn-compile")
        self._pending.append(self._thread.submit(_run, call))

    def wait(self) -> None:
        """Returns when all that has been submitted is compiled."""
        wait(self._pending)
        self._pending.clear()
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None


def _run(call: Callable[[], Any]) -> None:
    start = time.perf_counter()
    try:
        call()
        log.debug("compiled ahead in %.1f s", time.perf_counter() - start)
    except Exception as error:  # whatever it is, the step itself will say it, or does not meet it
        log.debug("not compiled ahead, after %.1f s: %s", time.perf_counter() - start, error)


class CompiledFunction:
    """A pure function of tensors that XLA compiles.

    Args:
        function: The Python function.
        compiler: Compiles it in the background.
        shapes_of: From its arguments to the shapes that they will have, in the order of `tf.nest.flatten`; None where the tensor
            itself tells.
    """

    def __init__(self, function: Callable[..., Any], compiler: BackgroundCompiler, shapes_of: Callable[..., list[Shape]]):
        self.traced = tf.function(function, autograph=False, jit_compile=True)
        self._compiler, self._shapes_of = compiler, shapes_of
        self._known: set[str] = set()

    def __call__(self, *arguments: Any) -> Any:
        if not tf.executing_eagerly() and not tf.distribute.has_strategy():  # there, each replica has a device of its own
            self._compile_ahead(arguments)
        return self.traced(*arguments)

    def _compile_ahead(self, arguments: Sequence[Any]) -> None:
        concrete, flat = self.traced.get_concrete_function(*arguments), tf.nest.flatten(arguments)
        shapes = [_known_shape(x, shape) for x, shape in zip(flat, self._shapes_of(*arguments), strict=True)]
        key = f"{concrete.name} {shapes}"
        if key in self._known:
            return
        self._known.add(key)
        if not _may_run_on_zeros(concrete, flat, shapes):
            return
        device = tf.no_op().device or None
        specs = [tf.TensorSpec(shape, x.dtype) for x, shape in zip(flat, shapes, strict=True) if tf.is_tensor(x)]

        def inner(*tensors: Any) -> Any:
            given = iter(tensors)
            filled = [next(given) if tf.is_tensor(x) else x for x in flat]
            return tf.nest.flatten(concrete(*tf.nest.pack_sequence_as(arguments, filled)))

        # Called from within another function, as in the step: by itself it would be compiled under another name. The zeros come
        # from outside, or TensorFlow would compute what they give beforehand.
        with tf.init_scope(), tf.device(device):
            outer = tf.function(inner, autograph=False).get_concrete_function(*specs)

        def on_zeros() -> None:
            with tf.device(device):
                outer(*(tf.zeros(spec.shape, spec.dtype) for spec in specs))

        self._compiler.submit(on_zeros)


def _known_shape(tensor: Any, shape: Shape) -> Shape:
    """The shape of a tensor, with the sizes that it does not know itself from the other; None if some remain unknown."""
    if not tf.is_tensor(tensor) or tensor.shape.rank is None:
        return None
    own = list(tensor.shape)
    if shape is not None and len(shape) >= len(own):  # a mask has the first axes of its tensor
        own = [other if size is None else size for size, other in zip(own, shape, strict=False)]
    return None if None in own else own


def _may_run_on_zeros(concrete: Any, arguments: Sequence[Any], shapes: Sequence[Shape]) -> bool:
    """Whether a call on zeros is possible, ends and changes nothing."""
    if any(tf.is_tensor(x) and shape is None for x, shape in zip(arguments, shapes, strict=True)):
        return False
    if any(tf.is_symbolic_tensor(x) or x.dtype == tf.resource for x in concrete.captured_inputs):
        return False
    # A loop need not end on zeros.
    return op_graph.LOOPS.isdisjoint(op_graph.kinds_of(concrete.graph.get_operations(), set()))
