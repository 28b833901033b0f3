"""The rules against the truth: what TensorFlow's backward operations read of each layer."""

import subprocess
import sys
from time import perf_counter

import keras
import numpy as np
import pytest
from keras import layers as L
from keras import ops
from layer_cases import CASES, LINE, NOT_COVERED, PICTURE, ROW, spec_of

from keras_sn import op_costs
from keras_sn.graph import TensorSpec
from keras_sn.layer_rules import BUILT_IN_RULES
from keras_sn.op_costs import traced_traits
from keras_sn.operation_rules import OPERATION_RULES
from keras_sn.rules import LayerTraits, register_rule, traits_of
from keras_sn.traits import total_bytes

PUBLIC = {value.__name__: value for name in dir(L) if isinstance(value := getattr(L, name), type) and not name.startswith("_")}
NOT_TRACEABLE = {"RandomElasticTransform": "Keras asks for the static batch size of a tensor that it made without one"}


@pytest.fixture(autouse=True)
def _fresh_cache():
    op_costs.clear_cache()


def _problems(rule, truth, inputs, outputs):
    """Where a rule claims less than TensorFlow reads, or more, or tells another size."""
    # Within a factor of 1.5, or a quarter of the tensors where only statistics and masks are held.
    slack = 0.25 * (total_bytes(inputs) + total_bytes(outputs))
    right = {
        "inputs": rule.reads_inputs == truth.reads_inputs,
        "outputs": rule.reads_outputs == truth.reads_outputs,
        "bytes": truth.internal_bytes / 1.5 - slack <= rule.internal_bytes <= 1.5 * truth.internal_bytes + slack,
        "kind": (rule.is_costly, rule.is_convolution, rule.is_fusible)
        == (truth.is_costly, truth.is_convolution, truth.is_fusible),
        "flops": not truth.is_costly or truth.flops / 2 <= rule.flops <= 2 * truth.flops,
    }
    return [(what, rule, truth) for what, is_right in right.items() if not is_right]


def test_every_public_layer_is_tested_or_excused():
    assert set(PUBLIC) == set(CASES) | set(NOT_COVERED)
    assert not set(CASES) & set(NOT_COVERED)


# Clearing Keras' session between tests takes longer than a test, so that one test checks many layers.
@pytest.mark.parametrize("letter", sorted({name[0] for name in CASES}))
def test_the_rules_say_what_tensorflow_does(letter):
    problems = {}
    cases = {(name, place): case for name in CASES if name[0] == letter for place, case in enumerate(CASES[name])}
    for (name, place), case in cases.items():
        layer, inputs, outputs, call = case.make()
        truth = op_costs._measure(layer, inputs, call)
        assert (truth is None) == (name in NOT_TRACEABLE), name
        # A layer without a rule is measured, so that there is nothing to compare.
        if truth is not None and type(layer) in BUILT_IN_RULES:
            is_told = BUILT_IN_RULES[type(layer)](layer, inputs, outputs) is not None
            assert is_told or place, f"{name} has a rule that does not tell the plain case"
            problems[name, place] = _problems(traits_of(layer, inputs, outputs, call), truth, inputs, outputs)
    assert not any(problems.values()), problems


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "float16"])
def test_half_precision(policy):
    """Layers with weights hold converted copies; the others only when their input has another dtype."""
    for name in ("Dense", "Conv2D", "BatchNormalization", "LayerNormalization", "Dropout", "Add", "ReLU", "MaxPooling2D"):
        case = CASES[name][0]
        for dtype in ("float32", policy.removeprefix("mixed_")):
            keras.config.set_dtype_policy(policy)
            layer, inputs, outputs, call = case.make()
            keras.config.set_dtype_policy("float32")
            inputs = [TensorSpec(one.name, one.shape, dtype) for one in inputs]
            truth = op_costs._measure(layer, inputs, call)
            assert not _problems(traits_of(layer, inputs, outputs, call), truth, inputs, outputs), (name, dtype)


