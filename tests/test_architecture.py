"""The architecture: the planner is plain Python, imports point one way, and nothing goes in circles."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "keras_sn"
LAYERS = [
    *("errors", "sizes", "graph", "fusion", "steps", "plan", "replays", "made_again", "backward_memory", "gradients"),
    *("region_bytes", "liveness", "recompute", "cache", "cost", "offload", "simulate", "paper_models", "cuts", "predict"),
    *("drafts", "timing", "candidates", "policies", "superneurons", "spans", "exact_spans", "labels", "search", "improve"),
    *("forgetting", "annealing", "repeats", "rooms", "auto", "schedule", "fixed_cuts", "planner", "order"),
]
"""The modules that plan, in the order in which they may import one another."""
FOREIGN = {"keras", "tensorflow", "scipy", "rich", "matplotlib", "psutil"}


def imported_names(path: Path, *, everywhere: bool) -> set[str]:
    """Modules that a file imports, at its top level or also inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = ast.walk(tree) if everywhere else tree.body
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path.name}: import by absolute name"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def modules_of(names: set[str]) -> set[str]:
    """The modules of keras_sn among imported names, by their short names."""
    short = {name.split(".")[1] for name in names if name.startswith("keras_sn.")}
    return {name for name in short if (PACKAGE / f"{name}.py").exists()}


@pytest.mark.parametrize("module", LAYERS)
def test_the_planner_is_plain_python(module):
    names = imported_names(PACKAGE / f"{module}.py", everywhere=True)
    assert not FOREIGN & {name.partition(".")[0] for name in names}


@pytest.mark.parametrize("module", LAYERS)
def test_imports_point_one_way(module):
    before = set(LAYERS[: LAYERS.index(module)])
    assert modules_of(imported_names(PACKAGE / f"{module}.py", everywhere=False)) <= before


def test_no_import_goes_in_circles():
    imports = {
        path.stem: modules_of(imported_names(path, everywhere=False)) for path in PACKAGE.glob("*.py") if path.stem != "__init__"
    }
    assert len(tuple(TopologicalSorter(imports).static_order())) >= len(LAYERS)  # raises CycleError


def test_nothing_imports_the_benchmarks():
    for path in PACKAGE.glob("*.py"):
        if path.stem != "__main__":
            assert not any(name.startswith("keras_sn.benchmarks") for name in imported_names(path, everywhere=True))


def test_the_test_finds_imports(tmp_path):
    """A silent mistake here would switch the tests above off."""
    file = tmp_path / "module.py"
    file.write_text("import keras.ops\nfrom keras_sn.plan import Plan\ndef f():\n    from keras_sn import graph\n")
    assert imported_names(file, everywhere=False) == {"keras.ops", "keras_sn.plan", "keras_sn.plan.Plan"}
    assert modules_of(imported_names(file, everywhere=True)) == {"plan", "graph"}
