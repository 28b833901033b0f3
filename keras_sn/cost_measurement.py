"""The numbers of a cost model, measured on the GPU that TensorFlow computes on, once for each kind of GPU.

In: the device. Out: a `CostModel`, kept in memory and in a file in the directory of Keras.
"""

import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import reduce
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import tensorflow as tf

from keras_sn.cost import ON_CPU, ON_GPU, CostModel
from keras_sn.log import log
from keras_sn.pool import TIERS


@dataclass(frozen=True, slots=True)
class Convolution:
    """Square images and kernels, stride 1, images as large and with as many channels out as in."""

    batch: int
    pixels: int
    channels: int
    kernel: int
    data_format: str = "NHWC"
    """An H200 is a tenth faster this way than with channels first."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is computed, `calls` times in one go; the defaults keep a GPU busy and take at most about 600 MiB of its memory."""

    rounds: int = 4
    """Of products or convolutions in one function, because a call takes the host longer than a small product takes a GPU. As
    many more are timed too."""
    matrices: tuple[int, ...] = (768, 4096)
    """Contraction lengths of matrix products, each of `rows` rows and as many columns as it is long."""
    rows: int = 8192
    convolutions: tuple[Convolution, ...] = (
        Convolution(64, 56, 64, 3),
        Convolution(64, 28, 128, 3),
        Convolution(64, 14, 256, 3),
        Convolution(64, 14, 512, 3),
    )
    """Like the 3 x 3 convolutions of a ResNet, by length. Memory bounds its 1 x 1 ones (15e12 flop/s on an H200)."""
    block_bytes: int = 256 * 2**20
    """Of the block that is read and written; beyond the caches of a GPU, and for longer than the call takes the host."""
    copied_blocks: int = 3
    """To the host, of a quarter of that each; one is copied too, for what a copy costs however short it is."""
    chain_length: int = 128
    calls: int = 20
    repeats: int = 9


_known: dict[str, CostModel] = {}
"""By `_key()`; also what stands in for a measurement that failed, so that it is not tried again at each plan."""


def measure_cost_model(*, refresh: bool = False) -> CostModel:
    """What the first visible GPU does in a second: measured once and kept for later processes.

    Measuring opens the GPU and takes about half a minute (an earlier version 26 s on an H200, most of it compiling) and up to
    about 600 MiB of its memory.

    Args:
        refresh: Measure again, whatever is known.

    Returns:
        Rates in flop/s and byte/s, and seconds. Constants without a GPU; and if measuring failed, with a warning.
    """
    gpus = tf.config.get_visible_devices("GPU")
    if not gpus:
        return ON_CPU
    key = _key(gpus[0])
    if not refresh and (known := _known.get(key) or _read().get(key)):
        return _known.setdefault(key, known)
    log.info("measuring the GPU once, about half a minute (%s)", key)
    try:
        _known[key] = measure(Sizes(), "/GPU:0")
        _write(key, _known[key])
    except Exception as error:  # whatever it is: nobody asked for the measurement, and planning goes on without it
        log.warning("measuring the GPU failed, so plans use constants of a data-centre GPU: %s: %s", type(error).__name__, error)
        _known[key] = ON_GPU
    return _known[key]


def measure(sizes: Sizes, device: str) -> CostModel:
    """Measures a TensorFlow device, from anywhere: also while a function is being traced or a tape is recording."""
    with tf.init_scope(), tf.device(device):
        matrix_rates = tuple((length, matrix_rate(length, sizes)) for length in sizes.matrices)
        lengths = [one.channels * one.kernel**2 for one in sizes.convolutions]
        rates = [convolution_rates(one, sizes) for one in sizes.convolutions]
        forward, backward = zip(*rates, strict=True)
        middle = len(rates) // 2
        return CostModel(
            flops_per_second=matrix_rates[-1][1],
            bytes_per_second=memory_rate(sizes),
            link_bytes_per_second=link_rate(sizes),
            launch_seconds=launch_seconds(sizes),
            convolution_rates=tuple(zip(lengths, forward, strict=True)),
            convolution_backward_rates=tuple(zip(lengths, backward, strict=True)),
            matrix_rates=matrix_rates,
            low_precision_speedup=speedup(rates[middle], convolution_rates(sizes.convolutions[middle], sizes, "bfloat16")),
            # Read off the traces of four networks' steps. What small functions take is several times that.
            host_seconds_per_step=ON_GPU.host_seconds_per_step,
            host_seconds_per_variable=ON_GPU.host_seconds_per_variable,
            host_seconds_per_kernel=ON_GPU.host_seconds_per_kernel,
        )


