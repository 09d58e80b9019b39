"""What the documents show is true: their Python runs and prints what they say; what they point to is there."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import run_program

ROOT = Path(__file__).parent.parent
# The site shows some documents a second time, by links that are left out here.
PAGES = [page for page in sorted((ROOT / "docs").rglob("*.md")) if not page.is_symlink()]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]

# Of these pages the blocks are one program, in order.
PROGRAMS = [ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md"))]

# Of these, those that need more than the extra "test" installs.
NEEDS = {"README.md": "transformers", "embeddings.md": "sentence_transformers", "language-model.md": "peft"}
# Python, and what it prints: the comments at its end, or a block without a language that follows at once.
BLOCK = re.compile(r"^```python\n(?P<code>.*?)^```$(?:\n\n```\n(?P<printed>.*?)^```$)?", re.DOTALL | re.MULTILINE)
COMMENTS = re.compile(r"(?:^# .*\n)+\Z", re.MULTILINE)
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


def blocks(document: Path) -> list[Any]:
    """Code, what it prints or None, and the line where it begins."""
    text, found = document.read_text(encoding="utf-8"), []
    for match in BLOCK.finditer(text):
        printed, comments = match["printed"], COMMENTS.search(match["code"])
        if comments is not None:
            printed = comments[0].replace("# ", "")
        found.append((match["code"], printed, text.count("\n", 0, match.start()) + 1))
    return found


def near(output: str, printed: str) -> bool:
    """Whether words are equal, and numbers within a third: they are of another machine. ``...`` stands for lines.

    A peak may be lower, or higher by the 32 MiB that ``memory`` leaves to the allocator.
    """
    numbers = [[float(each.replace(",", "")) for each in NUMBER.findall(text)] for text in (output, printed)]
    if "..." in printed:
        words = re.escape(NUMBER.sub("0", printed)).replace(re.escape("...\n"), r"(?:.*\n)*")
        begin = len(NUMBER.findall(printed.partition("...")[0]))
        numbers[0] = numbers[0][:begin] + numbers[0][begin - len(numbers[1]) :]
    else:
        words = re.escape(NUMBER.sub("0", printed))
    same = re.fullmatch(words, NUMBER.sub("0", output)) is not None and len(numbers[0]) == len(numbers[1])
    peaks = [text.startswith(" MiB") for text in NUMBER.split(printed)[1:]]
    return same and all(
        (0 < a <= b + 32) if peak else (b * 2 / 3 <= a <= b * 4 / 3) for a, b, peak in zip(*numbers, peaks, strict=True)
    )


SINGLE = [
    pytest.param(code, printed, id=f"{document.name}:{line}")
    for document in DOCUMENTS
    if document not in PROGRAMS
    for code, printed, line in blocks(document)
]


@pytest.mark.parametrize(("code", "printed"), SINGLE)
def test_a_block_of_python_runs_as_it_stands(
    code: str, printed: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with torch.random.fork_rng():
        exec(compile(code, "document", "exec"), {"__name__": "document"})
    output = capsys.readouterr().out
    assert printed is None or output == printed


#: A page's blocks in one process of their own, as a reader runs them: a peak is that of the process.
PAGE = """
import json, os, sys
os.chdir(sys.argv[1])
names = {"__name__": "document"}
for code, where in json.loads(sys.argv[2]):
    exec(compile(code, where, "exec"), names)
    print(chr(0), end="")
"""


def check_page(document: Path, folder: Path) -> None:
    found = blocks(document)
    ended = run_program(PAGE, folder, json.dumps([(code, f"{document.name}:{line}") for code, _, line in found]))
    assert ended.status == 0, ended.errors
    for output, (_, printed, line) in zip(ended.output.split("\0"), [*found, ("", "", 0)], strict=True):
        assert printed is None or near(output, printed), f"{document.name}:{line} printed:\n{output}"


@pytest.mark.parametrize("document", [page for page in PROGRAMS if page.name not in NEEDS], ids=lambda path: path.name)
def test_the_blocks_of_a_page_run_one_after_the_other(document: Path, tmp_path: Path) -> None:
    check_page(document, tmp_path)


@pytest.mark.parametrize("document", [page for page in PROGRAMS if page.name in NEEDS], ids=lambda path: path.name)
def test_the_blocks_of_a_page_that_needs_another_package_run(document: Path, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS[document.name], reason="tests/with_transformers.sh installs it")
    check_page(document, tmp_path)


def test_the_guide_shows_the_report_that_its_block_prints(tmp_path: Path) -> None:
    def words(table: str) -> list[str]:
        without = re.sub(r"no time|-?[\d.e+-]+ m?s\b", "TIME", table)
        return [" ".join(NUMBER.sub("0", line).split()) for line in without.splitlines()]

    guide = ROOT / "docs" / "guide.md"
    (code,) = (code for code, _, _ in blocks(guide) if "print(model.memory_report())" in code)
    (shown,) = re.findall(
        r"^```text\n(at the peak.*?)^```$", guide.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    ended = run_program(PAGE, tmp_path, json.dumps([(code, guide.name)]))
    assert ended.status == 0, ended.errors
    lines = words(ended.output.partition("\0")[0])
    assert [line for line in words(shown) if line not in [*lines, "..."]] == [], ended.output


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_between_files_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8"))
    assert [target for target in targets if not (document.parent / target).exists()] == []


def test_a_stranger_can_read_it_all() -> None:
    reference = {ROOT / "docs" / "api", ROOT / "docs" / "results"}
    pages = [page for page in (ROOT / "docs").rglob("*.md") if reference.isdisjoint(page.parents)]
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    assert words <= 14_000
    assert len((ROOT / "docs" / "refused.md").read_text(encoding="utf-8").split()) <= 2_000
    assert words + len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 16_000


def test_the_tests_that_the_design_names_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / "design.md").read_text(encoding="utf-8"))
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []
