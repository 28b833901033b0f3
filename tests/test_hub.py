"""Models as people find them: `keras.applications` and keras-hub, tiny, with random weights. They train as in plain Keras within
half of the memory."""

import pickle
import subprocess
import sys
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers as L
from keras.src.applications.convnext import ConvNeXt
from keras.src.applications.densenet import DenseNet
from keras.src.applications.efficientnet_v2 import EfficientNetV2
from keras.src.applications.resnet import ResNet, stack_residual_blocks_v2
from parity import MODES, assert_equal, rewriting_off
from trained import trained_state

import keras_sn

rewriting_off()
hub = pytest.importorskip("keras_hub").models

CLASSES, LENGTH, VOCABULARY = 3, 8, 20
TRAINED, PLANNED = 2, 32  # samples: two steps are trained, by a plan for a batch in which weights matter little


def _pixels(rng: np.random.Generator, size: int = 32) -> np.ndarray:
    return rng.uniform(0, 255, (TRAINED, size, size, 3)).astype("float32")


def _small_pixels(rng: np.random.Generator) -> np.ndarray:
    return _pixels(rng, 16)


def _tokens(rng: np.random.Generator) -> dict[str, np.ndarray]:
    tokens, mask = rng.integers(1, VOCABULARY, (TRAINED, LENGTH)).astype("int32"), np.ones((TRAINED, LENGTH), "int32")
    tokens[1, 5:] = mask[1, 5:] = 0  # padding
    return {"token_ids": tokens, "padding_mask": mask}


def _segments(rng: np.random.Generator) -> dict[str, np.ndarray]:
    return _tokens(rng) | {"segment_ids": rng.integers(0, 2, (TRAINED, LENGTH)).astype("int32")}


_APPLICATION = {"weights": None, "classes": CLASSES, "input_shape": (32, 32, 3), "classifier_activation": None}


def _small_resnet() -> keras.Model:
    def stacks(x):
        return stack_residual_blocks_v2(stack_residual_blocks_v2(x, 32, 2, stride1=1, name="conv2"), 32, 2, name="conv3")

    return ResNet(stacks, True, True, name="resnet", **_APPLICATION)


def _small_efficientnet() -> keras.Model:
    block = {"kernel_size": 3, "num_repeat": 20, "input_filters": 80, "output_filters": 80, "expand_ratio": 4, "strides": 1}
    blocks = [block | {"se_ratio": 0, "conv_type": 1}, block | {"se_ratio": 0.25, "conv_type": 0}]
    return EfficientNetV2(0.1, 0.1, 32, blocks_args=blocks, name="efficientnetv2", **_APPLICATION)


def _small_convnext() -> keras.Model:
    return ConvNeXt((2, 1, 1, 1), (16, 16, 16, 16), layer_scale_init_value=0.5, name="convnext", **_APPLICATION)


def _small_densenet() -> keras.Model:
    return DenseNet((2, 2, 1, 1), name="densenet", **_APPLICATION)


def _resnet_backbone(use_pre_activation: bool = False) -> keras.Model:
    return hub.ResNetBackbone(
        input_conv_filters=[16],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64],
        stackwise_num_blocks=[3],
        stackwise_num_strides=[1],
        block_type="bottleneck_block",
        use_pre_activation=use_pre_activation,
        image_shape=(32, 32, 3),
    )


def _vit_backbone() -> keras.Model:
    return hub.ViTBackbone((16, 16, 3), 4, 3, 2, 8, 16, dropout_rate=0.1, attention_dropout=0.1)


def _bert_backbone(layers: int = 3) -> keras.Model:
    return hub.BertBackbone(VOCABULARY, layers, 2, 8, 16, max_sequence_length=LENGTH)


def _gpt2_backbone(layers: int = 3) -> keras.Model:
    return hub.GPT2Backbone(VOCABULARY, layers, 2, 8, 16, max_sequence_length=LENGTH)


def _gemma_backbone() -> keras.Model:
    return hub.GemmaBackbone(VOCABULARY, 3, 2, 1, 8, 16, 4, dropout=0.1)


def _with_head(backbone: keras.Model) -> keras.Model:
    features = backbone(backbone.input)
    pool = L.GlobalAveragePooling2D() if len(features.shape) == 4 else L.GlobalAveragePooling1D()
    return keras.Model(backbone.input, L.Dense(CLASSES, name="head")(pool(features)))


