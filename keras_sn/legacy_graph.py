"""The graph of a Keras 2 model, layer call by layer call, made again in Keras 3, with its weights and trainable flags."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.legacy_config import LayerMaker, TensorFlowFunction, described, keras3_name, refusal

_RATES = ("rate", "stddev", "dropout", "recurrent_dropout")
"""What a layer draws by in training, and nothing else if they are all 0."""


@dataclass(frozen=True, eq=False)
class LegacyCall:
    """One call of a Keras 2 layer in a model. Its arguments and outputs are symbolic."""

    layer: Any
    args: tuple
    kwargs: dict[str, Any]
    outputs: tuple

    def on(self, values: Mapping[int, Any]) -> tuple[tuple, dict[str, Any]]:
        """The arguments with values in place of the symbolic tensors, by the tensors' ids."""
        return fill(self.args, values), fill(self.kwargs, values)


def fill(structure: Any, values: Mapping[int, Any]) -> Any:
    """The structure with values in place of symbolic tensors, by the tensors' ids; a TensorFlow dtype becomes its name."""

    def filled(leaf: Any) -> Any:
        return leaf.name if isinstance(leaf, tf.DType) else values.get(id(leaf), leaf)

    return keras.tree.map_structure(filled, structure)


def calls_of(model: Any) -> Iterator[LegacyCall]:
    """The layer calls of a Keras 2 model, each after those that it depends on."""
    inputs = {id(tensor) for tensor in model.inputs}
    depends: dict[Any, dict[Any, None]] = {}
    stack = [tensor.node for tensor in model.outputs if id(tensor) not in inputs]
    while stack:
        node = stack.pop()
        if node not in depends:
            depends[node] = dict.fromkeys(tensor.node for tensor in node.keras_inputs if id(tensor) not in inputs)
            stack.extend(depends[node])
    for node in TopologicalSorter(depends).static_order():
        yield LegacyCall(node.layer, tuple(node.call_args), dict(node.call_kwargs), tuple(tf.nest.flatten(node.outputs)))


@dataclass
class Conversion:
    """Makes Keras 3 layers of Keras 2 layers, one for each, however many models and calls share it."""

    custom_objects: Mapping[str, Any]
    made: dict[int, Any] = field(default_factory=dict)
    """The id of a Keras 2 layer or model -> its counterpart."""
    layers: list[tuple[str, Any, Any]] = field(default_factory=list)
    """Path, Keras 2 layer and counterpart of each layer that is no model."""
    models: list[tuple[Any, Any]] = field(default_factory=list)
    """The models, outer ones first, with their counterparts."""

    def graph(self, model: Any, path: str = "") -> tuple[Any, Any]:
        """Makes the counterpart of a functional or Sequential model.

        Args:
            model: The Keras 2 model.
            path: What comes before the names of its layers in errors.

        Returns:
            Its symbolic inputs and outputs, in the model's own structure.

        Raises:
            UnsupportedModelError: A layer has no counterpart, or cannot be called in Keras 3 as it is here.
        """
        values = {id(tensor): _input(tensor, path) for tensor in model.inputs}
        called = {id(tensor.node.layer) for tensor in model.inputs}
        for call in calls_of(model):
            name = path + call.layer.name
            operation = self._operation(call.layer, name)
            args, kwargs = keras3_arguments(call, operation, name, *call.on(values))
            try:
                values.update(zip(map(id, call.outputs), keras.tree.flatten(operation(*args, **kwargs)), strict=True))
            except Exception as error:  # a class of the user's may raise anything
                sentence = f"Layer {name!r} cannot be called in Keras 3 as it is in Keras 2: {error}"
                raise refusal(f"{sentence} Replace it.", described(call.layer)) from error
            called.add(id(call.layer))
        for layer in model.layers:
            if id(layer) not in called:
                raise refusal(
                    f"Layer {path + layer.name!r} is not between the inputs and the outputs of its model, so Keras 3 would leave "
                    "it out. Take it out; add losses and metrics in `call()` of a layer of your own instead.",
                    described(layer),
                )
        return fill(model.input, values), fill(model.output, values)

    def _operation(self, layer: Any, path: str) -> Any:
        if id(layer) not in self.made:
            if is_graph(layer):
                self.made[id(layer)] = self._model(layer, path)
            else:
                self.made[id(layer)] = made = LayerMaker(self.custom_objects, self._model).make(layer, path)
                self.layers.append((path, layer, made))
        return self.made[id(layer)]

    def _model(self, model: Any, path: str) -> keras.Model:
        place = len(self.models)
        made = keras.Model(*self.graph(model, f"{path}/"), name=keras3_name(model.name))
        self.models.insert(place, (model, made))
        return made

    def bring_weights(self) -> list[tuple[Any, keras.Variable]]:
        """Gives all counterparts the weights and trainable flags.

        Returns:
            The Keras 2 weights, each with its counterpart.

        Raises:
            UnsupportedModelError: A layer's counterpart has other weights.
        """
        for old, new in [*self.models, *((old, new) for _, old, new in self.layers if isinstance(new, keras.Layer))]:
            if new.trainable != old.trainable:  # setting it sets those of the layers inside, too
                new.trainable = old.trainable
        weights: list[tuple[Any, keras.Variable]] = []
        for path, old, new in self.layers:
            for kind in ("trainable_weights", "non_trainable_weights"):
                given, wanted = getattr(old, kind), getattr(new, kind, [])
                shapes = [[tuple(weight.shape) for weight in one] for one in (given, wanted)]
                if shapes[0] != shapes[1]:
                    raise refusal(
                        f"The weights of layer {path!r} do not fit its Keras 3 class {type(new).__name__}. Give the class "
                        "weights of the same shapes in the same order.",
                        f"{kind.replace('_', ' ')} of shapes {shapes[0]}, not {shapes[1]}",
                    )
                weights.extend(zip(given, wanted, strict=True))
        for weight, variable in weights:
            variable.assign(weight.numpy())
        for _, _, new in self.layers:
            if hasattr(new, "finalize_state"):  # a `Normalization` keeps constants made of its weights
                new.finalize_state()
        return weights


