"""One engine of JAX, measured in a process of its own: `python -P jax_rival.py '{"engine": "jax-plain", …}'`.

In: the fields of a `measure.Configuration`, as JSON. Out: one line of JSON, a row like those of `measure.measure`. Nothing of
keras_sn is imported, so neither Keras nor TensorFlow takes part. The networks are those of `networks`, and the batch is the same.

`jax-plain` is one jitted step whose state is donated. The others put `jax.checkpoint` around each block: `jax-dots` saves what
convolutions and matrix products return, `jax-nothing` only the block's input, and `jax-offload` that in the host's pinned memory.

Trying convolution algorithms while compiling can raise the allocator's peak. So a row also has `compiled_bytes`, what XLA says
the compiled step holds (arguments, results, temporaries), and `limit_bytes`, the cap as the allocator understood it.
"""

import ctypes
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import prod, sqrt
from statistics import median
from typing import Any

import numpy as np

try:
    import jax
    import jax.numpy as jnp
    from jax import lax
    from jax.ad_checkpoint import checkpoint_name
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    print(json.dumps(json.loads(sys.argv[1]) | {"fits": None, "reason": "jax is not installed", "peak_bytes": None}))
    sys.exit()

ENGINES = ("jax-plain", "jax-dots", "jax-nothing", "jax-offload")
_RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}

Row = dict[str, Any]
Tree = Any  # arrays in dicts and lists
Part = Callable[["Scope", jax.Array], jax.Array]  # a stem, a block or a head


class Scope:
    """The weights and moving statistics of one part of a network; the first time, with `random`, they are made."""

    def __init__(self, weights: Tree, moving: Tree, random: np.random.Generator | None = None):
        self.weights, self.moving, self.random = weights, moving, random
        self.moved: Tree = {}  # the moving statistics after this call

    def weight(self, name: str, *shape: int, fill: float | None = None) -> jax.Array:
        """A weight; at first all `fill`, or as Glorot and Bengio 2010 say."""
        if self.random is not None:
            limit = sqrt(6 / (prod(shape[:-2]) * sum(shape[-2:])))
            made = self.random.uniform(-limit, limit, shape) if fill is None else np.full(shape, fill)
            self.weights[name] = made.astype(np.float32)
        return self.weights[name]

    def move(self, name: str, value: jax.Array, start: float) -> None:
        """Moves a statistic towards a value."""
        if self.random is not None:
            self.moving[name] = np.full(value.shape, start, np.float32)
        self.moved[name] = 0.99 * self.moving[name] + 0.01 * value


