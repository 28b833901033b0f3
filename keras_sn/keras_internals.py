"""The private Keras and TensorFlow names that keras_sn needs, each with the reason why no public name serves.

Only `symbolic_calls` has others. `tests/test_keras_internals.py` fails when one of them changes.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src import backend
from keras.src.backend.common import global_state
from keras.src.layers.layer import CallContext
from keras.src.models.functional import Functional as Functional
from keras.src.models.sequential import Sequential
from keras.src.random.seed_generator import global_seed_generator
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.eager import context, record
from tensorflow.python.framework.config import is_op_determinism_enabled
from tensorflow.python.framework.ops import gradient_registry

NOTED_IN_CALL = ("_return_attention_scores",)
"""Where `GroupQueryAttention.call` notes an argument for a method that it calls; nobody else reads it."""


def nodes_in_execution_order(model: keras.Model) -> list[Any]:
    """The nodes of a functional model in the order in which Keras runs them, without its inputs.

    `clone_model(call_function=)` would show the same through public names, but it calls every layer again (milliseconds
    each), adds inbound nodes to the user's layers, and recurses.
    """
    by_depth = functional_part(model)._nodes_by_depth
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def functional_part(model: keras.Model) -> Any:
    """The functional graph of a functional or built Sequential model, else None."""
    if isinstance(model, Sequential):
        return model._functional
    return model if isinstance(model, Functional) else None


def runs_its_graph(model: keras.Model) -> bool:
    """Whether calling the model means running its graph and nothing else: neither `call` nor `__call__` is its user's."""
    return calls_its_graph(model) and _is_of_keras(type(model).__call__)


def calls_its_graph(model: keras.Model) -> bool:
    """Whether the model's `call` runs its graph and nothing else; its user's `__call__` may prepare the inputs."""
    return _is_of_keras(type(model).call)


def _is_of_keras(method: Any) -> bool:
    return method.__module__.partition(".")[0] in {"keras", "keras_sn"}


def has_own_call(layer: Any) -> bool:
    """Whether calling the layer means Keras' `__call__` around a `call` that is its user's, and nothing else."""
    return is_called_plainly(layer) and not _is_of_keras(type(layer).call)


def is_called_plainly(layer: Any) -> bool:
    """Whether calling the layer means Keras' `__call__` around the `call` of its class, and nothing else."""
    kind = type(layer)
    is_plain = not {"call", "compute_output_spec"} & vars(layer).keys() and layer._remat_mode is None
    return is_plain and _is_of_keras(kind.__call__) and _is_of_keras(kind.symbolic_call)


@contextmanager
def scratch_graph() -> Iterator[Any]:
    """A graph that is thrown away, for what must not be computed."""
    with tf.__internal__.FuncGraph("scratch").as_default() as graph:
        yield graph


def standardize_inputs(model: Any, inputs: Any) -> list[Any]:
    """What `Functional.call` does with its inputs before it runs the graph: structure, dtypes, ranks, masks."""
    return model._standardize_inputs(inputs)


def get_mask(tensor: Any) -> Any:
    """The Keras mask attached to a tensor, or None. Keras has no public way to read or attach one outside a layer."""
    return backend.get_keras_mask(tensor)


def with_mask_of(tensor: Any, source: Any) -> Any:
    """The tensor, with the mask that another one has."""
    set_mask(tensor, get_mask(source))
    return tensor


def set_mask(tensor: Any, mask: Any) -> None:
    backend.set_keras_mask(tensor, mask)


def in_stateless_scope() -> bool:
    return backend.in_stateless_scope()


def training_mode() -> bool | None:
    """The mode that a layer inherits that is called now without saying its own."""
    context = global_state.get_global_attribute("current_call_ctx")
    return None if context is None else context.get_value("training")


def output_spec(function: Any, /, *args: Any, **kwargs: Any) -> Any:
    """What a function of tensors returns, as `KerasTensor`s; it is traced in a graph that is thrown away, and changes nothing."""
    # Keras' own parameter is named `fn`, which a layer may have too.
    return backend.compute_output_spec(lambda args, kwargs: function(*args, **kwargs), args, kwargs)


@contextmanager
def call_context(dtype: str | None, training: bool | None = True) -> Iterator[None]:
    """What surrounds the layer calls inside `Model.__call__`: the mode, autocast, and an entry layer.

    Without an entry layer each layer that is called takes itself for one and clears the losses that it just added.
    """
    previous = global_state.get_global_attribute("current_call_ctx")
    context = CallContext(entry_layer=None)
    context.set_value("training", training)
    global_state.set_global_attribute("current_call_ctx", context)
    try:
        with _autocast(dtype):
            yield
    finally:
        global_state.set_global_attribute("current_call_ctx", previous)


