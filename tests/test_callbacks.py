"""`callbacks`: what they write, and that they do no harm."""

import csv
import math

import keras
import numpy as np
import pytest

import keras_sn
from keras_sn import device
from keras_sn.callbacks import MemoryMonitor, PlanSummary

X, Y = np.ones((8, 4), "float32"), np.ones((8, 1), "float32")


def compiled(model: keras.Model) -> keras.Model:
    model.compile("sgd", "mse")
    return model


def plain_model() -> keras.Model:
    inputs = keras.Input((4,))
    return compiled(keras.Model(inputs, keras.layers.Dense(1)(inputs)))


def sn_model() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(3, activation="relu")(inputs)
    return compiled(keras_sn.SNModel(inputs, keras.layers.Dense(1)(hidden), policy="recompute"))


def fit(model: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 3) -> dict[str, list]:
    return model.fit(X, Y, batch_size=4, epochs=epochs, verbose=0, callbacks=list(callbacks)).history


def test_memory_monitor_leaves_out_what_nobody_can_tell(tmp_path):
    history = fit(plain_model(), MemoryMonitor(), keras.callbacks.CSVLogger(str(tmp_path / "log.csv")))
    assert set(history) == {"loss", "host_bytes"}
    assert all(0 < nbytes < 2**40 for nbytes in history["host_bytes"])
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [int(row["host_bytes"]) for row in rows] == history["host_bytes"]


def test_memory_monitor_knows_the_plan():
    model = sn_model()
    history = fit(model, MemoryMonitor())
    assert history["offloaded_bytes"] == [model.plan.offloaded_bytes] * 3


def test_every_column_has_one_entry_an_epoch(monkeypatch):
    peaks = iter([7, None, 9])
    monkeypatch.setattr(device, "measured_peak_bytes", lambda: next(peaks))
    monkeypatch.setattr(device, "reset_peak", lambda: None)
    seven, missing, nine = fit(plain_model(), MemoryMonitor())["peak_bytes"]
    assert (seven, nine) == (7, 9)
    assert math.isnan(missing)


def test_memory_monitor_starts_anew_with_each_training(monkeypatch):
    monitor, resets = MemoryMonitor(), []
    monkeypatch.setattr(device, "reset_peak", lambda: resets.append(1))
    model = plain_model()
    fit(model, monitor)
    monkeypatch.setattr(device, "measured_peak_bytes", lambda: 3)
    assert fit(model, monitor)["peak_bytes"] == [3, 3, 3]
    assert len(resets) == 2


def test_plan_summary_prints_the_plan_once():
    model, printed = sn_model(), []
    summary = PlanSummary(print_fn=printed.append)
    fit(model, summary)
    fit(model, summary)
    assert printed == [str(model.plan)]


def test_plan_summary_has_nothing_to_say_of_a_plain_model():
    printed = []
    fit(plain_model(), PlanSummary(print_fn=printed.append))
    assert printed == []


@pytest.mark.parametrize("callback", [MemoryMonitor, PlanSummary])
def test_keras_need_not_wait_for_them(callback):
    overrides = callback.on_train_batch_end is not keras.callbacks.Callback.on_train_batch_end
    assert not overrides or callback.async_safe
