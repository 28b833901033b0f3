"""The deepest ResNet that trains under one memory cap: plain TensorFlow, graph and XLA, beside `SNModel`'s policies.

Follows table 4 of Wang et al. 2018 (SuperNeurons): blocks 6, 32, n3 and 6, batch 16, a 12 GiB card; on the CPU a small
relative. Every point is real training steps in a process of its own. Out: a table, `depth.json` and `depth.png`.
"""

import argparse
from pathlib import Path
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from keras_sn.benchmarks.engines import ENGINES, PLAIN, check_engines
from keras_sn.benchmarks.reports import draw, new_figure, new_table, say_written, write
from keras_sn.benchmarks.search import FULL, SMALL, Search, Setting
from keras_sn.errors import KerasSNError
from keras_sn.sizes import format_bytes, parse_bytes


def _table(search: Search) -> Table:
    options = search.options
    title = f"Deepest ResNet that trains, batch {options.batch}, {format_bytes(options.memory_bytes)}"
    caption = f"seconds with {options.jobs} engines at a time" if options.jobs > 1 else None
    table = new_table(title, ["engine"], ["depth", "x plain", "peak", "s/step", "first step, s"])
    table.caption = caption
    plain_n3 = max((n3 for engine, n3 in search.deepest.items() if engine in PLAIN), default=0)
    for engine in options.engines:
        point = search.deepest_point(engine)
        cells = [engine, search.verdict(engine)]
        if point:
            ratio = f"{point['depth'] / search.setting.depth(plain_n3):.1f}" if plain_n3 else ""
            seconds = f"{point['seconds_per_step']:.3g}", f"{point['first_step_seconds']:.0f}"
            cells += [ratio, format_bytes(point["peak_bytes"]), *seconds]
        table.add_row(*cells)
    return table


def _write(search: Search) -> dict[str, Any]:
    """Writes `depth.json`; returns what is in it."""
    deepest = {engine: search.setting.depth(n3) if n3 else None for engine, n3 in search.deepest.items()}
    options = {name: value for name, value in vars(search.options).items() if name != "out"}
    content = {"options": options, "deepest": deepest, "failures": search.failures, "points": search.points}
    return write("depth", search.options.out, **content)


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws peak memory over depth, one line an engine; hollow points do not fit.

    Raises:
        KerasSNError: matplotlib is not installed.
    """
    figure = new_figure(path, (8, 5))
    axes = figure.subplots()
    for engine in report["options"]["engines"]:
        points = [p for p in report["points"] if p["engine"] == engine and p["peak_bytes"] is not None]
        points.sort(key=lambda p: p["depth"])
        (line,) = axes.plot([p["depth"] for p in points], [p["peak_bytes"] / 2**20 for p in points], label=engine)
        for p in points:
            face = line.get_color() if p["fits"] else "white"
            axes.plot(p["depth"], p["peak_bytes"] / 2**20, "o", color=line.get_color(), markerfacecolor=face)
    axes.axhline(report["options"]["memory_bytes"] / 2**20, color="black", linestyle="--", label="cap")
    axes.set(xlabel="depth (layers with weights)", ylabel="peak memory (MiB)", ylim=(0, None))
    axes.set_title(f"ResNet, batch {report['options']['batch']}: hollow points do not fit")
    axes.legend()
    figure.savefig(path, dpi=150)


def _options(argv: list[str]) -> tuple[Setting, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks depth", description=__doc__)
    parser.add_argument("--small", action="store_true", help="the small network; without a GPU always")
    parser.add_argument("--memory", metavar="SIZE", help="the cap (12GiB; small: 80MiB)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples in a batch (16; small: 32)")
    parser.add_argument("--dtype", default="float32", help="dtype policy of the model (float32)")
    parser.add_argument("--engines", nargs="+", metavar="ENGINE", help=f"of {', '.join(ENGINES)}")
    parser.add_argument("--max-depth", type=int, metavar="LAYERS", help="where the search ends (4000; small: 302)")
    parser.add_argument("--tolerance", type=float, default=0.05, metavar="SHARE", help="of the depth (0.05)")
    parser.add_argument("--jobs", type=int, metavar="N", help="engines searched at the same time (1; small: 2)")
    parser.add_argument("--out", type=Path, default=Path("benchmark_output"), help="folder of depth.json, depth.png")
    options = parser.parse_args(argv)
    options.small = options.small or not tf.config.list_physical_devices("GPU")
    setting = SMALL if options.small else FULL
    options.batch = options.batch or setting.batch_size
    options.max_depth = options.max_depth or setting.max_depth
    options.jobs = options.jobs or setting.jobs
    options.engines = options.engines or list(setting.engines)
    try:
        check_engines(options.engines)
        options.memory = options.memory or setting.memory
        options.memory_bytes = parse_bytes(options.memory, argument="memory")
    except KerasSNError as error:
        parser.error(str(error))
    if options.max_depth < setting.depth(1):
        parser.error(f"the shallowest network has depth {setting.depth(1)}. Received: --max-depth {options.max_depth}")
    return setting, options


def main(argv: list[str]) -> int:
    setting, options = _options(argv)
    console = Console()
    search = Search(setting, options)
    # After every point: a run that is cut short leaves what it found.
    search.on_point = lambda: _write(search)
    columns = (
        TextColumn("{task.description:>16}"),
        BarColumn(20),
        TextColumn("{task.fields[status]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        search.search_all(progress)
    console.print(_table(search))
    for engine, reason in search.failures.items():
        console.print(f"{engine} failed:\n{reason}", highlight=False, markup=False)
    draw(console, plot, _write(search), options.out / "depth.png")
    say_written(console, "depth", options.out)
    return 1 if search.failures else 0
