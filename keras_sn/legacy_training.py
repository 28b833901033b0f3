"""What a Keras 2 model was compiled with, for its Keras 3 counterpart: optimizer with its state, losses, metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from keras_sn import keras_internals
from keras_sn.legacy_config import refusal

_SLOTS_OF_LEGACY = {
    "SGD": {"momentums": "momentum"},
    "Adam": {"_momentums": "m", "_velocities": "v", "_velocity_hats": "vhat"},
    "Nadam": {"_momentums": "m", "_velocities": "v"},
    "Adamax": {"_m": "m", "_u": "v"},
    "RMSprop": {"_velocities": "rms", "_momentums": "momentum", "_average_gradients": "mg"},
    "Adagrad": {"_accumulators": "accumulator"},
    "Adadelta": {"_accumulated_grads": "accum_grad", "_accumulated_delta_vars": "accum_var"},
    "Ftrl": {"_accumulators": "accumulator", "_linears": "linear"},
}
"""The slots of `tf_keras.optimizers.legacy`, by the names of their counterparts."""
_NADAM_DECAY = 1.0
"""The `schedule_decay` that Keras 3 has built in (`keras/src/optimizers/nadam.py`)."""
_BY_LOSS = ("accuracy", "acc", "crossentropy", "ce")
"""Names that stand for a metric that depends on the loss."""
Weights = Sequence[tuple[Any, keras.Variable]]
"""Keras 2 weights, each with its counterpart."""


def compile_like(model: Any, converted: keras.Model, weights: Weights, custom_objects: Mapping[str, Any]) -> None:
    """Compiles a model like its Keras 2 counterpart, if that is compiled, with the state of the optimizer.

    Args:
        model: The Keras 2 model.
        converted: Its counterpart.
        weights: The model's weights, each with its counterpart.
        custom_objects: Names of Keras 2 classes and functions -> their Keras 3 counterparts.

    Raises:
        UnsupportedModelError: The optimizer, a loss or a metric has no counterpart.
    """
    config = model.get_compile_config()
    if not config:
        return
    prefixes = tuple(f"{name}_" for name in model.output_names) if len(model.output_names) > 1 else ()
    losses = _Objects("loss", keras.losses, custom_objects)
    metrics = _Objects("metric", keras.metrics, custom_objects, prefixes)
    optimizer = _optimizer(model.optimizer, weights, custom_objects)
    jit_compile = config.get("jit_compile")
    converted.compile(
        optimizer,
        loss=losses.made(config.get("loss")),
        loss_weights=config.get("loss_weights"),
        metrics=metrics.made(config.get("metrics")),
        weighted_metrics=metrics.made(config.get("weighted_metrics")),
        run_eagerly=bool(config.get("run_eagerly")),
        steps_per_execution=config.get("steps_per_execution") or 1,
        jit_compile="auto" if jit_compile is None else jit_compile,
        auto_scale_loss=False,  # Keras 2 has put its `LossScaleOptimizer` around the optimizer already
    )
    _bring_state(model.optimizer, optimizer, converted, weights)


# --- losses and metrics


@dataclass(frozen=True)
class _Objects:
    """Makes the losses or the metrics."""

    kind: str
    module: Any
    custom_objects: Mapping[str, Any]
    prefixes: tuple[str, ...] = ()
    """What Keras 2 puts before the names of a metric when it compiles a model with several outputs, as Keras 3 will again."""

    def made(self, value: Any) -> Any:
        """The counterparts of what `compile()` got, in the same structure."""
        if isinstance(value, (list, tuple)):
            return [self.made(one) for one in value]
        if isinstance(value, Mapping) and "class_name" not in value:
            return {key: self.made(one) for key, one in value.items()}
        if value is None:
            return None
        name = value if isinstance(value, str) else value["class_name"]
        name = value["config"] if name == "function" else name
        try:
            if isinstance(value, str) or value["class_name"] == "function":
                return self._named(name)
            arguments = self._arguments(value["config"])
            if name == "MeanMetricWrapper":  # a metric by name, loaded from a file
                return keras.metrics.MeanMetricWrapper(self._function(value["config"]["fn"]), **arguments)
            found = self.custom_objects.get(name) or getattr(self.module, name)
            return found.from_config(arguments)
        except Exception as error:  # a class of the user's may raise anything
            raise refusal(
                f"Keras 3 has no counterpart of {self.kind} {name!r} with this configuration. Name one, "
                f"`custom_objects={{{name!r}: ...}}`, or bring over the model before it is compiled.",
                value,
            ) from error

    def _named(self, name: str) -> Any:
        if name in self.custom_objects:
            return self.custom_objects[name]
        if self.kind == "loss" or name not in _BY_LOSS:
            self.module.get(name)  # raises if Keras 3 does not know it
        return name

    def _function(self, value: Any) -> Any:
        name = value["config"] if isinstance(value, Mapping) else value
        return self.custom_objects.get(name) or getattr(self.module, name)

    def _arguments(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration without what only Keras 2 knows."""
        config = {key: value for key, value in config.items() if key != "fn" and (key, value) != ("reduction", "auto")}
        prefix = next((one for one in self.prefixes if str(config.get("name")).startswith(one)), "")
        return {**config, "name": config["name"].removeprefix(prefix)} if prefix else config


