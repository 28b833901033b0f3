"""`device`: a fake GPU for the rules of `configure_gpu`, a fresh process, and (`-m gpu`) a real GPU."""

import importlib
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import tensorflow as tf

from keras_sn import device
from keras_sn.errors import KerasSNError
from keras_sn.settings import Settings

GIB = 2**30
GPU = SimpleNamespace(name="/physical_device:GPU:0")


def run_python(code: str) -> list[str]:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def gpu(monkeypatch):
    """What TensorFlow knows of one GPU, without the GPU. Set `is_open` and `peak` to change the scene."""
    state = SimpleNamespace(logical=None, growth=None, is_open=False, peak=None)

    def change(name, value):
        if state.is_open:
            raise RuntimeError("cannot be modified after being initialized")
        setattr(state, name, value)

    def memory_info(name):
        if state.peak is None:
            raise ValueError("Allocator stats not available for device 'GPU:0'")
        return {"current": 1, "peak": state.peak}

    monkeypatch.delenv("TF_GPU_ALLOCATOR", raising=False)
    monkeypatch.delenv("TF_GPU_HOST_MEM_LIMIT_IN_MB", raising=False)
    monkeypatch.setattr(device, "is_device_open", lambda: state.is_open)
    config = tf.config
    monkeypatch.setattr(config, "get_visible_devices", lambda kind: [GPU])
    monkeypatch.setattr(config, "get_logical_device_configuration", lambda gpu: state.logical)
    monkeypatch.setattr(config, "set_logical_device_configuration", lambda gpu, new: change("logical", new))
    monkeypatch.setattr(config.experimental, "get_memory_growth", lambda gpu: state.growth)
    monkeypatch.setattr(config.experimental, "set_memory_growth", lambda gpu, new: change("growth", new))
    monkeypatch.setattr(config.experimental, "get_device_details", lambda gpu: {"device_name": "Fake 1"})
    monkeypatch.setattr(config.experimental, "get_memory_info", memory_info)
    monkeypatch.setattr(config.experimental, "reset_memory_stats", lambda name: setattr(state, "peak", 1))
    return state


def test_configure_gpu_says_what_is_in_force(gpu, monkeypatch):
    configuration = device.configure_gpu(memory_limit="12GiB", allocator="cuda_malloc_async", host_limit="8GiB")
    assert (configuration.memory_limit_bytes, configuration.host_limit_bytes) == (12 * GIB, 8 * GIB)
    assert gpu.logical[0].memory_limit == 12 * 1024
    assert str(configuration) == (
        "Fake 1: memory limit 12.0 GiB, growth off, allocator cuda_malloc_async, host limit 8.00 GiB, not opened yet"
    )
    gpu.is_open = True
    assert device.memory_limit_bytes() == 12 * GIB
    assert str(device.configure_gpu()).endswith("open")


def test_blocks_are_divided_exactly_unless_the_device_is_open(gpu, monkeypatch):
    context = importlib.import_module("tensorflow.python.eager.context")
    monkeypatch.setattr(context.context(), "_config", None)
    gpu.is_open = True
    device.configure_gpu()
    assert context.context().config.gpu_options.experimental.internal_fragmentation_fraction == 0
    gpu.is_open = False
    device.configure_gpu()
    assert 0 < context.context().config.gpu_options.experimental.internal_fragmentation_fraction < 1e-4


def test_configure_gpu_works_in_steps_and_for_growth(gpu):
    assert device.configure_gpu(growth=True).growth
    configuration = device.configure_gpu(host_limit="1GiB")
    assert (configuration.growth, configuration.host_limit_bytes, configuration.allocator) == (True, GIB, "bfc")


def test_an_open_gpu_keeps_its_setup(gpu):
    device.configure_gpu(memory_limit="12GiB")
    gpu.is_open = True
    assert device.configure_gpu(memory_limit=12 * GIB).is_open, "what is in force may be asked for again"
    with pytest.raises(KerasSNError, match=r"opened the GPU already.*before those.*Received: memory_limit='8GiB'"):
        device.configure_gpu(memory_limit="8GiB")
    with pytest.raises(KerasSNError, match="opened the GPU already"):
        device.configure_gpu(allocator="cuda_malloc_async")


@pytest.mark.parametrize("first", [{}, {"growth": True}, {"memory_limit": "12GiB"}])
def test_a_limit_and_growth_exclude_each_other(gpu, first):
    device.configure_gpu(**first)
    with pytest.raises(KerasSNError, match=r"either a memory limit.*Received: memory_limit='12GiB', growth=True"):
        device.configure_gpu(memory_limit="12GiB", growth=True)


@pytest.mark.parametrize(
    "arguments", [{"memory_limit": "a lot"}, {"memory_limit": 1000}, {"growth": "yes"}, {"allocator": "jemalloc"}]
)
def test_bad_arguments_are_refused_with_and_without_a_gpu(arguments):
    with pytest.raises(KerasSNError, match="Received: "):
        device.configure_gpu(**arguments)


