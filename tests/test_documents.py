"""What the documents show is true: their Python runs and prints what they say; what they point to is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
# The site shows some documents a second time, by links that are left out here.
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.is_symlink()]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]

# Python, and what it prints where a block without a language follows at once.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n```\n(?P<printed>.*?)^```$)?", re.DOTALL | re.MULTILINE)


def blocks() -> list[Any]:
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(match["code"], match["printed"], id=f"{document.name}:{line}"))
    return found


@pytest.mark.parametrize(("code", "printed"), blocks())
def test_a_block_of_python_runs_as_it_stands(
    code: str,
    printed: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(compile(code, "document", "exec"), {"__name__": "document"})
    output = capsys.readouterr().out
    assert printed is None or output == printed


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_the_tests_that_the_design_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
