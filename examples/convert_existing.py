"""Give an existing Keras model a memory budget. The two models share their weights, so the old one is trained too.

python examples/convert_existing.py [--policy recompute]
"""

import argparse

import keras
import numpy as np

import keras_sn


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="recompute", choices=["auto", "recompute", "offload", "superneurons", "none"])
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--steps", type=int, default=4)
    arguments = parser.parse_args()

    shape = (arguments.image_size, arguments.image_size, 3)
    existing = keras.applications.MobileNetV2(input_shape=shape, weights=None, classes=10)

    model = keras_sn.SNModel.from_model(existing, policy=arguments.policy)
    model.compile("sgd", "sparse_categorical_crossentropy")

    images = np.random.default_rng(0).normal(size=(8 * arguments.steps, *shape)).astype("float32")
    labels = np.arange(len(images)) % 10
    model.fit(images, labels, batch_size=8, epochs=1, verbose=2)

    print(model.plan)
    same = np.array_equal(existing.predict(images[:4], verbose=0), model.predict(images[:4], verbose=0))
    print(f"the existing model has the trained weights: {same}")


if __name__ == "__main__":
    main()
