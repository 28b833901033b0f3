"""`SNModel` as a `keras.Model`: training loops, files, refusals."""

import itertools
import logging
import re
from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from parity import assert_equal, rewriting_off, train

import keras_sn
from keras_sn import device, keras_internals, planning
from keras_sn.batches import first_inputs
from keras_sn.errors import BudgetError, PlanError, UnsupportedModelError
from keras_sn.plan import Plan, Region, Saved

rewriting_off()


def _plain(width=8, dropout=0.3):
    inputs = keras.Input((width,), name="x")
    x = L.Dense(width, activation="relu", name="a")(inputs)
    x = L.BatchNormalization(name="b")(x)
    return keras.Model(inputs, L.Dense(2, name="c")(L.Dropout(dropout, name="d")(x)), name="net")


X = np.random.default_rng(0).normal(size=(12, 8)).astype("float32")
Y = np.random.default_rng(1).normal(size=(12, 2)).astype("float32")


def _weights(model):
    return [np.asarray(keras.ops.convert_to_numpy(v)) for v in model.variables]


def _both(make_step, policy="recompute"):
    """Runs the same training loop on a plain and on a planned model; returns their weights."""
    results = []
    for planned in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = _plain()
        if planned:
            model = keras_sn.SNModel.from_model(model, policy=policy)
        make_step(model)
        results.append(_weights(model))
    for plain, ours in zip(*results, strict=True):
        np.testing.assert_array_equal(ours, plain)


# --- training loops


def test_steps_per_execution():
    plain = train("siamese", "graph", "float32", None, steps_per_execution=2)
    assert_equal(train("siamese", "graph", "float32", "recompute", steps_per_execution=2), plain, exact=True)


def test_custom_training_loop():
    def loop(model):
        optimizer = keras.optimizers.Adam(0.01)

        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True))

        for _ in range(3):
            step(X, Y)

    _both(loop)


def test_overridden_train_step_and_compute_loss():
    def train_overridden(model):
        class Doubling(type(model)):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = 2.0 * self.compute_loss(x, y, self(x, training=True))
                self.optimizer.apply_gradients(
                    zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
                )
                return {"loss": loss}

            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
                return keras.ops.mean(keras.ops.abs(y - y_pred))

        overridden = Doubling(model.input, model.output, **({"policy": "recompute"} if "SN" in type(model).__name__ else {}))
        overridden.compile("adam", jit_compile=False)
        overridden.fit(X, Y, batch_size=4, epochs=2, verbose=0, shuffle=False)

    _both(train_overridden)


def test_sample_weights_and_generators_and_datasets():
    def fit(model):
        model.compile(keras.optimizers.SGD(0.1), "mse", weighted_metrics=["mae"], jit_compile=False)
        model.fit(X, Y, sample_weight=np.arange(12.0), batch_size=5, verbose=0, shuffle=False)
        model.fit(((X[i : i + 4], Y[i : i + 4]) for i in range(0, 12, 4)), steps_per_epoch=3, verbose=0)
        model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(5), verbose=0)
        model.train_on_batch(X[:7], Y[:7])

    _both(fit)


def test_mirrored_strategy():
    results = []
    for planned in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            model = _plain()
            if planned:
                model = keras_sn.SNModel.from_model(model, policy="recompute")
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        history = model.fit(tf.data.Dataset.from_tensor_slices((X, Y)).batch(6), epochs=2, verbose=0).history
        results.append([np.array(history["loss"]), *_weights(model)])
    assert model.plan.batch_size == 3
    for plain, ours in zip(*results, strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-6)


def test_layers_frozen_between_fits():
    def fit(model):
        for trainable in (True, False, True):
            model.get_layer("a").trainable = trainable
            model.compile("sgd", "mse", jit_compile=False)
            model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)

    _both(fit)


