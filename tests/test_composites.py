"""Composite layers are cut inside where that is sure to change nothing, and stay whole elsewhere."""

import functools
import random
import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L
from keras import ops
from parity import MODES, assert_equal, rewriting_off
from trained import trained_state

import keras_sn
from keras_sn import region_library, regions
from keras_sn.bodies import make_bodies
from keras_sn.composites import may_be_opened, open_call
from keras_sn.keras_internals import nodes_in_execution_order
from keras_sn.plan import Region
from keras_sn.policies import actions_by_pattern
from keras_sn.trace import trace
from keras_sn.verification import _first_unsteady

rewriting_off()
_register = keras.saving.register_keras_serializable("composites")
WIDTH, LENGTH, BATCH = 8, 6, 4


@_register
class Mlp(L.Layer):
    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.up = L.Dense(2 * width, activation="gelu", dtype=self.dtype_policy, name="up")
        self.dropout = L.Dropout(0.2, seed=5, dtype=self.dtype_policy, name="dropout")
        self.down = L.Dense(width, dtype=self.dtype_policy, name="down")

    def build(self, shape):
        self.up.build(shape)
        self.down.build((*shape[:-1], 2 * self.width))

    def call(self, x):
        return self.dropout(self.down(self.dropout(self.up(x))))

    def get_config(self):
        return super().get_config() | {"width": self.width}


