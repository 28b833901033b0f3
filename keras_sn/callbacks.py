"""Keras callbacks that show memory: numbers into `logs`, and the plan in force. Harmless on a plain `keras.Model`."""

from collections.abc import Callable
from typing import Any

import keras

from keras_sn import device


class MemoryMonitor(keras.callbacks.Callback):
    """Puts memory figures into `logs` at each epoch's end: into History, CSVLogger, TensorBoard, the progress bar.

    - `peak_bytes`: the device allocator's peak since training began.
    - `host_bytes`: resident memory of the process.
    - `offloaded_bytes`: what the plan moves off the device in each training step.

    A figure that the first epoch cannot give (no GPU, an allocator without statistics, no plan) is left out for the
    whole training, so that each column of History and CSVLogger has one entry an epoch; one that fails later is `nan`.
    """

    # No batch method: Keras would wait for every training step to call it.
    _keys: list[str] | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._keys = None
        device.reset_peak()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        if logs is None:
            return
        figures = self._figures()
        if self._keys is None:
            self._keys = list(figures)
        logs.update({key: figures.get(key, float("nan")) for key in self._keys})

    def _figures(self) -> dict[str, int]:
        figures = {
            "peak_bytes": device.measured_peak_bytes(),
            "host_bytes": device.resident_bytes(),
            "offloaded_bytes": getattr(getattr(self.model, "plan", None), "offloaded_bytes", None),
        }
        return {key: value for key, value in figures.items() if value is not None}


class PlanSummary(keras.callbacks.Callback):
    """Prints the model's plan once, as soon as there is one: after the first batch.

    Args:
        print_fn: What prints the text. Keras may call it from a thread of its own.
    """

    async_safe = True  # Keras need not wait for a training step to call this one

    def __init__(self, print_fn: Callable[[str], Any] = print) -> None:
        super().__init__()
        self._print = print_fn
        self._is_done = False

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        plan = None if self._is_done else getattr(self.model, "plan", None)
        if plan is not None:
            self._is_done = True
            self._print(str(plan))
