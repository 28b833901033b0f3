"""What is inside a region: its layer calls, with the variables and tensors that they use."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import keras

from keras_sn import keras_internals
from keras_sn.drafts import unread_inputs
from keras_sn.errors import UnsupportedModelError
from keras_sn.graph import TensorSpec
from keras_sn.layer_calls import ModelTrace, TracedCall, variables_of_call


class BorrowedWeights(UnsupportedModelError):
    """Layers use weights that are none of their own, and whose they are is not known."""

    weights: Sequence[Any] = ()

    @classmethod
    def of(cls, borrowed: Sequence[tuple[TracedCall, Sequence[Any]]]) -> "BorrowedWeights":
        """The error for layer calls and TensorFlow variables that they use."""
        call, weights = borrowed[0][0], {id(weight): weight for _, used in borrowed for weight in used}.values()
        error = cls(
            f"Layer {call.operation.name!r} uses a weight that it does not own (a function may close over another layer or a "
            "variable), so its gradient would be lost when the layer is recomputed. Make the weight, or the layer that owns it, "
            "an attribute of the layer, or keep the layer by a policy. "
            f"Received: layer call {call.name!r}, weights {[weight.name for weight in weights]}"
        )
        error.weights = list(weights)
        return error


class UsesGlobalSeed(UnsupportedModelError):
    """A layer draws from Keras' global seed, whose state becomes one of the region's."""

    def __init__(self, state: keras.Variable):
        super().__init__("A layer makes an unseeded `keras.random` call, which uses the global seed.")
        self.state = state


@dataclass(frozen=True, eq=False)
class RegionBody:
    """The layer calls of one region with the variables and tensors that they use."""

    calls: tuple[TracedCall, ...]
    input_specs: tuple[TensorSpec, ...]
    outputs: tuple[str, ...]
    saved_inside: tuple[str, ...]
    read_later: frozenset[str]
    """Those of its inputs that later regions read, or that the model returns."""
    autocast_dtype: str | None
    """The model's compute dtype if it differs from its variables', else None."""
    borrowed: tuple[keras.Variable, ...] = ()
    """Variables that its layers use and do not own: functions close over layers, layers draw from the global seed."""
    unread: frozenset[str] = frozenset()
    """Those of its inputs whose values its backward function needs for nothing, and which are not saved."""
    in_turn: frozenset[str] = frozenset()
    """Tensors that its calls read whose gradients add up in a given order; see Note: [In turn] in `regions`."""
    made_specs: tuple[TensorSpec, ...] = ()
    """Of all tensors that its calls make."""

    @cached_property
    def inputs(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.input_specs)

    @cached_property
    def inputs_in_turn(self) -> tuple[str, ...]:
        return tuple(name for name in self.inputs if name in self.in_turn)

    @cached_property
    def inside_only(self) -> tuple[str, ...]:
        """Those of the saved tensors that are not outputs; XLA would copy a tensor that a function returns twice."""
        return tuple(name for name in self.saved_inside if name not in self.outputs)

    @cached_property
    def variables(self) -> list[keras.Variable]:
        found = {id(variable): variable for variable in self.borrowed}
        found |= {id(variable): variable for call in self.calls for variable in variables_of_call(call)}
        return list(found.values())

    @cached_property
    def trainable(self) -> list[keras.Variable]:
        return [variable for variable in self.variables if variable.trainable]

    @cached_property
    def state(self) -> list[keras.Variable]:
        return [variable for variable in self.variables if not variable.trainable]

    @property
    def updatable(self) -> list[keras.Variable]:
        """What its layers may assign to: state, and weights too (`SpectralNormalization` assigns the kernel)."""
        return [*self.state, *self.trainable]

    @cached_property
    def layers(self) -> list[Any]:
        """All layers inside, each once, in the order of the calls."""
        found = {id(layer): layer for call in self.calls for layer in keras_internals.sublayers(call.operation)}
        return list(found.values())

    def forward_shapes(self, inputs: list, masks: list, trainable: list, state: list) -> list[Sequence[int] | None]:
        """The planned shapes of what its forward function gets; None for what is no tensor between layers."""
        return [*self._shapes(self.inputs) * 2, *[None] * len([*trainable, *state])]

    def backward_shapes(
        self,
        inputs: list,
        masks: list,
        saved: list,
        trainable: list,
        state: list,
        statistics: list,
        output_gradients: list,
        loss_gradients: list,
        wanted: list[bool],
        seeds: list,
    ) -> list[Sequence[int] | None]:
        """The planned shapes of what its backward function gets; None for what is no tensor between layers."""
        differentiable = [spec.name for spec in self.made_specs if spec.name in self.outputs and spec.is_differentiable]
        seeded = [name for name, is_wanted in zip(self.inputs, wanted, strict=True) if is_wanted]
        return [
            *self._shapes(self.inputs) * 2,
            *self._shapes(self.saved_inside),
            *[None] * len([*trainable, *state, *statistics]),
            *self._shapes(differentiable),
            *[None] * len([*loss_gradients, *wanted]),
            *self._shapes(seeded),
        ]

    def _shapes(self, names: Sequence[str]) -> list[Sequence[int] | None]:
        specs = {spec.name: spec for spec in (*self.input_specs, *self.made_specs)}
        return [specs[name].shape if name in specs else None for name in names]

    def describe(self) -> str:
        names = [call.name for call in self.calls]
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def make_bodies(trace: ModelTrace, regions: Sequence[Any], autocast_dtype: str | None) -> list[RegionBody]:
    """The bodies of a plan's regions: what each reads from outside, and what it makes that others read."""
    graph, bodies = trace.graph, []
    for region in regions:
        calls = trace.calls_named(region.layers)
        made = dict.fromkeys(name for call in calls for name in call.outputs)
        inputs = dict.fromkeys(name for call in calls for name in call.inputs if name not in made)
        specs = tuple(graph.tensors[name] for name in inputs)
        end = graph.position[region.layers[-1]]
        outputs = [name for call in calls for name in call.outputs if graph.last_use.get(name, -1) > end]
        saved = tuple(one.tensor for one in region.saved if one.tensor in made)
        unread = unread_inputs(graph.layers_named(region.layers)).difference(one.tensor for one in region.saved)
        read_later = frozenset(name for name in inputs if graph.last_use[name] > end)
        in_turn = trace.in_turn.intersection(name for call in calls for name in call.inputs)
        body = RegionBody(calls, specs, tuple(outputs), saved, read_later, autocast_dtype)
        made_specs = tuple(graph.tensors[name] for name in made)
        bodies.append(replace(body, unread=frozenset(unread), in_turn=in_turn, made_specs=made_specs))
    return bodies
