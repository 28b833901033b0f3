"""The command-line options that several benchmarks have."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from keras_sn.benchmarks.engines import check_engines
from keras_sn.benchmarks.networks import NETWORKS
from keras_sn.errors import KerasSNError


def parser_of(benchmark: str, description: str | None, engines: Sequence[str]) -> argparse.ArgumentParser:
    """A parser with what every benchmark of engines has: `--arguments`, `--engines` and `--out`."""
    parser = argparse.ArgumentParser(prog=f"python -m keras_sn.benchmarks {benchmark}", description=description)
    parser.add_argument("--arguments", type=json.loads, help="of the networks' builders, as JSON")
    parser.add_argument(
        "--engines", nargs="+", metavar="ENGINE", default=list(engines), help="the others are compared with the first"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark_output"), help=f"folder of {benchmark}.json")
    return parser


def add_network(parser: argparse.ArgumentParser, network: str = "resnet50", batch: int = 64) -> None:
    """Adds the options of a benchmark of one network."""
    parser.add_argument("--network", choices=NETWORKS, default=network, metavar="NAME", help=f"({network})")
    parser.add_argument("--batch", type=int, default=batch, help=f"samples in a batch ({batch})")


def parsed(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """The options; refuses engines that are none."""
    options = parser.parse_args(argv)
    try:
        check_engines(options.engines)
    except KerasSNError as error:
        parser.error(str(error))
    return options
