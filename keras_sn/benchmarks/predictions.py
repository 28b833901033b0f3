"""The plan beside the machine: planned and measured peak, planned and measured seconds, for networks and budgets.

On a GPU the peak is the allocator's, weights and optimizer slots included, and the budgets are shares of the peak that plain
Keras was measured to need. On a CPU it is the resident memory that a training step adds, against the planned peak without what
is reserved, and the budgets are shares of what plain Keras is planned to add (see Note: [Memory] in `measure`).
Out: a table and `predictions.json`.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from keras_sn.benchmarks import measure
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.benchmarks.reports import new_table, say_written, write
from keras_sn.sizes import format_bytes


@dataclass(frozen=True, slots=True)
class Case:
    """A network at one batch size."""

    network: str
    batch_size: int
    arguments: dict[str, Any] = field(default_factory=dict)


ON_GPU = (Case("resnet50", 64), Case("unet", 8), Case("vit", 32), Case("bert", 32), Case("densenet", 32))
# So many pixels and so few channels that activations, and not the scratch memory of single operations, make the peak.
ON_CPU = (
    Case("resnet50", 32, {"image_size": 128, "width": 16, "classes": 10}),
    Case("unet", 8, {"image_size": 128, "width": 16}),
    Case("vit", 32, {"image_size": 128, "patch": 8, "width": 96, "depth": 6, "heads": 4, "mlp": 384, "classes": 10}),
    Case("densenet", 32, {"blocks": (6, 12), "growth": 12, "image_size": 128, "width": 24, "classes": 10}),
)
SHARES = (1.0, 0.75, 0.55, 0.4)


@dataclass(frozen=True, slots=True)
class Comparison:
    """How the cases are measured.

    Args:
        shares: The budgets; plain Keras, 1, is always measured.
        has_gpu: Whether XLA compiles and the allocator is asked.
        steps: Training steps of one process.
        jobs: Processes at a time.
        run: Measures one configuration.
    """

    shares: Sequence[float]
    has_gpu: bool
    steps: int
    jobs: int = 1
    run: Callable[[Configuration], Row] = measure.run

    def rows(self, cases: Sequence[Case]) -> list[Row]:
        """Plain Keras for every case, then the budgets; the rows in the order of the cases."""
        with ThreadPoolExecutor(self.jobs) as pool:
            plain = list(pool.map(self.run, map(self._plain, cases)))
            trained = [(case, row) for case, row in zip(cases, plain, strict=True) if row["fits"]]
            with_budgets = pool.map(self.run, (one for case, row in trained for one in self._with_budgets(case, row)))
            rows = [with_errors(row, has_gpu=self.has_gpu) for row in (*plain, *with_budgets)]
        order = [case.network for case in cases]
        return sorted(rows, key=lambda row: order.index(row["network"]))

    def _plain(self, case: Case) -> Configuration:
        return Configuration(
            engine="none-xla" if self.has_gpu else "none",
            network=case.network,
            arguments=case.arguments,
            batch_size=case.batch_size,
            steps=self.steps,
        )

    def _with_budgets(self, case: Case, plain: Row) -> Iterator[Configuration]:
        start = 0 if self.has_gpu else plain["reserved_bytes"]
        full = plain["peak_bytes"] if self.has_gpu else plain["planned_peak_bytes"]
        for share in self.shares:
            if share < 1:
                budget_bytes = start + int(share * (full - start))
                yield replace(self._plain(case), engine="auto-xla" if self.has_gpu else "auto", budget_bytes=budget_bytes)


def with_errors(row: Row, *, has_gpu: bool) -> Row:
    """The row with how far the plan is off, as shares of what was measured; unchanged if it was not measured."""
    if not row["fits"]:
        return row
    planned_bytes = row["planned_peak_bytes"] - (0 if has_gpu else row["reserved_bytes"])
    return row | {
        "planned_bytes": planned_bytes,
        "error_of_bytes": planned_bytes / row["peak_bytes"] - 1,
        "error_of_seconds": row["planned_seconds"] / row["seconds_per_step"] - 1,
    }


def table(rows: Sequence[Row], title: str, *, has_gpu: bool) -> Table:
    """One line a row; without a GPU no seconds, since the planner's are constants there."""
    numbers = ["budget", "planned", "measured", "off by"] + ["planned s", "measured s", "off by"] * has_gpu
    shown = new_table(title, ["network"], numbers)
    for row in rows:
        budget = format_bytes(row["budget_bytes"]) if row["budget_bytes"] else "plain Keras"
        if not row["fits"]:
            shown.add_row(row["network"], budget, row["reason"].splitlines()[-1])
            continue
        peaks = format_bytes(row["planned_bytes"]), format_bytes(row["peak_bytes"]), f"{row['error_of_bytes']:+.1%}"
        seconds = f"{row['planned_seconds']:.4g}", f"{row['seconds_per_step']:.4g}", f"{row['error_of_seconds']:+.0%}"
        shown.add_row(row["network"], budget, *peaks, *(seconds if has_gpu else ()))
    return shown


def main(argv: list[str]) -> int:
    has_gpu = bool(tf.config.list_physical_devices("GPU"))
    cases = {case.network: case for case in (ON_GPU if has_gpu else ON_CPU)}
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks predictions", description=__doc__)
    parser.add_argument(
        "--networks", nargs="+", choices=cases, default=list(cases), metavar="NAME", help=f"of {', '.join(cases)}"
    )
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES, metavar="SHARE", help="budgets (1.0 0.75 0.55 0.4)")
    parser.add_argument("--steps", type=int, default=12 if has_gpu else 3, help="training steps, >= 2 (12; without a GPU 3)")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time; more than 1 spoils the seconds (1)")
    parser.add_argument("--out", type=Path, default=Path("benchmark_output"), help="folder of predictions.json")
    options = parser.parse_args(argv)
    if options.steps < 2 or options.jobs < 1 or not all(0 < share <= 1 for share in options.shares):
        parser.error(f"at least 2 steps and 1 job, and shares of 1. Received: {vars(options)}")
    comparison = Comparison(options.shares, has_gpu, options.steps, options.jobs)
    rows = comparison.rows([cases[name] for name in options.networks])
    console = Console()
    title = "Planned and measured: " + ("the allocator's peak" if has_gpu else "what a training step adds")
    console.print(table(rows, title, has_gpu=has_gpu))
    write("predictions", options.out, jobs=options.jobs, rows=rows)
    say_written(console, "predictions", options.out)
    return 0 if all(row["fits"] for row in rows) else 1
