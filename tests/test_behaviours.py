"""What a training with recomputation and offloading must do, where no other test shows it; docs/behaviours.md lists all of it."""

import gc
import weakref
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from keras import ops
from parity import assert_equal, rewriting_off, train, train_plain
from trained import array, trained_state

import keras_sn
from keras_sn import drafts, pool
from keras_sn.benchmarks import measure
from keras_sn.errors import UnsupportedModelError
from keras_sn.layers import Recompute
from keras_sn.plan import Region, Saved
from keras_sn.pool import Tier

rewriting_off()

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(4, 8)).astype("float32"), RANDOM.normal(size=(4, 2)).astype("float32")
ALL = {"*": "recompute"}
MIXED = {"hidden_*": "recompute", "head": "keep"}
MODES = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def chain(depth=3, dtype="float32"):
    keras.utils.set_random_seed(1)
    inputs = x = keras.Input((8,), name="x", dtype=dtype)
    for place in range(depth):
        x = L.Dense(8, activation="tanh", dtype=dtype, name=f"hidden_{place}")(x)
    return keras.Model(inputs, L.Dense(2, dtype=dtype, name="head")(x))


def planned(model, policy=ALL):
    model = keras_sn.SNModel.from_model(model, policy=policy)
    model.build_plan(4)
    assert model.plan.regions
    return model


def run(function, graph, *arguments):
    """In eager mode or in a graph; tensors and None come back as arrays and None."""
    function = tf.function(function, autograph=False) if graph else function
    return [None if one is None else np.asarray(one) for one in keras.tree.flatten(function(*arguments))]


def gradients(forward, weights, graph, x=X):
    """The outputs of `forward`, and the gradients of its input and of the weights."""

    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            outputs = keras.tree.flatten(forward(x))
            loss = sum(tf.reduce_sum(y**2) for y in outputs if y.dtype.is_floating)
        return [*outputs, *tape.gradient(loss, [x, *(v.value for v in weights)])]

    return run(step, graph, tf.constant(x))


def assert_same(ours, plain):
    """Bit for bit, and None where plain Keras has None."""
    assert [one is None for one in ours] == [one is None for one in plain]
    for a, b in zip(ours, plain, strict=True):
        if b is not None:
            np.testing.assert_array_equal(a, b)


def fitted(model, x=X, y=Y, **arguments):
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", jit_compile=False, **arguments)
    return trained_state(model, model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0))


# --- recomputation happens, and only as often as it should


def counted(runs, names):
    """Layers that note each run of their Python code. (Keras would copy a list that is an attribute.)"""

    class Counted(L.Dense):
        def call(self, x, training=None):
            runs.append(self.name)
            return super().call(x)

    return [Counted(8, name=name) for name in names]


@pytest.mark.parametrize(("policy", "again"), [(ALL, ["c", "b", "a"]), ({"b": "recompute"}, ["b"]), ({"b": "keep"}, [])])
def test_each_layer_runs_as_often_as_the_plan_says(policy, again):
    runs, inputs = [], keras.Input((8,))
    a, b, c = counted(runs, "abc")
    model = keras_sn.SNModel(inputs, c(b(a(inputs))), policy=policy)
    model.build_plan(4)
    for _ in range(2):  # the first time, each region is also looked at
        runs.clear()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.constant(X), training=True))
        tape.gradient(loss, model.trainable_variables)
    assert runs == ["a", "b", "c", *again]
    runs.clear()
    model(tf.constant(X), training=True)  # no tape
    model(tf.constant(X))
    assert runs == [*"abc", *"abc"]


def test_nested_recomputation_runs_each_layer_only_twice():
    runs = []
    block, *rest = counted(runs, "abcd")
    for layer in rest:
        block = Recompute(keras.Sequential([block, layer]))
    block(tf.constant(X))  # makes the weights
    for _ in range(2):
        runs.clear()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(block(tf.constant(X), training=True))
        tape.gradient(loss, block.trainable_variables)
    assert runs == [*"abcd", *"abcd"]


def products(tensors):
    """How many matrix products these tensors of a graph are made of."""
    reached, stack = set(), [one.op for one in tensors if one is not None]
    while stack:
        operation = stack.pop()
        if operation not in reached:
            reached.add(operation)
            stack += [one.op for one in operation.inputs]
    return sum(operation.type == "MatMul" for operation in reached)


