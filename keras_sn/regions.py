"""Regions as pure functions: `(inputs, weights, state) -> (outputs, new state, losses)`, compiled once per structure.

State (moving statistics, seed states, metrics inside layers) goes in as values and comes out as values, so running a region
again gives the same numbers and changes nothing. Forward and backward are two functions that are never inlined: TensorFlow
can neither merge a recomputation with the forward pass nor start it early. Regions of equal structure share them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from keras_sn import keras_internals, max_pooling, op_graph
from keras_sn.batch_statistics import batch_statistics
from keras_sn.bodies import BorrowedWeights, RegionBody, UsesGlobalSeed
from keras_sn.compiling import BackgroundCompiler, CompiledFunction
from keras_sn.errors import UnsupportedModelError
from keras_sn.layer_calls import TracedCall

EAGER, FUNCTION, XLA = "eager", "function", "xla"


class RegionResult(NamedTuple):
    """What a region returns; all lists are aligned with the region's own lists, with None where there is nothing."""

    outputs: list[Any]
    masks: list[Any]
    new_state: list[Any]
    """Of `RegionBody.updatable`; None for what the region did not update."""
    losses: list[Any]
    saved: list[Any]
    """Of `RegionBody.inside_only`: what only its backward pass wants."""
    passed_on: list[Any]
    """Of `RegionBody.inputs_in_turn`: what later regions read; see Note: [In turn]."""
    statistics: list[Any]
    """What its backward function may be given of the batch normalizations inside."""


def shape_of(tensor: Any) -> Any:
    """A tensor's shape in a form that takes no memory: the tensor without any of its numbers, if that can be undone."""
    is_known = tensor is not None and tensor.shape.rank and tensor.shape[-1] and tensor.dtype.is_floating
    return tensor[..., :0] if is_known else tensor


def _of_shape(tensor: Any, shape: Sequence[int]) -> Any:
    """Any tensor of the shape that `shape_of` tells; other tensors as they are."""
    if tensor is None or not shape or not shape[-1] or tensor.shape.rank != len(shape) or tensor.shape[-1] != 0:
        return tensor
    return tf.pad(tensor, [[0, 0]] * (len(shape) - 1) + [[0, shape[-1]]])


