"""The benchmarks' networks: they train, they have their published weights, and AlexNet is the paper's."""

from dataclasses import replace
from functools import partial
from math import prod

import keras
import numpy as np
import pytest
import tensorflow as tf

from keras_sn.benchmarks import network_layers, networks, paper_networks
from keras_sn.benchmarks.paper_study import Study, paper_step
from keras_sn.graph import LayerGraph
from keras_sn.liveness import analyze_liveness
from keras_sn.recompute import COST_AWARE
from keras_sn.steps import count_recomputed, training_steps
from keras_sn.trace import trace

MIB = 2**20
TINY = {
    "resnet": partial(networks.resnet, (1, 1, 1, 1), image_size=32, width=2, classes=3),
    "alexnet": partial(networks.alexnet, image_size=67, filters=(2, 3, 4, 4, 3), units=4, classes=3),
    "vgg16": partial(networks.vgg16, image_size=32, width=2, units=4, classes=3),
    "inception_v4": partial(networks.inception_v4, image_size=75, width=1, blocks=(1, 1, 1), classes=3),
    "densenet": partial(networks.densenet, blocks=(1, 2), growth=2, image_size=16, width=4, classes=3),
    "unet": partial(networks.unet, image_size=8, width=2, depth=2, classes=3),
    "vit": partial(networks.vit, image_size=8, patch=4, width=8, depth=1, heads=2, mlp=8, classes=3, dropout=0.1),
    "bert": partial(networks.bert, length=6, vocabulary=11, width=8, depth=1, heads=2, mlp=8, classes=3, positions=8),
}


class OwnModel(keras.Model):
    """A subclass, as `SNModel` is one."""


def batch_for(model, size=2):
    random = np.random.default_rng(0)
    spec = model.inputs[0]
    x = random.integers(0, 11, (size, *spec.shape[1:])) if spec.dtype == "int32" else random.normal(size=(size, *spec.shape[1:]))
    return x.astype(spec.dtype), random.integers(0, 3, (size, *model.output_shape[1:-1]))


@pytest.mark.parametrize("name", TINY)
@pytest.mark.filterwarnings("error:Gradients do not exist")
def test_a_tiny_network_trains_and_can_be_traced(name):
    model = TINY[name]()
    x, y = batch_for(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)  # quicker than to trace it for one step
    before = [np.array(weight) for weight in model.trainable_weights]
    assert np.isfinite(model.train_on_batch(x, y))
    moved = [np.any(np.array(weight) != old) for weight, old in zip(model.trainable_weights, before, strict=True)]
    assert sum(moved) > len(moved) / 3  # in so narrow a network some ReLU let nothing through
    assert model.output_shape[-1] == 3
    graph = trace(model, 2).graph
    assert sum(layer.weight_bytes for layer in graph.layers) == 4 * sum(prod(one.shape) for one in model.trainable_weights)


@pytest.mark.parametrize("name", TINY)
def test_a_network_takes_a_model_class_and_can_be_saved(name):
    model = TINY[name](model_class=OwnModel, name="mine")
    assert isinstance(model, OwnModel)
    assert model.name == "mine"
    x, _ = batch_for(model)
    twin = OwnModel.from_config(model.get_config())
    twin.set_weights(model.get_weights())
    np.testing.assert_array_equal(model(x), twin(x))


@pytest.mark.parametrize(
    ("name", "parameters", "on_paper"),
    [
        ("alexnet", 62_378_344, "AlexNet"),
        pytest.param("vgg16", 138_357_544, "VGG16", marks=pytest.mark.full),
        pytest.param("inception_v4", 42_742_984, "InceptionV4", marks=pytest.mark.full),
        ("resnet50", 25_610_152, "ResNet50"),
        ("densenet", 8_062_504, None),
        pytest.param("vit", 86_567_656, None, marks=pytest.mark.full),
        # BERT-base has 109,482,240 without a classifier; ours lacks 2 x 768 for segments and has 768 x 2 + 2 for classes.
        pytest.param("bert", 109_482_242, None, marks=pytest.mark.full),
        pytest.param("unet", 31_049_474, None, marks=pytest.mark.full),
    ],
)
def test_a_network_has_its_published_weights(name, parameters, on_paper):
    """Those of Keras' own applications, torchvision and the papers. The paper's graphs know trainable weights alone."""
    model = networks.NETWORKS[name]()
    assert model.count_params() == parameters
    if on_paper:
        layers = paper_networks.NETWORKS[on_paper](1).layers
        assert 4 * sum(prod(one.shape) for one in model.trainable_weights) == sum(layer.weight_bytes for layer in layers)