@pytest.mark.parametrize(("saved", "again"), [((), 1), (("a",), 0)])
def test_a_region_makes_again_what_it_has_not_saved_and_no_more(saved, again):
    """Two products forward and two for each layer backward; the last one's output is never needed again."""
    inputs = keras.Input((8,), name="x")
    plain = keras.Model(inputs, L.Dense(8, name="b")(L.Dense(8, name="a")(inputs)))
    region = Region(("a", "b"), tuple(Saved(name) for name in ("x", *saved)))
    model = keras_sn.SNModel.from_model(plain, plan=replace(planned(plain).plan, regions=(region,)))
    model.compile("sgd", "mse", jit_compile=False)
    model.build_plan(4)
    executor = model._executor_in_force()
    (body,) = executor.bodies
    function = executor.library.function_for(body, "function", jit=False, inline=False)
    x, trainable = tf.constant(X), [tf.convert_to_tensor(v.value) for v in body.trainable]
    forward = function.forward.get_concrete_function([x], [None], trainable, [])
    assert products(forward.structured_outputs.outputs) == 2
    kept = function.forward([x], [None], trainable, []).saved
    arguments = ([x], [None], kept, trainable, [], [], [tf.ones((4, 8))], [], [True], [None])
    backward = function.backward.get_concrete_function(*arguments)
    assert products(keras.tree.flatten(backward.structured_outputs)) == 4 + again


class Scaling(L.Layer):
    """Takes arguments of all kinds."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense, self.runs = L.Dense(8, activation="tanh"), []
        self.dense.build((None, 8))

    def call(self, x, scale=1, name="", table=None, axes=(), activation=None, negative=False):
        self.runs.append(scale)
        y = self.dense(x) * scale
        y = y if activation is None else activation(y)
        y = y + len(name) + len(axes) + (0.0 if table is None else table["shift"])
        return -y if negative else y


def test_calls_with_equal_arguments_are_traced_once():
    def traces(*scales):
        inputs, layer = keras.Input((8,)), Scaling()
        recomputed, x = Recompute(layer), inputs
        for scale in scales:
            x = recomputed(x, scale=scale)
        layer.runs.clear()
        model = keras.Model(inputs, L.Dense(2)(x))
        model.compile("sgd", "mse", jit_compile=False)
        model.train_on_batch(X, Y)
        first = len(layer.runs)
        model.train_on_batch(X, Y)
        assert len(layer.runs) == first
        return first

    # The first use differs from the others: nobody asks for the gradient of the model's input.
    assert traces(1.0, 1.0, 1.0, 1.0) == traces(1.0, 1.0)
    assert traces(1.0, 2.0, 1.0, 2.0) == traces(1.0, 1.0, 2.0) > traces(1.0, 1.0)


# --- the numbers are the same


@pytest.mark.parametrize("count", [100, pytest.param(2000, marks=pytest.mark.full)])
def test_very_many_small_regions(count):
    keras.utils.set_random_seed(1)
    layers = [L.Dense(2, activation="tanh") for _ in range(count)]
    inputs = x = keras.Input((2,))
    for layer in layers:
        x = layer(x)
    model = keras_sn.SNModel(inputs, x, policy=ALL)
    model.build_plan(4)
    assert len(model.plan.regions) > count / 2
    kernels = [layer.kernel for layer in layers]
    ours = gradients(lambda x: model(x, training=True), kernels, False, X[:, :2])

    def plain(x):
        for layer in layers:
            x = layer(x)
        return x

    assert_same(ours, gradients(plain, kernels, False, X[:, :2]))


def penalty(model, graph, power):
    """The gradients of the squared norm of the input's gradient."""
    weights = [v.value for v in model.trainable_variables]

    def step(x):
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(model(x, training=True) ** power)
            norm = tf.reduce_sum(inner.gradient(loss, x) ** 2)
        return outer.gradient(norm, [x, *weights])

    return run(step, graph, tf.constant(X, "float64"))


@MODES
@pytest.mark.parametrize("power", [1, 2])
def test_gradients_of_gradients(power, graph, offload_all):
    """To rounding: the two passes through a region are added in another order than plain Keras'."""
    plain = penalty(chain(dtype="float64"), graph, power)
    for policy in (ALL, MIXED, "offload"):
        model = planned(chain(dtype="float64"), policy)
        assert bool(model.plan.offloaded_bytes) == (policy == "offload")
        for a, b in zip(penalty(model, graph, power), plain, strict=True):
            if b is None:  # biases of the last layer
                assert a is None or not a.any()
            else:
                np.testing.assert_allclose(a, b, rtol=1e-11, atol=1e-13)