@contextmanager
def _autocast(dtype: str | None) -> Iterator[None]:
    """As inside a model of this compute dtype; None is no scope at all: inside `AutocastScope(None)` variables say float32."""
    previous = global_state.get_global_attribute("autocast_scope")
    global_state.set_global_attribute("autocast_scope", None if dtype is None else backend.AutocastScope(dtype))
    try:
        yield
    finally:
        global_state.set_global_attribute("autocast_scope", previous)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Inside, `variable.value` is the variable's own value also while a mixed-precision model is being called."""
    with _autocast(None):
        yield


def autocast_dtype() -> str | None:
    """The dtype to which variables are cast that are read now, or None."""
    scope = global_state.get_global_attribute("autocast_scope")
    return None if scope is None else scope.dtype


def sublayers(layer: Any) -> list[Any]:
    """The layer and all layers inside it, in the order in which `Layer.losses` adds them up."""
    return layer._flatten_layers() if isinstance(layer, keras.Layer) else []


def owner_of_loss(layers: Sequence[Any], loss: Any) -> int:
    """Which of `layers` called `add_loss(loss)` inside a `StatelessScope`; Keras keeps only the identity of the loss."""
    return next((index for index, layer in enumerate(layers) if id(loss) in layer._loss_ids), 0)


@contextmanager
def losses_forgotten(layer: Any) -> Iterator[None]:
    """Takes the losses added inside out of Keras' bookkeeping, which knows losses by their ids; a later one may get the same."""
    layers = sublayers(layer)
    before = [set(one._loss_ids) for one in layers]
    try:
        yield
    finally:
        for one, ids in zip(layers, before, strict=True):
            one._loss_ids.intersection_update(ids)


def graph_of_function(operation: Any, attribute: str) -> Any:
    """The graph of a function that a TensorFlow operation calls, or None; no public name leads from a function's name there."""
    function = operation.graph._get_function(operation.get_attr(attribute).name)
    return getattr(function, "graph", None)


class UpdatingScope(keras.StatelessScope):
    """A `StatelessScope` in which a layer may assign to a trainable variable (`SpectralNormalization` does).

    As in Keras the assigned value is read from then on, its computation has no gradient, and the gradient of what is read goes to
    the variable.
    """

    def __init__(self, trainable: dict[int, Any], **kwargs: Any):
        super().__init__(**kwargs)
        self.trainable = trainable
        """The id of a trainable variable -> the tensor that its gradient is taken for."""

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        variable, value = update
        if id(variable) in self.trainable:
            value = in_place_of(self.trainable[id(variable)], value)
        super().add_update((variable, value))


def updated_variable_ids(scope: keras.StatelessScope) -> set[int]:
    """The ids of all variables that the scope holds a value for, to find updates of variables that no layer owns."""
    return set(scope.state_mapping)


def compilation(model: Any) -> Any:
    """Keras' record of the last `compile()`, a new object each time; None before the first."""
    return getattr(model, "_compile_config", None)


def asked_for_jit(model: Any) -> bool | str:
    """The argument of `compile`; `model.jit_compile` has resolved it for all layers at once."""
    return compilation(model).config["jit_compile"]


def would_jit(model: Any) -> bool:
    """What `jit_compile="auto"` means, if all layers allowed it (`Trainer` asks all layers at once)."""
    if model.jit_compile:
        return True
    has_accelerator = any(device.device_type != "CPU" for device in tf.config.list_physical_devices())
    return has_accelerator and not tf.distribute.has_strategy() and not is_op_determinism_enabled()


def stop_recording() -> Any:
    """No gradient tape records inside. `GradientTape.stop_recording` needs the tape, which is the caller's."""
    return record.stop_recording()


def may_record() -> bool:
    """Whether a tape is active, so that gradients may be asked for."""
    return bool(record.could_possibly_record())


@contextmanager
def gradients_forgotten_with(owner: Any) -> Iterator[None]:
    """TensorFlow keeps the gradient function of each `tf.custom_gradient` in a graph for ever; those made inside go with `owner`.

    They hold the layers and their variables, so no model that was ever planned would be freed. Nothing that they hold may refer
    to the owner.
    """
    registered = gradient_registry._registry
    before = set(registered)
    try:
        yield
    finally:
        if names := set(registered) - before:
            weakref.finalize(owner, _forget, registered, names)


def _forget(registered: dict[str, Any], names: set[str]) -> None:
    for name in names:
        registered.pop(name, None)


def is_recorded(tensor: Any) -> bool:
    """Whether an active tape would record an operation on the tensor, that is, may ask for its gradient."""
    return bool(record.should_record_backprop([tensor]))


def record_operation(outputs: Sequence[Any], inputs: Sequence[Any], gradient: Callable[..., Sequence[Any]]) -> None:
    """Tells the active tapes how the gradients of tensors are computed; for none of the inputs that they do not record.

    `tf.custom_gradient` tells them too, and also whoever differentiates the graph, and computes all gradients for everybody.
    """
    record.record_operation("Region", list(outputs), list(inputs), gradient)


