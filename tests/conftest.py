import gc
import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("OMP_NUM_THREADS", "2")

import keras
import pytest
import tensorflow as tf

# Two devices, so that a copy to the host and a replica are real transfers without a GPU.
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2
)
gc.freeze()  # what was imported stays; without it, each collection goes through hundreds of thousands of objects again


@pytest.fixture(autouse=True)
def _clean_keras():
    keras.backend.clear_session(free_memory=False)  # a collection before each test takes longer than most tests
    keras.utils.set_random_seed(0)
