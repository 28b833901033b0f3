"""What a person reads: a plan as a table, a plan in one line, and the measured peak beside the planned one."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from keras_sn import device
from keras_sn.log import log
from keras_sn.plan import DEVICE, HOST, PLACES, Plan, Region, Saved
from keras_sn.sizes import format_bytes
from keras_sn.steps import RECOMPUTE

MAX_ROWS = 60
"""Regions; a longer table shows `SHOWN_ROWS` of its first and as many of its last."""
SHOWN_ROWS = 25
PLACE_TITLES = {DEVICE: "on device", HOST: "on host", RECOMPUTE: "recomputed"}
NARROW = 80
"""Characters; in a narrower table numbers are wrapped too, because the names alone cannot make room."""


def format_plan(plan: Plan, width: int = 100) -> str:
    """Shows a plan as a table, one row for each region, with totals under it.

    Columns of which every cell would be empty are left out.

    Args:
        plan: The plan.
        width: The width of the text in characters.

    Returns:
        The table with lines of totals under it; for a plan without regions one sentence.
    """
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        if plan.is_plain:
            console.print(Text(plan_line(plan)))
        else:
            console.print(_table(plan, width), Text())
            console.print(_summary(plan))
    return "\n".join(line.rstrip() for line in captured.get().rstrip().splitlines())


def plan_line(plan: Plan) -> str:
    """A plan in one line: budget, plain peak, planned peak, regions, offloaded bytes, slow-down."""
    budget = f"budget {format_bytes(plan.budget_bytes)}" if plan.budget_bytes else "no budget"
    if plan.budget_bytes and plan.planned_peak_bytes > plan.budget_bytes and not plan.is_plain:
        budget += f", {format_bytes(plan.planned_peak_bytes - plan.budget_bytes)} less than planned"  # not by policy "auto"
    if plan.is_plain:
        fits = "fits" if plan.budget_bytes is None or plan.plain_peak_bytes <= plan.budget_bytes else "does not fit"
        return f"{budget} | plain Keras {fits}: {format_bytes(plan.plain_peak_bytes)} planned | Keras' own train step"
    return (
        f"{budget} | plain peak {format_bytes(plan.plain_peak_bytes)} (planned) -> {format_bytes(plan.planned_peak_bytes)}, "
        f"at {plan.peak_layer} | {_recomputed(plan)} | "
        f"{format_bytes(plan.offloaded_bytes)} to the host | {_slower(plan, digits=0)} (planned)"
    )


def format_seconds(seconds: float) -> str:
    """Shows a duration with about three significant digits (`"12.3 ms"`)."""
    unit, factor = next(((unit, factor) for unit, factor in (("s", 1), ("ms", 1e3)) if seconds * factor >= 1), ("µs", 1e6))
    value = seconds * factor
    return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {unit}"


def _table(plan: Plan, width: int) -> Table:
    title = Text(f"Plan for batch size {plan.batch_size}, policy {plan.policy!r}")
    padding = (0, 1, 0, 0)
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, show_footer=True, show_edge=False, padding=padding, pad_edge=False
    )
    rows = [_row(index, region) for index, region in enumerate(plan.regions)]
    filled = [any(cells) for cells in zip(*rows, strict=True)]
    for column, total, is_filled in zip(COLUMNS, _totals(plan), filled, strict=True):
        is_number, is_name = column not in ("what", "layer calls"), column == "layer calls"
        justify, is_whole = "right" if is_number else "left", width >= NARROW and not is_name
        if is_filled:
            table.add_column(column, Text(total), justify=justify, overflow="fold", no_wrap=is_whole)
    left_out = len(rows) - 2 * SHOWN_ROWS if len(rows) > MAX_ROWS else 0
    for index, row in enumerate(rows):
        if left_out and index == SHOWN_ROWS:
            table.add_row("⋮", f"({left_out} regions left out)")
        if not left_out or not SHOWN_ROWS <= index < len(rows) - SHOWN_ROWS:
            table.add_row(*(Text(cell) for cell, is_filled in zip(row, filled, strict=True) if is_filled))
    return table


COLUMNS = ("#", "layer calls", "calls", "what", *(PLACE_TITLES[place] for place in PLACES), "again", "prefetch")
"""The table's; `"again"` is what the backward pass runs again."""


def _row(index: int, region: Region) -> list[str]:
    first, last = region.layers[0], region.layers[-1]
    return [
        str(index),
        first if len(region.layers) == 1 else f"{first} … {last}",
        str(len(region.layers)),
        _action(region),
        *(_tensors([one for one in region.saved if place_of(one) == place]) for place in PLACES),
        format_seconds(region.recompute_seconds) if region.recompute_seconds else "",
        _prefetch(index, region),
    ]