@_register
class Block(L.Layer):
    """A transformer block, with a composite layer and weights of its own that operators use."""

    def __init__(self, width=WIDTH, **kwargs):
        super().__init__(**kwargs)
        self.width = width
        self.norm = L.LayerNormalization(dtype=self.dtype_policy, name="norm")
        self.attention = L.MultiHeadAttention(2, width // 2, dropout=0.1, seed=3, dtype=self.dtype_policy, name="attention")
        self.mlp = Mlp(width, dtype=self.dtype_policy, name="mlp")

    def build(self, shape):
        self.norm.build(shape)
        self.attention.build(shape, shape)
        self.mlp.build(shape)
        self.shift = self.add_weight(shape=(self.width,), initializer="ones", name="shift")
        self.scale = self.add_weight(shape=(self.width,), initializer="ones", name="scale")

    def call(self, x, padding_mask=None, training=None):
        y = self.norm(x)
        if padding_mask is not None:
            padding_mask = ops.expand_dims(padding_mask, axis=1)
        x = x + self.attention(y, y, attention_mask=padding_mask, training=training)
        return x + self.mlp(x) * self.scale + self.shift

    def get_config(self):
        return super().get_config() | {"width": self.width}


@_register
class Encoder(L.Layer):
    """Blocks, all in one layer."""

    def __init__(self, count=3, **kwargs):
        super().__init__(**kwargs)
        self.count = count
        self.blocks = [Block(dtype=self.dtype_policy, name=f"block_{place}") for place in range(count)]

    def build(self, shape):
        for block in self.blocks:
            block.build(shape)

    def call(self, x, padding_mask=None):
        for block in self.blocks:
            x = block(x, padding_mask=padding_mask)
        return x

    def get_config(self):
        return super().get_config() | {"count": self.count}


@_register
class Split(L.Layer):
    """Several inputs, by place, in a list, and by keyword; several outputs, in a dict."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.left, self.right = L.Dense(WIDTH, name="left"), L.Dense(WIDTH, name="right")

    def build(self, _):
        self.left.build((None, LENGTH, WIDTH))
        self.right.build((None, LENGTH, WIDTH))

    def call(self, pair, *, gate, add_gate=False):
        a, b = self.left(pair[0]), self.right(pair[1])
        return {"sum": a + b if add_gate else a - b, "product": ops.multiply(a, ops.sigmoid(gate)), "gate": gate}


def _encoder(dtype=None, count=2) -> keras.Model:
    x, mask = keras.Input((LENGTH, WIDTH), name="x"), keras.Input((LENGTH,), name="mask", dtype="bool")
    y = Encoder(count, dtype=dtype, name="encoder")(L.Dense(WIDTH, dtype=dtype, name="stem")(x), padding_mask=mask)
    return keras.Model({"x": x, "mask": mask}, L.Dense(1, dtype="float32", name="head")(y))


def _shared() -> keras.Model:
    """A block that is called twice, beside a layer with several inputs and outputs that is called twice."""
    x = keras.Input((LENGTH, WIDTH), name="x")
    stem, left, gate = (L.Dense(WIDTH, name=name)(x) for name in ("stem", "left", "gate"))
    block, split = Block(name="block"), Split(name="split")
    first = split([left, block(block(stem))], gate=gate, add_gate=True)
    second = split([first["sum"], first["gate"]], gate=first["product"])
    return keras.Model({"x": x}, L.Dense(1, name="head")(L.Concatenate()(list(second.values()))))


def _data(model: keras.Model, batch: int = BATCH) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    x = {"x": rng.normal(size=(batch, LENGTH, WIDTH)).astype("float32"), "mask": rng.random((batch, LENGTH)) < 0.8}
    return {tensor.name: x[tensor.name] for tensor in model.inputs}, rng.normal(size=(batch, LENGTH, 1)).astype("float32")


def _trained(build, mode: str, **settings):
    """What two epochs of two steps change, and the model."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = build()
    if settings:
        model = keras_sn.SNModel.from_model(model, **settings)
    model.compile(keras.optimizers.Adam(1e-2), "mse", **MODES[mode])
    model.optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
    x, y = _data(model)
    return trained_state(model, model.fit(x, y, batch_size=BATCH // 2, epochs=2, shuffle=False, verbose=0)), model


def _half(build, batch: int = 64) -> tuple[int, int]:
    """A budget for half of what plain Keras holds, and the batch that it is for."""
    model = keras_sn.SNModel.from_model(build(), policy="none")
    model.compile("adam", "mse", jit_compile=False)
    plan = model.build_plan(batch)
    return plan.reserved_bytes + (plan.plain_peak_bytes - plan.reserved_bytes) // 2, batch


def _names(model: keras.Model) -> list[str]:
    return [call.name for call in trace(model, 2).calls]


# --- what is cut


def test_a_composite_layer_becomes_the_calls_inside():
    x = keras.Input((LENGTH, WIDTH), name="x")
    model = keras.Model(x, Block(name="block")(x))
    scores = ("multiply", "einsum", "softmax", "dropout", "einsum#2", "attention_output")
    attention = [f"block/attention/{name}" for name in ("query", "key", "value", *scores)]
    mlp = [f"block/mlp/{name}" for name in ("up", "up/gelu", "dropout", "down", "dropout#2")]
    block = ["block/norm", *attention, "block/add", *mlp, "block/multiply", "block/add#2", "block/add#3"]
    assert [re.sub(r"(softmax|dropout)_\d+", r"\1", name) for name in _names(model)] == block
    traced = trace(model, 2)
    assert traced.graph.outputs == ("block/add#3",)
    weights = sum(layer.weight_bytes for layer in traced.graph.layers)
    assert weights == 4 * sum(int(np.prod(v.shape)) for v in model.trainable_variables)


def test_tracing_leaves_the_model_as_it_was():
    model = _encoder()
    encoder = model.get_layer("encoder")
    layers = encoder._flatten_layers()
    before = [dict(vars(layer)) for layer in layers]
    nodes = [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in layers]
    values = [np.asarray(variable.value) for variable in model.variables]
    L.Add()
    name = L.Add().name
    trace(model, 2)
    assert [(len(layer._inbound_nodes), len(layer._outbound_nodes)) for layer in layers] == nodes
    assert [dict(vars(layer)) for layer in layers] == before
    assert all(np.array_equal(variable.value, value) for variable, value in zip(model.variables, values, strict=True))
    assert int(L.Add().name.rpartition("_")[2]) == int(name.rpartition("_")[2] or 0) + 1
    assert _names(model) == _names(model)


def test_equal_blocks_share_functions_and_open_axes_are_open():
    x = keras.Input((None, WIDTH), name="x")
    model = keras.Model(x, Encoder(4, name="encoder")(x))
    traced = trace(model, 2, [(2, 5, WIDTH)])
    assert all(None not in spec.shape for spec in traced.graph.tensors.values())
    blocks = [tuple(c.name for c in traced.calls if c.name.startswith(f"encoder/block_{place}/")) for place in range(4)]
    bodies = make_bodies(traced, [Region(names) for names in blocks], None)
    library = region_library.RegionLibrary()
    for body in bodies:
        library.function_for(body, regions.FUNCTION, jit=False, inline=False)
    assert len(library) == 1


def test_the_bytes_of_reshaped_windows_are_right():
    @_register
    class Windows(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inside, self.after = L.Dense(WIDTH, name="inside"), L.Dense(WIDTH, name="after")

        def build(self, _):
            self.inside.build((None, 2, WIDTH))
            self.after.build((None, LENGTH, WIDTH))

        def call(self, x):
            x = self.inside(ops.reshape(x, (-1, 2, WIDTH)))
            return self.after(ops.reshape(x, (-1, LENGTH, WIDTH)))

    x = keras.Input((LENGTH, WIDTH), name="x")
    graph = trace(keras.Model(x, Windows(name="windows")(x)), 4).graph
    assert graph.tensors["windows/inside"].shape == (4 * LENGTH // 2, 2, WIDTH)
    assert graph.tensors["windows/after"].shape == (4, LENGTH, WIDTH)


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.full), "graph"])
def test_all_recomputed_gives_equal_numbers(mode):
    trained, model = _trained(_encoder, mode, policy={"*": "recompute"})
    assert any("/block_1/mlp/down" in name for region in model.plan.regions for name in region.layers)
    assert_equal(trained, _trained(_encoder, mode)[0], exact=True)


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.full), "graph"])
def test_half_of_the_memory_gives_equal_numbers(mode, monkeypatch):
    budget, batch = _half(_encoder)
    keras.utils.set_random_seed(3)
    model = keras_sn.SNModel.from_model(_encoder(), memory_budget=budget)
    model.compile(keras.optimizers.Adam(1e-2), "mse", **MODES[mode])
    plan = model.build_plan(batch)
    assert plan.regions
    assert plan.planned_peak_bytes <= budget
    x, y = _data(model)
    trained = trained_state(model, model.fit(x, y, batch_size=BATCH // 2, epochs=2, shuffle=False, verbose=0))
    assert model.plan is plan
    assert_equal(trained, _trained(_encoder, mode)[0], exact=True)
    monkeypatch.setattr("keras_sn.trace.may_be_opened", lambda layer: False)
    whole = keras_sn.SNModel.from_model(_encoder(), memory_budget=budget)
    whole.compile("adam", "mse", jit_compile=False)
    with pytest.raises(keras_sn.BudgetError):
        whole.build_plan(batch)


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.full)])
def test_shared_layers_and_several_inputs_and_outputs(mode):
    trained, model = _trained(_shared, mode, policy={"*": "recompute"})
    names = [name for region in model.plan.regions for name in region.layers]
    assert {"block/mlp/up", "block#2/mlp/up", "split/left", "split#2/right", "split#2/subtract"} <= set(names)
    assert_equal(trained, _trained(_shared, mode)[0], exact=True)