def test_a_resnet_is_as_deep_as_its_name_says(monkeypatch):
    monkeypatch.setattr(networks, "resnet", lambda *blocks, **arguments: (networks.depth(*blocks), arguments))
    for depth in (50, 101, 152):
        assert networks.NETWORKS[f"resnet{depth}"](classes=3) == (depth, {"classes": 3})


# --- The layers of our own ---


@pytest.mark.parametrize("dtype", ["float32", "mixed_bfloat16", "mixed_float16"])
def test_local_response_normalization(dtype):
    layer = network_layers.LocalResponseNormalization(radius=1, bias=1.5, alpha=0.5, beta=0.75, dtype=dtype)
    x = np.random.default_rng(0).normal(size=(2, 3, 3, 5)).astype("float32")
    squares = np.pad(x**2, [(0, 0)] * 3 + [(1, 1)])
    expected = x / (1.5 + 0.5 * sum(squares[..., shift : shift + 5] for shift in range(3))) ** 0.75
    y = layer(x)
    assert y.dtype == layer.compute_dtype
    np.testing.assert_allclose(tf.cast(y, "float32"), expected, rtol=1e-5 if dtype == "float32" else 2e-2)
    again = network_layers.LocalResponseNormalization.from_config(layer.get_config())
    assert (again.radius, again.bias, again.alpha, again.beta) == (1, 1.5, 0.5, 0.75)


def test_the_planner_knows_what_the_backward_steps_of_our_layers_read():
    layers = trace(TINY["alexnet"](), 2).graph.layers
    normalization = next(layer for layer in layers if layer.layer_type == "LocalResponseNormalization")
    assert set(normalization.saved_for_backward) == {"relu1", "lrn1"}
    assert not normalization.is_costly
    for layer in trace(TINY["vit"](), 2).graph.layers:
        if layer.layer_type in ("ClassToken", "LearnedPositions"):
            assert layer.saved_for_backward == ()


def test_a_sequence_longer_than_the_table_of_positions_is_refused():
    with pytest.raises(ValueError, match=r"at most 4 positions here.*Received: input_shape=\(None, 6, 8\)"):
        networks.bert(length=6, vocabulary=11, width=8, depth=1, heads=2, mlp=8, positions=4)


# --- AlexNet, layer by layer the paper's ---

KINDS = {
    "Conv2D": "CONV",
    "ReLU": "ACT",
    "LocalResponseNormalization": "LRN",
    "MaxPooling2D": "POOL",
    "Dense": "FC",
    "Dropout": "DROPOUT",
    "Softmax": "SOFTMAX",
}


@pytest.fixture(scope="module")
def traced_alexnet():
    return trace(networks.alexnet(softmax=True), 200).graph


def as_the_paper_counts(graph: LayerGraph, *, saves: bool = True, in_place: bool = True) -> LayerGraph:
    """A traced graph without `Flatten`, which moves nothing, and with the paper's names of the layer types.

    Args:
        graph: A traced graph.
        saves: Whether backward steps read what the authors' code registers, instead of what was traced.
        in_place: Whether ACT, LRN and SOFTMAX make gradients in place, instead of the layers of which trace says so.
    """
    flat = {layer.outputs[0]: layer.inputs[0] for layer in graph.layers if layer.layer_type == "Flatten"}
    layers = []
    for layer in graph.layers:
        if layer.layer_type == "Flatten":
            continue
        kind = KINDS[layer.layer_type]
        inputs, saved = (tuple(flat.get(one, one) for one in names) for names in (layer.inputs, layer.saved_for_backward))
        if saves:
            saved = inputs * (kind in paper_networks.SAVES_INPUT) + layer.outputs * (kind in paper_networks.SAVES_OUTPUT)
        is_in_place = kind in paper_networks.IN_PLACE if in_place else layer.gradient_in_place
        changes = {"layer_type": kind, "inputs": inputs, "saved_for_backward": saved, "gradient_in_place": is_in_place}
        layers.append(replace(layer, **changes))
    tensors = {name: spec for name, spec in graph.tensors.items() if name not in flat}
    return LayerGraph(tuple(layers), tensors, graph.inputs, graph.outputs)


