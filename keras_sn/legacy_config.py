"""Layers of Keras 2 (`tf_keras`) made again as layers of Keras 3, from their configurations and without their weights."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from keras_sn.errors import UnsupportedModelError

_NO_COUNTERPART: dict[str, tuple | None] = {
    "batch_input_shape": None,
    "fused": None,
    "groups": (1,),
    "implementation": None,
    "input_length": None,
    "kernel_constraint": (None,),
    "kernel_initializer": None,
    "kernel_regularizer": (None,),
    "key_shape": None,
    "noise_shape": (None,),
    "query_shape": None,
    "rng_type": None,
    "softmax_robust_masking": (False, None),
    "time_major": (False, None),
    "trainable": None,
    "unroll": None,
    "value_shape": None,
    "vocabulary_size": None,
}
"""What a Keras 2 layer has in its configuration and its Keras 3 class may not take, with the values that ask for nothing; None
where all do. (A separable convolution, for example, has a `kernel_initializer` that it never uses.)"""

_OTHER_CLASSES = {"ThresholdedReLU": "ReLU"}
_OTHER_ARGUMENTS = {("LeakyReLU", "alpha"): "negative_slope", ("ThresholdedReLU", "theta"): "threshold"}
# What a TensorFlow function between layers may be: all that only compute.
_NAMESPACES = ("__operators__", "linalg", "math", "nn")
_FUNCTIONS = frozenset(
    [
        *("argsort", "bitcast", "boolean_mask", "broadcast_to", "cast", "clip_by_norm", "clip_by_value", "concat", "einsum"),
        *("ensure_shape", "expand_dims", "eye", "fill", "floor_div", "gather", "gather_nd", "identity", "linspace", "meshgrid"),
        *("norm", "one_hot", "ones_like", "pad", "range", "rank", "repeat", "reshape", "reverse", "reverse_sequence", "roll"),
        *("searchsorted", "sequence_mask", "shape", "size", "slice", "sort", "split", "squeeze", "stack", "stop_gradient"),
        *("strided_slice", "tensordot", "tile", "transpose", "unstack", "where", "zeros_like"),
    ]
)
_DRAWS = ("dropout", "fractional", "nce_loss", "random", "sampl")
"""In the names of functions that draw random numbers: a recomputation would draw others."""


def refusal(sentence: str, received: Any) -> UnsupportedModelError:
    """The error for a model that cannot be brought over; every message ends with what was received."""
    return UnsupportedModelError(f"{sentence} Received: {received}")


def described(layer: Any) -> str:
    """A Keras 2 layer as an error shows it."""
    return f"{type(layer).__name__}(name={layer.name!r})"


def keras3_name(name: str) -> str:
    """The name as Keras 3 allows it, without slashes."""
    return name.replace("/", "_")


@keras.saving.register_keras_serializable(package="keras_sn")
class TensorFlowFunction(keras.Operation):
    """A TensorFlow function between two layers, such as `x + y` or `tf.concat([x, y], axis=1)` in a Keras 2 model.

    Args:
        function: Its public name, such as `"math.multiply"`. Those that draw random numbers or do something besides computing
            are not accepted, so that a model file cannot ask for them.
        name: The name of the operation.

    Raises:
        UnsupportedModelError: The function is not one of the known ones.
    """

    def __init__(self, function: str, name: str | None = None):
        super().__init__(name=name)
        *namespaces, last = function.removeprefix("compat.v1.").split(".")
        is_known = last in _FUNCTIONS if not namespaces else namespaces[0] in _NAMESPACES and len(namespaces) == 1
        if not is_known or last.startswith("_") or any(part in last for part in _DRAWS):
            raise refusal(
                f"TensorFlow function `tf.{function}` between layers cannot be brought over. Put it into a layer of your own, "
                "with a `keras.random.SeedGenerator` if it draws random numbers.",
                f"tf.{function}",
            )
        self.function = function

    def call(self, *args: Any, **kwargs: Any) -> Any:
        function = functools.reduce(getattr, self.function.split("."), tf)
        if self.function == "__operators__.getitem":
            args, kwargs = _with_slices(args), {key: _with_slices(value) for key, value in kwargs.items()}
        return function(*args, **kwargs)


@keras.saving.register_keras_serializable(package="keras_sn")
def hard_sigmoid(x: Any) -> Any:
    """The hard sigmoid of Keras 2; that of Keras 3 has a slope of 1/6 instead of 0.2."""
    return keras.ops.clip(0.2 * x + 0.5, 0.0, 1.0)


def _with_slices(value: Any) -> Any:
    """Slices are noted as dicts, since they may hold tensors."""
    if isinstance(value, Mapping):
        return slice(value["start"], value["stop"], value["step"])
    return tuple(_with_slices(one) for one in value) if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class LayerMaker:
    """Makes the Keras 3 counterparts of Keras 2 layers, without their weights."""

    custom_objects: Mapping[str, Any]
    """Names of Keras 2 classes and functions -> their Keras 3 counterparts."""
    make_model: Callable[[Any, str], Any]
    """Brings over a model inside a layer, `make_model(model, path)`."""

    def make(self, layer: Any, path: str) -> Any:
        """Makes the counterpart of a layer that is no functional or Sequential model.

        Args:
            layer: The Keras 2 layer.
            path: Its name, behind those of the models that it is in, for errors.

        Returns:
            The new layer or operation.

        Raises:
            UnsupportedModelError: There is no counterpart, or it does not take the layer's configuration.
        """
        import tf_keras

        class_name, name = type(layer).__name__, keras3_name(layer.name)
        try:
            config = layer.get_config()
            if class_name in ("TFOpLambda", "SlicingOpLambda"):
                return TensorFlowFunction(config["function"], name=name)
            if isinstance(layer, tf_keras.layers.Lambda) and class_name not in self.custom_objects:
                rest = {"arguments": dict(layer.arguments), "mask": layer.mask, "dtype": plain_dtype(config["dtype"])}
                return keras.layers.Lambda(layer.function, name=name, **rest)
            is_built_in = type(layer).__module__.partition(".")[0] == "tf_keras"
            return self._from_config(class_name, {**config, "name": name}, layer, path, is_built_in=is_built_in)
        except UnsupportedModelError as error:
            message = str(error)
            raise UnsupportedModelError(message if message.startswith("Layer ") else f"Layer {path!r}: {message}") from error
        except Exception as error:  # a class of the user's may raise anything
            reason = str(error).rpartition("Exception encountered: ")[2]
            raise refusal(
                f"Layer {path!r} cannot be made in Keras 3 from its configuration ({reason}). Replace the layer, or name Keras 3 "
                f"counterparts in `custom_objects`: of its class {class_name}, or of objects of your own in its configuration.",
                described(layer),
            ) from error

    def _from_config(self, class_name: str, config: Mapping[str, Any], layer: Any, path: str, *, is_built_in: bool = True) -> Any:
        is_custom = class_name in self.custom_objects
        found = self.custom_objects[class_name] if is_custom else _built_in(class_name) if is_built_in else None
        if found is None:
            raise refusal(
                f"Keras 3 has no counterpart of layer class {class_name}. Replace the layer, or write the class for Keras 3 and "
                f"name it: `custom_objects={{{class_name!r}: YourLayer}}`.",
                f"a layer of class {class_name}",
            )
        arguments = _arguments_of(class_name, found, config, is_custom=is_custom)
        holders = [key for key, value in arguments.items() if self._holds_layers(value)]
        if not holders:
            return found.from_config(arguments)
        inside = {key: self._inside(arguments[key], getattr(layer, key, None), path) for key in holders}
        return found(**{**arguments, **inside})

    def _inside(self, value: Any, owner: Any, path: str) -> Any:
        """Makes layers inside the configuration of another; `owner` is the Keras 2 layer if an attribute of that holds it."""
        import tf_keras

        if isinstance(value, (list, tuple)):
            return [self._inside(one, None, path) for one in value]
        if isinstance(owner, tf_keras.Model):
            return self.make_model(owner, f"{path}/{owner.name}")
        return self._from_config(value["class_name"], value["config"], owner, path)

    def _holds_layers(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return bool(value) and all(map(self._holds_layers, value))
        if not isinstance(value, Mapping) or not {"class_name", "config"} <= value.keys():
            return False
        custom = self.custom_objects.get(value["class_name"])
        is_custom = isinstance(custom, type) and issubclass(custom, keras.Layer)
        return (
            is_custom or value.get("module") in ("keras", "keras.layers") or value["class_name"] in ("Functional", "Sequential")
        )


def _built_in(class_name: str) -> Any:
    found = getattr(keras.layers, _OTHER_CLASSES.get(class_name, class_name), None)
    return found if isinstance(found, type) and issubclass(found, keras.Layer) else None


def _arguments_of(class_name: str, found: Any, config: Mapping[str, Any], *, is_custom: bool) -> dict[str, Any]:
    """The configuration as the Keras 3 class takes it."""
    arguments = {key: value for key, value in config.items() if key != "batch_input_shape"}
    if arguments.get("stateful"):
        raise refusal(
            "A layer that keeps its state from batch to batch, outside its weights, cannot be brought over. Make it with "
            "`stateful=False`.",
            f"a layer of class {class_name} with stateful=True",
        )
    if "dtype" in arguments:
        arguments["dtype"] = plain_dtype(arguments["dtype"])
    if is_custom:
        return arguments
    is_old_sigmoid = {key: isinstance(value, str) and value == "hard_sigmoid" for key, value in arguments.items()}
    arguments = {key: hard_sigmoid if is_old_sigmoid[key] else value for key, value in arguments.items()}
    arguments = {_OTHER_ARGUMENTS.get((class_name, key), key): value for key, value in arguments.items()}
    if class_name == "BatchNormalization" and isinstance(arguments["axis"], (list, tuple)) and len(arguments["axis"]) == 1:
        arguments["axis"] = arguments["axis"][0]
    taken = inspect.signature(found.__init__).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in taken.values()):
        taken = {*taken, "name", "trainable", "dtype"}
    return {key: value for key, value in arguments.items() if key in taken or not _asks_for_nothing(key, value)}


def _asks_for_nothing(key: str, value: Any) -> bool:
    return key in _NO_COUNTERPART and (_NO_COUNTERPART[key] is None or value in _NO_COUNTERPART[key])


def plain_dtype(dtype: Any) -> Any:
    """A dtype or the name of a dtype policy, from a Keras 2 configuration."""
    return dtype["config"]["name"] if isinstance(dtype, Mapping) else dtype
