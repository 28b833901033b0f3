"""One engine of PyTorch, measured in a process of its own: `python -P torch_rival.py '{"engine": "torch-eager", …}'`.

In: the fields of a `measure.Configuration`, as JSON. Out: one line of JSON, a row like those of `measure.measure`. Nothing of
keras_sn is imported, so neither Keras nor TensorFlow takes part. The networks are those of `networks`, with PyTorch's initial
weights, and the batch is the same.

- `torch-eager`: PyTorch as it is.
- `torch-compile`: `torch.compile`; with `@0.5`, its partitioner keeps that share of the activations (`activation_memory_budget`).
- `torch-checkpoint`: each block is recomputed from its inputs. PyTorch updates its moving statistics twice then.
- `torch-save-on-cpu`: what autograd saves waits in the host's memory, pinned if there is a GPU.

Everything else is PyTorch's default (`cudnn.benchmark` is off), but TF32 is on, and images have their channels last.
"""

import json
import platform
import re
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import numpy as np

try:
    import torch
    from torch import Tensor, nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint
except ModuleNotFoundError:
    if __name__ != "__main__":
        raise
    print(json.dumps(json.loads(sys.argv[1]) | {"fits": None, "reason": "torch is not installed", "peak_bytes": None}))
    sys.exit()

_ENGINE = re.compile(r"torch-(eager|compile(@(?P<share>0?\.\d+))?|checkpoint|save-on-cpu)")
_RESNETS = {"resnet50": (3, 4, 6, 3), "resnet101": (3, 4, 23, 3), "resnet152": (3, 8, 36, 3)}

Row = dict[str, Any]


