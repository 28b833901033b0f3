"""`cost_measurement`: the very same code with tiny sizes on the CPU, the cache, and (`-m gpu`) a real GPU."""

import json
import logging
import math
import os
import re
import subprocess
import sys
import weakref
from dataclasses import asdict, replace
from types import SimpleNamespace

import keras
import pytest
import tensorflow as tf

from keras_sn import cost_measurement, device
from keras_sn.cost import ON_CPU, ON_GPU, CostModel
from keras_sn.cost_measurement import Convolution, Sizes, measure, measure_cost_model

TINY = Sizes(
    rounds=3,
    matrices=(8, 16),
    rows=16,
    convolutions=(Convolution(2, 4, 3, 3), Convolution(2, 4, 3, 1, "NHWC")),
    block_bytes=2**16,
    copied_blocks=2,
    chain_length=3,
    calls=2,
    repeats=3,
)
MODEL = CostModel(1e14, 2e12, 3e10, 4e-6, ((9, 5e13), (18, 6e13)))


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is not there, what its measurement finds (an exception is raised), and an empty directory of Keras."""
    state = SimpleNamespace(details={"device_name": "Fake 1", "compute_capability": (9, 0)}, tf32=True, found=MODEL, calls=[])

    def fake_measure(sizes, name):
        state.calls.append((sizes, name))
        if isinstance(state.found, Exception):
            raise state.found
        return state.found

    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(cost_measurement, "_known", {})
    monkeypatch.setattr(cost_measurement, "measure", fake_measure)
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [SimpleNamespace(name="/physical_device:GPU:0")])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", lambda gpu: state.details)
    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: state.tf32)
    state.file = tmp_path / "home" / "keras_sn" / "cost_models.json"
    return state


@pytest.fixture
def messages():
    """What the package logs, from DEBUG on, as (level, text)."""
    found, log = [], cost_measurement.log
    handler, level = logging.Handler(), log.level
    handler.emit = lambda record: found.append((record.levelname, record.getMessage()))
    log.addHandler(handler)
    log.setLevel(logging.DEBUG)
    yield found
    log.removeHandler(handler)
    log.setLevel(level)


def a_new_process(monkeypatch):
    monkeypatch.setattr(cost_measurement, "_known", {})


def assert_real(model):
    for name, value in asdict(model).items():
        numbers = [number for pair in value for number in pair] if isinstance(value, tuple) else [value]
        assert numbers, name
        assert all(math.isfinite(number) for number in numbers), name
        assert isinstance(value, bool) or min(numbers) > 0, name


def test_the_measurement_runs():
    assert_real(measure(TINY, "/CPU:1"))


def test_it_runs_while_a_function_is_traced_and_a_tape_records():
    models = []

    @tf.function
    def square(x):
        with tf.device("/CPU:0"), tf.GradientTape() as tape:
            tape.watch(x)
            models.append(measure(TINY, "/CPU:1"))
            y = x * x
        return tape.gradient(y, x)

    assert square(tf.constant(3.0)).numpy() == 6
    assert_real(models[0])
    nodes = square.get_concrete_function(tf.TensorSpec(())).graph.as_graph_def().node
    assert not {"MatMul", "Conv2D", "EnsureShape"} & {node.op for node in nodes}


def test_it_leaves_no_random_state():
    draws = []
    for measures in (False, True):
        keras.utils.set_random_seed(7)
        if measures:
            measure(TINY, "/CPU:1")
        draws.append([tf.random.normal((3,)).numpy().tolist(), keras.random.normal((3,)).numpy().tolist()])
    assert draws[0] == draws[1]


def test_it_gives_its_memory_back(monkeypatch):
    made = []

    def remember(*arguments, real=tf.random.stateless_normal, **keywords):
        tensor = real(*arguments, **keywords)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(tf.random, "stateless_normal", remember)
    measure(TINY, "/CPU:1")
    assert len(made) == 2 * len(TINY.matrices) + 2 * (len(TINY.convolutions) + 1) + 2 + TINY.copied_blocks
    assert not [one for one in made if one() is not None]


def test_the_copies_cross_the_link(monkeypatch):
    """The slices that end a copy read it where it has arrived."""
    functions = []
    monkeypatch.setattr(cost_measurement, "_seconds", lambda _, function, *blocks: functions.append((function, blocks)) or 1.0)
    with tf.device("/CPU:1"):
        cost_measurement.link_rate(TINY)
        for (function, blocks), end, copies in zip(functions[::2], ("CPU:0", "CPU:1"), (1, 2), strict=True):
            operations = function.get_concrete_function(*blocks).graph.get_operations()
            assert [one.device[-5:] for one in operations if one.type == "StridedSlice"] == [end] * 2
            assert [one.device[-5:] for one in operations if one.type in ("EnsureShape", "Reshape")] == ["CPU:0"] * 2 * copies


@pytest.mark.parametrize(("one_way", "both_ways", "slower"), [(1.0, 3.0, 2.0), (1.0, 1.5, 1.0), (1.0, 0.9, 1.0)])
def test_the_slower_way_counts(monkeypatch, one_way, both_ways, slower):
    seconds = iter((1 + one_way, 1, 1 + both_ways, 1))  # of all blocks, and of the first alone
    monkeypatch.setattr(cost_measurement, "_seconds", lambda *arguments: next(seconds))
    assert cost_measurement.link_rate(TINY) == pytest.approx(TINY.block_bytes / 4 / slower)


def test_rates_count_what_is_computed(monkeypatch):
    """Two flops for each multiplication with its addition, as the flops of a layer call; each with its two gradients."""
    monkeypatch.setattr(cost_measurement, "_seconds", lambda *arguments: 2.0)
    rounds = iter((2.0, 3.0, 7.0))  # of products; of convolutions, and with their gradients
    monkeypatch.setattr(cost_measurement, "_round_seconds", lambda *arguments: next(rounds))
    assert cost_measurement.matrix_rate(8, TINY) == 3 * 2 * 16 * 8**2 / 2
    assert cost_measurement.memory_rate(TINY) == 2 * 2**16 / 2
    assert cost_measurement.launch_seconds(TINY) == 2 / 3
    flops = 2 * (2 * 4 * 4 * 5) * (3 * 3 * 5)
    assert cost_measurement.convolution_rates(Convolution(2, 4, 5, 3), TINY) == (flops / 3, 2 * flops / 4)


def test_the_speedup_is_that_of_all_three_convolutions():
    assert cost_measurement.speedup((3.0, 2.0), (6.0, 4.0)) == pytest.approx(2)
    assert cost_measurement.speedup((1.0, 1.0), (1.0, 2.0)) == pytest.approx(3 / 2)


def test_low_precision_is_measured_in_low_precision(monkeypatch):
    dtypes = []
    monkeypatch.setattr(cost_measurement, "_round_seconds", lambda sizes, compute, x, w: dtypes.append((x.dtype, w.dtype)) or 1.0)
    cost_measurement.convolution_rates(TINY.convolutions[0], TINY, "bfloat16")
    assert dtypes == [(tf.bfloat16, tf.bfloat16)] * 2


def test_a_round_is_what_more_of_them_take(monkeypatch):
    """Six rounds take 13 seconds and three take 7, whatever a call itself takes; the numbers stay where they began."""
    seconds, found = iter((13.0, 7.0)), []

    def take(sizes, function, *start):
        found.append(function(*start))
        return next(seconds)

    monkeypatch.setattr(cost_measurement, "_seconds", take)
    assert cost_measurement.matrix_rate(8, TINY) == 3 * 2 * 16 * 8**2 / 2
    for x, w in found:
        assert (x.shape, w.shape) == ((16, 8), (8, 8))
        assert 1e-3 < float(tf.math.reduce_std(x)) < 1e3
        assert float(tf.reduce_min(tf.abs(w))) > 0


def test_the_compiler_leaves_no_round_out(monkeypatch):
    counts = []

    def take(sizes, function, *start):
        compiled = function.experimental_get_compiler_ir(*start)(stage="optimized_hlo")
        counts.append(len(re.findall(r"= \S+ (?:dot|convolution)\(", compiled)))
        return 1.0

    monkeypatch.setattr(cost_measurement, "_seconds", take)
    cost_measurement.matrix_rate(16, TINY)
    cost_measurement.convolution_rates(Convolution(2, 8, 4, 3), TINY)
    three = [6 * TINY.rounds, 3 * TINY.rounds]
    assert counts == 3 * three  # with as many convolutions forward alone as with gradients


def test_the_median_leaves_the_warm_up_out(monkeypatch):
    times = iter([0, 100, 100, 101, 101, 103, 103, 153])
    monkeypatch.setattr(cost_measurement, "perf_counter", lambda: next(times))
    calls = []
    assert cost_measurement._seconds(replace(TINY, calls=4), lambda x: calls.append(x) or [x], tf.zeros((2, 2))) == 2 / 4
    assert len(calls) == 4 * 4


def test_without_a_gpu_nothing_is_measured(monkeypatch):
    monkeypatch.setattr(cost_measurement, "measure", lambda *arguments: pytest.fail("measured"))
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: [])
    assert measure_cost_model() is ON_CPU
    assert measure_cost_model(refresh=True) is device.cost_model() is ON_CPU


def test_a_gpu_is_measured_once(gpu, monkeypatch):
    assert device.cost_model() == device.measure_cost_model() == MODEL
    assert gpu.calls == [(Sizes(), "/GPU:0")]
    a_new_process(monkeypatch)
    assert measure_cost_model() == MODEL
    assert len(gpu.calls) == 1
    (key,) = json.loads(gpu.file.read_text())
    assert key == f"Fake 1, compute capability (9, 0), TensorFlow {tf.__version__}, TF32 True"
    assert list(gpu.file.parent.iterdir()) == [gpu.file]


def test_refresh_measures_again(gpu, monkeypatch):
    measure_cost_model()
    gpu.found = replace(MODEL, launch_seconds=0.0, convolution_rates=())
    assert measure_cost_model() == MODEL
    assert measure_cost_model(refresh=True) == gpu.found
    a_new_process(monkeypatch)
    assert measure_cost_model() == gpu.found
    assert len(gpu.calls) == 2


def test_each_device_and_each_setting_of_it_is_measured(gpu, monkeypatch):
    changes = [{}, {"tf32": False}, {"details": {"device_name": "Fake 2"}}, {"details": {}}]
    for number, change in enumerate(changes):
        vars(gpu).update(change, found=replace(MODEL, launch_seconds=float(number)))
        assert measure_cost_model() == gpu.found
    a_new_process(monkeypatch)
    vars(gpu).update(details={"device_name": "Fake 1", "compute_capability": (9, 0)}, tf32=True)
    assert measure_cost_model().launch_seconds == 0
    assert len(json.loads(gpu.file.read_text())) == len(gpu.calls) == len(changes)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "1", '{"KEY": 1}', '{"KEY": {"flops": 1}}', '{"KEY": MODEL_WITH_ZERO}', '{"KEY": MODEL_WITH_TEXT}', "\xff"],
)
def test_a_broken_file_is_replaced(gpu, messages, monkeypatch, text):
    key = f"Fake 1, compute capability (9, 0), TensorFlow {tf.__version__}, TF32 True"
    zero, words = asdict(MODEL) | {"flops_per_second": 0}, asdict(MODEL) | {"flops_per_second": "fast"}
    text = text.replace("KEY", key).replace("MODEL_WITH_ZERO", json.dumps(zero)).replace("MODEL_WITH_TEXT", json.dumps(words))
    gpu.file.parent.mkdir(parents=True)
    gpu.file.write_bytes(text.encode("latin-1"))
    assert measure_cost_model() == MODEL
    assert {level for level, _ in messages} == {"DEBUG", "INFO"}
    a_new_process(monkeypatch)
    assert measure_cost_model() == MODEL
    assert len(gpu.calls) == 1


@pytest.mark.parametrize("when", ["directory", "replace"])
def test_where_nothing_can_be_written_memory_serves(gpu, messages, monkeypatch, when):
    if when == "directory":  # a file stands in its place: that stops root, too
        gpu.file.parent.parent.write_text("")
    else:
        monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(PermissionError("no")))
    assert measure_cost_model() == measure_cost_model() == MODEL
    assert len(gpu.calls) == 1
    assert any(level == "DEBUG" and "cost model not kept" in text for level, text in messages)
    assert "WARNING" not in {level for level, _ in messages}
    assert when == "directory" or not list(gpu.file.parent.iterdir())


@pytest.mark.parametrize(
    "error", [tf.errors.ResourceExhaustedError(None, None, "no memory"), RuntimeError("no XLA"), MemoryError("none")]
)
def test_a_failure_falls_back_to_constants(gpu, messages, error):
    gpu.found = error
    assert measure_cost_model() is measure_cost_model() is ON_GPU
    assert len(gpu.calls) == 1, "not tried again at each plan"
    ((_, warning),) = [one for one in messages if one[0] == "WARNING"]
    assert type(error).__name__ in warning
    assert str(error) in warning
    assert not gpu.file.exists()
    gpu.found = MODEL
    assert measure_cost_model(refresh=True) == measure_cost_model() == MODEL


@pytest.mark.gpu
def test_a_real_gpu(tmp_path):
    code = (
        "import json, time; from dataclasses import asdict; import tensorflow as tf\n"
        "from keras_sn import device, cost_measurement\n"
        "def info(): return tf.config.experimental.get_memory_info('GPU:0')\n"
        "tf.zeros(1, 'float32').numpy(); before = info()['current']; start = time.perf_counter()\n"
        "model = device.cost_model(); seconds = time.perf_counter() - start\n"
        "row = dict(seconds=seconds, kept=info()['current'] - before, peak=info()['peak'], **asdict(model))\n"
        "cost_measurement._known.clear(); row['same'] = device.cost_model() == model\n"
        "print('ROW', json.dumps(row))\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environment["KERAS_HOME"] = str(tmp_path)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("ROW ")]
    print(line)
    row = json.loads(line[4:])
    assert (tmp_path / "keras_sn" / "cost_models.json").exists(), done.stderr
    assert row["same"]
    assert 1e12 < row["flops_per_second"] < 2e15
    assert all(1e12 < rate < 2e15 for _, rate in [*row["convolution_rates"], *row["matrix_rates"]])
    assert 1 < row["low_precision_speedup"] < 4
    assert 1e-5 < row["host_seconds_per_step"] < 1e-2
    assert 0 < row["host_seconds_per_variable"] < 1e-4
    assert 1e11 < row["bytes_per_second"] < 2e13
    assert 1e9 < row["link_bytes_per_second"] < 1e12
    assert 2e-7 < row["launch_seconds"] < 1e-4
    assert row["seconds"] < 60
    assert row["kept"] < 64 * 2**20