def test_the_peak_is_none_without_statistics(gpu):
    gpu.is_open = True
    assert device.measured_peak_bytes() is None
    device.reset_peak()
    assert gpu.peak is None
    gpu.peak = 5
    assert device.measured_peak_bytes() == 5
    device.reset_peak()
    assert device.measured_peak_bytes() == 1


def test_the_limit_of_a_gpu_that_is_not_open_is_what_is_free(gpu, monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\necho "$*" > "$(dirname "$0")/arguments"\necho 3000\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,6")
    assert device.memory_limit_bytes() == 3000 * 2**20
    assert "--query-gpu=memory.free" in (tmp_path / "arguments").read_text()
    assert (tmp_path / "arguments").read_text().split()[-2:] == ["-i", "5"]
    monkeypatch.setenv("PATH", "")
    assert device.memory_limit_bytes() is None


def test_asking_does_not_open_the_device():
    lines = run_python(
        "import keras_sn; from keras_sn import device\n"
        "print(device.configure_gpu(memory_limit='1GiB', growth=False))\n"
        "print(device.memory_limit_bytes() > 0, device.measured_peak_bytes(), device.is_device_open())\n"
        "import keras; keras.optimizers.SGD(); print(device.is_device_open())\n"
    )
    assert lines[-3:] == ["no GPU: TensorFlow computes on the CPU", "True None False", "True"]


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/a/b\n", {"a/memory.max": "5000", "a/b/memory.max": "max"}, 5000),
        ("0::/on/the/host\n", {"memory.max": "7000"}, 7000),
        ("5:cpu:/\n4:memory:/a\n", {"memory/a/memory.limit_in_bytes": "6000"}, 6000),
        ("4:memory:/a\n0::/\n", {"memory/a/memory.limit_in_bytes": "9223372036854771712"}, None),
        (None, {}, None),
    ],
)
def test_the_limit_of_the_control_group(monkeypatch, tmp_path, groups, files, limit):
    monkeypatch.setattr(device, "_PROCESS", tmp_path)
    monkeypatch.setattr(device, "_CGROUPS", tmp_path / "cgroup")
    if groups is not None:
        (tmp_path / "cgroup").write_text(groups)
        monkeypatch.setattr(device, "_CGROUPS", tmp_path / "groups")
    for name, text in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert device._cgroup_limit_bytes() == limit
    if limit:
        assert device.memory_limit_bytes() == limit
        assert device.host_limit_bytes() == int(0.8 * limit)


@pytest.mark.parametrize("has_kernel_counter", [True, False])
def test_resident_peak_is_above_the_level_at_entry(monkeypatch, tmp_path, has_kernel_counter):
    if not has_kernel_counter:
        monkeypatch.setattr(device, "_PROCESS", tmp_path / "missing")
    np.ones(100 * 2**20, dtype="uint8")  # a higher peak before does not count
    with device.ResidentPeak() as resident:
        block = np.ones(50 * 2**20, dtype="uint8")
        for _ in range(20):
            block += 1
        del block
    assert resident.peak_bytes == pytest.approx(50 * 2**20, rel=0.1)
    assert resident.resting_bytes == pytest.approx(device.resident_bytes(), rel=0.1)


@pytest.mark.gpu
def test_a_real_gpu():
    lines = run_python(
        "import os; os.environ.pop('CUDA_VISIBLE_DEVICES', None)\n"
        "from keras_sn import device; import tensorflow as tf\n"
        "print(device.memory_limit_bytes(), device.is_device_open())\n"
        "print(device.configure_gpu(memory_limit='2GiB'))\n"
        "x = tf.ones((2**28,)); del x\n"
        "print(device.measured_peak_bytes(), device.memory_limit_bytes(), device._allocator_limit_bytes())\n"
    )[-3:]
    free, was_open = lines[0].split()
    assert int(free) > 2 * GIB
    assert was_open == "False"
    assert "memory limit 2.00 GiB" in lines[1]
    peak, limit, allocator_limit = map(int, lines[2].split())
    assert GIB <= peak <= 1.1 * GIB
    assert limit == allocator_limit == 2 * GIB


def test_without_a_gpu_nothing_is_offloaded_unless_asked_for():
    """The host's memory is the device's own there."""
    assert not device.has_gpu()
    assert Settings(memory_budget="1GiB").host_budget_bytes() == 0
    assert Settings(memory_budget="1GiB", host_budget="2GiB").host_budget_bytes() == 2 * GIB


def test_memory_is_undivided_unless_cudas_allocator_joins_it(gpu):
    device.configure_gpu(memory_limit="12GiB")
    assert device.undivided_bytes() == 12 * GIB
    device.configure_gpu(allocator="cuda_malloc_async")
    assert device.undivided_bytes() is None


def test_without_a_gpu_no_memory_is_undivided():
    assert device.undivided_bytes() is None
