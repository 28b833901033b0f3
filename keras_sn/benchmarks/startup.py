"""Seconds until the first training step is done: tracing, planning, compiling, and the step itself.

Each engine in a process of its own, in turns. Out: a table of medians, `startup.json` and `startup.png`.
"""

from collections.abc import Callable, Sequence
from statistics import median

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from keras_sn.benchmarks import measure
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.benchmarks.options import add_network, parsed, parser_of
from keras_sn.benchmarks.reports import draw, new_table, plot_bars, say_reasons, say_written, verdict, write

ENGINES = {True: ("keras-xla", "keras-graph", "recompute-xla", "auto@0.5-xla"), False: ("keras-graph", "recompute", "auto@0.5")}
"""Plain Keras first; with and without a GPU."""


def measure_starts(configurations: Sequence[Configuration], rounds: int, run: Callable[[Configuration], Row]) -> list[Row]:
    """One row an engine, with the median of its first steps; a row that could not be measured as it is."""
    rows: list[list[Row]] = [[] for _ in configurations]
    for _ in range(rounds):
        for place, one in enumerate(configurations):
            rows[place].append(run(one))
    return [_summary(of_engine) for of_engine in rows]


def _summary(rows: Sequence[Row]) -> Row:
    failed = next((row for row in rows if not row["fits"]), None)
    seconds = [row.get("first_step_seconds", 0.0) for row in rows]
    return failed or rows[0] | {"first_step_seconds": median(seconds), "rounds": seconds}


def table(rows: Sequence[Row], title: str) -> Table:
    """The first steps, and how often as long as the first engine's they take."""
    shown = new_table(title, ["engine"], ["first step, s", "x the first's", "s/step after it"])
    for row in rows:
        if not row["fits"]:
            shown.add_row(row["engine"], verdict(row))
            continue
        first = rows[0].get("first_step_seconds") if rows[0]["fits"] else None
        ratio = f"{row['first_step_seconds'] / first:.2f}" if first else ""
        shown.add_row(row["engine"], f"{row['first_step_seconds']:.1f}", ratio, f"{row['seconds_per_step']:.3g}")
    return shown


def main(argv: list[str]) -> int:
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    parser = parser_of("startup", __doc__, ENGINES[has_gpu])
    add_network(parser)
    parser.add_argument("--rounds", type=int, default=1, help="turns of each engine (1)")
    options = parsed(parser, argv)
    if options.rounds < 1:
        parser.error(f"at least 1 round. Received: --rounds {options.rounds}")
    what = {"network": options.network, "arguments": options.arguments or {}, "batch_size": options.batch}
    rows = measure_starts([Configuration(engine=engine, **what) for engine in options.engines], options.rounds, measure.run)
    console = Console()
    title, name = "Until the first step is done", f"{options.network}, batch {options.batch}"
    console.print(table(rows, f"{title}: {name}"))
    say_reasons(console, rows)
    write("startup", options.out, rows=rows)
    seconds = {row["engine"]: row["first_step_seconds"] if row["fits"] else None for row in rows}
    draw(console, plot_bars, {name: seconds}, title, "seconds", options.out / "startup.png")
    say_written(console, "startup", options.out)
    return 0 if all(row["fits"] for row in rows) else 1