def third_order(model, graph):
    weights = [v.value for v in model.trainable_variables]

    def step(x):
        with tf.GradientTape() as outer:
            with tf.GradientTape() as middle:
                middle.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    loss = tf.reduce_sum(model(x, training=True) ** 2)
                norm = tf.reduce_sum(inner.gradient(loss, x) ** 2)
            curvature = tf.reduce_sum(middle.gradient(norm, x) ** 2)
        return [curvature, *outer.gradient(curvature, weights)]

    return run(step, graph, tf.constant(X, "float64"))


@MODES
@pytest.mark.parametrize("policy", [ALL, "offload", "superneurons"], ids=str)
def test_gradients_of_gradients_of_gradients(policy, graph, offload_all):
    plain = third_order(chain(dtype="float64"), graph)
    for a, b in zip(third_order(planned(chain(dtype="float64"), policy), graph), plain, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12)


def two_heads():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((8,))
    x = L.Dense(8, activation="tanh", name="hidden_0")(inputs)
    return keras.Model(inputs, [L.Dense(2, name="a")(x), L.Dense(2, name="b")(x)])


def asked_in_turn(model, heads, graph):
    """One persistent tape, asked for the gradient of one head after the other."""
    weights = [v.value for v in model.trainable_variables]

    def step(x):
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(x)
            losses = [tf.reduce_sum(y**2) for y in model(x, training=True)]
        return [tape.gradient(losses[head], [x, *weights]) for head in heads]

    return run(step, graph, tf.constant(X))


@MODES
def test_a_persistent_tape_is_asked_twice(graph):
    for heads in ((0, 0), (0, 1)):
        assert_same(asked_in_turn(planned(two_heads()), heads, graph), asked_in_turn(two_heads(), heads, graph))


@MODES
def test_a_persistent_tape_forgets_what_it_was_asked_before(graph):
    heads = (0, 1, 0)
    assert_same(asked_in_turn(planned(two_heads()), heads, graph), asked_in_turn(two_heads(), heads, graph))


def test_weights_that_change_before_the_backward_pass(offload_all):
    """The backward pass uses the weights of the forward pass."""

    def step(model):
        weights = [v.value for v in model.trainable_variables]
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(tf.constant(X), training=True) ** 2)
        for variable in model.trainable_variables:
            variable.assign(3.0 * variable)
        return tape.gradient(loss, weights)

    plain = step(chain())
    for policy in (ALL, "offload"):
        model = planned(chain(), policy)
        assert bool(model.plan.offloaded_bytes) == (policy == "offload")
        assert_same(step(model), plain)


def loop_of(kind, layer):
    return {
        "cond": lambda x: ops.cond(ops.sum(x) > -1e9, lambda: layer(x), lambda: x),
        "map": lambda x: ops.map(lambda row: layer(row[None])[0], x),
        "vectorized_map": lambda x: ops.vectorized_map(lambda row: layer(row[None])[0], x),
        "fori_loop": lambda x: ops.fori_loop(0, 3, lambda _, y: layer(y), x),
        "scan": lambda x: ops.scan(lambda y, _: (layer(y), y), x, length=3)[0],
    }[kind]


@pytest.mark.parametrize(
    ("kind", "graph"),
    [
        *((kind, True) for kind in ("cond", "map", "vectorized_map", "fori_loop", "scan")),
        ("fori_loop", False),
    ],
)
def test_a_region_inside_control_flow(kind, graph):
    keras.utils.set_random_seed(1)
    dense = L.Dense(8, activation="tanh")
    dense.build((None, 8))
    recomputed = Recompute(dense)
    ours = gradients(loop_of(kind, lambda x: recomputed(x, training=True)), dense.trainable_variables, graph)
    assert_same(ours, gradients(loop_of(kind, dense), dense.trainable_variables, graph))


@pytest.mark.parametrize("offload", [False, True])
def test_a_region_inside_a_recurrent_cell(offload):
    class Cell(L.Layer):
        state_size = 8

        def __init__(self, dense, run):
            super().__init__()
            self.dense, self.run = dense, run

        def build(self, *_):
            self.built = True

        def call(self, x, states, training=None):
            y = self.run(x + states[0])
            return y, [y]

    def trained(wrap):
        keras.utils.set_random_seed(1)
        dense = L.Dense(8, activation="tanh")
        dense.build((None, 8))
        rnn = L.RNN(Cell(dense, wrap(dense)))
        return gradients(lambda x: rnn(x, training=True), dense.trainable_variables, True, np.tile(X[:, None], (1, 5, 1)))

    assert_same(trained(lambda dense: Recompute(dense, offload=offload)), trained(lambda dense: dense))


