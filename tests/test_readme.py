"""The code blocks of README.md and docs/guide.md run as they stand, in order, each page in one namespace; references exist."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md"])
def test_code_blocks_run(page, capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    assert blocks
    namespace = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)
    assert "regions recomputed" in capsys.readouterr().out.replace("\n", " ") or page == "README.md"
    assert namespace["model"].plan is not None


def test_links_lead_somewhere():
    for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), (page, link)


def missing_tests(text):
    """References `tests/file.py::name` in a text that lead to no test."""

    def names(path):
        return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}

    found = re.findall(r"(tests/\w+\.py)::(\w+)", text)
    known = {file: names(ROOT / file) if (ROOT / file).exists() else set() for file, _ in found}
    return [f"{file}::{name}" for file, name in found if not name.startswith("test_") or name not in known[file]]


def test_the_behaviours_are_shown_by_tests_that_exist():
    text = (ROOT / "docs/behaviours.md").read_text()
    assert len(re.findall("::test_", text)) > 100
    assert not missing_tests(text)
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| behaviour")]
    assert all(line.count(" | ") == 1 for line in rows)
    here = "tests/test_readme.py::test_links_lead_somewhere"
    assert missing_tests(f"{here} {here}_else tests/gone.py::test_a") == [f"{here}_else", "tests/gone.py::test_a"]
