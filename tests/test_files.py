"""Files, checkpoints and copies of planned models."""

import pickle
import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers as L

import keras_sn

RANDOM = np.random.default_rng(3)
X, Y = RANDOM.normal(size=(8, 6)).astype("float32"), RANDOM.normal(size=(8, 2)).astype("float32")


def build(**settings):
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,), name="x")
    x = L.BatchNormalization()(L.Dense(8, activation="relu")(inputs))
    model = keras_sn.SNModel(inputs, L.Dense(2)(L.Dense(8)(x)), policy={"dense*": "recompute"}, **settings)
    model.compile("adam", "mse", jit_compile=False)
    return model


def fit(model, epochs, **arguments):
    return model.fit(X, Y, batch_size=4, epochs=epochs, shuffle=False, verbose=0, **arguments).history["loss"]


def test_a_resumed_training_equals_an_uninterrupted_one(tmp_path):
    class Interrupted(Exception):
        pass

    class Interrupt(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if epoch == 2:
                raise Interrupted

    whole = fit(build(), 4)
    backup = tmp_path / "backup"
    with pytest.raises(Interrupted):
        fit(build(), 4, callbacks=[keras.callbacks.BackupAndRestore(backup), Interrupt()])
    resumed = fit(build(), 4, callbacks=[keras.callbacks.BackupAndRestore(backup)])
    assert resumed == whole[2:]


def test_a_checkpoint_of_the_whole_model_goes_on(tmp_path):
    model = build(memory_budget="1GiB")
    fit(model, 1, callbacks=[keras.callbacks.ModelCheckpoint(tmp_path / "model.keras")])
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert loaded.settings == model.settings
    assert fit(loaded, 2) == fit(model, 2)
    assert loaded.plan.regions == model.plan.regions


def test_pickles_and_clones():
    model = build()
    fit(model, 1)
    copy = pickle.loads(pickle.dumps(model))
    assert isinstance(copy, keras_sn.SNModel)
    np.testing.assert_array_equal(copy.predict(X, verbose=0), model.predict(X, verbose=0))
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    assert clone.settings == model.settings
    np.testing.assert_array_equal(clone.predict(X, verbose=0), model.predict(X, verbose=0))


def test_a_file_for_those_without_keras_sn(tmp_path):
    model = build()
    model.save(tmp_path / "planned.keras")
    keras.Model(model.inputs, model.outputs).save(tmp_path / "plain.keras")
    code = f"""
import sys
sys.modules["keras_sn"] = None  # not installed
import keras
plain = keras.saving.load_model({str(tmp_path / "plain.keras")!r})
print("plain", plain.count_params())
try:
    keras.saving.load_model({str(tmp_path / "planned.keras")!r})
except Exception as error:
    print("planned", type(error).__name__, error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert f"plain {model.count_params()}" in done.stdout
    assert "keras_sn" in done.stdout.partition("planned")[2]


def test_a_subclass_saves_its_weights_and_loads(tmp_path):
    @keras.saving.register_keras_serializable("test_files")
    class Net(keras_sn.SNModel):
        def __init__(self, policy="recompute", **kwargs):
            super().__init__(policy=policy, **kwargs)
            self.block, self.out = keras.Sequential([L.Dense(8, activation="relu"), L.Dense(8)]), L.Dense(2)

        def call(self, x):
            return self.out(self.block(x))

    model = Net()
    model.compile("adam", "mse", jit_compile=False)
    fit(model, 1)
    model.save(tmp_path / "net.keras")
    loaded = keras.saving.load_model(tmp_path / "net.keras")
    assert loaded.settings.policy == "recompute"
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
    assert fit(loaded, 2) == fit(model, 2)