def is_graph(layer: Any) -> bool:
    """Whether a Keras 2 layer is a functional or built Sequential model that does nothing but run its graph."""
    import tf_keras

    is_own = type(layer).call.__module__.partition(".")[0] != "tf_keras"
    return isinstance(layer, tf_keras.Model) and not is_own and bool(layer.outputs)


def _input(tensor: Any, path: str) -> Any:
    layer = tensor.node.layer
    if not isinstance(tensor.type_spec, tf.TensorSpec) or tensor.dtype == tf.string:
        raise refusal(
            f"Input {path + layer.name!r} is sparse, ragged or of strings, which keras_sn does not train. Make it a dense tensor "
            "of numbers before the model.",
            tensor.type_spec,
        )
    return keras.Input(batch_shape=tuple(tensor.shape), dtype=tensor.dtype.name, name=keras3_name(layer.name))


def keras3_arguments(
    call: LegacyCall, operation: Any, path: str, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a Keras 2 layer call, as its Keras 3 counterpart takes them.

    Args:
        call: The call.
        operation: The counterpart of its layer.
        path: The layer's name in errors.
        args: The call's positional arguments with tensors in place of symbolic ones.
        kwargs: The other ones.

    Raises:
        UnsupportedModelError: An argument means something else in Keras 3.
    """
    import tf_keras

    if isinstance(operation, TensorFlowFunction):
        return args, {key: value for key, value in kwargs.items() if key != "name"}
    names = list(inspect.signature(call.layer.call).parameters)
    kwargs = {**dict(zip(names[1:], args[1:], strict=False)), **kwargs}
    _check_training(call.layer, operation, path, kwargs.pop("training", None))
    args = args[:1]
    if (
        isinstance(call.layer, (tf_keras.layers.RNN, tf_keras.layers.Bidirectional))
        and args
        and isinstance(args[0], (list, tuple))
    ):
        # Keras 2 notes initial states behind the sequence.
        args, kwargs["initial_state"] = (args[0][0],), list(args[0][1:])
    return args, {key: value for key, value in kwargs.items() if value is not None}


def _check_training(layer: Any, operation: Any, path: str, training: Any) -> None:
    """Refuses a `training` argument of a layer call that would make a difference: `fit` overrides it in Keras 3."""
    if training is None or (training is False and all(map(_is_same_in_training, keras_internals.sublayers(operation)))):
        return
    raise refusal(
        f"Layer {path!r} is called with training={training}, which `fit` overrides in Keras 3, and it does something else in "
        f"training. Call it without the argument; for inference mode freeze its BatchNormalization (`trainable = False`) and set "
        "its dropout rates to 0.",
        f"{described(layer)}, training={training}",
    )


def _is_same_in_training(layer: Any) -> bool:
    if len(keras_internals.sublayers(layer)) > 1:
        return not isinstance(layer, keras.layers.SpectralNormalization)  # for others the layers inside speak
    if isinstance(layer, keras.layers.BatchNormalization):
        return not layer.trainable
    if isinstance(layer, keras.layers.Lambda) or not type(layer).__module__.startswith("keras."):
        function = layer.function if isinstance(layer, keras.layers.Lambda) else layer.call
        return "training" not in inspect.signature(function).parameters
    rates = [getattr(layer, name) for name in _RATES if hasattr(layer, name)]
    draws = any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values())
    return not any(rates) if rates else not draws