def global_seed_state() -> Any:
    """The variable that unseeded `keras.random` calls draw from; the first one that asks for it makes it."""
    with tf.init_scope():
        return global_seed_generator().state


def in_place_of(computed: Any, saved: Any) -> Any:
    """The saved value, with the gradient of the computed one.

    `tf.custom_gradient` would do it with an operation that reads both, so that the computation would have to run.
    """
    with record.stop_recording():
        value = tf.identity(saved)
    record_operation([value], [computed], lambda gradient: [gradient])
    return value


def batch_moments_of(layer: Any) -> Callable[..., tuple[Any, Any]] | None:
    """Keras' function `(inputs, mask) -> (mean, variance)` of a batch normalization that computes them on its own batch alone."""
    own = keras.layers.BatchNormalization
    is_keras_own = isinstance(layer, own) and type(layer)._moments is own._moments and "_moments" not in vars(layer)
    return layer._moments if is_keras_own and not layer.synchronized else None


@contextmanager
def replaced_batch_moments(layer: Any, moments: Callable[[Any, Any], tuple[Any, Any]]) -> Iterator[None]:
    """Inside, a batch normalization asks `moments(inputs, mask)` for the mean and the variance of its batch."""
    vars(layer)["_moments"] = moments
    try:
        yield
    finally:
        del vars(layer)["_moments"]


@contextmanager
def weights_used() -> Iterator[list[Any]]:
    """Inside, the trainable variables of TensorFlow that are read or assigned to are noted, also while no tape records."""
    found: list[Any] = []
    with record.VariableWatcher() as watcher:
        yield found
    found.extend(watcher.watched_variables())


@contextmanager
def replaced_update(optimizer: Any, update: Callable[[list[Any], list[Any], Any], None]) -> Iterator[None]:
    """Inside, `optimizer.apply` hands all its gradients to `update(gradients, variables, learning_rate)` at once.

    Everything around it (filtering, clipping, unscaling, accumulation, moving averages, constraints, the iteration count) stays
    Keras' own; weight decay is left to `update`.
    """
    replaced = {"_backend_update_step": update, "_apply_weight_decay": lambda variables: None}
    vars(optimizer).update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del vars(optimizer)[name]


def decays(optimizer: Any, variable: keras.Variable) -> bool:
    return bool(optimizer.weight_decay is not None and optimizer._use_weight_decay(variable))


def slot_lists(optimizer: Any) -> dict[str, list[Any]]:
    """The optimizer's slot variables, one list for each kind by the attribute that holds it, in the order of its variables."""
    count = len(optimizer._trainable_variables)
    others = {"_trainable_variables", "_variables", "_model_variables_moving_average", "_accumulated_gradients"}
    return {
        name: value
        for name, value in vars(optimizer).items()
        if name not in others
        and isinstance(value, list)
        and len(value) == count
        and all(isinstance(slot, keras.Variable) for slot in value)
    }


def moving_averages(optimizer: Any) -> list[Any]:
    """The averages of the weights of an optimizer with `use_ema`, in the order of its variables."""
    return optimizer._model_variables_moving_average


def momentum_product(optimizer: Any) -> Any:
    """Nadam's product of its momentum factors so far; None for other optimizers."""
    return getattr(optimizer, "_u_product", None)


def place_in_optimizer(optimizer: Any, variable: keras.Variable) -> int:
    return optimizer._get_variable_index(variable)


def optimizer_on(optimizer: Any, variables: Sequence[Any], slots: dict[str, list[Any]], iterations: Any) -> Any:
    """A copy of the optimizer whose `update_step` works on the given variables, slots and iteration count."""
    twin = object.__new__(type(optimizer))  # `copy.copy` would pickle the optimizer
    vars(twin).update(vars(optimizer))
    places = {id(variable): place for place, variable in enumerate(variables)}
    vars(twin).update(slots)
    # The count is already divided by the accumulation steps.
    vars(twin).update(
        _iterations=iterations,
        gradient_accumulation_steps=None,
        _get_variable_index=lambda variable: places[id(variable)],
    )
    return twin


def build_optimizer(optimizer: Any, variables: list[keras.Variable]) -> None:
    """Creates the slots before the train step is traced; TensorFlow traces a function that creates variables twice."""
    if not optimizer.built:
        optimizer.build(variables)


def allow_internal_fragmentation(share: float) -> None:
    """Lets TensorFlow's GPU allocator give out blocks that are too large by at most this share of the device's memory.

    By default it gives out blocks that are up to 128 MiB too large rather than divide them. There is no public way to say
    otherwise in TensorFlow 2; it counts until the devices are opened.
    """
    config = config_pb2.ConfigProto()
    if (given := context.context()._config) is not None:
        config.CopyFrom(given)
    config.gpu_options.experimental.internal_fragmentation_fraction = share
    context.context()._config = config
