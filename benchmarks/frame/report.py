"""What leaves a run: the tables on the screen, and the same run as Markdown, as JSON lines and as a picture.

``--out STEM`` names all three at once (``STEM.md``, ``STEM.jsonl``, ``STEM.png``). Markdown and JSON are written
whatever the outcome; the picture only where every rung that can run here did. A JSON file that is replaced is read
first: the page shows how far each ratio moved since (:mod:`benchmarks.frame.again`).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.frame.again import again_table, broken_again, ratios_of, read_earlier
from benchmarks.frame.cache import write_whole
from benchmarks.frame.environment import Environment
from benchmarks.frame.limits import Limits
from benchmarks.frame.outcome import Outcome

__all__ = ["add_output_arguments", "markdown_page", "publish", "write_json_lines"]


def add_output_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every question that say where results go."""
    parser.add_argument("--out", type=Path, metavar="STEM", help="writes STEM.md, STEM.jsonl and STEM.png")
    parser.add_argument("--json", type=Path, metavar="FILE", help="a line of JSON for each rung")
    parser.add_argument("--markdown", type=Path, metavar="FILE.md", help="the tables, with what they were measured on")
    parser.add_argument(
        "--against", type=Path, metavar="FILE.jsonl", help="an earlier run, whose ratios must come out within 10 %%"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="where the picture goes")


def publish(
    arguments: argparse.Namespace,
    environment: Environment,
    *,
    sections: Sequence[str],
    outcomes: Sequence[Outcome],
    broken: Sequence[str] = (),
    draw: Callable[[Path], Path] | None = None,
    limits: Limits | None = None,
    facts: Sequence[tuple[str, str]] = (),
    may_fail: Sequence[Outcome] = (),
    ratios: Mapping[str, float] | None = None,
) -> int:
    """Prints the sections, writes the files that were asked for, and says what does not hold; the exit status.

    Args:
        arguments: as parsed: the question and where results go.
        environment: of the run, taken before it.
        sections: tables and paragraphs in Markdown, in their order.
        outcomes: of all rungs, a line of JSON each.
        broken: what must hold and does not, one line each.
        draw: makes the picture at a path.
        limits: of the machine, if they were measured.
        facts: what the header of the page tells besides: a name and the words for it.
        may_fail: outcomes that the picture does without.
        ratios: what must come out alike when the question is asked again; those of the outcomes by default.
    """
    stem: Path | None = arguments.out
    json_path = arguments.json or (stem and stem.with_name(f"{stem.name}.jsonl"))
    markdown_path = arguments.markdown or (stem and stem.with_name(f"{stem.name}.md"))
    picture_path = arguments.plot or (stem and stem.with_name(f"{stem.name}.png"))
    ratios = ratios_of(outcomes) if ratios is None else ratios
    against: Path | None = arguments.against
    earlier = read_earlier(against or json_path) if against or json_path else None
    if earlier is not None:
        sections = [*sections, again_table(earlier, environment, ratios)]
    if against:  # asked whether it is so; a file that is replaced is only shown
        broken = [*broken, *broken_again(against, environment, ratios)]
    print("\n" + "\n\n".join(sections) + "\n")
    picture = None
    failed = [outcome for outcome in outcomes if outcome.failure and outcome not in may_fail]
    if picture_path and draw and not failed:
        picture = draw(picture_path)
        print(f"picture in {picture}")
    if json_path:
        print(f"rungs in {write_json_lines(json_path, environment, outcomes, limits, ratios)}")
    if markdown_path:
        verdict = "".join(f"* does not hold: {line}\n" for line in broken) or "All bounds hold.\n"
        shown = picture.name if picture is not None and picture.parent == markdown_path.parent else None
        page = markdown_page(
            arguments.question,
            arguments.summary,
            [*environment.facts(), *facts, *([("limits", limits.line())] if limits is not None else [])],
            [*sections, verdict.rstrip()],
            shown,
        )
        write_whole(markdown_path, lambda temporary: temporary.write_text(page, encoding="utf-8"))
        print(f"page in {markdown_path}")
    print("\n".join(broken) if broken else "all bounds hold", file=sys.stderr if broken else sys.stdout)
    return 1 if broken else 0


def markdown_page(
    question: str,
    summary: str,
    facts: Sequence[tuple[str, str]],
    sections: Sequence[str],
    picture: str | None = None,
) -> str:
    """A page that can be read on its own: the question, what it was measured on, the tables, the picture."""
    rows = [f"| {name} | {'`' + words + '`' if name == 'command' else words} |" for name, words in facts]
    blocks = [f"# {question}", summary[:1].upper() + summary[1:], "\n".join(["| | |", "|---|---|", *rows]), *sections]
    if picture is not None:
        blocks.append(f"![{question}]({picture})")
    return "\n\n".join(blocks) + "\n"


def write_json_lines(
    path: Path,
    environment: Environment,
    outcomes: Sequence[Outcome],
    limits: Limits | None = None,
    ratios: Mapping[str, float] | None = None,
) -> Path:
    """One line for environment, limits and ratios, one for each rung; whole or not at all, replaced where it exists."""
    first = environment.as_json() | ({"limits": limits.as_json()} if limits is not None else {})
    first |= {"ratios": ratios} if ratios else {}
    text = "".join(json.dumps(value) + "\n" for value in (first, *(outcome.as_json() for outcome in outcomes)))
    return write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