def test_the_steps_of_a_training_loop_inside_a_layer():
    """The tape of `fit` is outside the graph of the loop."""

    class Loop(L.Layer):
        def __init__(self, wrap):
            super().__init__()
            self.dense = L.Dense(8, activation="tanh")
            self.dense.build((None, 8))
            self.run = wrap(self.dense)

        def build(self, *_):
            self.built = True

        def call(self, x, training=None):
            return ops.fori_loop(0, 3, lambda _, y: self.run(y), x)

    def trained(wrap):
        keras.utils.set_random_seed(1)
        inputs = keras.Input((8,))
        model = keras.Model(inputs, L.Dense(2)(Loop(wrap)(L.Dense(8)(inputs))))
        return fitted(model, np.tile(X, (2, 1)), np.tile(Y, (2, 1)), steps_per_execution=2)

    assert_equal(trained(Recompute), trained(lambda layer: layer), exact=True)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("policy", [ALL, MIXED, "offload"], ids=str)
def test_a_planned_model_inside_a_function_of_its_own(policy, is_frozen, offload_all):
    """Whether it is first called under a tape or not."""

    def through_function(model, called_before):
        forward = tf.function(lambda x: model(x, training=True), autograph=False)
        if called_before:
            forward(tf.constant(X))
        return gradients(lambda x: forward(2.0 * x), model.trainable_variables, False)

    def build():
        model = chain()
        model.get_layer("hidden_0").trainable = model.get_layer("hidden_2").trainable = not is_frozen
        return model

    plain = through_function(build(), False)
    for called_before in (False, True):
        assert_same(through_function(planned(build(), policy), called_before), plain)


def all_products(function, *arguments):
    """How many matrix products there are in the graph of a function and of all that it calls."""
    graph = tf.function(function, autograph=False).get_concrete_function(*arguments).graph.as_graph_def()
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    return sum(node.op == "MatMul" for node in nodes)


def test_nobody_computes_the_gradients_of_the_data():
    """In `fit`, in a training loop of one's own, and in a plain model with a first layer that is recomputed."""

    def step(model, is_watched):
        def step(x):
            with tf.GradientTape() as tape:
                if is_watched:
                    tape.watch(x)
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            return tape.gradient(loss, [*([x] if is_watched else []), *(v.value for v in model.trainable_variables)])

        return all_products(step, tf.constant(X))

    inputs = keras.Input((8,))
    layers = [L.Dense(width, "tanh") for width in (7, 6, 5)]  # of different shapes, so that each region has functions of its own
    model = planned(keras.Sequential([inputs, *layers, L.Dense(2)]))
    wrapped = keras.Model(inputs, L.Dense(2)(Recompute(keras.Sequential([L.Dense(7, "tanh"), L.Dense(6, "tanh")]))(inputs)))
    for one in (model, wrapped):
        assert step(one, True) == step(one, False) + 1
    expected = step(model, False), step(wrapped, False)
    for one in (model, wrapped):
        one.compile("sgd", "mse", jit_compile=False)
        one.optimizer.build(one.trainable_variables)
        one.make_train_function()
    assert (all_products(model.train_step, (X, Y)), all_products(wrapped.train_step, (X, Y))) == expected


@MODES
def test_a_function_that_reads_another_layers_weight(graph):
    def build():
        keras.utils.set_random_seed(1)
        inputs, dense = keras.Input((8,)), L.Dense(8, name="owns")
        x = L.Lambda(lambda x: tf.matmul(x, tf.convert_to_tensor(dense.kernel)), name="borrows")(dense(inputs))
        return keras.Model(inputs, L.Dense(2)(x))

    ours = keras_sn.SNModel.from_model(build(), policy={"borrows": "recompute"})
    assert_equal(fitted(ours, run_eagerly=not graph), fitted(build(), run_eagerly=not graph), exact=True)


