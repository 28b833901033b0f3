"""The networks of the SuperNeurons paper as layer graphs, without Keras: what the planner would know of them.

Shapes are those of the authors' test programs, float32: AlexNet without groups on 227 x 227 pixels, VGG16 and ResNet on
224 x 224, InceptionV4 on 299 x 299. As in their code a fork copies its input once for each branch, a join or concat
makes a new tensor, and ACT, LRN and SOFTMAX make gradients in place.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from keras_sn.graph import LayerCall, LayerGraph, TensorSpec
from keras_sn.steps import execution_route

Kernel = int | tuple[int, int]
COSTLY = {"CONV", "FC"}
IN_PLACE = {"ACT", "LRN", "SOFTMAX"}
SAVES_INPUT = {"CONV", "FC", "BN", "ACT", "LRN", "POOL"}
SAVES_OUTPUT = {"ACT", "LRN", "POOL", "SOFTMAX"}
"""The backward dependencies that the authors' code registers; DROPOUT, JOIN, CONCAT and FORK need gradients alone."""


class NetworkBuilder:
    """Adds layer calls one by one. Tensors are handled by name; shapes are (batch, height, width, channels)."""

    def __init__(self, batch_size: int, *, pixels: int):
        self.batch_size = batch_size
        self.tensors = {"images": TensorSpec("images", (batch_size, pixels, pixels, 3), "float32", "input")}
        self.layers: list[LayerCall] = []

    def shape(self, tensor: str) -> tuple[int, ...]:
        """The shape of one sample."""
        return self.tensors[tensor].shape[1:]

    def add(
        self, kind: str, inputs: Sequence[str], *shapes: tuple[int, ...], flops: int = 0, weights: int = 0
    ) -> tuple[str, ...]:
        """Adds a layer call with one output for each shape; shapes and `flops` of one sample, `weights` in numbers."""
        name = f"{kind}{len(self.layers) + 1}"
        outputs = tuple(f"{name}:{number}" for number in range(len(shapes))) if len(shapes) > 1 else (name,)
        for output, shape in zip(outputs, shapes, strict=True):
            self.tensors[output] = TensorSpec(output, (self.batch_size, *shape), "float32")
        saved = (*(inputs if kind in SAVES_INPUT else ()), *(outputs if kind in SAVES_OUTPUT else ()))
        call = LayerCall(
            name,
            kind,
            tuple(inputs),
            outputs,
            saved,
            flops=flops * self.batch_size,
            is_costly=kind in COSTLY,
            weight_bytes=4 * weights,
            gradient_in_place=kind in IN_PLACE,
        )
        self.layers.append(call)
        return outputs

    def conv(self, x: str, filters: int, kernel: Kernel, *, stride: int = 1, pad: int | None = 0, bias: bool = True) -> str:
        """A convolution. `pad` is in pixels on each side; None keeps the size."""
        height, width, channels = self.shape(x)
        rows, columns = (kernel, kernel) if isinstance(kernel, int) else kernel
        if pad is not None:
            height = (height + 2 * pad - rows) // stride + 1
            width = (width + 2 * pad - columns) // stride + 1
        taps = rows * columns * channels
        flops = 2 * taps * filters * height * width
        return self.add("CONV", [x], (height, width, filters), flops=flops, weights=(taps + bias) * filters)[0]

    def pool(self, x: str, size: int, *, stride: int, pad: int = 0) -> str:
        height, width, channels = self.shape(x)
        height, width = ((side + 2 * pad - size) // stride + 1 for side in (height, width))
        return self.add("POOL", [x], (height, width, channels), flops=size * size * height * width * channels)[0]

    def dense(self, x: str, units: int) -> str:
        numbers = prod(self.shape(x))
        return self.add("FC", [x], (units,), flops=2 * numbers * units, weights=(numbers + 1) * units)[0]

    def like(self, kind: str, x: str) -> str:
        """ACT, LRN, BN, DROPOUT or SOFTMAX: an output of the input's shape."""
        weights = 2 * self.shape(x)[-1] if kind == "BN" else 0
        return self.add(kind, [x], self.shape(x), flops=prod(self.shape(x)), weights=weights)[0]

    def conv_bn_act(self, x: str, filters: int, kernel: Kernel, *, stride: int = 1, pad: int | None = None) -> str:
        return self.like("ACT", self.like("BN", self.conv(x, filters, kernel, stride=stride, pad=pad, bias=False)))

    def fork(self, x: str, branches: int) -> tuple[str, ...]:
        return self.add("FORK", [x], *[self.shape(x)] * branches)

    def join(self, *branches: str) -> str:
        return self.add("JOIN", branches, self.shape(branches[0]), flops=prod(self.shape(branches[0])))[0]

    def concat(self, *branches: str) -> str:
        height, width, _ = self.shape(branches[0])
        return self.add("CONCAT", branches, (height, width, sum(self.shape(branch)[-1] for branch in branches)))[0]

    def build(self, x: str, *, classes: int = 1000) -> LayerGraph:
        """Ends the network with a dense layer and softmax, and puts it into the paper's execution route."""
        x = self.like("SOFTMAX", self.dense(x, classes))
        graph = LayerGraph(tuple(self.layers), self.tensors, ("images",), (x,))
        return replace(graph, layers=execution_route(graph))


def alexnet(batch_size: int) -> LayerGraph:
    """23 layers: two CONV-ACT-LRN-POOL, two CONV-ACT, CONV-ACT-POOL, two FC-ACT-DROPOUT, FC-SOFTMAX."""
    net = NetworkBuilder(batch_size, pixels=227)
    x = "images"
    for filters, kernel, stride, pad in ((96, 11, 4, 0), (256, 5, 1, 2)):
        x = net.like("LRN", net.like("ACT", net.conv(x, filters, kernel, stride=stride, pad=pad)))
        x = net.pool(x, 3, stride=2)
    for filters in (384, 384, 256):
        x = net.like("ACT", net.conv(x, filters, 3, pad=1))
    x = net.pool(x, 3, stride=2)
    for _ in range(2):
        x = net.like("DROPOUT", net.like("ACT", net.dense(x, 4096)))
    return net.build(x)


def vgg16(batch_size: int) -> LayerGraph:
    """13 convolutions in five groups, each ended by POOL, and three dense layers."""
    net = NetworkBuilder(batch_size, pixels=224)
    x = "images"
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            x = net.like("ACT", net.conv(x, filters, 3, pad=1))
        x = net.pool(x, 2, stride=2)
    for _ in range(2):
        x = net.like("DROPOUT", net.like("ACT", net.dense(x, 4096)))
    return net.build(x)


def resnet(batch_size: int, units: Sequence[int]) -> LayerGraph:
    """A bottleneck ResNet with the given numbers of units, `3 * sum(units) + 2` deep."""
    net = NetworkBuilder(batch_size, pixels=224)
    x = net.pool(net.conv_bn_act("images", 64, 7, stride=2, pad=3), 3, stride=2, pad=1)
    for stage, count in enumerate(units):
        for unit in range(count):
            x = _bottleneck(net, x, 64 * 2**stage, stride=2 if stage and not unit else 1, projects=not unit)
    return net.build(net.pool(x, 7, stride=7))


def _bottleneck(net: NetworkBuilder, x: str, filters: int, *, stride: int, projects: bool) -> str:
    right, left = net.fork(x, 2)
    right = net.conv_bn_act(right, filters, 1, stride=stride, pad=0)
    right = net.conv_bn_act(right, filters, 3)
    right = net.like("BN", net.conv(right, 4 * filters, 1, bias=False))
    if projects:
        left = net.like("BN", net.conv(left, 4 * filters, 1, stride=stride, bias=False))
    return net.like("ACT", net.join(right, left))


def resnet50(batch_size: int) -> LayerGraph:
    return resnet(batch_size, (3, 4, 6, 3))


def resnet101(batch_size: int) -> LayerGraph:
    return resnet(batch_size, (3, 4, 23, 3))


def resnet152(batch_size: int) -> LayerGraph:
    return resnet(batch_size, (3, 8, 36, 3))


def deep_resnet(batch_size: int, third_stage_units: int) -> LayerGraph:
    """The paper's depth experiment: 6/32/n3/6 units (table 4)."""
    return resnet(batch_size, (6, 32, third_stage_units, 6))


def inception_v4(batch_size: int) -> LayerGraph:
    """Stem, 4 A blocks, reduction, 7 B blocks, reduction, 3 C blocks (Szegedy et al. 2016)."""
    net = NetworkBuilder(batch_size, pixels=299)
    x = _inception_stem(net)
    blocks = [_inception_a] * 4 + [_reduction_a] + [_inception_b] * 7 + [_reduction_b] + [_inception_c] * 3
    for block in blocks:
        x = block(net, x)
    return net.build(net.like("DROPOUT", net.pool(x, 8, stride=8)))


def _chain(net: NetworkBuilder, x: str, *convs: tuple) -> str:
    """Convolutions in a row, each `(filters, kernel)` or `(filters, kernel, stride)`; a stride means no padding."""
    for filters, kernel, *stride in convs:
        x = net.conv_bn_act(x, filters, kernel, stride=stride[0] if stride else 1, pad=0 if stride else None)
    return x


def _inception_stem(net: NetworkBuilder) -> str:
    x = _chain(net, "images", (32, 3, 2), (32, 3, 1), (64, 3))
    a, b = net.fork(x, 2)
    a, b = net.fork(net.concat(net.pool(a, 3, stride=2), _chain(net, b, (96, 3, 2))), 2)
    a = _chain(net, a, (64, 1), (96, 3, 1))
    b = _chain(net, b, (64, 1), (64, (7, 1)), (64, (1, 7)), (96, 3, 1))
    a, b = net.fork(net.concat(a, b), 2)
    return net.concat(_chain(net, a, (192, 3, 2)), net.pool(b, 3, stride=2))


def _inception_a(net: NetworkBuilder, x: str) -> str:
    a, b, c, d = net.fork(x, 4)
    a = _chain(net, net.pool(a, 3, stride=1, pad=1), (96, 1))
    b = _chain(net, b, (96, 1))
    c = _chain(net, c, (64, 1), (96, 3))
    return net.concat(a, b, c, _chain(net, d, (64, 1), (96, 3), (96, 3)))


def _reduction_a(net: NetworkBuilder, x: str) -> str:
    a, b, c = net.fork(x, 3)
    b = _chain(net, b, (384, 3, 2))
    return net.concat(net.pool(a, 3, stride=2), b, _chain(net, c, (192, 1), (224, 3), (256, 3, 2)))


def _inception_b(net: NetworkBuilder, x: str) -> str:
    a, b, c, d = net.fork(x, 4)
    a = _chain(net, net.pool(a, 3, stride=1, pad=1), (128, 1))
    b = _chain(net, b, (384, 1))
    c = _chain(net, c, (192, 1), (224, (1, 7)), (256, (7, 1)))
    d = _chain(net, d, (192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1)))
    return net.concat(a, b, c, d)


def _reduction_b(net: NetworkBuilder, x: str) -> str:
    a, b, c = net.fork(x, 3)
    b = _chain(net, b, (192, 1), (192, 3, 2))
    return net.concat(net.pool(a, 3, stride=2), b, _chain(net, c, (256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3, 2)))


def _inception_c(net: NetworkBuilder, x: str) -> str:
    a, b, c, d = net.fork(x, 4)
    a = _chain(net, net.pool(a, 3, stride=1, pad=1), (256, 1))
    b = _chain(net, b, (256, 1))
    c, e = net.fork(_chain(net, c, (384, 1)), 2)
    c, e = _chain(net, c, (256, (1, 3))), _chain(net, e, (256, (3, 1)))
    d, f = net.fork(_chain(net, d, (384, 1), (448, (1, 3)), (512, (3, 1))), 2)
    return net.concat(a, b, c, e, _chain(net, d, (256, (1, 3))), _chain(net, f, (256, (3, 1))))


NETWORKS: dict[str, Callable[[int], LayerGraph]] = {
    "AlexNet": alexnet,
    "VGG16": vgg16,
    "InceptionV4": inception_v4,
    "ResNet50": resnet50,
    "ResNet101": resnet101,
    "ResNet152": resnet152,
}
