"""The device: set the GPU up before TensorFlow opens it, and ask how much memory there is and was used.

TensorFlow fixes a GPU's memory when it *opens* its devices, at the first tensor, layer or optimizer; from then on it
can only be asked. On the CPU the answers are about the process and the host.
"""

import os
import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.cost import CostModel
from keras_sn.cost_measurement import measure_cost_model as measure_cost_model
from keras_sn.errors import KerasSNError
from keras_sn.sizes import format_bytes, parse_bytes

ALLOCATORS = ("bfc", "cuda_malloc_async")
_ALLOCATOR_VARIABLE = "TF_GPU_ALLOCATOR"
_HOST_LIMIT_VARIABLE = "TF_GPU_HOST_MEM_LIMIT_IN_MB"
_MIB = 2**20
_HOST_SHARE = 0.8
_FRAGMENTATION = 1e-5
"""Of a GPU's memory: about a megabyte or less. TensorFlow's 128 MiB took 5 % of U-Net's peak of 4.3 GB (docs/measurements.md)."""
_CGROUPS = Path("/sys/fs/cgroup")
_PROCESS = Path("/proc/self")
_NO_LIMIT_BYTES = 2**60


@dataclass(frozen=True, slots=True)
class GpuConfiguration:
    """What is in force on every visible GPU; `str()` is a sentence."""

    gpu: str | None = None
    """The first visible GPU's name; None without a GPU, and then nothing else means anything."""
    memory_limit_bytes: int | None = None
    """None: TensorFlow takes what is free."""
    growth: bool = False
    """TensorFlow takes memory as it needs it, instead of all at once."""
    allocator: str = "bfc"
    host_limit_bytes: int | None = None
    """The most page-locked host memory for copies; None: TensorFlow's own limit."""
    is_open: bool = False
    """TensorFlow has opened the device, so nothing can be changed any more."""

    def __str__(self) -> str:
        if self.gpu is None:
            return "no GPU: TensorFlow computes on the CPU"
        limit = "all that is free" if self.memory_limit_bytes is None else format_bytes(self.memory_limit_bytes)
        host = "TensorFlow's default" if self.host_limit_bytes is None else format_bytes(self.host_limit_bytes)
        growth, state = "on" if self.growth else "off", "open" if self.is_open else "not opened yet"
        return f"{self.gpu}: memory limit {limit}, growth {growth}, allocator {self.allocator}, host limit {host}, {state}"


def configure_gpu(
    memory_limit: int | str | None = None,
    growth: bool | None = None,
    allocator: str | None = None,
    host_limit: int | str | None = None,
) -> GpuConfiguration:
    """Sets all visible GPUs up, before TensorFlow opens them. What is `None` stays as it is.

    TensorFlow's allocator is told to divide blocks exactly: by default it gives out blocks that are up to 128 MiB too large,
    which small budgets feel. Asking again for what is in force does nothing else. Without a GPU nothing happens.

    Args:
        memory_limit: The most device memory that TensorFlow may take, in bytes or as text (`"12GiB"`); whole MiB count.
        growth: Whether TensorFlow takes device memory as it needs it, instead of all at once.
        allocator: `"bfc"` (TensorFlow's own) or `"cuda_malloc_async"` (CUDA's, which heeds no memory limit; plans do).
        host_limit: The most page-locked host memory that TensorFlow may take for copies, in bytes or as text.

    Returns:
        What is really in force.

    Raises:
        KerasSNError: TensorFlow has opened the device and the request differs from what is in force; or `memory_limit`
            and `growth` together; or an argument is not of its kind.
    """
    request = _checked(memory_limit=memory_limit, growth=growth, allocator=allocator, host_limit=host_limit)
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return GpuConfiguration()
    current = _in_force(gpus)
    wanted = replace(current, **request)
    received = f"Received: {memory_limit=}, {growth=}, {allocator=}, {host_limit=}"
    if wanted.memory_limit_bytes is not None and wanted.growth:
        raise KerasSNError(
            "A GPU has either a memory limit, which TensorFlow takes at once, or growth without a limit. "
            f"Leave one of the two out; in force: {current}. {received}"
        )
    if not current.is_open:
        keras_internals.allow_internal_fragmentation(_FRAGMENTATION)
    if wanted == current:
        return current
    if current.is_open:
        raise KerasSNError(
            "TensorFlow has opened the GPU already, at the first tensor, layer or optimizer, so its set-up is fixed "
            f"({current}). Call keras_sn.configure_gpu() before those, in a new process. {received}"
        )
    _apply(gpus, request)
    return _in_force(gpus)


