"""What a compiled backward function holds, beside buffers that XLA allocated on an H200 (docs/measurements.md), in MB."""

import pytest

from keras_sn.backward_memory import backward_memory, gradient_levels
from keras_sn.fusion import as_compiled
from keras_sn.graph import LayerCall, LayerGraph, TensorSpec

MB = 10**6


class Network:
    """Layer calls, one after the other, on tensors of so many MB."""

    def __init__(self, **inputs: float):
        self.layers: list[LayerCall] = []
        self.sizes = dict(inputs)
        self.inputs = tuple(inputs)

    def add(self, name: str, inputs: str, megabytes: float, **traits) -> str:
        names = tuple(inputs.split())
        self.layers.append(LayerCall(name, "any", names, (name,), **traits))
        self.sizes[name] = megabytes
        return name

    def convolution(self, name: str, source: str, megabytes: float, weights: float = 0.0) -> str:
        of_conv = {"saved_for_backward": (source,), "is_costly": True, "is_convolution": True, "weight_bytes": int(weights * MB)}
        return self.add(name, source, megabytes, **of_conv)

    def normalization(self, name: str, source: str) -> str:
        return self.add(name, source, self.sizes[source], saved_for_backward=(source,), is_fusible=True, weight_bytes=1)

    def relu(self, name: str, source: str) -> str:
        return self.add(name, source, self.sizes[source], saved_for_backward=(name,), is_fusible=True, gradient_in_place=True)

    def block(self, name: str, source: str, megabytes: float, weights: float = 0.0) -> str:
        """Convolution, normalization, activation."""
        return self.relu(f"{name}_relu", self.normalization(f"{name}_bn", self.convolution(name, source, megabytes, weights)))

    def sum(self, name: str, sources: str) -> str:
        return self.add(name, sources, self.sizes[sources.split()[0]], is_fusible=True, gradient_in_place=True)

    def concatenation(self, name: str, sources: str) -> str:
        return self.add(name, sources, sum(self.sizes[one] for one in sources.split()), is_fusible=True)

    def graph(self) -> LayerGraph:
        tensors = {
            name: TensorSpec(name, (round(size * MB / 4),), "float32", "input" if name in self.inputs else "activation")
            for name, size in self.sizes.items()
        }
        return as_compiled(LayerGraph(tuple(self.layers), tensors, self.inputs, (self.layers[-1].outputs[0],)))


def of_region(network: Network, first: str, last: str, saved: str):
    graph = network.graph()
    layers = graph.layers[graph.position[first] : graph.position[last] + 1]
    found = backward_memory(graph, layers, frozenset(saved.split()))
    return [round(nbytes / MB) for nbytes in (found.inside, found.returned, found.given)]


def test_the_end_of_a_unet():
    """`up1_2_bn` to `logits` at 512 px, batch 8: XLA took 572 inside, 554 for what it returned."""
    network = Network(x=25)
    network.convolution("before", "x", 537)
    network.relu("relu", network.normalization("bn", "before"))
    network.convolution("logits", "relu", 17)
    assert of_region(network, "bn", "logits", "before") == [537, 537, 17]


def test_two_convolutions_of_a_unet():
    """`up1_conv1` to `up1_conv2`: 1,074 inside and 1,074 returned, in whose place one of what is made again has been."""
    network = Network(x=25)
    network.convolution("skip", "x", 1074)
    network.convolution("second", network.block("first", "skip", 537), 537)
    network.block("after", "second", 537)
    assert of_region(network, "first", "second", "skip") == [1074, 1074, 537]


def test_a_concatenation_of_a_unet():
    """`up2_1_bn` to `up1_skip`: 806 inside, 805 returned; the part of the concatenation's gradient is taken at the end."""
    network = Network(x=25)
    network.convolution("early", "x", 537)
    network.convolution("before", "early", 268.5)
    top = network.block("second", network.relu("relu", network.normalization("bn", "before")), 268.5)
    network.concatenation("skip", network.convolution("transpose", top, 537) + " early")
    network.convolution("after", "skip", 537)
    assert of_region(network, "bn", "skip", "before early") == pytest.approx([806, 806, 1074], abs=1)