def matrix_rate(length: int, sizes: Sizes) -> float:
    """Of a compiled float32 matrix product and its two gradients, with or without TF32 as TensorFlow is configured, in flop/s."""

    def all_three(x, w):
        y = tf.matmul(x, w)  # stands in for its own gradient
        return tf.matmul(y, w / (2 * length), transpose_b=True), tf.matmul(x, y, transpose_a=True)

    flops = 3 * 2 * sizes.rows * length**2
    return flops / _round_seconds(sizes, all_three, _random(sizes.rows, length), _random(length, length))


def convolution_rates(one: Convolution, sizes: Sizes, dtype: str = "float32") -> tuple[float, float]:
    """Of a compiled convolution, and of its two gradients together, in flop/s."""
    images = _random(*({"N": one.batch, "C": one.channels}.get(axis, one.pixels) for axis in one.data_format), dtype=dtype)
    kernel = _random(one.kernel, one.kernel, one.channels, one.channels, dtype=dtype)
    how = {"strides": [1, 1, 1, 1], "padding": "SAME", "data_format": one.data_format}
    scale = 1 / one.channels / one.kernel**2  # divided, the numbers stay near 1

    def forward(x, w):
        return tf.raw_ops.Conv2D(input=x, filter=w * scale, **how), w

    def all_three(x, w):
        y = tf.raw_ops.Conv2D(input=x, filter=w, **how)
        # The output stands in for its own gradient: it has the shape, and saves a block of memory.
        to_input = tf.raw_ops.Conv2DBackpropInput(input_sizes=x.shape, filter=w * scale, out_backprop=y, **how)
        to_kernel = tf.raw_ops.Conv2DBackpropFilter(input=x, filter_sizes=w.shape, out_backprop=y, **how)
        return to_input, to_kernel

    flops = 2 * one.batch * one.pixels**2 * one.channels * one.channels * one.kernel**2
    # As many convolutions in a call of either: one that takes the device less than it takes the host shows nothing.
    alone = _round_seconds(replace(sizes, rounds=3 * sizes.rounds), forward, images, kernel)
    together = _round_seconds(sizes, all_three, images, kernel)
    return flops / alone, 2 * flops / max(together - alone, 1e-9)


def speedup(slower: tuple[float, float], faster: tuple[float, float]) -> float:
    """How much sooner a convolution with its two gradients is done, by what `convolution_rates` says of either."""
    slow, fast = (1 / forward + 2 / backward for forward, backward in (slower, faster))
    return slow / fast


