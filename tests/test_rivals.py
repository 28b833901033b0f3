"""The rivals: Keras' own recomputation, which script measures the others, and, where PyTorch or JAX is installed, toy runs."""

import json
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, replace
from functools import cache, partial
from importlib.util import find_spec
from math import prod
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from keras_sn.benchmarks import engines, keras_rivals, measure, networks, speed
from keras_sn.benchmarks.measure import Configuration
from keras_sn.errors import KerasSNError

ARGUMENTS = {
    "resnet": {"blocks": (1, 2), "image_size": 32, "width": 4, "classes": 10},
    "vit": {"image_size": 16, "patch": 8, "width": 16, "depth": 2, "heads": 2, "mlp": 32, "classes": 10},
    "bert": {"length": 8, "vocabulary": 20, "width": 16, "depth": 2, "heads": 2, "mlp": 32},
    "vgg16": {"image_size": 32, "width": 4, "units": 8, "classes": 10},
    "densenet": {"blocks": (2, 2), "growth": 4, "image_size": 32, "width": 4, "classes": 10},
    "unet": {"image_size": 16, "width": 4, "depth": 2},
}


def configuration(engine, network="resnet", **changes):
    return Configuration(engine=engine, network=network, arguments=ARGUMENTS[network], batch_size=4, steps=8, **changes)


@cache
def trained(engine, network):
    """The row of a toy run."""
    pytest.importorskip(engine.partition("-")[0])
    row = measure.run(configuration(engine, network), timeout=300)
    assert row["fits"] is True, row["reason"]
    return row


@pytest.mark.parametrize("engine", [*engines.KERAS_RIVALS, *engines.RIVALS, "torch-compile@0.5", "torch-compile@.5"])
def test_rivals_are_engines(engine):
    engines.check_engines([engine])
    assert not engines.is_ours(engine)


@pytest.mark.parametrize(
    "engine", ["torch", "keras-remat@0.5", "torch-compile@5", "torch-eager@0.5", "jax-dots@0.5", "jax-offload-xla"]
)
def test_other_names_are_not(engine):
    with pytest.raises(KerasSNError, match=f"torch-compile@SHARE. Received: '{engine}'"):
        engines.check_engines([engine])


@pytest.mark.parametrize(
    ("engine", "worker"),
    [("torch-compile@0.5", "torch_rival.py"), ("jax-dots", "jax_rival.py"), ("keras-remat-xla", None), ("auto@0.4-xla", None)],
)
def test_one_place_decides_the_command(engine, worker):
    python, *start, argument = measure.worker_command(configuration(engine))
    assert python == sys.executable
    assert Configuration(**json.loads(argument)).engine == engine
    if worker is None:
        assert start == ["-m", "keras_sn.benchmarks.measure"]
    else:
        assert start[0] == "-P"
        assert Path(start[1]).name == worker
        assert Path(start[1]).is_file()


@pytest.mark.parametrize("package", ["torch", "jax"])
def test_a_package_that_is_not_installed_is_the_reason(package, tmp_path):
    (tmp_path / f"{package}.py").write_text("raise ModuleNotFoundError")
    command = measure.worker_command(configuration(f"{package}-plain"))
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, check=True)
    row = json.loads(done.stdout)
    assert (row["fits"], row["reason"], row["peak_bytes"]) == (None, f"{package} is not installed", None)
    assert row.items() >= json.loads(json.dumps(asdict(configuration(f"{package}-plain")))).items()


@pytest.mark.parametrize("package", [package for package in ("torch", "jax") if not find_spec(package)])
def test_the_benchmarks_say_so(package):
    row = measure.run(configuration(f"{package}-plain"))
    assert (row["fits"], row["reason"], row["depth"]) == (None, f"{package} is not installed", 11)


def test_a_table_shows_rivals_without_their_memory():
    rows = [{"label": "keras-graph", "peak_bytes": 400}, {"label": "jax-dots", "peak_bytes": None}]
    rows = [row | {"fits": True, "reason": "", "seconds_per_step": 1.0, "first_step_seconds": 2.0} for row in rows]
    for order in (rows, rows[::-1]):
        columns = [column.cells for column in speed.table(order, "title").columns]
        shown = {engine: cells for engine, *cells in zip(*columns, strict=True)}
        assert shown["jax-dots"] == ["", "", "1", "1.00", "2"]


