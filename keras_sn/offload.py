"""What leaves the device, and when it returns: steps in, instructions out.

Follows Wang et al. 2018 (SuperNeurons, section 3.3): the unified tensor pool with eager offload of convolution outputs
and prefetch one convolution ahead, and the variant driven by the tensor cache, which moves nothing until memory is
short.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from keras_sn.cache import Eviction, TensorCache
from keras_sn.errors import BudgetError, PlanError
from keras_sn.liveness import analyze_liveness
from keras_sn.plan import Free, Instruction, Offload, Prefetch, Run
from keras_sn.steps import BACKWARD, FORWARD, Step


def insert_transfers(steps: Sequence[Step], nbytes: Mapping[str, int], *, eager: Sequence[str] = ()) -> tuple[Instruction, ...]:
    """Runs the steps, frees what is dead, and offloads the `eager` tensors whether memory is short or not.

    An eager tensor leaves after the step that makes it; its device copy goes after the forward step that makes the next
    eager one, so the copy has that long. The last one stays: there is nothing to hide its copy behind. At the backward
    step of each of their layer calls, whatever is read up to the backward step of the one before it is fetched.

    Args:
        steps: The steps, with recompute steps or without.
        nbytes: Bytes of every managed tensor.
        eager: Checkpoints to offload (in the paper, outputs of convolutions), in forward order. With none, the
            instructions are liveness analysis alone.

    Returns:
        The instructions.

    Raises:
        PlanError: An eager tensor is not made by a forward step, or is recomputed.
    """
    dead_after = analyze_liveness(steps, nbytes).dead_after
    moves = _eager_moves(steps, eager)
    instructions: list[Instruction] = []
    for index, step in enumerate(steps):
        instructions.extend(moves.fetch.get(index, ()))
        instructions.append(Run(step))
        instructions.extend(moves.leave.get(index, ()))
        for tensor in dead_after.get(index, ()):
            instructions.append(Free(tensor))
    return tuple(instructions)


def insert_cached_transfers(
    steps: Sequence[Step], nbytes: Mapping[str, int], budget_bytes: int, *, eviction: Eviction | None = None
) -> tuple[Instruction, ...]:
    """Runs the steps, frees what is dead, and offloads only when the device is full (algorithm 2 of the paper).

    Args:
        steps: The steps, with recompute steps or without.
        nbytes: Bytes of every managed tensor.
        budget_bytes: What the managed tensors may take on the device together.
        eviction: Who leaves first; the least recently used by default.

    Returns:
        The instructions. A tensor whose copy in the tier is still valid is not copied out again.

    Raises:
        BudgetError: A step's own tensors do not fit.
    """
    dead_after = analyze_liveness(steps, nbytes).dead_after
    cache = TensorCache(budget_bytes, eviction)
    copied: set[str] = set()
    instructions: list[Instruction] = []
    for index, step in enumerate(steps):
        touched = sorted(tensor for tensor in step.reads | step.writes if tensor in nbytes)
        _check_working_set(step, sum(nbytes[tensor] for tensor in touched), budget_bytes)
        cache.lock(*touched)
        for tensor in touched:
            access = cache.check(tensor, nbytes[tensor], index)
            for victim in access.evicted:
                instructions += [Free(victim)] if victim in copied else [Offload(victim), Free(victim)]
            copied.update(access.evicted)
            if not access.hit and tensor in step.reads:
                instructions.append(Prefetch(tensor))
        instructions.append(Run(step))
        copied -= step.writes
        cache.unlock(*touched)
        for tensor in dead_after.get(index, ()):
            copied.discard(tensor)
            cache.remove(tensor)
            instructions.append(Free(tensor))
    return tuple(instructions)


@dataclass(frozen=True, slots=True)
class _Moves:
    """Step index -> the instructions before and after that step."""

    fetch: dict[int, list[Instruction]] = field(default_factory=dict)
    leave: dict[int, list[Instruction]] = field(default_factory=dict)


def _eager_moves(steps: Sequence[Step], eager: Sequence[str]) -> _Moves:
    made, reads = _uses(steps, set(eager))
    if unknown := sorted(set(eager) - made.keys()):
        raise PlanError(f"An eager tensor must be made by a forward step. Received: {unknown[0]!r}")
    times = sorted(set(made.values()))
    makers = {steps[index].layer for index in times}
    anchors = [index for index, step in enumerate(steps) if step.phase == BACKWARD and step.layer in makers]
    moves = _Moves()
    for tensor in sorted(made, key=lambda tensor: (made[tensor], tensor)):
        following = bisect_right(times, made[tensor])
        if following == len(times):
            continue
        forward = [index for index in reads.get(tensor, ()) if steps[index].phase == FORWARD]
        stays_until = max([times[following], *forward])
        first_use = next((index for index in reads.get(tensor, ()) if index > stays_until), None)
        if first_use is None:
            continue
        before = bisect_left(anchors, first_use)
        fetched_at = anchors[before - 1] if before else first_use
        moves.leave.setdefault(made[tensor], []).append(Offload(tensor))
        moves.leave.setdefault(stays_until, []).append(Free(tensor))
        moves.fetch.setdefault(fetched_at, []).append(Prefetch(tensor))
    return moves


def _uses(steps: Sequence[Step], tensors: set[str]) -> tuple[dict[str, int], dict[str, list[int]]]:
    """For the given tensors: the forward step that makes each, and the steps that read it."""
    made: dict[str, int] = {}
    reads: dict[str, list[int]] = {}
    for index, step in enumerate(steps):
        for tensor in step.reads & tensors:
            reads.setdefault(tensor, []).append(index)
        for tensor in (step.writes - step.reads) & tensors:
            if step.phase != FORWARD:
                raise PlanError(
                    f"An eager tensor cannot also be made in the {step.phase} phase: offload checkpoints only. "
                    f"Received: {tensor!r}, step {step.layer!r}"
                )
            made[tensor] = index
    return made, reads


def _check_working_set(step: Step, needed_bytes: int, budget_bytes: int) -> None:
    if needed_bytes > budget_bytes:
        raise BudgetError(
            f"Layer {step.layer!r} needs {needed_bytes:,} bytes on its own in the {step.phase} phase, so no plan can "
            f"fit. Use a smaller batch. Received: budget_bytes={budget_bytes:,}"
        )
