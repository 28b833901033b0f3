"""Inputs of regions that only additions and concatenations read: their values are saved nowhere, and gradients are right."""

from dataclasses import replace

import keras
import numpy as np
import pytest
from keras import layers as L
from parity import rewriting_off

import keras_sn
from keras_sn import cost, drafts
from keras_sn.in_place import reads_only_shapes
from keras_sn.planner import adopt_plan, make_plan
from keras_sn.trace import trace


def joined(layer, width=8):
    """`a` is read by `b`, `skip` and through them by `join`, which a region ends with."""
    x = keras.Input((6,))
    a = L.Dense(width, activation="tanh", name="a")(x)
    skip = L.Dense(width, activation="tanh", name="skip")(a)
    join = layer([L.Dense(width, activation="tanh", name="b")(a), skip])
    return keras.Model(x, L.Dense(2, name="head")(L.Dense(width, activation="relu", name="c")(join)))


def plan_cut_after(model, *names):
    """A plan whose regions end after these layer calls and save what `drafts` says."""
    graph = trace(model, 8).graph
    draft = drafts.Draft((*(graph.position[name] for name in names), len(graph.layers) - 1))
    plan = make_plan(graph, "recompute", batch_size=8, reserved_bytes=0)
    regions = tuple(drafts.regions_of(graph, draft))
    arguments = {"batch_size": 8, "reserved_bytes": 0, "budget_bytes": None, "cost_model": cost.ON_CPU, "compiled": False}
    return adopt_plan(graph, replace(plan, regions=regions), **arguments)


@pytest.mark.parametrize("layer", [L.Add, L.Concatenate])
@pytest.mark.parametrize("mode", ["eager", "graph", "xla"])
def test_gradients_are_plain_keras(layer, mode):
    rewriting_off()
    found = []
    for is_planned in (False, True):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(2)
        model = joined(layer(name="join"))
        if is_planned:
            plan = plan_cut_after(model, "skip", "join")
            assert [one.tensor for one in plan.regions[1].saved if one.tensor == "skip"] == []
            model = keras_sn.SNModel.from_model(model, plan=plan)
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=mode == "eager", jit_compile=mode == "xla")
        x = np.random.default_rng(0).normal(size=(20, 6)).astype("float32")  # the last batch is shorter
        losses = model.fit(x, np.ones((20, 2), "float32"), batch_size=8, epochs=2, shuffle=False, verbose=0).history["loss"]
        found.append((losses, [np.asarray(v) for v in model.trainable_variables]))
    (plain_losses, plain), (losses, ours) = found
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if mode == "xla" else {"rtol": 0, "atol": 0}
    np.testing.assert_allclose(losses, plain_losses, **tolerance)
    for one, other in zip(ours, plain, strict=True):
        np.testing.assert_allclose(one, other, **tolerance)


def test_a_region_that_runs_again_saves_all_its_inputs():
    graph = trace(joined(L.Concatenate(name="join")), 8).graph
    ends = (graph.position["skip"], graph.position["join"], len(graph.layers) - 1)
    saved = {one.tensor for one in drafts.regions_of(graph, drafts.Draft(ends, forgotten=frozenset(["join"])))[1].saved}
    assert "skip" in saved
    assert drafts.unread_inputs(graph.layers[ends[0] + 1 : ends[1] + 1]) == {"b", "skip"}
    assert drafts.unread_inputs(graph.layers[ends[0] + 1 :]) == set()  # `c` reads what `join` makes


def test_which_layers_read_only_shapes():
    class Own(L.Add):
        pass

    assert reads_only_shapes(L.Add())
    assert reads_only_shapes(L.Concatenate())
    assert not reads_only_shapes(L.Add(activity_regularizer="l2"))
    assert not reads_only_shapes(L.Multiply())
    assert not reads_only_shapes(Own())