def _mixed() -> keras.Model:
    """A model that casts its variables, so that a block does whose own weights are used by operators."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return _encoder("mixed_bfloat16", count=1)
    finally:
        keras.config.set_dtype_policy("float32")


@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.full)])
def test_mixed_precision(mode):
    trained, model = _trained(_mixed, mode, policy={"*": "recompute"}, verify="first_step")
    calls = trace(model, BATCH).calls
    assert "encoder/block_0/multiply" in {call.name for call in calls}
    assert _first_unsteady(model, calls, _data(model)[0], 1e-3) is None
    assert_equal(trained, _trained(_mixed, mode)[0], exact=True)


def test_a_block_that_casts_its_own_weights_in_a_model_that_does_not_stays_whole():
    assert _names(_encoder("mixed_bfloat16", count=1)) == ["stem", "encoder/block_0", "head"]


def test_a_composite_that_casts_its_inputs():
    x = keras.Input((LENGTH, WIDTH), name="x")
    mlp = Mlp(WIDTH, dtype="float64", name="mlp")
    model = keras.Model(x, mlp(x))
    assert _names(model)[0] == "mlp/cast"
    assert trace(model, 2).graph.tensors["mlp/cast"].dtype == "float64"


@pytest.mark.full
def test_a_loaded_model_gives_equal_numbers(tmp_path):
    keras.utils.set_random_seed(3)
    keras_sn.SNModel.from_model(_encoder(), policy={"encoder": "recompute"}).save(tmp_path / "model.keras")

    def load():
        return keras.saving.load_model(tmp_path / "model.keras")

    def plain():
        model = load()
        return keras.Model(model.input, model.output)

    trained, model = _trained(load, "eager")
    assert any(name.startswith("encoder/block_1/") for region in model.plan.regions for name in region.layers)
    assert_equal(trained, _trained(plain, "eager")[0], exact=True)


PATTERNS = ["encoder", "encoder/*", "encoder*", "encoder/block_0", "block_0", "encoder/block_0/mlp", "mlp", "down"]


def test_a_policy_may_name_a_layer_that_is_cut():
    names = _names(_encoder())
    for pattern in PATTERNS:
        actions = actions_by_pattern(names, {pattern: "recompute", "*": "keep"})
        bare = pattern.strip("/*")
        expected = {name for name in names if bare in name.split("/") or name.startswith(f"{bare}/")}
        assert expected
        assert {name for name, action in actions.items() if action == "recompute"} == expected
    assert set(actions_by_pattern(["block#2/up", "block/up#2"], {"block": "recompute"}).values()) == {"recompute"}
    assert actions_by_pattern(["block#2/up", "block/up"], {"block#2": "recompute"}) == {
        "block#2/up": "recompute",
        "block/up": "keep",
    }


# --- what stays whole


class Whole(L.Layer):
    """Has a layer inside; what else it does is for those that derive from it."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = L.Dense(WIDTH, name="dense")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x)