@pytest.mark.parametrize("network", ["resnet", "vit"])
@pytest.mark.parametrize("engine", ["torch-eager", "jax-plain"])
def test_they_train_the_same_networks(engine, network):
    row = trained(engine, network)
    model = networks.NETWORKS[network](**ARGUMENTS[network])
    assert row["parameters"] == sum(prod(weight.shape) for weight in model.trainable_weights)
    assert row["losses"][-1] < 0.8 * row["losses"][0]
    assert row["seconds_per_step"] < row["first_step_seconds"]
    assert row["peak_bytes"] is None or row["device"] not in ("cpu", "x86_64")


@pytest.mark.parametrize("network", ["resnet", "vit"])
@pytest.mark.parametrize("engine", ["torch-checkpoint", "torch-save-on-cpu", "jax-dots", "jax-nothing"])
def test_recomputation_changes_no_loss(engine, network):
    plain = trained("torch-eager" if engine.startswith("torch-") else "jax-plain", network)
    assert trained(engine, network)["losses"] == pytest.approx(plain["losses"], abs=1e-4)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"engine": "{}-unheard-of"}, "not an engine of"),
        ({"network": "vgg16"}, "vgg16 is not written in"),
        ({"network": "vit", "arguments": {"dropout": 0.1}}, "dropout is not written in"),
        ({"memory_bytes": 2**30}, "without a GPU there is no cap"),
    ],
)
@pytest.mark.parametrize("engine", ["torch-eager", "jax-plain"])
def test_what_they_cannot_do_is_the_reason(engine, changes, reason):
    package = engine.partition("-")[0]
    pytest.importorskip(package)
    changes = {name: value.format(package) if isinstance(value, str) else value for name, value in changes.items()}
    row = measure.run(replace(configuration(engine), **changes))
    assert row["fits"] is None
    assert reason in row["reason"]


@pytest.mark.parametrize(("engine", "recomputed"), [("jax-plain", 0), ("jax-dots", 0), ("jax-nothing", 11), ("jax-offload", 11)])
def test_jax_recomputes_the_convolutions_it_should(engine, recomputed):
    jax = pytest.importorskip("jax")
    from keras_sn.benchmarks import jax_rival

    parts = jax_rival.build("resnet", ARGUMENTS["resnet"])
    images, labels = np.zeros((4, 32, 32, 3), np.float32), np.zeros(4, np.int32)
    run = jax.jit(jax_rival.training_step(parts, engine, "float32"))
    traced = run.trace(*jax_rival.initial_state(parts, images), images, labels)
    words = Counter(traced.lower(lowering_platforms=("cuda",)).as_text().replace("(", " ").replace('"', " ").split())
    # 12 convolutions, each with two gradients, but that of the images; the stem is no block.
    assert words["stablehlo.convolution"] == 3 * 12 - 1 + recomputed
    assert words["pinned_host"] == (3 if engine == "jax-offload" else 0)


def test_pytorch_keeps_a_share_of_the_activations(monkeypatch):
    """The compiler's backend is left out: it needs a C++ compiler, and minutes."""
    torch = pytest.importorskip("torch")
    from keras_sn.benchmarks import torch_rival

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda network: compiled(network, backend="aot_eager_decomp_partition"))
    saved_bytes = {}
    for engine in ("torch-compile@0.9", "torch-compile@0.2"):
        torch.compiler.reset()
        network = torch_rival.build("resnet", ARGUMENTS["resnet"])
        weights = {weight.data_ptr() for weight in network.parameters()}
        saved = {}
        with torch.autograd.graph.saved_tensors_hooks(lambda x, saved=saved: saved.setdefault(x.data_ptr(), x), lambda x: x):
            torch_rival._prepared(network, engine)(torch.ones(4, 3, 32, 32))
        saved_bytes[engine] = sum(x.nbytes for pointer, x in saved.items() if pointer not in weights)
    assert saved_bytes["torch-compile@0.2"] < 0.7 * saved_bytes["torch-compile@0.9"]


def built(engine, network="resnet", **arguments):
    """The compiled model of an engine that is Keras'; arguments override those of the toy network."""
    keras.utils.set_random_seed(0)
    model = keras_rivals.build(engine, partial(networks.NETWORKS[network], **ARGUMENTS.get(network, {}) | arguments))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.01, momentum=0.9), loss, jit_compile=engine.endswith("-xla"))
    return model


