"""The README is short, its quick start is two commands, and its figures are those that were recorded."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.examples import DOCS, load_script

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
MOST_WORDS = 700
MOST_LINES = 12
GLOSSARY = [
    *("layer", "home", "tier", "lane", "slot", "shard", "cell"),
    *("boundary", "plan", "chunk", "micro-batch", "visit"),
]


def section(title: str) -> str:
    """What stands below a heading, up to the next one of the same level."""
    _, found, rest = README.partition(f"\n## {title}\n")
    assert found, f"README.md has no section {title!r}"
    return re.split(r"^## ", rest, flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[list[str]]:
    """The lines of each fenced block."""
    return [body.splitlines() for body in re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)]


def test_outside_of_code_the_readme_has_at_most_700_words() -> None:
    prose = re.sub(r"^```.*?^```$|<!--.*?-->", "", README, flags=re.DOTALL | re.MULTILINE)
    words = [word for word in prose.split() if re.search(r"\w", word)]
    assert len(words) <= MOST_WORDS


def test_the_quick_start_is_two_commands_of_one_line_each() -> None:
    commands = blocks(section("Quick start"), "sh")
    assert [len(lines) for lines in commands] == [1, 1]
    assert all(lines[0].startswith("python3 -m venv ") for lines in commands)
    assert "python -m benchmarks " in commands[0][0]
    assert commands[1][0].endswith("python -m pytest") or "python -m pytest -n" in commands[1][0]


def test_continuous_integration_runs_the_commands_of_the_quick_start() -> None:
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    (function,) = re.findall(r"^quick_start\(\) \{$.*?^\}$", script, re.DOTALL | re.MULTILINE)
    for number, (command,) in enumerate(blocks(section("Quick start"), "sh"), start=1):
        assert re.search(rf"\b(run_quick_start) {number}\b", script)
        shown = subprocess.run(
            ["bash", "-c", f"{function}\nquick_start {number}"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        assert shown == command + "\n"


def test_the_first_example_has_twelve_lines() -> None:
    # That examples run, and print what they show, tests/test_documents.py checks.
    example = blocks(section("What changes in a loop"), "python")[0]
    assert len([line for line in example if line and not line.startswith("#")]) <= MOST_LINES


@pytest.mark.parametrize("word", GLOSSARY)
def test_the_glossary_explains_each_word_in_one_line(word: str) -> None:
    design = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    assert len(re.findall(rf"^\| (?:[\w-]+, )?{word}(?:, [\w-]+)? \| .+ \|$", design, re.MULTILINE)) == 1


def test_the_picture_shows_the_recorded_ratios() -> None:
    pytest.importorskip("matplotlib")
    module = load_script(DOCS / "tools" / "pictures.py")
    image = pytest.importorskip("PIL.Image").open(module.PICTURE)
    drawn = {case: tuple(point) for case, point in json.loads(image.text[module.POINTS]).items()}
    assert drawn == module.recorded_points()


def cells(table: str) -> list[list[str]]:
    """The cells of each row, with or without spaces around them."""
    return [[cell.strip() for cell in row.strip().strip("|").split("|")] for row in table.strip().splitlines()]


def test_the_tables_of_results_are_generated() -> None:
    benchmarks = pytest.importorskip("benchmarks.__main__", reason="the generator of the table is not there")
    results = (ROOT / "benchmarks" / "results" / "README.md").read_text(encoding="utf-8")
    shown, whole = (
        cells(text.split("<!-- results -->")[1].split("<!-- /results -->")[0]) for text in (README, results)
    )
    generated = cells(benchmarks.claims_table())
    assert whole == generated, "run `python -m benchmarks table` and paste what it prints into benchmarks/results"
    linked = [[*row[:-1], row[-1].replace("(benchmarks/results/", "(")] for row in shown]
    assert [row for row in linked if row not in generated] == []