def test_a_region_that_xla_cannot_compile_falls_back_alone():
    class NoXla(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.supports_jit = False

        def call(self, x):
            return tf.ensure_shape(tf.numpy_function(lambda a: a * 2, [x], tf.float32), x.shape)

    inputs = keras.Input((8,))
    x = L.Dense(8, name="a")(inputs)
    model = keras_sn.SNModel(
        inputs, L.Dense(2, name="c")(NoXla(name="b")(x)), policy={"a": "recompute", "b": "keep", "c": "recompute"}
    )
    model.compile("sgd", "mse", jit_compile=True)
    assert model.fit(X, Y, batch_size=4, verbose=0).history["loss"][0] > 0
    modes = {function.mode for function in model._executor_in_force().library._by_structure.values()}
    assert modes == {"xla", "function"}


# --- plans


def test_if_it_fits_the_train_step_is_keras_own():
    model = keras_sn.SNModel.from_model(_plain(), memory_budget="1GiB")
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.plan.is_plain
    assert model.jit_compile is True
    assert model._now.executor is None


def test_a_larger_batch_is_planned_anew_and_a_smaller_one_is_not():
    model = keras_sn.SNModel.from_model(_plain(), policy="recompute")
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=8, verbose=0)
    first = model.plan
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.plan is first
    model.fit(X, Y, batch_size=12, verbose=0)
    assert model.plan.batch_size == 12


def test_reserved_bytes_count_weights_and_slots():
    model = keras_sn.SNModel.from_model(_plain(), policy="recompute")
    model.compile("adam", "mse")
    plan = model.build_plan(4)
    trainable = 4 * (8 * 8 + 8 + 8 + 8 + 8 * 2 + 2)
    state = 4 * (8 + 8) + 2 * 8  # moving statistics, the seed state of the dropout
    assert plan.reserved_bytes == trainable + state + 2 * trainable + 8 + 4  # two moments; iteration, rate


@pytest.mark.parametrize(
    ("arguments", "extra"),
    [({"use_ema": True}, 1), ({"gradient_accumulation_steps": 2}, 1), ({"use_ema": True, "gradient_accumulation_steps": 2}, 2)],
)
def test_reserved_bytes_count_averages_and_accumulated_gradients(arguments, extra):
    plans = []
    for more in ({}, arguments):
        model = keras_sn.SNModel.from_model(_plain(), policy="recompute")
        model.compile(keras.optimizers.Adam(**more), "mse")
        plans.append(model.build_plan(4))
    trainable = 4 * (8 * 8 + 8 + 8 + 8 + 8 * 2 + 2)
    assert plans[1].reserved_bytes - plans[0].reserved_bytes == extra * trainable


def test_a_second_compile_makes_a_new_plan():
    model = keras_sn.SNModel.from_model(_plain(), policy="recompute")
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=4, verbose=0)
    first = model.plan
    model.compile("adam", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.plan.reserved_bytes > first.reserved_bytes
    model.compile("adam", "mse", jit_compile=True)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.plan.compiled
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.plan is first  # plans are kept
    model.fit(X[:6], Y[:6], batch_size=4, verbose=0)
    assert model.plan is first  # a smaller last batch changes nothing


def _open_lengths():
    inputs = keras.Input((None, 6), name="x")
    x = L.Dense(8, activation="tanh")(inputs)
    x = L.Conv1D(8, 3, padding="same", activation="relu")(x)
    return keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling1D()(x)))


def test_open_axes_are_planned_from_the_first_batch():
    histories = []
    for planned in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = _open_lengths()
        if planned:
            model = keras_sn.SNModel.from_model(model, policy="recompute")
        model.compile("sgd", "mse", jit_compile=False)
        losses = []
        for length in (5, 9, 7):
            x = np.random.default_rng(length).normal(size=(8, length, 6)).astype("float32")
            losses += model.fit(x, Y[:8], batch_size=4, shuffle=False, verbose=0).history["loss"]
            if planned:
                peaks = model.plan.planned_peak_bytes
        histories.append(losses)
    assert histories[0] == histories[1]
    assert peaks > 0
    with pytest.raises(UnsupportedModelError, match="unknown axis"):
        keras_sn.SNModel.from_model(_open_lengths(), policy="recompute").build_plan(4)
    model = keras_sn.SNModel.from_model(_open_lengths(), policy="recompute")
    short = model.build_plan(4, inputs=np.zeros((4, 5, 6), "float32")).planned_peak_bytes
    assert model.build_plan(4, inputs=tf.TensorSpec((4, 50, 6), "float32")).planned_peak_bytes > 5 * short / 2


