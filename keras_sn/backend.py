"""Refuses other Keras backends than TensorFlow, before anything else is imported."""

import os


def check_backend(backend: str) -> None:
    """Raises `ImportError` for a backend on which keras_sn cannot run."""
    if backend != "tensorflow":
        raise ImportError(
            "keras_sn runs on Keras' TensorFlow backend only. Set the environment variable KERAS_BACKEND=tensorflow before Keras "
            f"is imported. Received: KERAS_BACKEND={backend}"
        )


check_backend(os.environ.get("KERAS_BACKEND", "tensorflow"))  # Keras itself may fail to import with another one

import keras  # noqa: E402

check_backend(keras.backend.backend())  # Keras reads ~/.keras/keras.json too
