"""Which models can be traced as graphs of layers, and what to say of those that cannot."""

from typing import Any

import keras

from keras_sn import keras_internals
from keras_sn.errors import UnsupportedModelError


def check_supported(model: Any) -> None:
    """Raises `UnsupportedModelError` if the model is no built graph of layers."""
    if any(kind.__module__.startswith("tf_keras.") for kind in type(model).__mro__):
        raise UnsupportedModelError(
            f"Model {model.name!r} is a model of Keras 2 (tf_keras). Bring it over first: `keras_sn.from_tf_keras(model)`. "
            f"Received: {model!r}"
        )
    if not isinstance(model, keras.Model):
        raise UnsupportedModelError(f"keras_sn trains instances of `keras.Model`. Received: {model!r}")
    graph = keras_internals.functional_part(model)
    if isinstance(model, keras.Sequential) and graph is None:
        raise UnsupportedModelError(
            f"Model {model.name!r} is not built, so its layers have no shapes yet. Start it with `keras.Input(shape)`, or call "
            f"`model.build(input_shape)` first. Received: {model!r}"
        )
    if isinstance(model, keras.Sequential) and not type(model).__module__.startswith("keras."):
        raise UnsupportedModelError(
            f"Model {model.name!r} is of a class that derives from `keras.Sequential`, whose methods would be lost. Convert "
            "`keras.Model(model.inputs, model.outputs)` if they are not needed, or derive the class from `keras_sn.SNModel`. "
            f"Received: an instance of {type(model).__name__}"
        )
    if graph is None or not keras_internals.calls_its_graph(model):
        raise UnsupportedModelError(
            f"Model {model.name!r} has its own `call()`, so it cannot be converted: derive its class from `keras_sn.SNModel` "
            "instead of `keras.Model`, or wrap its blocks in `keras_sn.layers.Recompute`. "
            f"Received: an instance of {type(model).__name__}"
        )
    for tensor in graph.inputs:
        if tensor.sparse or getattr(tensor, "ragged", False):
            raise UnsupportedModelError(
                f"Input {tensor.name!r} is sparse or ragged, which regions cannot pass on. Make it dense before the model. "
                f"Received: {tensor!r}"
            )
    for layer in keras_internals.sublayers(model):
        if not layer.built:
            raise UnsupportedModelError(
                f"Layer {layer.name!r} is not built. Call the model on one batch, or `model.build(...)`, first. "
                f"Received: {layer!r}"
            )
