"""Train a model that plans its own memory: build an SNModel where you would build a keras.Model.

python examples/quickstart.py [--budget 300MiB]
"""

import argparse

import keras
import numpy as np
from keras import layers as L

import keras_sn


def build(budget: str) -> keras_sn.SNModel:
    inputs = keras.Input((64, 64, 3))
    x = inputs
    for filters in (16, 32, 32, 64, 64):
        x = L.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = L.ReLU()(L.BatchNormalization()(x))
    outputs = L.Dense(10)(L.GlobalAveragePooling2D()(x))
    return keras_sn.SNModel(inputs, outputs, memory_budget=budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budget", default="300MiB", help="what the device may hold during a training step")
    parser.add_argument("--samples", type=int, default=256)
    arguments = parser.parse_args()

    model = build(arguments.budget)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, arguments.samples)
    images = rng.normal(size=(arguments.samples, 64, 64, 3)) + labels[:, None, None, None] / 3
    model.fit(images, labels, batch_size=32, epochs=2, callbacks=[keras_sn.callbacks.MemoryMonitor()])
    print(model.plan)


if __name__ == "__main__":
    main()
