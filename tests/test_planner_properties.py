"""Properties of the planner's passes on random layer graphs: legal, within budget, and the same values as before."""

from collections.abc import Iterable
from random import Random

import pytest

from keras_sn.cache import LRU, Belady, CostPerByteStaleness
from keras_sn.errors import BudgetError, PlanError
from keras_sn.graph import LayerCall, LayerGraph, TensorSpec
from keras_sn.liveness import analyze_liveness, working_set_bytes
from keras_sn.offload import insert_cached_transfers, insert_transfers
from keras_sn.paper_models import FirstFitPool, pool_bytes
from keras_sn.plan import Free, Offload, Prefetch, Run
from keras_sn.recompute import STRATEGIES, choose_checkpoints, find_segments, insert_recomputation
from keras_sn.simulate import simulate
from keras_sn.steps import count_recomputed, execution_route, tensor_bytes, training_steps

SEEDS = range(30)


def random_graph(seed: int) -> LayerGraph:
    """Up to 25 layer calls: forks, joins, several outputs, dead ends, integers, zero sizes, gradients in place."""
    random = Random(seed)
    tensors = {name: TensorSpec(name, (random.randint(1, 9),), "float32", "input") for name in ("x0", "x1")}
    layers = []
    for index in range(random.randint(1, 25)):
        recent = list(tensors)[-random.choice([1, 2, 6, 100]) :]
        inputs = tuple(random.sample(recent, min(len(recent), random.choice([1, 1, 1, 2, 3]))))
        outputs = tuple(f"t{index}:{number}" for number in range(random.choice([1, 1, 1, 2])))
        in_place = random.random() < 0.4
        for output in outputs:
            shape = tensors[inputs[0]].shape if in_place else (random.choice([0, *range(1, 40)]),)
            tensors[output] = TensorSpec(output, shape, "int32" if random.random() < 0.05 else "float32")
        saved = tuple(tensor for tensor in (*inputs, *outputs) if random.random() < 0.6)
        costly = random.random() < 0.3
        layers.append(LayerCall(f"l{index}", "any", inputs, outputs, saved, is_costly=costly, gradient_in_place=in_place))
    read = {tensor for layer in layers for tensor in layer.inputs}
    made = [tensor for layer in layers for tensor in layer.outputs]
    outputs = [tensor for tensor in made if (tensor not in read and random.random() < 0.8) or random.random() < 0.05]
    return LayerGraph(tuple(layers), tensors, ("x0", "x1"), tuple(outputs or made[-1:]))


def results(instructions: Iterable, graph: LayerGraph) -> dict:
    """What every forward and backward step writes, as formulas: what the step is and what it read."""
    device = {name: hash(name) for name in graph.inputs}
    tier: dict[str, int] = {}
    written = {}
    for instruction in instructions:
        match instruction:
            case Run(step):
                phase = "forward" if step.phase == "recompute" else step.phase
                read = tuple(sorted((tensor, device[tensor]) for tensor in step.reads))
                values = {tensor: hash((step.layer, phase, tensor, read)) for tensor in step.writes}
                device |= values
                if step.phase != "recompute":
                    written[step.layer, step.phase] = values
            case Free(tensor):
                del device[tensor]
            case Offload(tensor):
                tier[tensor] = device[tensor]
            case Prefetch(tensor):
                device[tensor] = tier[tensor]
    return written


def checkpoints_of(graph: LayerGraph, seed: int) -> tuple[str, ...]:
    """The paper's choice, or any."""
    if seed % 2:
        return choose_checkpoints(graph)
    return tuple(tensor for tensor in graph.producer if Random(f"{seed} {tensor}").random() < 0.2)


def rewritten(graph: LayerGraph, strategy: str | None, seed: int):
    """The training steps, recomputed if a strategy is given."""
    steps = training_steps(graph)
    if strategy is None:
        return steps
    segments = find_segments(graph, checkpoints_of(graph, seed))
    return insert_recomputation(steps, graph, segments, strategy=strategy)


@pytest.mark.parametrize("seed", SEEDS)
def test_route_is_the_papers_recursion(seed):
    graph = random_graph(seed)
    producers = [{graph.producer[t] for t in layer.inputs if t in graph.producer} for layer in graph.layers]
    arrived = [0] * len(graph.layers)
    route = []

    def visit(index):
        arrived[index] += 1
        if arrived[index] < len(producers[index]):
            return
        route.append(graph.layers[index])
        for follower, needed in enumerate(producers):
            if index in needed:
                visit(follower)

    for index, needed in enumerate(producers):
        if not needed:
            visit(index)
    assert execution_route(graph) == tuple(route)
    LayerGraph(execution_route(graph), graph.tensors, graph.inputs, graph.outputs)  # refuses what is out of order


@pytest.mark.parametrize("seed", SEEDS)
def test_liveness_is_its_definition(seed):
    graph = random_graph(seed)
    steps, nbytes = rewritten(graph, STRATEGIES[seed % 3], seed), tensor_bytes(graph)
    liveness = analyze_liveness(steps, nbytes)
    live: set[str] = set()
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        assert liveness.live_out(index) == live
        during = live | {tensor for tensor in step.reads | step.writes if tensor in nbytes}
        live = (live - (step.writes - step.reads)) | {tensor for tensor in step.reads if tensor in nbytes}
        assert liveness.live_in(index) == live
        assert liveness.live_during(index) == during
        assert liveness.live_bytes[index] == sum(nbytes[tensor] for tensor in during)
    assert not live
    assert liveness.peak_bytes <= liveness.baseline_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_recomputation_keeps_the_steps_and_counts_as_it_should(seed):
    graph = random_graph(seed)
    steps = training_steps(graph)
    extra = {}
    for strategy in STRATEGIES:
        result = rewritten(graph, strategy, seed)
        assert tuple(step for step in result if step.phase != "recompute") == steps
        extra[strategy] = count_recomputed(result)
        lifetimes = analyze_liveness(result, tensor_bytes(graph)).lifetimes
        used = {lifetime.made for lifetime in lifetimes if lifetime.last_used > lifetime.made}
        assert {index for index, step in enumerate(result) if step.phase == "recompute"} <= used
    assert extra["speed-centric"] <= extra["cost-aware"] <= extra["memory-centric"]
    replayed = [step.layer for step in rewritten(graph, "speed-centric", seed) if step.phase == "recompute"]
    assert len(replayed) == len(set(replayed))


