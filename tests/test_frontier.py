"""The frontier of bytes against seconds: `"auto"` is on it, whatever another policy does with the same bytes."""

import json
from functools import cache, partial

import pytest
from PIL import Image
from rich.console import Console

from keras_sn.benchmarks import __main__ as command_line
from keras_sn.benchmarks import frontier, networks
from keras_sn.benchmarks.frontier import CASES, OTHERS, Case, Frontier, collect
from keras_sn.errors import BudgetError

TINY = {
    "resnet50": Case("ResNet", partial(networks.resnet, 1, 1, 1, 1, image_size=64, width=8, classes=10), 256),
    "vgg16": Case("VGG", partial(networks.vgg16, image_size=32, width=8, units=64, classes=10), 256),
    "inception_v4": Case("Inception", partial(networks.inception_v4, image_size=75, width=4, blocks=(1, 1, 1)), 64),
    "densenet": Case("DenseNet", partial(networks.densenet, blocks=(2, 3), growth=8, image_size=32, width=16), 256),
    "unet": Case("U-Net", partial(networks.unet, image_size=64, width=8, depth=2), 64),
    "bert": Case("BERT", partial(networks.bert, length=32, vocabulary=99, width=64, depth=2, heads=4, mlp=256), 256),
}
"""The six networks, small enough to be planned in a moment; their batches keep bytes dear and launches cheap."""
SHARES = (0.8, 0.5, 0.25)


@cache
def tiny(name):
    return Frontier.of(name, TINY[name], compiled=True)


def plans_of_others(one):
    """Every different plan of the other policies, without a budget and with some."""
    found = {}
    for policy in OTHERS:
        for budget in (None, *map(one.budget_bytes, SHARES)) if policy != "recompute" else (None,):
            plan = one.plan(policy, budget)
            found[policy, plan.planned_peak_bytes, plan.planned_seconds] = plan
    return list(found.values())


def test_the_tiny_networks_are_the_six():
    assert list(TINY) == list(CASES)


@pytest.mark.parametrize("name", TINY)
def test_auto_is_never_slower_with_the_bytes_of_another_policy(name):
    one, worse = tiny(name), []
    for other in plans_of_others(one):
        where = f"{other.policy} with budget {other.budget_bytes}: {other.planned_peak_bytes:,} bytes, {other.planned_seconds} s"
        try:
            auto = one.plan("auto", other.planned_peak_bytes)
        except BudgetError as error:
            worse.append(f"{where}; auto: {error}")
            continue
        assert auto.planned_peak_bytes <= other.planned_peak_bytes, where
        if auto.planned_seconds > other.planned_seconds + 1e-9:
            worse.append(f"{where}; auto: {auto.planned_peak_bytes:,} bytes, {auto.planned_seconds} s")
    assert not worse, "\n".join(worse)
