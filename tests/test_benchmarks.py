"""The benchmarks: the search with invented measurements, the networks, and one real point."""

import json
import subprocess
from math import prod
from types import SimpleNamespace

import pytest
from rich.progress import Progress

from keras_sn.benchmarks import __main__ as command_line
from keras_sn.benchmarks import depth, measure, networks, predictions, speed
from keras_sn.benchmarks.measure import Configuration
from keras_sn.benchmarks.search import SMALL, Search, find_deepest

TINY_RESNET = {"blocks": (1, 1, 1, 1), "image_size": 32, "width": 4, "classes": 10}
TINY = Configuration(engine="keras-graph", network="resnet", arguments=TINY_RESNET, batch_size=4)


def exactly(deepest, too_deep):
    return False


@pytest.mark.parametrize("first", [1, 8, 100])
@pytest.mark.parametrize("limit", [0, 1, 7, 8, 9, 63, 64, 100])
def test_the_search_finds_the_deepest(first, limit):
    asked = []
    found = find_deepest(lambda n: asked.append(n) or n <= limit, first=first, largest=100, is_close=exactly)
    assert found == limit
    assert len(asked) == len(set(asked)) <= 15
    assert all(1 <= n <= 100 for n in asked)


def test_the_search_stops_when_close_enough():
    asked = []
    found = find_deepest(
        lambda n: asked.append(n) or n <= 700,
        first=1,
        largest=10_000,
        is_close=lambda low, high: high - low <= 0.05 * low,
    )
    assert 700 / 1.05 <= found <= 700
    assert len(asked) <= 16


def options(tmp_path, *more):
    return depth._options(["--small", "--out", str(tmp_path), *more])[1]


def invented(limits):
    """A `run` under which an engine trains up to a depth, with memory in proportion to it."""

    def run(configuration, timeout):
        limit = limits[configuration.engine]
        row = {"engine": configuration.engine, "depth": configuration.row()["depth"], "reason": "", "first_step_seconds": 1.0}
        if limit is None:
            return row | {"fits": None, "reason": "Traceback\nValueError: broken", "peak_bytes": None}
        peak_bytes = configuration.memory_bytes * configuration.row()["depth"] // limit
        return row | {"fits": configuration.row()["depth"] <= limit, "peak_bytes": peak_bytes, "seconds_per_step": 0.5}

    return run


def test_a_search_over_engines(tmp_path):
    chosen = options(tmp_path, "--engines", "keras-graph", "keras-recompute-grad", "recompute", "offload", "recompute-xla")
    limits = {"keras-graph": 50, "keras-recompute-grad": 200, "recompute": 260, "offload": None, "recompute-xla": 10_000}
    search = Search(SMALL, chosen, run=invented(limits))
    with Progress(disable=True) as progress:
        search.search_all(progress)
    verdicts = [search.verdict(engine) for engine in chosen.engines]
    assert verdicts == ["50", "200", "257", "failed", "at least 302"]
    assert search.failures == {"offload": "Traceback\nValueError: broken"}
    for engine in ("keras-recompute-grad", "recompute"):
        first = next(point for point in search.points if point["engine"] == engine)
        assert first["depth"] == SMALL.depth(2 * 13), "the others start at twice what plain Keras reached"
    ratios = list(depth._table(search).columns[2].cells)
    assert ratios[1] == "4.0", "a rival is not what the others are compared with"


