"""Which tensors live when: a tensor is freed right after the last step that reads it.

In: the steps of a training step (with recompute steps or without) and the bytes of each tensor. Out: `Liveness`.
Follows Wang et al. 2018 (SuperNeurons, section 3.2), whose in and out sets cost O(N^2); here a tensor's lifetimes are
intervals of steps, found in one pass, and a set is built only when somebody asks for it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from keras_sn.errors import PlanError
from keras_sn.steps import Step


class Lifetime(NamedTuple):
    """One stay of a tensor on the device. A recomputed tensor has several."""

    tensor: str
    made: int
    """The index of the step that writes it."""
    last_used: int
    """The index of the last step that reads it, before it is made anew; `made` if nobody reads it."""


@dataclass(frozen=True)
class Liveness:
    """When each tensor lives, and how many bytes that makes at each step."""

    steps: tuple[Step, ...]
    nbytes: Mapping[str, int]
    lifetimes: tuple[Lifetime, ...]
    live_bytes: tuple[int, ...]
    """Per step: bytes on the device while it runs."""

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes, default=0)

    @property
    def peak_index(self) -> int:
        """The index of the first step with the peak; the paper counts from 1. 0 if there are no steps."""
        return self.live_bytes.index(self.peak_bytes) if self.live_bytes else 0

    @cached_property
    def tensors(self) -> frozenset[str]:
        """All tensors that the steps make."""
        return frozenset(lifetime.tensor for lifetime in self.lifetimes)

    @property
    def baseline_bytes(self) -> int:
        """What the device holds if nothing is ever freed: the paper's baseline."""
        return sum(self.nbytes[tensor] for tensor in self.tensors)

    @cached_property
    def dead_after(self) -> Mapping[int, tuple[str, ...]]:
        """Step index -> the tensors that no later step reads, in name order."""
        dead: dict[int, list[str]] = {}
        for lifetime in self.lifetimes:
            dead.setdefault(lifetime.last_used, []).append(lifetime.tensor)
        return {index: tuple(sorted(tensors)) for index, tensors in dead.items()}

    def live_in(self, index: int) -> frozenset[str]:
        """The paper's `in` set: what lives before a step."""
        return frozenset(life.tensor for life in self.lifetimes if life.made < index <= life.last_used)

    def live_during(self, index: int) -> frozenset[str]:
        """What lives while a step runs: its `in` set and what it writes."""
        return frozenset(life.tensor for life in self.lifetimes if life.made <= index <= life.last_used)

    def live_out(self, index: int) -> frozenset[str]:
        """The paper's `out` set: what lives after a step."""
        return frozenset(life.tensor for life in self.lifetimes if life.made <= index < life.last_used)


def analyze_liveness(steps: Sequence[Step], nbytes: Mapping[str, int]) -> Liveness:
    """Finds the lifetimes of all tensors.

    Args:
        steps: The steps in execution order.
        nbytes: Bytes of every tensor that a step writes. A tensor that is missing here and that no step writes (the
            batch, the weights) is not managed and does not count.

    Returns:
        The lifetimes, and the bytes that live at each step.

    Raises:
        PlanError: A step reads a managed tensor before a step has made it, or writes one whose size is unknown.
    """
    made: list[int] = []
    last_used: list[int] = []
    names: list[str] = []
    current: dict[str, int] = {}
    for index, step in enumerate(steps):
        for tensor in step.reads:
            if tensor in current:
                last_used[current[tensor]] = index
            elif tensor in nbytes:
                raise PlanError(
                    f"Step {step.layer!r} ({step.phase}) reads a tensor that no step before it makes. Received: {tensor!r}"
                )
        for tensor in step.writes - step.reads:
            if tensor not in nbytes:
                raise PlanError(
                    f"Step {step.layer!r} ({step.phase}) writes a tensor of unknown size; add it to `nbytes`. "
                    f"Received: {tensor!r}"
                )
            current[tensor] = len(names)
            names.append(tensor)
            made.append(index)
            last_used.append(index)
    lifetimes = tuple(map(Lifetime, names, made, last_used))
    return Liveness(tuple(steps), nbytes, lifetimes, _live_bytes(lifetimes, nbytes, len(steps)))


def _live_bytes(lifetimes: Sequence[Lifetime], nbytes: Mapping[str, int], steps: int) -> tuple[int, ...]:
    """Bytes alive at each step."""
    change = [0] * (steps + 1)
    for tensor, first, last in lifetimes:
        change[first] += nbytes[tensor]
        change[last + 1] -= nbytes[tensor]
    return tuple(accumulate(change[:-1]))


def working_set_bytes(step: Step, nbytes: Mapping[str, int]) -> int:
    """What one step reads and writes, in bytes. Its maximum over the steps is the least that any plan can reach."""
    return sum(nbytes.get(tensor, 0) for tensor in step.reads | step.writes)