def test_the_encoder_of_a_unet():
    """`down1_conv1` to `down2_pool`, which keeps what its skips read: 3,087 inside."""
    network = Network(x=25)
    first = network.block("1b", network.block("1a", "x", 537), 537)
    pool = network.add("pool1", first, 134, saved_for_backward=(first,))
    second = network.block("2b", network.block("2a", pool, 268.5), 268.5)
    network.add("pool2", second, 67, saved_for_backward=(second,))
    network.convolution("rest", "pool2", 67)
    network.concatenation("end", "rest 2b_relu 1b_relu")
    assert of_region(network, "1a", "pool2", "x 1b_relu 2b_relu pool2") == pytest.approx([3087, 0, 872], abs=3)


def bottleneck(network: Network, name: str, source: str) -> str:
    inner = network.block(f"{name}b", network.block(f"{name}a", source, 51.4), 51.4)
    wide = network.normalization(f"{name}_bn", network.convolution(f"{name}c", inner, 205.5))
    return network.relu(f"{name}_relu", network.sum(f"{name}_add", f"{wide} {source}"))


def test_an_output_that_is_made_again_is_not_written():
    """`stage1_block2_bn2` to `stage1_block3_relu2` of ResNet-50, batch 64: 450 inside, 257 returned."""
    network = Network(x=39)
    network.convolution("x1", "x", 205.5)
    bottleneck(network, "2", "x1")
    bottleneck(network, "3", "2_relu")
    network.convolution("after", "3_relu", 51.4)
    inside, returned, given = of_region(network, "2b_bn", "3b_relu", "2b x1 3b_relu")
    assert inside == pytest.approx(450, rel=0.05)
    assert (returned, given) == (257, 257)


def test_normalizations_that_are_added_up_run_at_once():
    """`stage1_block1`, whose shortcut is a convolution: 1,208 inside."""
    network = Network(x=39)
    network.convolution("pool", "x", 51.4)
    inner = network.block("b", network.block("a", "pool", 51.4), 51.4)
    network.convolution("c", inner, 205.5)
    network.normalization("projection_bn", network.convolution("projection", "pool", 205.5))
    network.relu("relu", network.sum("add", network.normalization("bn", "c") + " projection_bn"))
    network.convolution("after", "relu", 51.4)
    inside, returned, given = of_region(network, "a", "relu", "pool")
    assert (inside, returned, given) == pytest.approx((1233, 51, 206), abs=1)


def test_sums_of_gradients_of_concatenations_wait_for_the_end():
    """DenseNet: each layer call's part of the gradient of all concatenations before it stays until the end."""
    network, names = Network(x=1), ["start"]
    network.convolution("start", "x", 10)
    for index in range(6):
        joined = network.concatenation(f"concat{index}", " ".join(names)) if index else "start"
        inner = network.relu(f"relu{index}", network.normalization(f"bn{index}", joined))
        names.append(network.convolution(f"new{index}", inner, 1))
    network.concatenation("end", " ".join(names))
    network.convolution("after", "end", 1)
    saved = " ".join([*names, *(f"relu{index}" for index in range(6))])
    inside, _, _ = of_region(network, "concat1", "new5", saved)
    assert inside >= sum(10 + index for index in range(1, 6))


def test_gradients_of_a_whole_graph():
    """By layer call: an input that is gone when its gradient is made does not count beside it."""
    network = Network(x=1)
    network.block("a", "x", 4)
    network.block("b", "a_relu", 8)
    network.convolution("c", "b_relu", 2)
    in_megabytes = [level / MB for level in gradient_levels(network.graph())]
    assert in_megabytes == [4, 8, 4, 8, 16, 8, 0]  # the gradient of c is given