class RawOperations(Whole):
    def call(self, x):
        return tf.sin(self.dense(x))


class ControlFlow(Whole):
    def call(self, x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: self.dense(x), lambda: x)


class ClosureFlow(Whole):
    def call(self, x):
        return ops.cond(ops.sum(x) > 0, lambda: self.dense(x), lambda: x)


class Comparing(Whole):
    """On symbolic tensors `==` is false; on tensors it compares."""

    def call(self, x):
        return ops.where(x == 0, 1.0, self.dense(x))


class ReadingShape(Whole):
    def call(self, x):
        return ops.reshape(self.dense(x), (ops.shape(x)[0], -1, WIDTH))


class SlicingByShape(Whole):
    """An open axis is None, and a slice to None is another one."""

    def call(self, x):
        return self.dense(x) + self.dense(x)[:, : ops.shape(x)[0]][:, :1]


class BranchingOnShape(Whole):
    def call(self, x):
        return self.dense(x) if ops.shape(x)[0] is None else x


class Computing(Whole):
    def call(self, x):
        return self.dense(x) + ops.ones((WIDTH,))


class WithToken(Whole):
    def build(self, shape):
        super().build(shape)
        self.token = self.add_weight(shape=(1, WIDTH), name="token")

    def call(self, x):
        return self.dense(x) + ops.tile(self.token, (LENGTH, 1))


class WithValue(WithToken):
    def call(self, x):
        return ops.add(self.dense(x), self.token.value)


class VariableFirst(WithToken):
    def call(self, x):
        return self.token * self.dense(x)


class WithUnused(WithToken):
    def call(self, x):
        return self.dense(x)


class HeldTensor(Whole):
    def build(self, shape):
        super().build(shape)
        self.row = ops.ones((WIDTH,))

    def call(self, x):
        return ops.add(self.dense(x), self.row)


class Counting(Whole):
    def build(self, shape):
        super().build(shape)
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="count")

    def call(self, x):
        self.count.assign_add(1)
        return self.dense(x)


class CountingInTensorFlow(Whole):
    def build(self, shape):
        super().build(shape)
        self.count = tf.Variable(0)

    def call(self, x):
        self.count.assign_add(1)
        return self.dense(x)


class Measuring(Whole):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.mean = keras.metrics.Mean(name="mean")

    def call(self, x):
        self.mean.update_state(x)
        return self.dense(x)


class Losing(Whole):
    def call(self, x):
        y = self.dense(x)
        self.add_loss(ops.sum(y))
        return y


class LosingAConstant(Whole):
    def call(self, x):
        self.add_loss(ops.ones(()))
        return self.dense(x)


class Drawing(Whole):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.generator = keras.random.SeedGenerator(1)

    def call(self, x):
        return self.dense(x) + keras.random.normal((WIDTH,), seed=self.generator)


class DrawingInPython(Whole):
    def call(self, x):
        return self.dense(x) * random.random()


class DrawingInNumPy(Whole):
    def call(self, x):
        return self.dense(x) * float(np.random.rand())


