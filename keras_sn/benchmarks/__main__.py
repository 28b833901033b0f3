"""`python -m keras_sn.benchmarks demo | depth | speed | width | startup | …`: each module has its own `--help`."""

import argparse
import importlib
import sys

BENCHMARKS = {
    "demo": "the depth comparison, then a training on real images beside plain Keras",
    "depth": "the deepest ResNet that trains under a memory cap, plain TensorFlow and every policy",
    "speed": "memory and speed of a training step, side by side with plain Keras, PyTorch and JAX",
    "width": "the widest batch that trains under a memory cap, plain Keras and SNModel",
    "startup": "seconds until the first training step is done",
    "transfers": "how fast copies to the host and back are, and how far they hide behind compute",
    "predictions": "planned and measured memory and seconds, for networks and budgets",
    "paper": "the published numbers of SuperNeurons, beside ours",
    "frontier": "planned memory against planned time, for six networks and every policy",
}


def main(argv: list[str]) -> int:
    """Runs one benchmark; returns its exit status."""
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="benchmark", required=True, metavar="{" + ",".join(BENCHMARKS) + "}")
    for name, purpose in BENCHMARKS.items():
        commands.add_parser(name, help=purpose, add_help=False)
    chosen, rest = parser.parse_known_args(argv)
    return importlib.import_module(f"keras_sn.benchmarks.{chosen.benchmark}").main(rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
