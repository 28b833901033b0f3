"""Layers that end with an activation such as gelu are cut before it; training rounds as in Keras, and other layers stay whole."""

import functools
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
from keras_sn.activation_rules import ACTIVATIONS
from keras_sn.activations_apart import _DIVIDED, apart
from keras_sn.bodies import make_bodies
from keras_sn.cost import ON_GPU
from keras_sn.plan import DEVICE, Region, Saved
from keras_sn.policies import region as region_of
from keras_sn.trace import trace

rewriting_off()
WIDTH, LENGTH, BATCH, WORDS = 8, 6, 4, 10
X = keras.Input((LENGTH, WIDTH), name="x")


class Kept(L.Layer):
    """Tells whether a mask came."""

    supports_masking = True

    def call(self, x, mask=None):
        return x if mask is None else x * ops.cast(ops.expand_dims(mask, -1), x.dtype)


def _dense() -> keras.Model:
    """With a mask, and a layer that is called twice."""
    tokens = keras.Input((LENGTH,), dtype="int32", name="tokens")
    x = L.Embedding(WORDS, WIDTH, mask_zero=True, name="embedding")(tokens)
    x = Kept(name="kept")(L.Dense(WIDTH, "gelu", name="first")(x))
    shared = L.Dense(WIDTH, "silu", use_bias=False, name="shared")
    x = shared(x) + shared(L.LayerNormalization(name="norm")(x))
    x = L.Dense(WIDTH, "softplus", name="gate")(x) * L.Dense(WIDTH, "gelu", name="up")(x)
    return keras.Model({"tokens": tokens}, L.Dense(1, "softplus", dtype="float32", name="head")(x))


def _einsum() -> keras.Model:
    x = keras.Input((LENGTH, WIDTH), name="x")
    y = L.EinsumDense("abc,cde->abde", (LENGTH, 2, 4), "gelu", bias_axes="de", name="apart")(x)
    y = L.Dropout(0.2, seed=1, name="dropout")(y)
    y = L.EinsumDense("abde,dec->abc", (LENGTH, WIDTH), "silu", name="together")(y)
    y = L.EinsumDense("abc,cd->abd", (LENGTH, WIDTH), "softplus", bias_axes="d", name="last")(y + x)
    return keras.Model({"x": x}, L.Dense(1, dtype="float32", name="head")(y))


def _convolutions() -> keras.Model:
    image = keras.Input((8, 8, 3), name="image")
    y = L.Conv2D(6, 3, 2, "same", activation="gelu", name="conv")(image)
    y = L.DepthwiseConv2D(3, padding="same", activation="silu", name="depthwise")(y)
    y = y + L.SeparableConv2D(6, 3, padding="same", activation="softplus", name="separable")(y)
    y = L.Conv2DTranspose(4, 2, 2, activation="mish", name="transposed")(y)
    y = L.Conv1D(4, 3, padding="causal", activation="silu", name="row")(L.Reshape((16, 16))(y))
    return keras.Model({"image": image}, L.Dense(1, dtype="float32", name="head")(y))


BUILD = {"dense": _dense, "einsum": _einsum, "convolutions": _convolutions}


def _build(name: str, dtype: str) -> keras.Model:
    keras.config.set_dtype_policy(dtype)
    try:
        return BUILD[name]()
    finally:
        keras.config.set_dtype_policy("float32")


def _data(model: keras.Model) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    x = {one.name: rng.normal(size=(BATCH, *one.shape[1:])).astype("float32") for one in model.inputs}
    x |= {"tokens": rng.integers(0, WORDS, (BATCH, LENGTH))} if "tokens" in x else {}
    return x, rng.normal(size=(BATCH, *model.output.shape[1:])).astype("float32")