@MODES
def test_a_function_that_reads_nobodys_weight_is_refused(graph):
    weight, layer = tf.Variable(tf.ones((8, 8))), L.Dense(8)
    layer.build((None, 8))

    def planned_model(action):
        inputs = keras.Input((8,))
        x = L.Lambda(lambda x: tf.matmul(x, weight), name="borrows")(L.Dense(8)(inputs))
        return keras_sn.SNModel(inputs, L.Dense(2)(x), policy={"borrows": action})

    def borrowing(x):
        return Recompute(L.Lambda(lambda x: layer(x), name="borrows"))(x, training=True)

    message = r"(?s)'borrows' uses a weight that it does not own.*attribute.*keep the layer.*Received: layer call"
    for forward in (lambda x: planned_model("recompute")(x, training=True), borrowing):
        with pytest.raises(UnsupportedModelError, match=message):
            gradients(forward, [], graph)
    kept = planned_model("keep")
    assert gradients(lambda x: kept(x, training=True), [layer_weight(weight)], graph)[2] is not None


def layer_weight(variable):
    """Looks like a Keras variable to `gradients`."""
    return type("Weight", (), {"value": variable})


# --- arguments of every kind


@pytest.mark.parametrize(
    "arguments",
    [
        {"scale": 2, "name": "text", "negative": True},
        {"scale": 0.5, "axes": [1, 2]},
        {"axes": {1, 2}},
        {"activation": tf.nn.relu},
        {"table": {"shift": 3.0}},
        {"table": {"shift": np.ones(8, "float32")}},
        {"table": {"shift": tf.ones(8)}, "scale": tf.constant(2.0)},
    ],
    ids=["numbers", "a list", "a set", "a function", "a number in a dict", "an array in a dict", "tensors"],
)
def test_arguments_that_are_no_tensors(arguments):
    """None, numbers, texts, flags; lists and sets, which have no hash; functions; dicts of numbers, arrays and tensors."""
    keras.utils.set_random_seed(1)
    layer = Scaling()
    recomputed, weights = Recompute(layer), layer.trainable_variables
    ours = gradients(lambda x: recomputed(x, training=True, **arguments), weights, True)
    assert_same(ours, gradients(lambda x: layer(x, **arguments), weights, True))


