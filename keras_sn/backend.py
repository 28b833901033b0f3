"""Refuses other Keras backends than TensorFlow, before anything else is imported."""

import keras

if keras.backend.backend() != "tensorflow":
    raise ImportError(
        "keras_sn runs on Keras' TensorFlow backend only. Set the environment variable KERAS_BACKEND=tensorflow before Keras is "
        f"imported. Received: KERAS_BACKEND={keras.backend.backend()}"
    )
