"""Each private Keras or TensorFlow name that keras_sn uses still means what keras_sn takes it for."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

from keras_sn import keras_internals, symbolic_calls


@pytest.fixture
def model():
    inputs = keras.Input((4,))
    dense = L.Dense(4)
    return keras.Model(inputs, L.ReLU()(dense(dense(inputs))))


def test_nodes_in_execution_order(model):
    nodes = keras_internals.nodes_in_execution_order(model)
    assert [type(node.operation).__name__ for node in nodes] == ["Dense", "Dense", "ReLU"]
    assert nodes[1].input_tensors[0] is nodes[0].outputs[0]
    args, kwargs = nodes[0].arguments.fill_in({id(nodes[0].input_tensors[0]): "x"})
    assert (args, kwargs) == (("x",), {})


def test_functional_part(model):
    sequential = keras.Sequential([keras.Input((4,)), L.Dense(2)])
    assert keras_internals.functional_part(model) is model
    assert isinstance(keras_internals.functional_part(sequential), keras_internals.Functional)
    assert keras_internals.functional_part(keras.Sequential([L.Dense(2)])) is None


def test_only_graph_models_run_their_graph(model):
    class Own(keras.Model):
        def call(self, x):
            return x

    assert keras_internals.runs_its_graph(model)
    assert not keras_internals.runs_its_graph(Own())


def test_inputs_are_standardized(model):
    (x,) = keras_internals.standardize_inputs(model, np.zeros((2, 4), "float64"))
    assert x.dtype == tf.float32


def test_the_global_seed():
    keras.utils.set_random_seed(5)
    state = keras_internals.global_seed_state()
    before = np.array(state)
    assert keras_internals.global_seed_state() is state
    keras.random.normal((1,))
    assert not np.array_equal(state, before)


def test_masks_and_scopes():
    x = tf.zeros((2, 3))
    assert keras_internals.get_mask(x) is None
    keras_internals.set_mask(x, tf.ones((2,), tf.bool))
    assert keras_internals.get_mask(x).dtype == tf.bool
    assert not keras_internals.in_stateless_scope()
    with keras.StatelessScope():
        assert keras_internals.in_stateless_scope()


def test_call_context_sets_training_and_keeps_losses():
    class Outer(L.Layer):
        def __init__(self):
            super().__init__()
            self.dropout = L.Dropout(0.5)
            self.regularized = L.Dense(3, activity_regularizer="l2")

        def call(self, x):  # no `training` argument
            return self.regularized(self.dropout(x))

    outer = Outer()
    outer(tf.ones((1, 3)))
    with keras_internals.call_context(None), keras.StatelessScope(collect_losses=True) as scope:
        dropped = outer.dropout(tf.ones((100, 3)))
        outer(tf.ones((1, 3)))
        outer(tf.ones((1, 3)))
    assert (dropped.numpy() == 0).any()
    assert len(scope.losses) == 2
    layers = keras_internals.sublayers(outer)
    assert layers[keras_internals.owner_of_loss(layers, scope.losses[0])] is outer.regularized


def test_autocast():
    variable = keras.Variable(np.ones(2, "float32"))
    with keras_internals.call_context("float16"):
        assert variable.value.dtype == tf.float16
        with keras_internals.without_autocast():
            assert variable.value.dtype == tf.float32


def test_updates_in_a_scope_are_seen():
    variable = keras.Variable(1.0, trainable=False)
    with keras.StatelessScope() as scope:
        variable.assign(2.0)
    assert keras_internals.updated_variable_ids(scope) == {id(variable)}


def test_recording():
    variable = tf.Variable(1.0)
    with tf.GradientTape():
        assert keras_internals.is_recorded(variable * 2)
        assert not keras_internals.is_recorded(tf.constant(1.0))
        with keras_internals.stop_recording():
            assert not keras_internals.is_recorded(variable * 2)


def test_a_saved_value_takes_the_place_of_a_computed_one():
    @tf.function
    def function(x, saved):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = keras_internals.in_place_of(x * 3.0, saved) ** 2
        return tape.gradient(y, x)

    assert float(function(tf.constant(1.0), tf.constant(5.0))) == 2 * 5 * 3


def test_a_recorded_operation_has_the_gradient_that_it_says():
    x, unwatched = tf.constant(2.0), tf.constant(3.0)
    y, z = tf.constant(5.0), tf.constant(7.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        keras_internals.record_operation([y, z], [x, unwatched], lambda of_y, of_z: [10.0 * of_y + of_z, None])
        assert keras_internals.is_recorded(y)
        loss = y + 2.0 * z
    assert float(tape.gradient(loss, x)) == 12.0


def test_weights_that_are_used_are_noted():
    read, assigned, constant = tf.Variable(1.0), tf.Variable(1.0), tf.Variable(1.0, trainable=False)

    def use():
        with keras_internals.weights_used() as found:
            assigned.assign(read * constant)
        assert {id(one) for one in found} == {id(read), id(assigned)}

    use()
    tf.function(use)()


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rmsprop"])
def test_slots(model, optimizer):
    optimizer = keras.optimizers.get(optimizer)
    keras_internals.build_optimizer(optimizer, model.trainable_variables)
    slots = keras_internals.slot_lists(optimizer)
    total = sum(len(of_kind) for of_kind in slots.values())
    own = {"iteration", "learning_rate"}
    assert total == len([v for v in optimizer.variables if v.path.rpartition("/")[2] not in own])
    assert keras_internals.place_in_optimizer(optimizer, model.trainable_variables[1]) == 1


def test_the_update_can_be_replaced(model):
    optimizer, seen = keras.optimizers.AdamW(weight_decay=0.1), []
    with keras_internals.replaced_update(optimizer, lambda *args: seen.append(args)):
        optimizer.apply_gradients([(tf.zeros(v.shape), v) for v in model.trainable_variables])
    before = [v.numpy() for v in model.trainable_variables]
    (gradients, variables, _), iterations = seen[0], int(optimizer.iterations)
    assert len(gradients) == len(variables) == len(model.trainable_variables)
    assert iterations == 1
    optimizer.apply_gradients([(tf.ones(v.shape), v) for v in model.trainable_variables])
    assert any((v.numpy() != old).any() for v, old in zip(model.trainable_variables, before, strict=True))


def test_clone_model_runs_the_graph_with_symbolic_inputs(model):
    # `FunctionalSNModel._run_through_graph` hands the settings on there.
    seen = []

    class Watched(keras_internals.Functional):
        def _run_through_graph(self, inputs, *args, **kwargs):
            seen.append("call_fn" in kwargs and isinstance(keras.tree.flatten(inputs)[0], keras.KerasTensor))
            return super()._run_through_graph(inputs, *args, **kwargs)

    watched = Watched(model.input, model.output)
    seen.clear()
    keras.models.clone_model(watched)
    assert seen[0]


def test_losses_added_inside_are_forgotten():
    layer = keras.layers.Dense(2, activity_regularizer="l2")
    layer.build((None, 3))
    before = set(layer._loss_ids)
    with keras_internals.losses_forgotten(layer):
        layer(tf.ones((4, 3)))
    assert layer._loss_ids == before


def test_the_graph_of_a_called_function_is_found():
    inner = tf.function(lambda x: tf.tanh(x), autograph=False)
    outer = tf.function(lambda x: inner(x), autograph=False).get_concrete_function(tf.TensorSpec((2,)))
    calls = [one for one in outer.graph.get_operations() if "PartitionedCall" in one.type]
    assert [one.type for one in keras_internals.graph_of_function(calls[0], "f").get_operations()].count("Tanh") == 1


def test_each_compile_leaves_another_record(model):
    assert keras_internals.compilation(keras.Sequential()) is None
    model.compile("sgd", "mse", jit_compile=False)
    first = keras_internals.compilation(model)
    assert keras_internals.compilation(model) is first
    assert keras_internals.asked_for_jit(model) is False
    model.compile("sgd", "mse", jit_compile=False)
    assert keras_internals.compilation(model) is not first


def test_the_mode_and_the_tape_are_seen():
    assert keras_internals.training_mode() is None
    with keras_internals.call_context(None, False):
        assert keras_internals.training_mode() is False
    assert not keras_internals.may_record()
    with tf.GradientTape():
        assert keras_internals.may_record()


def test_outputs_are_known_without_side_effects():
    layer = L.Dropout(0.5)
    layer.build((None, 4))
    before = np.array(layer.seed_generator.state)
    spec = keras_internals.output_spec(layer, keras.KerasTensor((2, 4)), training=True)
    assert spec.shape == (2, 4)
    np.testing.assert_array_equal(layer.seed_generator.state, before)
    assert keras_internals.output_spec(lambda x, fn, function: x, keras.KerasTensor((2,)), fn=1, function=2).shape == (2,)


def test_variables_keep_their_dtype_without_a_model_around_them():
    variable = keras.Variable(np.full(2, 1 / 3), dtype="float64")
    with keras_internals.call_context(None):
        assert variable.dtype == "float64"
    with keras_internals.call_context("float16"), keras_internals.without_autocast():
        assert keras.Variable(np.zeros(2, "float32")).value.dtype == "float32"


def test_an_assigned_weight_is_read_without_a_gradient_for_its_computation():
    variable = keras.Variable(2.0)
    value = tf.constant(3.0)
    scope = keras_internals.UpdatingScope({id(variable): value}, state_mapping=[(variable, value)])
    with tf.GradientTape() as tape:
        tape.watch(value)
        with scope:
            variable.assign(variable * 10.0)
            y = tf.convert_to_tensor(variable) ** 2
    assert float(y) == 900.0
    assert float(tape.gradient(y, value)) == 60.0


def test_gradient_functions_are_forgotten_with_their_owner():
    class Owner:
        pass

    owner, held = Owner(), Owner()
    seen = weakref.ref(held)

    def trace(held, owner):
        @tf.custom_gradient
        def double(x):
            return 2 * x, lambda upstream: (held, 2 * upstream)[1]

        with keras_internals.gradients_forgotten_with(owner):
            tf.function(double).get_concrete_function(tf.constant(1.0))

    trace(held, owner)
    del held
    gc.collect()
    assert seen() is not None
    del owner
    gc.collect()
    assert seen() is None


def test_averages_and_the_product_of_momenta(model):
    nadam = keras.optimizers.Nadam(use_ema=True)
    nadam.build(model.trainable_variables)
    assert [v.shape for v in keras_internals.moving_averages(nadam)] == [v.shape for v in model.trainable_variables]
    assert float(keras_internals.momentum_product(nadam)) == 1.0
    assert keras_internals.momentum_product(keras.optimizers.SGD()) is None


class Composite(L.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(4, name="dense")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return 2.0 * self.dense(x) + keras.ops.add(x, x)


def test_symbolic_calls_are_noted_in_order_and_leave_nothing():
    composite, x = Composite(), keras.KerasTensor((None, 4))
    composite.build((None, 4))
    name = [L.Add().name, L.Add().name][1]
    with symbolic_calls.calls_noted() as calls, symbolic_calls.computed_by_call(composite):
        y = composite(x)
    assert [call.operation.name for call in calls] == ["dense", "multiply", "add", "add", composite.name]
    assert calls[1].input_tensors[0] is calls[0].outputs[0]
    assert calls[-1].outputs[0] is y
    assert calls[-1].arguments.fill_in({id(x): "x"})[0] == ("x",)
    assert not composite._inbound_nodes
    assert not composite.dense._inbound_nodes
    assert "compute_output_spec" not in vars(composite)
    assert int(L.Add().name.rpartition("_")[2]) == int(name.rpartition("_")[2]) + 1
    assert isinstance(L.Dense(2)(keras.Input((3,)))._keras_history.operation, L.Dense)  # nodes are made again


def test_operators_are_noted_as_such():
    x = keras.KerasTensor((None, 4))
    with symbolic_calls.calls_noted() as calls:
        _ = x / 3, keras.ops.divide(x, 3), 2 - x, -x, x > 0, x @ keras.KerasTensor((4, 2))
    own = [type(call.operation) for call in calls]
    assert [kind.__name__ for kind in own] == ["TrueDivide", "Divide", "Subtract", "Negative", "Greater", "Matmul"]
    assert own[0].__mro__[1].__name__ == "TrueDivide"
    assert own[1].__mro__[1] is keras.Operation
    assert calls[0].operation(tf.constant([3]), 3).dtype == tf.float64  # TensorFlow's division of integers
    assert float(calls[2].operation(2, tf.constant(3.0))) == -1.0


def test_own_calls_are_told_from_keras_own():
    assert keras_internals.has_own_call(Composite())
    assert not keras_internals.has_own_call(L.Dense(2))
    with symbolic_calls.computed_by_call(composite := Composite()):
        assert not keras_internals.has_own_call(composite)
    assert keras_internals.is_called_plainly(Composite())
    assert keras_internals.is_called_plainly(L.Dense(2))
    with keras.RematScope(mode="full"):
        assert not keras_internals.has_own_call(Composite())
        assert not keras_internals.is_called_plainly(L.Dense(2))


def test_attention_notes_an_argument_in_its_call():
    layer = L.GroupQueryAttention(2, 2, 1)
    x = tf.ones((1, 3, 4))
    layer(x, x)
    before = dict(vars(layer))
    layer(x, x, return_attention_scores=True)
    assert {key for key, value in vars(layer).items() if before[key] is not value} == set(keras_internals.NOTED_IN_CALL)


def test_numbers_of_a_graph():
    with keras_internals.scratch_graph():
        number = tf.cast(tf.constant(1.5), "bfloat16")
        assert symbolic_calls.number(number) == 1.5
        assert str(symbolic_calls.number(number).dtype) == "bfloat16"
        call = symbolic_calls.SymbolicCall(L.ReLU(), symbolic_calls.SymbolicArguments(keras.KerasTensor((2,)), number), None)
        assert call.with_numbers().arguments.args[1] == 1.5
        assert call.with_numbers().arguments.args[0] is call.arguments.args[0]
        assert symbolic_calls.number(tf.zeros((2,))) is None
        assert symbolic_calls.number(tf.random.uniform(())) is None
    assert symbolic_calls.number(tf.constant(1.5)) is None  # computed already
    assert symbolic_calls.number(1.5) is None


def test_the_mode_and_the_autocast_dtype_of_a_call():
    call = symbolic_calls.SymbolicCall(L.ReLU(), symbolic_calls.SymbolicArguments(training=False), None)
    assert call.training is False
    assert symbolic_calls.SymbolicCall(L.ReLU(), symbolic_calls.SymbolicArguments(), None).training is True
    assert keras_internals.autocast_dtype() is None
    with keras_internals.call_context("bfloat16"):
        assert keras_internals.autocast_dtype() == "bfloat16"


def test_a_scratch_graph_computes_nothing():
    variable = tf.Variable(1)
    with keras_internals.scratch_graph() as graph:
        variable.assign_add(1)
    assert int(variable) == 1
    assert graph.get_operations()