def _totals(plan: Plan) -> list[str]:
    """The row under the table, in which a tensor that several regions save counts once."""
    saved = [one for region in plan.regions for one in region.saved]
    again = sum(region.recompute_seconds for region in plan.regions)
    return [
        "",
        f"total, {len(plan.regions)} regions",
        str(sum(len(region.layers) for region in plan.regions)),
        "",
        *(_tensors([one for one in saved if place_of(one) == place]) for place in PLACES),
        format_seconds(again) if again else "",
        "",
    ]


def place_of(saved: Saved) -> str:
    """One of `PLACES`; any other tier counts as the host."""
    return saved.tier if saved.tier in PLACES else HOST


def _tensors(saved: Sequence[Saved]) -> str:
    """How many tensors, and their bytes where the plan has them: one that was edited by hand may not."""
    nbytes: dict[str, int] = {}
    for one in saved:
        nbytes[one.tensor] = max(one.nbytes, nbytes.get(one.tensor, 0))
    if not nbytes:
        return ""
    return f"{len(nbytes)} · {format_bytes(sum(nbytes.values()))}" if all(nbytes.values()) else str(len(nbytes))


def _action(region: Region) -> str:
    if not region.recompute:
        return "keep"
    names = set(region.layers)
    # Of several outputs of a layer call, each has its number behind the name.
    is_restored = any(one.tensor in names or one.tensor.rpartition(":")[0] in names for one in region.saved)
    return "restore" if is_restored else "recompute"


def _prefetch(index: int, region: Region) -> str:
    """At which regions' backward passes the copies back start."""
    away = [one for one in region.saved if place_of(one) == HOST]
    starts = {index if one.prefetch_at is None else one.prefetch_at for one in away}
    if len(starts) < 2:
        return "".join(f"at {start}" for start in starts)
    return f"{min(starts)}-{max(starts)}"


def _summary(plan: Plan) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, line in SUMMARY.items():
        if text := line(plan):
            table.add_row(name, Text(text))
    return table


def _recomputed(plan: Plan) -> str:
    return f"{sum(region.recompute for region in plan.regions)} of {len(plan.regions)} regions recomputed"


def _slower(plan: Plan, *, digits: int) -> str:
    percent = round(100 * (plan.slowdown - 1), digits)
    return f"{abs(percent):.{digits}f} % {'faster' if percent < 0 else 'slower'}"


def _shared(plan: Plan) -> str:
    saved = [one.tensor for region in plan.regions for one in region.saved]
    return "a tensor that several regions save counts once" if len(set(saved)) < len(saved) else ""


def _budget(plan: Plan) -> str:
    if plan.budget_bytes is None:
        return "none"
    left = plan.budget_bytes - plan.planned_peak_bytes
    return (
        f"{format_bytes(plan.budget_bytes)}, of which {format_bytes(left)} left"
        if left >= 0
        else (f"{format_bytes(plan.budget_bytes)}, {format_bytes(-left)} less than planned")
    )


def _seconds(plan: Plan) -> str:
    planned, plain = format_seconds(plan.planned_seconds), format_seconds(plan.plain_seconds)
    slower = _slower(plan, digits=1 if plan.slowdown < 2 else 0)
    return f"{planned} planned, plain Keras {plain}: {plan.slowdown:.2f}x, {slower}; without the optimizer's update"


def _copy_window(plan: Plan) -> str:
    return f"{plan.copy_window} regions: each waits for the copies of the region that ran this many before it"


SUMMARY: dict[str, Callable[[Plan], str]] = {
    "totals": _shared,
    "regions": _recomputed,
    "reserved": lambda plan: f"{format_bytes(plan.reserved_bytes)}, which no plan can move",
    "planned peak": lambda plan: f"{format_bytes(plan.planned_peak_bytes)}, at {plan.peak_layer}",
    "budget": _budget,
    "plain peak": lambda plan: f"{format_bytes(plan.plain_peak_bytes)} (planned)",
    "to the host": lambda plan: f"{format_bytes(plan.offloaded_bytes)} in each step",
    "step": _seconds,
    "copy window": _copy_window,
}
"""Under the table: what each line says of a plan; one that says nothing is left out."""


@contextmanager
def out_of_memory_explained(plan: Callable[[], Plan | None]) -> Iterator[None]:
    """Adds to TensorFlow's error what a plan says, if the device runs out of memory inside."""
    try:
        yield
    except tf.errors.ResourceExhaustedError as error:
        if (found := plan()) is not None:
            error.add_note(
                f"keras_sn planned {format_bytes(found.planned_peak_bytes)} at {found.peak_layer or 'the peak'} for batches of "
                f"{found.batch_size}. {_what_to_do()}"
            )
        raise


def _what_to_do() -> str:
    if not device.has_gpu():
        return "Give a smaller `memory_budget`."
    if device.undivided_bytes() is None:
        return (
            "XLA's tuning of convolutions takes memory too, and loses what it was given where more was refused: give a smaller "
            "`memory_budget` or batch."
        )
    return (
        "TensorFlow's allocator needs each block in one piece, and what is free may lie in several: call "
        "`keras_sn.configure_gpu(allocator='cuda_malloc_async')` before the model is made, or give a smaller `memory_budget`."
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
