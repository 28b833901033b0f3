"""One configuration, measured in a process of its own: `run(configuration)` starts it and returns its row.

The worker (`python -m keras_sn.benchmarks.measure '{"engine": …}'`) builds a network, caps the memory, runs real
training steps on random data through `train_on_batch`, and prints one line of JSON.

Note: [Memory]
On a GPU the cap is a logical device of that size, `peak_bytes` the allocator's peak in the second and later training steps
(in the first, XLA tries out algorithms, with as much memory as there is), and a network fits if nothing ran out of memory.
Without a GPU, `peak_bytes` is the process's peak resident memory in the second and later training steps, above the
level right before each of them, and a network fits if that is at most the cap. Between two steps everything that stays
exists (weights, optimizer slots, traced graphs, compiled code) and no activation does, so that level is the resting
level, and it means the same for every engine. The first step does not count: what tracing and compiling take would
pass for activations.
This holds only if freed memory really leaves the process. So the worker runs without the pool that TensorFlow's oneDNN
build keeps (`TF_ONEDNN_USE_SYSTEM_ALLOCATOR`), tensors of 64 KiB and more get pages of their own
(`MALLOC_MMAP_THRESHOLD_`), and the rest is trimmed before each step. Checked with ResNet-50 at 128 pixels: 103 MiB
where TensorFlow's own statistics say 100. It costs time, so the speed of a CPU is measured without it
(`purpose="speed"`).
"""

import ctypes
import gc
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import keras_sn
from keras_sn import device
from keras_sn.benchmarks import engines, keras_rivals, networks, traces
from keras_sn.benchmarks.reports import provenance

_PACKAGE = Path(keras_sn.__file__).parent
TRACED_STEPS = 3
MEMORY_ENVIRONMENT = {"TF_ONEDNN_USE_SYSTEM_ALLOCATOR": "1", "MALLOC_MMAP_THRESHOLD_": str(64 * 1024)}

Row = dict[str, Any]
"""A `Configuration`, what was measured, and where; see `measure`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """What one process measures."""

    engine: str
    """Who trains it; see `engines`."""
    network: str
    """A name in `networks.NETWORKS`."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Of the network's builder."""
    batch_size: int
    dtype: str = "float32"
    memory_bytes: int | None = None
    """The cap."""
    budget_bytes: int | None = None
    """Of `SNModel`; None: the cap."""
    steps: int = 2
    """Training steps, at least two: the first is traced and compiled."""
    purpose: str = "memory"
    """`"memory"`; or, without a GPU, `"speed"`, see Note: [Memory]; or, on a GPU, `"trace"`: then some more steps are traced."""

    def row(self) -> Row:
        """The configuration as a row begins; ResNets with their depth."""
        blocks = self.arguments.get("blocks")
        return asdict(self) | ({"depth": networks.depth(blocks)} if blocks else {})


def worker_command(configuration: Configuration) -> list[str]:
    """What starts the worker of a configuration: this module, or the script of a rival."""
    package, worker = configuration.engine.partition("-")[0], ["-m", "keras_sn.benchmarks.measure"]
    if package in ("torch", "jax"):
        # -P: the modules beside the script must not stand in for others of the same name.
        worker = ["-P", str(Path(__file__).with_name(f"{package}_rival.py"))]
    return [sys.executable, *worker, json.dumps(asdict(configuration))]