@pytest.mark.parametrize("strategy", [None, *STRATEGIES])
@pytest.mark.parametrize("seed", SEEDS)
def test_eager_schedules_are_legal_and_compute_the_same(seed, strategy):
    graph = random_graph(seed)
    steps, nbytes = rewritten(graph, strategy, seed), tensor_bytes(graph)
    plain = insert_transfers(steps, nbytes)
    assert simulate(plain, nbytes).peak_bytes == analyze_liveness(steps, nbytes).peak_bytes
    eager = insert_transfers(steps, nbytes, eager=checkpoints_of(graph, seed))
    timeline = simulate(eager, nbytes)
    turn = max(i for i, one in enumerate(eager) if isinstance(one, Run) and one.step.phase == "forward")
    assert not any(isinstance(one, Prefetch) for one in eager[:turn])
    assert timeline.device_bytes == tuple(
        sum(nbytes[tensor] for tensor in timeline.on_device(index)) for index in range(len(eager))
    )
    expected = results([Run(step) for step in training_steps(graph)], graph)
    assert results(plain, graph) == results(eager, graph) == expected
    assert pool_bytes(eager, nbytes) >= timeline.peak_bytes


@pytest.mark.parametrize("seed", SEEDS)
def test_cached_schedules_fit_any_budget_that_holds_one_step(seed):
    graph = random_graph(seed)
    steps, nbytes = rewritten(graph, [None, *STRATEGIES][seed % 4], seed), tensor_bytes(graph)
    floor = max(working_set_bytes(step, nbytes) for step in steps)
    plenty = analyze_liveness(steps, nbytes).peak_bytes
    expected = results([Run(step) for step in training_steps(graph)], graph)
    for budget in {floor, (floor + plenty) // 2, plenty}:
        for eviction in (LRU(), Belady(steps), CostPerByteStaleness(dict.fromkeys(nbytes, 1.0))):
            instructions = insert_cached_transfers(steps, nbytes, budget, eviction=eviction)
            timeline = simulate(instructions, nbytes)
            assert timeline.peak_bytes <= budget
            assert results(instructions, graph) == expected
            if budget == plenty:
                assert timeline.transferred_bytes == 0
    if floor:
        worst = next(step for step in steps if working_set_bytes(step, nbytes) == floor)
        with pytest.raises(BudgetError, match=f"{worst.layer!r} needs {floor:,} bytes.*{worst.phase} phase"):
            insert_cached_transfers(steps, nbytes, floor - 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_illegal_edits_are_found_and_name_step_and_tensor(seed):
    random = Random(seed)
    graph = random_graph(seed)
    nbytes = tensor_bytes(graph)
    steps = rewritten(graph, STRATEGIES[seed % 3], seed)
    legal = insert_transfers(steps, nbytes, eager=checkpoints_of(graph, seed))
    frees = [index for index, one in enumerate(legal) if isinstance(one, Free)]
    index = random.choice(frees)
    tensor = legal[index].tensor
    reader = max(i for i in range(index) if isinstance(legal[i], Run) and tensor in legal[i].step.reads | legal[i].step.writes)
    edits = [[*legal[:index], legal[index], *legal[index:]]]
    if tensor in legal[reader].step.reads:
        edits.append([*legal[:reader], legal[index], *legal[reader:index], *legal[index + 1 :]])
    for edited in edits:
        with pytest.raises(PlanError, match=f"{tensor!r}") as error:
            simulate(edited, nbytes)
        assert "step" in str(error.value)
    for index in [i for i, one in enumerate(legal) if isinstance(one, Prefetch)]:
        with pytest.raises(PlanError, match=f"{legal[index].tensor!r}, which was freed too early"):
            simulate([*legal[:index], *legal[index + 1 :]], nbytes)


@pytest.mark.parametrize("seed", SEEDS)
def test_pool_nodes_never_overlap(seed):
    random = Random(seed)
    pool = FirstFitPool(64 * 1024)
    nodes: dict[int, int] = {}
    for _ in range(200):
        if nodes and random.random() < 0.5:
            address = random.choice(list(nodes))
            pool.free(address)
            del nodes[address]
            continue
        size = random.randint(0, 9000)
        blocks = max(1, -(-size // 1024))
        ends = sorted((a + n for a, n in nodes.items()), reverse=True)
        try:
            address = pool.allocate(size)
        except BudgetError:
            assert pool.largest_empty_bytes < blocks * 1024
            continue
        assert all(address + blocks <= a or a + n <= address for a, n in nodes.items())
        assert address == 0 or address in ends  # first fit leaves no gap before a node
        nodes[address] = blocks
        assert pool.used_bytes == 1024 * sum(nodes.values())
    for address in nodes:
        pool.free(address)
    assert pool.largest_empty_bytes == 64 * 1024