def losses(model, steps=4):
    x, y = measure._random_batch(model, 4)
    return [float(model.train_on_batch(x, y)) for _ in range(steps)]


def convolutions(model):
    """How many run forward, in a graph of the gradients."""

    @tf.function
    def gradients(images):
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(model(images, training=True))
        return tape.gradient(total, [weight.value for weight in model.trainable_variables])

    graph = gradients.get_concrete_function(tf.TensorSpec((4, *model.input.shape[1:]))).graph
    return Counter(operation.type for operation in graph.get_operations())["Conv2D"]


@pytest.mark.parametrize(
    ("network", "ends"),
    [
        ("resnet", ["stem_pool", "stage1_block1_relu3", "stage2_block1_relu3", "logits"]),
        ("vit", ["positions", "block1_add2", "logits"]),
        ("bert", ["dropout", "block1_norm2", "logits"]),
        ("vgg16", ["pool1", "pool2", "pool3", "pool4", "pool5", "logits"]),
        ("densenet", ["stem_pool", "transition1_pool", "logits"]),
        ("unet", ["down1_2_relu", "logits"]),  # its skips cross everything between
    ],
)
def test_a_block_ends_where_one_tensor_crosses(network, ends):
    model = built("keras-recompute-grad", network)
    blocks = [[operation.name for operation in block.operations[1:]] for block in model.blocks]
    assert [names[-1] for names in blocks] == ends
    names = [name for names in blocks for name in names]
    assert len(names) == len(set(names)), "no layer runs in two blocks"
    assert set(names) == {operation.name for operation in model.operations[1:]}


@pytest.mark.parametrize(
    ("network", "size", "suffix"),
    [("resnet", {"blocks": (2,)}, ""), ("vit", {"depth": 1}, ""), ("vit", {"depth": 1}, "-xla")],
)
def test_recompute_grad_trains_as_plain_keras(network, size, suffix):
    plain, rival = (built(engine, network, **size) for engine in ("keras-graph", f"keras-recompute-grad{suffix}"))
    assert len(rival.trainable_variables) == len(plain.trainable_variables)
    assert losses(rival) == pytest.approx(losses(plain), abs=1e-4)


def test_recompute_grad_runs_each_convolution_again():
    assert convolutions(built("keras-graph")) == 12
    assert convolutions(built("keras-recompute-grad")) == 2 * 12


def test_recompute_grad_updates_statistics_twice():
    """Its fault, which `RecomputedBlocks` owns up to: momentum 0.99 leaves 1.99 times what one update from zero does."""
    means = {}
    for engine in ("keras-graph", "keras-recompute-grad"):
        model = built(engine, blocks=(1,))
        losses(model, steps=1)
        means[engine] = np.array(model.get_layer("stem_bn").moving_mean)
    np.testing.assert_allclose(means["keras-recompute-grad"], 1.99 * means["keras-graph"], rtol=1e-5)


@pytest.mark.parametrize("network", ["resnet", "vit"])
def test_remat_says_why_it_cannot(network):
    row = measure.measure(configuration("keras-remat", network))
    assert (row["fits"], row["peak_bytes"]) == (None, None)
    assert row["reason"].endswith("keywords arguments only when eager execution is enabled.")
    assert "\n" not in row["reason"]


def test_remat_recomputes_where_it_can(monkeypatch):
    """Layers that take no `training`: none of the benchmarks' networks has only such."""

    def toy(model_class):
        images = keras.Input((8, 8, 3))
        x = layers.Conv2D(10, 3)(layers.ReLU()(layers.Conv2D(4, 3)(images)))
        return model_class(images, layers.GlobalAveragePooling2D()(x))

    monkeypatch.setitem(networks.NETWORKS, "toy", toy)
    plain, rival = built("keras-graph", "toy"), built("keras-remat", "toy")
    assert (convolutions(plain), convolutions(rival)) == (2, 4)
    assert losses(rival) == pytest.approx(losses(plain), abs=1e-4)


def test_only_a_rival_may_be_unable(monkeypatch):
    """A fault of ours must not pass for a row."""

    def broken(**_):
        raise ValueError("broken")

    monkeypatch.setitem(networks.NETWORKS, "resnet", broken)
    assert measure.measure(configuration("keras-recompute-grad"))["reason"] == "broken"
    with pytest.raises(ValueError, match="broken"):
        measure.measure(configuration("recompute"))