def memory_rate(sizes: Sizes) -> float:
    """Of reading and writing the device's memory, element by element, in byte/s."""
    # Not compiled: one kernel for each call, and the call takes the host less time than the kernel takes the device.
    return 2 * sizes.block_bytes / _seconds(sizes, tf.negative, _random(sizes.block_bytes // 4))


def link_rate(sizes: Sizes) -> float:
    """Of the slower way between the device and the host, in byte/s, copied as the pool does it."""
    blocks, tier = [_random(sizes.block_bytes // 16) for _ in range(sizes.copied_blocks)], TIERS["host"]
    device = blocks[0].device  # a function that holds the blocks would keep their memory

    @tf.function
    def down(*blocks):
        with tf.device(tier.tensorflow_device):
            return tf.add_n([tier.put(x)[0] for x in blocks])

    @tf.function
    def down_and_up(*blocks):
        stored = [tier.put(x) for x in blocks]
        with tf.device(device):
            return tf.add_n([tier.get(x, after=x)[0] for x in stored])

    def seconds(copy: Any) -> float:
        # Alone, or one call's way down runs beside the way up of the one before. The shortest of each: other work delays them.
        alone = replace(sizes, calls=1)
        return _seconds(alone, copy, *blocks) - _seconds(alone, copy, blocks[0])

    one_way, both_ways = seconds(down), seconds(down_and_up)
    nbytes = (len(blocks) - 1) * sizes.block_bytes / 4
    return nbytes / max(one_way, both_ways - one_way, nbytes / 1e13)  # no link is that fast: the clock was too coarse


def launch_seconds(sizes: Sizes) -> float:
    """Of one small kernel that waits for the one before it, inside a compiled function."""
    product = tf.function(lambda x: reduce(lambda y, _: tf.matmul(y, x), range(sizes.chain_length), x), jit_compile=True)
    return _seconds(sizes, product, _random(64, 64) / 8) / sizes.chain_length  # divided, the products stay near 1


def _random(*shape: int, dtype: str = "float32") -> Any:
    # Zeros draw less power, so a GPU would clock higher than in training. Stateless: the user's seeds stay untouched.
    return tf.random.stateless_normal(shape, seed=(0, 0), dtype=dtype)


def _round_seconds(sizes: Sizes, compute: Callable[[Any, Any], tuple[Any, Any]], x: Any, w: Any) -> float:
    """Seconds of one more round of a computation in one compiled function.

    Args:
        sizes: How many rounds.
        compute: `(x, w) -> (what can stand in for the next round's x, what has the shape of w)`.
        x: Where the first round begins.
        w: The same for all rounds; their gradients are added up, so that none can be left out.
    """

    def seconds(rounds: int) -> float:
        def chain(x, w):
            total = tf.zeros_like(w)
            for _ in range(rounds):
                x, gradient = compute(x, w)
                total += gradient
            return x, total

        return _seconds(sizes, tf.function(chain, jit_compile=True, autograph=False), x, w)

    return max(seconds(2 * sizes.rounds) - seconds(sizes.rounds), 1e-9) / sizes.rounds  # or the clock was too coarse


def _seconds(sizes: Sizes, function: Callable[..., Any], *arguments: Any) -> float:
    """Median seconds of a call among others."""
    seconds = []
    for _ in range(1 + sizes.repeats):
        start = perf_counter()
        for _ in range(sizes.calls - 1):
            function(*arguments)  # not bound to a name, so that its memory serves the next call
        # The device works in order, so all is done when one number of the last result is on the host.
        tf.reshape(tf.nest.flatten(function(*arguments))[-1], [-1])[0].numpy()
        seconds.append((perf_counter() - start) / sizes.calls)
    return median(seconds[1:])  # the first one compiles and warms up


def _key(gpu: Any) -> str:
    details = tf.config.experimental.get_device_details(gpu)
    name, capability = details.get("device_name", gpu.name), details.get("compute_capability")
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return f"{name}, compute capability {capability}, TensorFlow {tf.__version__}, TF32 {tf32}"


def _file() -> Path:
    return Path(os.environ.get("KERAS_HOME") or os.path.expanduser("~/.keras")) / "keras_sn" / "cost_models.json"


def _read() -> dict[str, CostModel]:
    try:
        entries = json.loads(_file().read_text(encoding="utf-8")).items()
        return {key: CostModel(**_in_tuples(entry)) for key, entry in entries if _is_of_this_version(key, entry)}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        log.debug("no cost models in %s: %s", _file(), error)
        return {}


def _is_of_this_version(key: str, entry: dict[str, Any]) -> bool:
    """Whether an entry has all numbers; one of an earlier version lacks some, and is measured anew."""
    missing = asdict(ON_GPU).keys() - entry.keys()
    if missing:
        log.debug("the cost model of %s is of another version: it has no %s", key, ", ".join(sorted(missing)))
    return not missing


def _in_tuples(entry: dict[str, Any]) -> dict[str, Any]:
    of_lengths = ("convolution_rates", "convolution_backward_rates", "matrix_rates")
    return entry | {name: tuple(map(tuple, entry.get(name, ()))) for name in of_lengths}


def _write(key: str, model: CostModel) -> None:
    temporary = _file().with_suffix(f".{os.getpid()}")
    try:
        temporary.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps({**_read(), key: model}, default=asdict, indent=2), encoding="utf-8")
        os.replace(temporary, _file())
    except OSError as error:
        log.debug("cost model not kept in %s: %s", _file(), error)
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