def test_kernels_are_held_in_another_layout():
    network = Network(x=1)
    network.convolution("first", "x", 1)
    network.convolution("second", "first", 1, weights=30)
    network.convolution("third", "second", 1, weights=20)
    network.convolution("after", "third", 1)
    found = backward_memory(network.graph(), network.graph().layers[1:3], frozenset(["first"]))
    assert found.of_weights == 50 * MB
    assert found.inside >= 50 * MB
    assert found.total == found.inside + found.returned + found.given + found.of_weights


def test_a_gradient_that_later_regions_have_begun_is_given():
    network = Network(x=1)
    network.convolution("first", "x", 7)
    network.convolution("second", "first", 5)
    network.sum("end", "first second")
    graph = network.graph()
    assert backward_memory(graph, graph.layers[1:2], frozenset(["first"])).given == 12 * MB


def test_a_graph_without_layer_calls_has_no_gradients():
    spec = {"x": TensorSpec("x", (1,), "float32", "input")}
    assert gradient_levels(LayerGraph((), spec, ("x",), ("x",), is_compiled=True)) == []


def pooled(network: Network, name: str, source: str) -> str:
    """Max pooling by 2: a quarter of the numbers, and for each of them four numbers for the place of its maximum."""
    size = network.sizes[source]
    return network.add(name, source, size / 4, saved_for_backward=(source, name), region_places_bytes=round(size * MB))


def test_max_pooling_alone_notes_places_twice():
    """`down1_pool` of a U-Net at 512 px, batch 8: 1,074 inside, 537 returned; given are the skip's gradient of 537 and 134."""
    network = Network(x=25)
    network.convolution("before", "x", 537)
    pooled(network, "pool", "before")
    network.concatenation("end", network.convolution("after", "pool", 134) + " before")
    assert of_region(network, "pool", "pool", "before pool") == pytest.approx([1074, 537, 671], abs=1)


def test_plain_keras_notes_places_where_regions_do_not():
    network = Network(x=25)
    network.add("pool", "x", 6, saved_for_backward=("x", "pool"), places_bytes=round(25 * MB))
    network.convolution("end", "pool", 6)
    graph = network.graph()
    region, plain = (backward_memory(graph, graph.layers, frozenset("x"), is_plain=one).inside for one in (False, True))
    assert plain - region == pytest.approx(25 * MB, rel=0.02)


def test_max_pooling_of_what_is_saved_notes_places_in_its_backward_step():
    """`down2_2_bn` to `down3_conv2`: 606 inside, 268 returned."""
    network = Network(x=25)
    network.convolution("early", "x", 134)
    network.convolution("before", "early", 268.5)
    relu = network.relu("relu", network.normalization("bn", "before"))
    pooled(network, "pool", relu)
    network.convolution("second", network.block("first", "pool", 134), 134)
    network.concatenation("end", network.convolution("after", "second", 268.5) + " relu")
    assert of_region(network, "bn", "second", "before relu") == pytest.approx([606, 268, 403], abs=2)


def test_max_pooling_of_what_is_made_again_notes_places_with_it():
    """`stem_bn` to `stage1_block1_conv3` of ResNet-50, batch 700: XLA took 8,992 inside, in an order that leaves gaps."""
    network = Network(x=421)
    network.convolution("stem", "x", 2248)
    pooled(network, "pool", network.relu("relu", network.normalization("bn", "stem")))
    inner = network.block("b", network.block("a", "pool", 562), 562)
    network.convolution("wide", inner, 2248)
    network.sum("end", network.normalization("wide_bn", "wide") + " " + network.convolution("projection", "pool", 2248))
    assert of_region(network, "bn", "wide", "stem") == pytest.approx([7868, 2248, 2810], abs=3)
    assert sum(of_region(network, "pool", "pool", "relu pool")) == pytest.approx(2 * 2248 + 2248 + 562, abs=2)