def _with_lora(backbone: keras.Model) -> keras.Model:
    backbone.enable_lora(rank=2)
    return backbone


def _graph_of(task: keras.Model) -> keras.Model:
    return keras.Model(task.input, task.output)


IN_CI = {"graph": ("gemma/lora causal lm",), "eager": ("app/efficientnet_v2", "resnet_v2/head", "bert/classifier")}
"""What CI trains of the cases; the rest has the mark `full`."""
CASES = {
    "app/resnet_v2": (_small_resnet, _pixels),
    "app/efficientnet_v2": (_small_efficientnet, _pixels),
    "app/convnext": (_small_convnext, _pixels),
    "app/densenet": (_small_densenet, _pixels),
    "resnet": (_resnet_backbone, _pixels),
    "resnet_v2/head": (lambda: _with_head(_resnet_backbone(True)), _pixels),
    "vit": (_vit_backbone, _small_pixels),
    "vit/head": (lambda: _with_head(_vit_backbone()), _small_pixels),
    "bert": (_bert_backbone, _segments),
    "bert/lora": (lambda: _with_lora(_bert_backbone()), _segments),
    "bert/classifier": (lambda: _graph_of(hub.BertTextClassifier(_bert_backbone(), CLASSES)), _segments),
    "gpt2": (_gpt2_backbone, _tokens),
    "gpt2/head": (lambda: _with_head(_gpt2_backbone()), _tokens),
    "gpt2/causal lm": (lambda: _graph_of(hub.GPT2CausalLM(_gpt2_backbone())), _tokens),
    "gemma": (_gemma_backbone, _tokens),
    "gemma/lora causal lm": (lambda: _graph_of(hub.GemmaCausalLM(_with_lora(_gemma_backbone()))), _tokens),
}


def _targets(outputs: Any, rng: np.random.Generator) -> Any:
    """Random targets for each output of a model."""
    return keras.tree.map_structure(
        lambda y: rng.normal(size=(TRAINED, *(LENGTH if n is None else n for n in y.shape[1:]))).astype("float32"), outputs
    )


def _compiled(model: keras.Model, mode: str) -> keras.Model:
    model.compile(keras.optimizers.Adam(1e-3), "mse", **MODES[mode])
    model.optimizer.build(model.trainable_variables)  # else TensorFlow traces the first step twice
    return model


def _half_of(model: keras.Model, inputs: Any) -> int:
    """A budget for half of what plain Keras needs above weights and slots."""
    plan = _compiled(keras_sn.SNModel.from_model(model, policy="none"), "graph").build_plan(PLANNED, inputs)
    return plan.reserved_bytes + (plan.plain_peak_bytes - plan.reserved_bytes) // 2


def _numbers(model: keras.Model, x: Any) -> dict[str, Any]:
    """All numbers that two training steps change."""
    y = _targets(model.output, np.random.default_rng(2))
    return trained_state(model, model.fit(x, y, batch_size=TRAINED, epochs=2, verbose=0))


def _built(case: tuple) -> keras.Model:
    keras.backend.clear_session(free_memory=False)
    keras.utils.set_random_seed(3)
    return case[0]()


def _cases():
    for name in CASES:
        for mode, in_ci in IN_CI.items():
            marks = [] if name in in_ci else [pytest.mark.full]
            yield pytest.param(CASES[name], mode, id=f"{name}-{mode}", marks=marks)


@pytest.mark.parametrize(("case", "mode"), _cases())
def test_half_of_the_memory_gives_equal_numbers(case, mode):
    x = case[1](np.random.default_rng(1))
    model = _built(case)
    budget = _half_of(model, x)
    planned = _compiled(keras_sn.SNModel.from_model(model, memory_budget=budget, host_budget="1GiB"), mode)
    plan = planned.build_plan(PLANNED, x)
    assert plan.regions
    assert plan.planned_peak_bytes <= budget < plan.plain_peak_bytes
    trained = _numbers(planned, x)
    assert planned.plan is plan
    assert_equal(trained, _numbers(_compiled(_built(case), mode), x), exact=True)


@pytest.mark.full
@pytest.mark.parametrize(("name", "mode"), [("vit", "eager"), ("vit/head", "graph")])
def test_blocks_inside_one_layer_give_equal_numbers(name, mode):
    case = CASES[name]
    x = case[1](np.random.default_rng(1))
    planned = _compiled(keras_sn.SNModel.from_model(_built(case), policy={"*": "recompute"}), mode)
    trained = _numbers(planned, x)
    assert planned.plan.regions
    assert_equal(trained, _numbers(_compiled(_built(case), mode), x), exact=True)


