"""The deepest ResNet that trains under one memory cap: plain TensorFlow (graph and XLA) beside the policies of `SNModel`.

Follows table 4 of Wang et al. 2018 (SuperNeurons): blocks 6, 32, n3 and 6, batch 16, a 12 GiB card; on the CPU a small
relative. Every point is real training steps in a process of its own; see Note: [Memory] in `measure`. Out: a table,
`depth.json` and `depth.png`.
"""

import argparse
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from keras_sn.benchmarks import measure, networks
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.errors import KerasSNError
from keras_sn.sizes import format_bytes, parse_bytes

SECONDS_PER_POINT = 1800
"""A network that has not made its steps by then does not train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The family of networks, and where its search begins and ends."""

    blocks: tuple[int, int, int]
    """Of stages 1, 2 and 4; stage 3 grows."""
    image_size: int
    classes: int
    width: int
    batch_size: int
    memory: str
    first_n3: int
    max_depth: int
    engines: tuple[str, ...]
    jobs: int
    """Engines that are searched at the same time."""

    def all_blocks(self, n3: int) -> tuple[int, int, int, int]:
        return self.blocks[0], self.blocks[1], n3, self.blocks[2]

    def depth(self, n3: int) -> int:
        return networks.depth(*self.all_blocks(n3))

    def largest_n3(self, max_depth: int) -> int:
        return (max_depth - self.depth(0)) // 3


FULL = Setting(
    blocks=(6, 32, 6),
    image_size=224,
    classes=1000,
    width=64,
    batch_size=16,
    memory="12GiB",
    first_n3=64,
    max_depth=4000,
    engines=("keras-graph", "keras-xla", "recompute-xla", "offload-xla", "superneurons-xla"),
    jobs=1,
)
# Few channels and many pixels, so that activations and not gradients fill the memory; the host is the device, so that
# nothing is gained by offloading.
SMALL = Setting(
    blocks=(1, 1, 1),
    image_size=128,
    classes=10,
    width=8,
    batch_size=32,
    memory="88MiB",
    first_n3=4,
    max_depth=302,
    engines=("keras-graph", "keras-xla", "recompute", "recompute-xla"),
    jobs=2,
)


def find_deepest(
    trains: Callable[[int], bool], *, first: int, largest: int, is_close: Callable[[int, int], bool]
) -> int:
    """Finds the largest number that `trains`, by doubling and then by halving the gap.

    Args:
        trains: Whether a network with so many blocks trains; true up to some number and false from there on.
        first: Where to start, at least 1.
        largest: Where to stop.
        is_close: Whether the gap between a number that trains and a larger one that does not is small enough.

    Returns:
        The largest number found to train; 0 if none does.
    """
    deepest, too_deep, n = 0, None, min(first, largest)
    while True:
        if trains(n):
            deepest = n
        else:
            too_deep = n
        if too_deep is None:
            if deepest == largest:
                return deepest
            n = min(2 * deepest, largest)
        elif too_deep - deepest <= 1 or (deepest and is_close(deepest, too_deep)):
            return deepest
        else:
            n = (deepest + too_deep) // 2


class Search:
    """The searches of one run, engine by engine, and the points that they measure."""

    def __init__(self, setting: Setting, options: argparse.Namespace, run: Callable[..., Row] = measure.run):
        self.setting, self.options, self.run = setting, options, run
        self.points: list[Row] = []
        self.deepest: dict[str, int] = {}
        """Engine -> the largest n3 that trains."""
        self.failures: dict[str, str] = {}

    def search_all(self, progress: Progress) -> None:
        """Plain TensorFlow first: the policies then start at the depth that it reached."""
        plain = [engine for engine in self.options.engines if engine.startswith("keras-")]
        policies = [engine for engine in self.options.engines if engine not in plain]
        with ThreadPoolExecutor(self.options.jobs) as pool:
            for engines in (plain, policies):
                first = max([self.setting.first_n3, *self.deepest.values()])
                list(pool.map(lambda engine, first=first: self._search(engine, first, progress), engines))

    def _search(self, engine: str, first: int, progress: Progress) -> None:
        task = progress.add_task(engine, total=None, status="")
        setting = self.setting

        def trains(n3: int) -> bool:
            progress.update(task, status=f"depth {setting.depth(n3)} …")
            point = self.run(self._configuration(engine, n3), SECONDS_PER_POINT)
            self.points.append(point)
            progress.console.print(_describe(point), highlight=False)
            if point["fits"] is None:
                raise KerasSNError(point["reason"])
            return point["fits"]

        def is_close(deepest: int, too_deep: int) -> bool:
            return 3 * (too_deep - deepest) <= self.options.tolerance * setting.depth(deepest)

        largest = setting.largest_n3(self.options.max_depth)
        try:
            self.deepest[engine] = find_deepest(trains, first=first, largest=largest, is_close=is_close)
        except KerasSNError as error:
            self.failures[engine] = str(error)
        progress.update(task, total=1, completed=1, status=self.verdict(engine))

    def _configuration(self, engine: str, n3: int) -> Configuration:
        return Configuration(
            engine=engine,
            blocks=self.setting.all_blocks(n3),
            batch_size=self.options.batch,
            image_size=self.setting.image_size,
            width=self.setting.width,
            classes=self.setting.classes,
            dtype=self.options.dtype,
            memory_bytes=self.options.memory_bytes,
        )

    def verdict(self, engine: str) -> str:
        """The deepest network of an engine, in words."""
        if engine in self.failures:
            return "failed"
        n3 = self.deepest[engine]
        if not n3:
            return f"not even {self.setting.depth(1)}"
        is_end = n3 == self.setting.largest_n3(self.options.max_depth)
        return f"{'at least ' if is_end else ''}{self.setting.depth(n3)}"

    def deepest_point(self, engine: str) -> Row | None:
        depth = self.setting.depth(self.deepest.get(engine, 0))
        return next((p for p in self.points if p["engine"] == engine and p["depth"] == depth and p["fits"]), None)