def test_depth_writes_its_files(tmp_path, monkeypatch, capsys):
    limits = {"keras-graph": 50, "recompute": 302}
    monkeypatch.setattr(depth, "Search", lambda *arguments: Search(*arguments, run=invented(limits)))
    assert depth.main(["--small", "--out", str(tmp_path), "--engines", "keras-graph", "recompute"]) == 0
    report = json.loads((tmp_path / "depth.json").read_text())
    assert report["deepest"] == {"keras-graph": 50, "recompute": 302}
    assert report["options"]["memory_bytes"] == 80 * 2**20
    assert {"date", "device", "versions", "commit", "points"} <= set(report)
    assert (tmp_path / "depth.png").stat().st_size > 10_000
    shown = capsys.readouterr().out
    assert "6.0" in shown
    assert "at least 302" in shown


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["length"], "invalid choice: 'length'"),
        ([], "arguments are required: {"),
        (["depth", "--engines", "torch"], "Received: 'torch'"),
        (["depth", "--memory", "much"], "Received: memory='much'"),
        (["depth", "--max-depth", "3"], "Received: --max-depth 3"),
        (["speed", "--engines", "torch"], "Received: 'torch'"),
        (["speed", "--steps", "1"], "Received: --steps 1"),
        (["predictions", "--shares", "1.5"], "Received: {"),
        (["predictions", "--networks", "lenet"], "invalid choice: 'lenet'"),
        (["transfers"], "copies are traced on a GPU, and TensorFlow sees none"),
        (["transfers", "--engines", "torch"], "Received: 'torch'"),
        (["width", "--memory", "much"], "Received: memory='much'"),
        (["width", "--steps", "1"], "at least 2 steps"),
        (["width", "--first", "9", "--largest", "8"], "1 <= first <= largest"),
        (["width", "--networks", "lenet"], "invalid choice: 'lenet'"),
        (["startup", "--rounds", "0"], "Received: --rounds 0"),
    ],
)
def test_bad_arguments_are_refused(argv, message, capsys):
    with pytest.raises(SystemExit) as exit_info:
        command_line.main(argv)
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_speed_compares_with_the_first_engine():
    def run(configuration):
        is_plain, is_speed = configuration.engine == "keras-graph", configuration.purpose == "speed"
        seconds = 9.0 if not is_speed else 1.0 if is_plain else 0.8
        row = {"engine": configuration.engine, "fits": True, "peak_bytes": 400 if is_plain else 100}
        return row | {"seconds_per_step": seconds, "first_step_seconds": 2.0}

    engines = ("keras-graph", "recompute")
    configurations = [Configuration(engine=e, network="resnet", arguments=TINY_RESNET, batch_size=1) for e in engines]
    rows = speed.measure_engines(configurations, 3, has_gpu=False, run=run)
    assert [row["seconds_per_step"] for row in rows] == [1.0, 0.8]
    assert [len(row["rounds"]) for row in rows] == [3, 3]
    cells = [list(column.cells) for column in speed.table(rows, "title").columns]
    assert cells[2] == ["1.00", "0.25"]
    assert cells[4] == ["1.00", "1.25"]


@pytest.mark.parametrize(("has_gpu", "budget", "errors"), [(False, 250, (-0.4, -0.2)), (True, 250, (-0.2, 0.0))])
def test_predictions_are_compared_with_what_was_measured(has_gpu, budget, errors):
    def run(configuration):
        is_plain = configuration.budget_bytes is None
        assert configuration.engine.endswith("-xla") == has_gpu
        return configuration.row() | {
            "fits": True,
            "peak_bytes": 500 if is_plain else 250,
            "planned_peak_bytes": 400 if is_plain else 250 if has_gpu else 300,
            "reserved_bytes": 100 if not has_gpu else 0,
            "seconds_per_step": 1.0,
            "planned_seconds": 0.9,
        }

    compared = predictions.Comparison((1.0, 0.5), has_gpu=has_gpu, steps=2, jobs=2, run=run)
    plain, planned = compared.rows([predictions.Case("vit", 2)])
    assert (plain["engine"].removesuffix("-xla"), planned["engine"].removesuffix("-xla")) == ("none", "auto")
    assert planned["budget_bytes"] == budget
    assert (plain["error_of_bytes"], planned["error_of_bytes"]) == pytest.approx(errors)
    shown = predictions.table([plain, planned], "title", has_gpu=has_gpu)
    assert len(shown.columns) == (8 if has_gpu else 5)
    assert next(iter(shown.columns[4].cells)) == f"{errors[0]:+.1%}"


def test_the_networks_are_resnets():
    assert networks.depth(networks.RESNET_50) == 50
    assert networks.depth(networks.RESNET_122) == 122
    model = networks.resnet(networks.RESNET_50)
    assert sum(prod(weight.shape) for weight in model.trainable_weights) == 25_557_032  # as torchvision's
    assert model.get_layer("stage2_block3_conv1").filters == 128
    assert model.output.shape == (None, 1000)


def test_one_real_point():
    row = measure.run(TINY, timeout=120)
    assert row["fits"] is True, row
    assert (row["depth"], row["batch_size"], row["arguments"]["image_size"]) == (14, 4, 32)
    assert 10_000 < row["peak_bytes"] < 2**26 < row["resting_bytes"]
    assert len(row["losses"]) == 2
    assert row["versions"]["tensorflow"]
    assert row["device"]


@pytest.mark.parametrize(
    ("outcome", "fits", "reason"),
    [
        (SimpleNamespace(returncode=1, stdout="", stderr="a\nb\nc\nValueError: d"), None, "b\nc\nValueError: d"),
        (SimpleNamespace(returncode=-9, stdout="", stderr=""), False, "out of memory"),
        (SimpleNamespace(returncode=-11, stdout="{", stderr=""), None, "exit status -11"),
        (subprocess.TimeoutExpired("python", 3), False, "not done after 3 seconds"),
    ],
)
def test_a_worker_that_fails_says_why(monkeypatch, outcome, fits, reason):
    def run(*arguments, **keywords):
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(subprocess, "run", run)
    row = measure.run(TINY, timeout=3)
    assert row["fits"] is fits
    assert reason in row["reason"]
