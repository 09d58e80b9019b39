"""Settings, tables, files of a run, and comparisons; reports made again from published results."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest

from benchmarks.__main__ import BENCHMARKS, find, main
from benchmarks.harness import environment
from benchmarks.harness.benchmark import Benchmark, Plan, Report, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.claims import RESULTS, read_lines
from benchmarks.harness.environment import Environment, filesystem_of, here
from benchmarks.harness.files import cache_directory, write_whole
from benchmarks.harness.peers import MissingExtraError, require
from benchmarks.harness.report import Earlier, markdown_page, publish, ratios_of
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import add_options, option, settings_of
from benchmarks.harness.table import at_least, at_most, case_table, markdown_table, mebibytes, reasons, spread
from tests.benchmarks.here import RATES, outcome

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


# --- the command line ------------------------------------------------------------------------------------------------


def test_the_listing_has_each_benchmark_in_one_line_and_imports_no_torch() -> None:
    program = "import sys; from benchmarks.__main__ import main; main([]); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for entry in BENCHMARKS:
        assert [line for line in shown.splitlines() if entry.name in line and entry.summary in line]


@pytest.mark.parametrize("entry", BENCHMARKS, ids=lambda entry: entry.name)
def test_every_benchmark_explains_its_options(entry: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([entry.name, "--help"])  # type: ignore[attr-defined]  # pytest passes parameters as objects
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("--out", "--against", "--home"))


def test_a_name_that_is_not_there_is_answered_with_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retreival"]) == 2
    assert "retrieval" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("retrieval --dim 100 --batch 0", ("multiple of 64, got dim=100", "at least 2, got batch=0")),
        ("retrieval --depth 2 --slices 9", ("at most 4 slices",)),
        ("offload-step --shards 4 6", ("each a multiple of the one before",)),
        ("offload-step --shards 4 4", ("each a multiple of the one before",)),
        ("memory-latency --dim 100 --layers 3 --pairs 0", ("dim=100", "layers=3", "pairs=0")),
        ("optimizer --dim 100 --blocks 0", ("dim=100", "blocks=0")),
        ("pipe-ladder --chunks 4 --rows 2", ("from 1 to 2 micro-batches",)),
        ("build-huge --blocks 1 --dim 16", ("expected parameters larger than the cap",)),
    ],
)
def test_settings_that_make_no_run_possible_are_refused_all_at_once(
    words: str, parts: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    shown = capsys.readouterr().err
    assert all(part in shown for part in parts)


def test_a_missing_extra_names_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(MissingExtraError, match=r"pip install 'gradstream\[bench\]'"):
        require("no_such_package")
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert main(["retrieval"]) == 2
    assert "tokenizers" in capsys.readouterr().err


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


def test_every_value_out_of_bounds_is_named() -> None:
    with pytest.raises(ValueError, match=r"multiple of 4, got size=6; expected at least 0.1, got rate=nan; .*counts=0"):
        settings_of(Settings, {"size": 6, "rate": float("nan"), "counts": [1, 0]})


# --- tables ----------------------------------------------------------------------------------------------------------


def test_a_table_has_aligned_columns_and_a_row_for_a_case_without_a_result() -> None:
    outcomes = [outcome("a", {"x": 1}), outcome("long name", failure="killed")]
    shown = case_table(outcomes, {"x": lambda o: str(o.done["x"]), "y": lambda o: "2"})
    assert shown.splitlines() == [
        "| case      |      x |   y |",
        "|-----------|-------:|----:|",
        "| a         |      1 |   2 |",
        "| long name | failed |     |",
    ]
    assert reasons(outcomes) == "* long name: failed: killed"
    with pytest.raises(ValueError, match="expected 1 cells in each row, got 2 in row 0"):
        markdown_table(["a"], [["1", "2"]])


def test_figures_and_bounds_in_words() -> None:
    assert mebibytes(1234567890) == "1,177 MiB"
    assert spread([1.2, 1.0, 1.05]) == "1.050 (1.00 to 1.20)"
    assert spread([]) == "-"
    assert at_most("x", 1.0, 1.0) == at_least("x", 1.0, 1.0) == []
    assert at_most("x", 2.0, 1.5) == ["x must be at most 1.5, is 2"]
    assert at_least("x", float("nan"), 1.5) == ["x must be at least 1.5, is nan"]


def test_an_outcome_knows_its_medians_and_ratios() -> None:
    found = outcome("a", {}, steps=[{"seconds": 3.0}, {"seconds": 1.0, "more": 6}, {"seconds": 2.0}])
    assert found.median() == 2.0
    assert found.median("more", 0) == 0.0
    with pytest.raises(KeyError):
        found.median("more")
    assert found.ratio() != found.ratio()  # NaN: there is no reference
    found.reference = [{"seconds": 1.0}] * 3
    assert (found.ratios(), found.ratio()) == ([3.0, 1.0, 2.0], 2.0)
    assert outcome("b", steps=[{"ratio": 4.0}]).ratio() == 4.0
    with pytest.raises(ValueError, match="c: expected a result, but it failed: killed"):
        _ = outcome("c", failure="killed").done


# --- files -----------------------------------------------------------------------------------------------------------


def plan(settings: Settings, folder: str) -> Plan:
    first = yield Group("pairs", [Case("reference", "m:f"), Case("ours", "m:f"), Case("dead", "m:f")], "pairs", 2)
    yield Group("alone", [Case(f"after {first[1].ratio():.1f}", "m:f", {"folder": folder})])


def report(run: Run[Settings]) -> Report:
    ours = run.groups["pairs"][1]
    table = case_table(run.outcomes, {"s/step": lambda o: f"{o.median():.2f}"})
    return Report([table], at_most("ratio", ours.ratio(), 3))


BENCHMARK = Benchmark(Settings, plan, report)


def made(ratio: float, size: int = 8) -> Run[Settings]:
    seconds = [{"seconds": 1.0}, {"seconds": 2.0}]
    ours = [{"seconds": ratio * step["seconds"], "loss": 1} for step in seconds]
    pairs = [
        outcome("reference", {}, steps=seconds, reference=seconds, peaks={"steps": 4}),
        outcome("ours", {"a": 1}, steps=ours, reference=seconds, peaks={"steps": 2}, moments={"torch": 1}),
        outcome("dead", failure="killed"),
    ]
    groups = {
        "pairs": pairs,
        "alone": [outcome(f"after {ratio:.1f}", {}, steps=seconds, peaks={"steps": 4}, version="2")],
    }
    return Run(Settings(size), here(), RATES, [("homes", "a disk")], groups)


def publish_made(run: Run[Settings], out: Path | None = None, against: Path | None = None) -> int:
    return publish("test", "what is it?", BENCHMARK, run, out=out, against=against)


def test_a_run_leaves_a_page_a_picture_and_lines_from_which_the_report_is_made_again(tmp_path: Path) -> None:
    stem = tmp_path / "t"
    run = made(1.5)
    assert publish_made(run, out=stem) == 0
    assert stem.with_suffix(".png").read_bytes().startswith(PNG)
    page = stem.with_suffix(".md").read_text()
    for words in ("# test\n\nWhat is it?", "| homes | a disk |", "| ours ", "All bounds hold.", "![test](t.png)"):
        assert words in page
    header, *lines = [json.loads(line) for line in stem.with_suffix(".jsonl").read_text().splitlines()]
    assert header["settings"]["size"] == 8
    assert header["ratios"] == {"ours: time": 1.5, "ours: peak": 0.5, "after 1.5: peak": 1.0}
    assert [(line["part"], line["case"]) for line in lines][1:] == [
        ("pairs", "ours"),
        ("pairs", "dead"),
        ("alone", "after 1.5"),
    ]
    again = BENCHMARK.read(stem.with_suffix(".jsonl"))
    assert again.settings == run.settings
    assert again.facts == run.facts
    assert again.limits == run.limits
    assert again.environment.date == run.environment.date
    assert BENCHMARK.report(again).sections == BENCHMARK.report(run).sections
    assert [found.ratios() for found in again.outcomes] == [found.ratios() for found in run.outcomes]


def test_a_file_of_other_cases_is_refused(tmp_path: Path) -> None:
    publish_made(made(1.5), out=tmp_path / "t")
    path = tmp_path / "t.jsonl"
    path.write_text(path.read_text().replace('"case": "dead"', '"case": "another"'))
    with pytest.raises(ValueError, match="got 'another' after"):
        BENCHMARK.read(path)


def test_a_bound_that_does_not_hold_fails_the_run_and_stands_on_the_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert publish_made(made(4.0), out=tmp_path / "t") == 1
    assert "ratio must be at most 3, is 4" in capsys.readouterr().err
    assert "* does not hold: ratio must be at most 3" in (tmp_path / "t.md").read_text()


def test_a_run_that_replaces_another_shows_how_far_each_ratio_moved(tmp_path: Path) -> None:
    publish_made(made(1.0), out=tmp_path / "t")
    assert "Again" not in (tmp_path / "t.md").read_text()
    assert publish_made(made(1.25), out=tmp_path / "t") == 0
    page = (tmp_path / "t.md").read_text()
    assert "1 of 2 ratios are within 10%; the largest change is that of ours: time, by +25.0%." in page


def test_compared_with_another_run_a_run_fails_where_a_ratio_moved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    publish_made(made(1.0), out=tmp_path / "t")
    before = tmp_path / "t.jsonl"
    assert publish_made(made(1.09), against=before) == 0
    assert publish_made(made(0.85), against=before) == 1
    assert "ours: time: must be within 10% of before, moved by -15.0%" in capsys.readouterr().err
    assert publish_made(made(1.0, size=12), against=before) == 1
    assert "had other settings" in capsys.readouterr().err
    for text in ("", "no JSON", "[1]", '{"environment": {}}'):
        (tmp_path / "nothing.jsonl").write_text(text)
        assert publish_made(made(1.0), against=tmp_path / "nothing.jsonl") == 1
        assert "nothing.jsonl: holds no ratios" in capsys.readouterr().err


def test_only_runs_of_the_same_settings_on_the_same_machine_are_compared() -> None:
    now = here()
    same = Earlier(replace(now, date="earlier"), Settings(), {"a": 1.0, "b": 1.0})
    assert same.why_not(now, Settings(), {"a": 1.0}) == ""
    assert "another machine" in same.why_not(replace(now, cpu="another"), Settings(), {"a": 1.0})
    assert "another machine" in same.why_not(replace(now, threads=now.threads + 1), Settings(), {"a": 1.0})
    assert "no ratio in common" in same.why_not(now, Settings(), {"c": 1.0})
    assert [line.split(":")[0] for line in same.broken({"a": float("nan"), "b": 1.1})] == ["a", "b"]
    assert same.broken({"a": 1.0, "b": 0.9001}) == []


def test_ratios_are_those_of_pairs_and_of_peaks_never_seconds() -> None:
    steps = [{"seconds": 1.0, "ratio": ratio} for ratio in (1.0, 3.0, 1.2)]
    outcomes: list[Outcome] = [
        outcome("plain", {}, steps=steps[:1], peaks={"a": 200}, reference=[]),
        outcome("inside", {}, steps=steps, peaks={"a": 300}),
        outcome("dead", failure="killed"),
    ]
    outcomes[0].reference = outcomes[0].steps
    assert ratios_of(outcomes) == {"inside: time": 1.2, "inside: peak": 1.5}


def test_an_interrupted_write_leaves_the_file_that_was_there_and_no_other(tmp_path: Path) -> None:
    def interrupted(path: Path) -> None:
        path.write_text("half")
        raise KeyboardInterrupt

    path = write_whole(tmp_path / "cache" / "file", lambda temporary: temporary.write_text("whole"))
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, interrupted)
    assert path.read_text() == "whole"
    assert list(path.parent.iterdir()) == [path]


def test_the_cache_follows_xdg_and_ignores_a_relative_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory() == tmp_path / "gradstream"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_directory().is_absolute()


# --- environment -----------------------------------------------------------------------------------------------------


def test_the_header_names_machine_software_and_command_without_paths_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sys, "argv", ["/somewhere/benchmarks/__main__.py", "retrieval", "--home", str(tmp_path)])
    now = here()
    assert now.command == f"python -m benchmarks retrieval --home {tmp_path.name}"
    facts = dict(now.facts())
    assert list(facts) == ["date", "command", "machine", "software", "memory"]
    assert f"{now.cores} cores" in facts["machine"]
    assert "torch" in facts["software"]
    assert filesystem_of(tmp_path) != ""
    assert Environment(**json.loads(json.dumps(asdict(now)))) == now


def test_processor_time_that_others_took_is_a_share_of_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    now = here()
    for seconds, share in (((104.0, 11.0), 0.25), ((100.5, 10.5), None)):
        monkeypatch.setattr(environment, "processor_seconds", lambda seconds=seconds: seconds)
        assert now.ended((100.0, 10.0)).stolen == share
    assert "25% of its processor time" in dict(replace(now, stolen=0.25).facts())["machine"]


def test_a_page_can_be_read_on_its_own() -> None:
    page = markdown_page("name", "what?", [("command", "python x"), ("a", "b")], ["section", ""], "name.png")
    assert (
        page
        == "# name\n\nWhat?\n\n| | |\n|---|---|\n| command | `python x` |\n| a | b |\n\nsection\n\n![name](name.png)\n"
    )


# --- published results -----------------------------------------------------------------------------------------------


FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?")
#: Figures of published pages that their lines do not hold, or that are counted otherwise since.
OTHERWISE = {"optimizer": {"10.61"}, "train-overlap": set()}


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.jsonl")), ids=lambda path: path.stem)
def test_the_report_of_a_published_result_is_made_again_from_its_lines(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every figure in the tables of the published page is in the report that is made again."""
    assert find(read_lines(path)[0]["benchmark"]).name in path.stem
    assert main(["report", str(path), "--out", str(tmp_path / "again")]) in (0, 1)
    page = (tmp_path / "again.md").read_text()
    published = path.with_suffix(".md").read_text().partition("\n\nAgain: the same command")[0]
    rows = [line for line in published.partition("| limits |")[2].splitlines()[1:] if line.startswith("|")]
    figures = {figure for row in rows for figure in FIGURE.findall(row)}
    assert len(figures) > 10
    shown = {figure.rstrip(",") for figure in FIGURE.findall(page)}
    assert {figure.rstrip(",") for figure in figures} - shown <= OTHERWISE.get(path.stem, set())
    assert (tmp_path / "again.png").read_bytes().startswith(PNG)
    assert not (tmp_path / "again.jsonl").exists()
    capsys.readouterr()