def _describe(point: Row) -> str:
    name = f"{point['engine']:>16}  depth {point['depth']:>5}: "
    peak = format_bytes(point["peak_bytes"]) if point["peak_bytes"] is not None else point["reason"]
    return name + ("failed: " if point["fits"] is None else "trains, " if point["fits"] else "too deep, ") + peak


def _table(search: Search) -> Table:
    options = search.options
    title = f"Deepest ResNet that trains, batch {options.batch}, {format_bytes(options.memory_bytes)}"
    table = Table(title=title)
    for column in ("engine", "depth", "× plain", "peak", "s/step", "first step, s"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    plain_n3 = max((n3 for engine, n3 in search.deepest.items() if engine.startswith("keras-")), default=0)
    for engine in options.engines:
        point = search.deepest_point(engine)
        cells = [engine, search.verdict(engine)]
        if point:
            ratio = f"{point['depth'] / search.setting.depth(plain_n3):.1f}" if plain_n3 else ""
            seconds = f"{point['seconds_per_step']:.3g}", f"{point['first_step_seconds']:.0f}"
            cells += [ratio, format_bytes(point["peak_bytes"]), *seconds]
        table.add_row(*cells)
    return table


def _as_json(search: Search) -> dict[str, Any]:
    deepest = {engine: search.setting.depth(n3) if n3 else None for engine, n3 in search.deepest.items()}
    options = {name: value for name, value in vars(search.options).items() if name != "out"}
    head = {"benchmark": "depth", "date": datetime.now(UTC).isoformat(timespec="seconds")} | measure.provenance()
    return head | {"options": options, "deepest": deepest, "failures": search.failures, "points": search.points}


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws peak memory over depth, one line an engine; hollow points do not fit.

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
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    for engine in report["options"]["engines"]:
        points = [p for p in report["points"] if p["engine"] == engine and p["peak_bytes"] is not None]
        points.sort(key=lambda p: p["depth"])
        (line,) = axes.plot([p["depth"] for p in points], [p["peak_bytes"] / 2**20 for p in points], label=engine)
        for p in points:
            face = line.get_color() if p["fits"] else "white"
            axes.plot(p["depth"], p["peak_bytes"] / 2**20, "o", color=line.get_color(), markerfacecolor=face)
    axes.axhline(report["options"]["memory_bytes"] / 2**20, color="black", linestyle="--", label="cap")
    axes.set(xscale="log", xlabel="depth (layers with weights)", ylabel="peak memory (MiB)", ylim=(0, None))
    axes.set_title(f"ResNet, batch {report['options']['batch']}: hollow points do not fit")
    axes.legend()
    figure.savefig(path, dpi=150)


def _options(argv: list[str]) -> tuple[Setting, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks depth", description=__doc__)
    parser.add_argument("--small", action="store_true", help="the small network; without a GPU always")
    parser.add_argument("--memory", metavar="SIZE", help="the cap (12GiB; small: 88MiB)")
    parser.add_argument("--batch", type=int, metavar="N", help="samples in a batch (16; small: 32)")
    parser.add_argument("--dtype", default="float32", help="dtype policy of the model (float32)")
    parser.add_argument("--engines", nargs="+", metavar="ENGINE", help=f"of {', '.join(measure.ENGINES)}")
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
        measure.check_engines(options.engines)
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
    columns = SpinnerColumn(), TextColumn("{task.description:>16}  {task.fields[status]}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        search.search_all(progress)
    console.print(_table(search))
    for engine, reason in search.failures.items():
        console.print(f"{engine} failed:\n{reason}", highlight=False, markup=False)
    options.out.mkdir(parents=True, exist_ok=True)
    report = _as_json(search)
    (options.out / "depth.json").write_text(json.dumps(report, indent=1) + "\n")
    try:
        plot(report, options.out / "depth.png")
    except KerasSNError as error:
        console.print(str(error), highlight=False, markup=False)
    console.print(f"Written: {', '.join(str(path) for path in sorted(options.out.glob('depth.*')))}", highlight=False)
    return 1 if search.failures else 0
