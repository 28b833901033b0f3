"""Plans of models that are not graphs of layers: each layer call is a region, kept, recomputed or offloaded as a whole.

`"auto"` recomputes as few as it takes, those first that free the most bytes for a second; where that is not enough, inputs go to
the host, the earliest first, because they wait longest.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

from keras_sn.candidates import Candidate, evaluate, one_ahead
from keras_sn.cost import StepCosts
from keras_sn.drafts import inputs_of, may_leave
from keras_sn.errors import PlanError
from keras_sn.graph import LayerGraph
from keras_sn.plan import DEVICE, HOST, Region, Saved
from keras_sn.policies import Policy, actions_by_pattern

Actions = Mapping[str, str]
"""Names of layer calls -> one of `policies.ACTIONS`; what is missing is kept."""


def regions_of_actions(graph: LayerGraph, actions: Actions) -> list[Region]:
    """One region for each layer call. An offloaded one saves its inputs on the host, and recomputes what it makes inside."""
    kept = {layer.name for layer in graph.layers if actions.get(layer.name, "keep") == "keep"}
    read_by_kept = {t for layer in graph.layers if layer.name in kept for t in layer.saved_for_backward}
    away = {t for layer in graph.layers if actions.get(layer.name) == "offload" for t in layer.inputs if may_leave(graph, t)}
    regions = []
    for layer in graph.layers:
        if layer.name in kept:
            regions.append(Region((layer.name,), recompute=False))
            continue
        inputs = inputs_of([layer])
        places = [HOST if tensor in away - read_by_kept else DEVICE for tensor in inputs]
        saved = (Saved(tensor, place, nbytes=graph.nbytes(tensor)) for tensor, place in zip(inputs, places, strict=True))
        regions.append(Region((layer.name,), tuple(saved)))
    return one_ahead(regions)


def choose_actions(costs: StepCosts, policy: Policy, room_bytes: int | None, host_bytes: int | None) -> Candidate:
    """The plan of a policy.

    Args:
        costs: The graph, with `fixed` layer calls, on its device.
        policy: Any but `"none"`; see `make_plan`.
        room_bytes: What activations and their gradients may take on the device.
        host_bytes: What the host may hold; None for no limit.

    Returns:
        The plan; for `"auto"` the fastest found that fits, or, if none does, the smallest.

    Raises:
        PlanError: The policy needs a graph of layers, or names an unknown layer.
    """
    graph = costs.graph
    calls = [layer.name for layer in graph.layers if layer.name not in (graph.fixed or ())]

    def tried(actions: Actions) -> Candidate:
        return evaluate(costs, regions_of_actions(graph, actions), room_bytes or 0)

    if policy == "superneurons":
        raise PlanError(
            "The paper's policy needs a graph of layers, and this model has its own `call()`. Use 'auto', 'recompute', "
            f"'offload' or a dict. Received: policy={policy!r}"
        )
    if isinstance(policy, Mapping):
        return tried(actions_by_pattern(calls, policy))
    if policy in ("recompute", "offload"):
        return tried(dict.fromkeys(calls, policy))
    return _cheapest(costs, calls, tried, lambda one: one.fits(room_bytes or 0, host_bytes))


def _cheapest(
    costs: StepCosts, calls: Sequence[str], tried: Callable[[Actions], Candidate], fits: Callable[[Candidate], bool]
) -> Candidate:
    recomputed = dict.fromkeys(calls, "recompute")
    if not fits(tried(recomputed)):
        return _first_that_fits((tried(recomputed | dict.fromkeys(part, "offload")) for part in _parts(calls)), fits)
    if costs.graph.is_compiled:  # what is kept would run without XLA, for nothing
        return tried(recomputed)
    ranked = sorted(calls, key=lambda name: _bytes_for_a_second(costs, name), reverse=True)
    found = [tried(dict.fromkeys(part, "recompute")) for part in _parts(ranked)]
    return min((one for one in found if fits(one)), key=lambda one: one.seconds, default=tried(recomputed))


def _parts(names: Sequence[str]) -> list[Sequence[str]]:
    """Ever longer beginnings of a list, at most 32 of them."""
    counts = sorted({round(len(names) * part / 32) for part in range(1, 33)} - {0})
    return [names[:count] for count in counts]


def _first_that_fits(candidates: Iterable[Candidate], fits: Callable[[Candidate], bool]) -> Candidate:
    tried = []
    for one in candidates:
        if fits(one):
            return one
        tried.append(one)
    return min(tried, key=lambda one: one.peak_bytes)


def _bytes_for_a_second(costs: StepCosts, name: str) -> float:
    """What recomputing a layer call frees for each second that it takes."""
    position = costs.graph.position[name]
    return costs.graph.layers[position].internal_bytes / costs.forward[position]