class Remembering(Whole):
    calls = 0

    def call(self, x):
        self.calls += 1
        return self.dense(x)


class RememberingTensors(Whole):
    def call(self, x):
        self.last = self.dense(x)
        return self.last


class Appending(Whole):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.seen = []

    def call(self, x):
        self.seen.append(1)
        return self.dense(x)


class OwnMask(Whole):
    def compute_mask(self, inputs, previous_mask):
        return None


class WithMaskInside(Whole):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.masking = L.Masking(name="masking")

    def call(self, x):
        return self.dense(self.masking(x))


class OwnDunderCall(Whole):
    def __call__(self, x, **kwargs):
        return super().__call__(-x, **kwargs)


class NoXla(Whole):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.supports_jit = False


class OfDense(L.Dense):
    def __init__(self, **kwargs):
        super().__init__(WIDTH, **kwargs)
        self.dense = L.Dense(WIDTH, name="dense")

    def build(self, shape):
        super().build(shape)
        self.dense.build(shape)

    def call(self, x):
        return self.dense(super().call(x))


class Unread(Whole):
    """A layer is called for what it remembers alone."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = L.BatchNormalization(name="norm", trainable=False)

    def build(self, shape):
        super().build(shape)
        self.norm.build(shape)

    def call(self, x):
        self.norm(x)
        return self.dense(x)


class MakingLayers(Whole):
    def call(self, x):
        return L.ReLU()(self.dense(x))


class OtherShape(Whole):
    def call(self, x):
        return ops.expand_dims(self.dense(x)[:, 0], 1)

    def compute_output_shape(self, shape):
        return (*shape[:-1], WIDTH)


@tf.custom_gradient
def _halved(x):
    return tf.identity(x), lambda upstream: upstream / 2


class OwnGradient(Whole):
    def call(self, x):
        return _halved(self.dense(x))


class TiedInside(Whole):
    def call(self, x):
        return ops.matmul(self.dense(x), ops.transpose(self.dense.kernel))


class ReadingStatistics(Whole):
    """What a layer inside assigns must not be read before it or after it by mistake."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = L.BatchNormalization(name="norm")

    def build(self, shape):
        super().build(shape)
        self.norm.build(shape)

    def call(self, x):
        return ops.subtract(self.dense(self.norm(x)), self.norm.moving_mean)


class OwnSpec(Whole):
    """Says that it returns floats, and the layer around it believes it."""

    def call(self, x):
        return ops.cast(self.dense(x), "int32")

    def compute_output_shape(self, shape):
        return shape


class AroundOwnSpec(Whole):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.inside = OwnSpec(name="inside")

    def build(self, shape):
        super().build(shape)
        self.inside.build(shape)

    def call(self, x):
        y = self.inside(x)
        return self.dense(ops.cast(y, "float32") / (2 if y.dtype == "int32" else 3))


class IntegerDivision(Whole):
    """TensorFlow divides integers to float64, Keras to float32."""

    def call(self, x):
        return self.dense(x) + ops.cast(ops.cast(x, "int32") / 3, "float32")


WHOLE = [
    *(RawOperations, ControlFlow, ClosureFlow, Comparing, ReadingShape, SlicingByShape, BranchingOnShape, Computing, WithToken),
    *(WithValue, VariableFirst, WithUnused, HeldTensor, Counting, CountingInTensorFlow, Measuring, Losing, LosingAConstant),
    *(Drawing, DrawingInPython, DrawingInNumPy, Remembering, RememberingTensors, Appending, OwnMask, WithMaskInside),
    *(OwnDunderCall, NoXla, OfDense, Unread, MakingLayers, OtherShape, OwnGradient, TiedInside, ReadingStatistics, AroundOwnSpec),
]


@pytest.mark.parametrize("kind", WHOLE)
def test_it_stays_whole(kind):
    x = keras.Input((LENGTH, WIDTH), name="x")
    layer = kind(name="layer")
    model = keras.Model(x, layer(x))
    node = nodes_in_execution_order(model)[-1]

    def state():
        return random.getstate(), np.random.get_state()[1].tolist(), dict(vars(layer)), list(getattr(layer, "seen", []))

    before, values = state(), [np.asarray(variable) for variable in layer.variables]
    assert not may_be_opened(layer) or open_call(node, None) is None
    assert state() == before
    assert all(np.array_equal(variable, value) for variable, value in zip(layer.variables, values, strict=True))
    if isinstance(layer, CountingInTensorFlow):
        assert int(layer.count) == 0


