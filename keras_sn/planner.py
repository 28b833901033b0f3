"""From a layer graph and a policy to a plan. Plain Python; the runtime makes no choices.

`"auto"` takes the first that fits of: plain Keras; regions, as few of them recomputed as possible; all recomputed, and their
inputs offloaded, the earliest first; the policies that offload most. The other policies are in `policies`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from keras_sn.errors import BudgetError
from keras_sn.graph import LayerGraph
from keras_sn.plan import HOST, Plan, Region
from keras_sn.policies import Policy, check_policy, keep_all, region, regions_of_policy, tier_of, with_prefetch
from keras_sn.predict import Prediction, predict, recomputed
from keras_sn.sizes import format_bytes

MAX_TRIES = 48
"""Predictions that the search for regions to keep may take."""


def make_plan(
    graph: LayerGraph,
    policy: Policy,
    *,
    batch_size: int,
    reserved_bytes: int,
    budget_bytes: int | None = None,
    margin_bytes: int = 0,
    host_budget_bytes: int | None = None,
    compiled: bool = False,
) -> Plan:
    """Makes the plan of a policy.

    Args:
        graph: The layer graph at this batch size.
        policy: One of `POLICIES`, or a dict from patterns of layer-call names to one of `ACTIONS`.
        batch_size: Samples in a batch.
        reserved_bytes: Weights, gradients, optimizer slots: what no plan can move, in bytes.
        budget_bytes: What the device may hold, in bytes; None for no limit.
        margin_bytes: What `"auto"` leaves free of the budget, because a prediction can be a little low.
        host_budget_bytes: What the host may hold, in bytes; None for no limit.
        compiled: Whether XLA compiles the regions.

    Returns:
        The plan, with its predicted peak. A policy other than `"auto"` is carried out whether or not its peak fits.

    Raises:
        PlanError: The policy is unknown or names an unknown layer.
        BudgetError: No plan of `"auto"` fits the budgets, or the reserved bytes alone exceed it.
    """
    check_policy(policy)
    _check_reserved(reserved_bytes, budget_bytes)
    plain = predict(graph, [keep_all(graph)] if graph.layers else [])
    if not graph.layers or policy == "none" or (policy == "auto" and budget_bytes is None):
        regions = []
    elif policy == "auto":
        regions = _cheapest(graph, plain, reserved_bytes, budget_bytes, margin_bytes, host_budget_bytes, compiled)
    else:
        regions = regions_of_policy(graph, policy, compiled=compiled)
        if policy == "recompute":
            regions = keep_what_fits(graph, regions, predict(graph, regions).peak_bytes, compiled=compiled)
    predicted = predict(graph, regions) if regions else plain
    name = policy if isinstance(policy, str) else "dict"
    return Plan(
        policy=name if regions else "none",
        batch_size=batch_size,
        regions=tuple(regions),
        reserved_bytes=reserved_bytes,
        plain_peak_bytes=reserved_bytes + plain.peak_bytes,
        planned_peak_bytes=reserved_bytes + predicted.peak_bytes,
        peak_layer=predicted.peak_layer,
        budget_bytes=budget_bytes,
        offloaded_bytes=predicted.offloaded_bytes,
        slowdown=predicted.slowdown,
    )


def _check_reserved(reserved_bytes: int, budget_bytes: int | None) -> None:
    if budget_bytes is not None and reserved_bytes > budget_bytes:
        raise BudgetError(
            f"Weights, gradients and optimizer slots need {reserved_bytes:,} bytes ({format_bytes(reserved_bytes)}), more than "
            "the memory budget, and no plan can move them. Raise the budget, or use a smaller model or an optimizer with fewer "
            f"slots. Received: memory_budget={budget_bytes:,} bytes"
        )


def _cheapest(
    graph: LayerGraph,
    plain: Prediction,
    reserved_bytes: int,
    budget_bytes: int,
    margin_bytes: int,
    host_budget_bytes: int | None,
    compiled: bool,
) -> list[Region]:
    """The first that fits of: plain Keras (no regions), recompute as little as possible, plans that offload too."""
    room_bytes = budget_bytes - margin_bytes - reserved_bytes
    if plain.peak_bytes <= room_bytes:
        return []
    recompute = regions_of_policy(graph, "recompute", compiled=compiled)
    if predict(graph, recompute).peak_bytes <= room_bytes:
        return keep_what_fits(graph, recompute, room_bytes, compiled=compiled)
    smallest = predict(graph, recompute)
    for regions in _offloading_plans(graph, recompute, compiled):
        predicted = predict(graph, regions)
        if host_budget_bytes is not None and predicted.offloaded_bytes > host_budget_bytes:
            continue
        if predicted.peak_bytes <= room_bytes:
            return regions
        smallest = min(smallest, predicted, key=lambda one: one.peak_bytes)
    needed = reserved_bytes + smallest.peak_bytes + margin_bytes
    raise BudgetError(
        f"No plan fits the memory budget: the smallest found needs {needed:,} bytes ({format_bytes(needed)}), with its peak at "
        f"layer {smallest.peak_layer!r}. Use a smaller batch or image, or raise the budget. "
        f"Received: memory_budget={budget_bytes:,} bytes, host_budget={host_budget_bytes!r} bytes"
    )


def keep_what_fits(graph: LayerGraph, regions: Sequence[Region], room_bytes: int, *, compiled: bool) -> list[Region]:
    """Keeps regions instead of recomputing them, as long as the predicted peak stays within `room_bytes`.

    First those that save the most arithmetic for each byte that they then hold. The last regions before the loss cost nothing:
    when they are kept, nothing else is being recomputed yet.
    """
    regions = list(regions)
    kept = [region(graph, one.layers, "keep", compiled=compiled) for one in regions]
    order = sorted(range(len(regions)), key=lambda index: -_flops_per_byte(graph, regions[index]))
    step = -(-len(order) // MAX_TRIES)
    for start in range(0, len(order), step):
        trial = list(regions)
        for index in order[start : start + step]:
            trial[index] = kept[index]
        if predict(graph, trial).peak_bytes <= room_bytes:
            regions = trial
    return regions


def _flops_per_byte(graph: LayerGraph, one: Region) -> float:
    """The arithmetic of recomputing a region, for each byte that it would hold if it were kept."""
    layers = [graph.layers[graph.position[name]] for name in one.layers]
    saved = {entry.tensor for entry in one.saved}
    held = {tensor for layer in layers for tensor in layer.saved_for_backward} - saved
    return recomputed(layers, saved)[1] / (1 + graph.nbytes(*held))


def _offloading_plans(graph: LayerGraph, recompute: Sequence[Region], compiled: bool) -> Iterator[list[Region]]:
    """Recompute all and let the earliest eighth of the regions' inputs leave the device, then two eighths, and so on; then the
    policies that offload more.

    Earliest first: they wait longest for their backward pass, so their copies have the most compute to hide behind.
    """
    order = list(dict.fromkeys(one.tensor for cut in recompute for one in cut.saved if tier_of(graph, one.tensor) == HOST))
    for eighth in range(1, 9):
        leaving = set(order[: -(-len(order) * eighth // 8)])
        yield with_prefetch(_offloaded(recompute, leaving))
    yield regions_of_policy(graph, "superneurons", compiled=compiled)
    yield regions_of_policy(graph, "offload", compiled=compiled)


def _offloaded(regions: Sequence[Region], leaving: set[str]) -> list[Region]:
    return [
        replace(r, saved=tuple(replace(one, tier=HOST) if one.tensor in leaving else one for one in r.saved)) for r in regions
    ]
