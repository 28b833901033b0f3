"""Two parts of SuperNeurons as models: what they would give. TensorFlow's own allocator and autotuner do the work.

`FirstFitPool` is the memory pool of Wang et al. 2018 (SuperNeurons, section 3.2.1): 1 KiB blocks, first fit. Beyond the
paper's words it joins neighbouring empty nodes, without which it would soon hold only splinters.
`choose_workspaces` is its dynamic convolution workspace (section 3.5): the fastest algorithm that fits into what is
free.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_sn.errors import BudgetError
from keras_sn.plan import Free, Instruction, Prefetch, Run
from keras_sn.simulate import MemoryTimeline

BLOCK_BYTES = 1024


class FirstFitPool:
    """One pre-allocation, divided into blocks.

    Args:
        capacity_bytes: Its size; a last partial block is not used.
        block_bytes: The size of a block.
    """

    def __init__(self, capacity_bytes: int, *, block_bytes: int = BLOCK_BYTES):
        self.block_bytes = block_bytes
        self.capacity_blocks = capacity_bytes // block_bytes
        self.highest_block = 0
        """The end of the highest node that was ever allocated: what the pool had to be at least."""
        self._allocated: dict[int, int] = {}
        self._empty = [(0, self.capacity_blocks)] if self.capacity_blocks else []

    @property
    def used_bytes(self) -> int:
        return sum(self._allocated.values()) * self.block_bytes

    @property
    def largest_empty_bytes(self) -> int:
        return max((blocks for _, blocks in self._empty), default=0) * self.block_bytes

    def allocate(self, nbytes: int) -> int:
        """Takes the first empty node that is large enough, by address. Even zero bytes take one block.

        Returns:
            The node's address, in blocks.

        Raises:
            BudgetError: No empty node is large enough.
        """
        blocks = max(1, -(-nbytes // self.block_bytes))
        for index, (address, size) in enumerate(self._empty):
            if size >= blocks:
                self._empty[index : index + 1] = [(address + blocks, size - blocks)] if size > blocks else []
                self._allocated[address] = blocks
                self.highest_block = max(self.highest_block, address + blocks)
                return address
        raise BudgetError(
            f"The pool has no empty node of {nbytes:,} bytes; the largest has {self.largest_empty_bytes:,}. Use a "
            f"larger pool. Received: capacity_bytes={self.capacity_blocks * self.block_bytes:,}"
        )

    def free(self, address: int) -> None:
        """Gives a node back and joins it with its empty neighbours."""
        end = address + self._allocated.pop(address)
        index = bisect_left(self._empty, (address, 0))
        first = last = index
        if first and sum(self._empty[first - 1]) == address:
            first -= 1
            address = self._empty[first][0]
        if last < len(self._empty) and self._empty[last][0] == end:
            end += self._empty[last][1]
            last += 1
        self._empty[first:last] = [(address, end - address)]


def pool_bytes(instructions: Sequence[Instruction], nbytes: Mapping[str, int]) -> int:
    """The pool that a schedule needs with first fit, in bytes: the schedule's peak and what fragmentation costs."""
    pool = FirstFitPool(sum(size + BLOCK_BYTES for size in nbytes.values()))
    addresses: dict[str, int] = {}
    for instruction in instructions:
        match instruction:
            case Run(step):
                for tensor in sorted(step.writes - addresses.keys()):
                    addresses[tensor] = pool.allocate(nbytes[tensor])
            case Prefetch(tensor):
                addresses[tensor] = pool.allocate(nbytes[tensor])
            case Free(tensor):
                pool.free(addresses.pop(tensor))
    return pool.highest_block * BLOCK_BYTES


@dataclass(frozen=True, slots=True)
class ConvolutionAlgorithm:
    """One way to compute a convolution."""

    name: str
    workspace_bytes: int
    seconds: float


def choose_workspaces(
    timeline: MemoryTimeline, algorithms: Mapping[str, Sequence[ConvolutionAlgorithm]], *, capacity_bytes: int
) -> dict[tuple[str, str], ConvolutionAlgorithm]:
    """Chooses an algorithm for each convolution and phase: functional tensors first, speed from what is left.

    Args:
        timeline: The simulated schedule.
        algorithms: Layer call -> what it can choose from.
        capacity_bytes: The device, in bytes.

    Returns:
        `(layer, phase)` -> the fastest algorithm that fits at that step.

    Raises:
        BudgetError: None fits.
    """
    chosen = {}
    for instruction, device_bytes in zip(timeline.instructions, timeline.device_bytes, strict=True):
        if not isinstance(instruction, Run) or instruction.step.layer not in algorithms:
            continue
        step = instruction.step
        fitting = [one for one in algorithms[step.layer] if one.workspace_bytes <= capacity_bytes - device_bytes]
        if not fitting:
            raise BudgetError(
                f"No algorithm of layer {step.layer!r} fits in the {step.phase} phase beside {device_bytes:,} bytes of "
                f"tensors. Use a smaller batch. Received: capacity_bytes={capacity_bytes:,}"
            )
        chosen[step.layer, step.phase] = min(fitting, key=lambda one: (one.seconds, one.workspace_bytes))
    return chosen
