"""From a layer graph and a policy to a plan. Plain Python; the runtime makes no choices.

The policies: `"none"`, `"recompute"` (regions that hold about equally many bytes, cut where few bytes cross, as many as give the
lowest predicted peak), `"offload"` (the same regions; what their backward passes read goes to the host instead of being
recomputed), `"superneurons"` (Wang et al. 2018, section 3: a cut after each convolution or dense layer, their outputs offloaded,
the rest recomputed), a dict from name patterns to actions, and `"auto"`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby

from keras_sn.cuts import crossing_bytes, cuts_after, equal_cuts, runs
from keras_sn.errors import BudgetError, PlanError
from keras_sn.graph import LayerGraph
from keras_sn.plan import DEVICE, HOST, Plan, Region, Saved
from keras_sn.predict import Prediction, predict
from keras_sn.sizes import format_bytes

POLICIES = ("auto", "none", "recompute", "offload", "superneurons")
ACTIONS = ("keep", "recompute", "offload")
Policy = str | Mapping[str, str]

PREFETCH_DISTANCE = 2
"""Regions: a copy back starts while the region before it in the backward pass still computes."""
MIN_OFFLOAD_BYTES = 1024
"""Smaller tensors stay: a copy has a fixed cost (torchtune's default)."""
CLOSE_TO_LOWEST = 1.1
"""A predicted peak within this factor of the lowest is as good."""


def make_plan(
    graph: LayerGraph,
    policy: Policy,
    *,
    batch_size: int,
    reserved_bytes: int,
    budget_bytes: int | None = None,
    host_budget_bytes: int | None = None,
) -> Plan:
    """Makes the plan of a policy.

    Args:
        graph: The layer graph at this batch size.
        policy: One of `POLICIES`, or a dict from patterns of layer-call names to one of `ACTIONS`.
        batch_size: Samples in a batch.
        reserved_bytes: Weights, gradients, optimizer slots: what no plan can move, in bytes.
        budget_bytes: What the device may hold, in bytes; None for no limit.
        host_budget_bytes: What the host may hold, in bytes; None for no limit.

    Returns:
        The plan, with its predicted peak. A policy other than `"auto"` is carried out whether or not its peak fits.

    Raises:
        PlanError: The policy is unknown or names an unknown layer.
        BudgetError: No plan of `"auto"` fits the budgets, or the reserved bytes alone exceed it.
    """
    check_policy(policy)
    if budget_bytes is not None and reserved_bytes > budget_bytes:
        raise BudgetError(
            f"Weights, gradients and optimizer slots need {reserved_bytes:,} bytes ({format_bytes(reserved_bytes)}), more than "
            "the memory budget, and no plan can move them. Raise the budget, or use a smaller model or an optimizer with fewer "
            f"slots. Received: memory_budget={budget_bytes:,} bytes"
        )
    plain = predict(graph, [_keep_all(graph)] if graph.layers else [])

    def plan(name: str, regions: Sequence[Region]) -> Plan:
        predicted = predict(graph, regions) if regions else plain
        return Plan(
            policy=name,
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

    if not graph.layers or (policy == "auto" and budget_bytes is None):
        return plan("none", [])
    if policy == "auto":
        regions = _cheapest(graph, plain, reserved_bytes, budget_bytes, host_budget_bytes)
        return plan("auto" if regions else "none", regions)
    return plan(policy if isinstance(policy, str) else "dict", _regions_of_policy(graph, policy))


def check_policy(policy: Policy) -> None:
    """Raises `PlanError` if `policy` is none."""
    if isinstance(policy, str) and policy in POLICIES:
        return
    if isinstance(policy, Mapping) and policy and all(action in ACTIONS for action in policy.values()):
        return
    raise PlanError(
        f"`policy` must be one of {', '.join(map(repr, POLICIES))}, or a non-empty dict from layer-name patterns to one of "
        f"{', '.join(map(repr, ACTIONS))}. Received: policy={policy!r}"
    )


def _regions_of_policy(graph: LayerGraph, policy: Policy) -> list[Region]:
    if isinstance(policy, Mapping):
        return _by_pattern(graph, policy)
    last = len(graph.layers) - 1
    if policy == "recompute":
        return _best_cuts(graph, 0, last, "recompute")
    if policy == "offload":
        return _with_prefetch(_best_cuts(graph, 0, last, "offload"))
    if policy == "superneurons":
        return _with_prefetch(_superneurons(graph))
    return []


def _keep_all(graph: LayerGraph) -> Region:
    return Region(tuple(layer.name for layer in graph.layers), recompute=False)


def _region(graph: LayerGraph, positions: range, action: str) -> Region:
    """One region that keeps, recomputes, or offloads what its backward pass reads."""
    layers = [graph.layers[i] for i in positions]
    names = tuple(layer.name for layer in layers)
    if action == "keep":
        return Region(names, recompute=False)
    made = {tensor for layer in layers for tensor in layer.outputs}
    inputs = tuple(dict.fromkeys(t for layer in layers for t in layer.inputs if t not in made))
    if action == "recompute":
        return Region(names, tuple(Saved(tensor) for tensor in inputs))
    read = dict.fromkeys(t for layer in layers for t in layer.saved_for_backward if t in made)
    return Region(names, tuple(Saved(tensor, _tier(graph, tensor)) for tensor in (*inputs, *read)))


def _tier(graph: LayerGraph, tensor: str) -> str:
    spec = graph.tensors[tensor]
    return HOST if spec.kind != "input" and spec.nbytes >= MIN_OFFLOAD_BYTES else DEVICE


def _best_cuts(graph: LayerGraph, first: int, last: int, action: str) -> list[Region]:
    """Equal regions, as many as give the lowest predicted peak.

    Of numbers that come close to it the largest: small regions compile faster, and more of them are equal.
    """
    length, crossing = last - first + 1, crossing_bytes(graph)
    counts = sorted({min(length, round(1.25**power)) for power in range(64) if 1.25**power < 1.25 * length})
    before = [_region(graph, range(first), "keep")] if first else []
    after = [_region(graph, range(last + 1, len(graph.layers)), "keep")] if last + 1 < len(graph.layers) else []
    candidates = []
    for count in counts:
        regions = [_region(graph, run, action) for run in runs(equal_cuts(graph, first, last, count, crossing), first)]
        candidates.append((predict(graph, [*before, *regions, *after]).peak_bytes, regions))
    near = CLOSE_TO_LOWEST * min(peak for peak, _ in candidates)
    return max((regions for peak, regions in candidates if peak <= near), key=len)


def _superneurons(graph: LayerGraph) -> list[Region]:
    costly = {tensor for layer in graph.layers if layer.is_costly for tensor in layer.outputs}
    regions = []
    for run in runs(cuts_after(graph, lambda layer: layer.is_costly)):
        region = _region(graph, run, "recompute")
        saved = tuple(replace(one, tier=_tier(graph, one.tensor)) if one.tensor in costly else one for one in region.saved)
        regions.append(replace(region, saved=saved))
    return regions


def _by_pattern(graph: LayerGraph, policy: Mapping[str, str]) -> list[Region]:
    names = [layer.name for layer in graph.layers]
    for pattern in policy:
        if not any(_matches(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3) or names[:3]
            raise PlanError(
                f"The policy names {pattern!r}, which matches no layer of the model. Layers with names like it: "
                f"{', '.join(near)}. Received: policy={dict(policy)!r}"
            )
    actions = [next((policy[p] for p in policy if _matches(name, p)), "keep") for name in names]
    regions: list[Region] = []
    for action, group in groupby(range(len(names)), key=actions.__getitem__):
        positions = list(group)
        if action == "keep":
            regions.append(_region(graph, range(positions[0], positions[-1] + 1), action))
        else:
            regions.extend(_best_cuts(graph, positions[0], positions[-1], action))
    return _consistent(_with_prefetch(regions))


def _matches(name: str, pattern: str) -> bool:
    """A pattern matches the whole name of a call, or the name of its layer without the models around it and its use."""
    return fnmatchcase(name, pattern) or fnmatchcase(name.rpartition("/")[2].partition("#")[0], pattern)


def _consistent(regions: Sequence[Region]) -> list[Region]:
    """A tensor that one region keeps on the device does not leave it for another."""
    staying = {one.tensor for region in regions for one in region.saved if one.tier == DEVICE}
    return [
        replace(r, saved=tuple(replace(s, tier=DEVICE, prefetch_at=None) if s.tensor in staying else s for s in r.saved))
        for r in regions
    ]


def _with_prefetch(regions: Sequence[Region]) -> list[Region]:
    """Each copy back starts `PREFETCH_DISTANCE - 1` regions before its use in the backward pass."""
    last = len(regions) - 1
    return [
        replace(
            region,
            saved=tuple(
                one if one.tier == DEVICE else replace(one, prefetch_at=min(index + PREFETCH_DISTANCE - 1, last))
                for one in region.saved
            ),
        )
        for index, region in enumerate(regions)
    ]


def _cheapest(
    graph: LayerGraph, plain: Prediction, reserved_bytes: int, budget_bytes: int, host_budget_bytes: int | None
) -> list[Region]:
    """The first that fits of: plain Keras (no regions), recompute, recompute and offload."""
    if reserved_bytes + plain.peak_bytes <= budget_bytes:
        return []
    recompute = _best_cuts(graph, 0, len(graph.layers) - 1, "recompute")
    smallest = None
    for leaving in _offload_sets(graph, recompute):
        regions = _with_prefetch(_offloaded(recompute, leaving))
        predicted = predict(graph, regions)
        if host_budget_bytes is not None and predicted.offloaded_bytes > host_budget_bytes:
            break
        if reserved_bytes + predicted.peak_bytes <= budget_bytes:
            return regions
        smallest = min(smallest or predicted, predicted, key=lambda one: one.peak_bytes)
    needed = reserved_bytes + smallest.peak_bytes
    raise BudgetError(
        f"No plan fits the memory budget: the smallest found needs {needed:,} bytes ({format_bytes(needed)}), with its peak at "
        f"layer {smallest.peak_layer!r}. Use a smaller batch or image, or raise the budget. "
        f"Received: memory_budget={budget_bytes:,} bytes, host_budget={host_budget_bytes!r} bytes"
    )


def _offload_sets(graph: LayerGraph, regions: Sequence[Region]):
    """Growing sets of region inputs that leave the device: none, then the earliest eighth, and so on.

    Earliest first: they wait longest for their backward pass, so their copies have the most compute to hide behind.
    """
    order = list(dict.fromkeys(one.tensor for region in regions for one in region.saved if _tier(graph, one.tensor) == HOST))
    yield set()
    for eighth in range(1, 9):
        yield set(order[: -(-len(order) * eighth // 8)])


def _offloaded(regions: Sequence[Region], leaving: set[str]) -> list[Region]:
    return [
        replace(r, saved=tuple(replace(one, tier=HOST) if one.tensor in leaving else one for one in r.saved)) for r in regions
    ]
