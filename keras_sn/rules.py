"""Per layer type: what its backward step reads, what it computes, and whether SuperNeurons would keep its output.

`register_rule` adds a rule for a layer class; the rule of the nearest base class applies. Layers without a rule, and built-in
layers in a case that their rule does not tell, are measured by tracing their TensorFlow operations.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any

import keras

from keras_sn.graph import TensorSpec
from keras_sn.in_place import hands_gradient_on
from keras_sn.layer_rules import BUILT_IN_RULES, converts_dtypes
from keras_sn.op_costs import Call, traced_traits
from keras_sn.operation_rules import OPERATION_RULES, OWN_OPERATIONS
from keras_sn.traits import LayerTraits as LayerTraits
from keras_sn.traits import Rule

_RULES: dict[type, Rule] = {}
"""The user's rules."""


def register_rule(*layer_classes: type) -> Callable[[Rule], Rule]:
    """Registers a rule for layer or operation classes.

    Args:
        layer_classes: Classes of layers or operations; subclasses inherit the rule.

    Returns:
        A decorator for a function `(layer, input_specs, output_specs) -> LayerTraits`.
    """

    def register(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(layer_classes, rule))
        return rule

    return register


def has_rule_of_user(operation: Any) -> bool:
    """Whether a registered rule says what a layer or operation does as a whole."""
    return any(kind in _RULES for kind in type(operation).__mro__)


def traits_of(
    operation: Any,
    inputs: Sequence[TensorSpec],
    outputs: Sequence[TensorSpec],
    call: Call | None = None,
    call_key: Hashable = None,
) -> LayerTraits:
    """The traits of one layer call.

    Args:
        operation: A built layer, or a `keras.Operation`.
        inputs: The specifications of its input tensors.
        outputs: The specifications of its outputs.
        call: Makes the call on other tensors, `call(tensors) -> outputs`, if the layer has to be measured.
        call_key: What tells this call from others of an equal layer on equal shapes; see `traced_traits`.

    Returns:
        What the rule of the nearest class says, else what tracing the layer shows.
    """
    for layer_class in type(operation).__mro__:
        if layer_class in _RULES:
            return _RULES[layer_class](operation, inputs, outputs)
        # A subclass that computes something else is another layer.
        if layer_class in BUILT_IN_RULES and type(operation).call is layer_class.call:
            traits = None if converts_dtypes(operation, inputs) else BUILT_IN_RULES[layer_class](operation, inputs, outputs)
            if traits is None:
                traits = traced_traits(operation, inputs, outputs, call, call_key)
            else:
                traits = _with_regularizer(operation, traits)
            break
    else:
        traits = _operation_traits(operation, inputs, outputs, call, call_key)
    return replace(traits, gradient_in_place=True) if hands_gradient_on(operation) else traits


def _operation_traits(operation, inputs, outputs, call, call_key) -> LayerTraits:
    rule = None
    if not isinstance(operation, keras.Layer):
        module = type(operation).__module__
        rules = OPERATION_RULES if module.startswith("keras.") else OWN_OPERATIONS if module.startswith("keras_sn.") else {}
        rule = rules.get(type(operation).__name__)
    if rule is not None:
        if (traits := rule(operation, inputs, outputs)) is not None:
            return traits
        call = call if call_key is not None else None  # what cannot be cached is not worth a trace for each call
    return traced_traits(operation, inputs, outputs, call, call_key)


def _with_regularizer(layer: Any, traits: LayerTraits) -> LayerTraits:
    """The penalty on a layer's outputs is computed from them, and so is its gradient."""
    is_regularized = getattr(layer, "activity_regularizer", None) is not None
    if not is_regularized or isinstance(layer, keras.layers.ActivityRegularization):
        return traits
    return replace(traits, reads_outputs=True)
