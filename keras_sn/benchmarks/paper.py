"""Ours beside the paper's: every number of SuperNeurons (Wang et al. 2018) that follows from bytes and counts alone.

No device and no Keras: layer graphs of the paper's networks go through the planner's passes, and `rich` prints the
tables. Where the paper slipped, its number stands beside the right one. What the paper calls MB is MiB.
"""

import argparse
from collections.abc import Callable, Sequence
from statistics import geometric_mean, mean

from rich.console import Console
from rich.table import Table

from keras_sn.benchmarks import paper_numbers as published
from keras_sn.benchmarks.paper_networks import NETWORKS, alexnet, deep_resnet
from keras_sn.benchmarks.paper_study import Study, paper_step
from keras_sn.cache import LRU, Belady
from keras_sn.paper_models import choose_workspaces, pool_bytes
from keras_sn.plan import Run
from keras_sn.recompute import COST_AWARE, STRATEGIES
from keras_sn.simulate import MemoryTimeline
from keras_sn.steps import count_recomputed

MIB, GIB, GB = 2**20, 2**30, 10**9
DEVICE_BYTES = 12 * GIB
"""The K40 of tables 4 and 5."""
POOL_BYTES = 7 * GIB
"""For table 3: between AlexNet's need after liveness analysis at batch 896 (6.5 GiB) and at 1024 (7.4 GiB)."""

Row = tuple[str, str, str, str]
"""What, the paper's, ours, a remark."""


def mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.3f} MiB"


def alexnet_peaks() -> list[Row]:
    """Section 4.1: AlexNet, batch 200, technique after technique."""
    study = Study(alexnet(200))
    liveness, pool5 = study.liveness, study.steps[31]
    plain = study.offloaded(study.steps)
    offload = study.offloaded(study.steps, study.convolutions)
    cost_aware = study.offloaded(study.recomputed(COST_AWARE), study.convolutions)
    before_pool5 = liveness.live_in(31) - pool5.reads - pool5.writes
    at_pool5 = offload.device_bytes[offload.instructions.index(Run(pool5))]

    def where(timeline: MemoryTimeline) -> str:
        return f"step {paper_step(timeline)}, {len(timeline.on_device(timeline.peak_index))} tensors"

    def reduction(timeline: MemoryTimeline) -> str:
        return f"{100 - 100 * timeline.peak_bytes / liveness.baseline_bytes:.2f} %"

    baseline = f"{mib(liveness.baseline_bytes)}, {len(liveness.tensors)} tensors"
    return [
        ("baseline", "2,189.437 MiB, 36 tensors", baseline, ""),
        ("+ liveness", "1,489.355 MiB", mib(plain.peak_bytes), f"reduction {reduction(plain)}, paper 31.9 %"),
        ("  where", "step 32, <= 17 tensors", where(plain), "backward POOL5"),
        ("+ offload CONV1-4", "1,132.155 MiB", mib(offload.peak_bytes), "paper slip of 0.1"),
        (
            "  where",
            "step 39, 9 tensors",
            where(offload),
            f"backward POOL2; reduction {reduction(offload)}, paper 48.29 %",
        ),
        ("+ cost-aware", "886.385 (text), 886.23", mib(cost_aware.peak_bytes), "paper slip of 0.155 in the text"),
        ("  where", "step 44", where(cost_aware), f"backward LRN1; reduction {reduction(cost_aware)}"),
        ("tensors before POOL5", "5", str(len(before_pool5)), "paper slip: 13 by size"),
        ("POOL5 after offload", "1,075.9 MiB", mib(at_pool5), "paper slip: leaves out CONV4"),
        ("l_peak", "886.230 MiB", mib(study.layer_peak_bytes), "LRN1 and what it is replayed from"),
        ("largest working set", "-", mib(study.largest_working_set(study.steps)), "so 886 is no hard floor"),
    ]


