"""One forward pass of a plan: what it has saved, where that waits, and how it comes back for the backward pass."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.pool import TIERS, behind
from keras_sn.regions import EAGER, RegionBody, RegionFunction


def is_float(tensor: Any) -> bool:
    return tensor is not None and (tensor.dtype.is_floating or tensor.dtype.is_complex)


@dataclass
class Pass:
    """One forward pass and the backward pass that belongs to it."""

    tensors: dict[str, Any]
    mode: str
    recomputed: set[str]
    """Tensors that wait nowhere: their regions' forward passes run again."""
    ties: bool
    """Whether what a backward function reads is made to depend on its gradients."""
    regions: int
    """How many there are."""
    copy_window: int
    """A region waits for the copies of the region that ran so many before it."""
    state: dict[int, Any] = field(default_factory=dict)
    """The id of a state variable -> its value so far in this pass."""
    updated: dict[int, tuple[keras.Variable, Any]] = field(default_factory=dict)
    losses: list[tuple[Any, Any]] = field(default_factory=list)
    """Losses with the layers that added them."""
    started: dict[int, Any] = field(default_factory=dict)
    """Region -> a tensor that exists once its backward pass can start."""
    in_tier: dict[str, Any] = field(default_factory=dict)
    """What has been put into tiers, by name."""
    fetched: dict[tuple[str, int], tuple[Any, Any]] = field(default_factory=dict)
    """Name and id of the tensor that started a copy back -> the copy, and that tensor."""
    stored: dict[int, list[Any]] = field(default_factory=dict)
    """Region -> the tensors that it has put into tiers."""
    asked: dict[int, list[tuple[str, str, Any]]] = field(default_factory=dict)
    """Region -> what begins to come back when its backward pass starts: tier, name and the tensor there."""
    begun: list[Any] = field(default_factory=list)
    """The copies back that were asked for last."""
    ended: Any = None
    """A gradient that the last region's backward pass has returned."""
    replays: dict[str, Any] = field(default_factory=dict)
    """Tensor that waits nowhere -> its `reruns.Rerun`."""

    def note(self, rerun: Any) -> None:
        """Keeps how to make those of a region's outputs again that wait nowhere."""
        self.replays.update((name, rerun) for name in rerun.names if name in self.recomputed)

    def wait_for_copies(self, region: int, read_next: Sequence[str]) -> None:
        """Lets a region that reads these tensors wait until what the one `copy_window` before it has put into tiers is there.

        Without it, the host would run ahead of the copies, and all that leaves would still be on the device.
        """
        copies = self.stored.pop(region - self.copy_window, [])
        name = next((name for name in read_next if is_float(self.tensors[name])), None)
        if name is None or not copies:
            return
        self.tensors[name] = keras_internals.with_mask_of(behind(self.tensors[name], *copies), self.tensors[name])

    def start_backward(self, region: int, gate: Any, others: Sequence[Any], *, brings_back: bool = False) -> Any:
        """Says that a region's backward pass can start once all its gradients exist, and asks for what comes back by then.

        Args:
            region: The region.
            gate: One of the gradients that it is given.
            others: The others. One may be there long before the rest, since an addition hands its gradient on at once.
            brings_back: Whether the region waits for something that comes back or is made again.

        Returns:
            `gate`, in a form that exists once what was asked for before has been queued. TensorFlow queues a copy when what
            it reads is on the host, behind all work of the device that it has queued by then: without it, that would be all of
            the backward pass up to the first region that needs one of them.
        """
        if self.mode == EAGER:  # eager steps run in order, and a gate would only keep its tensor alive
            return gate
        left = self.stored.pop(2 * self.regions - 1 - region - self.copy_window, [])
        first = [one for one in (*left, *self.begun) if one.graph is gate.graph]
        if not left and (first or brings_back or region in self.asked):  # what has left is on another device
            first += [one for one in (*others, *self._ended_in(gate.graph)) if one.op is not _made_by(gate)]
        self.started[region] = gate = behind(gate, *first) if first else gate
        here = [one for one in self.asked.get(region, ()) if one[2].graph is gate.graph]
        self.begun = [self.fetch(tier, name, stored, gate) for tier, name, stored in here]
        return gate

    def _ended_in(self, graph: Any) -> list[Any]:
        return [self.ended] if self.ended is not None and self.ended.graph is graph else []

    def in_order(self, gate: Any) -> AbstractContextManager:
        """Inside, a backward function is called that runs once that of the region before it has been queued.

        Those of branches could run in any order, and what all of them are given and return would be there at a time.
        """
        return nullcontext() if self.mode == EAGER else tf.control_dependencies(self._ended_in(gate.graph))

    def fetch(self, tier: str, name: str, stored: Any, after: Any) -> Any:
        """A tensor from its tier; once for all that ask for it at one time, which TensorFlow's optimizer may or may not see."""
        if self.mode == EAGER:  # each asks in its own turn, and a copy held here would stay alive
            return TIERS[tier].get(stored, after)
        key = name, id(after)
        if key not in self.fetched:
            self.fetched[key] = TIERS[tier].get(stored, after), after
        return self.fetched[key][0]