# --- the optimizer


def _optimizer(optimizer: Any, weights: Weights, custom_objects: Mapping[str, Any]) -> keras.Optimizer:
    if hasattr(optimizer, "inner_optimizer"):
        made, scale = _optimizer(optimizer.inner_optimizer, weights, custom_objects), optimizer.get_config()
        if scale["dynamic"]:
            return keras.optimizers.LossScaleOptimizer(made, scale["initial_scale"], scale["dynamic_growth_steps"])
        made.loss_scale_factor = float(scale["initial_scale"])
        return made
    name = type(optimizer).__name__
    try:
        found = custom_objects.get(name) or getattr(keras.optimizers, name)
        made = found.from_config(_optimizer_config(optimizer, custom_objects))
    except Exception as error:  # a class of the user's may raise anything
        raise refusal(
            f"Optimizer {name} cannot be made in Keras 3 from its configuration ({error}). Name a Keras 3 class that takes it, "
            f"`custom_objects={{{name!r}: ...}}`, or bring over the model before it is compiled.",
            f"{name} with {optimizer.get_config()}",
        ) from error
    if getattr(optimizer, "weight_decay", None) is not None:
        # No public name tells what `exclude_from_weight_decay` was called with.
        made.exclude_from_weight_decay(var_list=[new for old, new in weights if not optimizer._use_weight_decay(old)])
    return made


def _optimizer_config(optimizer: Any, custom_objects: Mapping[str, Any]) -> dict[str, Any]:
    config = {key: value for key, value in optimizer.get_config().items() if key not in ("jit_compile", "is_legacy_optimizer")}
    config = {key: float(value) if isinstance(value, np.floating) else value for key, value in config.items()}
    name, rate, decay = type(optimizer).__name__, config["learning_rate"], config.pop("decay", 0.0)
    if isinstance(rate, Mapping):
        schedule = custom_objects.get(rate["class_name"]) or getattr(keras.optimizers.schedules, rate["class_name"])
        arguments = {key: value for key, value in rate["config"].items() if (key, value) != ("name", None)}
        config["learning_rate"] = schedule.from_config(arguments)
    if hasattr(optimizer, "get_slot") and (name == "Adagrad" or (name == "RMSprop" and not optimizer.momentum)):
        config["epsilon"] **= 2  # the legacy ones add it to the root, the others under it
    if name == "Nadam" and hasattr(optimizer, "get_slot"):
        if decay != _NADAM_DECAY:
            raise ValueError(f"its `schedule_decay` is not that of Keras 3, {_NADAM_DECAY}")
    elif decay:
        if isinstance(rate, Mapping):
            raise ValueError("it has both a learning rate schedule and `decay`")
        config["learning_rate"] = keras.optimizers.schedules.InverseTimeDecay(rate, decay_steps=1, decay_rate=decay)
    return config


def _bring_state(optimizer: Any, made: keras.Optimizer, converted: keras.Model, weights: Weights) -> None:
    """Gives an optimizer the iteration count, slots and loss scale of its Keras 2 counterpart, if that has any."""
    old, new = getattr(optimizer, "inner_optimizer", optimizer), getattr(made, "inner_optimizer", made)
    if int(old.iterations) == 0 and not getattr(old, "_built", False):
        return
    keras_internals.build_optimizer(made, converted.trainable_variables)
    if made is not new:
        made.dynamic_scale.assign(float(optimizer.loss_scale))
        made.step_counter.assign(int(optimizer.dynamic_counter))
    new.iterations.assign(int(old.iterations))
    counterparts = {id(variable): weight for weight, variable in weights}
    slots = keras_internals.slot_lists(new)
    if new.use_ema:
        slots["_model_variables_moving_average"] = keras_internals.moving_averages(new)
    for name, variables in slots.items():
        for variable, slot in zip(converted.trainable_variables, variables, strict=True):
            value = _slot(old, name, counterparts[id(variable)])
            if value is not None:
                slot.assign(value.numpy())
    if (product := keras_internals.momentum_product(new)) is not None:
        product.assign(float(old._m_cache if hasattr(old, "_m_cache") else old._u_product))


def _slot(optimizer: Any, name: str, weight: Any) -> Any:
    """A slot of a Keras 2 optimizer by the name of its counterpart; None if it has none yet for this weight.

    Only the legacy optimizers have public names for their slots; the others keep them under the names that Keras 3 uses.
    """
    if hasattr(optimizer, "get_slot"):
        try:
            return optimizer.get_slot(weight, _SLOTS_OF_LEGACY[type(optimizer).__name__][name])
        except KeyError:
            return None
    slots = getattr(optimizer, name, getattr(optimizer, name.lstrip("_"), None))
    place = getattr(optimizer, "_index_dict", {}).get(optimizer._var_key(weight))
    return None if slots is None or place is None else slots[place]