def _trained(name: str, dtype: str, mode: str, **settings):
    """What two epochs of two steps change, and the model."""
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    model = _build(name, dtype)
    if settings:
        model = keras_sn.SNModel.from_model(model, host_budget="1GiB", **settings)
    model.compile(keras.optimizers.Adam(1e-2), "mse", **MODES[mode])
    model.optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
    x, y = _data(model)
    with small_tensors_leave():
        return trained_state(model, model.fit(x, y, batch_size=BATCH // 2, epochs=2, shuffle=False, verbose=0)), model


def _each_alone(graph, positions, action):
    return [region_of(graph, [graph.layers[position].name], action) for position in positions]


def _products_saved(graph, positions, action):
    """One region, which saves what the products made."""
    one = region_of(graph, [graph.layers[position].name for position in positions], action)
    products = [tensor for layer in graph.layers if layer.layer_type == "ActivationOf" for tensor in layer.inputs]
    return [replace(one, saved=(*one.saved, *(Saved(t, DEVICE, nbytes=graph.nbytes(t)) for t in products)))]


CUTS = {"by policy": None, "each alone": _each_alone, "products saved": _products_saved}


def _parity_cases():
    in_ci = {("dense", "float32", "graph"), ("einsum", "mixed_bfloat16", "eager"), ("convolutions", "float32", "eager")}
    for name in BUILD:
        for dtype in ("float32", "mixed_bfloat16", "mixed_float16"):
            for mode in ("eager", "graph"):
                yield pytest.param(name, dtype, mode, marks=[] if (name, dtype, mode) in in_ci else pytest.mark.full)


@pytest.mark.parametrize(("name", "dtype", "mode"), _parity_cases())
def test_it_is_cut_and_gives_equal_numbers(name, dtype, mode, monkeypatch):
    plain = _trained(name, dtype, mode)[0]
    for cuts in CUTS.values():
        with monkeypatch.context() as patched:
            if cuts is not None:
                patched.setattr("keras_sn.policies.best_cuts", cuts)
            trained, model = _trained(name, dtype, mode, policy={"*": "recompute"}, verify="first_step")
        assert any("/" in layer for region in model.plan.regions for layer in region.layers)
        assert_equal(trained, plain, exact=True)
    trained, model = _trained(name, dtype, mode, policy={"*/*": "offload", "*": "recompute"})
    assert any("/" in one.tensor for region in model.plan.regions for one in region.saved) or model.plan.offloaded_bytes
    assert_equal(trained, plain, exact=True)


# --- what is cut


def _names(model: keras.Model) -> list[str]:
    return [call.name for call in trace(model, BATCH).calls]


@pytest.mark.parametrize("activation", [*ACTIVATIONS, None])
def test_only_an_activation_that_needs_its_input_is_a_call_of_its_own(activation):
    model = keras.Model(X, L.Dense(WIDTH, activation, name="layer")(X))
    of_output = {"relu", "relu6", "sigmoid", "tanh", "elu", "selu", "log_softmax", "exponential", "softmax", "linear", None}
    assert _names(model) == (["layer"] if activation in of_output else ["layer", f"layer/{activation}"])


def test_both_calls_cost_what_the_layer_did(monkeypatch):
    x = keras.Input((8, 8, 4), name="x")
    model = keras.Model(x, L.Conv2D(6, 3, activation="gelu", name="conv")(L.Dense(4, "silu", name="dense")(x)))
    parts = trace(model, BATCH).graph.layers
    monkeypatch.setattr("keras_sn.activations_apart._DIVIDED", set())
    whole = trace(model, BATCH).graph.layers
    assert [layer.name for layer in whole] == ["dense", "conv"]
    for one, (product, activation) in zip(whole, (parts[:2], parts[2:]), strict=True):
        assert product.is_costly
        assert product.is_convolution == one.is_convolution
        assert activation.is_fusible
        assert product.flops + activation.flops == one.flops
        assert (product.weight_bytes, activation.weight_bytes) == (one.weight_bytes, 0)
        before = BATCH * 4 * np.prod(model.get_layer(one.name).output.shape[1:]) * (activation.saved_for_backward != ())
        assert product.internal_bytes + activation.internal_bytes + before == one.internal_bytes


def test_the_layer_stays_as_it_was():
    layer = L.Dense(WIDTH, "gelu", name="layer")
    model = keras.Model(X, layer(X))
    before = dict(vars(layer))
    calls = trace(model, BATCH).calls
    assert dict(vars(layer)) == before
    assert layer.activation is keras.activations.gelu
    data = np.ones((BATCH, LENGTH, WIDTH), "float32")
    assert np.array_equal(calls[0].run_on([data])[0], data @ layer.kernel + layer.bias)
    assert np.array_equal(calls[1].run_on(calls[0].run_on([data]))[0], layer(data))
    assert [id(v) for v in calls[0].operation.variables] == [id(v) for v in layer.variables]
    layer.activation = keras.activations.relu  # as everywhere in Keras, whoever runs it next sees it
    assert np.array_equal(calls[1].run_on(calls[0].run_on([data]))[0], layer(data))
    layer.trainable = False
    assert not calls[0].operation.trainable


def test_equal_layers_share_functions():
    y = X
    for place in range(4):
        y = L.Dense(WIDTH, "gelu", name=f"dense_{place}")(y)
    traced = trace(keras.Model(X, y), BATCH)
    functions = [[f"dense_{place}/gelu"] for place in range(4)]
    for cut in ([[f"dense_{place}", f"dense_{place}/gelu"] for place in range(4)], functions):
        library = region_library.RegionLibrary()
        for body in make_bodies(traced, [Region(tuple(names)) for names in cut], None):
            library.function_for(body, regions.FUNCTION, jit=False, inline=False)
        assert len(library) == 1


# --- what stays whole


class Own(L.Dense):
    def call(self, x, training=None):
        return super().call(x) * 2


class Derived(L.Dense):
    pass


class Ruled(L.Dense):
    pass


def _changed(change: str) -> keras.Layer:
    layer = L.Dense(WIDTH, "gelu", name="layer")
    layer.build((None, LENGTH, WIDTH))
    if change == "lora":
        layer.enable_lora(2)
    elif change == "call":
        call = layer.call
        layer.call = lambda x: 2 * call(x)
    else:
        layer.quantize(change)
    return layer


WHOLE = {
    "own call": lambda: Own(WIDTH, "gelu", name="layer"),
    "derived": lambda: Derived(WIDTH, "gelu", name="layer"),
    "activity regularizer": lambda: L.Dense(WIDTH, "gelu", activity_regularizer="l2", name="layer"),
    "function": lambda: L.Dense(WIDTH, lambda x: ops.gelu(x, approximate=True), name="layer"),
    "partial": lambda: L.Dense(WIDTH, functools.partial(keras.activations.gelu, approximate=True), name="layer"),
    "layer": lambda: L.Dense(WIDTH, L.LeakyReLU(0.1), name="layer"),
    "wrapper": lambda: L.TimeDistributed(L.Dense(WIDTH, "gelu"), name="layer"),
    "recurrent": lambda: L.Bidirectional(L.LSTM(3, activation="gelu"), name="layer"),
    **{change: functools.partial(_changed, change) for change in ("lora", "int8", "float8", "call")},
}


@pytest.mark.parametrize("kind", WHOLE)
def test_it_stays_whole(kind):
    assert _names(keras.Model(X, WHOLE[kind]()(X))) == ["layer"]


def test_a_rule_of_the_user_keeps_it_whole(monkeypatch):
    layer = L.Dense(WIDTH, "gelu", name="layer")
    model = keras.Model(X, layer(X))
    monkeypatch.setattr("keras_sn.rules._RULES", {L.Dense: lambda layer, inputs, outputs: keras_sn.rules.LayerTraits()})
    assert _names(model) == ["layer"]


def test_every_divided_layer_is_tested():
    tested = {type(layer) for build in BUILD.values() for layer in build().layers if apart(layer)}
    others = {L.Conv3D, L.Conv1DTranspose, L.Conv3DTranspose, L.DepthwiseConv1D, L.SeparableConv1D}
    assert tested | others == _DIVIDED
    for kind in others:
        rank = int(next(one for one in kind.__name__ if one.isdigit()))
        x = keras.Input((4,) * rank + (2,))
        layer = kind(*([] if "Depthwise" in kind.__name__ else [2]), kernel_size=2, activation="silu")
        layer(x)
        parts, data = apart(layer), np.random.default_rng(0).normal(size=(2, *x.shape[1:])).astype("float32")
        product = parts.product(data)
        assert np.any(product != layer(data))
        assert np.array_equal(parts.activation(product), layer(data))


# --- plans


@pytest.mark.parametrize("pattern", ["first", "first*", "first/*", "gelu", "first/gelu"])
def test_a_policy_may_name_the_layer(pattern):
    model = keras_sn.SNModel.from_model(_dense(), policy={pattern: "recompute", "*": "keep"})
    model.compile("adam", "mse", jit_compile=False)
    recomputed = {name for region in model.build_plan(BATCH).regions if region.recompute for name in region.layers}
    expected = {"gelu": {"first/gelu", "up/gelu"}, "first/*": {"first/gelu"}, "first/gelu": {"first/gelu"}}
    assert recomputed == expected.get(pattern, {"first", "first/gelu"})


def _plan(model: keras.Model, memory_budget: int | None, batch: int = 64):
    planned = keras_sn.SNModel.from_model(model, **({"memory_budget": memory_budget} if memory_budget else {"policy": "none"}))
    planned.compile("adam", "mse", jit_compile=True)
    return planned.build_plan(batch)


def test_a_tight_budget_saves_products_and_makes_activations_again(monkeypatch):
    monkeypatch.setattr("keras_sn.device.cost_model", lambda: ON_GPU)
    x = keras.Input((256, 512), name="x")
    y = x
    for place in range(6):
        z = L.Dense(2048, "gelu", name=f"up_{place}")(L.LayerNormalization(name=f"norm_{place}")(y))
        y = y + L.Dense(512, name=f"down_{place}")(z)
    model = keras.Model(x, L.Dense(1, name="head")(y))
    plain = _plan(model, None)
    budget = plain.reserved_bytes + (plain.plain_peak_bytes - plain.reserved_bytes) // 2
    plan = _plan(model, budget)
    assert plan.planned_peak_bytes <= budget
    saved = {one.tensor for region in plan.regions for one in region.saved}
    assert any(f"up_{place}" in saved for place in range(6))
    assert not any(f"up_{place}/gelu" in saved for place in range(6))
    again = keras_sn.SNModel.from_model(model, plan=plan.to_json(), memory_budget=budget)
    again.compile("adam", "mse", jit_compile=True)
    assert again.build_plan(64).regions == plan.regions
    monkeypatch.setattr("keras_sn.activations_apart._DIVIDED", set())
    whole = _plan(model, budget)
    assert abs(whole.plain_peak_bytes - plain.plain_peak_bytes) < 0.04 * plain.plain_peak_bytes
    assert plan.planned_seconds - plan.plain_seconds < 0.8 * (whole.planned_seconds - whole.plain_seconds)


@pytest.mark.full
def test_a_saved_and_loaded_model_is_cut_too(tmp_path):
    keras_sn.SNModel.from_model(_dense(), policy={"first": "recompute"}).save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras", custom_objects={"Kept": Kept})
    assert "first/gelu" in _names(loaded)
    assert [layer.name for layer in loaded.layers] == [layer.name for layer in _dense().layers]
    assert "first/gelu" in _names(keras.models.clone_model(_dense()))