def formulas() -> list[Row]:
    """Section 3: the formulae for the peak, on AlexNet at batch 200."""
    study = Study(alexnet(200))
    forward = [study.graph.nbytes(*layer.outputs) for layer in study.graph.layers]
    gradients = [{t for t in step.reads | step.writes if t.startswith("grad:")} for step in reversed(study.steps[23:])]
    backward = [sum(study.nbytes[tensor] for tensor in tensors) for tensors in gradients]
    at_step = [sum(forward[: k + 1]) + backward[k] for k in range(23)]
    kept = sum(study.graph.nbytes(*one.outputs) for one in study.graph.layers[:8] if one.layer_type != "CONV")
    peak_k = at_step.index(max(at_step))
    uses = sum(len(step.reads) + len(step.writes) for step in study.steps)
    return [
        ("sum of l_f", "1,469.592 MiB", mib(sum(forward)), "all forward outputs"),
        ("sum of l_b", "719.845 MiB", mib(study.liveness.baseline_bytes - sum(forward)), "all gradients"),
        ("liveness at k = N", "the peak", mib(at_step[22]), "the paper's formula, but AlexNet peaks earlier"),
        (
            "liveness at k = 15",
            "1,489.355 MiB",
            mib(at_step[14]),
            "POOL5; simulated: " + mib(study.liveness.peak_bytes),
        ),
        (
            f"liveness at k = {peak_k + 1}",
            "-",
            mib(at_step[peak_k]),
            "largest only if CONV needs its output (footnote 2)",
        ),
        ("offload at k = 8", "1,132.056 MiB", mib(kept + backward[7] + study.nbytes["CONV5"]), "with CONV2 fetched"),
        ("liveness checks", "N(N-1)/2 = 1,035", f"{uses}", "one pass over the uses: O(N)"),
    ]


def table_1() -> list[Row]:
    """Table 1: extra forward steps and peak of the recomputation strategies."""
    rows = []
    for name, strategies in published.TABLE_1.items():
        study = Study(NETWORKS[name](published.TABLE_1_BATCH[name]))
        eager = study.convolutions if name == "AlexNet" else study.checkpoints
        for strategy in STRATEGIES:
            steps = study.recomputed(strategy)
            peak = mib(study.offloaded(steps, eager).peak_bytes)
            extra, size = strategies[strategy]
            note = "" if name == "AlexNet" else "MiB at batch 32; the paper's batch is unknown"
            rows.append((f"{name}, {strategy}", f"{extra}, {size:.3f} MiB", f"{count_recomputed(steps)}, {peak}", note))
    return rows


def table_3() -> list[Row]:
    """Table 3: AlexNet's transfers per iteration in GB, without and with the tensor cache."""
    rows = []
    for batch, (eager, cached) in published.TABLE_3.items():
        study = Study(alexnet(batch))
        without = study.offloaded(study.steps, study.convolutions).transferred_bytes / GB
        lru, belady = (study.cached(POOL_BYTES, one).transferred_bytes / GB for one in (LRU(), Belady(study.steps)))
        images = study.graph.nbytes(*study.graph.inputs)
        fit = (study.weight_bytes + 3 * study.graph.nbytes(*study.convolutions) + 2 * images) / GB
        note = f"fits: weights + 3 CONV outputs + 2 images = {fit:.2f}"
        rows.append((f"batch {batch}, no cache", f"{eager:.2f}", f"{without:.2f}", note))
        rows.append((f"batch {batch}, cache", f"{cached:.2f}", f"{lru:.2f}", f"7 GiB pool; Belady {belady:.2f}"))
    return rows


def table_4() -> list[Row]:
    """Table 4: ResNet 6/32/n3/6, batch 16, 12 GB."""
    rows = [
        (f"1920 / {name} {depth}", f"{ratio:.4f}", f"{1920 / depth:.4f}", "")
        for name, (depth, ratio) in published.TABLE_4.items()
    ]
    depths = [3 * (6 + 32 + n3 + 6) + 2 for n3 in (595, 596, 788)]
    rows.append(("depth 3(n1+n2+n3+n4)+2", "1920, 2500", f"{depths[0]} or {depths[1]}, {depths[2]}", "the paper rounds"))
    study = Study(deep_resnet(16, 596))
    steps = study.recomputed(COST_AWARE)
    convolutions, everything = (study.offloaded(steps, eager) for eager in (study.convolutions, study.checkpoints))
    weights = f"weights {study.weight_bytes / GIB:.2f} GiB, as much for gradients"

    def gib(nbytes: int) -> str:
        return f"{nbytes / GIB:.2f} GiB"

    thousand = Study(deep_resnet(16, 289)).liveness.peak_bytes / GB
    return [
        *rows,
        ("depth 1001, liveness", "at least 102 GB", f"{thousand:.1f} GB", f"102 at batch {16 * 102 / thousand:.0f}"),
        ("depth 1922, baseline", "-", gib(study.liveness.baseline_bytes), weights),
        ("  liveness", "-", gib(study.liveness.peak_bytes), ""),
        ("  cost-aware, CONV offloaded", "fits 12 GB", gib(convolutions.peak_bytes), "no: joins and forks stay"),
        ("  cost-aware, all checkpoints", "fits 12 GB", gib(everything.peak_bytes), "as the authors' code"),
        ("  the same, on the host", "-", gib(everything.tier_peak_bytes), f"link: {gib(everything.transferred_bytes)}"),
    ]


