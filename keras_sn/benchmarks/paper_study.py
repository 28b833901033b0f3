"""One network of the paper with all that the planner's passes make of it. `paper` prints it, tests pin it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from keras_sn.cache import Eviction
from keras_sn.graph import LayerGraph
from keras_sn.liveness import Liveness, analyze_liveness, working_set_bytes
from keras_sn.offload import insert_cached_transfers, insert_transfers
from keras_sn.paper_models import ConvolutionAlgorithm
from keras_sn.plan import Run
from keras_sn.recompute import Segment, choose_checkpoints, find_segments, insert_recomputation, layer_peak_bytes
from keras_sn.simulate import MemoryTimeline, simulate
from keras_sn.steps import RECOMPUTE, Step, tensor_bytes, training_steps


@dataclass(frozen=True)
class Study:
    """A network as the paper measures it: the gradient of the images is made and counted, the images are not."""

    graph: LayerGraph

    @cached_property
    def nbytes(self) -> dict[str, int]:
        return tensor_bytes(self.graph)

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        return training_steps(self.graph, input_gradients=True)

    @cached_property
    def liveness(self) -> Liveness:
        return analyze_liveness(self.steps, self.nbytes)

    @cached_property
    def convolutions(self) -> tuple[str, ...]:
        """What the paper offloads."""
        return tuple(layer.outputs[0] for layer in self.graph.layers if layer.layer_type == "CONV")

    @cached_property
    def checkpoints(self) -> tuple[str, ...]:
        """What the authors' code keeps: outputs of CONV, FC, JOIN, FORK, CONCAT and SOFTMAX."""
        return choose_checkpoints(self.graph)

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        return find_segments(self.graph, self.checkpoints)

    @cached_property
    def layer_peak_bytes(self) -> int:
        return layer_peak_bytes(self.steps, self.graph, self.segments)

    @cached_property
    def weight_bytes(self) -> int:
        return sum(layer.weight_bytes for layer in self.graph.layers)

    @cached_property
    def backward_bytes(self) -> Counter[str]:
        """Layer type -> what the backward steps read and write, a gradient made in place counted twice for LRN.

        That is how the authors' code registers it, and what figure 8 shows.
        """
        result: Counter[str] = Counter()
        for layer in self.graph.layers:
            twice = layer.outputs if layer.layer_type == "LRN" else ()
            gradients = (*layer.outputs, *twice) if layer.gradient_in_place else (*layer.inputs, *layer.outputs)
            result[layer.layer_type] += self.graph.nbytes(*layer.saved_for_backward, *gradients)
        return result

    @cached_property
    def lowerings(self) -> dict[str, list[ConvolutionAlgorithm]]:
        """Per convolution: one without workspace, and the lowering of the whole batch to a matrix, twice as fast."""
        algorithms = {}
        for layer in self.graph.layers:
            if layer.layer_type == "CONV":
                filters = self.graph.tensors[layer.outputs[0]].shape[-1]
                lowered = ConvolutionAlgorithm("lowered", 4 * layer.flops // (2 * filters), 1.0)
                algorithms[layer.name] = [ConvolutionAlgorithm("direct", 0, 2.0), lowered]
        return algorithms

    def recomputed(self, strategy: str) -> tuple[Step, ...]:
        return insert_recomputation(self.steps, self.graph, self.segments, strategy=strategy)

    def offloaded(self, steps: Sequence[Step], eager: Sequence[str] = ()) -> MemoryTimeline:
        """The steps with liveness analysis and eager offload, simulated."""
        return simulate(insert_transfers(steps, self.nbytes, eager=eager), self.nbytes)

    def cached(self, budget_bytes: int, eviction: Eviction | None = None) -> MemoryTimeline:
        """The steps with liveness analysis and the tensor cache, simulated."""
        instructions = insert_cached_transfers(self.steps, self.nbytes, budget_bytes, eviction=eviction)
        return simulate(instructions, self.nbytes)

    def largest_working_set(self, steps: Sequence[Step]) -> int:
        return max(working_set_bytes(step, self.nbytes) for step in steps)


def paper_step(timeline: MemoryTimeline) -> int:
    """The paper's number of the step at the peak: forward and backward steps from 1, recompute steps not counted."""
    before = timeline.instructions[: timeline.peak_index]
    return 1 + sum(isinstance(one, Run) and one.step.phase != RECOMPUTE for one in before)
