"""The plan: what is saved, where, and when it comes back. Data only; `planner` makes it, `runtime` runs it.

Two levels. `Region` and `Saved` are what the TensorFlow runtime executes. `Run`, `Free`, `Offload` and `Prefetch` are the
instructions of a step-by-step schedule, which `simulate` runs on paper.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from keras_sn.errors import PlanError
from keras_sn.steps import RECOMPUTE, Step

DEVICE = "device"
HOST = "host"
PLACES = (DEVICE, HOST, RECOMPUTE)
"""Where a saved tensor waits. `"recompute"`: nowhere, the region that made it runs its forward pass again."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run one step: everything that it reads is on the device."""

    step: Step


@dataclass(frozen=True, slots=True)
class Free:
    """Drop the device copy of a tensor."""

    tensor: str


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy a tensor from the device to a tier; the device copy stays until it is freed."""

    tensor: str
    tier: str = HOST


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Copy a tensor from its tier back to the device."""

    tensor: str
    tier: str = HOST


Instruction = Run | Free | Offload | Prefetch


@dataclass(frozen=True, slots=True)
class Saved:
    """A tensor that a region keeps from its forward pass for its backward pass."""

    tensor: str
    tier: str = DEVICE
    """One of `PLACES`; the same in all regions that save the tensor."""
    prefetch_at: int | None = None
    """The region whose backward pass starts the copy back from the tier; None means this region's own."""
    nbytes: int = 0
    """For those who read the plan."""

    @property
    def is_away(self) -> bool:
        """Whether it waits in a tier, outside the device, from where it must be copied back."""
        return self.tier not in (DEVICE, RECOMPUTE)


@dataclass(frozen=True, slots=True)
class Region:
    """A run of consecutive layer calls, compiled and recomputed as a whole."""

    layers: tuple[str, ...]
    saved: tuple[Saved, ...] = ()
    """Its inputs, and layer outputs inside it; what is not saved is recomputed."""
    recompute: bool = True
    """False: nothing is recomputed and TensorFlow saves what its own gradient needs; `saved` is then empty."""
    recompute_seconds: float = 0.0
    """Planned seconds of what its backward pass makes again; for those who read the plan."""


@dataclass(frozen=True)
class Plan:
    """How one training step runs. Without regions it is Keras' own train step."""

    policy: str
    batch_size: int
    regions: tuple[Region, ...]
    reserved_bytes: int
    """Weights, state, optimizer slots and the rest that no plan can move; gradients of weights are in the peaks."""
    plain_peak_bytes: int
    """What plain Keras is predicted to need at its peak."""
    planned_peak_bytes: int
    """What this plan is predicted to need at its peak."""
    peak_layer: str = ""
    """The layer call at which the planned peak stands."""
    budget_bytes: int | None = None
    copy_window: int = 2
    """A region's forward or backward pass waits for the copies of the forward pass that ran this many before it."""
    offloaded_bytes: int = 0
    """Bytes that leave the device in each step."""
    planned_seconds: float = 0.0
    """What a training step is predicted to take, without the optimizer's update."""
    plain_seconds: float = 0.0
    """What plain Keras is predicted to take, likewise."""
    compiled: bool = False
    """Whether it was made for regions that XLA compiles."""

    @property
    def is_plain(self) -> bool:
        return not self.regions

    @property
    def slowdown(self) -> float:
        """Predicted seconds of a step over plain Keras'."""
        return self.planned_seconds / self.plain_seconds if self.plain_seconds else 1.0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        """Reads what `to_json` wrote.

        Raises:
            PlanError: `text` is not a plan.
        """
        try:
            fields = json.loads(text)
            fields["regions"] = tuple(_region(region) for region in fields["regions"])
            return cls(**fields)
        except (TypeError, KeyError, ValueError) as error:
            raise PlanError(f"The text is not a plan written by `Plan.to_json()`: {error}. Received: {text[:80]!r}") from error

    def __str__(self) -> str:
        from keras_sn.report import format_plan  # here, because `report` imports this module

        return format_plan(self)


def _region(fields: Mapping) -> Region:
    saved = tuple(Saved(**one) for one in fields["saved"])
    return Region(**{**fields, "layers": tuple(fields["layers"]), "saved": saved})
