"""Settings, tables, files of a run, and comparisons; pages and claims made from published results."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
import torch

from benchmarks.__main__ import BENCHMARKS, RESULTS, main
from benchmarks.harness.benchmark import Benchmark, Run, broken_bounds, publish, read_header, read_run, write_lines
from benchmarks.harness.case import Outcome
from benchmarks.harness.environment import environment_facts, filesystem_of
from benchmarks.harness.settings import add_options, option, settings_of
from benchmarks.harness.table import at_most, case_table
from tests.benchmarks.here import outcome

ROOT = Path(__file__).parents[2]
WITHOUT_CUDA = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
PNG = b"\x89PNG\r\n\x1a\n"


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_listing_has_each_benchmark_in_one_line_and_imports_no_torch() -> None:
    program = "import sys; from benchmarks.__main__ import main; main([]); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name, question in BENCHMARKS.items():
        assert [line for line in shown.splitlines() if name in line and question in line]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_every_benchmark_explains_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--out", "--home"))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("retreival", "retrieval"),
        ("retrieval --dim 100", "expected a multiple of 64, got 100"),
        ("retrieval --batch 0", "expected at least 2, got 0"),
        ("memory-latency --work training --before nowhere", "expected a checkout of this project"),
        ("pipe-ladder --chunks 4 --rows 2", "from 1 to 2 micro-batches"),
        ("build-huge --blocks 1 --dim 16", "expected parameters larger than the cap"),
        pytest.param("gpu", "expected a CUDA device", marks=WITHOUT_CUDA),
    ],
)
def test_settings_of_no_possible_run_are_refused(words: str, part: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status: object = main(words.split())
    except SystemExit as left:  # so does argparse
        status = left.code
    assert status == 2
    assert part in capsys.readouterr().err


def test_a_missing_extra_names_its_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["memory-latency"]) == 2
    shown = capsys.readouterr().err
    assert "matplotlib" in shown
    assert "pip install 'gradstream[bench]'" in shown


# --- settings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """For tests."""

    size: int = option(8, "a multiple of 4", multiple=4)
    rate: float = option(0.5, "more than nothing", least=0.1)
    counts: tuple[int, ...] = option((1, 2), "numbers")
    names: tuple[str, ...] = option(("a",), "of these", choices=("a", "b"))
    flag: bool = option(False, "or not")
    limit: float | None = option(None, "none", kind=float)


def test_options_of_every_kind_are_parsed_and_recorded_ones_again() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, Settings)
    words = "--size 12 --counts 3 4 5 --names b --flag --limit 2"
    expected = Settings(12, 0.5, (3, 4, 5), ("b",), True, 2.0)
    assert settings_of(Settings, vars(parser.parse_args(words.split()))) == expected
    recorded = json.loads(json.dumps(asdict(expected)))  # a results file holds them so
    assert settings_of(Settings, recorded) == expected
    assert settings_of(Settings, vars(parser.parse_args([]))) == Settings()


# --- files -----------------------------------------------------------------------------------------------------------


def report(run: Run) -> list[str]:
    return [case_table(run.outcomes, {"s/step": lambda o: f"{o.median():.2f}"})]


def bounds(run: Run) -> list[str]:
    return at_most("ratio", run.groups["pairs"][1].ratio(), 3)


BENCHMARK = Benchmark(Settings, lambda run: None, report, bounds, points=lambda run: {"ours": (1.0, 2.0)})


def made(ratio: float, size: int = 8) -> Run:
    seconds = [{"seconds": 1.0}, {"seconds": 2.0}]
    ours = [{"seconds": ratio * step["seconds"], "loss": 1} for step in seconds]
    pairs = [
        outcome("reference", {}, steps=seconds, reference=seconds, peaks={"steps": 4}),
        outcome("ours", {"a": 1}, steps=ours, reference=seconds, peaks={"steps": 2}, moments={"torch": 1}),
        outcome("dead", failure="killed", peer="torchao"),
    ]
    groups = {"pairs": pairs, "alone": [outcome("another", {}, steps=seconds, peaks={"steps": 4}, version="2")]}
    facts = {"date": "then", "command": "python x", "machine": "a machine", "homes": "a disk"}
    return Run(Settings(size), facts, groups)


def test_from_the_lines_of_a_run_its_page_and_picture_are_made_again(tmp_path: Path) -> None:
    run, lines = made(1.5), tmp_path / "t.jsonl"
    write_lines(lines, "test", run)
    header = read_header(lines)
    assert (header["benchmark"], header["settings"]["size"]) == ("test", 8)
    again = read_run(lines, BENCHMARK)
    assert (again.settings, again.facts, again.groups) == (run.settings, run.facts, run.groups)
    assert publish("test", "what is it?", BENCHMARK, again, tmp_path / "t") == 0
    assert (tmp_path / "t.png").read_bytes().startswith(PNG)
    page = (tmp_path / "t.md").read_text()
    assert page.startswith("# test\n\nWhat is it?\n\n| | |\n|---|---|\n| date | then |\n| command | `python x` |\n")
    for words in ("| ours ", "* dead: failed: killed", "All bounds hold.", "![test](t.png)"):
        assert words in page


def test_what_was_measured_before_an_interrupt_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run_group(cases: object, folder: object, order: str, done: Callable[[list[Outcome]], None]) -> None:
        done([outcome("measured", {"a": 1})])
        raise KeyboardInterrupt

    benchmark = replace(BENCHMARK, measure=lambda run: run.group("first", []))
    monkeypatch.setattr("benchmarks.harness.benchmark.run_group", run_group)
    monkeypatch.setattr("benchmarks.__main__.load", lambda name: benchmark)
    with pytest.raises(KeyboardInterrupt):
        main(["mesh", "--out", str(tmp_path / "t"), "--home", str(tmp_path)])
    assert [each.name for each in read_run(tmp_path / "t.jsonl", BENCHMARK).groups["first"]] == ["measured"]


def test_a_bound_that_does_not_hold_fails_the_run_and_is_on_the_page(tmp_path: Path) -> None:
    assert publish("test", "what?", BENCHMARK, made(4.0), tmp_path / "t") == 1
    assert "* does not hold: ratio must be at most 3, is 4" in (tmp_path / "t.md").read_text()


def test_a_case_of_ours_that_failed_breaks_a_bound_and_a_peer_that_failed_does_not() -> None:
    run = made(1.0)
    assert broken_bounds(BENCHMARK, run) == []
    run.groups["alone"].append(outcome("a", failure="MemoryError", may_lack_memory=True))
    assert broken_bounds(BENCHMARK, run) == []
    run.groups["alone"].append(outcome("b", failure="killed", may_lack_memory=True))
    assert broken_bounds(BENCHMARK, run) == ["b: killed"]


# --- environment -----------------------------------------------------------------------------------------------------


def test_the_header_names_machine_software_and_command_without_paths_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/__main__.py", "retrieval", "--home", str(tmp_path)])
    facts = environment_facts()
    assert facts["command"] == f"python -m benchmarks retrieval --home {tmp_path.name}"
    assert list(facts) == ["date", "command", "machine", "software", "memory"]
    assert re.search(r"\d+ cores, \d+ torch threads", facts["machine"])
    assert "torch" in facts["software"]
    assert filesystem_of(tmp_path) != ""


# --- published results -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_a_published_page_is_that_of_its_lines(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = main(["report", str(path), str(tmp_path / path.stem)])
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    assert (tmp_path / f"{path.stem}.md").read_text(encoding="utf-8") == page
    assert ("* does not hold:" in page) == bool(broken)
    for picture in re.findall(r"\]\((.*\.png)\)", page):
        assert (tmp_path / picture).read_bytes().startswith(PNG)
        assert (RESULTS / picture).read_bytes().startswith(PNG)
    capsys.readouterr()


def test_the_results_folder_lists_every_page_and_has_its_lines() -> None:
    listed = (RESULTS / "README.md").read_text(encoding="utf-8")
    for path in sorted(RESULTS.glob("*.md")):
        assert path.name == "README.md" or (f"({path.name})" in listed and read_header(path.with_suffix(".jsonl")))
