"""What the reports of all benchmarks have in common: where their figures come from, tables, an empty figure to draw on, bars."""

import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from rich.console import Console
from rich.table import Table

import keras_sn
from keras_sn.benchmarks.engines import is_ours
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


def new_table(title: str, names: Sequence[str], numbers: Sequence[str]) -> Table:
    """An empty table with columns of names, which are never cut short, and columns of numbers."""
    table = Table(title=title)
    for column in names:
        table.add_column(column, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right")
    return table


def verdict(row: Mapping[str, Any]) -> str:
    """What a table says of a row that has no numbers."""
    return "failed" if row["fits"] is None else "does not fit"


def say_reasons(console: Console, rows: Iterable[Mapping[str, Any]]) -> None:
    """Says why rows have no numbers: they may be too long for a table."""
    for row in rows:
        if not row["fits"]:
            console.print(f"{row['engine']} {verdict(row)}: {row['reason'].strip()}", highlight=False, markup=False)


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


def draw(console: Console, plot: Callable[..., None], *arguments: Any) -> None:
    """Calls a function that draws; without matplotlib says so instead."""
    try:
        plot(*arguments)
    except KerasSNError as error:
        console.print(str(error), highlight=False, markup=False)


def color_of(engine: str) -> str:
    """Of an engine in a plot: `SNModel`'s stand out."""
    return "tab:blue" if is_ours(engine) else "tab:gray"


def plot_bars(panels: Mapping[str, Mapping[str, float | None]], title: str, label: str, path: Path) -> None:
    """Draws panels of bars, a bar for each engine; for example a panel for each network.

    Args:
        panels: Title of a panel -> engine -> value; None where none could be measured.
        title: Of the figure.
        label: What the values are.
        path: The file.

    Raises:
        KerasSNError: matplotlib is not installed.
    """
    counts = [len(values) for values in panels.values()]
    figure = new_figure(path, (8, 1.2 + 0.5 * len(panels) + 0.3 * sum(counts)))
    all_axes = figure.subplots(len(panels), sharex=True, squeeze=False, height_ratios=counts).ravel()
    for axes, (name, values) in zip(all_axes, panels.items(), strict=True):
        engines, lengths = list(values), [value or 0 for value in values.values()]
        bars = axes.barh(engines, lengths, height=0.7, color=[color_of(engine) for engine in engines])
        axes.bar_label(bars, [_text(value) for value in values.values()], padding=4)
        axes.set_title(name, loc="left", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
        axes.invert_yaxis()  # the first engine on top
    longest = max(value or 0 for values in panels.values() for value in values.values())
    all_axes[-1].set(xlabel=label, xlim=(0, 1.15 * longest or 1))  # with room for the numbers
    figure.suptitle(title)
    figure.get_layout_engine().set(w_pad=0.1, h_pad=0.1)  # inches
    figure.savefig(path, dpi=150)


def _text(value: float | None) -> str:
    if value is None:
        return "not measured"
    return f"{value:.1f}" if isinstance(value, float) else str(value)
