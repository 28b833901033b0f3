"""Region functions that are compiled before the first step: once each, with equal numbers, whatever goes wrong meanwhile."""

import os
import subprocess
import sys
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers as L

import keras_sn
from keras_sn import compiling, device
from keras_sn.compiling import BackgroundCompiler, CompiledFunction

POLICY = {"wide_*": "recompute", "head": "keep"}


def _model(policy=POLICY, steps_per_execution=1):
    keras.utils.set_random_seed(0)
    inputs = x = keras.Input((16,))
    for i, width in enumerate((24, 32)):
        x = L.Dense(width, activation="tanh", name=f"wide_{i}")(x)
    model = keras_sn.SNModel(inputs, L.Dense(2, name="head")(x), policy=policy)
    model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=True, steps_per_execution=steps_per_execution)
    return model


def _data(count=8):
    x = np.random.default_rng(0).normal(size=(count, 16)).astype("float32")
    return x, x[:, :2]


@pytest.fixture
def compiled(monkeypatch):
    """As on a GPU; collects what each call in the background ended with."""
    outcomes = []

    def run(call):
        try:
            call()
            outcomes.append(None)
        except Exception as error:
            outcomes.append(error)

    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "host_limit_bytes", lambda: 0)
    monkeypatch.setattr(compiling, "_run", run)
    return outcomes


@pytest.mark.parametrize("steps", [1, 3])
def test_each_function_is_compiled_ahead_and_the_numbers_are_equal(compiled, steps):
    x, y = _data(24)
    ahead = _model(POLICY, steps).fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
    assert compiled == [None] * 6  # three regions of different sizes, forward and backward
    plain = _model("none", steps).fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]
    assert ahead == plain


def test_batches_of_open_size_are_compiled_for_the_planned_one(compiled):
    x, y = _data(12)
    _model().fit(x, y, batch_size=8, epochs=2, verbose=0)  # with a last batch of four
    assert compiled == [None] * 6


def test_equal_regions_are_compiled_once(compiled):
    inputs = x = keras.Input((16,))
    for i in range(3):
        x = L.Dense(16, activation="tanh", name=f"wide_{i}")(x)
    model = keras_sn.SNModel(inputs, L.Dense(2, name="head")(x), policy=POLICY)
    model.compile("sgd", "mse", jit_compile=True)
    model.fit(*_data(), batch_size=8, verbose=0)
    assert compiled == [None] * 5  # the first one's backward pass differs: it returns no gradient of the data


def test_what_cannot_be_compiled_ahead_is_left_to_the_step(monkeypatch):
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "host_limit_bytes", lambda: 0)

    zeros, failed = tf.zeros, []

    def no_memory(*arguments, **keywords):
        if "compile" not in threading.current_thread().name:
            return zeros(*arguments, **keywords)
        failed.append(arguments)
        raise tf.errors.ResourceExhaustedError(None, None, "no room to try anything out")

    monkeypatch.setattr(compiling.tf, "zeros", no_memory)
    assert np.isfinite(_model().fit(*_data(), batch_size=8, verbose=0).history["loss"]).all()
    assert len(failed) == 6


def test_without_a_gpu_nothing_is_compiled_ahead(monkeypatch):
    monkeypatch.setattr(CompiledFunction, "_compile_ahead", lambda *arguments: pytest.fail("compiled"))
    _model().fit(*_data(), batch_size=8, verbose=0)


def _halve(x):
    """Ends on most data, and not on zeros."""
    return tf.while_loop(lambda x: tf.reduce_sum(x) != 1.0, lambda x: [x / 2], [x])[0]


@pytest.mark.parametrize(("function", "ends"), [(lambda x: x / 2, True), (_halve, False), (tf.function(_halve), False)])
def test_loops_are_not_run_on_zeros(function, ends):
    submitted = []
    compiler = BackgroundCompiler()
    compiler.submit = submitted.append
    compiled = CompiledFunction(function, compiler, lambda x: [None])
    tf.function(lambda x: compiled(x)).get_concrete_function(tf.TensorSpec([4]))
    assert len(submitted) == ends


def test_what_reads_from_the_function_around_it_is_left_out():
    submitted = []
    compiler = BackgroundCompiler()
    compiler.submit = submitted.append

    def outer(x, y):
        return CompiledFunction(lambda x: x + y, compiler, lambda x: [None])(x)

    tf.function(outer).get_concrete_function(tf.TensorSpec([4]), tf.TensorSpec([4]))
    assert not submitted


def test_waiting_ends_when_all_is_done():
    compiler, done = BackgroundCompiler(), []
    for i in range(5):
        compiler.submit(lambda i=i: done.append(i))
    compiler.submit(lambda: 1 / 0)
    compiler.wait()
    assert done == list(range(5))
    compiler.submit(lambda: done.append(5))  # and it can begin again
    compiler.wait()
    assert done[-1] == 5


PROGRAM = """
import os
from keras_sn import device
device.has_gpu = lambda: True
device.host_limit_bytes = lambda: 0
from keras_sn.compiling import BackgroundCompiler
from tests.test_compiling import _data, _model

def modules():
    return sorted(n.split(".")[1] for n in os.listdir(os.environ["DUMP"]) if n.endswith("cpu_after_optimizations.txt"))

wait = BackgroundCompiler.wait
def waits(self):
    wait(self)
    print("ahead", *modules())
BackgroundCompiler.wait = waits
_model().fit(*_data(), batch_size=8, epochs=2, verbose=0)
print("all", *modules())
"""


def test_tensorflow_takes_what_was_compiled_ahead(tmp_path):
    """It knows compiled functions by their names, and would compile them again under others."""
    root = os.path.dirname(os.path.dirname(__file__))
    environment = os.environ | {"XLA_FLAGS": f"--xla_dump_to={tmp_path} --xla_dump_hlo_as_text", "DUMP": str(tmp_path)}
    environment |= {"PYTHONPATH": root, "TF_CPP_MIN_LOG_LEVEL": "2"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    lines = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.startswith(("ahead", "all"))}
    assert lines, done.stderr[-2000:]
    of_regions = [name for name in lines["all"] if "_forward_" in name or "_backward_" in name]
    assert of_regions == [name for name in lines["ahead"] if "_forward_" in name or "_backward_" in name]
    assert len(of_regions) == len(set(of_regions)) == 6
