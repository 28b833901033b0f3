"""The main job at a glance, on any machine: how deep a network trains under a cap, then a training beside plain Keras.

`make demo` runs it. The second part trains a small convolutional network on scikit-learn's digits (1,797 real images), enlarged,
twice: as a plain `keras.Model` and as an `SNModel` with less memory, each in a process of its own.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers
from rich.console import Console
from rich.table import Table

import keras_sn
from keras_sn import device
from keras_sn.benchmarks import depth, measure
from keras_sn.report import format_plan
from keras_sn.sizes import format_bytes

IMAGE_SIZE, BATCH_SIZE, EPOCHS = 64, 64, 2
BUDGET_SHARE = 0.5
"""Of what plain Keras is planned to need, the part that the `SNModel` may have."""


def network() -> keras.Model:
    """A convolutional network of four stages for grey images."""
    inputs = x = keras.Input((IMAGE_SIZE, IMAGE_SIZE, 1), name="digits")
    for stage, filters in enumerate((8, 16, 32, 64)):
        for convolution in "abcd":
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False, name=f"stage{stage}_conv_{convolution}")(x)
            x = layers.BatchNormalization(momentum=0.9, name=f"stage{stage}_bn_{convolution}")(x)
            x = layers.ReLU(name=f"stage{stage}_relu_{convolution}")(x)
        x = layers.MaxPooling2D(name=f"stage{stage}_pool")(x)
    x = layers.Dropout(0.2, name="dropout")(layers.GlobalAveragePooling2D(name="pool")(x))
    return keras.Model(inputs, layers.Dense(10, name="logits")(x), name="digits")


def digits(samples: int) -> tuple[np.ndarray, np.ndarray]:
    """Scikit-learn's digits, scaled to [0, 1] and enlarged from 8 x 8 pixels."""
    from sklearn.datasets import load_digits

    data = load_digits()
    images = np.kron(data.images[:samples], np.ones((IMAGE_SIZE // 8, IMAGE_SIZE // 8))) / 16
    return images[..., None].astype("float32"), data.target[:samples]


def train(is_planned: bool, samples: int) -> dict[str, Any]:
    """Trains the network; runs in a process of its own.

    Returns:
        Losses and accuracies for each epoch, the memory planned and the memory measured above the resting level, in bytes.
    """
    keras.utils.set_random_seed(1)
    model = network()
    reference = keras_sn.SNModel.from_model(model, policy="none")
    reserved_bytes = reference.build_plan(BATCH_SIZE).reserved_bytes
    plain_bytes = reference.build_plan(BATCH_SIZE).plain_peak_bytes
    if is_planned:
        model = keras_sn.SNModel.from_model(model, memory_budget=int(BUDGET_SHARE * plain_bytes))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    images, labels = digits(samples)
    split = len(images) * 4 // 5
    fitted = model.fit(
        images[:split],
        labels[:split],
        batch_size=BATCH_SIZE,
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=(images[split:], labels[split:]),
    )
    measure.give_memory_back()
    with device.ResidentPeak() as resident:  # all is traced and compiled, so what grows is one step's activations
        model.train_on_batch(images[:BATCH_SIZE], labels[:BATCH_SIZE])
    plan = getattr(model, "plan", None)
    planned_bytes = plan.planned_peak_bytes if plan else plain_bytes
    return {
        "history": fitted.history,
        "planned_bytes": planned_bytes - reserved_bytes,
        "measured_bytes": device.measured_peak_bytes() or resident.peak_bytes,
        "plan": format_plan(plan, width=80) if plan else "",
    }


def compare(console: Console, samples: int) -> None:
    """Trains both and prints them side by side."""
    table = Table(
        title=f"Digits at {IMAGE_SIZE} x {IMAGE_SIZE}, batch {BATCH_SIZE}, {EPOCHS} epochs",
        caption="validation: accuracy; planned, measured: memory of one training step's activations and gradients; without a GPU "
        "what is measured also holds the scratch memory of single operations, of which only some is planned",
    )
    for column in ("", "loss", "accuracy", "validation", "planned", "measured"):
        table.add_column(column, justify="right" if column else "left")
    rows = {}
    for name, is_planned in (("plain Keras", False), ("SNModel", True)):
        with console.status(f"training {name}"):
            row = rows[name] = _in_a_process(is_planned, samples)
        last = {key: values[-1] for key, values in row["history"].items()}
        memory = format_bytes(row["planned_bytes"]), format_bytes(row["measured_bytes"])
        table.add_row(name, f"{last['loss']:.6f}", f"{last['accuracy']:.4f}", f"{last['val_accuracy']:.4f}", *memory)
    console.print(table)
    console.print(rows["SNModel"]["plan"], highlight=False, markup=False)


def _in_a_process(is_planned: bool, samples: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "keras_sn.benchmarks", "demo", "--train", "planned" if is_planned else "plain"]
    environment = {"TF_CPP_MIN_LOG_LEVEL": "3"} | os.environ | measure.MEMORY_ENVIRONMENT
    done = subprocess.run([*command, "--samples", str(samples)], env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        raise RuntimeError(f"The training process failed: {done.stderr[-2000:]}")
    return json.loads(lines[-1])


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo_output"), help="folder of depth.json and depth.png")
    parser.add_argument("--samples", type=int, default=1797, help="images to train on and validate with (1797)")
    parser.add_argument("--part", choices=("both", "depth", "digits"), default="both", help="what to run (both)")
    parser.add_argument("--train", choices=("plain", "planned"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.train:
        print(json.dumps(train(options.train == "planned", options.samples)))
        return 0
    console = Console()
    if options.part != "digits":
        console.rule("1. How deep a network trains under one memory cap")
        console.print("keras-graph and keras-xla are plain Keras without and with XLA; recompute and recompute-xla are SNModel.")
        console.print("Each point is real training steps in a process of its own; on two CPU cores this takes about six minutes.")
        if status := depth.main(["--out", str(options.out)]):
            return status
    if options.part != "depth":
        console.rule("2. The same numbers with less memory")
        compare(console, options.samples)
    return 0
