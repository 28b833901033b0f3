"""How fast copies to the host and back are while they run, and how far they hide behind compute, read off a trace of the GPU.

Out: a table, and `transfers.json` with the longest kernels.
"""

from collections.abc import Sequence

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from keras_sn.benchmarks import measure
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.benchmarks.options import add_network, parsed, parser_of
from keras_sn.benchmarks.reports import say_written, write

DIRECTIONS = {"to_host": "to the host", "to_device": "back"}


def table(rows: Sequence[Row], title: str) -> Table:
    """A line for each engine and direction; all figures are of one training step."""
    shown = Table(title=title)
    for column in ("engine", "kernels, ms", "direction", "MiB", "copying, ms", "GiB/s", "hidden"):
        shown.add_column(column, justify="left" if column in ("engine", "direction") else "right")
    for row in rows:
        trace, steps = row.get("trace"), row.get("traced_steps", 1)
        if not row["fits"] or trace is None:
            shown.add_row(row["engine"], "", row["reason"].splitlines()[-1] if row["reason"] else "no GPU was traced")
            continue
        for place, (direction, name) in enumerate(DIRECTIONS.items()):
            seconds, copied = trace["copy_seconds"][direction], trace["copied_bytes"][direction]
            rate = f"{copied / seconds / 2**30:.1f}" if seconds else ""
            hidden = f"{trace['hidden_seconds'][direction] / seconds:.0%}" if seconds else ""
            kernels = f"{1e3 * trace['busy_seconds'] / steps:.1f}"
            first = (row["engine"], kernels) if not place else ("", "")
            shown.add_row(*first, name, f"{copied / steps / 2**20:.0f}", f"{1e3 * seconds / steps:.2f}", rate, hidden)
    return shown


def main(argv: list[str]) -> int:
    parser = parser_of("transfers", __doc__, ("superneurons-xla", "offload-xla"))
    add_network(parser)
    parser.add_argument("--budget-bytes", type=int, help="of `SNModel`, for policies that heed one")
    options = parsed(parser, argv)
    if not tf.config.list_physical_devices("GPU"):
        parser.error("copies are traced on a GPU, and TensorFlow sees none")
    rows = [
        measure.run(
            Configuration(
                engine=engine,
                network=options.network,
                arguments=options.arguments or {},
                batch_size=options.batch,
                budget_bytes=options.budget_bytes,
                steps=4,
                purpose="trace",
            )
        )
        for engine in options.engines
    ]
    console = Console()
    console.print(table(rows, f"Copies of a training step: {options.network}, batch {options.batch}"))
    write("transfers", options.out, rows=rows)
    say_written(console, "transfers", options.out)
    return 0 if all(row["fits"] for row in rows) else 1
