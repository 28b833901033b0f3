"""Models with their own `call()`: each call of a direct child layer is a region, and the numbers are plain Keras'."""

import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from parity import MODES, assert_equal, rewriting_off, small_tensors_leave
from trained import trained_state

import keras_sn
from keras_sn.errors import BudgetError, PlanError, UnsupportedModelError

rewriting_off()

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(10, 6, 8)).astype("float32"), RANDOM.normal(size=(10, 2)).astype("float32")


class Block(L.Layer):
    """A residual block without a `training` argument, with dropout, a statistic and an added loss."""

    def __init__(self, width=8):
        super().__init__()
        self.up, self.down = L.Dense(4 * width, activation="gelu"), L.Dense(width)
        self.norm, self.drop = L.BatchNormalization(), L.Dropout(0.3)

    def call(self, x):
        y = self.drop(self.down(self.up(x)))
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(keras.ops.cast(y, "float32"))))
        return self.norm(x + y)


class Blocks:
    """The `call()` of both models below: a shared block, a loop, raw operations between, a mask, a frozen statistic."""

    def build_layers(self):
        self.masking, self.first = L.Masking(), L.Dense(8, kernel_regularizer="l2")
        self.blocks = [Block() for _ in range(2)]
        self.frozen = L.BatchNormalization()
        self.pool = L.GlobalAveragePooling1D()
        self.out = L.Dense(2)

    def call(self, x, training=None):
        x = self.first(self.masking(x))
        for _ in range(2):
            for block in self.blocks:
                x = 0.5 * block(x)
        return self.out(self.pool(self.frozen(x, training=False)))


class Plain(Blocks, keras.Model):
    def __init__(self):
        super().__init__()
        self.build_layers()


class Net(Blocks, keras_sn.SNModel):
    def __init__(self, **settings):
        super().__init__(**settings)
        self.build_layers()


def train(make, mode="graph", dtype="float32", **compile_arguments):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(5)
    keras.config.set_dtype_policy(dtype)
    try:
        model = make()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse", metrics=["mae"], **MODES[mode] | compile_arguments)
        x = X * (np.arange(6) < 4)[:, None]  # for the masks
        if isinstance(model, Plain):
            model(x[:4])
            model.optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
        with small_tensors_leave():
            history = model.fit(x, Y, batch_size=4, epochs=1 if mode == "xla" else 2, shuffle=False, verbose=0)
    finally:
        keras.config.set_dtype_policy("float32")
    return model, trained_state(model, history)


@functools.cache
def train_plain(mode):
    return train(Plain, mode)[1]


@functools.cache
def train_recomputed(mode):
    return train(lambda: Net(policy="recompute"), mode)


MIXED = {"block*": "recompute", "dense": "offload"}
QUICK = [("recompute", "graph"), (MIXED, "graph"), ("offload", "eager")]
CASES = [(policy, mode) for policy in ("recompute", "offload", MIXED, "none") for mode in ("graph", "eager")]


@pytest.mark.xdist_group("subclassed")
@pytest.mark.parametrize(
    ("policy", "mode"), [pytest.param(*one, marks=[] if one in QUICK else [pytest.mark.full]) for one in CASES], ids=str
)
def test_equal_to_plain_keras(policy, mode):
    plain = train_plain(mode)
    model, trained = train_recomputed(mode) if policy == "recompute" else train(lambda: Net(policy=policy), mode)
    assert bool(model.plan.regions) == (policy != "none")
    assert bool(model.plan.offloaded_bytes) == (policy in ("offload", MIXED))
    assert_equal(trained, plain, exact=True)


def test_equal_in_mixed_precision_and_in_steps_of_several():
    _, plain = train(Plain, dtype="mixed_float16", steps_per_execution=2)
    _, trained = train(lambda: Net(policy="recompute"), dtype="mixed_float16", steps_per_execution=2)
    assert_equal(trained, plain, exact=True)


@pytest.mark.full
def test_equal_under_xla():
    _, plain = train(Plain, "xla")
    _, trained = train(lambda: Net(policy="recompute"), "xla")
    assert_equal(trained, plain, exact=False)


@pytest.mark.xdist_group("subclassed")
def test_the_plan_names_the_calls():
    model, _ = train_recomputed("graph")
    names = [region.layers[0] for region in model.plan.regions]
    assert [name for name in names if name.startswith("block")] == [
        "block",
        "block_1",
        "block#2",
        "block_1#2",
    ]
    kept = {region.layers[0] for region in model.plan.regions if not region.recompute}
    assert kept
    assert all(name.startswith("operations") for name in kept)
    assert "block_1#2" in str(model.plan)
    assert all("call" not in vars(layer) for layer in model.layers)


