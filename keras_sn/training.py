"""How a planned model trains: Keras' own loop and step, with a plan made in time, regions compiled, and updates together."""

from typing import Any

import keras
import tensorflow as tf

from keras_sn import device
from keras_sn.batches import first_inputs, replayed, taken, unpacked, whole_batch
from keras_sn.compiling import BackgroundCompiler
from keras_sn.differentiation import asked_here
from keras_sn.passes import assign_all
from keras_sn.plan import Plan
from keras_sn.planning import NOT_SETTLED, InForce
from keras_sn.report import MeasuredPeak, out_of_memory_explained
from keras_sn.settings import Settings
from keras_sn.updates import GroupedUpdate, grouped_update
from keras_sn.verification import verify_first_step


class PlannedTraining(keras.Model):
    """The training calls of `SNModel`, which says what a plan is made for and how."""

    settings: Settings
    _now: InForce

    @property
    def plan(self) -> Plan | None:
        """The plan in force; None before the first training step or `build_plan`."""
        return self._now.plan

    def fit(self, x: Any = None, y: Any = None, batch_size: int | None = None, *args: Any, **kwargs: Any) -> Any:
        if self.compiled and x is not None and self._is_planned():
            if self.run_eagerly or self.train_function is None:  # a traced step goes on with what it was traced for
                self._now.settled_for = NOT_SETTLED
            x = self._plan_or_wait(x, y, batch_size, kwargs)
            self._report_measured_peak(kwargs)
        try:
            with out_of_memory_explained(lambda: self.plan):
                return super().fit(x, y, batch_size, *args, **kwargs)
        finally:
            self._stop_waiting()

    fit.__doc__ = keras.Model.fit.__doc__

    def _plan_or_wait(self, x: Any, y: Any, batch_size: int | None, arguments: dict[str, Any]) -> Any:
        """Plans, if it is known what batches will look like; else, the first of them will tell. Returns what to train on."""
        inputs = first_inputs(x, batch_size, needs_shapes=self._needs_shapes())
        with self.distribute_strategy.scope():
            is_distributed = tf.distribute.has_strategy()
        if is_distributed:  # an iterator over replicas cannot be put back to its first batch
            x, batch = whole_batch(x, y, arguments.get("sample_weight"), batch_size) if self._needs_batch(inputs) else (x, None)
            self._plan_for_batch(inputs if batch is None else batch[0], self.distribute_strategy.num_replicas_in_sync)
            self._verify(*(batch or ()))
            return x
        if inputs is not None:
            self._plan_for_batch(inputs)
        if self._needs_batch(inputs):
            self._now.put_aside, self.train_function = self.train_function, self._train_on_first_batch
        return x

    def _needs_batch(self, inputs: Any) -> bool:
        return inputs is None or self._is_to_be_verified()

    def _is_to_be_verified(self) -> bool:
        return self.settings.verify is not None and not self._now.is_verified

    def _train_on_first_batch(self, iterator: Any) -> Any:
        """The first call of the training loop, in the place of `train_function`: plans for the batch that has come."""
        self._stop_waiting()
        batches = taken(iterator, self.steps_per_execution)
        x, y, sample_weight = unpacked(batches[0])
        self._plan_for_batch(x)
        self._verify(x, y, sample_weight)
        self.make_train_function()
        train: Any = self.train_function
        return train(replayed(batches, iterator))

    def _stop_waiting(self) -> None:
        if self.train_function == self._train_on_first_batch:
            self.train_function, self._now.put_aside = self._now.put_aside, None

    def _verify(self, *batch: Any) -> None:
        if self._is_to_be_verified():
            verify_first_step(self, self._now.planned.trace.calls, batch)
            self._now.is_verified = True

    def _report_measured_peak(self, arguments: dict[str, Any]) -> None:
        callbacks = arguments.get("callbacks")
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            arguments["callbacks"] = [*keras.tree.flatten(callbacks or []), MeasuredPeak()]

    def train_on_batch(self, x: Any, y: Any = None, sample_weight: Any = None, *args: Any, **kwargs: Any) -> Any:
        if self.compiled and self._is_planned():
            self._plan_for_batch(x)
            self._verify(x, y, sample_weight)
        with out_of_memory_explained(lambda: self.plan):
            return super().train_on_batch(x, y, sample_weight, *args, **kwargs)

    train_on_batch.__doc__ = keras.Model.train_on_batch.__doc__

    def make_train_function(self, force: bool = False) -> Any:
        """Keras' own; where the plan has regions they are compiled by themselves, and the step around them is not."""
        if self._now.plan is None or self._now.plan.is_plain or (self.train_function is not None and not force):
            return super().make_train_function(force)
        outer_jit, self._now.region_jit = self.jit_compile, self._wants_jit()
        # On a CPU XLA tries nothing out, and a call on zeros takes about as long as compiling it.
        compiles_ahead = self._now.region_jit and device.has_gpu()
        self._now.compiler = BackgroundCompiler() if compiles_ahead else None
        self._now.update = GroupedUpdate(self._region_weights(), jit=self._now.region_jit)
        try:
            self.jit_compile = False
            return super().make_train_function(force)
        finally:
            self.jit_compile = outer_jit

    def train_step(self, data: Any) -> Any:
        """Keras' own; state and weights change together, after all gradients exist (except under `tf.distribute`)."""
        with asked_here():
            return self._train_step(data)

    def _train_step(self, data: Any) -> Any:
        is_keras_own = self._now.plan is None or self._now.plan.is_plain or self.optimizer is None
        if is_keras_own or tf.distribute.has_strategy():  # there, a thread for each replica runs this at the same time
            return super().train_step(data)
        self._now.waiting_updates = []

        def assign_state() -> None:
            assign_all(self._now.waiting_updates)
            self._now.waiting_updates.clear()

        try:
            with grouped_update(self.optimizer, self._now.update, before_update=assign_state):
                logs = super().train_step(data)
            assign_state()
        finally:
            self._now.waiting_updates = None
            if self._now.compiler is not None:
                self._now.compiler.wait()
                device.reset_peak()  # of what XLA has tried out
        return logs