def test_traced_alexnet_has_the_layers_and_tensors_of_the_paper(traced_alexnet):
    ours, theirs = as_the_paper_counts(traced_alexnet), paper_networks.alexnet(200)
    assert [layer.layer_type for layer in ours.layers] == [layer.layer_type for layer in theirs.layers]
    for one, other in zip(ours.layers, theirs.layers, strict=True):
        assert prod(ours.tensors[one.outputs[0]].shape) == prod(theirs.tensors[other.outputs[0]].shape)
        assert ours.nbytes(*one.inputs) == theirs.nbytes(*other.inputs)
        assert (one.weight_bytes, one.is_costly) == (other.weight_bytes, other.is_costly)
    forward = sum(ours.nbytes(*layer.outputs) for layer in ours.layers)
    assert forward / MIB == pytest.approx(1469.592, abs=5e-4)


def test_traced_alexnet_has_the_peaks_of_the_paper(traced_alexnet):
    """With the paper's conventions nothing differs: 2189.437, 1489.355, 1132.056 and 886.230 MiB at the paper's steps.

    The conventions are those of `as_the_paper_counts`, and that the gradient of the images is made. The Keras model has
    one layer more, `Flatten`, whose output is pool5's own memory, and leaves `softmax` to the loss unless it is asked for.
    """
    study = Study(as_the_paper_counts(traced_alexnet))
    offloaded = study.offloaded(study.steps, study.convolutions)
    steps = study.recomputed(COST_AWARE)
    recomputed = study.offloaded(steps, study.convolutions)
    peaks = [study.liveness.baseline_bytes, study.liveness.peak_bytes, offloaded.peak_bytes, recomputed.peak_bytes]
    assert [peak / MIB for peak in peaks] == pytest.approx([2189.437, 1489.355, 1132.056, 886.230], abs=5e-4)
    assert (study.liveness.peak_index + 1, paper_step(offloaded), paper_step(recomputed)) == (32, 39, 44)
    assert len(study.liveness.tensors) == 36
    assert count_recomputed(steps) == 17


@pytest.mark.parametrize(
    ("conventions", "peaks"),
    [
        ({}, [2189.437, 1489.355, 1132.056, 886.230]),
        ({"saves": False}, [2189.437, 995.825, 995.825, 886.230]),
        ({"in_place": False}, [2548.653, 1489.355, 1208.423, 1107.788]),
        ({"saves": False, "in_place": False}, [2548.653, 1066.040, 1066.040, 886.230]),
    ],
)
def test_what_the_conventions_of_the_paper_amount_to(traced_alexnet, conventions, peaks):
    """Where a traced graph departs from the paper's, and by how much.

    - `saves`: TensorFlow's ReLU reads its output alone, the paper's its input too. So the outputs of the convolutions in
      front of them die in the forward pass: liveness analysis saves more than the paper's offload, which has nothing left
      to move. All else reads the same: LRN and max pooling their inputs and outputs, convolutions their inputs.
    - `in_place`: in both the gradient of ReLU overwrites the incoming one. That of LRN does so in the paper and not in
      TensorFlow (363.940 MiB more), that of softmax likewise (1.526), that of dropout the other way round (6.250 less).
      So LRN1's backward step holds four tensors of 221.557 MiB, which make 886.230, and a fifth, CONV1's output, where
      ReLU's backward step reads that next.
    """
    study = Study(as_the_paper_counts(traced_alexnet, **conventions))
    offloaded = study.offloaded(study.steps, study.convolutions)
    recomputed = study.offloaded(study.recomputed(COST_AWARE), study.convolutions)
    found = [study.liveness.baseline_bytes, study.liveness.peak_bytes, offloaded.peak_bytes, recomputed.peak_bytes]
    assert [one / MIB for one in found] == pytest.approx(peaks, abs=5e-4)


def test_alexnet_as_it_is_traced(traced_alexnet):
    """What else differs: Keras makes no gradient of the images (117.940 MiB), and `Flatten` counts as a tensor (7.031).

    Its gradient does not, and the peak is the same. The masks of dropout are in neither: here they are `internal_bytes`.
    """
    in_place = {layer.layer_type for layer in traced_alexnet.layers if layer.gradient_in_place}
    assert in_place == {"ReLU", "Dropout", "Flatten"}
    study = Study(as_the_paper_counts(traced_alexnet, saves=False, in_place=False))
    liveness = analyze_liveness(training_steps(traced_alexnet), Study(traced_alexnet).nbytes)
    images, flat = traced_alexnet.nbytes("images"), traced_alexnet.nbytes("flatten")
    assert liveness.baseline_bytes == study.liveness.baseline_bytes - images + flat
    assert liveness.peak_bytes == study.liveness.peak_bytes