def _convolve(scope: Scope, name: str, x: jax.Array, outputs: int, size: int, stride: int = 1) -> jax.Array:
    kernel = scope.weight(f"{name}_kernel", size, size, x.shape[-1], outputs).astype(x.dtype)
    return lax.conv_general_dilated(x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _dense(scope: Scope, name: str, x: jax.Array, outputs: int) -> jax.Array:
    kernel = scope.weight(f"{name}_kernel", x.shape[-1], outputs)
    return x @ kernel.astype(x.dtype) + scope.weight(f"{name}_bias", outputs, fill=0).astype(x.dtype)


def _normalize(scope: Scope, name: str, x: jax.Array, *axes: int, epsilon: float = 1e-6) -> tuple[jax.Array, ...]:
    """The normalized x, and the mean and variance over some axes; computed in float32, as in Keras."""
    y = x.astype(jnp.float32)
    mean = y.mean(axes, keepdims=True)
    variance = jnp.maximum((y * y).mean(axes, keepdims=True) - mean * mean, 0)
    scale, offset = (scope.weight(f"{name}_{kind}", x.shape[-1], fill=fill) for kind, fill in (("scale", 1), ("offset", 0)))
    return ((y - mean) * (scale * lax.rsqrt(variance + epsilon)) + offset).astype(x.dtype), mean, variance


def _convolve_normalized(scope: Scope, name: str, x: jax.Array, outputs: int, size: int, stride: int = 1) -> jax.Array:
    x, mean, variance = _normalize(scope, name, _convolve(scope, name, x, outputs, size, stride), 0, 1, 2, epsilon=1e-5)
    scope.move(f"{name}_mean", mean, 0)
    scope.move(f"{name}_variance", variance, 1)
    return x


def _bottleneck(scope: Scope, x: jax.Array, *, channels: int, stride: int, has_projection: bool) -> jax.Array:
    shortcut = _convolve_normalized(scope, "projection", x, 4 * channels, 1, stride) if has_projection else x
    y = jax.nn.relu(_convolve_normalized(scope, "conv1", x, channels, 1, stride))
    y = jax.nn.relu(_convolve_normalized(scope, "conv2", y, channels, 3))
    return jax.nn.relu(_convolve_normalized(scope, "conv3", y, 4 * channels, 1) + shortcut)


def resnet(blocks: Sequence[int], classes: int = 1000, width: int = 64) -> list[Part]:
    """`networks.resnet`."""

    def stem(scope: Scope, x: jax.Array) -> jax.Array:
        x = jax.nn.relu(_convolve_normalized(scope, "conv", x, width, 7, 2))
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    made = [
        partial(_bottleneck, channels=width * 2**stage, stride=2 if stage and not block else 1, has_projection=not block)
        for stage, count in enumerate(blocks)
        for block in range(count)
    ]
    return [stem, *made, lambda scope, x: _dense(scope, "logits", x.mean((1, 2)), classes)]


def _encoder(scope: Scope, x: jax.Array, *, heads: int, mlp: int) -> jax.Array:
    batch, tokens, width = x.shape
    parts = jnp.split(_dense(scope, "query_key_value", _normalize(scope, "norm1", x, -1)[0], 3 * width), 3, -1)
    attended = jax.nn.dot_product_attention(*(part.reshape(batch, tokens, heads, width // heads) for part in parts))
    x = x + _dense(scope, "output", attended.reshape(x.shape), width)
    y = jax.nn.gelu(_dense(scope, "dense1", _normalize(scope, "norm2", x, -1)[0], mlp), approximate=False)
    return x + _dense(scope, "dense2", y, width)


def vit(patch: int = 16, width: int = 768, depth: int = 12, heads: int = 12, mlp: int = 3072, classes: int = 1000) -> list[Part]:
    """`modern_networks.vit`, without dropout."""

    def stem(scope: Scope, x: jax.Array) -> jax.Array:
        x = _convolve(scope, "patches", x, width, patch, patch) + scope.weight("bias", width, fill=0).astype(x.dtype)
        token = jnp.broadcast_to(scope.weight("token", 1, 1, width, fill=0).astype(x.dtype), (len(x), 1, width))
        x = jnp.concatenate([token, x.reshape(len(x), -1, width)], 1)
        return x + scope.weight("positions", x.shape[1], width).astype(x.dtype)

    blocks = [partial(_encoder, heads=heads, mlp=mlp)] * depth
    return [stem, *blocks, lambda scope, x: _dense(scope, "logits", _normalize(scope, "norm", x, -1)[0][:, 0], classes)]


def build(network: str, arguments: dict[str, Any]) -> list[Part]:
    """The parts of a network by its name in `networks.NETWORKS`; the images tell their size."""
    arguments = {name: value for name, value in arguments.items() if name not in ("image_size", "dropout")}
    return vit(**arguments) if network == "vit" else resnet(**{"blocks": _RESNETS.get(network)} | arguments)


def initial_state(parts: Sequence[Part], images: np.ndarray) -> tuple[Tree, Tree, Tree]:
    """Weights, velocities and moving statistics, one tree a part."""
    random, scopes, x = np.random.default_rng(0), [], images
    for part in parts:
        scopes.append(Scope({}, {}, random))
        x = jax.eval_shape(partial(part, scopes[-1]), x)
    weights = [scope.weights for scope in scopes]
    return weights, jax.tree.map(np.zeros_like, weights), [scope.moving for scope in scopes]


def policy_of(engine: str) -> Callable[..., Any]:
    """What an engine saves in a block."""
    if engine == "jax-offload":
        names = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": ["block_input"]}
        places = {"offload_src": "device", "offload_dst": "pinned_host"}
        return jax.checkpoint_policies.save_and_offload_only_these_names(**names, **places)
    if engine == "jax-dots":
        return lambda primitive, *_, **__: primitive.name in ("dot_general", "conv_general_dilated")
    return jax.checkpoint_policies.nothing_saveable


def training_step(parts: Sequence[Part], engine: str, dtype: str) -> Callable[..., tuple[Tree, Tree, Tree, jax.Array]]:
    """`(weights, velocities, moving, images, labels)` to the first three, updated, and the loss; not jitted."""

    def run(part, weights, moving, x):
        scope = Scope(weights, moving)
        # Named inside, for what `jax.checkpoint` wraps keeps its arguments where they are, whatever the policy says.
        return part(scope, checkpoint_name(x, "block_input")), scope.moved

    def loss_of(weights, moving, x, labels):
        x, moved = x.astype("bfloat16" if dtype == "mixed_bfloat16" else "float32"), []
        for number, part in enumerate(parts):
            call, is_block = partial(run, part), 0 < number < len(parts) - 1
            if is_block and engine != "jax-plain":
                call = jax.checkpoint(call, policy=policy_of(engine))
            x, new = call(weights[number], moving[number], x)
            moved.append(new)
        chosen = jnp.take_along_axis(jax.nn.log_softmax(x.astype(jnp.float32)), labels[:, None], 1)
        return -chosen.mean(), moved

    def step(weights, velocities, moving, images, labels):
        (loss, moving), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, moving, images, labels)
        velocities = jax.tree.map(lambda old, gradient: 0.9 * old - 0.01 * gradient, velocities, gradients)
        return jax.tree.map(jnp.add, weights, velocities), velocities, moving, loss

    return step


def unsupported(configuration: Row) -> str:
    """Why a configuration cannot be measured here; empty if it can."""
    engine, arguments, device = configuration["engine"], configuration["arguments"], jax.devices()[0]
    # On a CPU, JAX says that it has pinned memory, and moves nothing there.
    has_host = device.platform != "cpu" and "pinned_host" in {memory.kind for memory in device.addressable_memories()}
    reasons = {
        f"not an engine of JAX: {engine}": engine not in ENGINES,
        f"{configuration['network']} is not written in JAX": configuration["network"] not in {"resnet", "vit", *_RESNETS},
        "dropout is not written in JAX": arguments.get("dropout"),
        "without a GPU there is no cap": device.platform == "cpu" and configuration["memory_bytes"] is not None,
        f"nothing is offloaded from a {device.platform}": engine == "jax-offload" and not has_host,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def measure(configuration: Row) -> Row:
    """Trains, and returns the row."""
    _cap(configuration["memory_bytes"])
    row = configuration | {"fits": None, "reason": unsupported(configuration), "peak_bytes": None}
    row |= {"device": jax.devices()[0].device_kind, "versions": {"jax": jax.__version__, "python": platform.python_version()}}
    if row["reason"]:
        return row
    try:
        return row | {"fits": True} | _train(configuration)
    except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
        is_memory = "RESOURCE_EXHAUSTED" in str(error) or "out of memory" in str(error).lower()
        return row | {"fits": False if is_memory else None, "reason": str(error).splitlines()[0]}


def _cap(memory_bytes: int | None) -> None:
    """Caps the memory, before JAX starts the device. It takes a share, of what the driver says there is."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    total_bytes = ctypes.c_size_t()
    with suppress(OSError):  # there is no driver
        driver = ctypes.CDLL("libcuda.so.1")
        driver.cuInit(0)
        driver.cuDeviceTotalMem_v2(ctypes.byref(total_bytes), 0)  # of the first device
    share = memory_bytes / total_bytes.value if memory_bytes is not None and total_bytes.value else 1.0
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(min(0.95, share))


def _train(configuration: Row) -> Row:
    arguments, random = configuration["arguments"], np.random.default_rng(0)
    size = arguments.get("image_size", 224)
    images = random.normal(size=(configuration["batch_size"], size, size, 3)).astype(np.float32)
    labels = random.integers(arguments.get("classes", 1000), size=len(images)).astype(np.int32)
    state = initial_state(parts := build(configuration["network"], arguments), images)
    parameters = sum(weight.size for weight in jax.tree.leaves(state[0]))
    *state, images, labels = jax.device_put((*state, images, labels))
    step = jax.jit(training_step(parts, configuration["engine"], configuration["dtype"]), donate_argnums=(0, 1, 2))
    losses, seconds, run = [], [], None
    for _ in range(configuration["steps"]):
        start = time.perf_counter()
        run = run or step.lower(*state, images, labels).compile()
        *state, loss = jax.block_until_ready(run(*state, images, labels))
        seconds.append(time.perf_counter() - start)
        losses.append(float(loss))
    stats, size = jax.devices()[0].memory_stats() or {}, run.memory_analysis()
    held_bytes = size.argument_size_in_bytes + size.output_size_in_bytes - size.alias_size_in_bytes + size.temp_size_in_bytes
    row = {"seconds_per_step": median(seconds[1:]), "first_step_seconds": seconds[0], "losses": losses, "parameters": parameters}
    row |= {"peak_bytes": stats.get("peak_bytes_in_use"), "limit_bytes": stats.get("bytes_limit")}
    return row | {"compiled_bytes": held_bytes}


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
