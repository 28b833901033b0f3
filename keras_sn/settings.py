"""What the user asked for: budgets and policy, checked when they are given."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from keras_sn import device
from keras_sn.errors import PlanError, shown
from keras_sn.plan import Plan, check_plan
from keras_sn.policies import Policy, check_policy
from keras_sn.sizes import parse_bytes

MARGIN = 0.04
"""Of the budget, left free by `policy="auto"`. On an H200 plain Keras took 1.5 % more than predicted, and an allocator that is
full to the last byte cannot always place a tensor."""

PIECES = 1.25
"""Times its peak: what TensorFlow's allocator must have for a plan with regions, since it gives each block out in one piece.
Enough for 11 of the 14 that were looked at on an H200 (docs/measurements.md); plain Keras needs 1.01."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The user's wishes, checked."""

    memory_budget: int | str | None = None
    host_budget: int | str | None = None
    policy: Policy = "auto"
    plan: Plan | None = None
    verify: str | None = None

    def __post_init__(self):
        if isinstance(self.plan, str):
            object.__setattr__(self, "plan", Plan.from_json(self.plan))
        elif isinstance(self.plan, Plan):
            check_plan(self.plan)
        elif self.plan is not None:
            raise PlanError(f"`plan` must be a `keras_sn.Plan` or what its `to_json()` wrote. Received: plan={shown(self.plan)}")
        check_policy(self.policy)
        if self.verify not in (None, "first_step"):
            raise PlanError(f"`verify` must be None or 'first_step'. Received: verify={self.verify!r}")
        for argument in ("memory_budget", "host_budget"):
            if getattr(self, argument) is not None:
                parse_bytes(getattr(self, argument), argument=argument)

    @classmethod
    def taken_from(cls, arguments: dict[str, Any]) -> "Settings":
        """The settings among keyword arguments, which are taken out; None is the default."""
        given = {one.name: arguments.pop(one.name, None) for one in fields(cls)}
        return cls(**{name: value for name, value in given.items() if value is not None})

    def budget_bytes(self) -> int | None:
        """The memory budget in bytes; what the device has if none was given."""
        if self.memory_budget is None:
            return device.memory_limit_bytes()
        return parse_bytes(self.memory_budget, argument="memory_budget")

    def host_budget_bytes(self) -> int:
        if self.host_budget is None:
            return device.host_limit_bytes() if device.has_gpu() else 0  # else the host's memory is the device's own
        return parse_bytes(self.host_budget, argument="host_budget")

    def config(self) -> dict[str, Any]:
        policy = dict(self.policy) if isinstance(self.policy, Mapping) else self.policy
        return {
            "memory_budget": self.memory_budget,
            "host_budget": self.host_budget,
            "policy": policy,
            "plan": self.plan.to_json() if self.plan else None,
            "verify": self.verify,
        }
