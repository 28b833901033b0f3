"""Gradients of our own: for tapes, which know beforehand what they may want, and for whoever differentiates a graph afterwards.

A tape records operations as they run, and says of each tensor whether it may ask for its gradient. The graph of a loop, a branch
or a `tf.function` may also be differentiated when it is complete, and until then nobody knows with respect to what.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from keras_sn import keras_internals

Gradient = Callable[[Sequence[Any], Sequence[bool]], Sequence[Any]]
"""`(gradients of the outputs, whose gradients are wanted) -> gradients of the sources`."""

_here = threading.local()


@contextmanager
def asked_here() -> Iterator[None]:
    """Inside, what this thread traces into the present graph is differentiated by a tape opened in it, and by no one else."""
    before = getattr(_here, "graph", None)
    _here.graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    try:
        yield
    finally:
        _here.graph = before


def may_be_asked_later() -> bool:
    """Whether somebody may want gradients of tensors that no tape records now."""
    return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() is not getattr(_here, "graph", None)


def with_gradient(
    compute: Callable[[], Sequence[Any]], sources: Sequence[Any], gradient: Gradient, passed_on: Sequence[int] = ()
) -> list[Any]:
    """Does what `tf.custom_gradient` does, but the gradient is told whose gradients are wanted.

    A tape wants those of the sources that it records now, and whoever differentiates the graph later may want any.

    Args:
        compute: Returns tensors; no tape sees what it does.
        sources: Tensors.
        gradient: Gets None for the gradients of sources that are passed on and not recorded.
        passed_on: Places of sources that become outputs too, behind what `compute` returns.

    Returns:
        The outputs.
    """
    recorded = [keras_internals.is_recorded(x) for x in sources]
    everything = [True] * len(sources)

    def run(*_: Any) -> list[Any]:
        return [*compute(), *(tf.identity(sources[place]) for place in passed_on)]

    with keras_internals.stop_recording():
        if tf.executing_eagerly():
            outputs = [tf.identity(y) for y in run()]  # one may be a source itself
        else:
            outputs = list(tf.custom_gradient(lambda *_: (run(), lambda *upstream: gradient(upstream, everything)))(*sources))
    count, computed = len(outputs), len(outputs) - len(passed_on)
    seen = [place for place in range(count) if place < computed or recorded[passed_on[place - computed]]]

    def for_tape(*upstream: Any) -> Sequence[Any]:
        known = dict(zip(seen, upstream, strict=True))
        return gradient([known.get(place) for place in range(count)], recorded)

    keras_internals.record_operation([outputs[place] for place in seen], sources, for_tape)
    return outputs


def noting(tensor: Any, note: Callable[[], None]) -> Any:
    """The tensor, in a form that calls `note` when its gradient arrives."""

    def gradient(upstream: Sequence[Any], _: Sequence[bool]) -> Sequence[Any]:
        note()
        return upstream

    return with_gradient(lambda: [tensor], [tensor], gradient)[0]