class RegionFunction:
    """The functions of all regions of one structure.

    Args:
        body: One of the regions.
        mode: `"eager"`, `"function"` or `"xla"`.
        compiler: Compiles them before they first run, in the background; None to leave it to TensorFlow.
    """

    def __init__(self, body: RegionBody, mode: str, compiler: BackgroundCompiler | None = None):
        self.body = body
        self.mode = mode
        self._compiler = compiler
        self.loss_owners: list[int] = []
        """For each loss the place of the layer that added it in `body.layers`."""
        self.unmasked: list[int] = []
        """Places of inputs whose mask a layer takes away, also from those who read them later (`MultiHeadAttention` does)."""
        self._borrowed: list[tuple[TracedCall, list[Any]]] = []
        """Layer calls that use weights which the region does not know, and these."""
        self._is_checked = False
        self.forward = self._compiled(self._forward, body.forward_shapes)
        self.backward = self._compiled(self._backward, body.backward_shapes)

    def _compiled(self, function: Any, shapes_of: Any) -> Any:
        if self.mode == EAGER:
            return function
        if self.mode == XLA and self._compiler is None:
            return tf.function(function, autograph=False, jit_compile=True)
        if self.mode == XLA:
            return CompiledFunction(function, self._compiler, shapes_of)
        return tf.function(function, autograph=False, experimental_attributes={"_noinline": True})

    @property
    def forward_differentiable(self) -> Any:
        """The forward pass for a tape to differentiate, which makes another function of it."""
        return self.forward.traced if isinstance(self.forward, CompiledFunction) else self.forward

    def _forward(self, inputs, masks, trainable, state) -> RegionResult:
        result = self._pure(inputs, masks, trainable, state)
        return result if self.mode == EAGER else result._replace(passed_on=[])  # a compiled function would copy them

    def check_once(self, *arguments: Any) -> None:
        """Looks at what runs eagerly in a graph first, where the operations of users' layers can be seen."""
        is_built_in = all(type(layer).__module__.startswith("keras.") for layer in self.body.layers)
        if not self._is_checked and (not is_built_in or any(isinstance(one, keras.layers.Lambda) for one in self.body.layers)):
            RegionFunction(self.body, FUNCTION).forward.get_concrete_function(*arguments)
        self._is_checked = True

    def _backward(self, inputs, masks, saved, trainable, state, statistics, output_gradients, loss_gradients, wanted, seeds):
        """Gradients for the inputs marked in `wanted` and for all trainable values; None where nothing connects.

        Gradients of outputs are None where the loss does not depend on them. `seeds` are the gradients that the wanted inputs
        have from later regions, or None; this region's contributions are added to them.
        """
        inputs = [_of_shape(x, spec.shape) for x, spec in zip(inputs, self.body.input_specs, strict=True)]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            sources = [x for x, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
            tape.watch(sources)
            tape.watch(trainable)
            result = self._pure(inputs, masks, trainable, state, saved, statistics)
            differentiated = [y for y in result.outputs if y.dtype.is_floating or y.dtype.is_complex]
            if result.losses:
                differentiated = [_late(y) for y in differentiated]
        last = dict(zip(self.body.inputs_in_turn, result.passed_on, strict=True))
        passed_on = [last.get(name, x) for name, x in zip(self.body.inputs, inputs, strict=True)]
        differentiated += [*result.losses, *(x for x, is_wanted in zip(passed_on, wanted, strict=True) if is_wanted)]
        pairs = zip(differentiated, [*output_gradients, *loss_gradients, *seeds], strict=True)
        targets = [(target, gradient) for target, gradient in pairs if gradient is not None]
        return tape.gradient(
            [target for target, _ in targets],
            [sources, trainable],
            output_gradients=[gradient for _, gradient in targets],
        )

    def _pure(self, inputs, masks, trainable, state, saved=None, statistics=()) -> RegionResult:
        body = self.body
        tensors = dict(zip(body.inputs, inputs, strict=True))
        for x, mask in zip(inputs, masks, strict=True):
            if mask is not None:
                keras_internals.set_mask(x, mask)
        self._borrowed = []
        substitutes = {} if saved is None else dict(zip(body.saved_inside, saved, strict=True))
        mapping = list(zip([*body.trainable, *body.state], [*trainable, *state], strict=True))
        with keras_internals.without_autocast():  # else the scope would cast the values
            sources = {id(variable): value for variable, value in zip(body.trainable, trainable, strict=True)}
            scope = keras_internals.UpdatingScope(sources, state_mapping=mapping, collect_losses=True)
        # What runs eagerly would compute them all the same.
        noting = batch_statistics(body.layers, statistics) if self.mode != EAGER else nullcontext([])
        with keras_internals.call_context(body.autocast_dtype, body.calls[0].training), scope, noting as noted:
            updated = []
            for call in body.calls:
                looked_at = _no_draws_of_tensorflow(call) if self.mode != EAGER else nullcontext()
                with looked_at, keras_internals.weights_used() as used:
                    outputs = _run(call, tensors)
                if self.mode == XLA:
                    outputs = _with_fused_gradients(call, tensors, outputs)
                if used:
                    self._borrowed.append((call, used))
                updated.append((call, keras_internals.updated_variable_ids(scope)))
                for name in (one for one in call.inputs if one in body.in_turn):  # See Note: [In turn]
                    tensors[name] = keras_internals.with_mask_of(tf.identity(tensors[name]), tensors[name])
                for name, tensor in zip(call.outputs, outputs, strict=True):
                    tensors[name] = _with_saved_value(tensor, substitutes[name]) if name in substitutes else tensor
            before = zip(body.updatable, [*state, *trainable], strict=True)
            new_state = [_if_updated(v, scope.get_current_value(v), old) for v, old in before]
        self._check_no_foreign_updates(updated)
        losses = list(scope.losses)
        self.loss_owners = [keras_internals.owner_of_loss(body.layers, loss) for loss in losses]
        had_masks = [place for place, mask in enumerate(masks) if mask is not None]
        self.unmasked = [place for place in had_masks if keras_internals.get_mask(inputs[place]) is None]
        outputs = [tensors[name] for name in body.outputs]
        return RegionResult(
            outputs,
            [keras_internals.get_mask(y) for y in outputs],
            new_state,
            [tf.convert_to_tensor(loss) for loss in losses],
            [tensors[name] for name in body.inside_only],
            [tensors[name] for name in body.inputs_in_turn],
            noted,
        )

    def refuse_borrowed(self) -> None:
        """Says so if the region uses weights that it does not know, whose gradients it could not compute.

        Raises:
            BorrowedWeights: See there.
        """
        if self._borrowed:
            raise BorrowedWeights.of(self._borrowed)

    def _check_no_foreign_updates(self, updated: Sequence[tuple[TracedCall, set[int]]]) -> None:
        """Refuses updates of variables that are no layer's own, given what had been updated after each call."""
        own = {id(variable) for variable in self.body.variables}
        foreign = updated[-1][1] - own
        if not foreign:
            return
        seed = keras_internals.global_seed_state()
        if foreign == {id(seed)}:
            raise UsesGlobalSeed(seed)
        call = next(call for call, ids in updated if ids - own - {id(seed)})
        raise UnsupportedModelError(
            f"Layer {call.operation.name!r} updates a variable that it does not own. Make the variable an attribute of the "
            f"layer, or keep the layer by a dict policy. Received: layer call {call.name!r}"
        )


def _run(call: TracedCall, tensors: dict[str, Any]) -> list[Any]:
    """Runs one layer call; a variable that it makes would be another one at each call and in no optimizer."""

    def refuse(next_creator: Any, **kwargs: Any) -> Any:
        raise UnsupportedModelError(
            f"Layer {call.operation.name!r} makes a variable inside `call()`. Make it in `__init__()` or `build()`, as an "
            f"attribute of the layer. Received: layer call {call.name!r}"
        )

    with tf.variable_creator_scope(refuse):
        return call.run(tensors)


def _with_fused_gradients(call: TracedCall, tensors: dict[str, Any], outputs: list[Any]) -> list[Any]:
    x = tensors[call.inputs[0]] if call.inputs else None
    if x is None or not max_pooling.is_fused(call.operation, x.shape, x.dtype.name):
        return outputs
    return [keras_internals.with_mask_of(max_pooling.with_fused_gradient(call.operation, x, y), y) for y in outputs]


@contextmanager
def _no_draws_of_tensorflow(call: TracedCall) -> Iterator[None]:
    """Refuses a layer call that draws random numbers by TensorFlow operations, since running it again would draw others."""
    graph = tf.compat.v1.get_default_graph()
    count = len(graph.get_operations())
    yield
    drawing = next((one for one in graph.get_operations()[count:] if op_graph.draws_anew(one)), None)
    if drawing is not None:
        raise UnsupportedModelError(
            f"Layer call {call.name!r} draws random numbers with a TensorFlow operation, which would draw others when it is "
            "recomputed. Use `keras.random` with a `keras.random.SeedGenerator` that is an attribute of the layer, or keep the "
            f"layer by a policy. Received: operation {drawing.type!r} of {call.operation!r}"
        )


def _with_saved_value(computed: Any, saved: Any) -> Any:
    """The saved value in place of the computed one, whose computation nothing then needs."""
    return keras_internals.with_mask_of(keras_internals.in_place_of(computed, saved), computed)


def _late(tensor: Any) -> Any:
    """The tensor behind a chain of identities, all of which the compiler removes.

    The tape adds gradients up in the order of their distance from what is differentiated. In Keras a loss that a layer adds is
    near, and the model's own loss, behind all later layers, is far; the chain makes it so here, and the sums round alike.
    """
    for _ in range(64):
        tensor = tf.identity(tensor)
    return tensor


def _if_updated(variable: keras.Variable, new: Any, old: Any) -> Any:
    if tf.is_symbolic_tensor(new) and new.graph is not tf.compat.v1.get_default_graph():
        raise UnsupportedModelError(
            "A layer updates a variable inside a branch or a loop of TensorFlow (`tf.cond`, `tf.while_loop`), from where its new "
            "value cannot be handed on. Update it outside, with a value that the branch returns, or use Keras' own train step "
            f"(`policy='none'`). Received: variable {variable.path!r}"
        )
    return None if new is old else new


# Note: [In turn]
# A tape adds the gradients of a tensor up in the order in which they arrive, and how a sum of three or more is rounded depends on
# it. What arrives first changes with what a region saves and where it ends. A tensor in turn is therefore handed from reader to
# reader, as it is from region to region (see Note: [Threading] in `runtime`): the gradient of each is added to the sum of those
# of all later ones, whichever of the two is there first.