OPERATIONS = {
    **{
        name: (lambda x, name=name: getattr(ops, name)(x), (LINE,))
        for name in (
            *("absolute", "negative", "square", "sqrt", "exp", "expm1", "log", "log1p", "log2", "log10", "sin", "cos", "tan"),
            *("tanh", "sinh", "cosh", "arctan", "reciprocal", "sign", "floor", "ceil", "round", "relu", "relu6", "sigmoid"),
            *("softplus", "softsign", "silu", "elu", "selu", "gelu", "leaky_relu", "log_sigmoid", "hard_sigmoid", "hard_silu"),
            *("hard_tanh", "softmax", "log_softmax", "erf", "rsqrt", "max", "min", "mean", "sum", "amax", "amin", "argmax"),
            *("ravel", "zeros_like", "isnan", "stop_gradient", "flip", "tril", "triu", "all", "any", "copy", "celu"),
            *("squareplus", "hard_shrink", "tanh_shrink", "soft_shrink", "sparse_plus", "sparse_sigmoid", "trunc", "isfinite"),
            *("count_nonzero", "logical_not", "argmin", "ones_like", "conjugate", "real", "logsumexp", "prod", "std", "sort"),
        )
    },
    **{
        name: (lambda x, y, name=name: getattr(ops, name)(x, y), (LINE, (LINE[-1],)))
        for name in (
            *("add", "subtract", "multiply", "divide", "true_divide", "power", "maximum", "minimum", "mod", "arctan2"),
            *("greater", "less", "equal", "not_equal", "greater_equal", "less_equal", "logical_and", "logical_or"),
            *("floor_divide", "divide_no_nan", "logaddexp"),
        )
    },
    "matmul": (ops.matmul, (LINE, (2, 4, 5))),
    "einsum": (lambda x, y: ops.einsum("abc,acd->abd", x, y), (LINE, (2, 4, 5))),
    "tensordot": (lambda x, y: ops.tensordot(x, y, axes=1), (ROW, (6, 3))),
    "reshape": (lambda x: ops.reshape(x, (2, 32)), (LINE,)),
    "transpose": (lambda x: ops.transpose(x, (0, 2, 1)), (LINE,)),
    "get_item": (lambda x: x[:, 1:], (LINE,)),
    "squeeze": (lambda x: ops.squeeze(x, -1), ((2, 8, 1),)),
    "expand_dims": (lambda x: ops.expand_dims(x, 1), (LINE,)),
    "concatenate": (lambda x, y: ops.concatenate([x, y]), (LINE, LINE)),
    "stack": (lambda x, y: ops.stack([x, y]), (LINE, LINE)),
    "hstack": (lambda x, y: ops.hstack([x, y]), (LINE, LINE)),
    "vstack": (lambda x, y: ops.vstack([x, y]), (LINE, LINE)),
    "split": (lambda x: ops.split(x, 2, axis=1), (LINE,)),
    "unstack": (lambda x: ops.unstack(x, axis=1), (LINE,)),
    "slice": (lambda x: ops.slice(x, (0, 0, 0), (2, 2, 2)), (LINE,)),
    "pad": (lambda x: ops.pad(x, ((0, 0), (1, 1), (0, 0))), (LINE,)),
    "roll": (lambda x: ops.roll(x, 1, 1), (LINE,)),
    "broadcast_to": (lambda x: ops.broadcast_to(x, LINE), ((8, 4),)),
    "repeat": (lambda x: ops.repeat(x, 2, axis=1), (LINE,)),
    "tile": (lambda x: ops.tile(x, (1, 2, 1)), (LINE,)),
    "cast": (lambda x: ops.cast(x, "float16"), (LINE,)),
    "moveaxis": (lambda x: ops.moveaxis(x, 1, 2), (LINE,)),
    "swapaxes": (lambda x: ops.swapaxes(x, 1, 2), (LINE,)),
    "where": (lambda x, y: ops.where(x, x, y), (LINE, LINE)),
    "clip": (lambda x: ops.clip(x, 0, 1), (LINE,)),
    "take": (lambda x: ops.take(x, [1, 2], axis=1), (LINE,)),
    "one_hot": (lambda x: ops.one_hot(x, 3), (LINE,)),
    "average_pool": (lambda x: ops.average_pool(x, 2), (PICTURE,)),
    "max_pool": (lambda x: ops.max_pool(x, (2, 2)), (PICTURE,)),
    "times_constant": (lambda x: x * 2.0, (LINE,)),
    "over_constant": (lambda x: x / 2.0, (LINE,)),
    "constant_over": (lambda x: 2.0 / x, (LINE,)),
    "squared": (lambda x: x * x, (LINE,)),
    "to_the_power": (lambda x: x**3.0, (LINE,)),
    "plus_constant": (lambda x: x + 2.0, (LINE,)),
    "activation_relu": (lambda x: keras.activations.relu(x, max_value=6), (LINE,)),
    "activation_leaky": (lambda x: keras.activations.relu(x, negative_slope=0.1), (LINE,)),
    "softmax_of_rows": (lambda x: ops.softmax(x, axis=1), (LINE,)),
    "gelu_exact": (lambda x: ops.gelu(x, approximate=False), (LINE,)),
    "attention": (lambda q, k: ops.dot_product_attention(q, k, k), ((2, 5, 2, 4), (2, 5, 2, 4))),
    "convolution": (ops.conv, (PICTURE, (3, 3, 3, 4))),
}


