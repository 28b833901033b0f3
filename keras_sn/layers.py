"""Layers for models that are not graphs."""

import inspect
from typing import Any

import keras

from keras_sn import keras_internals
from keras_sn.calls import CallRunner, LayerCallOnTensors
from keras_sn.files import made_with


@keras.saving.register_keras_serializable("keras_sn")
class Recompute(keras.Layer):
    """Runs a layer or nested model so that its activations are recomputed in the backward pass instead of kept.

    It works inside any model, plain `keras.Model` included, and gives the numbers that the layer alone gives: the same dropout
    masks, statistics that are updated once, losses that are added once. It does what `tf.recompute_grad` does, but exactly.

    ```python
    x = keras_sn.layers.Recompute(TransformerBlock())(x)
    ```

    `build`, `compute_output_shape` and masks are the layer's, its other attributes are not: `RNN` and `Bidirectional` go inside.

    Weight files find layers by class and attribute, so a model without `Recompute` cannot load what the same model with it has
    saved, nor the other way round: `load_weights` raises. `model.set_weights(other.get_weights())` goes both ways.

    Args:
        layer: The layer or model. What it makes inside itself is recomputed and its inputs are saved, so wrap blocks, not
            single layers.
        offload: Let the inputs wait on the host. XLA cannot do that, so a model with such a layer is not compiled by it.
        **kwargs: As in `keras.Layer`.

    Raises:
        TypeError: `layer` is no Keras layer.
    """

    def __init__(self, layer: keras.Layer, offload: bool = False, **kwargs: Any):
        if not isinstance(layer, keras.Layer):
            raise TypeError(f"`layer` must be a Keras layer or model. Received: layer={layer!r}")
        own = {"name": f"recompute_{layer.name}", "dtype": _without_quantization(layer.dtype_policy)}
        # A functional model leaves its inputs to its layers, which may compute in another dtype.
        own["autocast"] = not isinstance(layer, keras_internals.Functional)
        super().__init__(**own | kwargs)
        self.layer = layer
        self.offload = offload
        self.supports_masking = layer.supports_masking
        self.supports_jit = not offload
        self._parameters = frozenset(inspect.signature(layer.call).parameters)
        self._runner = CallRunner(jit=False, ties=True)

    def call(self, inputs: Any, *args: Any, training: bool | None = None, mask: Any = None, **kwargs: Any) -> Any:
        # A mask that is attached gets to the layer anyway; `TimeDistributed` hands over one that is not.
        if "mask" in self._parameters and mask is not None and mask is not keras_internals.get_mask(inputs):
            kwargs["mask"] = mask
        if keras_internals.in_stateless_scope() or not keras_internals.may_record():
            return self.layer(inputs, *args, **kwargs, training=training)
        return self._runner.run(LayerCallOnTensors(self.layer, (inputs, *args), kwargs, training), offload=self.offload)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        return self.layer.compute_mask(inputs, previous_mask)

    def compute_output_shape(self, *shapes: Any, **named_shapes: Any) -> Any:
        return self.layer.compute_output_shape(*shapes, **named_shapes)

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        is_told = _tells_its_outputs(self.layer)
        if not is_told or not self.layer.built:
            traced = keras.Operation.compute_output_spec(self, *args, **kwargs)  # calls the layer, which builds it
            if not is_told:
                return traced
        unknown = {"training", "mask"} - self._parameters
        return self.layer.compute_output_spec(*args, **{name: one for name, one in kwargs.items() if name not in unknown})

    def build(self, *shapes: Any, **named_shapes: Any) -> None:
        """Builds the layer.

        Args:
            *shapes: What the layer's own `build()` takes.
            **named_shapes: The same, by name.
        """
        # Keras' first call has no shapes for this signature: it goes on to call the layer, which builds itself for all arguments.
        if (shapes or named_shapes) and not self.layer.built:
            self.layer.build(*shapes, **named_shapes)

    def get_build_config(self) -> dict[str, Any]:
        return {"layer": self.layer.get_build_config()}

    def build_from_config(self, config: dict[str, Any]) -> None:
        if config["layer"] and not self.layer.built:
            self.layer.build_from_config(config["layer"])
        self.build()

    def get_config(self) -> dict[str, Any]:
        layer = keras.saving.serialize_keras_object(self.layer)
        return {"made_with": made_with()} | super().get_config() | {"layer": layer, "offload": self.offload}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Recompute":
        config = {name: value for name, value in config.items() if name != "made_with"}
        return cls(**config | {"layer": keras.saving.deserialize_keras_object(config["layer"])})


def _tells_its_outputs(layer: keras.Layer) -> bool:
    """Whether the layer has code of its own for the shapes that it returns; else Keras traces its `call`."""
    kind, default = type(layer), keras.Layer
    return (kind.compute_output_shape, kind.compute_output_spec) != (default.compute_output_shape, default.compute_output_spec)


def _without_quantization(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """The policy under a quantized one, which is for the layer that has the quantized weights."""
    if policy.quantization_mode is None:
        return policy
    is_mixed = policy.compute_dtype != policy.variable_dtype
    return keras.DTypePolicy(f"mixed_{policy.compute_dtype}" if is_mixed else policy.compute_dtype)
