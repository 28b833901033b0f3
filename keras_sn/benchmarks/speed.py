"""Memory and speed of one training step, side by side: plain Keras, budgets of `SNModel`, and other libraries.

The engines take turns, each turn in a process of its own, so that a busy machine slows all of them. A budget is a share: on a GPU
`auto@0.55-xla` may use 0.55 of the memory that the first engine was measured to need, weights included; without one see
`measure`. Without a GPU memory and speed are measured in different processes; see Note: [Memory] in `measure`. Out: a table of
medians and of ratios to the first engine, `speed.json` with one row an engine, and `speed.png`.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import track
from rich.table import Table

from keras_sn.benchmarks import engines, measure
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.benchmarks.networks import RESNET_122
from keras_sn.benchmarks.options import add_network, parsed, parser_of
from keras_sn.benchmarks.reports import color_of, draw, new_figure, new_table, say_reasons, say_written, verdict, write
from keras_sn.sizes import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Defaults of a device."""

    network: str
    batch: int
    arguments: dict[str, Any]
    steps: int
    engines: tuple[str, ...]


ON_GPU = Setting(
    network="resnet50",
    batch=64,
    arguments={},
    steps=12,
    engines=("keras-xla", "keras-graph", "none-xla", "auto@0.55-xla", "auto@0.4-xla", "recompute-xla", "auto@0.25-xla"),
)
ON_CPU = Setting(
    network="resnet",
    batch=32,
    arguments={"blocks": RESNET_122, "image_size": 128, "width": 16},
    steps=6,
    engines=("keras-graph", "auto@0.55", "recompute"),
)


def measure_engines(
    configurations: Sequence[Configuration], rounds: int, *, has_gpu: bool, run: Callable[[Configuration], Row]
) -> list[Row]:
    """Runs every engine once for memory and `rounds` times for speed, in turns, the first engine first.

    Returns:
        One row an engine: its memory row with the medians of its speed rows in it, and those rows under `rounds`.
    """
    turns = [(place, "memory") for place in range(len(configurations))] if not has_gpu else []
    turns += [(place, "memory" if has_gpu else "speed") for _ in range(rounds) for place in range(len(configurations))]
    rows: list[list[Row]] = [[] for _ in configurations]
    for place, purpose in track(turns, description="training"):
        one = configurations[place]
        steps = 3 if purpose == "memory" and not has_gpu else one.steps
        reference = rows[0][0]["peak_bytes"] if rows[0] else None
        one = replace(one, purpose=purpose, steps=steps) if not has_gpu else in_bytes(replace(one, steps=steps), reference)
        rows[place].append(run(one) | {"label": configurations[place].engine})
    return [_summary(of_engine, skip=0 if has_gpu else 1) for of_engine in rows]


def in_bytes(configuration: Configuration, reference_bytes: int | None) -> Configuration:
    """The configuration with its engine's share as a budget of so many bytes, if it has one."""
    share = engines.share_of(configuration.engine)
    if share is None or reference_bytes is None:
        return configuration
    engine = "auto-xla" if configuration.engine.endswith("-xla") else "auto"
    return replace(configuration, engine=engine, budget_bytes=int(share * reference_bytes))


def _summary(rows: Sequence[Row], *, skip: int) -> Row:
    failed = next((row for row in rows if not row["fits"]), None)
    if failed:
        return failed
    medians = {name: median(row[name] for row in rows[skip:]) for name in ("seconds_per_step", "first_step_seconds")}
    return rows[0] | medians | {"rounds": rows[skip:]}


