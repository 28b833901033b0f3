"""What the reports of all benchmarks have in common: where their figures come from, and an empty figure to draw on."""

import json
import os
import platform
import subprocess
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console

import keras_sn
from keras_sn.errors import KerasSNError

_PACKAGE = Path(keras_sn.__file__).parent


def head(benchmark: str) -> dict[str, Any]:
    """How a report begins: its benchmark, the time, and where it was made."""
    return {"benchmark": benchmark, "date": datetime.now(UTC).isoformat(timespec="seconds")} | provenance()


def write(benchmark: str, folder: Path, **content: Any) -> dict[str, Any]:
    """Writes `<benchmark>.json` into a folder, made if need be; returns the report."""
    folder.mkdir(parents=True, exist_ok=True)
    report = head(benchmark) | content
    (folder / f"{benchmark}.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def say_written(console: Console, benchmark: str, folder: Path) -> None:
    """Names the files of a benchmark."""
    files = ", ".join(str(path) for path in sorted(folder.glob(f"{benchmark}.*")))
    console.print(f"Written: {files}", highlight=False)


def provenance() -> dict[str, Any]:
    """Where a figure comes from: device, versions and commit."""
    gpus = tf.config.list_physical_devices("GPU")
    name = tf.config.experimental.get_device_details(gpus[0]).get("device_name") if gpus else _cpu_name()
    versions = {"keras_sn": keras_sn.__version__, "keras": keras.__version__, "tensorflow": tf.__version__}
    versions["python"] = platform.python_version()
    git = ["git", "-C", str(_PACKAGE), "rev-parse", "--verify", "HEAD"]
    commit = None
    with suppress(OSError, subprocess.SubprocessError):
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    return {"device": name, "cpus": os.cpu_count(), "versions": versions, "commit": commit}


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def new_figure(path: Path, figsize: tuple[float, float]) -> Any:
    """A matplotlib figure of so many inches, to be saved to `path`.

    Raises:
        KerasSNError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise KerasSNError(
            f"{path.name} is not drawn, because matplotlib is not installed. Run `pip install 'keras-sn[plots]'`. "
            f"Received: {error}"
        ) from error
    return Figure(figsize=figsize, layout="constrained")