def test_without_these_it_is_cut():
    x = keras.Input((LENGTH, WIDTH), name="x")
    assert _names(keras.Model(x, Whole(name="layer")(x))) == ["layer/dense"]
    assert _names(keras.Model(x, IntegerDivision(name="layer")(x)))[-1] == "layer/add"


class ManyReaders(Whole):
    """Sums of three gradients are rounded as they are grouped."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.query, self.key = L.Dense(WIDTH, name="query"), L.Dense(WIDTH, name="key")

    def build(self, shape):
        super().build(shape)
        self.query.build(shape)
        self.key.build(shape)

    def call(self, x):
        return self.dense(x) + self.query(x) * self.key(x)


@pytest.mark.parametrize("policy", [{"*": "recompute"}, {"*key": "recompute", "*dense": "offload", "*": "keep"}])
def test_three_readers_give_equal_numbers(policy):
    def build():
        x = keras.Input((LENGTH, WIDTH), name="x")
        return keras.Model({"x": x}, L.Dense(1, name="head")(ManyReaders(name="layer")(L.Dense(WIDTH, name="stem")(x))))

    trained, model = _trained(build, "eager", policy=policy)
    assert any("layer/query" in region.layers for region in model.plan.regions)
    assert_equal(trained, _trained(build, "eager")[0], exact=True)


class TwoReaders(Whole):
    def call(self, x):
        return x + self.dense(x)


def test_sums_of_more_than_two_gradients_are_only_divided_in_the_order_of_keras():
    x = keras.Input((LENGTH, WIDTH), name="x")
    y = L.ReLU(name="before")(x)
    inside = [f"layer/{name}" for name in ("key", "query", "dense", "multiply", "add")]  # as Keras adds their gradients up
    assert _names(keras.Model(x, ManyReaders(name="layer")(y))) == ["before", *inside]
    assert _names(keras.Model(x, [ManyReaders(name="layer")(y), y])) == ["before", "layer"]
    assert "layer" in _names(keras.Model(x, [ManyReaders(name="layer")(y), L.Dense(1)(y)]))
    assert _names(keras.Model(x, TwoReaders(name="layer")(y))) == ["before", "layer/dense", "layer/add"]
    assert _names(keras.Model(x, [TwoReaders(name="layer")(y), y])) == ["before", "layer"]
    assert _names(keras.Model(x, [Whole(name="layer")(y), y, ops.negative(y)]))[-1] == "layer/dense"
    nested = keras.Sequential([keras.Input((LENGTH, WIDTH)), TwoReaders(name="layer")], name="model")
    assert _names(keras.Model(x, [nested(y), y])) == ["before", "model/layer"]
    assert _names(keras.Model(x, nested(y))) == ["before", "model/layer/dense", "model/layer/add"]


@pytest.mark.parametrize("settings", [{"activity_regularizer": "l2"}, {"dtype": "mixed_bfloat16"}, {"autocast": False}])
def test_settings_of_the_layer_that_keep_it_whole(settings):
    x = keras.Input((LENGTH, WIDTH), name="x")
    block = Block(name="block", **settings)
    if "autocast" in settings:  # its own weights are not cast, and the regions' are
        model = keras.Model(x, block(x))
        model.dtype_policy = "mixed_bfloat16"
        assert _names(model) == ["block"]
        return
    assert _names(keras.Model(x, block(x))) == ["block"]


def test_built_in_layers_and_wrappers_stay_whole():
    layers = [L.MultiHeadAttention(2, 2), L.LSTM(3), L.Bidirectional(L.LSTM(3)), L.TimeDistributed(L.Dense(2))]
    assert not any(
        may_be_opened(layer) for layer in [*layers, keras_sn.layers.Recompute(Whole()), keras.Sequential(), L.Dense(2)]
    )
    assert may_be_opened(Whole())
    assert not may_be_opened(Whole(dtype=keras.dtype_policies.QuantizedDTypePolicy("int8", "float32")))


def test_a_rule_of_the_user_keeps_it_whole():
    class Ruled(Whole):
        pass

    keras_sn.register_rule(Ruled)(lambda layer, inputs, outputs: keras_sn.rules.LayerTraits())
    x = keras.Input((LENGTH, WIDTH), name="x")
    assert _names(keras.Model(x, Ruled(name="layer")(x))) == ["layer"]


@pytest.mark.parametrize("where", ["before", "around"])
def test_a_mask_that_reaches_it_keeps_it_whole(where):
    x = keras.Input((LENGTH, WIDTH), name="x")
    y = L.Masking(name="masking")(x)
    if where == "around":  # no symbolic tensor inside shows the mask
        inner = keras.Input((LENGTH, WIDTH))
        y = keras.Sequential([inner, Whole(name="layer")], name="model")(y)
    else:
        y = Whole(name="layer")(y)
    names = _names(keras.Model(x, y))
    assert any(name.endswith("layer") for name in names) or names[-1] == "model"
    assert not any(name.endswith("dense") for name in names)


class AddMask(Whole):
    def call(self, x, mask=None):
        y = self.dense(x)
        return y if mask is None else y * ops.cast(ops.expand_dims(mask, -1), y.dtype)


def test_masks_that_come_with_the_inputs_keep_it_whole():
    x = keras.Input((LENGTH, WIDTH), name="x")
    keras.utils.set_random_seed(3)
    plain = keras.Model(x, AddMask(name="layer")(x))
    model = keras_sn.SNModel.from_model(plain, policy={"*": "recompute"})
    model.compile("sgd", "mse", run_eagerly=True)
    data, mask = np.ones((2, LENGTH, WIDTH), "float32"), np.arange(2 * LENGTH).reshape(2, LENGTH) % 2 == 0
    assert np.array_equal(model(data, training=True), plain(data, training=True))
    assert model.plan.regions[0].layers == ("layer/dense",)
    assert np.array_equal(model(data, training=True, mask=mask), plain(data, training=True, mask=mask))
    assert model.plan.regions[0].layers == ("layer",)


class Borrowing(WithToken):
    """A layer inside reads, by a function, a weight that is not its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.borrower = L.Dense(WIDTH, activation=self.with_token, name="borrower")

    def build(self, shape):
        super().build(shape)
        self.borrower.build(shape)

    def with_token(self, x):
        return x + ops.convert_to_tensor(self.token)

    def call(self, x):
        return self.borrower(self.dense(x))


