"""The examples run, at toy size."""

import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import keras
import pytest
from keras import layers as L

import keras_sn
from keras_sn.benchmarks import demo
from keras_sn.benchmarks.__main__ import main

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("quickstart", ["--samples", "32", "--budget", "300MiB"], "300 MiB, of which"),
        pytest.param(
            *("convert_existing", ["--image-size", "32", "--steps", "1"], "the existing model has the trained weights: True"),
            marks=pytest.mark.full,
        ),
    ],
)
def test_example(name, arguments, expected):
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    run = subprocess.run(command, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert expected in run.stdout


def test_depth_limits_says_what_it_takes(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["depth_limits.py", "--help"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "examples" / "depth_limits.py"), run_name="__main__")
    assert ended.value.code == 0
    assert "--memory" in capsys.readouterr().out


def test_examples_are_short():
    for path in (ROOT / "examples").glob("*.py"):
        assert len(path.read_text().splitlines()) < 60, path


def _assert_equal_rows(text):
    rows = [line.split("│") for line in text.splitlines() if line.startswith("│")]
    plain, ours = rows[-2:] if len(rows) >= 2 else ([], [])
    assert plain[2:5] == ours[2:5]  # loss, accuracy, validation accuracy
    assert len(plain) > 5


@pytest.mark.full
def test_demo_on_few_images():
    command = [sys.executable, "-m", "keras_sn.benchmarks", "demo", "--part", "digits", "--samples", "128"]
    run = subprocess.run(command, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    _assert_equal_rows(run.stdout)


def test_demo_of_a_small_network(capsys, monkeypatch):
    """The same in one process."""

    def network():
        inputs = x = keras.Input((demo.IMAGE_SIZE, demo.IMAGE_SIZE, 1))
        for _ in range(3):
            x = L.ReLU()(L.BatchNormalization()(L.Conv2D(4, 3, padding="same")(x)))
        return keras.Model(inputs, L.Dense(10)(L.GlobalAveragePooling2D()(x)))

    def run(command, **_):
        assert command[:3] == [sys.executable, "-m", "keras_sn.benchmarks"]
        status = main(command[3:])
        return SimpleNamespace(returncode=status, stdout=capsys.readouterr().out, stderr="")

    monkeypatch.setattr(demo, "network", network)
    monkeypatch.setattr(demo, "IMAGE_SIZE", 16)
    monkeypatch.setattr(demo, "BUDGET_SHARE", 0.75)  # it has few layers
    monkeypatch.setattr(demo.subprocess, "run", run)
    monkeypatch.setenv("COLUMNS", "100")
    assert main(["demo", "--part", "digits", "--samples", "80"]) == 0
    _assert_equal_rows(capsys.readouterr().out)


def test_the_network_of_the_demo_fits_into_half():
    reference = keras_sn.SNModel.from_model(demo.network(), policy="none")
    budget = int(demo.BUDGET_SHARE * reference.build_plan(demo.BATCH_SIZE).plain_peak_bytes)
    plan = keras_sn.SNModel.from_model(demo.network(), memory_budget=budget).build_plan(demo.BATCH_SIZE)
    assert plan.regions
    assert plan.planned_peak_bytes <= budget
