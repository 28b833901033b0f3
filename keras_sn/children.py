"""Models that are not graphs: the calls of their direct child layers, found while the model's own `call()` runs.

For the time of one call of the model each child's `call` is replaced on the instance, inside Keras' own `__call__`, which by then
has cast the arguments and filled in masks and mode. With a plan each such call runs as a region; without one they are recorded.
"""

import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras_sn import keras_internals
from keras_sn.calls import CallRunner, LayerCallOnTensors
from keras_sn.compiling import BackgroundCompiler
from keras_sn.layer_calls import CallNames
from keras_sn.plan import Plan

Handler = Callable[[Any, Callable[..., Any], tuple, dict[str, Any]], Any]
"""`(layer, its own call, args, kwargs) -> outputs`."""

_current = threading.local()
_lock = threading.Lock()
_watchers: Counter[int] = Counter()
"""The id of a layer -> how many calls of models watch it, in all threads: replicas call one model at the same time."""


@contextmanager
def watched(layers: Sequence[Any], handler: Handler) -> Iterator[None]:
    """Inside, and in this thread, calls of the layers go to the handler; what they call themselves does not."""
    with _lock:
        for layer in layers:
            if not _watchers[id(layer)]:
                vars(layer)["call"] = _watching(layer)
            _watchers[id(layer)] += 1
    before, _current.handler = getattr(_current, "handler", None), handler
    try:
        yield
    finally:
        _current.handler = before
        with _lock:
            for layer in layers:
                _watchers[id(layer)] -= 1
                if not _watchers[id(layer)]:
                    del vars(layer)["call"], _watchers[id(layer)]


def _watching(layer: Any) -> Callable[..., Any]:
    original = layer.call

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        handler = getattr(_current, "handler", None)
        if handler is None:
            return original(*args, **kwargs)
        _current.handler = None
        try:
            return handler(layer, original, args, kwargs)
        finally:
            _current.handler = handler

    return call


class ChildRegions:
    """Runs the calls of a model's child layers by a plan.

    Args:
        plan: A plan with one region for each layer call. A call that it does not know is recomputed.
        jit: Compile the regions with XLA where their layers allow it.
        compiler: Compiles them before they first run, in the background; None to leave it to TensorFlow.
    """

    def __init__(self, plan: Plan, *, jit: bool, compiler: BackgroundCompiler | None = None):
        self._regions = {region.layers[0]: region for region in plan.regions}
        self._runner = CallRunner(jit=jit, ties=False, compiler=compiler)

    def handler(self) -> Handler:
        """For one call of the model."""
        name_of = CallNames()

        def handle(layer: Any, original: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
            region = self._regions.get(name_of(layer.name))
            is_kept = region is not None and not region.recompute
            # Keras adds the penalty on a layer's outputs after `call`, and would add it inside the region too.
            if is_kept or layer.activity_regularizer is not None or keras_internals.in_stateless_scope():
                return original(*args, **kwargs)
            offload = region is not None and any(one.is_away for one in region.saved)
            return self._runner.run(LayerCallOnTensors.inside_keras(layer, args, kwargs), offload=offload)

        return handle
