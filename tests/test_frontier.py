"""The frontier of bytes against seconds: `"auto"` is on it, whatever another policy does with the same bytes."""

import json
from functools import cache, partial
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from keras_sn.benchmarks import __main__ as command_line
from keras_sn.benchmarks import frontier, networks
from keras_sn.benchmarks.frontier import CASES, OTHERS, Case, Frontier, collect
from keras_sn.errors import BudgetError

TINY = {
    "resnet50": Case("ResNet", partial(networks.resnet, (1, 1, 0, 0), image_size=64, width=8, classes=10), 256),
    "vgg16": Case("VGG", partial(networks.vgg16, image_size=32, width=8, units=64, classes=10), 256),
    "inception_v4": Case("Inception", partial(networks.inception_v4, image_size=75, width=4, blocks=(0, 0, 0)), 64),
    "densenet": Case("DenseNet", partial(networks.densenet, blocks=(1, 2), growth=8, image_size=32, width=16), 256),
    "unet": Case("U-Net", partial(networks.unet, image_size=64, width=8, depth=1), 64),
    "bert": Case("BERT", partial(networks.bert, length=32, vocabulary=99, width=64, depth=2, heads=4, mlp=256), 256),
}
"""The six networks, small enough to be planned in a moment; their batches keep bytes dear and launches cheap."""
MICRO = {"unet": Case("U-Net", partial(networks.unet, image_size=64, width=8, depth=0), 64)}
"""For what no plan depends on."""
SHARES = (0.4,)


@cache
def tiny(name):
    return Frontier.of(name, TINY[name], compiled=True)


def plans_of_others(one):
    """Every different plan of the other policies, without a budget and with some."""
    found = {}
    for policy in OTHERS:
        for budget in (None, *map(one.budget_bytes, SHARES)) if policy != "recompute" else (None,):
            plan = one.plan(policy, budget)
            found[policy, plan.planned_peak_bytes, plan.planned_seconds] = plan
    return list(found.values())


def test_the_tiny_networks_are_the_six():
    assert list(TINY) == list(CASES)


_IN_CI = ("unet",)


@pytest.mark.parametrize("name", [one if one in _IN_CI else pytest.param(one, marks=pytest.mark.full) for one in TINY])
def test_auto_is_never_slower_with_the_bytes_of_another_policy(name):
    one, worse = tiny(name), []
    for other in plans_of_others(one):
        where = f"{other.policy} with budget {other.budget_bytes}: {other.planned_peak_bytes:,} bytes, {other.planned_seconds} s"
        try:
            auto = one.plan("auto", other.planned_peak_bytes)
        except BudgetError as error:
            worse.append(f"{where}; auto: {error}")
            continue
        assert auto.planned_peak_bytes <= other.planned_peak_bytes, where
        if auto.planned_seconds > other.planned_seconds + 1e-9:
            worse.append(f"{where}; auto: {auto.planned_peak_bytes:,} bytes, {auto.planned_seconds} s")
    assert not worse, "\n".join(worse)


@pytest.fixture(scope="module")
def report():
    return collect(MICRO, compiled=True, console=Console(quiet=True), shares=(1.0, 0.9, 0.01, 0.005))


def test_each_policy_has_its_rows(report):
    rows = {(row["policy"], row["budget_share"]): row for row in report["rows"]}
    assert len(rows) == len(report["rows"]) == 1 + 2 * 4 + 5  # recompute; two at each share; auto at each, and as recompute
    plain = report["networks"]["unet"]["plain_peak_bytes"]
    assert (rows["auto", 1.0]["planned_slowdown"], rows["auto", 1.0]["planned_peak_bytes"]) == (1.0, plain)
    assert rows["auto", 0.9]["planned_slowdown"] > 1
    assert rows["auto", 0.9]["planned_peak_bytes"] <= rows["auto", 0.9]["budget_bytes"] < plain
    for share in (0.01, 0.005):
        assert rows["auto", share]["planned_peak_bytes"] is rows["auto", share]["planned_slowdown"] is None
    assert rows["auto", 0.01]["planning_seconds"] > 0
    assert rows["auto", 0.005]["planning_seconds"] is None, "what is smaller than too small is not tried"
    assert rows["auto", None]["budget_bytes"] == rows["recompute", None]["planned_peak_bytes"]
    tight, loose = rows["superneurons", 0.005], rows["superneurons", 1.0]
    assert tight["offloaded_bytes"] > loose["offloaded_bytes"] == 0


def test_reserved_bytes_are_weights_and_momentum():
    model = TINY["resnet50"].build()
    trainable, every = (
        sum(4 * one.value.numpy().size for one in weights) for weights in (model.trainable_weights, model.weights)
    )
    assert tiny("resnet50").reserved_bytes == every + trainable > 2 * trainable


def test_the_command_writes_both_files(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(frontier, "CASES", MICRO)
    monkeypatch.setattr(frontier.collect, "__kwdefaults__", {"shares": (0.9, 0.5)})
    assert command_line.main(["frontier", "--out", str(tmp_path / "new"), "--networks", "unet", "--no-compiled"]) == 0
    written = json.loads((tmp_path / "new/frontier.json").read_text())
    assert written["compiled"] is False
    assert written["cost_model"]["launch_seconds"] == 2e-6
    assert {"network", "policy", "budget_share", "planned_peak_bytes", "planned_slowdown", "planning_seconds"} <= set(
        written["rows"][0]
    )
    assert Image.open(tmp_path / "new/frontier.png").width >= 500
    assert "unet" in capsys.readouterr().out


def test_an_unknown_network_is_refused(capsys):
    with pytest.raises(SystemExit):
        command_line.main(["frontier", "--networks", "lenet"])
    assert "Received: 'lenet'" in capsys.readouterr().err


def test_the_drawn_plans_keep_the_promise():
    """At the bytes of recomputation alone, and with no more than the other policies' bytes, `auto` is at least as fast."""
    rows = json.loads(Path(__file__).parents[1].joinpath("docs", "images", "frontier.json").read_text())["rows"]
    networks = {row["network"] for row in rows}
    assert len(networks) == 6
    for network in networks:
        own = [row for row in rows if row["network"] == network and row["planned_slowdown"] is not None]
        best = [row for row in own if row["policy"] == "auto"]
        for row in own:
            there = [one["planned_slowdown"] for one in best if one["planned_peak_bytes"] <= row["planned_peak_bytes"]]
            if there or row["policy"] == "recompute":  # else `auto` was not asked for so few bytes
                assert min(there) <= row["planned_slowdown"] + 1e-9, network
