"""What TensorFlow really runs: what is recomputed, what is copied, what is traced."""

from dataclasses import replace
from itertools import pairwise

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from tensorflow.python.eager import context

import keras_sn
from keras_sn import pool
from keras_sn.passes import Pass
from keras_sn.plan import Region, Saved
from keras_sn.planner import make_plan
from keras_sn.pool import Tier
from keras_sn.superneurons import superneurons_regions
from keras_sn.trace import trace


def _blocks(count=4, width=512, **arguments):
    inputs = x = keras.Input((width,))
    for i in range(count):
        x = L.Dense(width, activation="relu", name=f"dense_{i}")(x)
        x = L.Dense(width, name=f"linear_{i}")(x)
    return keras_sn.SNModel(inputs, L.Dense(2, name="head")(x), **arguments)


def _fit(model, batch=8, **arguments):
    model.compile("sgd", "mse", jit_compile=arguments.pop("jit_compile", False))
    x = np.ones((batch, model.input_shape[-1]), "float32")
    return model.fit(x, np.zeros((batch, 2), "float32"), batch_size=batch, verbose=0, **arguments)


def _optimized_graphs(model):
    """Every graph that one training step runs, after TensorFlow has optimized and split it."""
    x = tf.ones((8, model.input_shape[-1]))
    step = tf.function(model.train_step, autograph=False)
    context.context().enable_run_metadata()
    try:
        step((x, tf.zeros((8, 2))))
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    return [graph for one in metadata.function_graphs for graph in one.partition_graphs]


def _count(graphs, operation, device=""):
    return sum(node.op == operation and device in node.device for graph in graphs for node in graph.node)


@pytest.fixture
def _host_is_another_device(monkeypatch):
    monkeypatch.setitem(pool.TIERS, "host", Tier("host", "/CPU:1"))


@pytest.mark.usefixtures("_host_is_another_device")
def test_every_planned_copy_survives_the_graph_optimizer():
    model = _blocks(policy={"dense_*": "offload", "linear_*": "offload", "head": "keep"})
    _fit(model)
    plan = model.plan
    put = {one.tensor for region in plan.regions for one in region.saved if one.tier == "host"}
    # Two fetches of one tensor at one time are one copy; a kept region starts none.
    last = max(index for index, region in enumerate(plan.regions) if region.recompute)
    fetched = len({(one.tensor, min(one.prefetch_at, last)) for r in plan.regions for one in r.saved if one.tier == "host"})
    assert len(put) >= 6
    graphs = _optimized_graphs(model)
    assert _count(graphs, "EnsureShape", "CPU:1") == len(put)
    assert _count(graphs, "Reshape", "CPU:1") == fetched
    # Each put crosses from the device, each fetch crosses back.
    to_host = sum(n.op == "_Send" and "CPU:1" in n.attr["recv_device"].s.decode() for g in graphs for n in g.node)
    back = sum(n.op == "_Send" and "CPU:1" in n.attr["send_device"].s.decode() for g in graphs for n in g.node)
    assert to_host >= len(put)
    assert back >= len(put)
    # What tells the host that it may copy back is "computed" on the device, for whose queue the host would wait otherwise.
    assert _count(graphs, "PlaceholderWithDefault", "CPU:0") == fetched


def test_a_copy_back_waits_for_the_backward_pass():
    model = _blocks(policy={"dense_*": "offload", "linear_*": "offload", "head": "keep"})
    _fit(model)
    graph = tf.function(model.train_step).get_concrete_function((tf.ones((8, 512)), tf.zeros((8, 2)))).graph
    backs = [op for op in graph.get_operations() if op.type == "Reshape" and op.inputs[0].op.type == "EnsureShape"]
    assert backs
    sizes = [op.inputs[1].op.inputs[0].op for op in backs]  # behind a placeholder, which the graph optimizer cannot see through
    assert all(op.type == "Const" and op.control_inputs for op in sizes)


