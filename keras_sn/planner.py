"""From a layer graph and a policy to a plan. Plain Python; the runtime makes no choices."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, inf

from keras_sn.auto import Auto
from keras_sn.candidates import Candidate, as_given, evaluate
from keras_sn.cost import ON_CPU, CostModel, StepCosts
from keras_sn.errors import BudgetError, PlanError, shown
from keras_sn.fixed_cuts import choose_actions
from keras_sn.fusion import as_compiled
from keras_sn.graph import LayerGraph
from keras_sn.plan import Plan, Region, check_plan
from keras_sn.policies import Policy, check_policy, keep_all, regions_of_policy
from keras_sn.schedule import check_regions
from keras_sn.sizes import format_bytes, is_finite
from keras_sn.spans import SpanCosts
from keras_sn.superneurons import superneurons_regions

NAMED_GRAPH = 10_000
"""Layer calls; in a larger graph `"auto"` does not look at the plans of other policies, which take longer than its own."""
PAPERS_HALVINGS = 6
PAPERS_GRAPH = 1_000
"""Layer calls; in a larger graph one plan of the paper's takes seconds, and it is made for the room alone."""
_RANGES = {
    "reserved_bytes": (0, inf, "a number of bytes, 0 to 1e308"),
    "budget_bytes": (-inf, inf, "a number of bytes, at most 1e308, or None for no limit"),  # less than 0 is told what it takes
    "host_budget_bytes": (0, inf, "a number of bytes, 0 to 1e308, or None for no limit"),
    "margin": (0, 1, "a share of the budget, at least 0 and less than 1"),
}
"""Argument -> the least that it may be, what it must be less than, and both in words."""


def make_plan(
    graph: LayerGraph,
    policy: Policy,
    *,
    batch_size: int,
    reserved_bytes: int,
    budget_bytes: int | None = None,
    margin: float = 0.0,
    host_budget_bytes: int | None = None,
    cost_model: CostModel = ON_CPU,
    compiled: bool = False,
    variables: int = 0,
) -> Plan:
    """Makes the plan of a policy.

    Args:
        graph: The layer graph at this batch size.
        policy: One of `POLICIES`, or a dict from patterns of layer-call names to one of `ACTIONS`.
        batch_size: Samples in a batch.
        reserved_bytes: Weights, state, optimizer slots: what no plan can move, in bytes.
        budget_bytes: What the device may hold, in bytes; None for no limit.
        margin: The share of the budget that `"auto"` leaves free, because a prediction can be a little low.
        host_budget_bytes: What the host may hold, in bytes; None for no limit.
        cost_model: What the device does in a second.
        compiled: Whether XLA compiles the regions.
        variables: How many the model and its optimizer have; the host takes some time for each.

    Returns:
        The plan, with its predicted peak and seconds. A policy other than `"auto"` is carried out whether or not its peak fits.

    Raises:
        PlanError: The policy is unknown or names an unknown layer.
        BudgetError: No plan of `"auto"` fits the budgets, the reserved bytes alone exceed it, or a limit is no such number.
    """
    check_policy(policy)
    limits = _Limits(reserved_bytes, budget_bytes, margin, host_budget_bytes, cost_model.host_seconds(variables))
    limits.check_reserved()
    graph = as_compiled(graph) if compiled else graph
    costs = StepCosts(graph, cost_model)
    plain = evaluate(costs, [keep_all(graph)] if graph.layers else [], 0)
    chosen = _choose(costs, policy, plain, limits)
    return _described(policy if isinstance(policy, str) else "dict", batch_size, chosen, plain, limits, compiled)


def _described(
    policy: str, batch_size: int, chosen: Candidate | None, plain: Candidate, limits: "_Limits", compiled: bool
) -> Plan:
    planned = chosen or plain
    return Plan(
        policy=policy if chosen else "none",
        batch_size=batch_size,
        regions=_annotated(chosen) if chosen else (),
        reserved_bytes=limits.reserved_bytes,
        plain_peak_bytes=limits.reserved_bytes + plain.peak_bytes,
        planned_peak_bytes=limits.reserved_bytes + planned.peak_bytes,
        peak_layer=planned.prediction.peak_layer,
        budget_bytes=limits.budget_bytes,
        copy_window=planned.copy_window,
        offloaded_bytes=planned.prediction.offloaded_bytes,
        planned_seconds=planned.seconds + limits.host_seconds,
        plain_seconds=plain.seconds + limits.host_seconds,
        compiled=compiled,
    )


def adopt_plan(
    graph: LayerGraph,
    plan: Plan,
    *,
    batch_size: int,
    reserved_bytes: int,
    budget_bytes: int | None,
    cost_model: CostModel,
    compiled: bool,
    variables: int = 0,
) -> Plan:
    """Checks a plan that was edited by hand, or made elsewhere, and predicts it anew for this graph and device.

    Args:
        graph: The layer graph.
        plan: The plan.
        batch_size: Samples in a batch.
        reserved_bytes: What no plan can move, in bytes.
        budget_bytes: What the device may hold, in bytes; shown beside the prediction, which may exceed it.
        cost_model: What the device does in a second.
        compiled: Whether XLA compiles the regions.
        variables: How many the model and its optimizer have.

    Raises:
        PlanError: The plan is not one of this graph, or is illegal; see `plan.check_plan` and `schedule.check_regions`.
    """
    check_plan(plan)
    graph = as_compiled(graph) if compiled else graph
    costs = StepCosts(graph, cost_model)
    if plan.regions:
        check_regions(graph, plan.regions)
    wide = next((region for region in plan.regions if len(region.layers) > 1), None)
    if graph.fixed is not None and wide:
        raise PlanError(f"Each layer call of a model with its own `call()` is a region. Received: {wide!r}")
    plain = evaluate(costs, [keep_all(graph)] if graph.layers else [], 0)
    planned = as_given(costs, _with_bytes(graph, plan.regions), plan.copy_window) if plan.regions else None
    limits = _Limits(reserved_bytes, budget_bytes, 0.0, None, cost_model.host_seconds(variables))
    return _described(plan.policy, batch_size, planned, plain, limits, compiled)