def test_each_recomputed_layer_runs_twice_in_a_step():
    calls = []

    class Counted(L.Dense):
        def call(self, x, training=None):
            calls.append(self.name)
            return super().call(x)

    class Two(keras_sn.SNModel):
        def __init__(self, **settings):
            super().__init__(**settings)
            self.a, self.b = Counted(4, name="a"), Counted(4, name="b")

        def call(self, x):
            return self.b(self.a(x))

    model = Two(policy={"a": "recompute"})
    model.compile("sgd", "mse", run_eagerly=True)
    x = np.ones((4, 3), "float32")
    model.train_on_batch(x, x[:, :1])
    calls.clear()
    model.train_on_batch(x, x[:, :1])
    assert calls == ["a", "b", "a"]
    calls.clear()
    model.predict_on_batch(x)
    assert calls == ["a", "b"]


def wide(**settings):
    class Wide(keras_sn.SNModel):
        def __init__(self):
            super().__init__(**settings)
            self.blocks = [Block(64) for _ in range(4)]

        def call(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    keras.backend.clear_session(free_memory=False)  # for equal names
    keras.utils.set_random_seed(1)
    model = Wide()
    model.compile("sgd", "mse", jit_compile=False)
    return model


def test_auto_fits_its_budget_with_as_little_recomputation_as_it_takes():
    specs = tf.TensorSpec((None, 256, 64))
    plain = wide(policy="none").build_plan(32, inputs=specs)
    everything = wide(policy="recompute").build_plan(32, inputs=specs)
    assert everything.planned_peak_bytes < 0.7 * plain.plain_peak_bytes
    budget = (plain.plain_peak_bytes + everything.planned_peak_bytes) // 2
    between = wide(memory_budget=budget).build_plan(32, inputs=specs)
    assert between.planned_peak_bytes <= budget
    count = sum(region.recompute for region in between.regions)
    assert 0 < count < sum(region.recompute for region in everything.regions)
    assert between.planned_seconds < everything.planned_seconds
    assert wide(memory_budget=2 * plain.plain_peak_bytes).build_plan(32, inputs=specs).is_plain
    with pytest.raises(BudgetError, match=r"No plan fits.*block.*Received"):
        wide(memory_budget=plain.reserved_bytes + 1000).build_plan(32, inputs=specs)


def test_other_layers_in_another_call_are_recomputed_too():
    class Deep(keras_sn.SNModel):
        depth = 1

        def __init__(self):
            super().__init__(policy="recompute")
            self.blocks = [Block() for _ in range(3)]

        def call(self, x):
            for block in self.blocks[: self.depth]:
                x = block(x)
            return x

    model = Deep()
    Deep.depth = 3
    model.predict_on_batch(X)  # builds all blocks
    Deep.depth = 1
    model.compile("sgd", "mse", run_eagerly=True)
    model.train_on_batch(X, X)
    assert len(model.plan.regions) == 1
    Deep.depth = 3
    before = np.array(model.blocks[2].up.kernel)
    model.train_on_batch(X, X)
    assert (np.array(model.blocks[2].up.kernel) != before).any()


def test_a_training_loop_of_ones_own():
    def gradients(make):
        keras.utils.set_random_seed(2)
        model = make()
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(tf.constant(X), training=True) ** 2) + sum(model.losses)
        return tape.gradient(loss, model.trainable_variables), model

    plain, _ = gradients(Plain)
    planned, model = gradients(lambda: Net(policy="recompute"))
    assert model.plan.regions
    for a, b in zip(planned, plain, strict=True):
        np.testing.assert_array_equal(a, b)


def test_dict_inputs_and_keyword_arguments():
    def make(base, **settings):
        class Named(base):
            def __init__(self):
                super().__init__(**settings)
                self.attention, self.block, self.out = L.MultiHeadAttention(2, 4, dropout=0.2), Block(), L.Dense(2)

            def call(self, inputs, training=None):
                y = self.attention(inputs["x"], value=inputs["x"], attention_mask=inputs["mask"])
                return self.out(keras.ops.mean(self.block(y), axis=1))

        return Named()

    def train_named(base, **settings):
        keras.utils.set_random_seed(3)
        model = make(base, **settings)
        model.compile("sgd", "mse", jit_compile=False)
        inputs = {"x": X, "mask": np.ones((10, 6, 6), bool)}
        with small_tensors_leave():
            history = model.fit(inputs, Y, batch_size=5, shuffle=False, verbose=0)
        assert base is keras.Model or model.plan.offloaded_bytes
        return trained_state(model, history)

    assert_equal(train_named(keras_sn.SNModel, policy="offload"), train_named(keras.Model), exact=True)


