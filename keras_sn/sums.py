"""The order in which Keras adds up the gradients of a tensor that several calls inside a layer read.

A tape walks back breadth first and adds the gradients of a tensor up as they arrive, so how a sum of three or more is rounded
depends on how long the paths are. When regions add them up, those of the last readers come first, wherever the model is cut (see
Note: [In turn] in `regions`). So the calls are put in an order that makes both the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from keras_sn import keras_internals
from keras_sn.bodies import RegionBody
from keras_sn.equivalence import named_inputs, placeholders_of
from keras_sn.layer_calls import PlacedArguments, TracedCall, output_names, variables_of_call
from keras_sn.op_graph import count_of_value_readers
from keras_sn.readers import Readers
from keras_sn.regions import EAGER, RegionFunction
from keras_sn.structure import structure_of
from keras_sn.symbolic_calls import SymbolicCall


@dataclass(frozen=True, eq=False)
class InTurn:
    """The calls inside a layer in an order in which gradients add up as in Keras, wherever regions end."""

    calls: list[SymbolicCall]
    tensors: list[Any]
    """Those whose readers must keep that order."""


@dataclass(frozen=True, eq=False)
class Sums:
    """Finds that order for the layers of one model; equal layers are looked at once."""

    readers: Readers
    autocast_dtype: str | None
    """The dtype to which the regions of the model cast variables, or None."""
    _arrivals: dict[Any, list[list[int]] | None] = field(default_factory=dict)
    """By the structure of the calls inside a layer."""

    def in_turn(self, node: Any, calls: Sequence[SymbolicCall], outputs: Sequence[Any]) -> InTurn | None:
        """The calls inside a layer in that order.

        Args:
            node: The layer's call.
            calls: The calls inside, in their own order.
            outputs: Those of their outputs that stand for the layer's.

        Returns:
            None if there is no such order, or none that is known.
        """
        divided = self.readers.divided_sums(node, calls, outputs)
        if not divided:
            return InTurn(list(calls), [])
        own = {id(tensor) for tensor in node.input_tensors}
        pairs = zip(outputs, node.outputs, strict=True)
        read = [y for y, outside in pairs if self.readers.is_read(outside) and keras.backend.is_float_dtype(y.dtype)]
        # With one output, the gradients inside come in an order of their own, whatever the tape does elsewhere in between.
        if len(read) != 1 or any(id(x) not in own or not self.readers.others_come_first(node, x) for x in divided):
            return None
        arrivals = self._arrivals_in(node, calls, read, divided)
        if arrivals is None:
            return None
        places = list(range(len(calls)))
        for arrived in arrivals:
            for where, place in zip(sorted(map(places.index, arrived)), reversed(arrived), strict=True):
                places[where] = place
        is_reached = all([place for place in reversed(places) if place in arrived] == arrived for arrived in arrivals)
        ordered = [calls[place] for place in places]
        return InTurn(ordered, divided) if is_reached and _may_run(node, ordered, calls) else None

    def _arrivals_in(self, node: Any, calls: Sequence[SymbolicCall], outputs: Sequence[Any], tensors: Sequence[Any]) -> Any:
        """For each tensor the places of its readers in the order in which their gradients arrive, or None."""
        names, specs = named_inputs(node)
        rows, taps = _tapped(calls, names, [id(tensor) for tensor in tensors])
        body = RegionBody(tuple(rows), specs, tuple(names[id(y)] for y in outputs), (), frozenset(), self.autocast_dtype)
        structure = structure_of(body.calls, specs, body.outputs)
        if structure is not None and structure in self._arrivals:
            return self._arrivals[structure]
        with keras_internals.losses_forgotten(node.operation):
            arrived = _arrivals(body, taps)
        places = arrived and [[place for place, tensor in arrived if tensor == one] for one in range(len(tensors))]
        if structure is not None:
            self._arrivals[structure] = places
        return places


def _may_run(node: Any, ordered: Sequence[SymbolicCall], calls: Sequence[SymbolicCall]) -> bool:
    """Whether each call comes after those that it reads from, and those that moved share no variables."""
    known = {id(tensor) for tensor in node.input_tensors}
    for call in ordered:
        if not all(id(tensor) in known for tensor in call.input_tensors):
            return False
        known.update(id(tensor) for tensor in call.outputs)
    moved = [call for call, before in zip(ordered, calls, strict=True) if call is not before]
    variables = [id(variable) for call in moved for variable in variables_of_call(call)]
    return len(set(variables)) == len(variables)


class _Tap(keras.Operation):
    """Hands a tensor to one reader, and notes when the gradient comes back from there."""

    def __init__(self, place: int, tensor: int):
        super().__init__()
        self.what = place, tensor
        self.arrived: list[tuple[int, int]] = []
        self.given: Any = None

    def call(self, x: Any) -> Any:
        with keras_internals.stop_recording():
            self.given = tf.identity(x)
        keras_internals.record_operation([self.given], [x], self.note)
        return self.given

    def note(self, gradient: Any) -> list[Any]:
        self.arrived.append(self.what)
        return [gradient]


def _tapped(calls: Sequence[SymbolicCall], names: dict[int, str], tensors: Sequence[int]) -> tuple[list[TracedCall], list[_Tap]]:
    """The calls, with a tap between each tensor that is looked at and each of its readers; their outputs are added to `names`."""
    rows, taps = [], []
    for place, call in enumerate(calls):
        read = dict(names)
        for key in dict.fromkeys(id(tensor) for tensor in call.input_tensors if id(tensor) in tensors):
            taps.append(_Tap(place, tensors.index(key)))
            read[key] = f"tap {len(taps)}"
            rows.append(TracedCall(read[key], taps[-1], PlacedArguments(0), ((0, names[key]),), (read[key],)))
        bindings = tuple((id(tensor), read[id(tensor)]) for tensor in call.input_tensors)
        made = output_names(f"call {place}", len(call.outputs))
        names.update(zip(map(id, call.outputs), made, strict=True))
        rows.append(TracedCall(f"call {place}", call.operation, call.arguments, bindings, made, call.training))
    return rows, taps


def _arrivals(body: RegionBody, taps: Sequence[_Tap]) -> list[tuple[int, int]] | None:
    """The readers, in the order in which gradients arrive: place of the call, place of the tensor.

    None where a reader adds up several gradients of one tensor, which Keras may add between those of others, or adds losses,
    whose gradients come in between.
    """
    function, arrived = RegionFunction(body, EAGER), []
    for tap in taps:
        tap.arrived = arrived
    with keras_internals.scratch_graph(), keras_internals.gradients_forgotten_with(function):
        inputs, weights, state = placeholders_of(body)
        sources = [x for x in inputs if x.dtype.is_floating]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(sources)
            result = function.forward(inputs, [None] * len(inputs), weights, state)
        if result.losses or any(count_of_value_readers(tap.given) != 1 for tap in taps):
            return None
        tape.gradient([y for y in result.outputs if y.dtype.is_floating], sources)
    return arrived if len(arrived) == len(taps) else None