class BorrowingToo(Borrowing):
    def call(self, x):
        return ops.multiply(self.borrower(self.dense(x)), self.token)


class Closing(Whole):
    """Its layer holds a function that closes over another layer."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        other = self.dense
        self.borrower = L.Lambda(lambda x: x @ ops.convert_to_tensor(other.kernel), name="borrower")

    def call(self, x):
        return self.borrower(self.dense(x))


class Activated(Whole):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = L.Dense(WIDTH, activation=lambda x: keras.activations.gelu(x, approximate=True), name="first")
        self.second = L.Dense(WIDTH, activation=functools.partial(keras.activations.relu, negative_slope=0.1), name="second")

    def build(self, shape):
        super().build(shape)
        self.first.build(shape)
        self.second.build(shape)

    def call(self, x):
        return self.second(self.first(self.dense(x)))


def test_layers_inside_may_not_borrow_weights():
    def names(kind):
        x = keras.Input((LENGTH, WIDTH), name="x")
        return _names(keras.Model(x, kind(name="layer")(x)))

    assert names(Borrowing) == names(BorrowingToo) == names(Closing) == ["layer"]
    assert names(Activated) == ["layer/dense", "layer/first", "layer/second"]


class Frozen(Whole):
    """Calls a layer in another mode than its own."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm, self.dropout = L.BatchNormalization(name="norm"), L.Dropout(0.5, seed=2, name="dropout")

    def build(self, shape):
        super().build(shape)
        self.norm.build(shape)

    def call(self, x, training=None):
        return self.dropout(self.dense(self.norm(x, training=False)), training=training)


def test_a_mode_of_its_own_is_kept():
    def build():
        x = keras.Input((LENGTH, WIDTH), name="x")
        return keras.Model({"x": x}, L.Dense(1, name="head")(Frozen(name="layer")(x)))

    trained, model = _trained(build, "eager", policy={"*": "recompute"})
    assert "layer/norm" in {name for region in model.plan.regions for name in region.layers}
    assert_equal(trained, _trained(build, "eager")[0], exact=True)