class Network(nn.Module):
    """A stem, blocks, and a head; the blocks are what `torch-checkpoint` recomputes."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], head: nn.Module):
        super().__init__()
        self.stem, self.blocks, self.head = stem, nn.ModuleList(blocks), head
        self.recomputes = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.head(x)


class Bottleneck(nn.Module):
    """A block of a ResNet."""

    def __init__(self, inputs: int, channels: int, *, stride: int, has_projection: bool):
        super().__init__()
        self.main = nn.Sequential(
            *_convolution(inputs, channels, 1, stride),
            nn.ReLU(inplace=True),
            *_convolution(channels, channels, 3),
            nn.ReLU(inplace=True),
            *_convolution(channels, 4 * channels, 1),
        )
        self.shortcut = nn.Sequential(*_convolution(inputs, 4 * channels, 1, stride)) if has_projection else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.main(x) + self.shortcut(x), inplace=True)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    convolution = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(outputs, eps=1e-5, momentum=0.01)


def resnet(blocks: tuple[int, ...], image_size: int = 224, classes: int = 1000, width: int = 64) -> Network:
    """`networks.resnet`."""
    stem = nn.Sequential(*_convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, padding=1))
    made, inputs = [], width
    for stage, count in enumerate(blocks):
        channels = width * 2**stage
        for block in range(count):
            stride = 2 if stage and not block else 1
            made.append(Bottleneck(inputs, channels, stride=stride, has_projection=not block))
            inputs = 4 * channels
    return Network(stem, made, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes)))


class Patches(nn.Module):
    """Images to tokens, the class token before them, with their positions."""

    def __init__(self, tokens: int, patch: int, width: int):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(tokens + 1, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.positions


class Encoder(nn.Module):
    """A block of a vision Transformer."""

    def __init__(self, width: int, heads: int, mlp: int):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, eps=1e-6), nn.LayerNorm(width, eps=1e-6)
        self.query_key_value, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.perceptron = nn.Sequential(nn.Linear(width, mlp), nn.GELU(), nn.Linear(mlp, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.query_key_value(self.norm1(x)).view(batch, tokens, 3, self.heads, width // self.heads)
        attended = functional.scaled_dot_product_attention(*parts.permute(2, 0, 3, 1, 4).unbind())
        x = x + self.output(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.perceptron(self.norm2(x))


class Classifier(nn.Module):
    """Logits of the class token."""

    def __init__(self, width: int, classes: int):
        super().__init__()
        self.norm, self.logits = nn.LayerNorm(width, eps=1e-6), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.logits(self.norm(x)[:, 0])


def vit(
    image_size: int = 224,
    patch: int = 16,
    width: int = 768,
    depth: int = 12,
    heads: int = 12,
    mlp: int = 3072,
    classes: int = 1000,
    dropout: float = 0.0,
) -> Network:
    """`modern_networks.vit`, without dropout."""
    blocks: list[nn.Module] = [Encoder(width, heads, mlp) for _ in range(depth)]
    return Network(Patches((image_size // patch) ** 2, patch, width), blocks, Classifier(width, classes))


def build(network: str, arguments: dict[str, Any]) -> Network:
    """A network by its name in `networks.NETWORKS`."""
    return vit(**arguments) if network == "vit" else resnet(**{"blocks": _RESNETS.get(network)} | arguments)


def unsupported(configuration: Row) -> str:
    """Why a configuration cannot be measured here; empty if it can."""
    engine, network, arguments = configuration["engine"], configuration["network"], configuration["arguments"]
    reasons = {
        f"not an engine of PyTorch: {engine}": not _ENGINE.fullmatch(engine),
        f"{network} is not written in PyTorch": network not in {"resnet", "vit", *_RESNETS},
        "dropout is not written in PyTorch": arguments.get("dropout"),
        "without a GPU there is no cap": configuration["memory_bytes"] is not None and not torch.cuda.is_available(),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def measure(configuration: Row) -> Row:
    """Trains, and returns the row."""
    is_gpu = torch.cuda.is_available()
    row = configuration | {"fits": None, "reason": unsupported(configuration), "peak_bytes": None}
    row["device"] = torch.cuda.get_device_name() if is_gpu else platform.processor() or platform.machine()
    row["versions"] = {"torch": torch.__version__, "cuda": torch.version.cuda, "python": platform.python_version()}
    if row["reason"]:
        return row
    if is_gpu and configuration["memory_bytes"] is not None:
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, configuration["memory_bytes"] / total_bytes))
    try:
        figures = _train(configuration, torch.device("cuda" if is_gpu else "cpu"))
    except (RuntimeError, MemoryError) as error:
        text = str(error) or type(error).__name__
        if not re.search("(?i)out of memory|not enough memory|alloc_failed|MemoryError", text):
            raise
        return row | {"fits": False, "reason": text.splitlines()[0]}
    return row | figures | {"fits": True, "peak_bytes": torch.cuda.max_memory_allocated() if is_gpu else None}


def _train(configuration: Row, device: torch.device) -> Row:
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    torch.backends.cudnn.allow_tf32 = True
    network = build(configuration["network"], configuration["arguments"]).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    model = _prepared(network, configuration["engine"])
    images, labels = _random_batch(configuration, device)
    is_mixed, losses, seconds = configuration["dtype"] == "mixed_bfloat16", [], []
    for _ in range(configuration["steps"]):
        start = time.perf_counter()
        optimizer.zero_grad()
        with _saving(configuration["engine"], device), torch.autocast(device.type, torch.bfloat16, enabled=is_mixed):
            loss = functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
    return {
        "seconds_per_step": median(seconds[1:]),
        "first_step_seconds": seconds[0],
        "losses": losses,
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }


def _prepared(network: Network, engine: str) -> nn.Module:
    """The network as an engine runs it."""
    network.recomputes = engine == "torch-checkpoint"
    if not engine.startswith("torch-compile"):
        return network
    from torch._functorch import config as partitioner
    from torch._inductor import config as compiler

    compiler.force_disable_caches = True  # the first step is a figure, too
    match = _ENGINE.fullmatch(engine)
    if match and match["share"]:
        partitioner.activation_memory_budget = float(match["share"])
    return torch.compile(network)


def _saving(engine: str, device: torch.device) -> AbstractContextManager:
    """Where autograd saves what the backward pass reads."""
    if engine != "torch-save-on-cpu":
        return nullcontext()
    return torch.autograd.graph.save_on_cpu(pin_memory=device.type == "cuda")


def _random_batch(configuration: Row, device: torch.device) -> tuple[Tensor, Tensor]:
    random = np.random.default_rng(0)
    batch, arguments = configuration["batch_size"], configuration["arguments"]
    size = arguments.get("image_size", 224)
    images = torch.tensor(random.normal(size=(batch, size, size, 3)), dtype=torch.float32, device=device)
    labels = torch.tensor(random.integers(arguments.get("classes", 1000), size=batch), device=device)
    return images.permute(0, 3, 1, 2), labels


if __name__ == "__main__":
    print(json.dumps(measure(json.loads(sys.argv[1]))), flush=True)