def _operation(compute, shapes):
    symbolic = [keras.Input(batch_shape=shape) for shape in shapes]
    outputs = keras.tree.flatten(compute(*symbolic))
    operation = outputs[0]._keras_history.operation
    arguments = operation._inbound_nodes[-1].arguments

    def call(tensors):
        args, kwargs = arguments.fill_in({id(x): tensor for x, tensor in zip(symbolic, tensors, strict=True)})
        return operation(*args, **kwargs)

    inputs = [spec_of(f"x{place}", x) for place, x in enumerate(symbolic)]
    return operation, inputs, [spec_of(f"y{place}", y) for place, y in enumerate(outputs)], call, arguments


def test_raw_operations():
    problems = {}
    for name, example in OPERATIONS.items():
        operation, inputs, outputs, call, arguments = _operation(*example)
        truth = op_costs._measure(operation, inputs, call)
        key = op_costs.key_of_arguments(arguments.args, arguments.kwargs)
        assert key is not None, name
        problems[name] = _problems(traits_of(operation, inputs, outputs, call, key), truth, inputs, outputs)
        without_call = traits_of(operation, inputs, outputs)
        assert without_call.reads_inputs >= truth.reads_inputs, name
        assert without_call.reads_outputs >= truth.reads_outputs, name
    assert not any(problems.values()), problems


def test_the_rules_of_operations_are_all_tested():
    classes = {type(_operation(*one)[0]).__name__ for one in OPERATIONS.values()}
    assert set(OPERATION_RULES) <= classes


def test_tracing_changes_no_state():
    layer = L.BatchNormalization(momentum=0.5)
    noise = L.GaussianDropout(0.3, seed=1)
    lstm = L.LSTM(3, recurrent_dropout=0.2, seed=2)
    for one in (layer, noise, lstm):
        one.build(LINE)
        before = [np.array(variable) for variable in one.variables]
        assert traced_traits(one, [TensorSpec("x", LINE, "float32")], []).flops
        assert all(np.array_equal(np.array(new), old) for new, old in zip(one.variables, before, strict=True))


class Unseeded(L.Layer):
    def call(self, x):
        return x * keras.random.normal(x.shape)


class Taxed(L.Layer):
    """Adds a loss, and counts its calls."""

    calls = 0

    def call(self, x):
        type(self).calls += 1
        self.add_loss(keras.ops.sum(keras.ops.exp(x)))
        return 2.0 * x


