"""Bytes against seconds, on paper: what each policy is planned to need and to take, from plain Keras down to a tenth of it.

Six networks at full size, their layer graphs traced on the CPU and nothing trained. The seconds come from the constants of one
device (`cost.ON_GPU`), not from a measurement. Out: `frontier.json` and `frontier.png`.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import keras
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from keras_sn.benchmarks.networks import NETWORKS
from keras_sn.benchmarks.reports import draw, head, new_figure, say_written
from keras_sn.cost import ON_GPU
from keras_sn.errors import BudgetError
from keras_sn.graph import DTYPE_BYTES, LayerGraph
from keras_sn.plan import Plan
from keras_sn.planner import make_plan
from keras_sn.trace import trace

SHARES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1)
"""Budgets, as shares of the bytes that plain Keras holds beyond the reserved ones."""
OTHERS = ("superneurons", "recompute", "offload")

Row = dict[str, Any]
"""A plan: network, policy, budget and its share, planned peak, planned seconds over plain Keras', seconds that planning took."""


@dataclass(frozen=True, slots=True)
class Case:
    """One network at one batch size."""

    title: str
    build: Callable[[], keras.Model]
    batch_size: int


CASES = {
    "resnet50": Case("ResNet-50, 224 px", partial(NETWORKS["resnet50"], image_size=224), 64),
    "vgg16": Case("VGG-16, 224 px", partial(NETWORKS["vgg16"], image_size=224), 64),
    "inception_v4": Case("Inception-v4, 299 px", partial(NETWORKS["inception_v4"], image_size=299), 32),
    "densenet": Case("DenseNet-121, 224 px", partial(NETWORKS["densenet"], image_size=224), 32),
    "unet": Case("U-Net, 512 px", partial(NETWORKS["unet"], image_size=512), 8),
    "bert": Case("BERT-base, length 128", partial(NETWORKS["bert"], length=128), 32),
}


@dataclass(frozen=True)
class Frontier:
    """Plans one traced network.

    Args:
        name: For the rows.
        graph: The layer graph.
        batch_size: Samples in a batch.
        reserved_bytes: Weights and the optimizer's slots.
        compiled: Whether XLA compiles the regions.
    """

    name: str
    graph: LayerGraph
    batch_size: int
    reserved_bytes: int
    compiled: bool = True

    @classmethod
    def of(cls, name: str, case: Case, *, compiled: bool) -> "Frontier":
        """Builds and traces a network; the bytes that no plan can move are weights, statistics, and SGD's momentum."""
        model = case.build()
        reserved_bytes = _nbytes(model.weights) + _nbytes(model.trainable_weights)
        return cls(name, trace(model, case.batch_size).graph, case.batch_size, reserved_bytes, compiled)

    def plan(self, policy: str, budget_bytes: int | None = None) -> Plan:
        """The plan of a policy; see `make_plan`."""
        return make_plan(
            self.graph,
            policy,
            batch_size=self.batch_size,
            reserved_bytes=self.reserved_bytes,
            budget_bytes=budget_bytes,
            cost_model=ON_GPU,
            compiled=self.compiled,
        )

    def budget_bytes(self, share: float) -> int:
        """The reserved bytes, and a share of what plain Keras holds beyond them."""
        return self.reserved_bytes + int(share * (self.plan("none").plain_peak_bytes - self.reserved_bytes))

    def summary(self) -> dict[str, Any]:
        """What the rows are compared with."""
        plain = self.plan("none")
        return {
            "batch_size": self.batch_size,
            "layer_calls": len(self.graph.layers),
            "reserved_bytes": self.reserved_bytes,
            "plain_peak_bytes": plain.plain_peak_bytes,
            "plain_seconds": plain.plain_seconds,
        }

    def rows(self, shares: Sequence[float] = SHARES) -> Iterator[Row]:
        """A row for each plan, in the order of planning.

        `"recompute"` does not look at its budget, so it has one row. `"auto"` is also planned with the bytes of that plan. Below
        the first budget that `"auto"` finds nothing for, it is not asked again.
        """
        recompute = self._row("recompute", None)
        yield recompute
        budgets = {self.budget_bytes(share): share for share in shares}
        for budget_bytes, share in budgets.items():
            yield from (self._row(policy, budget_bytes, share) for policy in ("superneurons", "offload"))
        is_possible = True
        for budget_bytes in sorted({*budgets, recompute["planned_peak_bytes"]}, reverse=True):
            row = self._row("auto", budget_bytes, budgets.get(budget_bytes), is_possible=is_possible)
            is_possible = row["planned_peak_bytes"] is not None
            yield row

    def _row(self, policy: str, budget_bytes: int | None, share: float | None = None, *, is_possible: bool = True) -> Row:
        started = time.perf_counter()
        plan = None
        if is_possible:
            try:
                plan = self.plan(policy, budget_bytes)
            except BudgetError:
                plan = None
        return {
            "network": self.name,
            "policy": policy,
            "budget_share": share,
            "budget_bytes": budget_bytes,
            "planned_peak_bytes": plan and plan.planned_peak_bytes,
            "planned_slowdown": plan and plan.slowdown,
            "offloaded_bytes": plan and plan.offloaded_bytes,
            "regions": plan and len(plan.regions),
            "planning_seconds": round(time.perf_counter() - started, 3) if is_possible else None,
        }