def table(rows: Sequence[Row], title: str) -> Table:
    """Memory and speed of every engine, and both as ratios to the first."""
    shown = new_table(title, ["engine"], ["memory", "of the first's", "s/step", "speed of the first's", "first step, s"])
    first = rows[0]
    for row in rows:
        if not row["fits"]:
            shown.add_row(row["label"], verdict(row))
            continue
        memory, speed = "", ""
        if first["fits"]:
            memory = f"{row['peak_bytes'] / first['peak_bytes']:.2f}" if row["peak_bytes"] and first["peak_bytes"] else ""
            speed = f"{first['seconds_per_step'] / row['seconds_per_step']:.2f}"
        peak = format_bytes(row["peak_bytes"]) if row["peak_bytes"] else ""
        cells = row["label"], peak, memory, f"{row['seconds_per_step']:.4g}", speed, f"{row['first_step_seconds']:.0f}"
        shown.add_row(*cells)
    return shown


def plot(rows: Sequence[Row], title: str, path: Path) -> None:
    """Draws speed over memory, both as shares of the first engine's, one point an engine.

    Raises:
        KerasSNError: matplotlib is not installed.
    """
    figure = new_figure(path, (8, 5))
    axes = figure.subplots()
    first, places = rows[0], {}
    for row in rows if first["fits"] else ():
        if row["fits"] and row["peak_bytes"]:
            place = row["peak_bytes"] / first["peak_bytes"], first["seconds_per_step"] / row["seconds_per_step"]
            places[row["label"]] = place
            axes.plot(*place, "o" if engines.is_ours(row["label"]) else "s", color=color_of(row["label"]))
    # On the right there is room for the names.
    width, height = 1.3 * max([1.0, *(x for x, _ in places.values())]), 1.1 * max([1.0, *(y for _, y in places.values())])
    _annotate(axes, places, (width, height))
    axes.set(xlabel=f"peak memory / {first['label']}'s", ylabel=f"speed / {first['label']}'s", xlim=(0, width), ylim=(0, height))
    axes.set_title(title)
    figure.savefig(path, dpi=150)


def _annotate(axes: Any, places: dict[str, tuple[float, float]], size: tuple[float, float]) -> None:
    """Names the points, from the top down; a name goes below those that it would lie on."""
    lines: list[tuple[float, float]] = []
    for name, (x, y) in sorted(places.items(), key=lambda one: -one[1][1]):
        line = y
        while any(abs(x - other) < 0.25 * size[0] and abs(line - above) < 0.04 * size[1] for other, above in lines):
            line -= 0.01 * size[1]
        lines.append((x, line))
        axes.annotate(name, (x, line), xytext=(6, 0), textcoords="offset points", fontsize=8, verticalalignment="center")


def _options(argv: list[str]) -> argparse.Namespace:
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    setting = ON_GPU if has_gpu else ON_CPU
    parser = parser_of("speed", __doc__, setting.engines)
    add_network(parser, setting.network, setting.batch)
    parser.add_argument("--dtype", default="float32", help="dtype policy of the model (float32)")
    parser.add_argument("--rounds", type=int, default=1 if has_gpu else 3, help="turns of each engine (3; on a GPU 1)")
    parser.add_argument("--steps", type=int, default=setting.steps, help=f"steps a turn, >= 2 ({setting.steps})")
    options = parsed(parser, argv)
    options.has_gpu = has_gpu
    if options.arguments is None:
        options.arguments = setting.arguments if options.network == setting.network else {}
    if options.steps < 2 or options.rounds < 1:
        parser.error(f"at least 2 steps and 1 round. Received: --steps {options.steps} --rounds {options.rounds}")
    return options


def main(argv: list[str]) -> int:
    options = _options(argv)
    configurations = [
        Configuration(
            engine=engine,
            network=options.network,
            arguments=options.arguments,
            batch_size=options.batch,
            dtype=options.dtype,
            steps=options.steps,
        )
        for engine in options.engines
    ]
    rows = measure_engines(configurations, options.rounds, has_gpu=options.has_gpu, run=measure.run)
    console = Console()
    title = f"{options.network}, batch {options.batch}, {options.dtype}"
    console.print(table(rows, title))
    say_reasons(console, rows)
    write("speed", options.out, rows=rows)
    draw(console, plot, rows, title, options.out / "speed.png")
    say_written(console, "speed", options.out)
    return 0 if all(row["fits"] for row in rows) else 1