class MakesVariables(L.Layer):
    def call(self, x):
        return x + keras.Variable([1.0])


class Stubborn(L.Layer):
    def call(self, x, other, third):
        return x + other + third


class Parameterless(Taxed):
    """Cannot be serialized."""

    calls = 0

    def __init__(self, function, **kwargs):
        super().__init__(**kwargs)
        self.function = function

    def get_config(self):
        raise NotImplementedError


X = TensorSpec("x", LINE, "float32")


def test_the_global_seed_generator_is_left_alone():
    keras.random.normal((1,))
    state = keras.random.normal((1,))
    keras.utils.set_random_seed(0)
    keras.random.normal((1,))
    assert traced_traits(Unseeded(), [X], [X]).internal_bytes == X.nbytes
    np.testing.assert_array_equal(keras.random.normal((1,)), state)


def test_an_unknown_layer_is_traced():
    layer = Taxed()
    traits = traits_of(layer, [X], [X])
    assert (traits.reads_inputs, traits.reads_outputs, traits.internal_bytes) == (False, False, X.nbytes)  # exp(x)
    assert traits.is_fusible
    assert layer.losses == []
    assert not layer._loss_ids


def test_a_subclass_that_computes_something_else_is_traced():
    class Squared(L.Dense):
        def call(self, x):
            return keras.ops.square(super().call(x))

    class Renamed(L.Dense):
        pass

    for layer_class, internal in ((Squared, 2 * 8 * 5 * 4), (Renamed, 0)):
        layer = layer_class(5)
        layer.build(LINE)
        traits = traits_of(layer, [X], [TensorSpec("y", (2, 8, 5), "float32")])
        assert traits.is_costly
        assert traits.internal_bytes == internal


def test_a_layer_that_cannot_be_traced_reads_everything():
    assert traits_of(Stubborn(), [X], [X]) == LayerTraits(flops=64)
    assert traits_of(MakesVariables(), [X], [X]).reads_inputs
    Taxed()(np.zeros(LINE))  # Keras still makes layers after that


def test_equal_layers_are_traced_once():
    Taxed.calls = 0
    assert len({traits_of(Taxed(), [X], [X]) for _ in range(1_000)}) == 1
    assert Taxed.calls == 1
    traits_of(Taxed(), [TensorSpec("x", ROW, "float32")], [])
    assert Taxed.calls == 2


def test_a_layer_without_configuration_is_traced_each_time():
    Parameterless.calls = 0
    for _ in range(3):
        traits_of(Parameterless(len), [X], [X])
    assert Parameterless.calls == 3


def test_calls_with_other_arguments_are_told_apart():
    layer = L.MultiHeadAttention(2, 4)
    layer.build(LINE, LINE)
    plain = traits_of(layer, [X], [X], lambda tensors: layer(tensors[0], tensors[0]), "plain")
    scored = traits_of(
        layer, [X], [X], lambda tensors: layer(tensors[0], tensors[0], return_attention_scores=True), "with scores"
    )
    assert plain.internal_bytes > scored.internal_bytes  # the softmax is then an output


def test_a_nested_model_and_a_layer_as_activation_are_traced():
    inner = keras.Sequential([keras.Input(LINE[1:]), L.Dense(5, activation="gelu"), L.Dropout(0.5), L.Dense(4)])
    traits = traits_of(inner, [X], [X])
    assert (traits.reads_inputs, traits.reads_outputs, traits.is_costly) == (True, False, True)
    # Three tensors of the activation, the mask, and the dropped tensor.
    assert traits.internal_bytes == 4 * 2 * 8 * 5 * 4 + 2 * 8 * 5
    layer = L.Dense(4, activation=L.LeakyReLU())
    layer.build(LINE)
    assert traits_of(layer, [X], [X]).internal_bytes == X.nbytes  # the input of the activation


