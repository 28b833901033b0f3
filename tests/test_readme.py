"""The code blocks of README.md and docs/guide.md run as they stand, in order, each page in one namespace."""

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