def run(configuration: Configuration, timeout: float | None = None) -> Row:
    """Measures a configuration in a process of its own.

    Args:
        configuration: What to measure.
        timeout: Seconds after which the process is killed and the network counts as one that does not train.

    Returns:
        The worker's row. Where it could not be measured, `fits` is None and `reason` says why.
    """
    environment = {"TF_CPP_MIN_LOG_LEVEL": "2"} | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")]))
    if configuration.purpose == "memory":
        environment |= MEMORY_ENVIRONMENT
    row = configuration.row() | {"fits": None, "peak_bytes": None}
    try:
        command = worker_command(configuration)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return row | {"fits": False, "reason": f"not done after {timeout:.0f} seconds"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode == 0 and lines:
        return row | json.loads(lines[-1])
    if done.returncode == -9:
        return row | {"fits": False, "reason": "killed: the machine ran out of memory"}
    return row | {"reason": "\n".join(done.stderr.splitlines()[-3:]) or f"exit status {done.returncode}"}


def measure(configuration: Configuration) -> Row:
    """Runs in the worker: builds the model and trains it.

    Returns:
        The configuration with `depth`, `fits`, `reason` (why it does not fit), `peak_bytes`, `resting_bytes`,
        what the plan says, `seconds_per_step` (median of the steps after the first), `first_step_seconds`, `losses`,
        `device`, `cpus`, `versions` and `commit`.
    """
    gpus = tf.config.list_physical_devices("GPU")
    device.configure_gpu(memory_limit=configuration.memory_bytes)
    row: Row = configuration.row() | {"fits": False, "reason": ""} | provenance()
    try:
        model = _build(configuration)
        figures = _train(model, configuration)
    except (tf.errors.OpError, keras_sn.BudgetError, MemoryError) as error:
        text = str(error)
        if isinstance(error, tf.errors.OpError) and not _is_out_of_memory(text):
            raise
        return row | {"reason": text.splitlines()[0] if text else type(error).__name__, "peak_bytes": None}
    except ValueError as error:
        if configuration.engine not in engines.KERAS_RIVALS:
            raise
        return row | {"fits": None, "reason": keras_rivals.reason_of(error), "peak_bytes": None}
    if configuration.purpose == "trace" and (seen := _traced(model, configuration)):
        row |= {"trace": seen.row(), "traced_steps": TRACED_STEPS}
    plan = getattr(model, "plan", None)
    row |= figures | (_of_plan(plan) if plan else {})
    if gpus:
        return row | {"fits": True, "peak_bytes": device.measured_peak_bytes()}
    cap_bytes = configuration.memory_bytes
    return row | {"fits": cap_bytes is None or figures["peak_bytes"] <= cap_bytes}


def _of_plan(plan: keras_sn.Plan) -> Row:
    names = ("planned_peak_bytes", "plain_peak_bytes", "reserved_bytes", "planned_seconds", "plain_seconds", "offloaded_bytes")
    return {name: getattr(plan, name) for name in names}


def _is_out_of_memory(text: str) -> bool:
    return any(sign in text.lower() for sign in ("out of memory", "resource_exhausted", "oom when allocating"))


def _build(configuration: Configuration) -> keras.Model:
    """The compiled model, with all its variables."""
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(configuration.dtype)
    make = partial(networks.NETWORKS[configuration.network], **configuration.arguments)
    if engines.is_ours(configuration.engine):
        model = _planned(make(model_class=keras_sn.SNModel), configuration)
    else:
        model = keras_rivals.build(configuration.engine, make)
    model.compile(
        optimizer=_optimizer(),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        jit_compile=configuration.engine.endswith("-xla"),
    )
    model.optimizer.build(model.trainable_variables)
    return model


def _optimizer() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(learning_rate=0.01, momentum=0.9)


def _planned(model: Any, configuration: Configuration) -> keras_sn.SNModel:
    """The model with the engine's policy and budget."""
    policy = configuration.engine.removesuffix("-xla")
    budget_bytes = configuration.budget_bytes or (configuration.memory_bytes if policy == "auto" else None)
    if share := engines.share_of(configuration.engine):
        policy = "auto"
        reference = keras_sn.SNModel.from_model(model, policy="none")
        reference.compile(_optimizer())  # its slots are reserved
        plain = reference.build_plan(configuration.batch_size)
        budget_bytes = plain.reserved_bytes + int(share * (plain.plain_peak_bytes - plain.reserved_bytes))
    return keras_sn.SNModel.from_model(model, policy=policy, memory_budget=budget_bytes)


def _train(model: keras.Model, configuration: Configuration) -> Row:
    x, y = _random_batch(model, configuration.batch_size)
    losses, seconds, residents = [], [], []
    for _ in range(configuration.steps):
        if configuration.purpose == "memory":
            give_memory_back()
        with device.ResidentPeak() as resident:
            start = time.perf_counter()
            losses.append(float(model.train_on_batch(x, y, return_dict=True)["loss"]))
            seconds.append(time.perf_counter() - start)
        if len(losses) == 1:
            device.reset_peak()  # XLA tries algorithms out while it compiles, with as much memory as there is
        residents.append(resident)
    highest = max(residents[1:], key=lambda resident: resident.peak_bytes)
    return {
        "peak_bytes": highest.peak_bytes,
        "resting_bytes": highest.resting_bytes,
        "seconds_per_step": median(seconds[1:]),
        "first_step_seconds": seconds[0],
        "losses": losses,
    }


def _traced(model: keras.Model, configuration: Configuration) -> traces.Trace | None:
    x, y = _random_batch(model, configuration.batch_size)
    return traces.trace(lambda: [float(model.train_on_batch(x, y, return_dict=True)["loss"]) for _ in range(TRACED_STEPS)])


def _random_batch(model: keras.Model, batch_size: int) -> tuple[Any, Any]:
    """Images or tokens (of 0 and 1, which every vocabulary has), and labels, all on the device.

    Labels are int64: TensorFlow holds int32 on the host, and what would be timed is a copy of it, which the steps of different
    engines wait for differently when they get the same batch again.
    """
    random = np.random.default_rng(0)
    inputs = []
    for spec in model.inputs:
        shape, is_tokens = (batch_size, *spec.shape[1:]), spec.dtype.startswith("int")
        inputs.append(tf.constant(random.integers(2, size=shape) if is_tokens else random.normal(size=shape), spec.dtype))
    classes = model.output.shape[-1]
    labels = tf.constant(random.integers(classes, size=(batch_size, *model.output.shape[1:-1])), "int64")
    return keras.tree.pack_sequence_as(model.input, inputs), labels


def give_memory_back() -> None:
    """Frees what nobody needs and returns it to the operating system, where the C library can (glibc)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def main(argv: list[str]) -> int:
    # Keras finds the layers of a model by recursion, which ends at about 1,000 layers with Python's default limit.
    sys.setrecursionlimit(1_000_000)
    print(json.dumps(measure(Configuration(**json.loads(argv[0])))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