def _checked(*, growth: bool | None, allocator: str | None, **sizes: int | str | None) -> dict[str, Any]:
    """The request as fields of `GpuConfiguration`, without what is None."""
    if allocator not in (None, *ALLOCATORS):
        raise KerasSNError(f"`allocator` must be 'bfc' or 'cuda_malloc_async'. Received: allocator={allocator!r}")
    if growth not in (None, True, False):
        raise KerasSNError(f"`growth` must be True, False or None. Received: growth={growth!r}")
    request: dict[str, Any] = {"growth": growth, "allocator": allocator}
    for argument, size in sizes.items():
        if size is None:
            continue
        nbytes = parse_bytes(size, argument=argument) // _MIB * _MIB
        if nbytes == 0:
            raise KerasSNError(f"`{argument}` must be at least 1 MiB. Received: {argument}={size!r}")
        request[f"{argument}_bytes"] = nbytes
    return {field: value for field, value in request.items() if value is not None}


def _in_force(gpus: list[Any]) -> GpuConfiguration:
    logical = tf.config.get_logical_device_configuration(gpus[0])
    host_limit_mib = os.environ.get(_HOST_LIMIT_VARIABLE, "")
    return GpuConfiguration(
        gpu=tf.config.experimental.get_device_details(gpus[0]).get("device_name", gpus[0].name),
        memory_limit_bytes=int(logical[0].memory_limit) * _MIB if logical else None,
        growth=bool(tf.config.experimental.get_memory_growth(gpus[0])),
        allocator=os.environ.get(_ALLOCATOR_VARIABLE) or "bfc",
        host_limit_bytes=int(host_limit_mib) * _MIB if host_limit_mib.isdigit() else None,
        is_open=is_device_open(),
    )


