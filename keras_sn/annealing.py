"""Makes a plan faster by random changes, of which some that make it slower are kept for a while (simulated annealing).

What is best for one region depends on all others: bytes that are saved anywhere make room for tensors elsewhere, and copies wait
for each other. Changes one at a time, each for the better, end early. In: a candidate. Out: one at least as fast that fits.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import exp
from random import Random

from keras_sn.candidates import Candidate
from keras_sn.cost import StepCosts
from keras_sn.drafts import Draft, joined, may_leave, with_cut, with_place
from keras_sn.forgetting import Fits, TryOut

LOOKED_AT = 120_000
"""Layer calls that all trials of one search together look at: a few seconds."""
MAX_TRIALS = 4_000
HOTTEST, COLDEST = 0.01, 2e-4
"""By how much slower, as a share of the seconds at first, a change may make a plan to be kept with a probability of 1/e."""
PENALTY = 2.5
"""Of a plan that takes this share of the room too much, as a share of the seconds."""
MOST_CHANGES = 3
"""At a time."""
SMALL = 1e-3
"""Of the room; where smaller tensors wait does not matter."""


def anneal(
    costs: StepCosts,
    start: Candidate,
    room_bytes: float,
    places: Sequence[str],
    try_out: TryOut,
    fits: Fits,
    *,
    seed: int = 0,
) -> Candidate:
    """Looks for a faster plan than one that fits, at plans like it.

    Args:
        costs: The graph on its device.
        start: Where to begin; made from a draft.
        room_bytes: What activations and their gradients may take on the device.
        places: Where tensors may wait, of `plan.PLACES`.
        try_out: Predicts a draft.
        fits: Whether a candidate may be the result.
        seed: Of the random changes.
    """
    random, changes = Random(seed), _Changes(costs, room_bytes, places)

    def score(one: Candidate) -> float:
        return one.seconds / start.seconds + PENALTY * max(0.0, one.peak_bytes / room_bytes - 1)

    best = current = start
    trials = min(MAX_TRIALS, LOOKED_AT // len(costs.graph.layers))
    for trial in range(trials):
        temperature = COLDEST + (HOTTEST - COLDEST) * (1 - trial / trials) ** 2
        draft = current.draft
        for _ in range(random.randint(1, MOST_CHANGES)):
            draft = changes.change(draft, random)
        if draft == current.draft:
            continue
        candidate = try_out(replace(draft, remade=frozenset()))
        if random.random() < exp(min(0.0, score(current) - score(candidate)) / temperature):
            current = candidate
            if fits(current) and current.seconds < best.seconds:
                best = current
    return best


class _Changes:
    """The small changes that may be made to a draft.

    Args: see `anneal`.
    """

    def __init__(self, costs: StepCosts, room_bytes: float, places: Sequence[str]):
        graph = costs.graph
        self.places, self.last_cut = places, len(graph.layers) - 2
        self.tensors = [t for t in graph.producer if may_leave(graph, t) and graph.nbytes(t) >= SMALL * room_bytes]
        read = {tensor for layer in graph.layers for tensor in layer.saved_for_backward} - graph.virtual
        self.savable = [tensor for tensor in self.tensors if tensor in read]

    def change(self, draft: Draft, random: Random) -> Draft:
        kind = random.random()
        if kind < 0.3 or not self.tensors:
            end = random.randint(0, self.last_cut)
            return joined(draft, end) if end in draft.ends else with_cut(draft, end)
        if kind < 0.65 or not self.savable:
            return with_place(draft, random.choice(self.tensors), random.choice(self.places))
        return replace(draft, saved=draft.saved ^ {random.choice(self.savable)})