def table_5() -> list[Row]:
    """Table 5, figure 13: largest batches on 12 GB; ours by bytes alone, beside the weights and their gradients."""
    rows = []
    for name, (best, second, baseline_gb) in published.TABLE_5.items():
        study = Study(NETWORKS[name](16))
        steps = study.recomputed(COST_AWARE)
        images = study.graph.nbytes(*study.graph.inputs)
        room = DEVICE_BYTES - 2 * study.weight_bytes
        peak = study.offloaded(steps, study.checkpoints).peak_bytes
        eager, cache = (16 * room // (held + images) for held in (peak, study.largest_working_set(steps)))
        remark = f"{best / second:.2f}x the second best"
        rows.append((f"{name}, batch", str(best), f"{eager} eager, {cache} cache", remark))
        baseline = study.liveness.baseline_bytes / 16 * best / GB
        rows.append((f"{name}, baseline GB", f"{baseline_gb}", f"{baseline:.1f}", "digitised from figure 13"))
    ratios = [best / second for best, second, _ in published.TABLE_5.values()]
    averages = f"{mean(ratios):.2f}x, geometric {geometric_mean(ratios):.2f}x"
    return [*rows, ("average over the second best", "1.8947x", averages, "paper slip: not from its table")]


def figure_8() -> list[Row]:
    """Figure 8: share of memory by layer type, in %: what the backward steps read and write."""
    rows = []
    for name, shares in published.FIGURE_8.items():
        used = Study(NETWORKS[name](1)).backward_bytes
        total = sum(used[kind] for kind in shares)
        ours = " ".join(f"{kind} {100 * used[kind] / total:.0f}" for kind in shares)
        rows.append((name, " ".join(f"{kind} {share}" for kind, share in shares.items()), ours, "of the types named"))
    return rows


def ratios() -> list[Row]:
    """Quotients of the paper's own speeds (table 2, figures 11 and 14), which no plan can be compared with."""
    pool = [
        (f"table 2, {name}, pool", f"{ratio:.2f}x", f"{with_pool / without:.2f}x", "")
        for name, (without, with_pool, ratio) in published.TABLE_2.items()
    ]
    best, largest = published.FIGURE_14_RESNET50
    return [
        *pool,
        ("figure 11, loss without cache", "33.33 %", f"{100 - 100 / 1.5:.2f} %", "ResNet50: 1.5x with it"),
        ("figure 14, loss at batch 160", "-", f"{100 - 100 * largest / best:.0f} %", "ResNet50, from its own best"),
    ]


def models() -> list[Row]:
    """Sections 3.2.1 and 3.5: the block pool and the dynamic workspaces, as models, on AlexNet."""
    study = Study(alexnet(200))
    eager = study.offloaded(study.steps, study.convolutions)
    pool = pool_bytes(eager.instructions, study.nbytes)
    rows = [("first-fit pool of 1 KiB blocks", "-", mib(pool), f"{pool / eager.peak_bytes - 1:.1%} over the peak")]
    for batch, words in ((100, "every CONV its fastest"), (300, "workspaces shrink")):
        study = Study(alexnet(batch))
        timeline = study.offloaded(study.recomputed(COST_AWARE), study.convolutions)
        reserved_bytes = 2 * study.weight_bytes + study.graph.nbytes(*study.graph.inputs)
        chosen = choose_workspaces(timeline, study.lowerings, capacity_bytes=3 * GIB - reserved_bytes)
        fastest = sum(one.name == "lowered" for one in chosen.values())
        rows.append((f"3 GiB, batch {batch}", words, f"{fastest} of {len(chosen)} fastest", "whole-batch lowering"))
    return rows


TABLES: dict[str, Callable[[], list[Row]]] = {
    table.__name__: table for table in (alexnet_peaks, formulas, table_1, table_3, table_4, table_5, figure_8, models, ratios)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; `argv` names some of them, or none for all."""
    parser = argparse.ArgumentParser(prog="python -m keras_sn.benchmarks paper", description=main.__doc__)
    parser.add_argument("tables", nargs="*", help=f"of {', '.join(TABLES)}")
    names = parser.parse_args(argv).tables
    if unknown := [name for name in names if name not in TABLES]:
        parser.error(f"unknown table; choose from {', '.join(TABLES)}. Received: {unknown[0]!r}")
    console = Console()
    for name in names or TABLES:
        table = Table("", "paper", "ours", "remark", title=TABLES[name].__doc__, title_justify="left")
        for row in TABLES[name]():
            table.add_row(*row)
        console.print(table)
    return 0
