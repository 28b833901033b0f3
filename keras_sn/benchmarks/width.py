"""The widest batch that trains under a memory cap, plain Keras beside `SNModel`, with the images a second at that batch.

Follows table 5 of Wang et al. 2018 (SuperNeurons): a 12 GiB card. Every point is real training steps in a process of its own.
Out: a table, `width.json` and `width.png`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from keras_sn.benchmarks import measure
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.benchmarks.networks import NETWORKS
from keras_sn.benchmarks.options import parsed, parser_of
from keras_sn.benchmarks.reports import draw, new_table, plot_bars, say_reasons, say_written, write
from keras_sn.benchmarks.search import find_deepest
from keras_sn.errors import KerasSNError
from keras_sn.sizes import parse_bytes

ON_GPU = ("resnet50", "resnet101", "resnet152", "vgg16", "inception_v4")
ENGINES = {True: ("keras-xla", "auto-xla"), False: ("keras-graph", "auto")}
"""Plain Keras first; with and without a GPU."""


class _NotMeasured(Exception):
    """Ends a search."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WidthSearch:
    """How the widest batch is looked for."""

    memory_bytes: int
    steps: int
    tolerance: float
    """Of the batch, as a share."""
    largest: int
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the networks' builders."""
    run: Callable[..., Row] = measure.run

    def widest(self, network: str, engine: str, first: int) -> tuple[int | None, list[Row]]:
        """The widest batch that trains, and every point that was measured on the way.

        The batch is 0 if none trains, and None if the last point could not be measured; its `reason` says why.
        """
        points: list[Row] = []

        def trains(batch_size: int) -> bool:
            configuration = Configuration(
                engine=engine,
                network=network,
                arguments=self.arguments,
                batch_size=batch_size,
                memory_bytes=self.memory_bytes,
                steps=self.steps,
            )
            points.append(self.run(configuration))
            if points[-1]["fits"] is None:
                raise _NotMeasured
            return points[-1]["fits"]

        def is_close(fits: int, does_not: int) -> bool:
            return does_not - fits <= self.tolerance * fits

        try:
            return find_deepest(trains, first=first, largest=self.largest, is_close=is_close), points
        except _NotMeasured:
            return None, points

    def compare(self, network: str, engines: Sequence[str], first: int) -> Row:
        """One network with all engines; each starts from the widest batch of the one before."""
        found: dict[str, int | None] = {}
        points: list[Row] = []
        for engine in engines:
            found[engine], measured = self.widest(network, engine, max([first, *filter(None, found.values())]))
            points += measured
        return {"network": network, "widest": found, "points": points}


def table(rows: Sequence[Row], engines: Sequence[str], title: str) -> Table:
    """A line for each network and engine."""
    shown = new_table(title, ["network", "engine"], ["widest batch", "x plain", "samples/s", "of plain's best"])
    for row in rows:
        best = max((speed for _, speed in _speeds(row, engines[0])), default=0.0)
        for engine in engines:
            batch, plain = row["widest"][engine], row["widest"][engines[0]]
            if batch is None:
                shown.add_row(row["network"], engine, "failed")
                continue
            speed = dict(_speeds(row, engine)).get(batch, 0.0)
            ratio = f"{batch / plain:.1f}" if plain else ""
            shown.add_row(row["network"], engine, str(batch), ratio, f"{speed:.0f}", f"{speed / best:.2f}" if best else "")
    return shown


def _speeds(row: Row, engine: str) -> list[tuple[int, float]]:
    """Batch and samples a second of every point that trained."""
    of_engine = [one for one in row["points"] if one["engine"] == engine and one["fits"]]
    return [(one["batch_size"], one["batch_size"] / one["seconds_per_step"]) for one in of_engine]


def main(argv: list[str]) -> int:
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    parser = parser_of("width", __doc__, ENGINES[has_gpu])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(ON_GPU), metavar="NAME")
    parser.add_argument("--memory", metavar="SIZE", default="12GiB", help="the cap (12GiB)")
    parser.add_argument("--first", type=int, default=64, help="the first batch that is tried (64)")
    parser.add_argument("--largest", type=int, default=4096, help="where the search ends (4096)")
    parser.add_argument("--tolerance", type=float, default=0.1, metavar="SHARE", help="of the batch (0.1)")
    parser.add_argument("--steps", type=int, default=6, help="training steps, >= 2 (6)")
    options = parsed(parser, argv)
    try:
        memory_bytes = parse_bytes(options.memory, argument="memory")
    except KerasSNError as error:
        parser.error(str(error))
    if options.steps < 2 or not 1 <= options.first <= options.largest:
        parser.error(f"at least 2 steps, and 1 <= first <= largest. Received: {vars(options)}")
    search = WidthSearch(
        memory_bytes=memory_bytes,
        steps=options.steps,
        tolerance=options.tolerance,
        largest=options.largest,
        arguments=options.arguments or {},
    )
    rows, console = [], Console()
    for network in options.networks:
        rows.append(search.compare(network, options.engines, options.first))
        write("width", options.out, memory_bytes=memory_bytes, rows=rows)  # a run that is cut short leaves what it found
    title = f"The widest batch within {options.memory}"
    console.print(table(rows, options.engines, title))
    say_reasons(console, (point for row in rows for point in row["points"] if point["fits"] is None))
    widest = {row["network"]: row["widest"] for row in rows}
    draw(console, plot_bars, widest, title, "samples in a batch", options.out / "width.png")
    say_written(console, "width", options.out)
    return 0 if all(batch is not None for found in widest.values() for batch in found.values()) else 1