def _numbered(read):
    """Twelve samples; notes which are read."""
    numbers = tf.data.Dataset.range(12)

    def note(number):
        return read.append(int(number)) or number

    return numbers.map(lambda i: (tf.gather(X, tf.ensure_shape(tf.numpy_function(note, [i], "int64"), ())), tf.gather(Y, i)))


def _of_sequence(read):
    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 3

        def __getitem__(self, index):
            read.append(index)
            return X[4 * index : 4 * index + 4], Y[4 * index : 4 * index + 4]

    return Batches()


def _of_generator(read):
    for start in (0, 4, 8):
        read.append(start)
        yield X[start : start + 4], Y[start : start + 4]


def _read_once(read):
    batches = _of_generator(read)  # the data set can be read only once, too
    specs = (tf.TensorSpec((None, 8)), tf.TensorSpec((None, 2)))
    return tf.data.Dataset.from_generator(lambda: batches, output_signature=specs)


DATA = {
    "shuffled": lambda read: _numbered(read).shuffle(12, seed=3).batch(5),
    "shuffled by the global seed": lambda read: _numbered(read).shuffle(12).batch(5),
    "shuffled after batches": lambda read: _numbered(read).batch(5).shuffle(3, seed=1),
    "endless": lambda read: _numbered(read).shuffle(12, seed=3).batch(5).repeat(),
    "sequence": _of_sequence,
    "generator": _of_generator,
    "read once": _read_once,
}


OTHERWISE = [{"steps_per_execution": 2}, {"run_eagerly": True}, {"jit_compile": True}]


@pytest.mark.parametrize(
    ("data", "settings"), [*((data, {}) for data in DATA), *itertools.product(("shuffled", "read once"), OTHERWISE)]
)
def test_data_are_read_as_plain_keras_reads_them(data, settings):
    """To look at a batch for its size would draw from the generator that shuffles, or take what can be read but once."""
    outcomes = []
    for policy in (None, "none", "recompute"):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = _plain() if policy is None else keras_sn.SNModel.from_model(_plain(), policy=policy)
        model.compile("sgd", "mse", **({"jit_compile": False} | settings))
        read, once = [], data in ("generator", "read once")
        fed = DATA[data](read)
        history = model.fit(fed, epochs=1 if once else 2, steps_per_epoch=3 if data == "endless" else None, verbose=0)
        if not once and data != "endless":
            history = model.fit(fed, epochs=1, verbose=0)
        reads = None if data == "endless" else read  # how far an endless one reads ahead is chance, and so is its next order
        # Plain Keras counts one step more where it finds out that data of unknown length have ended.
        steps = 3 if once else int(model.optimizer.iterations)
        outcomes.append((history.history["loss"], reads, steps))
    assert outcomes[1] == outcomes[0]
    if "jit_compile" in settings:
        np.testing.assert_allclose(outcomes[2][0], outcomes[0][0], rtol=1e-5)
        assert outcomes[2][1:] == outcomes[0][1:]
    else:
        assert outcomes[2] == outcomes[0]


def test_a_budget_that_does_not_fit_is_refused_before_data_of_open_size_change_anything():
    model = keras_sn.SNModel.from_model(_plain(), memory_budget=1000)
    model.compile("sgd", "mse", jit_compile=False)
    before = _weights(model)
    for _ in range(2):
        with pytest.raises(BudgetError):
            model.fit(_numbered([]).batch(4), verbose=0)
    assert model.optimizer.iterations == 0
    for old, new in zip(before, _weights(model)[: len(before)], strict=True):
        np.testing.assert_array_equal(old, new)
    assert model.train_function is None


def test_a_fit_that_ends_before_its_first_batch_leaves_the_traced_step():
    model = keras_sn.SNModel.from_model(_plain(), policy="recompute")
    model.compile("sgd", "mse", jit_compile=False)
    data = _numbered([]).batch(4)
    model.fit(data, verbose=0)
    traced = model.train_function
    with pytest.raises(ValueError):  # Keras splits arrays only
        model.fit(data, validation_split=0.5, verbose=0)
    assert model.train_function is traced