def test_a_regularizer_reads_the_output():
    layer = L.Dense(3, activity_regularizer="l2")
    layer.build(LINE)
    outputs = [TensorSpec("y", (2, 8, 3), "float32")]
    assert traits_of(layer, [X], outputs).reads_outputs
    assert op_costs._measure(layer, [X], None).reads_outputs


def test_the_users_rule_comes_first():
    class Mine(L.Dense):
        pass

    @register_rule(Mine)
    def rule(layer, inputs, outputs):
        return LayerTraits(flops=7)

    class Derived(Mine):
        def call(self, x):
            return x

    assert traits_of(Derived(3), [X], [X]).flops == 7


def test_loops_count_each_step():
    def measured(layer, steps):
        layer.build((2, steps, 4))
        return traits_of(layer, [TensorSpec("x", (2, steps, 4), "float32")], [])

    short, long, unrolled = measured(L.LSTM(3), 5), measured(L.LSTM(3), 50), measured(L.LSTM(3, unroll=True), 5)
    assert 7 < long.flops / short.flops < 11
    assert 7 < long.internal_bytes / short.internal_bytes < 11
    assert 0.5 < unrolled.internal_bytes / short.internal_bytes < 2


def test_cudnn(monkeypatch):
    """What a GPU would trace, with an estimate of the reserve space; nothing runs it here."""
    layer, spec = L.LSTM(16, return_sequences=True), TensorSpec("x", (4, 50, 8), "float32")
    layer.build(spec.shape)
    loop = op_costs._measure(layer, [spec], None)
    monkeypatch.setattr(sys.modules["keras.src.backend.tensorflow.rnn"], "_is_gpu_available", lambda: True)
    fused = op_costs._measure(layer, [spec], None)
    assert (loop.reads_outputs, fused.reads_outputs) == (False, True)
    assert 0.5 < fused.flops / loop.flops < 2
    assert 0.5 < fused.internal_bytes / loop.internal_bytes < 2


def test_the_built_in_rules_are_quick():
    layer, spec = L.ReLU(), TensorSpec("x", LINE, "float32")
    assert type(layer) in BUILT_IN_RULES
    start = perf_counter()
    for _ in range(10_000):
        traits_of(layer, [spec], [spec])
    assert perf_counter() - start < 2
    assert not op_costs._CACHE


def test_scores_that_are_scaled_early_count_twice():
    """The softmax, which products with the gradient and the values read, and itself times the scale."""
    layer = L.MultiHeadAttention(2, 4)
    layer.build(LINE, LINE)
    batch, length, _ = LINE
    scores = 4 * batch * 2 * length**2
    rest = 4 * (4 * batch * 2 * length * 4)  # queries, keys, values, and what the output is projected from
    traits = traits_of(layer, [X], [X], lambda tensors: layer(tensors[0], tensors[0]), "self")
    assert traits.internal_bytes == 2 * scores + rest


OPTIMIZED = """
import keras
import tensorflow as tf
from keras import layers as L
from tensorflow.python.eager import context

inputs = keras.Input((8, 4))
model = keras.Model(inputs, L.MultiHeadAttention(2, 4)(inputs, inputs))
model.compile("sgd", "mse", jit_compile=False)
step = tf.function(model.train_step, autograph=False)
context.context().enable_run_metadata()
step((tf.ones((2, 8, 4)), tf.ones((2, 8, 4))))
graphs = [graph for one in context.context().export_run_metadata().function_graphs for graph in one.partition_graphs]
nodes = [node for graph in graphs for node in graph.node]
softmax = next(node.name for node in nodes if "Softmax" in node.op and "Grad" not in node.op)
constants = {node.name for node in nodes if node.op == "Const"}
print(sum(node.op == "Mul" and softmax in node.input and bool(constants.intersection(node.input)) for node in nodes))
"""


def test_the_graph_optimizer_scales_scores_early():
    """Else the rule before this one is wrong. In a process of its own: other tests turn the optimizer off."""
    done = subprocess.run([sys.executable, "-c", OPTIMIZED], capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.split() == ["1"]
