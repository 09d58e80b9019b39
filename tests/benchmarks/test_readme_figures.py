"""Every figure that the README quotes stands on the page of results that its sentence is about, or follows from it.

A paragraph of ``## Results`` that begins with a command is about the page which that command made. One that does not
goes on about the same page; the pages that a paragraph links to come with it, and the list of results stands for all of
them. A figure is there if a page has the same number, or one that rounds to it. What is computed from a page stands in
:data:`DERIVED` with its arithmetic, whose numbers must be on the page too; what the command does by default stands in
:data:`OPTIONS`. A file of the code that a paragraph names is one of its pages.
"""

from __future__ import annotations

import argparse
import ast
import operator
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from benchmarks.frame.again import asked_words
from benchmarks.questions import QUESTIONS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SECTION = "## Results"
NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)*(?:e[+-]?\d+)?(?!\w*[a-zA-Z]\d)")
UNITS = re.compile(r"\d\s?(?:MiB|GiB|GB/s|ms\b|seconds?\b|%|times\b|GFLOP)")
#: page -> figure of the README -> how it follows from figures of the page.
DERIVED = {
    "optimizer-billion": {"213": "1757 - 1544"},  # the peak, and the peak less torch
    "train-overlap": {"2.0": "125.2 / 61.2", "2.9": "130.2 / 44.3"},
}
#: question -> figure of the README -> the option whose default it is.
OPTIONS = {"retrieval": {"48": "--batch"}, "offload-step": {"9": "--pairs"}}
OPERATIONS: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def numbers(text: str) -> list[str]:
    """As they are written, without the commas of thousands."""
    found = (match[0].rstrip(",").replace(",", "") for match in NUMBER.finditer(text))
    return [number for number in found if number.count(".") < 2]  # versions are no figures


def rounds_to(value: float, figure: str) -> bool:
    """Whether ``value``, written with as many decimals, is ``figure``."""
    if "e" in figure:
        decimals = len(figure.partition("e")[0].partition(".")[2])
        return float(f"{value:.{decimals}e}") == float(figure)
    return f"{value:.{len(figure.partition('.')[2])}f}" == figure


def evaluate(expression: str) -> float:
    """Sums, differences, products and quotients of numbers."""

    def of(node: ast.expr) -> float:
        if isinstance(node, ast.BinOp):
            return OPERATIONS[type(node.op)](of(node.left), of(node.right))
        assert isinstance(node, ast.Constant), expression
        return float(node.value)  # type: ignore[arg-type]

    return of(ast.parse(expression, mode="eval").body)


def defaults(question: str) -> dict[str, str]:
    """Figure -> option, where the option's default is that figure."""
    wanted = OPTIONS.get(question, {})
    parser = argparse.ArgumentParser()
    if wanted:
        next(entry for entry in QUESTIONS if entry.name == question).load().add_arguments(parser)
    return {figure: option for figure, option in wanted.items() if f"{parser.get_default(option[2:])}" == figure}


def missing(text: str, pages: dict[str, str]) -> list[str]:
    """The figures of ``text`` that none of the pages has and that do not follow from one."""
    there = {name: numbers(page) for name, page in pages.items()}
    values = [float(number) for found in there.values() for number in found]

    def follows(figure: str) -> bool:
        for name, found in there.items():
            expression = DERIVED.get(name, {}).get(figure)
            if expression and all(number in found for number in numbers(expression)):
                return rounds_to(evaluate(expression), figure)
        return any(figure in defaults(name) for name in there)

    # A whole number is there or not: too many round to a small one.
    return [
        figure
        for figure in numbers(text)
        if not any(value == float(figure) or ("." in figure and rounds_to(value, figure)) for value in values)
        and not follows(figure)
    ]


def _without_before(page: str) -> str:
    """Without the table that shows the ratios of the run before this one: a figure of that one is not of this page."""
    return page.partition("\n\nAgain: the same command")[0]


COMMAND = re.compile(r"`(python -m benchmarks [^`]+)`")


def paragraphs(text: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The paragraphs of the section with the pages that each is about."""
    section = re.split(r"^## ", text.partition(f"\n{SECTION}\n")[2], flags=re.MULTILINE)[0]
    made = {path.stem: _without_before(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.md"))}
    listing = made.pop("README")
    subject: dict[str, str] = {}
    for paragraph in filter(None, (part.strip() for part in section.split("\n\n"))):
        if commanded := COMMAND.match(paragraph):
            asked = asked_words(commanded[1])
            subject = {name: page for name, page in made.items() if asked_words(COMMAND.findall(page)[0]) == asked}
        linked = {
            name: made.get(name, listing) for name in re.findall(r"\]\(benchmarks/results/([\w-]+)\.md\)", paragraph)
        }
        if "README" in linked:
            linked |= made
        code = {path: (ROOT / path).read_text(encoding="utf-8") for path in re.findall(r"`([\w/]+\.py)`", paragraph)}
        yield re.sub(r"\]\([^)]*\)", "]", paragraph), subject | linked | code


README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("paragraph", "pages"),
    [pytest.param(*found, id=f"{k}: {found[0][:40]}") for k, found in enumerate(paragraphs(README))],
)
def test_the_figures_of_a_paragraph_are_on_its_pages(paragraph: str, pages: dict[str, str]) -> None:
    assert pages, "no page was made by the command that this paragraph gives"
    assert missing(paragraph, pages) == []


def test_nothing_outside_that_section_is_a_measured_figure() -> None:
    head, _, rest = README.partition(f"\n{SECTION}\n")
    outside = re.sub(
        r"```.*?```", "", head + re.split(r"^(?=## )", rest, maxsplit=1, flags=re.MULTILINE)[1], flags=re.S
    )
    assert UNITS.findall(outside) == []


def test_every_page_is_in_the_list_of_results_and_has_its_command_and_its_lines() -> None:
    listed = (RESULTS / "README.md").read_text(encoding="utf-8")
    for path in sorted(RESULTS.glob("*.md")):
        if path.name == "README.md":
            continue
        assert f"({path.name})" in listed
        assert "| command | `python -m benchmarks " in path.read_text(encoding="utf-8")
        assert path.with_suffix(".jsonl").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("takes 1,153 MiB and 0.98 times", []),
        ("takes 1,154 MiB", ["1154"]),
        ("1.23 times", ["1.23"]),
        ("about 2.04 times, torch 2.13.0", []),
        ("differs by 3.6e-07", []),
        ("differs by 3.7e-07", ["3.7e-07"]),
    ],
)
def test_a_figure_is_there_rounds_or_follows(text: str, expected: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DERIVED, "page", {"2.04": "86.7 / 42.5", "1.23": "9.9 / 8.0"})
    assert missing(text, {"page": "1,153 MiB, 0.982 (0.92 to 1.01), 86.7 ms, 42.5 ms, 3.6e-07"}) == expected
