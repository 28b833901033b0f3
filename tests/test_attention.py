"""Attention is cut inside like a user's composite layer, and its sums of gradients round as Keras'."""

from dataclasses import replace

import keras
import numpy as np
import pytest
from keras import layers as L
from keras import ops
from parity import MODES, assert_equal, rewriting_off, small_tensors_leave
from trained import trained_state

import keras_sn
from keras_sn import region_library, regions
from keras_sn.bodies import make_bodies
from keras_sn.composites import may_be_opened
from keras_sn.plan import DEVICE, Region, Saved
from keras_sn.policies import region as region_of
from keras_sn.trace import trace

rewriting_off()
WIDTH, LENGTH, BATCH = 8, 6, 4
PROJECTIONS = ["key", "query", "value"]
"""In the order in which they stand: the gradient of the value is there first, that of the key last."""


def _attention(name: str, **settings) -> keras.Layer:
    return L.MultiHeadAttention(2, 4, name=name, **settings)


def _grouped(name: str, **settings) -> keras.Layer:
    return L.GroupQueryAttention(4, 4, 2, name=name, **settings)


class OwnAttention(L.MultiHeadAttention):
    """Attention of a user's, which scales otherwise."""

    def _compute_attention(self, query, key, value, *args, **kwargs):
        return super()._compute_attention(ops.multiply(query, 2.0), key, value, *args, **kwargs)


def _model(attend, *, normalize_first: bool = True, blocks: int = 2, length: int = LENGTH, width: int = WIDTH) -> keras.Model:
    """Blocks with residuals. `attend(tensor, memory, mask, name)`: `memory` and `mask` come from outside."""
    x, memory = keras.Input((length, width), name="x"), keras.Input((length, width), name="memory")
    mask = keras.Input((length, length), dtype="bool", name="mask")
    y, keys = L.Dense(width, name="stem")(x), L.Dense(width, name="keys")(memory)
    for place in range(blocks):
        if normalize_first:
            y = y + attend(L.LayerNormalization(name=f"norm_{place}")(y), keys, mask, f"attention_{place}")
        else:
            y = L.LayerNormalization(name=f"norm_{place}")(y + attend(y, keys, mask, f"attention_{place}"))
    return keras.Model({"x": x, "memory": memory, "mask": mask}, L.Dense(1, dtype="float32", name="head")(y))


def _to_itself(layer, *, normalize_first: bool = True, call: dict | None = None, **settings):
    return lambda: _model(
        lambda y, memory, mask, name: layer(name, **settings)(y, y, **(call or {})), normalize_first=normalize_first
    )


def _mixed() -> keras.Model:
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        return _to_itself(_attention, dropout=0.1, seed=1)()
    finally:
        keras.config.set_dtype_policy("float32")


def _across(blocks: int = 1):
    return lambda: _model(lambda y, memory, mask, name: _attention(name, dropout=0.1, seed=1)(y, memory), blocks=blocks)


def _masked(layer, **settings):
    return lambda: _model(lambda y, memory, mask, name: layer(name, **settings)(y, y, attention_mask=mask))


CASES = {
    "self": _to_itself(_attention),
    "residual of what it reads": _to_itself(_attention, normalize_first=False),
    "dropout": _to_itself(_attention, dropout=0.2, seed=1),
    "dropout, residual of what it reads": _to_itself(_attention, normalize_first=False, dropout=0.2, seed=1),
    "gate": _to_itself(_attention, normalize_first=False, use_gate=True),
    "causal": _to_itself(_attention, call={"use_causal_mask": True}),
    "mask": _masked(_attention),
    "mask and dropout": _masked(_attention, dropout=0.2, seed=1),
    "across": _across(),
    "grouped": _to_itself(_grouped, normalize_first=False),
    "grouped, mask and dropout": _masked(_grouped, dropout=0.2, seed=1),
    "own": _to_itself(lambda name, **settings: OwnAttention(2, 4, name=name, **settings)),
    "scores that nobody reads": lambda: _model(
        lambda y, memory, mask, name: _attention(name)(y, y, return_attention_scores=True)[0]
    ),
    "mixed precision": _mixed,
}
POLICIES = {
    "recompute": {"*": "recompute"},
    "cut between": {"*key": "recompute", "*value": "recompute", "*attention_output": "recompute", "*": "keep"},
    "offload": {"*query": "recompute", "*": "offload"},
}


def _names(model: keras.Model) -> list[str]:
    return [call.name for call in trace(model, BATCH).calls]


