"""What the operations of a TensorFlow graph compute, read and hold. Nothing here runs an operation."""

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import tensorflow as tf

from keras_sn.keras_internals import graph_of_function

CONVOLUTIONS = {
    *("Conv2D", "Conv3D", "DepthwiseConv2dNative", "Conv2DBackpropInput", "Conv3DBackpropInputV2"),
    "DepthwiseConv2dNativeBackpropInput",
}
_MATMULS = {"MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"}
_CUDNN = {"CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"}
MATRIX_OPERATIONS = CONVOLUTIONS | _MATMULS | {"Einsum"} | _CUDNN
"""What a layer is costly for."""
_CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
LOOPS = {"While", "StatelessWhile"}
_BRANCHES = {"If", "StatelessIf", "Case", "StatelessCase"}

_VIEWS = {"Reshape", "Squeeze", "ExpandDims", "Identity", "IdentityN", "StopGradient", "PreventGradient", "EnsureShape"}
_VIEWS |= {"TensorListFromTensor", "CheckNumerics", "Bitcast"}
_SHAPE_READERS = {
    *("Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike", "BroadcastGradientArgs"),
    *("TensorListElementShape", "TensorListLength"),
}
_FREE = _VIEWS | _SHAPE_READERS | {"Const", "Placeholder", "NoOp", "ReadVariableOp", "TensorListReserve", "EmptyTensorList"}
_RANDOM = {
    *("StatelessRandomUniformV2", "StatelessRandomNormalV2", "StatelessTruncatedNormalV2", "StatelessRandomUniformIntV2"),
    *("StatelessRandomGetKeyCounter", "StatelessRandomGetAlg", "StatelessRandomUniformFullIntV2"),
}
_DRAWS_ANEW = {"Multinomial", "ParameterizedTruncatedNormal", "RngReadAndSkip", "RngSkip", "TruncatedNormal"}
_ELEMENTWISE = {
    *("Abs", "Acos", "Acosh", "Add", "AddN", "AddV2", "Asin", "Asinh", "Atan", "Atan2", "Atanh", "BiasAdd", "Cast", "Ceil"),
    *("ClipByValue", "Complex", "ComplexAbs", "Cos", "Cosh", "Div", "DivNoNan", "Elu", "Equal", "Erf", "Erfc", "Erfinv"),
    *("Exp", "Expm1", "Floor", "FloorDiv", "FloorMod", "Greater", "GreaterEqual", "Imag", "Inv", "IsFinite", "IsInf"),
    *("IsNan", "LeakyRelu", "Less", "LessEqual", "Log", "Log1p", "LogicalAnd", "LogicalNot", "LogicalOr", "Maximum"),
    *("Minimum", "Mod", "Mul", "MulNoNan", "Neg", "NotEqual", "Pow", "Real", "RealDiv", "Reciprocal", "Relu", "Relu6"),
    *("Rint", "Round", "Rsqrt", "Select", "SelectV2", "Selu", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign"),
    *("Sqrt", "Square", "SquaredDifference", "Sub", "Tan", "Tanh", "Xdivy", "Xlog1py", "Xlogy"),
    *("BitwiseAnd", "BitwiseOr", "BitwiseXor", "LeftShift", "RightShift", "Invert"),
}
_REDUCTIONS = {"All", "Any", "ArgMax", "ArgMin", "LogSoftmax", "Max", "Mean", "Min", "Prod", "Softmax", "Sum", "L2Loss"}
_REDUCTIONS |= {"FusedBatchNormV3"}
_SUMMARIES = _REDUCTIONS - {"Softmax", "LogSoftmax", "FusedBatchNormV3"}
_MOVES = {
    *("BroadcastTo", "ConcatV2", "Fill", "Gather", "GatherV2", "MirrorPad", "OneHot", "Pack", "Pad", "PadV2", "Range"),
    *("ReverseV2", "Slice", "Split", "SplitV", "StridedSlice", "Tile", "Transpose", "Unpack", "Roll", "ResizeNearestNeighbor"),
    *("MatrixBandPart", "MatrixDiagV3", "MatrixDiagPartV3", "BatchToSpaceND", "SpaceToBatchND", "DepthToSpace", "SpaceToDepth"),
}
_EXPENSIVE = {"Erf", "Erfc", "Exp", "Expm1", "Log", "Log1p", "Pow", "Sigmoid", "Softplus", "Tanh"}
"""Element-wise operations that XLA does not repeat where their result is read (`InstructionFusion::IsExpensive`)."""
LINEAR_OPERATIONS = _MOVES | _FREE | {"Add", "AddN", "AddV2", "BiasAdd", "Cast", "Mean", "Neg", "Sub", "Sum"}
"""Their gradients read neither inputs nor outputs, but for sizes and places."""
FUSIBLE_OPERATIONS = _ELEMENTWISE | _REDUCTIONS | _MOVES | _RANDOM | _FREE


def root(tensor: Any) -> Any:
    """The tensor that a tensor is a view of, also through the functions that are called."""
    while True:
        operation = tensor.op
        if operation.type in _VIEWS and operation.inputs:
            tensor = operation.inputs[tensor.value_index if operation.type == "IdentityN" else 0]
        elif operation.type in _CALLS and (body := graph_of_function(operation, "f")) is not None:
            inner = root(body.outputs[tensor.value_index])
            place = next((index for index, x in enumerate(body.inputs) if x is inner), None)
            if place is None:
                return tensor
            tensor = operation.inputs[place]
        else:
            return tensor


def is_variable(tensor: Any) -> bool:
    """Whether a tensor is the value of a variable that the traced layer does not own."""
    return tensor.op.type == "ReadVariableOp" or tensor.dtype == tf.resource


def constant_tensors(operations: Sequence[Any]) -> set[int]:
    """The ids of the tensors that depend on nothing that is fed or drawn."""
    found: set[int] = set()
    for one in operations:
        if one.type != "Placeholder" and not _is_random(one) and all(id(x) in found for x in one.inputs):
            found.update(id(y) for y in one.outputs)
    return found


def _is_random(operation: Any) -> bool:
    return operation.type in _RANDOM or operation.op_def.is_stateful


def draws_anew(operation: Any) -> bool:
    """Whether running an operation twice gives different random numbers; also for what it calls."""
    if operation.op_def.is_stateful and ("Random" in operation.type or operation.type in _DRAWS_ANEW):
        return True
    return any(draws_anew(inner) for body, _ in _bodies(operation) if body is not None for inner in body.get_operations())


def tensors_read(backward: Sequence[Any], gradients: Sequence[Any]) -> list[Any]:
    """The tensors from outside that the backward operations which the gradients need read the values of."""
    inside = {id(one) for one in backward}
    seen: set[int] = set()
    found, stack = [], [(gradient, True) for gradient in gradients]
    while stack:
        tensor, is_read = stack.pop()
        if id(tensor.op) not in inside:
            found += [tensor] * is_read
        elif id(tensor.op) not in seen:
            seen.add(id(tensor.op))
            if tensor.op.type not in _SHAPE_READERS:
                stack.extend((x, _is_value_read(tensor.op, index)) for index, x in enumerate(tensor.op.inputs))
    return found


def _is_value_read(operation: Any, index: int) -> bool:
    """Whether an operation reads more of an input than its shape; functions may not use all their arguments."""
    name = "f" if operation.type in _CALLS else "body" if operation.type in LOOPS else None
    body = graph_of_function(operation, name) if name else None
    if body is None:
        return True
    argument = body.inputs[index]
    consumers = [one for one in argument.consumers() if one.type not in _SHAPE_READERS]
    is_passed_on = name == "body" and body.outputs[index] is argument
    return bool(consumers) or (not is_passed_on and any(y is argument for y in body.outputs))


def count_of_value_readers(tensor: Any) -> int:
    """How many operations read more of a tensor than its shape."""
    return sum(one.type not in _SHAPE_READERS for one in tensor.consumers())


def is_written(tensor: Any, inside: set[int]) -> bool:
    """Whether XLA writes a tensor to memory: it is dear to repeat, or a matrix operation reads it or one of its views."""
    if tensor.op.type not in FUSIBLE_OPERATIONS or tensor.op.type in _EXPENSIVE:
        return True
    for reader in tensor.consumers():
        if id(reader) not in inside:
            continue
        if reader.type in _VIEWS:
            if any(is_written(view, inside) for view in reader.outputs):
                return True
        elif reader.type not in FUSIBLE_OPERATIONS:
            return True
    return False


def held_bytes(tensor: Any) -> int:
    """The bytes of a tensor; of what a loop collects, those of all its steps."""
    if tensor.dtype == tf.variant:
        return _collected_bytes(tensor)
    if tensor.op.type in _CUDNN and tensor.value_index == 3:
        # The reserve space, whose size only cuDNN knows: the gates' activations and the cell states of each step.
        sequence = tensor.op.outputs[0]
        return 6 * prod(sequence.shape) * sequence.dtype.size if sequence.shape.is_fully_defined() else 0
    return prod(tensor.shape) * tensor.dtype.size if tensor.shape.is_fully_defined() else 0


def _collected_bytes(tensor: Any) -> int:
    loop = tensor.op
    body = graph_of_function(loop, "body") if loop.type in LOOPS else None
    if body is None:
        return 0
    push = body.outputs[tensor.value_index].op
    item = push.inputs[1] if push.type == "TensorListPushBack" else None
    if item is None or (item.dtype != tf.variant and not item.shape.is_fully_defined()):
        return 0
    return _trip_count(loop) * held_bytes(item)


def _trip_count(loop: Any) -> int:
    """How often a loop runs: the bound that Keras and TensorFlow give it, or the length of a list that it walks along."""
    bounds = [tf.get_static_value(x) for x in loop.inputs if x.dtype == tf.int32 and x.shape.rank == 0]
    lengths = [x.op.inputs[0].shape[0] for x in loop.inputs if x.op.type == "TensorListFromTensor"]
    known = [int(bound) for bound in bounds if bound is not None and bound > 0]
    return next((length for length in lengths if length), None) or max(known, default=1)


def _bodies(operation: Any) -> Iterator[tuple[Any, int]]:
    """The graphs that an operation runs, and how often."""
    if operation.type in _CALLS:
        yield graph_of_function(operation, "f"), 1
    elif operation.type in LOOPS:
        yield graph_of_function(operation, "body"), _trip_count(operation)
    elif operation.type in ("If", "StatelessIf"):
        yield from ((graph_of_function(operation, branch), 1) for branch in ("then_branch", "else_branch"))


def kinds_of(operations: Sequence[Any], constants: set[int]) -> set[str]:
    """The types of all operations that compute something from data, also inside functions."""
    kinds = set()
    for one in operations:
        if one.outputs and not all(id(y) in constants for y in one.outputs):
            bodies = [body for body, _ in _bodies(one) if body is not None]
            kinds |= set().union(*(kinds_of(body.get_operations(), set()) for body in bodies))
            kinds |= set() if one.type in _CALLS and bodies else {one.type}
    return kinds


def flops(operations: Sequence[Any], constants: set[int]) -> int:
    """Floating-point operations: those of matrix products and convolutions, and one per output element of all others."""
    total = 0
    for one in operations:
        if one.type in _CALLS | LOOPS | _BRANCHES:
            total += sum(times * flops(body.get_operations(), set()) for body, times in _bodies(one) if body is not None)
        elif one.type not in _FREE and not all(id(y) in constants for y in one.outputs):
            total += _operation_flops(one)
    return total


def _operation_flops(operation: Any) -> int:
    if not operation.outputs or not operation.outputs[0].shape.is_fully_defined():
        return 0
    count, shapes = prod(operation.outputs[0].shape), [x.shape for x in operation.inputs]
    if operation.type in _MATMULS:
        is_transposed = operation.get_attr("transpose_a" if operation.type == "MatMul" else "adj_x")
        return 2 * count * (shapes[0][-2 if is_transposed else -1] or 1)
    if operation.type == "Einsum":
        return 2 * count * contracted_size(operation.get_attr("equation").decode(), shapes)
    if operation.type in ("Conv2D", "Conv3D"):
        return 2 * count * prod(shapes[1][:-1])
    if operation.type.startswith("DepthwiseConv2dNative"):
        return 2 * max(count, prod(shapes[-1])) * prod(shapes[1][:2])
    if operation.type in ("Conv2DBackpropInput", "Conv3DBackpropInputV2"):
        return 2 * prod(shapes[2]) * prod(shapes[1][:-1])
    if operation.type in _CUDNN:
        return 2 * prod(shapes[0][:2]) * prod(shapes[3] if shapes[3].is_fully_defined() else [1])
    if operation.type in _SUMMARIES and shapes and shapes[0].is_fully_defined():
        return max(count, prod(shapes[0]))
    return count


def contracted_size(equation: str, shapes: Sequence[Any]) -> int:
    """The product of the axes that an einsum sums over, for `equation` with an arrow."""
    left, _, right = equation.partition("->")
    sizes: dict[str, int] = {}
    for labels, shape in zip(left.split(","), shapes, strict=True):
        before, dots, after = labels.partition("...")
        sizes |= dict(zip(before, shape, strict=False))
        if dots and after:
            sizes |= dict(zip(after, list(shape)[-len(after) :], strict=True))
    return prod(size or 1 for label, size in sizes.items() if label not in right)