def test_no_data_at_all_end_as_with_plain_keras():
    ends = []
    for convert in (lambda model: model, keras_sn.SNModel.from_model):
        model = convert(_plain())
        model.compile("sgd", "mse", jit_compile=False)
        try:
            ends.append(model.fit(_numbered([]).take(0).batch(4), verbose=0).history)
        except Exception as error:
            ends.append(str(error))
    assert ends[0] == ends[1]


def test_what_is_known_of_a_batch_without_reading():
    fixed = tf.data.Dataset.from_tensor_slices((X, Y)).batch(4, drop_remainder=True)
    assert first_inputs(fixed, None, needs_shapes=True).shape == (4, 8)
    open_axis = fixed.map(lambda x, y: (tf.numpy_function(lambda a: a, [x], "float32"), y))
    assert first_inputs(open_axis.map(lambda x, y: (tf.ensure_shape(x, (4, None)), y)), None, needs_shapes=True) is None
    assert first_inputs(X, 5, needs_shapes=False).shape == (5,)
    assert first_inputs({"x": X, "missing": None}, 5, needs_shapes=True)["x"].shape == (5, 8)
    loader = type("Loader", (), {"__module__": "torch.utils.data.dataloader", "batch_size": 5, "__iter__": None})()
    assert first_inputs(loader, None, needs_shapes=False).shape == (5,)


def _random_regions(random):
    """Regions of the model below with saved tensors, places and prefetches at random."""
    names, made = ["a", "b", "c", "d", "e"], {"a": ["x", "a"], "b": ["a", "b"], "c": ["b", "c"], "d": ["c", "d"], "e": ["d", "e"]}
    ends = sorted({*random.choice(range(1, 5), random.integers(0, 4)), 5})
    regions, start = [], 0
    for end in ends:
        layers = tuple(names[start:end])
        own = sorted({tensor for layer in layers for tensor in made[layer]} - {"e"})
        saved = [
            Saved(
                tensor,
                "device" if tensor == "x" else str(random.choice(["device", "device", "host", "recompute"])),
                prefetch_at=int(random.integers(0, len(ends))),
            )
            for tensor in own
            if random.random() < 0.6
        ]
        saved = [replace(one, prefetch_at=None) if not one.is_away else one for one in saved]
        is_kept = random.random() < 0.2
        regions.append(Region(layers, () if is_kept else tuple(saved), not is_kept))
        start = end
    return tuple(regions)


def _narrow():
    inputs = x = keras.Input((8,), name="x")
    for name, width in (("a", 8), ("b", 6), ("c", 8), ("d", 6), ("e", 2)):
        x = L.Dense(width, activation=None if name == "e" else "tanh", name=name)(x)
    return keras.Model(inputs, x)


def test_any_edited_plan_is_refused_or_trains_with_the_same_numbers():
    random, outcomes = np.random.default_rng(1), {"refused": 0, "equal": 0}
    keras.utils.set_random_seed(5)
    plain = _narrow()
    weights = plain.get_weights()
    plain.compile("sgd", "mse", run_eagerly=True)
    expected = plain.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history["loss"]
    for _ in range(120):
        plan = Plan("dict", 4, _random_regions(random), 0, 0, 0)
        model = keras_sn.SNModel.from_model(_narrow(), plan=plan)
        model.set_weights(weights)
        model.compile("sgd", "mse", run_eagerly=True)
        try:
            model.build_plan(4)
        except PlanError:
            outcomes["refused"] += 1
            continue
        assert model.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history["loss"] == expected, plan.regions
        outcomes["equal"] += 1
    assert min(outcomes.values()) > 10, outcomes


