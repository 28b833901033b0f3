"""How fast copies to the host and back are while they run, and how far they hide behind compute, read off a trace of the GPU.

Out: a table, and `transfers.json` with the longest kernels.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import tensorflow as tf
from rich.console import Console
from rich.table import Table

from keras_sn.benchmarks import measure
from keras_sn.benchmarks.measure import Configuration, Row
from keras_sn.benchmarks.networks import NETWORKS
from keras_sn.benchmarks.reports import head
from keras_sn.errors import KerasSNError

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
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks transfers", description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="resnet50", metavar="NAME", help="(resnet50)")
    parser.add_argument("--arguments", type=json.loads, default={}, help="of the network's builder, as JSON")
    parser.add_argument("--batch", type=int, default=64, help="samples in a batch (64)")
    parser.add_argument("--engines", nargs="+", metavar="ENGINE", default=["superneurons-xla", "offload-xla"])
    parser.add_argument("--budget-bytes", type=int, help="of `SNModel`, for policies that heed one")
    parser.add_argument("--out", type=Path, default=Path("benchmark_output"), help="folder of transfers.json")
    options = parser.parse_args(argv)
    try:
        measure.check_engines(options.engines)
    except KerasSNError as error:
        parser.error(str(error))
    if not tf.config.list_physical_devices("GPU"):
        parser.error("copies are traced on a GPU, and TensorFlow sees none")
    rows = [
        measure.run(
            Configuration(
                engine=engine,
                network=options.network,
                arguments=options.arguments,
                batch_size=options.batch,
                budget_bytes=options.budget_bytes,
                steps=4,
                purpose="trace",
            )
        )
        for engine in options.engines
    ]
    console, path = Console(), options.out / "transfers.json"
    console.print(table(rows, f"Copies of a training step: {options.network}, batch {options.batch}"))
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(head("transfers") | {"rows": rows}, indent=1) + "\n")
    console.print(f"Written: {path}", highlight=False)
    return 0 if all(row["fits"] for row in rows) else 1
