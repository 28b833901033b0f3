"""The rules of the raw `keras.ops` operations that stand between layers. Keras exports functions, not their classes, so that the
rules go by class name.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

from keras_sn.activation_rules import ACTIVATIONS, activation_of, relu_with, softmax_over, traits_or_none
from keras_sn.graph import TensorSpec
from keras_sn.op_graph import contracted_size
from keras_sn.traits import BuiltInRule, LayerTraits, elements, total_bytes

_READ_NOTHING = (
    *("Add", "Subtract", "Negative", "Reshape", "Transpose", "GetItem", "Slice", "Squeeze", "ExpandDims", "Ravel", "Copy"),
    *("Concatenate", "Stack", "Hstack", "Vstack", "Split", "Unstack", "Pad", "Roll", "Flip", "BroadcastTo", "Repeat"),
    *("Tile", "Cast", "StopGradient", "Sum", "Mean", "Moveaxis", "Swapaxes", "Tril", "Triu", "OneHot", "Equal", "NotEqual"),
    *("Greater", "GreaterEqual", "Less", "LessEqual", "LogicalAnd", "LogicalOr", "LogicalNot", "Isnan", "Isfinite", "All"),
    *("Any", "CountNonzero", "Floor", "Ceil", "Round", "Sign", "Trunc", "FloorDivide", "Argmax", "Argmin", "ZerosLike"),
    *("OnesLike", "Conjugate", "Real"),
)
_READ_OUTPUT = ("Exp", "Sqrt", "Rsqrt", "Tanh", "Reciprocal", "Sigmoid", "Relu", "Relu6", "Selu")
_READ_INPUT = (
    *("Absolute", "Square", "Log", "Log1p", "Log2", "Log10", "Expm1", "Sin", "Cos", "Tan", "Sinh", "Cosh", "Arctan", "Erf"),
    *("Softplus", "Softsign", "LeakyRelu"),
)
_READ_BOTH_OPERANDS = ("Multiply", "Divide", "TrueDivide", "DivideNoNan", "Maximum", "Minimum", "Mod", "Arctan2")
_READ_ALL = ("Max", "Min", "Amax", "Amin")
_AS_ACTIVATION = {
    **{"Silu": "silu", "HardSigmoid": "hard_sigmoid", "HardSilu": "hard_silu", "HardTanh": "hard_tanh", "Celu": "celu"},
    **{"LogSigmoid": "log_sigmoid", "TanhShrink": "tanh_shrink", "HardShrink": "hard_shrink", "SoftShrink": "soft_shrink"},
    **{"Squareplus": "squareplus", "SparsePlus": "sparse_plus", "SparseSigmoid": "sparse_sigmoid"},
}


def _fixed(reads_inputs: bool, reads_outputs: bool) -> BuiltInRule:
    def rule(operation: Any, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> LayerTraits:
        return LayerTraits(reads_inputs, reads_outputs, max(elements(inputs), elements(outputs)), is_fusible=True)

    return rule


def _of_two_operands(operation, inputs, outputs):
    # A single tensor stands for itself times itself, or for itself times a constant, which the inputs do not tell.
    return _fixed(True, False)(operation, inputs, outputs) if len(inputs) > 1 else None


def _power(operation, inputs, outputs):
    return _fixed(True, True)(operation, inputs, outputs) if len(inputs) > 1 else None


def _activation(operation, inputs, outputs):
    return ACTIVATIONS[_AS_ACTIVATION[type(operation).__name__]].traits(outputs)


def _softmax(operation, inputs, outputs):
    return traits_or_none(softmax_over(operation.axis, len(inputs[0].shape)), outputs)


def _relu(operation, inputs, outputs):
    return traits_or_none(relu_with(operation), outputs)


def _elu(operation, inputs, outputs):
    return ACTIVATIONS["elu"].traits(outputs) if operation.alpha == 1 else None


def _gelu(operation, inputs, outputs):
    return None if operation.approximate else ACTIVATIONS["gelu"].traits(outputs)


def _matmul(operation, inputs, outputs):
    contracted = inputs[0].shape[-1] if inputs[0].shape else 1
    return LayerTraits(True, False, 2 * elements(outputs) * contracted, is_costly=True) if len(inputs) == 2 else None


def _einsum(operation, inputs, outputs):
    if len(inputs) != 2 or "->" not in operation.subscripts:
        return None
    contracted = contracted_size(operation.subscripts, [one.shape for one in inputs])
    return LayerTraits(True, False, 2 * elements(outputs) * contracted, is_costly=True)


def _pooling(operation, inputs, outputs):
    if operation.data_format == "channels_first":
        return None
    reads = type(operation).__name__ == "MaxPool"
    size = operation.pool_size
    window = prod(size) if isinstance(size, (list, tuple)) else size ** max(1, len(inputs[0].shape) - 2)
    return LayerTraits(reads, reads, elements(outputs) * window)


def _clip(operation, inputs, outputs):
    return LayerTraits(True, False, 2 * elements(outputs), total_bytes(outputs), is_fusible=True)


def _cast_to(operation, inputs, outputs):
    return LayerTraits(False, False, elements(outputs), is_fusible=True)


def _activation_of(operation, inputs, outputs):
    return traits_or_none(activation_of(operation.layer.activation), outputs)


OPERATION_RULES: dict[str, BuiltInRule] = {
    **dict.fromkeys(_READ_NOTHING, _fixed(False, False)),
    **dict.fromkeys(_READ_OUTPUT, _fixed(False, True)),
    **dict.fromkeys(_READ_INPUT, _fixed(True, False)),
    **dict.fromkeys(_READ_ALL, _fixed(True, True)),
    **dict.fromkeys(_READ_BOTH_OPERANDS, _of_two_operands),
    **dict.fromkeys(_AS_ACTIVATION, _activation),
    **{"Power": _power, "Softmax": _softmax, "LogSoftmax": _softmax, "ReLU": _relu, "Elu": _elu, "Gelu": _gelu},
    **{"Matmul": _matmul, "Einsum": _einsum, "MaxPool": _pooling, "AveragePool": _pooling, "Clip": _clip},
}
"""By the name of the class."""
OWN_OPERATIONS: dict[str, BuiltInRule] = {"CastTo": _cast_to, "PassMask": _cast_to, "ActivationOf": _activation_of}
"""What flattening a model inserts; the modules of their classes import the rules."""
