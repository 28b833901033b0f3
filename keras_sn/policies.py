"""The named policies: which regions a policy cuts, and what each region does with what its backward pass reads.

`"offload"`: regions that hold about equally many bytes, cut where few bytes cross, as many as give the lowest predicted peak;
what their backward passes read goes to the host. A dict gives an action for each pattern of layer-call names; what it recomputes
is cut likewise. `"superneurons"`, `"recompute"` and `"auto"` have modules of their own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from itertools import groupby

from keras_sn.candidates import one_ahead
from keras_sn.cuts import crossing_bytes, equal_cuts, runs
from keras_sn.drafts import inputs_of, may_leave
from keras_sn.errors import PlanError
from keras_sn.graph import LayerGraph
from keras_sn.plan import DEVICE, HOST, Region, Saved
from keras_sn.predict import predict

POLICIES = ("auto", "none", "recompute", "offload", "superneurons")
ACTIONS = ("keep", "recompute", "offload")
Policy = str | Mapping[str, str]

CLOSE_TO_LOWEST = 1.1
"""A predicted peak within this factor of the lowest is as good."""


def check_policy(policy: Policy) -> None:
    """Raises `PlanError` if `policy` is none."""
    if isinstance(policy, str) and policy in POLICIES:
        return
    is_text = isinstance(policy, Mapping) and all(isinstance(one, str) for one in (*policy, *policy.values()))
    if is_text and policy and all(action in ACTIONS for action in policy.values()):
        return
    raise PlanError(
        f"`policy` must be one of {', '.join(map(repr, POLICIES))}, or a non-empty dict from layer-name patterns to one of "
        f"{', '.join(map(repr, ACTIONS))}. Received: policy={policy!r}"
    )


def regions_of_policy(graph: LayerGraph, policy: Policy) -> list[Region]:
    """The regions of one of the policies of this module.

    Args:
        graph: The layer graph, with at least one layer call.
        policy: `"offload"` or a dict.

    Raises:
        PlanError: A dict names an unknown layer.
    """
    if isinstance(policy, Mapping):
        return _by_pattern(graph, policy)
    return one_ahead(best_cuts(graph, range(len(graph.layers)), policy))


def keep_all(graph: LayerGraph) -> Region:
    """The whole graph as plain Keras runs it."""
    return Region(tuple(layer.name for layer in graph.layers), recompute=False)


def region(graph: LayerGraph, names: Sequence[str], action: str) -> Region:
    """One region that keeps, recomputes, or offloads what its backward pass reads.

    To keep means, without XLA, to run as plain Keras does. XLA fuses a layer that is cheap to recompute into the readers of its
    output, so there it means to save the inputs and the outputs of costly layers, and nothing else.
    """
    layers = graph.layers_named(names)
    if action == "keep" and not graph.is_compiled:
        return Region(tuple(names), recompute=False)
    inputs, inside = inputs_of(layers), []
    if action == "keep":
        inside = [tensor for layer in layers if layer.is_costly for tensor in layer.outputs]
    elif action == "offload":
        made = {tensor for layer in layers for tensor in layer.outputs}
        inside = list(dict.fromkeys(t for layer in layers for t in layer.saved_for_backward if t in made))
    away = {tensor for tensor in (*inputs, *inside) if action == "offload" and may_leave(graph, tensor)}
    saved = (Saved(t, HOST if t in away else DEVICE, nbytes=graph.nbytes(t)) for t in (*inputs, *inside))
    return Region(tuple(names), tuple(saved))


def best_cuts(graph: LayerGraph, positions: range, action: str) -> list[Region]:
    """Equal regions, as many as give the lowest predicted peak when the layer calls around `positions` are kept.

    Of numbers that come close to it the largest: small regions compile faster, and more of them are equal.
    """
    names = [layer.name for layer in graph.layers]
    first, last, length = positions[0], positions[-1], len(positions)
    crossing = crossing_bytes(graph)
    counts = sorted({min(length, round(1.25**power)) for power in range(64) if 1.25**power < 1.25 * length})
    around = [region(graph, part, "keep") for part in (names[:first], names[last + 1 :]) if part]
    before, after = around[: bool(first)], around[bool(first) :]
    candidates = []
    for count in counts:
        cut = runs(equal_cuts(graph, first, last, count, crossing), first)
        regions = [region(graph, names[run.start : run.stop], action) for run in cut]
        candidates.append((predict(graph, [*before, *regions, *after]).peak_bytes, regions))
    near = CLOSE_TO_LOWEST * min(peak for peak, _ in candidates)
    return max((regions for peak, regions in candidates if peak <= near), key=len)


def _by_pattern(graph: LayerGraph, policy: Mapping[str, str]) -> list[Region]:
    names = [layer.name for layer in graph.layers]
    actions = actions_by_pattern(names, policy)
    regions: list[Region] = []
    for action, group in groupby(range(len(names)), key=lambda position: actions[names[position]]):
        positions = list(group)
        positions = range(positions[0], positions[-1] + 1)
        if action == "keep":
            regions.append(region(graph, names[positions.start : positions.stop], action))
        else:
            regions.extend(best_cuts(graph, positions, action))
    return _consistent(one_ahead(regions))


def actions_by_pattern(names: Sequence[str], policy: Mapping[str, str]) -> dict[str, str]:
    """The action for each layer call, by the first pattern that matches it; `"keep"` where none does.

    Raises:
        PlanError: A pattern matches no name.
    """
    for pattern in policy:
        if not any(_matches(name, pattern) for name in names):
            near = get_close_matches(pattern, names, n=3) or names[:3]
            raise PlanError(
                f"The policy names {pattern!r}, which matches no layer of the model. Layers with names like it: "
                f"{', '.join(near)}. Received: policy={dict(policy)!r}"
            )
    return {name: next((policy[p] for p in policy if _matches(name, p)), "keep") for name in names}


def _matches(name: str, pattern: str) -> bool:
    """A pattern matches the whole name of a call, or the name of its layer without what is around it and its use.

    What matches a model or a composite layer matches all calls inside.
    """
    parts = name.split("/")
    paths = ["/".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(one, pattern) for one in (*paths, *(part.partition("#")[0] for part in parts)))


def _consistent(regions: Sequence[Region]) -> list[Region]:
    """A tensor that one region keeps on the device does not leave it for another."""
    staying = {one.tensor for region in regions for one in region.saved if one.tier == DEVICE}
    return [
        replace(r, saved=tuple(replace(s, tier=DEVICE, prefetch_at=None) if s.tensor in staying else s for s in r.saved))
        for r in regions
    ]
