"""Layers for models that are not graphs."""

from typing import Any

import keras

from keras_sn import keras_internals
from keras_sn.calls import CallRunner, LayerCallOnTensors


@keras.saving.register_keras_serializable("keras_sn")
class Recompute(keras.Layer):
    """Runs a layer or nested model so that its activations are recomputed in the backward pass instead of kept.

    It works inside any model, plain `keras.Model` included, and gives the numbers that the layer alone gives: the same dropout
    masks, statistics that are updated once, losses that are added once. It does what `tf.recompute_grad` does, but exactly.

    ```python
    x = keras_sn.layers.Recompute(TransformerBlock())(x)
    ```

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
        super().__init__(**{"name": f"recompute_{layer.name}", "dtype": _without_quantization(layer.dtype_policy)} | kwargs)
        self.layer = layer
        self.offload = offload
        self.supports_masking = layer.supports_masking
        self.supports_jit = not offload
        self._runner = CallRunner(jit=False, ties=True)

    def call(self, inputs: Any, *args: Any, training: bool | None = None, **kwargs: Any) -> Any:
        if keras_internals.in_stateless_scope() or not keras_internals.may_record():
            return self.layer(inputs, *args, **kwargs, training=training)
        return self._runner.run(LayerCallOnTensors(self.layer, (inputs, *args), kwargs, training), offload=self.offload)

    def compute_mask(self, inputs: Any, previous_mask: Any) -> Any:
        return self.layer.compute_mask(inputs, previous_mask)

    def build(self, input_shape: Any) -> None:
        """Nothing: the first call builds the layer, which knows all its arguments."""

    def get_build_config(self) -> dict[str, Any]:
        return {"layer": self.layer.get_build_config()}

    def build_from_config(self, config: dict[str, Any]) -> None:
        if config["layer"] and not self.layer.built:
            self.layer.build_from_config(config["layer"])
        self.built = True

    def get_config(self) -> dict[str, Any]:
        layer = keras.saving.serialize_keras_object(self.layer)
        return super().get_config() | {"layer": layer, "offload": self.offload}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Recompute":
        return cls(**config | {"layer": keras.saving.deserialize_keras_object(config["layer"])})


def _without_quantization(policy: keras.DTypePolicy) -> keras.DTypePolicy:
    """The policy under a quantized one, which is for the layer that has the quantized weights."""
    if policy.quantization_mode is None:
        return policy
    is_mixed = policy.compute_dtype != policy.variable_dtype
    return keras.DTypePolicy(f"mixed_{policy.compute_dtype}" if is_mixed else policy.compute_dtype)
