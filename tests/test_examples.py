"""The examples run, at toy size."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("quickstart", ["--samples", "32", "--budget", "300MiB"], "budget 300 MiB"),
        pytest.param(
            *("convert_existing", ["--image-size", "32", "--steps", "1"], "the existing model has the trained weights: True"),
            marks=pytest.mark.full,
        ),
        ("depth_limits", ["--help"], "--memory"),
    ],
)
def test_example(name, arguments, expected):
    command = [sys.executable, str(ROOT / "examples" / f"{name}.py"), *arguments]
    run = subprocess.run(command, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    assert expected in run.stdout
    assert len((ROOT / "examples" / f"{name}.py").read_text().splitlines()) < 60


def test_demo_on_few_images():
    command = [sys.executable, "-m", "keras_sn.benchmarks", "demo", "--part", "digits", "--samples", "128"]
    run = subprocess.run(command, env=os.environ | {"COLUMNS": "100"}, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr[-2000:]
    rows = [line.split("│") for line in run.stdout.splitlines() if line.startswith("│")]
    plain, ours = rows[-2:] if len(rows) >= 2 else ([], [])
    assert plain[2:5] == ours[2:5]  # loss, accuracy, validation accuracy
