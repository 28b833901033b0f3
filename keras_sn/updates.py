"""The optimizer's update as one compiled function for each group of variables of equal shapes.

Keras traces about ten operations for each weight and launches a kernel for most of them; in a network of a thousand layers
that is most of the step. Here the same `update_step` runs on all weights of a region in one function, shared by all regions of
equal structure. Everything around it is Keras' own code.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals

SHAREABLE = (
    keras.optimizers.SGD,
    keras.optimizers.RMSprop,
    keras.optimizers.Adam,
    keras.optimizers.AdamW,
    keras.optimizers.Adagrad,
    keras.optimizers.Adadelta,
    keras.optimizers.Adamax,
    keras.optimizers.Lion,
)
"""Optimizers whose `update_step` uses one variable with its slots, the learning rate and the iteration count, no more."""


@contextmanager
def grouped_update(optimizer: Any, update: "GroupedUpdate", before_update: Callable[[], None]) -> Iterator[None]:
    """Inside, `optimizer.apply_gradients` calls `before_update` once all gradients exist, and updates group by group.

    A group is updated as soon as its own gradients exist, unless the optimizer needs all of them together. Optimizers that do not
    allow a grouped update run Keras' own.
    """

    def apply_gradients(pairs: Any) -> Any:
        pairs = list(pairs)
        gradients = [gradient for gradient, _ in pairs if gradient is not None]
        # As one operation: else each of thousands of assignments would have an edge from each of thousands of gradients.
        with tf.control_dependencies([] if tf.executing_eagerly() else [tf.group(*gradients)]):
            before_update()
        # The iteration count would rise although there is no batch; the last layers' gradients are the first that exist.
        with tf.control_dependencies([] if tf.executing_eagerly() else gradients[-1:]):
            if not is_shareable(optimizer, [variable for _, variable in pairs]):
                return original(pairs)
            inner = _inner(optimizer)
            with keras_internals.replaced_update(inner, lambda *args: update(inner, *args)):
                return original(pairs)

    original = optimizer.apply_gradients
    vars(optimizer)["apply_gradients"] = apply_gradients
    try:
        yield
    finally:
        del vars(optimizer)["apply_gradients"]


def is_shareable(optimizer: Any, variables: Sequence[Any]) -> bool:
    """Whether these variables can be updated group by group. Keras puts the gradients of some (float8 scales) in their place."""
    return type(_inner(optimizer)) in SHAREABLE and not any(getattr(v, "overwrite_with_gradient", False) for v in variables)


def needs_all_gradients(optimizer: Any) -> bool:
    """Whether no weight can be updated before all gradients exist."""
    # The loss scale is lowered, and the step left out, if one of them is not finite.
    is_scaled = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    return is_scaled or bool(optimizer.global_clipnorm or optimizer.gradient_accumulation_steps)


def _inner(optimizer: Any) -> Any:
    return optimizer.inner_optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else optimizer


class GroupedUpdate:
    """Updates variables group by group.

    Args:
        groups: Variables that are updated together, usually those of one region; a variable in none is a group of its own.
        jit: Compile with XLA.
    """

    def __init__(self, groups: Sequence[Sequence[keras.Variable]], *, jit: bool):
        self._group_of = {id(variable): place for place, group in enumerate(groups) for variable in group}
        self._options = {"jit_compile": True} if jit else {"experimental_attributes": {"_noinline": True}}
        self._functions: dict[int, Any] = {}

    def __call__(self, optimizer: Any, gradients: list[Any], variables: list[Any], learning_rate: Any) -> None:
        function, slots = self._function(optimizer), keras_internals.slot_lists(optimizer)
        grouped: dict[int, list[int]] = {}
        for place, variable in enumerate(variables):
            grouped.setdefault(self._group_of.get(id(variable), -1 - place), []).append(place)
        with keras_internals.without_autocast():
            learning_rate = tf.convert_to_tensor(learning_rate)
            iterations = tf.convert_to_tensor(optimizer.iterations)
            for places in grouped.values():
                group = [variables[place] for place in places]
                in_optimizer = [keras_internals.place_in_optimizer(optimizer, variable) for variable in group]
                function(
                    [gradients[place] for place in places],
                    [variable.value for variable in group],
                    {name: [of_kind[place].value for place in in_optimizer] for name, of_kind in slots.items()},
                    learning_rate,
                    iterations,
                    [keras_internals.decays(optimizer, variable) for variable in group],
                )

    def _function(self, optimizer: Any) -> Any:
        def update(gradients, variables, slots, learning_rate, iterations, decayed):
            twin = keras_internals.optimizer_on(optimizer, variables, slots, iterations)
            for gradient, variable, is_decayed in zip(gradients, variables, decayed, strict=True):
                if is_decayed:
                    rate = tf.cast(learning_rate, variable.dtype)
                    variable.assign_sub(variable * tf.cast(optimizer.weight_decay, variable.dtype) * rate)
                twin.update_step(gradient, variable, learning_rate)

        if tf.executing_eagerly():
            return update
        key = id(optimizer)
        if key not in self._functions:
            self._functions[key] = tf.function(update, autograph=False, **self._options)
        return self._functions[key]