def test_refusals():
    model = wide(policy="recompute")
    with pytest.raises(PlanError, match=r"planned from a batch.*Received: inputs=None"):
        model.build_plan(4)
    specs = tf.TensorSpec((None, 6, 64))
    with pytest.raises(PlanError, match=r"needs a graph.*Received: policy='superneurons'"):
        wide(policy="superneurons").build_plan(4, inputs=specs)
    with pytest.raises(PlanError, match=r"'bloc'.*matches no layer"):
        wide(policy={"bloc": "recompute"}).build_plan(4, inputs=specs)

    class Branches(keras_sn.SNModel):
        def call(self, x):
            return x if float(keras.ops.sum(x)) > 0 else -x

    model = Branches(policy="recompute")
    model.compile("sgd", "mse")
    with pytest.raises(UnsupportedModelError, match=r"(?s)does not run on symbolic tensors.*Received"):
        model.fit(X, X, verbose=0)


class OnValues(keras_sn.SNModel):
    """Cannot be planned, and need not be."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.out = L.Dense(8)

    def call(self, x):
        return self.out(x if x.numpy().sum() > 0 else -x)


class OwnStep(keras_sn.SNModel):
    """Has no `call()`: it trains a network of its own."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.network = keras.Sequential([L.Dense(8, activation="tanh"), L.Dense(8)])

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(keras.ops.square(self.network(x, training=True) - y))
        self.optimizer.apply_gradients(
            zip(tape.gradient(loss, self.network.trainable_weights), self.network.trainable_weights, strict=True)
        )
        return {"error": loss}


@pytest.mark.parametrize(
    ("kind", "eager", "what_to_do"),
    [(OnValues, True, "does not run on symbolic tensors"), (OwnStep, False, "has no `call\\(\\)`, so there is nothing to plan")],
)
def test_what_cannot_be_planned_is_refused_unless_nothing_is_asked(kind, eager, what_to_do):
    model = kind(policy="none")
    model.compile("sgd", "mse", run_eagerly=eager)
    history = model.fit(X, X, epochs=2, verbose=0).history
    losses = history["error" if kind is OwnStep else "loss"]
    assert losses[1] < losses[0]
    assert model.plan is None
    model = kind(policy="recompute")
    model.compile("sgd", "mse", run_eagerly=eager)
    with pytest.raises(UnsupportedModelError, match=rf"(?s){what_to_do}.*`policy='none'`.*Received"):
        model.fit(X, X, verbose=0)


class Adversarial(keras.Model):
    """Trains two networks by turns."""

    def __init__(self, judge, forger):
        super().__init__()
        self.judge, self.forger, self.seed = judge, forger, keras.random.SeedGenerator(3)
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)
        self.of_judge, self.of_forger = keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.01)

    def train_step(self, x):
        ones = keras.ops.ones((keras.ops.shape(x)[0], 1))
        forged = functools.partial(self.forger, keras.random.normal((keras.ops.shape(x)[0], 4), seed=self.seed), training=True)
        with tf.GradientTape() as tape:
            loss = self.loss_of(ones, self.judge(x, training=True)) + self.loss_of(0 * ones, self.judge(forged(), training=True))
        weights = self.judge.trainable_weights
        self.of_judge.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        with tf.GradientTape() as tape:
            deceived = self.loss_of(ones, self.judge(forged(), training=True))
        weights = self.forger.trainable_weights
        self.of_forger.apply_gradients(zip(tape.gradient(deceived, weights), weights, strict=True))
        return {"judge": loss, "forger": deceived}


def test_networks_that_another_model_trains():
    data = tf.data.Dataset.from_tensor_slices(X[:, 0]).batch(4)
    histories = []
    for convert in (lambda network: network, functools.partial(keras_sn.SNModel.from_model, policy={"*": "recompute"})):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        judge = keras.Sequential([keras.Input((8,)), L.Dense(8, activation="gelu"), L.Dropout(0.3), L.Dense(1)])
        forger = keras.Sequential([keras.Input((4,)), L.Dense(8, activation="gelu"), L.BatchNormalization(), L.Dense(8)])
        networks = [convert(network) for network in (judge, forger)]
        for network in networks:
            if isinstance(network, keras_sn.SNModel):
                assert network.build_plan(4).regions
        model = Adversarial(*networks)
        model.compile(jit_compile=False)
        histories.append(model.fit(data, epochs=2, verbose=0).history)
    assert histories[0] == histories[1]


def test_a_plan_of_its_own_is_adopted():
    specs = tf.TensorSpec((None, 16, 64))
    plan = wide(policy="recompute").build_plan(4, inputs=specs)
    assert wide(plan=plan).build_plan(4, inputs=specs).regions == plan.regions


def test_calls_with_other_arguments_are_planned_anew():
    class Sum(keras_sn.SNModel):
        def __init__(self):
            super().__init__(policy="recompute")
            self.block, self.out = Block(), L.Dense(2)

        def call(self, x, more=None, training=None):
            return self.out(self.block(x if more is None else x + more))

    keras.utils.set_random_seed(2)
    model, x = Sum(), tf.constant(X)
    for inputs in ((x, x), (x,), (x, x)):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(*inputs, training=True) ** 2)
        assert all(gradient is not None for gradient in tape.gradient(loss, model.trainable_variables))
        assert model.plan.regions