def _nbytes(weights: Sequence[keras.Variable]) -> int:
    return sum(prod(weight.shape) * DTYPE_BYTES[weight.dtype] for weight in weights)


def collect(cases: dict[str, Case], *, compiled: bool, console: Console, shares: Sequence[float] = SHARES) -> dict[str, Any]:
    """Plans every network with every policy; returns the report."""
    report = head("frontier") | {"compiled": compiled, "cost_model": asdict(ON_GPU), "networks": {}, "rows": []}
    columns = (
        TextColumn("{task.description:>14}"),
        BarColumn(20),
        MofNCompleteColumn(),
        TextColumn("plans"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        for name, case in cases.items():
            task = progress.add_task(name, total=1 + 3 * len(shares) + 1)
            frontier = Frontier.of(name, case, compiled=compiled)
            report["networks"][name] = {"title": case.title} | frontier.summary()
            for row in frontier.rows(shares):
                report["rows"].append(row)
                progress.advance(task)
            keras.backend.clear_session()
    return report


def plot(report: dict[str, Any], path: Path) -> None:
    """Draws one panel for each network: planned slow-down over planned peak, both against plain Keras.

    Raises:
        KerasSNError: matplotlib is not installed.
    """
    names = list(report["networks"])
    lines = -(-len(names) // 3)
    figure = new_figure(path, (16, 1.5 + 4.5 * lines))
    panels = figure.subplots(lines, min(3, len(names)), squeeze=False, sharex=True, sharey=True).ravel()
    for axes, name in zip(panels, names, strict=False):
        _draw(axes, report["networks"][name], [row for row in report["rows"] if row["network"] == name])
    for axes in panels[len(names) :]:
        axes.set_visible(False)
    for axes in panels[:: min(3, len(names))]:
        axes.set_ylabel("planned slow-down, % (lower is better)", fontsize=12)
    for axes in panels[max(0, len(names) - 3) : len(names)]:
        axes.set_xlabel("planned peak memory / plain Keras' (lower is better)", fontsize=12)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=12, frameon=False)
    figure.suptitle(_title(report), fontsize=15)
    figure.savefig(path, dpi=100)


COLORS = {"auto": "#0072B2", "superneurons": "#D55E00", "recompute": "#009E73", "offload": "#CC79A7"}
"""Okabe and Ito's, which colour-blind readers can tell apart."""
MARKERS = {"superneurons": "s", "recompute": "D", "offload": "^"}
TICKS = (0, 2, 5, 10, 30, 100, 300, 1000, 3000)
LINEAR_PERCENT = 10
"""Up to here the axis of the slow-down is linear, so that nothing at all has a place on it."""


def _draw(axes: Any, network: dict[str, Any], rows: Sequence[Row]) -> None:
    points = {policy: _points(network, [row for row in rows if row["policy"] == policy]) for policy in ("auto", *OTHERS)}
    for policy in OTHERS:
        axes.plot(
            *zip(*points[policy], strict=True), MARKERS[policy], color=COLORS[policy], markersize=9, alpha=0.8, label=policy
        )
    axes.plot(*zip(*points["auto"], strict=True), "o-", color=COLORS["auto"], markersize=5, linewidth=2, label="auto")
    axes.axvspan(0, network["reserved_bytes"] / network["plain_peak_bytes"], color="0.9", label="weights and momentum")
    axes.set_yscale("symlog", linthresh=LINEAR_PERCENT)
    axes.set_yticks(TICKS, [f"{tick:,}" for tick in TICKS], minor=False)
    axes.set_yticks([], minor=True)
    axes.set(xlim=(0, 1.1), ylim=(-0.5, 2 * TICKS[-1]))
    axes.grid(color="0.9")
    peak = f"{network['plain_peak_bytes'] / 2**30:.1f} GiB, {1000 * network['plain_seconds']:.0f} ms"
    axes.set_title(f"{network['title']}, batch {network['batch_size']} (plain: {peak})", fontsize=12)


def _points(network: dict[str, Any], rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Share of plain Keras' peak and percent of slow-down, ascending."""
    fitting = [row for row in rows if row["planned_peak_bytes"] is not None]
    plain = network["plain_peak_bytes"]
    return sorted({(row["planned_peak_bytes"] / plain, 100 * (row["planned_slowdown"] - 1)) for row in fitting})


def _title(report: dict[str, Any]) -> str:
    model = report["cost_model"]
    compiled = "compiled by XLA" if report["compiled"] else "not compiled"
    waits = "computes on" if model["copies_overlap"] else "waits"
    constants = (
        f"{model['flops_per_second'] / 1e12:.0f} TFLOP/s (convolutions {model['convolution_rates'][0][1] / 1e12:.0f}), "
        f"memory {model['bytes_per_second'] / 1e12:.1f} TB/s, link {model['link_bytes_per_second'] / 1e9:.0f} GB/s, "
        f"launch {model['launch_seconds'] * 1e6:.0f} µs, {waits} while it copies"
    )
    return f"Memory against time of a training step, as planned (nothing measured), {compiled}\n{constants}"


def _table(report: dict[str, Any]) -> Table:
    table = Table(title="Planned slow-down of 'auto', by budget for activations")
    for column in ("budget", *report["networks"]):
        table.add_column(column, justify="right", no_wrap=True)
    auto = [row for row in report["rows"] if row["policy"] == "auto" and row["budget_share"] is not None]
    slowdowns = {(row["network"], row["budget_share"]): row["planned_slowdown"] for row in auto}
    for share in sorted({row["budget_share"] for row in auto}, reverse=True):
        cells = (slowdowns.get((name, share)) for name in report["networks"])
        table.add_row(f"{100 * share:g} %", *("-" if one is None else f"{one:.2f}" for one in cells))
    return table


def main(argv: list[str]) -> int:
    """Plans the networks, writes both files, and prints the plans of `"auto"`."""
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks frontier", description=__doc__)
    parser.add_argument("--networks", nargs="+", metavar="NAME", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder of frontier.json, frontier.png")
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="regions as XLA compiles them")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.networks if name not in CASES]:
        parser.error(f"unknown network; choose from {', '.join(CASES)}. Received: {unknown[0]!r}")
    console = Console()
    report = collect({name: CASES[name] for name in options.networks}, compiled=options.compiled, console=console)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "frontier.json").write_text(json.dumps(report, indent=1) + "\n")
    console.print(_table(report))
    draw(console, plot, report, options.out / "frontier.png")
    say_written(console, "frontier", options.out)
    return 0