def _trained(build, mode: str, **settings):
    """What two epochs of two steps change, and the model."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = build()
    if settings:
        model = keras_sn.SNModel.from_model(model, host_budget="1GiB", **settings)
    model.compile(keras.optimizers.Adam(1e-2), "mse", **MODES[mode])
    model.optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
    rng = np.random.default_rng(0)
    x = {name: rng.normal(size=(BATCH, LENGTH, WIDTH)).astype("float32") for name in ("x", "memory")}
    x["mask"] = rng.random((BATCH, LENGTH, LENGTH)) < 0.8
    y = rng.normal(size=(BATCH, LENGTH, 1)).astype("float32")
    with small_tensors_leave():
        return trained_state(model, model.fit(x, y, batch_size=BATCH // 2, epochs=2, shuffle=False, verbose=0)), model


def _parity_cases():
    in_ci = {
        ("residual of what it reads", "graph"),
        ("mask and dropout", "graph"),
        ("grouped", "eager"),
        ("mixed precision", "graph"),
    }
    for name in CASES:
        for mode in ("eager", "graph"):
            yield pytest.param(name, mode, marks=[] if (name, mode) in in_ci else pytest.mark.full)


@pytest.mark.parametrize(("name", "mode"), _parity_cases())
def test_it_is_cut_and_gives_equal_numbers(name, mode):
    plain = _trained(CASES[name], mode)[0]
    for policy in POLICIES.values():
        trained, model = _trained(CASES[name], mode, policy=policy)
        assert any(layer.startswith("attention_0/") for region in model.plan.regions for layer in region.layers)
        assert_equal(trained, plain, exact=True)


@pytest.mark.parametrize("mode", [pytest.param("eager", marks=pytest.mark.full), "graph"])
def test_a_region_for_each_call_gives_equal_numbers(mode, monkeypatch):
    monkeypatch.setattr("keras_sn.policies.best_cuts", _each_alone)
    build = CASES["dropout, residual of what it reads"]
    trained, model = _trained(build, mode, policy={"*": "recompute"})
    assert all(len(region.layers) == 1 for region in model.plan.regions)
    assert_equal(trained, _trained(build, mode)[0], exact=True)


def _each_alone(graph, positions, action):
    return [region_of(graph, [graph.layers[position].name], "recompute") for position in positions]


@pytest.mark.parametrize("saved", PROJECTIONS)
@pytest.mark.parametrize("mode", ["eager", pytest.param("graph", marks=pytest.mark.full)])
def test_what_a_region_saves_does_not_change_the_order(mode, saved, monkeypatch):
    """The path to a saved tensor is longer for the tape than that to one that is made again."""

    def one_region(graph, positions, action):
        one = region_of(graph, [graph.layers[position].name for position in positions], "recompute")
        also = [tensor for tensor in graph.tensors if tensor.endswith(f"/{saved}")]
        return [replace(one, saved=(*one.saved, *(Saved(tensor, DEVICE, nbytes=graph.nbytes(tensor)) for tensor in also)))]

    monkeypatch.setattr("keras_sn.policies.best_cuts", one_region)
    for name in ("residual of what it reads", "dropout"):
        trained, model = _trained(CASES[name], mode, policy={"*": "recompute"})
        assert any(one.tensor.endswith(saved) for one in model.plan.regions[0].saved)
        assert_equal(trained, _trained(CASES[name], mode)[0], exact=True)


# --- the order of gradients


def test_projections_stand_in_the_order_in_which_keras_adds_their_gradients():
    model = _to_itself(_attention)()
    traced = trace(model, BATCH)
    assert traced.in_turn == {"norm_0", "norm_1"}
    first = [call.name for call in traced.calls if call.name.startswith("attention_0/")]
    assert first == [f"attention_0/{name}" for name in (*PROJECTIONS, "dot_product_attention", "attention_output")]


def test_projections_keep_their_order_where_that_of_other_calls_changes():
    x = keras.Input((LENGTH, 2 * WIDTH), name="x")
    y = L.Dense(2 * WIDTH, name="stem")(x)
    model = keras.Model(x, y + L.MultiHeadAttention(2, WIDTH, dropout=0.1, name="attention")(y, y))
    names = [call.name.rpartition("/")[2] for call in trace(model, BATCH).calls]
    assert names.index("value") > names.index("einsum")  # so fewer bytes are alive at once
    assert [name for name in names if name in PROJECTIONS] == ["query", "key", "value"]


def test_a_reader_that_adds_up_several_gradients_keeps_it_whole():
    class Twice(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense, self.norm = L.Dense(WIDTH, name="dense"), L.LayerNormalization(name="norm")

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build(shape)

        def call(self, x):
            return self.dense(x) + self.norm(x) * ops.sin(x)

    class Once(Twice):
        def call(self, x):
            return self.norm(self.dense(x) + ops.cos(x) * ops.sin(x))

    x = keras.Input((LENGTH, WIDTH), name="x")
    y = L.Dense(WIDTH, name="stem")(x)
    assert _names(keras.Model(x, Twice(name="layer")(y))) == ["stem", "layer"]
    assert "layer/norm" in _names(keras.Model(x, Once(name="layer")(y)))


def test_other_readers_must_be_sure_to_come_first():
    x = keras.Input((LENGTH, WIDTH), name="x")
    y = L.Dense(WIDTH, name="stem")(x)

    def names(outputs):
        return _names(keras.Model(x, outputs))

    z = _attention("attention")(y, y)
    assert "attention/query" in names(L.Add()([z, y]))
    assert "attention/query" in names(y + L.Dropout(0.5)(z))
    assert "attention" in names([z, y])
    assert "attention" in names(z + L.Dense(WIDTH)(y))
    assert "attention" in names(L.Dense(1)(L.Concatenate()([z, y])))
    assert "attention" in names(L.Add()([z, y, L.Dense(WIDTH)(x)]))


def test_scores_that_somebody_reads_keep_it_whole():
    x = keras.Input((LENGTH, WIDTH), name="x")
    y = L.Dense(WIDTH, name="stem")(x)
    z, scores = _attention("attention")(y, y, return_attention_scores=True)
    assert _names(keras.Model(x, [z, scores]))[1] == "attention"
    assert _names(keras.Model(x, z))[1] == "attention/query"


def test_many_layers_that_attend_to_one_memory_stay_whole():
    assert "attention_0/query" in _names(_across(1)())
    assert "attention_0" in _names(_across(2)())


def test_equal_blocks_share_functions():
    x = keras.Input((LENGTH, WIDTH), name="x")
    y = x
    for place in range(4):
        y = L.Dense(WIDTH, name=f"before_{place}")(y)
        y = y + _attention(f"attention_{place}")(y, y)
    traced = trace(keras.Model(x, y), BATCH)
    blocks = [[c.name for c in traced.calls if c.name.startswith(f"attention_{place}/")] for place in range(4)]
    assert all(blocks)
    library = region_library.RegionLibrary()
    for body in make_bodies(traced, [Region(tuple(names)) for names in blocks], None):
        library.function_for(body, regions.FUNCTION, jit=False, inline=False)
    assert len(library) == 1


# --- what stays whole


def test_masks_that_reach_it_keep_it_whole():
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    y = L.Embedding(10, WIDTH, mask_zero=True, name="embedding")(tokens)
    assert _names(keras.Model(tokens, _attention("attention")(y, y))) == ["embedding", "attention"]


def test_a_mask_inside_ends_there():
    x, mask = keras.Input((LENGTH, WIDTH), name="x"), keras.Input((LENGTH, LENGTH), dtype="bool", name="mask")
    y = x
    for place in range(2):
        y = L.Dense(WIDTH)(y)
        y = _attention(f"attention_{place}", dropout=0.1)(y, y, attention_mask=mask)
    assert {"attention_0/query", "attention_1/query"} <= set(_names(keras.Model([x, mask], y)))


class OwnCall(L.MultiHeadAttention):
    def __call__(self, *args, **kwargs):
        return super().__call__(*args, **kwargs)


def test_changed_layers_stay_whole():
    def built(layer):
        layer.build((None, LENGTH, WIDTH), (None, LENGTH, WIDTH))
        return layer

    assert may_be_opened(built(_attention("attention")))
    assert may_be_opened(built(_grouped("grouped")))
    assert not may_be_opened(built(OwnCall(2, 4)))
    assert not may_be_opened(built(_attention("regularized", activity_regularizer="l2")))
    assert not may_be_opened(L.Attention())
    with_lora = built(_attention("attention"))
    with_lora._query_dense.enable_lora(2)
    assert not may_be_opened(with_lora)
    quantized = built(_attention("attention"))
    quantized._query_dense.quantize("int8")
    assert not may_be_opened(quantized)


# --- plans


def _plan(model: keras.Model, memory_budget: int | None, batch: int = 64):
    planned = keras_sn.SNModel.from_model(model, **({"memory_budget": memory_budget} if memory_budget else {"policy": "none"}))
    planned.compile("adam", "mse", jit_compile=True)
    return planned.build_plan(batch)


def test_a_tight_budget_saves_projections_and_makes_scores_again(monkeypatch):
    model = _model(lambda y, memory, mask, name: L.MultiHeadAttention(8, 16, name=name)(y, y), blocks=6, length=256, width=128)
    plain = _plan(model, None)
    budget = plain.reserved_bytes + (plain.plain_peak_bytes - plain.reserved_bytes) // 3
    plan = _plan(model, budget)
    assert plan.planned_peak_bytes <= budget
    saved = {one.tensor.rpartition("/")[2] for region in plan.regions for one in region.saved}
    assert set(PROJECTIONS) <= saved
    monkeypatch.setattr("keras_sn.composites._ATTENTION", ())
    whole = _plan(model, budget)
    assert not any("/" in name for region in whole.regions for name in region.layers)
    assert abs(whole.plain_peak_bytes - plain.plain_peak_bytes) < 0.02 * plain.plain_peak_bytes
    assert plan.planned_seconds - plan.plain_seconds < 0.8 * (whole.planned_seconds - whole.plain_seconds)