def _with_bytes(graph: LayerGraph, regions: Sequence[Region]) -> list[Region]:
    return [
        replace(region, saved=tuple(replace(one, nbytes=graph.nbytes(one.tensor)) for one in region.saved)) for region in regions
    ]


@dataclass(frozen=True, slots=True)
class _Limits:
    reserved_bytes: int
    budget_bytes: int | None
    margin: float
    host_budget_bytes: int | None
    host_seconds: float
    """Of a training step, no limit; what every plan takes beyond what the device does."""

    def __post_init__(self):
        for argument, (least, above, words) in _RANGES.items():
            number = getattr(self, argument)
            if number is None and argument.endswith("budget_bytes"):
                continue
            if not is_finite(number) or not least <= number < above:
                raise BudgetError(f"`{argument}` must be {words}. Received: {argument}={shown(number)}")
            if argument.endswith("_bytes"):
                object.__setattr__(self, argument, int(number))

    @property
    def room_bytes(self) -> int | None:
        """What `"auto"` may give to activations and their gradients."""
        return None if self.budget_bytes is None else int(self.budget_bytes * (1 - self.margin)) - self.reserved_bytes

    def check_reserved(self) -> None:
        if self.budget_bytes is not None and self.reserved_bytes > self.budget_bytes:
            raise BudgetError(
                f"Weights and optimizer slots need {self.reserved_bytes:,} bytes "
                f"({format_bytes(self.reserved_bytes)}), more than the memory budget, and no plan can move them. Raise the "
                "budget, or use a smaller model or an optimizer with fewer slots. "
                f"Received: memory_budget={self.budget_bytes:,} bytes"
            )

    def error(self, smallest: Candidate) -> BudgetError:
        needed = self.reserved_bytes + smallest.peak_bytes
        needed = ceil(needed / (1 - self.margin))
        while int(needed * (1 - self.margin)) < self.reserved_bytes + smallest.peak_bytes:
            needed += 1  # rounding
        return BudgetError(
            f"No plan fits the memory budget: the smallest found needs {needed:,} bytes ({format_bytes(needed)}), with its peak "
            f"at layer {smallest.prediction.peak_layer!r}. Use a smaller batch or image, or raise the budget. "
            f"Received: memory_budget={self.budget_bytes:,} bytes, host_budget={self.host_budget_bytes!r} bytes"
        )


def _choose(costs: StepCosts, policy: Policy, plain: Candidate, limits: _Limits) -> Candidate | None:
    """The plan of a policy; None for plain Keras."""
    graph, room_bytes = costs.graph, limits.room_bytes
    if not graph.layers or policy == "none" or (policy == "auto" and room_bytes is None):
        return None
    if policy == "auto" and plain.peak_bytes <= (room_bytes or 0):
        return None
    if graph.fixed is not None:
        chosen = choose_actions(costs, policy, room_bytes, limits.host_budget_bytes)
        if policy == "auto" and not chosen.fits(room_bytes or 0, limits.host_budget_bytes):
            raise limits.error(chosen)
        return chosen
    if policy == "auto" and room_bytes is not None:
        return _cheapest(costs, room_bytes, limits)
    if policy == "recompute":
        return _least_memory(costs)
    regions = superneurons_regions(graph, room_bytes) if policy == "superneurons" else regions_of_policy(graph, policy)
    return evaluate(costs, regions, room_bytes or 0)


def _least_memory(costs: StepCosts) -> Candidate:
    """The fastest of the plans that need no more than the smallest that recomputes."""
    on_device = Auto(SpanCosts(costs), host_bytes=0)
    return on_device.cheapest(on_device.smallest.peak_bytes) or on_device.smallest


def _cheapest(costs: StepCosts, room_bytes: int, limits: _Limits) -> Candidate:
    named = []
    if len(costs.graph.layers) <= NAMED_GRAPH:
        named = [regions_of_policy(costs.graph, "offload"), *_papers_plans(costs, room_bytes)]
    auto = Auto(SpanCosts(costs), limits.host_budget_bytes, named)
    if found := auto.cheapest(room_bytes):
        return found
    raise limits.error(auto.smallest_at_any_price)


def _papers_plans(costs: StepCosts, room_bytes: int) -> list[list[Region]]:
    """The paper's plans for the room, for half of it, and for the largest room of up to twice that whose plan fits.

    They often need less than their room, and now and then one for less room is faster.
    """
    low, high = 1.0, 2.0
    best = first = superneurons_regions(costs.graph, room_bytes)
    if len(costs.graph.layers) > PAPERS_GRAPH:
        return [first]
    for _ in range(PAPERS_HALVINGS):
        middle = (low + high) / 2
        regions = superneurons_regions(costs.graph, int(middle * room_bytes))
        if evaluate(costs, regions, room_bytes).peak_bytes <= room_bytes:
            low, best = middle, regions
        else:
            high = middle
    return [first, superneurons_regions(costs.graph, room_bytes // 2), *([] if best is first else [best])]


def _annotated(chosen: Candidate) -> tuple[Region, ...]:
    """The regions with their planned seconds, for those who read the plan."""
    pairs = zip(chosen.regions, chosen.timing.recompute_seconds, strict=True)
    return tuple(replace(region, recompute_seconds=seconds) for region, seconds in pairs)
