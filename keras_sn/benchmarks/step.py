"""Memory and speed of one training step, side by side: plain Keras and the policies of `SNModel`.

The engines take turns, each turn in a process of its own, so that a busy machine slows all of them. Without a GPU
memory and speed are measured in different processes; see Note: [Memory] in `measure`. Out: a table of medians and of
ratios to the first engine, and `step.json` with one row an engine.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import tensorflow as tf
from rich.console import Console
from rich.progress import track
from rich.table import Table

from keras_sn.benchmarks import measure, networks
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.benchmarks.reports import head
from keras_sn.errors import KerasSNError
from keras_sn.sizes import format_bytes

NETWORKS = {"resnet50": networks.RESNET_50, "resnet122": networks.RESNET_122}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Defaults of a device."""

    network: str
    batch: int
    image: int
    width: int
    steps: int
    engines: tuple[str, ...]


ON_GPU = Setting(
    network="resnet50",
    batch=64,
    image=224,
    width=64,
    steps=30,
    engines=("keras-xla", "keras-graph", "recompute-xla", "superneurons-xla", "offload-xla"),
)
ON_CPU = Setting(
    network="resnet122",
    batch=32,
    image=128,
    width=16,
    steps=6,
    engines=("keras-graph", "keras-xla", "recompute", "recompute-xla"),
)


def measure_engines(
    configurations: dict[str, Configuration], rounds: int, *, has_gpu: bool, run: Callable[[Configuration], Row]
) -> list[Row]:
    """Runs every engine once for memory and `rounds` times for speed, in turns.

    Returns:
        One row an engine: its memory row with the medians of its speed rows in it, and those rows under `rounds`.
    """
    turns = [(engine, "memory") for engine in configurations] if not has_gpu else []
    turns += [(engine, "memory" if has_gpu else "speed") for _ in range(rounds) for engine in configurations]
    rows: dict[str, list[Row]] = {engine: [] for engine in configurations}
    for engine, purpose in track(turns, description="training"):
        steps = 3 if purpose == "memory" and not has_gpu else configurations[engine].steps
        rows[engine].append(run(replace(configurations[engine], purpose=purpose, steps=steps)))
    return [_summary(of_engine, skip=0 if has_gpu else 1) for of_engine in rows.values()]


def _summary(rows: list[Row], *, skip: int) -> Row:
    failed = next((row for row in rows if not row["fits"]), None)
    if failed:
        return failed
    medians = {name: median(row[name] for row in rows[skip:]) for name in ("seconds_per_step", "first_step_seconds")}
    return rows[0] | medians | {"rounds": rows[skip:]}


def table(rows: list[Row], title: str) -> Table:
    """Memory and speed of every engine, and both as ratios to the first."""
    shown = Table(title=title)
    for column in ("engine", "memory", "of the first's", "s/step", "speed of the first's", "first step, s"):
        shown.add_column(column, justify="left" if column == "engine" else "right")
    first = rows[0]
    for row in rows:
        if not row["fits"]:
            shown.add_row(row["engine"], row["reason"].splitlines()[-1])
            continue
        peak_bytes, memory, speed = row["peak_bytes"], "", ""  # None for a rival without a GPU
        if first["fits"]:
            memory = f"{peak_bytes / first['peak_bytes']:.2f}" if peak_bytes and first["peak_bytes"] else ""
            speed = f"{first['seconds_per_step'] / row['seconds_per_step']:.2f}"
        seconds = f"{row['seconds_per_step']:.4g}"
        first_step = f"{row['first_step_seconds']:.0f}"
        peak = format_bytes(peak_bytes) if peak_bytes else ""
        shown.add_row(row["engine"], peak, memory, seconds, speed, first_step)
    return shown


def _options(argv: list[str]) -> argparse.Namespace:
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    setting = ON_GPU if has_gpu else ON_CPU
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks step", description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default=setting.network, help=f"({setting.network})")
    parser.add_argument("--batch", type=int, default=setting.batch, help=f"samples in a batch ({setting.batch})")
    parser.add_argument("--image", type=int, default=setting.image, help=f"pixels ({setting.image})")
    parser.add_argument("--width", type=int, default=setting.width, help=f"channels of the stem ({setting.width})")
    parser.add_argument("--dtype", default="float32", help="dtype policy of the model (float32)")
    parser.add_argument("--engines", nargs="+", metavar="ENGINE", default=list(setting.engines))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each engine (3)")
    parser.add_argument("--steps", type=int, default=setting.steps, help=f"steps a turn, >= 2 ({setting.steps})")
    parser.add_argument("--out", type=Path, default=Path("benchmark_output"), help="folder of step.json")
    options = parser.parse_args(argv)
    options.has_gpu = has_gpu
    try:
        measure.check_engines(options.engines)
    except KerasSNError as error:
        parser.error(str(error))
    if options.steps < 2 or options.rounds < 1:
        parser.error(f"at least 2 steps and 1 round. Received: --steps {options.steps} --rounds {options.rounds}")
    return options


def main(argv: list[str]) -> int:
    options = _options(argv)
    configurations = {
        engine: Configuration(
            engine=engine,
            network="resnet",
            arguments={"blocks": NETWORKS[options.network], "image_size": options.image, "width": options.width},
            batch_size=options.batch,
            dtype=options.dtype,
            steps=options.steps,
        )
        for engine in options.engines
    }
    rows = measure_engines(configurations, options.rounds, has_gpu=options.has_gpu, run=measure.run)
    console = Console()
    title = f"{options.network}, {options.image} px, batch {options.batch}, {options.dtype}"
    console.print(table(rows, title))
    report = head("step") | {"rows": rows}
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "step.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(f"Written: {options.out / 'step.json'}", highlight=False)
    return 0 if all(row["fits"] for row in rows) else 1