@dataclass(frozen=True)
class PassResult:
    """What a forward pass leaves for the model to hand on."""

    outputs: list[Any]
    losses: list[tuple[Any, Any]]
    """Each with the layer that added it, `(layer, loss)`."""
    state_updates: list[tuple[keras.Variable, Any]]

    def add_losses(self) -> None:
        """Gives the losses to the layers that added them."""
        for layer, loss in self.losses:
            layer.add_loss(loss)


def assign_all(updates: Iterable[tuple[keras.Variable, Any]]) -> None:
    """Gives variables their new values."""
    for variable, value in updates:
        variable.assign(value)


def _made_by(tensor: Any) -> Any:
    """The operation that makes a tensor's numbers; `behind` and its gradient only reshape them."""
    operation = tensor.op
    while operation.type == "Reshape":
        operation = operation.inputs[0].op
    return operation


def masks_of(tensors: Sequence[Any]) -> list[Any]:
    return [None if x is None else keras_internals.get_mask(x) for x in tensors]


def read_trainable(one_pass: Pass, body: RegionBody) -> list[Any]:
    """The values of the region's trainable variables."""
    with keras_internals.without_autocast(), _when_it_is_near(one_pass, body):
        return [_current(one_pass, variable) for variable in body.trainable]


def read_state(one_pass: Pass, body: RegionBody) -> list[Any]:
    """The values of the region's other variables."""
    with keras_internals.without_autocast(), _when_it_is_near(one_pass, body):
        return [
            one_pass.state[id(variable)] if id(variable) in one_pass.state else tf.convert_to_tensor(variable.value)
            for variable in body.state
        ]


def _when_it_is_near(one_pass: Pass, body: RegionBody) -> AbstractContextManager:
    """Inside, variables are read once the region before is under way: TensorFlow would read those of all regions first.

    The device waits for that: 0.7 ms in a step of ResNet-50 (docs/measurements.md).
    """
    first = next((one_pass.tensors[name] for name in body.inputs if is_float(one_pass.tensors[name])), None)
    if first is None or one_pass.mode == EAGER:
        return nullcontext()
    return tf.control_dependencies([first])


def _current(one_pass: Pass, variable: keras.Variable) -> Any:
    """The value of a trainable variable: its own, or what a layer has assigned to it in this pass."""
    value = tf.convert_to_tensor(variable.value)
    return keras_internals.in_place_of(value, one_pass.state[id(variable)]) if id(variable) in one_pass.state else value


def hand_on(one_pass: Pass, body: RegionBody, function: RegionFunction, result: Any, outputs: list, losses: list):
    """Gives the region's outputs, masks, losses and new state to the regions after it and to the model."""
    for name, tensor, mask in zip(body.outputs, outputs, result.masks, strict=True):
        if mask is not None:
            keras_internals.set_mask(tensor, mask)
        one_pass.tensors[name] = tensor
    for owner, loss in zip(function.loss_owners, losses, strict=True):
        one_pass.losses.append((body.layers[owner], loss))
    for place in function.unmasked:
        keras_internals.set_mask(one_pass.tensors[body.inputs[place]], None)
    for variable, new in zip(body.updatable, result.new_state, strict=True):
        if new is not None:
            one_pass.state[id(variable)] = new
            one_pass.updated[id(variable)] = (variable, new)