def _apply(gpus: list[Any], request: dict[str, Any]) -> None:
    for gpu in gpus:
        if "memory_limit_bytes" in request:
            limit = tf.config.LogicalDeviceConfiguration(memory_limit=request["memory_limit_bytes"] // _MIB)
            tf.config.set_logical_device_configuration(gpu, [limit])
        elif "growth" in request and not tf.config.get_logical_device_configuration(gpu):
            tf.config.experimental.set_memory_growth(gpu, request["growth"])
    if "allocator" in request:
        os.environ[_ALLOCATOR_VARIABLE] = request["allocator"]
    if "host_limit_bytes" in request:
        os.environ[_HOST_LIMIT_VARIABLE] = str(request["host_limit_bytes"] // _MIB)


def is_device_open() -> bool:
    """Whether TensorFlow has opened its devices. Asking does not open them."""
    # No public function tells, and `list_logical_devices` and the like open them. But TensorFlow refuses to change the
    # number of threads once they are open, so a change is tried and taken back.
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    try:
        tf.config.threading.set_intra_op_parallelism_threads(threads + 1)
    except RuntimeError:
        return True
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    return False


def has_gpu() -> bool:
    """Whether TensorFlow computes on a GPU."""
    return bool(tf.config.get_visible_devices("GPU"))


def memory_limit_bytes() -> int | None:
    """Memory of the device that TensorFlow computes on, in bytes; `None` where nobody can tell.

    On a GPU the configured limit, else the limit of TensorFlow's allocator, else (not opened yet) what is free on it.
    On the CPU the available memory or the control group's limit, whichever is smaller.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return _available_host_bytes()
    if (limit_bytes := _in_force(gpus).memory_limit_bytes) is not None:
        return limit_bytes
    if is_device_open():
        return _allocator_limit_bytes() or _nvidia_smi_bytes(gpus[0].name, "memory.total")
    return _nvidia_smi_bytes(gpus[0].name, "memory.free")


def undivided_bytes() -> int | None:
    """The GPU memory of which TensorFlow's own allocator gives each block out in one piece; `None` where none does."""
    gpus = tf.config.get_visible_devices("GPU")
    return memory_limit_bytes() if gpus and _in_force(gpus).allocator == "bfc" else None


@cache
def _allocator_limit_bytes() -> int | None:
    # A session lists the devices with the limits of their allocators, which the whole process shares; no other public
    # name does. Only for open devices: a session would open them with settings of its own.
    with suppress(tf.errors.OpError), tf.compat.v1.Session(graph=tf.Graph()) as session:
        return next((d.memory_limit_bytes for d in session.list_devices() if d.device_type == "GPU"), None)
    return None


def _nvidia_smi_bytes(gpu_name: str, field: str) -> int | None:
    index = int(gpu_name.rpartition(":")[2])
    visible = [entry for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry]
    gpu = visible[index] if index < len(visible) else str(index)
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits", "-i", gpu]
    with suppress(OSError, subprocess.SubprocessError, ValueError, IndexError):
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
        return int(answer.split()[0]) * _MIB
    return None


def host_limit_bytes() -> int:
    """The default host budget: 80 % of the available memory or of the control group's limit, whichever is smaller."""
    return int(_HOST_SHARE * _available_host_bytes())


def _available_host_bytes() -> int:
    return min(psutil.virtual_memory().available, _cgroup_limit_bytes() or _NO_LIMIT_BYTES)


def _cgroup_limit_bytes() -> int | None:
    """The smallest memory limit of this process's control group and its parents (version 1 or 2), if there is one."""
    limits = [_NO_LIMIT_BYTES]
    with suppress(OSError):
        for line in (_PROCESS / "cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers not in ("", "memory"):
                continue
            folder = _CGROUPS / controllers / group.strip("/")
            # A container may be told its path on the host, which does not exist inside: all parents are tried.
            for parent in (folder, *folder.parents):
                with suppress(OSError, ValueError):  # not there, or "max"
                    limits.append(int((parent / ("memory.limit_in_bytes" if controllers else "memory.max")).read_text()))
    return min(limits) if min(limits) < _NO_LIMIT_BYTES else None


def measured_peak_bytes() -> int | None:
    """The GPU allocator's peak since the start or `reset_peak()`, in bytes; `None` where there are no statistics."""
    if not tf.config.get_visible_devices("GPU") or not is_device_open():
        return None
    with suppress(ValueError):  # an allocator without statistics
        return int(tf.config.experimental.get_memory_info("GPU:0")["peak"])
    return None


def cost_model() -> CostModel:
    """What the device does in a second: measured at the first call on a GPU, constants on the CPU."""
    return measure_cost_model()


def reset_peak() -> None:
    """Lets `measured_peak_bytes()` count from what is in use now."""
    if measured_peak_bytes() is not None:
        tf.config.experimental.reset_memory_stats("GPU:0")


def resident_bytes() -> int:
    """Resident memory of this process, in bytes."""
    return psutil.Process().memory_info().rss


class ResidentPeak:
    """Measures the peak of this process's resident memory in a `with` block, above the level at its entry.

    On Linux the kernel keeps the peak; each block restarts its counter, so blocks must not overlap. Elsewhere a thread
    looks every two milliseconds.
    """

    resting_bytes = 0
    """The level at entry."""
    peak_bytes = 0
    """The peak above that level; known at exit."""

    def __enter__(self) -> "ResidentPeak":
        self._done = threading.Event()
        self._highest_bytes = self.resting_bytes = resident_bytes()
        self._sampler = None if _restart_kernel_peak() else threading.Thread(target=self._sample, daemon=True)
        if self._sampler:
            self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._sampler:
            self._done.set()
            self._sampler.join()
        else:
            self._highest_bytes = _kernel_peak_bytes()
        self.peak_bytes = max(0, self._highest_bytes - self.resting_bytes)

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._highest_bytes = max(self._highest_bytes, resident_bytes())


def _restart_kernel_peak() -> bool:
    try:
        (_PROCESS / "clear_refs").write_text("5")  # resets VmHWM: proc_pid_clear_refs(5)
        return _kernel_peak_bytes() > 0
    except OSError:
        return False


def _kernel_peak_bytes() -> int:
    status = (_PROCESS / "status").read_text()
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM:")), 0)