class Several(L.Layer):
    """Returns outputs of several kinds, in a nest."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(8, activation="tanh")
        self.dense.build((None, 8))

    def call(self, x):
        y = self.dense(x)
        return {"y": y, "place": ops.argmax(y, axis=-1), "nest": [y > 0, (2.0 * y, y)], "same": x, "unused": ops.exp(y)}


@MODES
def test_outputs_of_every_kind(graph):
    """Integers, flags, one tensor twice, the input itself, and one that nobody reads."""
    keras.utils.set_random_seed(1)
    layer = Several()
    recomputed, weights = Recompute(layer), layer.trainable_variables

    def read(outputs):
        del outputs["unused"]
        return outputs

    ours = gradients(lambda x: read(recomputed(x, training=True)), weights, graph)
    assert_same(ours, gradients(lambda x: read(layer(x)), weights, graph))


class Caching(Several):
    """Returns what is no tensor."""

    def call(self, x, fn="text"):
        return self.dense(x), None, {"fn": fn, "number": 2, "again": x}


class Silent(L.Layer):
    """Returns no tensor at all."""

    def call(self, x):
        self.add_loss(ops.mean(x))


@MODES
def test_outputs_that_are_no_tensors(graph):
    """None, numbers, texts; also of a layer with an argument that Keras names `fn`."""
    keras.utils.set_random_seed(1)
    layer = Caching()
    recomputed, weights = Recompute(layer), layer.trainable_variables
    seen = []

    def tensors_of(outputs):
        seen.append((outputs[1], outputs[2]["fn"], outputs[2]["number"]))
        return [outputs[0], outputs[2]["again"]]

    ours = gradients(lambda x: tensors_of(recomputed(x, fn="other", training=True)), weights, graph)
    assert_same(ours, gradients(lambda x: tensors_of(layer(x, fn="other")), weights, graph))
    assert seen == [(None, "other", 2)] * 2
    with tf.GradientTape():
        silent = Recompute(Silent())
        assert silent(tf.constant(X), training=True) is None
    assert len(silent.losses) == 1


def test_child_layers_whose_outputs_are_no_tensors():
    class Child:
        def build_layers(self):
            keras.utils.set_random_seed(1)
            self.caching, self.silent, self.out = Caching(), Silent(), L.Dense(2)

        def call(self, x):
            y, nothing, more = self.caching(x, fn="other")
            assert (nothing, more["fn"], more["number"]) == (None, "other", 2)
            self.silent(y)
            return self.out(y + more["again"])

    def build(base, **settings):
        model = type("Child", (Child, base), {})(**settings)
        model.build_layers()
        return model

    ours = build(keras_sn.SNModel, policy="recompute")
    assert_equal(fitted(ours), fitted(build(keras.Model)), exact=True)
    assert sum(region.recompute for region in ours.plan.regions) >= 1


class Row(L.Layer):
    """Is called without a tensor."""

    def build(self, *_):
        self.row = self.add_weight(shape=(1, 8), name="row")

    def call(self, *, scale):
        return self.row * scale


class Adds:
    """The `call()` of a model whose first child layer gets no tensor."""

    def build_layers(self):
        keras.utils.set_random_seed(1)
        self.row, self.dense, self.out = Row(), L.Dense(8, activation="tanh"), L.Dense(2)
        self.row.build()

    def call(self, x):
        return self.out(self.dense(x + self.row(scale=2.0)))


def adds(base, **settings):
    model = type("Adding", (Adds, base), {})(**settings)
    model.build_layers()
    return model


def test_a_child_layer_that_gets_no_tensor():
    ours = adds(keras_sn.SNModel, policy="recompute")
    assert_equal(fitted(ours), fitted(adds(keras.Model)), exact=True)
    assert any(region.recompute for region in ours.plan.regions)


def test_the_first_call_of_a_model_with_its_own_call_may_be_in_a_function():
    model = adds(keras_sn.SNModel, policy="recompute")
    model(tf.constant(X))
    assert len(gradients(lambda x: model(x, training=True), model.trainable_variables, True)) == 7


# --- memory is saved and freed


def test_less_memory_is_resident():
    """Each in a process of its own, where no memory of other tests is used again: Note: [Memory] in `benchmarks.measure`."""

    def measured(engine):
        configuration = measure.Configuration(engine=engine, network="vit", arguments=network, batch_size=64)
        rows = [measure.run(configuration) for _ in range(2)]
        for row in rows:
            assert row["fits"], row["reason"]
        return min(rows, key=lambda row: row["peak_bytes"])  # what else the machine does can only add to it

    network = {"image_size": 32, "patch": 4, "width": 64, "depth": 2, "heads": 1, "mlp": 256, "classes": 10}
    plain, ours = measured("keras-graph"), measured("recompute")
    assert plain["peak_bytes"] == pytest.approx(ours["plain_peak_bytes"] - ours["reserved_bytes"], rel=0.3)
    assert ours["peak_bytes"] == pytest.approx(ours["planned_peak_bytes"] - ours["reserved_bytes"], rel=0.3)
    assert ours["peak_bytes"] < 0.6 * plain["peak_bytes"]
    np.testing.assert_allclose(ours["losses"], plain["losses"], rtol=1e-4)


class FiveRegions:
    """A model of five regions; `seen` are the tensors that they have saved, `alive` how many of them are there at each rerun."""

    def __init__(self, policy):
        self.seen, self.alive = seen, alive = [], []

        class Noting(L.Dense):
            def call(self, x, training=None):
                if len(seen) < 5:
                    seen.append(weakref.ref(x))
                else:
                    alive.append(sum(one() is not None for one in seen))
                return super().call(x)

        inputs = x = keras.Input((8,))
        for place in range(5):
            x = Noting(8, activation="tanh", name=f"hidden_{place}")(x)
        self.model = keras_sn.SNModel(inputs, x, policy=policy)
        self.model.build_plan(4)
        self.step(is_asked=True)  # looks at each region, too

    def step(self, *, is_asked):
        self.seen.clear()
        self.alive.clear()
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model(tf.constant(X), training=True) ** 2)
        if is_asked:
            tape.gradient(loss, [v.value for v in self.model.trainable_variables])


def test_saved_tensors_are_freed_as_the_backward_pass_goes():
    regions = FiveRegions(ALL)
    regions.step(is_asked=True)
    assert regions.alive == [5, 4, 3, 2, 1]


@pytest.mark.parametrize("is_asked", [False, True], ids=["no backward pass", "backward pass"])
@pytest.mark.parametrize("action", ["recompute", "offload"])
def test_nothing_waits_for_the_garbage_collector(action, is_asked, offload_all):
    regions = FiveRegions({"*": action})
    gc.collect()
    gc.disable()
    try:
        regions.step(is_asked=is_asked)
        assert len(regions.seen) == 5
        assert not any(one() is not None for one in regions.seen)
    finally:
        gc.enable()


class Taxing(L.Layer):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(x))
        return 2.0 * x


def symbolic_tensors(model):
    """Paths of symbolic tensors that the model, its layers, its plan and its optimizer hold."""
    seen, found, stack = set(), set(), [("model", model)]
    while stack:
        path, one = stack.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if tf.is_symbolic_tensor(one):
            found.add(path)
        elif isinstance(one, (L.Layer, keras_sn.Plan, keras.optimizers.Optimizer)) and hasattr(one, "__dict__"):
            stack += [(f"{path}.{name}", value) for name, value in vars(one).items()]
        elif isinstance(one, dict):
            stack += [(f"{path}[{key!r}]", value) for key, value in one.items()]
        elif isinstance(one, (list, tuple, set)):
            stack += [(f"{path}[{place}]", value) for place, value in enumerate(one)]
    return found


def test_no_symbolic_tensor_stays_that_plain_keras_does_not_leave():
    def left(policy):
        inputs = keras.Input((8,))
        x = Taxing()(L.Dropout(0.1)(L.Dense(8, activity_regularizer="l2")(inputs)))
        model = keras.Model(inputs, L.Dense(2)(x))
        model = model if policy is None else keras_sn.SNModel.from_model(model, policy=policy)
        fitted(model)
        return symbolic_tensors(model)

    assert left(ALL) == left(None)


# --- offload


@pytest.fixture
def offload_all(monkeypatch):
    """Tensors of any size leave the device, and the host is another device."""
    monkeypatch.setattr(drafts, "MIN_OFFLOAD_BYTES", 1)
    monkeypatch.setitem(pool.TIERS, "host", Tier("host", "/CPU:1"))


SMALL = ("masked_lstm", "siamese", "two_in_two_out", "mlp", "dense_sums", "conv1d", "recurrent", "encoder_decoder", "lora")
SMALL += ("tied_embedding", "tied_logits", "optional_input", "activity_regularized", "metric_layers", "lambdas", "control_flow")
SMALL += ("custom_gradients", "several_dtypes", "quantized", "zero_size", "constant_branches", "vae", "operations", "odd_outputs")
IN_CI = ("vae",)


@pytest.mark.parametrize("name", [one if one in IN_CI else pytest.param(one, marks=pytest.mark.full) for one in SMALL])
def test_small_tensors_come_back_from_the_host(name, offload_all):
    """The host is another device, so that each copy is one."""
    trained = train(name, "graph", "float32", "offload")
    assert_equal(trained, train_plain(name, "graph", "float32"), exact=True)


@pytest.mark.parametrize(("copy_window", "ahead"), [(0, 0), (100, 100)], ids=["one by one", "all at once"])
def test_copies_may_overlap_or_not(copy_window, ahead, offload_all):
    def edited(region, index, last):
        return replace(
            region,
            saved=tuple(replace(s, prefetch_at=min(index + ahead, last)) if s.tier == "host" else s for s in region.saved),
        )

    plan = planned(chain(5), {"*": "offload"}).plan
    last = len(plan.regions) - 1
    regions = tuple(edited(region, index, last) for index, region in enumerate(plan.regions))
    assert sum(one.tier == "host" for region in regions for one in region.saved) >= 4
    model = keras_sn.SNModel.from_model(chain(5), plan=replace(plan, regions=regions, copy_window=copy_window))
    assert_equal(fitted(model), fitted(chain(5)), exact=True)


def test_a_model_with_its_own_call_offloads_small_tensors(offload_all):
    ours = adds(keras_sn.SNModel, policy="offload")
    assert_equal(fitted(ours), fitted(adds(keras.Model)), exact=True)
    assert ours.plan.offloaded_bytes


def test_text_stays_where_it_is(offload_all):
    def build():
        keras.utils.set_random_seed(1)
        inputs = keras.Input((3,), dtype="string")
        x = L.Embedding(4, 8)(L.StringLookup(vocabulary=["a", "b"])(inputs))
        return keras.Model(inputs, L.Dense(2)(L.Flatten()(L.Dense(8, activation="relu")(x))))

    text = tf.constant([["a", "b", "c"]] * 4)
    model = keras_sn.SNModel.from_model(build(), policy={"*": "offload"})
    assert_equal(fitted(model, text), fitted(build(), text), exact=True)
    assert model.plan.offloaded_bytes


# --- faults, and what runs beside


def test_child_layers_are_themselves_again_after_an_error():
    class Failing(L.Layer):
        fails = False

        def call(self, x):
            if self.fails:
                raise RuntimeError("on purpose")
            return x

    class Net(keras_sn.SNModel):
        def __init__(self):
            super().__init__(policy="recompute")
            self.dense, self.failing = L.Dense(2), Failing()

        def call(self, x):
            return self.failing(self.dense(x))

    model = Net()
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(X, Y)
    model.failing.fails = True
    before = array(model.dense.kernel)
    with pytest.raises(RuntimeError, match="on purpose"):
        model.train_on_batch(X, Y)
    np.testing.assert_array_equal(array(model.dense.kernel), before)
    assert all("call" not in vars(layer) for layer in model.layers)
    model.failing.fails = False
    assert model.train_on_batch(X, Y) > 0


@MODES
@pytest.mark.parametrize(("policy", "count"), [("recompute", 2), ("keep", 1)])
def test_what_a_layer_prints_is_printed_again(policy, count, graph, tmp_path):
    """Documented in docs/behaviours.md: a recomputed layer runs twice, with all that it does beside computing."""

    class Saying(L.Layer):
        def call(self, x):
            tf.print("here", output_stream=f"file://{tmp_path}/said")
            return x

    inputs = keras.Input((8,))
    model = keras_sn.SNModel(inputs, L.Dense(2)(Saying(name="saying")(L.Dense(8)(inputs))), policy={"saying": policy})
    model.compile("sgd", "mse", jit_compile=False, run_eagerly=not graph)
    model.train_on_batch(X, Y)
    (tmp_path / "said").write_text("")
    model.train_on_batch(X, Y)
    assert (tmp_path / "said").read_text().count("here") == count


def test_a_layer_is_recomputed_on_the_device_that_it_asks_for():
    devices = []

    class Elsewhere(L.Layer):
        def call(self, x):
            with tf.device("/CPU:1"):
                y = tf.tanh(x)
            devices.append(y.device)
            return y

    inputs = keras.Input((8,))
    model = keras_sn.SNModel(inputs, L.Dense(2)(Elsewhere()(L.Dense(8)(inputs))), policy=ALL)
    model.compile("sgd", "mse", jit_compile=False, run_eagerly=True)
    model.train_on_batch(X, Y)
    devices.clear()
    model.train_on_batch(X, Y)
    assert [one[-5:] for one in devices] == ["CPU:1", "CPU:1"]


# --- fit with Keras


def test_weights_of_a_plain_model_load_and_foreign_ones_are_refused(tmp_path):
    plain = chain()
    plain.save_weights(tmp_path / "plain.weights.h5")
    keras.utils.set_random_seed(2)
    model = keras_sn.SNModel.from_model(keras.models.clone_model(plain), policy=ALL)
    assert (array(model.variables[0]) != array(plain.variables[0])).any()
    model.load_weights(tmp_path / "plain.weights.h5")
    for ours, theirs in zip(model.variables, plain.variables, strict=True):
        assert ours.path == theirs.path
        np.testing.assert_array_equal(array(ours), array(theirs))
    with pytest.raises(ValueError, match="could not be loaded"):
        keras_sn.SNModel.from_model(chain(depth=1), policy=ALL).load_weights(tmp_path / "plain.weights.h5")


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16"])
def test_a_quantized_layer_is_recomputed(dtype):
    layer = L.Dense(8, dtype=dtype)
    layer.build((None, 8))
    layer.quantize("int8")
    plain = gradients(layer, [layer.bias], False)
    recomputed = Recompute(layer)
    assert recomputed.dtype_policy.name == dtype
    assert_same(gradients(lambda x: recomputed(x, training=True), [layer.bias], False), plain)


class NormalizedInABranch(L.Layer):
    """Updates the statistics of a layer inside `tf.cond`."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.normalization = L.BatchNormalization()

    def build(self, shape):
        self.normalization.build(shape)

    def call(self, x, training=None):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x, lambda: self.normalization(x, training=training))

    def compute_output_shape(self, shape):
        return shape


def test_state_that_is_updated_inside_a_branch_is_refused_before_the_first_step():
    inputs = keras.Input((8,))
    plain = keras.Model(inputs, NormalizedInABranch()(L.Dense(8, activation="tanh")(inputs)))
    model = keras_sn.SNModel.from_model(plain, policy="recompute")
    model.compile("sgd", "mse", jit_compile=False)
    with pytest.raises(keras_sn.UnsupportedModelError, match=r"inside a branch or a loop.*moving_mean"):
        model.fit(X, X, verbose=0)
    plain = keras_sn.SNModel.from_model(plain, policy="none")
    plain.compile("sgd", "mse", jit_compile=False)
    plain.fit(X, X, verbose=0)
