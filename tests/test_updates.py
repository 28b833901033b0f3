"""The grouped update equals Keras' own, whatever surrounds it."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from parity import rewriting_off

import keras_sn
from keras_sn import updates

rewriting_off()

SURROUNDINGS = {
    "plain": {},
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.01},
    "ema": {"use_ema": True, "ema_overwrite_frequency": 2},
    "accumulation": {"gradient_accumulation_steps": 2},
}
OPTIMIZERS = {
    "sgd": lambda **k: keras.optimizers.SGD(0.1, **k),
    "momentum": lambda **k: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True, **k),
    "adam": lambda **k: keras.optimizers.Adam(0.01, amsgrad=True, **k),
    "adamw": lambda **k: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.01, 1, 0.9), weight_decay=0.1, **k),
    "rmsprop": lambda **k: keras.optimizers.RMSprop(0.01, momentum=0.5, centered=True, **k),
    "adagrad": lambda **k: keras.optimizers.Adagrad(0.01, **k),
    "adadelta": lambda **k: keras.optimizers.Adadelta(0.01, **k),
    "adamax": lambda **k: keras.optimizers.Adamax(0.01, **k),
    "lion": lambda **k: keras.optimizers.Lion(0.01, **k),
}
IN_CI = [(name, "plain") for name in OPTIMIZERS] + [("adamw", surrounding) for surrounding in list(SURROUNDINGS)[1:]]
ONLY_FULL = [("momentum", surrounding) for surrounding in list(SURROUNDINGS)[1:]]


def _train(optimizer, planned, dtype="float32", eager=False):
    keras.backend.clear_session(free_memory=False)
    keras.config.set_dtype_policy(dtype)
    keras.utils.set_random_seed(3)
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 4)(inputs)  # its gradient is a tf.IndexedSlices
    x = L.Dense(4, kernel_constraint="max_norm")(x)
    model = keras.Model(inputs, L.Dense(1, dtype="float32")(L.Flatten()(x)))
    keras.config.set_dtype_policy("float32")
    if planned:
        model = keras_sn.SNModel.from_model(model, policy="recompute")
    model.compile(optimizer, "mse", jit_compile=False, run_eagerly=eager)
    if not planned:
        model.optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
    x = np.random.default_rng(0).integers(0, 9, (16, 6))
    history = model.fit(x, x[:, :1].astype("float32"), batch_size=4, epochs=1, verbose=0, shuffle=False).history
    return [
        history["loss"],
        *(np.asarray(keras.ops.convert_to_numpy(v)) for v in [*model.variables, *model.optimizer.variables]),
    ]


@pytest.mark.parametrize(("name", "surrounding"), [*IN_CI, *(pytest.param(*one, marks=pytest.mark.full) for one in ONLY_FULL)])
def test_equals_keras(name, surrounding):
    trained = [_train(OPTIMIZERS[name](**SURROUNDINGS[surrounding]), planned) for planned in (False, True)]
    for plain, ours in zip(*trained, strict=True):
        np.testing.assert_array_equal(ours, plain)


@pytest.mark.parametrize("eager", [False, True])
def test_loss_scaling_equals_keras_also_when_a_step_overflows(eager):
    def optimizer():
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=2.0**30, dynamic_growth_steps=2)

    plain, ours = (_train(optimizer(), planned, "mixed_float16", eager) for planned in (False, True))
    for a, b in zip(plain, ours, strict=True):
        np.testing.assert_array_equal(b, a)


def test_regions_of_equal_shapes_share_one_update():
    variables = [keras.Variable(np.ones((3, 3), "float32")) for _ in range(6)]
    optimizer = keras.optimizers.Adam()
    optimizer.build(variables)
    update = updates.GroupedUpdate([variables[:2], variables[2:4], variables[4:]], jit=False)

    @tf.function
    def step():
        with updates.grouped_update(optimizer, update, before_update=lambda: None):
            optimizer.apply_gradients([(tf.ones((3, 3)), v) for v in variables])

    step()
    (function,) = update._functions.values()
    assert function.experimental_get_tracing_count() == 1


def _needed_for(operation):
    """The names of all operations that run before one."""
    found, waiting = set(), [operation]
    while waiting:
        one = waiting.pop()
        if one.name not in found:
            found.add(one.name)
            waiting += [tensor.op for tensor in one.inputs] + list(one.control_inputs)
    return found


@pytest.mark.parametrize("all_together", [False, True])
def test_a_group_waits_for_its_own_gradients_unless_the_optimizer_needs_all(all_together):
    variables = [keras.Variable(np.ones((3, 3), "float32")) for _ in range(2)]
    optimizer = keras.optimizers.Adam(global_clipnorm=1.0 if all_together else None)
    optimizer.build(variables)
    update = updates.GroupedUpdate([[one] for one in variables], jit=False)

    @tf.function
    def step(a, b):
        gradients = [tf.tanh(a, name="first"), tf.tanh(b, name="second")]
        with updates.grouped_update(optimizer, update, before_update=lambda: None):
            optimizer.apply_gradients(zip(gradients, variables, strict=True))

    graph = step.get_concrete_function(tf.ones((3, 3)), tf.ones((3, 3))).graph
    calls = [one for one in graph.get_operations() if "Call" in one.type and "update" in one.get_attr("f").name]
    waited_for = [_needed_for(one) & {"first", "second"} for one in calls]
    both = {"first", "second"}  # the last variable's gradient, which comes first, shows that there is a batch
    assert waited_for == ([both, both] if all_together else [both, {"second"}])
    assert updates.needs_all_gradients(optimizer) is all_together


@pytest.mark.parametrize(
    ("arguments", "is_early"),
    [
        ({}, True),
        ({"optimizer": keras.optimizers.SGD(momentum=0.9, global_clipnorm=1.0)}, False),
        ({"optimizer": keras.optimizers.SGD(momentum=0.9, gradient_accumulation_steps=2)}, False),
        ({"optimizer": keras.optimizers.Nadam()}, False),
        ({"run_eagerly": True}, False),
    ],
)
def test_what_early_updates_save_is_planned(arguments, is_early):
    """Weights of 1 MiB in each of eight layers, and hardly any activations."""
    inputs = x = keras.Input((512,))
    for _ in range(8):
        x = L.Dense(512)(x)
    model = keras_sn.SNModel(inputs, x, policy={f"dense{end}": "recompute" for end in ("", *(f"_{n}" for n in range(1, 8)))})
    model.compile(**{"optimizer": keras.optimizers.SGD(momentum=0.9), "loss": "mse", "jit_compile": False} | arguments)
    plan = model.build_plan(1)
    gradients = plan.planned_peak_bytes - plan.reserved_bytes
    assert (gradients < 2.5 * 2**20) == is_early
    assert is_early or gradients > 7.5 * 2**20


def test_other_optimizers_run_keras_own_update():
    class Odd(keras.optimizers.SGD):
        pass

    calls = []
    update = updates.GroupedUpdate([], jit=False)
    update.__class__ = type("Watched", (updates.GroupedUpdate,), {"__call__": lambda self, *args: calls.append(args)})
    variable = keras.Variable(1.0)
    for optimizer in (Odd(0.1), keras.optimizers.Nadam()):
        with updates.grouped_update(optimizer, update, before_update=lambda: None):
            optimizer.apply_gradients([(tf.constant(1.0), variable)])
    assert not calls
    assert float(variable.value) < 1.0