TASKS = {
    "bert": (lambda: hub.BertTextClassifier(_bert_backbone(1), CLASSES), _segments, (TRAINED,)),
    "gpt2": (lambda: hub.GPT2CausalLM(_gpt2_backbone(1)), _tokens, (TRAINED, LENGTH)),
}


@pytest.mark.parametrize("name", TASKS)
def test_a_task_keeps_its_own_methods(name):
    """Loss, metrics and optimizer that `compile()` chooses, and `fit`, which preprocesses, are the task's own."""
    build, inputs, shape = TASKS[name]
    x, rng = inputs(np.random.default_rng(1)), np.random.default_rng(2)
    y, results = rng.integers(0, CLASSES, shape), []
    for planned in (True, False):
        keras.backend.clear_session(free_memory=False)
        keras.utils.set_random_seed(3)
        task = build()
        model = keras_sn.SNModel.from_model(task, policy={"*": "recompute"}) if planned else task
        assert isinstance(model, type(task))
        assert model.backbone is task.backbone
        model.compile(jit_compile=False, run_eagerly=True)
        results.append(trained_state(model, model.fit(x, y, batch_size=TRAINED, epochs=2, verbose=0)))
    assert_equal(*results, exact=True)


def _continues(model: keras.Model, again: keras.Model, x: Any, y: Any) -> None:
    """Checks that a copy is planned as its original is, and trains to the same numbers."""
    assert type(again) is type(model)
    assert again.settings == model.settings
    results = []
    for one in (model, again):
        keras.utils.set_random_seed(4)
        one.compile(keras.optimizers.Adam(1e-3), "mse", metrics=[], jit_compile=False)
        results.append(one.fit(x, y, batch_size=TRAINED, epochs=2, shuffle=False, verbose=0).history["loss"])
        assert any(region.recompute for region in one.plan.regions)
    assert results[0] == results[1]


def _undropped(build: Any) -> keras.Model:
    """Keras restores no seeds of dropout, so that copies draw other masks than their originals."""
    return build(hub.BertBackbone(VOCABULARY, 1, 2, 8, 16, dropout=0.0, max_sequence_length=LENGTH))


CONVERTED = {
    "backbone": lambda: _undropped(lambda backbone: backbone),
    "task": lambda: _undropped(lambda backbone: hub.BertTextClassifier(backbone, CLASSES, dropout=0.0)),
}


@pytest.mark.parametrize("name", CONVERTED)
def test_files_and_pickles_of_converted_models_bring_the_settings_back(name, tmp_path):
    plain = CONVERTED[name]()
    model = keras_sn.SNModel.from_model(plain, policy="recompute", memory_budget="2GiB")
    x = _segments(np.random.default_rng(1))
    y = _targets(model.output, np.random.default_rng(2))
    model.save(tmp_path / "model.keras")
    for again in (keras.saving.load_model(tmp_path / "model.keras"), pickle.loads(pickle.dumps(model))):
        assert isinstance(again, type(plain))
        assert again.get_config() == model.get_config()
        twin = keras_sn.SNModel.from_model(plain, policy="recompute", memory_budget="2GiB")
        weights = plain.get_weights()
        _continues(twin, again, x, y)
        plain.set_weights(weights)


def test_a_preset_of_a_converted_task_is_the_tasks_own(tmp_path):
    model = keras_sn.SNModel.from_model(CONVERTED["task"](), policy="recompute")
    model.save_to_preset(tmp_path / "preset")
    loaded = hub.BertTextClassifier.from_preset(str(tmp_path / "preset"))
    assert type(loaded) is hub.BertTextClassifier
    for ours, theirs in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_files_of_converted_models_load_without_keras_sn(tmp_path):
    model = keras_sn.SNModel.from_model(CONVERTED["task"](), policy="recompute")
    model.save(tmp_path / "task.keras")
    code = (
        'import sys; sys.modules["keras_sn"] = None; import keras; '
        f"print(type(keras.saving.load_model({str(tmp_path / 'task.keras')!r})))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "keras_hub.src.models.bert.bert_text_classifier.BertTextClassifier" in done.stdout
