"""A schedule run on paper: bytes on the device at each instruction, or a `PlanError` for an illegal one.

In: instructions (`Run`, `Free`, `Offload`, `Prefetch`) and the bytes of each tensor. Out: `MemoryTimeline`.
Copies take no time here; what the bytes show is the most that any timing of them can need.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_sn.errors import PlanError
from keras_sn.plan import Free, Instruction, Offload, Prefetch, Run
from keras_sn.steps import RECOMPUTE, Step


@dataclass(frozen=True)
class MemoryTimeline:
    """What a schedule holds on the device and in the tiers."""

    instructions: tuple[Instruction, ...]
    nbytes: Mapping[str, int]
    device_bytes: tuple[int, ...]
    """Per instruction: bytes on the device while it is carried out."""
    tier_peak_bytes: int = 0
    """The most that the tiers hold together; a copy leaves its tier after the last prefetch."""
    offloaded_bytes: int = 0
    prefetched_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        return max(self.device_bytes, default=0)

    @property
    def peak_index(self) -> int:
        """The index of the first instruction with the peak; 0 if there are none."""
        return self.device_bytes.index(self.peak_bytes) if self.device_bytes else 0

    @property
    def peak_step(self) -> Step | None:
        """The step that runs, or runs next, at the peak."""
        runs = (one.step for one in self.instructions[self.peak_index :] if isinstance(one, Run))
        return next(runs, None)

    @property
    def transferred_bytes(self) -> int:
        """Bytes over the link in one training step, both ways."""
        return self.offloaded_bytes + self.prefetched_bytes

    def on_device(self, index: int) -> frozenset[str]:
        """The managed tensors on the device while instruction `index` is carried out."""
        held: set[str] = set()
        for number, instruction in enumerate(self.instructions[: index + 1]):
            match instruction:
                case Run(step):
                    held |= step.writes
                case Prefetch(tensor):
                    held.add(tensor)
                case Free(tensor) if number < index:
                    held.discard(tensor)
        return frozenset(held)


def simulate(instructions: Sequence[Instruction], nbytes: Mapping[str, int]) -> MemoryTimeline:
    """Carries out the instructions on paper.

    Args:
        instructions: The schedule of one training step.
        nbytes: Bytes of every managed tensor, from `tensor_bytes`. Tensors that are missing (the batch, the weights)
            are always on the device and do not count.

    Returns:
        The bytes at each instruction.

    Raises:
        PlanError: The schedule is illegal: it frees too early, twice or what was never made, prefetches too late or
            what was never offloaded, recomputes from a freed tensor, or computes what is there. The message names the
            step and the tensor.
    """
    machine = _Machine(instructions, nbytes)
    for index, instruction in enumerate(instructions):
        machine.carry_out(index, instruction)
    return MemoryTimeline(
        tuple(instructions),
        nbytes,
        tuple(machine.timeline),
        machine.tier_peak_bytes,
        machine.offloaded_bytes,
        machine.prefetched_bytes,
    )


class _Machine:
    """The device and the tiers while a schedule is carried out."""

    def __init__(self, instructions: Sequence[Instruction], nbytes: Mapping[str, int]):
        self.instructions = instructions
        self.nbytes = nbytes
        self.device: set[str] = set()
        self.device_bytes = 0
        self.timeline: list[int] = []
        self.copies: dict[str, set[str]] = {}
        self.tier_bytes = self.tier_peak_bytes = 0
        self.offloaded_bytes = self.prefetched_bytes = 0
        self.freed_at: dict[str, int] = {}
        self.last_step: Step | None = None
        self.last_prefetch = {
            (one.tensor, one.tier): index for index, one in enumerate(instructions) if isinstance(one, Prefetch)
        }

    def carry_out(self, index: int, instruction: Instruction) -> None:
        match instruction:
            case Run(step):
                self.run(index, step)
            case Free(tensor):
                self.require(index, instruction, tensor in self.device)
                self.timeline.append(self.device_bytes)
                self.remove(index, tensor)
            case Offload(tensor, tier):
                self.require(index, instruction, tensor in self.device)
                self.timeline.append(self.device_bytes)
                self.offload(tensor, tier)
            case Prefetch(tensor, tier):
                self.require(index, instruction, tier in self.copies.get(tensor, ()) and tensor not in self.device)
                self.add(tensor)
                self.timeline.append(self.device_bytes)
                self.prefetched_bytes += self.nbytes[tensor]
                if self.last_prefetch[tensor, tier] == index:
                    self.drop_copy(tensor, tier)

    def run(self, index: int, step: Step) -> None:
        self.last_step = step
        for tensor in sorted(step.reads - self.device):
            if tensor in self.nbytes:
                raise self.missing_tensor(index, step, tensor)
        for tensor in sorted(step.writes - step.reads):
            if tensor in self.device or tensor not in self.nbytes:
                reason = "which is on the device already" if tensor in self.device else "whose size is unknown"
                raise PlanError(f"Step {step.layer!r} ({step.phase}) writes {tensor!r}, {reason}. {self.at(index)}")
            self.add(tensor)
        self.timeline.append(self.device_bytes)
        for tensor in step.writes & self.copies.keys():  # a copy in a tier holds the old value
            for tier in tuple(self.copies[tensor]):
                self.drop_copy(tensor, tier)

    def offload(self, tensor: str, tier: str) -> None:
        self.offloaded_bytes += self.nbytes[tensor]
        tiers = self.copies.setdefault(tensor, set())
        if tier not in tiers:
            tiers.add(tier)
            self.tier_bytes += self.nbytes[tensor]
            self.tier_peak_bytes = max(self.tier_peak_bytes, self.tier_bytes)

    def add(self, tensor: str) -> None:
        self.device.add(tensor)
        self.device_bytes += self.nbytes[tensor]

    def remove(self, index: int, tensor: str) -> None:
        self.device.remove(tensor)
        self.device_bytes -= self.nbytes[tensor]
        self.freed_at[tensor] = index

    def drop_copy(self, tensor: str, tier: str) -> None:
        self.copies[tensor].remove(tier)
        self.tier_bytes -= self.nbytes[tensor]

    def at(self, index: int) -> str:
        return f"Received: instruction {index}, {self.instructions[index]!r}"[:300]

    def require(self, index: int, instruction: Free | Offload | Prefetch, is_legal: bool) -> None:
        """Raises PlanError for an instruction that moves a tensor from where it is not."""
        if is_legal:
            return
        tensor, name = instruction.tensor, type(instruction).__name__
        place = "has no copy in its tier"
        if not isinstance(instruction, Prefetch):
            place = "is not on the device" + (", it was freed before" if tensor in self.freed_at else "")
        elif tensor in self.device:
            place = "is on the device already"
        after = f"after step {self.last_step.layer!r} ({self.last_step.phase})" if self.last_step else "before any step"
        raise PlanError(f"{name} of {tensor!r} {after}: the tensor {place}. {self.at(index)}")

    def missing_tensor(self, index: int, step: Step, tensor: str) -> PlanError:
        """Says why a tensor that a step reads is not on the device."""
        rest = self.instructions[index + 1 :]
        verb = "is recomputed from" if step.phase == RECOMPUTE else "reads"
        late = next((i for i, one in enumerate(rest, index + 1) if isinstance(one, Prefetch) and one.tensor == tensor), 0)
        if late:
            reason = f"which is prefetched too late, by instruction {late}: move the prefetch before this step"
        elif tensor in self.freed_at:
            reason = f"which was freed too early, by instruction {self.freed_at[tensor]}: free it later or bring it back"
        else:
            reason = "which no step before it makes"
        return PlanError(f"Step {step.layer!r} ({step.phase}) {verb} {tensor!r}, {reason}. {self.at(index)}")