def test_the_next_region_is_given_to_the_device_after_the_copies(monkeypatch):
    """Else TensorFlow has queued the whole backward pass before it queues the first of them."""
    started = []
    start = Pass.start_backward

    def noting(self, region, gate, others, **more):
        handed_on = start(self, region, gate, others, **more)
        started.append((region, gate, handed_on, list(self.begun)))
        return handed_on

    monkeypatch.setattr(Pass, "start_backward", noting)
    _fit(_copied_ahead(2))
    assert sum(len(begun) for *_, begun in started) >= 5
    for (_, _, _, begun), (_, _, handed_on, _) in pairwise(started):
        if begun:
            sizes = handed_on.op.inputs[1].op.inputs[0].op
            assert all(copy.op in sizes.control_inputs for copy in begun)


def _skipping():
    """An addition hands its gradient to `first` at once; that of `second`, of the same region, comes through `third`."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8,), name="x")
    before = L.Dense(8, activation="tanh", name="before")(inputs)
    first = L.Dense(8, activation="tanh", name="first")(before)
    second = L.Dense(8, activation="tanh", name="second")(first)
    third = L.Dense(8, activation="tanh", name="third")(second)
    total = L.Add(name="add")([first, third])
    plain = keras.Model(inputs, L.Dense(2, name="head")(total))
    regions = (
        Region(("before",), (Saved("x"),)),
        Region(("first", "second"), (Saved("before", "host", prefetch_at=1),)),
        Region(("third",), (Saved("second"),)),
        Region(("add",)),
        Region(("head",), (Saved("add"),)),
    )
    planned = keras_sn.SNModel.from_model(plain, policy="recompute")
    planned.compile("sgd", "mse")
    return keras_sn.SNModel.from_model(plain, plan=replace(planned.build_plan(8), regions=regions))


def test_a_backward_pass_starts_with_all_its_gradients_and_after_the_one_before_it(monkeypatch):
    """Else its copies back are asked for, and its memory is taken, while that of other regions is still there."""
    seen = []
    start = Pass.start_backward

    def noting(self, region, gate, others, **more):
        ended = self.ended
        handed_on = start(self, region, gate, others, **more)
        seen.append((region, others, ended, handed_on))
        return handed_on

    monkeypatch.setattr(Pass, "start_backward", noting)
    _fit(_skipping(), epochs=1)
    assert [region for region, *_ in seen] == [4, 3, 2, 1, 0]
    ((_, others, ended, handed_on),) = (one for one in seen if one[0] == 1)
    assert len(others) == 1
    sizes = handed_on.op.inputs[1].op.inputs[0].op
    assert {others[0].op, ended.op} <= set(sizes.control_inputs)
    # The function of each region is queued after that of the one before it.
    for (*_, before, _), (*_, after, _) in pairwise(seen[1:]):
        assert before.op in {*after.op.control_inputs, *(one.op for one in after.op.inputs)}


def _copied_ahead(distance, window=2):
    """As planned on a GPU, where a copy back is asked for before it is needed."""
    model = _blocks(policy={"dense_*": "offload", "linear_*": "offload", "head": "keep"})
    plan = model.build_plan(8)
    last = len(plan.regions) - 2

    def ahead(index, one):
        return replace(one, prefetch_at=min(index + distance, last)) if one.tier == "host" else one

    regions = (
        replace(region, saved=tuple(ahead(index, one) for one in region.saved)) for index, region in enumerate(plan.regions)
    )
    return keras_sn.SNModel.from_model(model, plan=replace(plan, regions=tuple(regions), copy_window=window))


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(("distance", "window"), [(1, 1), (2, 4), (4, 8)])
def test_copies_ahead_change_no_number(distance, window, jit):
    losses = []
    for make in (lambda: _copied_ahead(distance, window), lambda: _blocks(policy="none")):
        keras.utils.set_random_seed(0)
        losses.append(_fit(make(), jit_compile=jit, epochs=3).history["loss"])
    assert losses[0] == losses[1]


def test_the_train_step_is_traced_once():
    traces = []

    class Counting(L.Layer):
        def call(self, x):
            traces.append(tf.inside_function())
            return x

    inputs = keras.Input((8,))
    x = L.Dense(8)(Counting()(inputs))
    for policy, expected in (({"*": "recompute"}, 2), ("none", 1)):
        model = keras_sn.SNModel(inputs, L.Dense(2)(x), policy=policy)
        model.compile(keras.optimizers.Adam(), "mse", jit_compile=False)
        traces.clear()
        model.fit(np.ones((8, 8)), np.ones((8, 2)), batch_size=4, epochs=3, verbose=0)
        assert len(traces) == expected  # once forward, once backward


def test_regions_without_gradients_are_not_prepared_for_a_backward_pass():
    inputs = keras.Input((8,))
    x = L.Dense(8, name="frozen", trainable=False)(inputs)
    model = keras_sn.SNModel(inputs, L.Dense(2, name="head")(x), policy={"frozen": "recompute", "head": "recompute"})
    model.compile("sgd", "mse", jit_compile=False)
    model.build_plan(4)
    executor = model._executor_in_force()
    model.fit(np.ones((4, 8)), np.ones((4, 2)), batch_size=4, verbose=0)
    frozen = executor.library.function_for(executor.bodies[0], "function", jit=False, inline=False)
    assert frozen.forward.experimental_get_tracing_count() == 1
    assert frozen.backward.experimental_get_tracing_count() == 0


def test_what_no_gradient_is_asked_of_does_not_leave():
    inputs = x = keras.Input((512,))
    for name in "abcd":
        x = L.Dense(512, name=name, trainable=name in "cd")(x)
    model = keras_sn.SNModel(inputs, L.Dense(2, name="head")(x), policy={"?": "offload", "head": "keep"})
    _fit(model)
    by_frozen = {one.tensor for region in model.plan.regions[:2] for one in region.saved if one.tier == "host"}
    put = {one.tensor for region in model.plan.regions[2:] for one in region.saved if one.tier == "host"}
    assert by_frozen - put
    graph = tf.function(model.train_step).get_concrete_function((tf.ones((8, 512)), tf.zeros((8, 2)))).graph
    assert [one.type for one in graph.get_operations()].count("EnsureShape") == len(put)


def test_gradients_equal_tf_recompute_grad_on_a_pure_function():
    keras.utils.set_random_seed(1)
    model = _blocks(2, 16, policy={"*": "recompute"})
    model.compile("sgd", "mse", jit_compile=False)
    x = tf.random.normal((4, 16))
    plain = keras.Model(model.input, model.output)

    @tf.function
    def ours():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(x, training=True) ** 2)
        return tape.gradient(loss, [v.value for v in model.trainable_variables])

    @tf.function
    def theirs():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.recompute_grad(plain)(x) ** 2)
        return tape.gradient(loss, [v.value for v in plain.trainable_variables])

    for a, b in zip(ours(), theirs(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_input_gradients_and_unconnected_outputs():
    """A tape that watches the input gets its gradient; weights that the loss does not reach get None, as in Keras."""
    inputs = keras.Input((8,))
    x = L.Dense(8, name="trunk")(inputs)
    outputs = {"used": L.Dense(2, name="used")(x), "unused": L.Dense(2, name="unused")(x)}
    plain = keras.Model(inputs, outputs)
    model = keras_sn.SNModel.from_model(plain, policy={"*": "recompute"})
    x = tf.random.normal((4, 8))
    results = []
    for one in (plain, model):
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(one(x, training=True)["used"] ** 2)
        results.append(tape.gradient(loss, [x, *(v.value for v in one.trainable_variables)]))
    assert [g is None for g in results[0]] == [g is None for g in results[1]]
    assert sum(g is None for g in results[1]) == 2
    for a, b in zip(*results, strict=True):
        if a is not None:
            np.testing.assert_array_equal(a, b)


def test_evaluation_and_prediction_never_recompute():
    model = _blocks(policy="recompute")
    _fit(model)
    for function in (model.test_step, lambda data: model.predict_step(data[0])):
        graph = tf.function(function).get_concrete_function((tf.ones((8, 512)), tf.zeros((8, 2)))).graph
        assert not [op for op in graph.get_operations() if "PartitionedCall" in op.type]
        assert sum(op.type == "MatMul" for op in graph.get_operations()) == 9


def test_nothing_saved_outlives_an_eager_step():
    import gc
    import weakref

    model = _blocks(2, 16, policy="recompute")
    model.compile("sgd", "mse", run_eagerly=True)
    x = tf.ones((4, 16))
    with tf.GradientTape() as tape:
        y = model(x, training=True)
        loss = tf.reduce_sum(y)
    watched = weakref.ref(y)
    tape.gradient(loss, [v.value for v in model.trainable_variables])
    del y, loss, tape
    gc.collect()
    assert watched() is None


def _normalized(count=3, width=16):
    inputs = x = keras.Input((width,))
    for i in range(count):
        x = L.Dense(width, name=f"dense_{i}")(x)
        x = L.BatchNormalization(name=f"bn_{i}")(x)
        x = L.Dropout(0.3, name=f"drop_{i}")(L.Activation("tanh", name=f"tanh_{i}")(x))
    return keras.Model(inputs, L.Dense(2, name="head")(x))


@pytest.mark.parametrize(
    ("strategy", "jit_compile"),
    [
        *(("speed-centric", False), ("memory-centric", False), ("memory-centric", True)),
        pytest.param("speed-centric", True, marks=pytest.mark.full),
    ],
)
def test_the_papers_strategies_train_like_plain_keras(strategy, jit_compile):
    """Memory-centric: a tensor that waits nowhere is made again by the region that made it, through its region's inputs."""
    weights = []
    for planned in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        model = _normalized()
        if planned:
            made = make_plan(trace(model, 8).graph, "superneurons", batch_size=8, reserved_bytes=0)
            regions = tuple(superneurons_regions(trace(model, 8).graph, strategy=strategy))
            has_replays = any(one.tier == "recompute" for region in regions for one in region.saved)
            assert has_replays == (strategy == "memory-centric")
            model = keras_sn.SNModel.from_model(model, plan=replace(made, regions=regions))
        model.compile("sgd", "mse", jit_compile=jit_compile)
        x = np.random.default_rng(0).normal(size=(24, 16)).astype("float32")
        model.fit(x, np.ones((24, 2), "float32"), batch_size=8, shuffle=False, verbose=0)
        weights.append([np.asarray(v) for v in model.variables])
    for plain, ours in zip(*weights, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-6)


def test_replays_survive_the_graph_optimizer():
    """TensorFlow neither merges a replayed forward function with the first run nor drops it."""
    model = _normalized()
    graph = trace(model, 8).graph
    regions = superneurons_regions(graph, strategy="memory-centric")
    made = make_plan(graph, "superneurons", batch_size=8, reserved_bytes=0)
    model = keras_sn.SNModel.from_model(model, plan=replace(made, regions=tuple(regions)))
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(np.ones((8, 16), "float32"), np.zeros((8, 2), "float32"), batch_size=8, verbose=0)
    step = tf.function(model.train_step, autograph=False)
    context.context().enable_run_metadata()
    try:
        step((tf.ones((8, 16)), tf.zeros((8, 2))))
        metadata = context.context().export_run_metadata()
    finally:
        context.context().disable_run_metadata()
    graphs = [graph for one in metadata.function_graphs for graph in one.partition_graphs]
    forward = sum("forward" in node.op or "forward" in str(node.attr["f"].func.name) for graph in graphs for node in graph.node)
    replays = sum(one.tier == "recompute" for region in regions for one in region.saved)
    assert forward >= len(regions) + replays
