"""The plan: what is saved, where, and when it comes back. Data, and what it may hold; `planner` makes it, `runtime` runs it.

Two levels. `Region` and `Saved` are what the TensorFlow runtime executes. `Run`, `Free`, `Offload` and `Prefetch` are the
instructions of a step-by-step schedule, which `simulate` runs on paper.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from keras_sn.errors import PlanError, shown
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
    """The index of the region whose backward pass starts the copy back from the tier; None means this region's own."""
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
    """A region's forward or backward pass waits for the copies of the forward pass that ran this many before it: 0 for its own,
    twice as many as there are regions, or more, for none."""
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
            PlanError: `text` is not a plan, or a field of it holds what it cannot; see `check_plan`.
        """
        try:
            given = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise PlanError(f"The text is not a plan written by `Plan.to_json()`: {error}. Received: {shown(text)}") from error
        plan = _made(cls, given, "The text")
        if isinstance(plan.regions, list):
            plan = replace(plan, regions=tuple(_region(index, one) for index, one in enumerate(plan.regions)))
        check_plan(plan)
        return plan

    def __str__(self) -> str:
        from keras_sn.report import format_plan  # here, because `report` imports this module

        return format_plan(self)


def _region(index: int, given: Any) -> Region:
    region = _made(Region, given, f"Region {index} of the text")
    if isinstance(region.layers, list):
        region = replace(region, layers=tuple(region.layers))
    if isinstance(region.saved, list):
        where = f"What region {index} of the text saves"
        region = replace(region, saved=tuple(_made(Saved, one, where) for one in region.saved))
    return region


def _made(kind: Callable[..., Any], given: Any, where: str) -> Any:
    try:
        return kind(**given)
    except TypeError as error:
        raise PlanError(f"{where} is not as `Plan.to_json()` writes it: {error}. Received: {shown(given)}") from error


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a field may hold."""

    text: str
    holds: Callable[[Any], bool]


def _one_of(names: Sequence[str]) -> _Kind:
    return _Kind(f"one of {', '.join(map(repr, names))}", lambda value: isinstance(value, str) and value in names)


def _several(of: type, text: str, least: int = 0) -> _Kind:
    def holds(values: Any) -> bool:
        return isinstance(values, tuple | list) and len(values) >= least and all(isinstance(value, of) for value in values)

    return _Kind(text, holds)


def _is_number(value: Any, kind: Any, most: float = 1e308) -> bool:
    """No larger number can be divided and shown; and JSON writes `True` as another thing, and no integer of NumPy."""
    return isinstance(value, kind) and not isinstance(value, bool) and 0 <= value <= most


_KINDS: dict[Any, _Kind] = {
    int: _Kind("an integer, 0 to 1e308", lambda value: _is_number(value, int)),
    int | None: _Kind("an integer, 0 to 1e308, or None", lambda value: value is None or _is_number(value, int)),
    float: _Kind("a number of seconds, 0 to 1e308", lambda value: _is_number(value, int | float)),
    bool: _Kind("True or False", lambda value: isinstance(value, bool)),
    str: _Kind("a text", lambda value: isinstance(value, str)),
    tuple[str, ...]: _several(str, "a tuple (in JSON a list) of the names of one or more layer calls", 1),
    tuple[Saved, ...]: _several(Saved, "a tuple (in JSON a list) of `Saved`"),
    tuple[Region, ...]: _several(Region, "a tuple (in JSON a list) of `Region`"),
}
"""By the type of a field."""


def check_plan(plan: Plan) -> None:
    """Checks what the fields of a plan hold, whatever the model; `schedule.check_regions` checks it against one.

    Raises:
        PlanError: A field is of another type or out of its range, a region saves a tensor twice, or one that is kept saves any.
    """
    from keras_sn.policies import POLICIES  # here, because `policies` imports this module

    _check(plan, _kinds(Plan, policy=_one_of((*POLICIES, "dict"))), "the plan")
    check_fields(plan.regions)


def check_fields(regions: Sequence[Region]) -> None:
    """The part of `check_plan` that looks at the regions; see there."""
    last = len(regions) - 1
    start = _Kind(f"the index of a region, 0 to {last}, or None", lambda value: value is None or _is_number(value, int, last))
    of_region, of_saved = _kinds(Region), _kinds(Saved, tier=_one_of(PLACES), prefetch_at=start)
    for index, region in enumerate(regions):
        _check(region, of_region, "region {}", index)
        for one in region.saved:
            _check(one, of_saved, "{} in region {}", one.tensor, index)
        tensors = [one.tensor for one in region.saved]
        if len(set(tensors)) < len(tensors):
            twice = next(tensor for tensor in tensors if tensors.count(tensor) > 1)
            raise PlanError(f"Region {index} saves a tensor more than once: keep one of the entries. Received: {twice!r}")
        if tensors and not region.recompute:
            raise PlanError(
                f"Region {index} is kept (`recompute=False`), where TensorFlow saves what its gradient needs: empty `saved`, or "
                f"recompute it. Received: {tensors[0]!r}"
            )


def _kinds(of: type, **special: _Kind) -> dict[str, _Kind]:
    return {one.name: _KINDS[one.type] for one in fields(of)} | special


def _check(owner: Any, kinds: Mapping[str, _Kind], where: str, *names: Any) -> None:
    for name, kind in kinds.items():
        value = getattr(owner, name)
        if not kind.holds(value):
            place = where.format(*map(shown, names))
            raise PlanError(f"`{name}` of {place} must be {kind.text}. Received: {name}={shown(value)}")
