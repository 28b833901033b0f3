"""Random changes to a plan: what comes of them fits, is no slower, and is the same each time."""

from functools import partial
from random import Random

import pytest

from keras_sn import annealing
from keras_sn.annealing import anneal
from keras_sn.candidates import Candidate, from_draft
from keras_sn.cost import CostModel, StepCosts
from keras_sn.drafts import Draft
from keras_sn.graph import LayerCall, LayerGraph, TensorSpec
from keras_sn.plan import DEVICE, PLACES
from keras_sn.steps import RECOMPUTE

MODEL = CostModel(flops_per_second=1e6, bytes_per_second=4e6, link_bytes_per_second=5e6, launch_seconds=1e-4)
COUNT = 30


def chain() -> StepCosts:
    """Costly layer calls with cheap ones between them; the tensors get smaller and larger again."""
    tensors = {"t0": TensorSpec("t0", (100,), "float32", "input")}
    layers = []
    for i in range(1, COUNT + 1):
        tensors[f"t{i}"] = TensorSpec(f"t{i}", (400 + 100 * abs(COUNT // 2 - i),), "float32")
        costly = i % 3 == 0
        layers.append(
            LayerCall(f"l{i}", "any", (f"t{i - 1}",), (f"t{i}",), (f"t{i - 1}",), flops=9000 if costly else 400, is_costly=costly)
        )
    return StepCosts(LayerGraph(tuple(layers), tensors, ("t0",), (f"t{COUNT}",)), MODEL)


@pytest.fixture(scope="module")
def costs() -> StepCosts:
    return chain()


def start_in(costs: StepCosts) -> tuple[Candidate, float]:
    """A plan of regions of five layer calls, and a room with a little more than it needs."""
    draft = Draft(tuple(range(4, COUNT, 5)))
    room = 1.2 * from_draft(costs, draft, 0).peak_bytes
    return from_draft(costs, draft, room), room


def found(costs: StepCosts, places=PLACES, host_bytes: int | None = None) -> tuple[Candidate, Candidate, float]:
    start, room = start_in(costs)
    fits = partial(Candidate.fits, room_bytes=room, host_bytes=host_bytes)
    return start, anneal(costs, start, room, places, partial(from_draft, costs, room_bytes=room), fits), room


def test_a_faster_plan_is_found_that_fits(costs):
    start, best, room = found(costs)
    assert best.seconds < 0.95 * start.seconds
    assert best.peak_bytes <= room


def test_it_is_the_same_each_time(costs):
    assert found(costs)[1].draft == found(chain())[1].draft


def test_nothing_goes_to_the_host_where_nothing_may(costs):
    _, best, _ = found(costs, (DEVICE, RECOMPUTE), host_bytes=0)
    assert best.prediction.offloaded_bytes == 0


def test_what_does_not_fit_is_no_result(costs):
    start, room = start_in(costs)
    same = anneal(costs, start, room, PLACES, partial(from_draft, costs, room_bytes=room), lambda one: False)
    assert same is start


@pytest.mark.parametrize("trials", [0, 1])
def test_with_no_time_it_stays_as_it_is_or_gets_better(costs, monkeypatch, trials):
    monkeypatch.setattr(annealing, "MAX_TRIALS", trials)
    start, best, _ = found(costs)
    assert best.seconds <= start.seconds


def test_each_kind_of_change_is_made(costs):
    changes, random = annealing._Changes(costs, 1e4, PLACES), Random(0)
    draft = Draft((4, 9, COUNT - 1))
    drafts = [changes.change(draft, random) for _ in range(300)]
    assert {one.ends != draft.ends for one in drafts} == {one.saved != draft.saved for one in drafts} == {True, False}
    assert any(one.away for one in drafts)
    assert any(one.forgotten for one in drafts)
    assert all(one.ends[-1] == COUNT - 1 for one in drafts)
