"""The training step as a sequence of steps: every layer call forward, then backward in reverse.

In: a `LayerGraph`. Out: a tuple of `Step`s, whose reads and writes are all that the planner's passes look at.
Follows the execution route of Wang et al. 2018 (SuperNeurons, section 3.1, algorithm 1), without its recursion.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from keras_sn.errors import PlanError
from keras_sn.graph import LayerCall, LayerGraph

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class Step:
    """One layer call in one phase."""

    layer: str
    phase: str
    """`"forward"`, `"backward"` or `"recompute"`."""
    reads: frozenset[str]
    writes: frozenset[str]


def execution_route(graph: LayerGraph) -> tuple[LayerCall, ...]:
    """Orders the layer calls of a network with forks and joins (algorithm 1 of the paper).

    Depth first from the first layer calls; a join waits until all its producers have run. An explicit stack takes the
    place of the paper's recursion, which is as deep as the network.

    Args:
        graph: Any layer graph.

    Returns:
        The layer calls in the paper's order; `dataclasses.replace(graph, layers=...)` puts the graph into it.
    """
    followers: list[list[int]] = [[] for _ in graph.layers]
    awaited = [0] * len(graph.layers)
    for index, layer in enumerate(graph.layers):
        producers = {graph.producer[tensor] for tensor in layer.inputs if tensor in graph.producer}
        awaited[index] = len(producers)
        for producer in producers:
            followers[producer].append(index)
    arrived = [0] * len(graph.layers)
    route = []
    stack = [index for index in reversed(range(len(graph.layers))) if not awaited[index]]
    while stack:
        index = stack.pop()
        arrived[index] += 1
        if arrived[index] >= awaited[index]:
            route.append(graph.layers[index])
            stack.extend(reversed(followers[index]))
    return tuple(route)


def training_steps(graph: LayerGraph, *, input_gradients: bool = False) -> tuple[Step, ...]:
    """Lists the steps of one training step: `len(graph.layers)` forward, as many backward, in `graph.layers` order.

    The gradient of tensor `x` is the tensor `grad:x`. Where a layer call works in place, the gradients of its input and
    output are one tensor. The loss has no step of its own: the backward step of a layer call that makes a graph output
    reads that output and makes its gradient. An in-place one (softmax in the paper) turns the output itself into it.

    Args:
        graph: The layer graph, in execution order.
        input_gradients: Whether gradients of the graph inputs are made. The paper's convolutions make them
            (section 4.1 counts 117.9 MiB of it for AlexNet); Keras does not.

    Returns:
        The steps.

    Raises:
        PlanError: A layer call saves a tensor that is neither its input nor its output.
    """
    names = _gradient_names(graph, input_gradients)
    forward = [Step(one.name, FORWARD, frozenset(one.inputs), frozenset(one.outputs)) for one in graph.layers]
    outputs = frozenset(graph.outputs)
    made: set[str] = set()
    backward = [_backward_step(layer, outputs, names, made) for layer in reversed(graph.layers)]
    return (*forward, *backward)


def tensor_bytes(graph: LayerGraph) -> dict[str, int]:
    """Bytes of every tensor that a plan manages: activations and gradients.

    Graph inputs are missing: they belong to the user, so they count as reserved.
    """
    inputs = set(graph.inputs)
    sizes = {name: spec.nbytes for name, spec in graph.tensors.items() if name not in inputs}
    return sizes | {gradient_of(name): spec.nbytes for name, spec in graph.tensors.items()}


def gradient_of(tensor: str) -> str:
    """The name of a tensor's gradient."""
    return f"grad:{tensor}"


def count_recomputed(steps: Sequence[Step]) -> int:
    """The extra forward steps in a sequence (table 1 of the paper)."""
    return sum(step.phase == RECOMPUTE for step in steps)


def _gradient_names(graph: LayerGraph, input_gradients: bool) -> dict[str, str]:
    """Tensor -> the tensor that holds its gradient, for all that the loss depends on."""
    readers: dict[str, int] = {}
    for layer in graph.layers:
        for tensor in set(layer.inputs):
            readers[tensor] = readers.get(tensor, 0) + 1
    outputs = {tensor for tensor in graph.outputs if graph.tensors[tensor].is_differentiable}
    skipped = set() if input_gradients else set(graph.inputs)
    names = {tensor: gradient_of(tensor) for tensor in outputs - skipped}
    for layer in reversed(graph.layers):
        if not any(tensor in names for tensor in layer.outputs):
            continue
        for tensor in layer.inputs:
            if tensor not in skipped and graph.tensors[tensor].is_differentiable:
                names.setdefault(tensor, gradient_of(tensor))
        if layer.gradient_in_place and len(layer.inputs) == len(layer.outputs) == 1:
            source, target = layer.inputs[0], layer.outputs[0]
            if target in outputs and target not in readers:
                names[target] = target
            # A gradient with other contributions is a sum, which must exist before this layer call's turn comes.
            alone = readers[source] == 1 and source not in outputs
            if alone and source in names and graph.nbytes(source) == graph.nbytes(target):
                names[source] = names[target]
    return names


def _backward_step(layer: LayerCall, outputs: frozenset[str], names: dict[str, str], made: set[str]) -> Step:
    """The backward step of a layer call; adds the gradients that it makes to `made`."""
    if foreign := set(layer.saved_for_backward) - {*layer.inputs, *layer.outputs}:
        raise PlanError(
            f"Layer call {layer.name!r} may save only its own inputs and outputs for its backward step. "
            f"Received: saved_for_backward={sorted(foreign)}"
        )
    incoming = [tensor for tensor in layer.outputs if tensor in names]
    if not incoming:
        return Step(layer.name, BACKWARD, frozenset(), frozenset())
    from_loss = {tensor for tensor in incoming if tensor in outputs}
    seeds = {names[tensor] for tensor in from_loss}
    writes = seeds | {names[tensor] for tensor in layer.inputs if tensor in names}
    # A gradient with several contributions is a sum: every one after the first reads what is there already.
    reads = {names[tensor] for tensor in incoming} - (seeds - made) | (writes & made)
    reads |= {*layer.saved_for_backward, *from_loss}
    made |= writes
    return Step(layer.name, BACKWARD, frozenset(reads), frozenset(writes))