@pytest.mark.parametrize("policy", ["none", "recompute", {"*": "recompute"}])
@pytest.mark.parametrize("eager", [False, True])
def test_trainable_that_changes_without_compile_acts_when_keras_traces_again(policy, eager):
    outcomes = []
    for convert in (lambda model: model, lambda model: keras_sn.SNModel.from_model(model, policy=policy)):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(5)
        model = convert(_plain())
        model.compile("sgd", "mse", **({"run_eagerly": True} if eager else {"jit_compile": False}))
        losses, kernels = [], []

        def fit(size, model=model, losses=losses, kernels=kernels):
            losses.extend(model.fit(X, Y, batch_size=size, shuffle=False, verbose=0).history["loss"])
            kernels.append(np.array(model.get_layer("a").kernel))

        fit(4)
        model.get_layer("a").trainable = False
        fit(4)  # the step goes on as it was traced, with a warning of Keras
        model.get_layer("b").trainable = False
        fit(3)  # another size: it is traced again
        model.get_layer("a").trainable = True
        fit(4)
        losses.append(model.train_on_batch(X[:2], Y[:2]))
        outcomes.append((losses, kernels))
    assert outcomes[0][0] == outcomes[1][0]
    for ours, theirs in zip(outcomes[0][1], outcomes[1][1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    moved = [bool(np.any(a != b)) for a, b in zip(outcomes[0][1], outcomes[0][1][1:], strict=False)]
    assert moved == ([False, False, True] if eager else [True, False, True])


def test_a_training_step_does_not_look_at_all_variables(monkeypatch):
    model = keras_sn.SNModel.from_model(_plain(), policy="recompute")
    model.compile("sgd", "mse", jit_compile=False)
    asked = []
    monkeypatch.setattr(planning, "_reserved", lambda model, real=planning._reserved: asked.append(1) or real(model))
    for _ in range(4):
        model.train_on_batch(X[:4], Y[:4])
    assert len(asked) == 1
    model.compile("adam", "mse", jit_compile=False)
    model.train_on_batch(X[:4], Y[:4])
    assert len(asked) == 2


def test_a_plan_edited_by_hand_runs_and_a_spoiled_one_is_refused():
    made = keras_sn.SNModel.from_model(_plain(), policy="superneurons").build_plan(4)
    edited = replace(made, regions=tuple(replace(region, recompute_seconds=0.0) for region in made.regions))
    for given in (edited, edited.to_json()):
        keras.utils.set_random_seed(5)
        model = keras_sn.SNModel.from_model(_plain(), plan=given)
        model.compile("sgd", "mse", jit_compile=False)
        loss = model.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history["loss"]
        assert [region.layers for region in model.plan.regions] == [region.layers for region in made.regions]
    keras.utils.set_random_seed(5)
    plain = _plain()
    plain.compile("sgd", "mse", jit_compile=False)
    assert plain.fit(X, Y, batch_size=4, shuffle=False, verbose=0).history["loss"] == loss
    spoiled = replace(made, regions=(*made.regions[:-1], replace(made.regions[-1], saved=())))
    model = keras_sn.SNModel.from_model(_plain(), plan=spoiled)
    model.compile("sgd", "mse", jit_compile=False)
    before = _weights(model)
    with pytest.raises(PlanError, match="freed too early"):
        model.fit(X, Y, batch_size=4, verbose=0)
    for old, new in zip(before, _weights(model)[: len(before)], strict=True):
        np.testing.assert_array_equal(old, new)
    with pytest.raises(PlanError, match="Received: plan=3"):
        keras_sn.SNModel.from_model(_plain(), plan=3)


def test_one_line_says_what_will_happen():
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("keras_sn")
    logger.addHandler(handler)
    try:
        model = keras_sn.SNModel.from_model(_plain(), policy="recompute", memory_budget="1GiB")
        model.compile("sgd", "mse", jit_compile=False)
        model.fit(X, Y, batch_size=4, epochs=2, verbose=0)
    finally:
        logger.removeHandler(handler)
    assert len(records) == 1
    for word in ("budget 1.00 GiB", "plain peak", "->", "regions recomputed", "to the host", "slower"):
        assert word in records[0]


# --- files


def test_save_and_load(tmp_path):
    # Without dropout: Keras does not save seed states.
    model = keras_sn.SNModel.from_model(_plain(dropout=0.0), memory_budget="3GiB", policy={"a": "recompute"})
    model.compile("adam", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=4, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(loaded, keras_sn.SNModel)
    assert loaded.settings == model.settings
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    plain = _plain()
    plain.load_weights(tmp_path / "model.weights.h5")
    np.testing.assert_array_equal(plain.predict(X, verbose=0), model.predict(X, verbose=0))
    for one in (model, loaded):
        one.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    for a, b in zip(_weights(model), _weights(loaded), strict=True):
        np.testing.assert_array_equal(a, b)


def test_clone_model_keeps_the_settings():
    model = keras_sn.SNModel.from_model(_plain(), memory_budget="3GiB", policy="recompute")
    clone = keras.models.clone_model(model)
    assert isinstance(clone, keras_sn.SNModel)
    assert clone.settings == model.settings
    assert clone.get_layer("a") is not model.get_layer("a")
    assert keras_sn.SNModel(model.input, model.output).settings == keras_sn.SNModel.from_model(_plain()).settings


def test_from_model_shares_weights_and_dtype_policy():
    keras.config.set_dtype_policy("mixed_float16")
    plain = _plain()
    keras.config.set_dtype_policy("float32")
    model = keras_sn.SNModel.from_model(plain)
    assert [id(v) for v in model.variables] == [id(v) for v in plain.variables]
    assert model.compute_dtype == "float16"
    sequential = keras.Sequential([keras.Input((8,)), L.Dense(2)])
    np.testing.assert_array_equal(keras_sn.SNModel.from_model(sequential).predict(X, verbose=0), sequential.predict(X, verbose=0))


def test_a_users_class_can_build_a_graph_in_its_constructor():
    class Net(keras_sn.SNModel):
        def __init__(self):
            inputs = keras.Input((8,))
            super().__init__(inputs, L.Dense(2)(inputs), policy="recompute")

    model = Net()
    model.compile("sgd", "mse", jit_compile=False)
    model.fit(X, Y, batch_size=4, verbose=0)
    assert model.plan.regions
    assert not any(issubclass(kind, keras_internals.Functional) for kind in keras_sn.SNModel.__mro__)


# --- refusals


def test_a_class_derived_from_sequential_is_refused_and_its_layers_are_not():
    class Own(keras.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    model = Own([keras.Input((8,)), L.Dense(2)])
    with pytest.raises(UnsupportedModelError, match=r"keras.Model\(model.inputs, model.outputs\)`.*Received: an instance of Own"):
        keras_sn.SNModel.from_model(model)
    converted = keras_sn.SNModel.from_model(keras.Model(model.inputs, model.outputs), policy="recompute")
    np.testing.assert_array_equal(converted.predict(X, verbose=0), model.predict(X, verbose=0))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"memory_budget": "12 apples"}, BudgetError),
        ({"memory_budget": 0}, BudgetError),
        ({"host_budget": "-1GiB"}, BudgetError),
        ({"policy": "fastest"}, PlanError),
        ({"policy": {"a": "drop"}}, PlanError),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments, error):
    with pytest.raises(error, match="Received: "):
        keras_sn.SNModel.from_model(_plain(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"memory_budget": 300}, BudgetError), ({"policy": {"nobody": "recompute"}}, PlanError)],
)
def test_what_cannot_be_planned_is_refused_before_training(arguments, error):
    model = keras_sn.SNModel.from_model(_plain(), **arguments)
    model.compile("adam", "mse", jit_compile=False)
    before = _weights(model)
    with pytest.raises(error, match="Received: "):
        model.fit(X, Y, batch_size=4, verbose=0)
    for a, b in zip(before, _weights(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_converted_model_keeps_the_methods_of_its_class():
    class Own(keras.Model):
        """A functional model with a training step and an attribute of its own."""

        scale = 1.0

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.scale * keras.ops.mean(keras.ops.square(self(x, training=True) - y))
            self.optimizer.apply_gradients(
                zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables, strict=True)
            )
            return {"loss": loss}

    def train(convert):
        keras.utils.set_random_seed(4)
        plain = _plain()
        model = Own(plain.input, plain.output)
        model.scale = 3.0
        model = convert(model)
        model.compile("sgd", jit_compile=False)
        history = model.fit(X, Y, batch_size=4, verbose=0, shuffle=False).history["loss"]
        return model, history, _weights(model)

    _, plain_history, plain_weights = train(lambda model: model)
    model, history, weights = train(lambda model: keras_sn.SNModel.from_model(model, policy="recompute"))
    assert isinstance(model, Own)
    assert isinstance(model, keras_sn.SNModel)
    assert model.plan.regions
    assert history == plain_history
    for a, b in zip(weights, plain_weights, strict=True):
        np.testing.assert_array_equal(a, b)


def test_unsupported_models_are_refused():
    class Net(keras.Model):
        def call(self, x):
            return x

    with pytest.raises(UnsupportedModelError, match=r"derive its class from `keras_sn.SNModel`.*Received"):
        keras_sn.SNModel.from_model(Net())
    with pytest.raises(UnsupportedModelError, match=r"not built.*Received"):
        keras_sn.SNModel.from_model(keras.Sequential([L.Dense(2)]))


def test_a_batch_of_another_shape_is_refused_before_training():
    model = keras_sn.SNModel.from_model(_plain(), policy="recompute")
    model.compile("adam", "mse", jit_compile=False)
    before = _weights(model)
    with pytest.raises(ValueError, match=r"expected shape=\(None, 8\), found shape=\(None, 9\)"):
        model.fit(np.ones((4, 9)), np.ones((4, 2)), verbose=0)
    for a, b in zip(before, _weights(model), strict=True):
        np.testing.assert_array_equal(a, b)


def test_variables_that_no_layer_owns_are_refused():
    class Making(L.Layer):
        def call(self, x):
            return x + tf.Variable(1.0)

    counter = keras.Variable(0.0, trainable=False)

    class Foreign(L.Layer):
        def call(self, x):
            counter.assign_add(1.0)
            return x

    for layer, message in ((Making(), r"makes a variable inside `call\(\)`"), (Foreign(), "does not own")):
        inputs = keras.Input((8,))
        model = keras_sn.SNModel(inputs, L.Dense(2)(layer(inputs)), policy="recompute")
        model.compile("sgd", "mse", jit_compile=False)
        with pytest.raises(UnsupportedModelError, match=message):
            model.fit(X, Y, batch_size=4, verbose=0)


def test_an_unknown_batch_size_is_refused_with_what_to_do():
    model = keras_sn.SNModel.from_model(_plain(), policy="recompute")

    @tf.function(input_signature=[tf.TensorSpec((None, 8))])
    def step(x):
        return model(x, training=True)

    with pytest.raises(Exception, match="build_plan"):  # autograph gives it another type
        step(X)
    model.build_plan(4)
    step(X)


@pytest.mark.parametrize("eager", [False, True])
def test_a_step_that_fails_in_its_backward_pass(eager):
    """Statistics and seeds stay as they were; so do weights, unless those of later layers are updated before."""

    class FailingGradient(L.Layer):
        """Runs out of memory in the backward pass of the third step."""

        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.supports_jit = False

        def call(self, x):
            @tf.custom_gradient
            def through(x):
                def gradient(upstream):
                    def fail(g):
                        FailingGradient.steps += 1
                        if FailingGradient.steps == 3:
                            raise MemoryError("injected")
                        return g

                    return tf.ensure_shape(tf.numpy_function(fail, [upstream], tf.float32), upstream.shape)

                return tf.identity(x), gradient

            return through(x)

    FailingGradient.steps = 0
    inputs = keras.Input((8,))
    x = L.BatchNormalization()(L.Dense(8)(inputs))
    x = L.Dropout(0.5)(L.Dense(8, activation="relu")(FailingGradient()(x)))
    model = keras_sn.SNModel(inputs, L.Dense(2)(x), policy="recompute")
    model.compile("adam", "mse", run_eagerly=eager, jit_compile=False)
    model.train_on_batch(X[:4], Y[:4])
    model.train_on_batch(X[4:8], Y[4:8])
    before = _weights(model) if eager else [v.numpy() for v in model.non_trainable_variables]
    with pytest.raises((tf.errors.OpError, MemoryError)):
        model.train_on_batch(X[8:], Y[8:])
    after = _weights(model) if eager else [v.numpy() for v in model.non_trainable_variables]
    for a, b in zip(before, after, strict=True):
        np.testing.assert_array_equal(a, b)
    model.train_on_batch(X[8:], Y[8:])  # and the next step works


def test_other_backends_are_refused():
    import os
    import subprocess
    import sys

    code = "import keras_sn"
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"KERAS_BACKEND": "numpy"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode != 0
    assert "Received: KERAS_BACKEND=numpy" in run.stderr


@pytest.mark.parametrize("run_eagerly", [False, True])
def test_random_numbers_of_tensorflow_are_refused_where_they_would_be_drawn_again(run_eagerly):
    inputs = keras.Input((8,))
    noisy = L.Lambda(lambda x: x * tf.random.uniform((8,)), name="noisy")(L.Dense(8)(inputs))
    plain = keras.Model(inputs, L.Dense(2)(noisy))
    model = keras_sn.SNModel.from_model(plain, policy={"*": "recompute"})
    model.compile("sgd", "mse", run_eagerly=run_eagerly, jit_compile=False)
    with pytest.raises(UnsupportedModelError, match=r"'noisy' draws random numbers.*Received: operation 'RandomUniform'"):
        model.fit(X, Y, verbose=0)
    kept = keras_sn.SNModel.from_model(plain, policy={"*": "keep"})
    kept.compile("sgd", "mse", run_eagerly=run_eagerly, jit_compile=False)
    kept.fit(X, Y, verbose=0)


@pytest.mark.parametrize("train", ["fit", "train_on_batch"])
@pytest.mark.parametrize(
    ("has_gpu", "undivided_bytes", "advice"),
    [(False, None, "Give a smaller"), (True, 1, "cuda_malloc_async"), (True, None, "XLA's tuning of convolutions takes memory")],
)
def test_out_of_memory_says_what_was_planned(monkeypatch, train, has_gpu, undivided_bytes, advice):
    class Full(L.Layer):
        def call(self, x):
            return tf.numpy_function(self.fail, [x], x.dtype)

        def fail(self, x):
            raise tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor")

        def compute_output_shape(self, shape):
            return shape

    inputs = keras.Input((4,))
    model = keras_sn.SNModel(inputs, L.Dense(1)(Full()(inputs)), memory_budget="1GiB")
    model.compile("sgd", "mse", jit_compile=False, run_eagerly=True)
    model.build_plan(2)
    monkeypatch.setattr(device, "has_gpu", lambda: has_gpu)
    monkeypatch.setattr(device, "undivided_bytes", lambda: undivided_bytes)
    monkeypatch.setattr(device, "host_limit_bytes", lambda: 0)
    with pytest.raises(tf.errors.ResourceExhaustedError) as caught:
        getattr(model, train)(np.ones((2, 4), "float32"), np.ones((2, 1), "float32"))
    assert "keras_sn planned" in caught.value.__notes__[0]
    assert advice in caught.value.__notes__[0]


def _chain(memory_budget):
    inputs = x = keras.Input((256,))
    for i in range(12):
        x = L.Dense(256, activation="tanh", name=f"wide_{i}")(x)
    model = keras_sn.SNModel(inputs, L.Dense(2)(x), memory_budget=memory_budget)
    model.compile("sgd", "mse", jit_compile=False)
    return model.build_plan(4096)


def test_a_whole_device_keeps_room_for_pieces(monkeypatch):
    """TensorFlow's allocator gives each block out in one piece, and what is free lies in several."""
    plain = _chain("10GiB").plain_peak_bytes
    budget = int(0.9 * plain)
    tight = _chain(budget)
    monkeypatch.setattr(planning.device, "undivided_bytes", lambda: budget)
    roomy = _chain(budget)
    assert roomy.planned_peak_bytes <= budget / planning.PIECES < tight.planned_peak_bytes <= budget
    monkeypatch.setattr(planning.device, "undivided_bytes", lambda: 2 * budget)
    assert _chain(budget).planned_peak_bytes == tight.planned_peak_bytes


def test_plain_keras_needs_no_room_for_pieces(monkeypatch):
    plain = _chain("10GiB").plain_peak_bytes
    monkeypatch.setattr(planning.device, "undivided_bytes", lambda: int(1.1 * plain))
    assert _chain(int(1.1 * plain)).is_plain


def test_what_fits_without_room_for_pieces_is_still_planned(monkeypatch):
    with pytest.raises(BudgetError) as caught:
        _chain("20MiB")
    smallest = int(re.search(r"smallest found needs ([\d,]+) bytes", str(caught.value))[1].replace(",", ""))
    monkeypatch.setattr(planning.device, "undivided_bytes", lambda: smallest)
    assert _chain(smallest).planned_peak_bytes <= smallest
