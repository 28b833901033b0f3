"""What a person reads: a plan as a table, a plan in one line, and the measured peak beside the planned one."""

from typing import Any

import keras
from rich import box
from rich.console import Console
from rich.table import Table

from keras_sn import device
from keras_sn.log import log
from keras_sn.plan import DEVICE, Plan, Region
from keras_sn.sizes import format_bytes


def format_plan(plan: Plan, width: int = 80) -> str:
    """Shows a plan as a table, one row for each region.

    Args:
        plan: The plan.
        width: The width of the table in characters.

    Returns:
        The table with a line of totals under it.
    """
    table = Table(title=f"Plan for batch size {plan.batch_size}, policy {plan.policy!r}", box=box.SIMPLE_HEAD)
    table.add_column("region", justify="right")
    table.add_column("layer calls", overflow="fold")
    table.add_column("count", justify="right")
    table.add_column("what happens")
    table.add_column("on device", justify="right")
    table.add_column("to host", justify="right")
    for index, region in enumerate(plan.regions):
        here = sum(one.tier == DEVICE for one in region.saved)
        first, last = region.layers[0], region.layers[-1]
        calls = first if first == last else f"{first} … {last}"
        away = len(region.saved) - here
        table.add_row(
            str(index),
            calls,
            str(len(region.layers)),
            _action(region),
            f"{here} saved" * bool(here),
            f"{away} saved" * bool(away),
        )
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        if plan.regions:
            console.print(table)
    return captured.get() + plan_line(plan)


def _action(region: Region) -> str:
    if not region.recompute:
        return "keep"
    return "recompute" if all(one.tensor not in region.layers for one in region.saved) else "restore"


def plan_line(plan: Plan) -> str:
    """A plan in one line: budget, plain peak, planned peak, regions, offloaded bytes, slow-down."""
    budget = f"budget {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else "no budget"
    if plan.is_plain:
        return f"{budget} | plain Keras fits: {format_bytes(plan.plain_peak_bytes)} planned | Keras' own train step"
    again = sum(region.recompute for region in plan.regions)
    return (
        f"{budget} | plain peak {format_bytes(plan.plain_peak_bytes)} (planned) -> {format_bytes(plan.planned_peak_bytes)}, "
        f"at {plan.peak_layer} | {again} of {len(plan.regions)} regions recomputed | "
        f"{format_bytes(plan.offloaded_bytes)} to the host | {100 * (plan.slowdown - 1):.0f} % more arithmetic"
    )


class MeasuredPeak(keras.callbacks.Callback):
    """Logs, after the first epoch, the measured peak beside the planned one. `SNModel.fit` adds it."""

    def on_train_begin(self, logs: Any = None) -> None:
        self.is_told = False

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        measured, plan = device.measured_peak_bytes(), getattr(self.model, "plan", None)
        if not self.is_told and measured is not None and plan is not None:
            log.info(f"measured peak {format_bytes(measured)} | planned {format_bytes(plan.planned_peak_bytes)}")
        self.is_told = True
