"""What leaves a run: header, tables, JSON lines, pictures, the listing, and the verdict."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.frame.environment import ProcessorTime, filesystem_of, here, processor_time
from benchmarks.frame.extra import MissingExtraError, require
from benchmarks.frame.report import markdown_page, publish, write_json_lines
from benchmarks.frame.rungs import Outcome, Rung
from benchmarks.frame.table import markdown_table, mebibytes, ratio
from benchmarks.offload_step.question import broken_bounds, broken_speeds, disk_table
from benchmarks.questions import QUESTIONS
from benchmarks.retrieval.question import broken_bounds as broken_bounds_of_retrieval
from benchmarks.retrieval.results import draw, greatest_difference, table
from benchmarks.retrieval.settings import Settings
from benchmarks.retrieval.training import BEFORE, FLOOR
from tests.benchmarks.here import RATES

ROOT = Path(__file__).parents[2]
PNG = b"\x89PNG\r\n\x1a\n"


def outcome(name: str, losses: list[float], peak: int = 300 * 2**20, failure: str | None = None) -> Outcome:
    result: dict[str, Any] | None = {
        "parameters": 17_500_000,
        "recall_before": 0.5,
        "recall_after": 0.75,
        "held_out": 200,
    }
    return Outcome(
        Rung(name, "module:function"),
        result=None if failure else result,
        failure=failure,
        steps=[{"loss": loss, "seconds": 0.5 * (k + 1)} for k, loss in enumerate(losses)],
        moments={FLOOR: 100 * 2**20, BEFORE: 120 * 2**20},
        peaks={"training": peak},
    )


def test_the_listing_has_each_question_in_one_line_and_imports_no_torch() -> None:
    program = "import sys; from benchmarks.__main__ import main; main([]); assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for question in QUESTIONS:
        assert [line for line in shown.splitlines() if question.name in line and question.summary in line]


@pytest.mark.parametrize("question", QUESTIONS, ids=lambda question: question.name)
def test_every_question_explains_its_options(question: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([question.name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--out", "--json", "--markdown", "--plot"):
        assert option in shown


def test_a_question_that_is_not_there_names_those_that_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["retreival"])
    assert left.value.code == 2
    assert "retrieval" in capsys.readouterr().err


def test_sizes_that_no_rung_could_run_are_refused_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["retrieval", "--dim", "100", "--batch", "0", "--depth", "2", "--slices", "9"]) == 2
    shown = capsys.readouterr().err
    for part in ("dim=100", "batch=0", "slices=9"):
        assert part in shown


def test_a_missing_extra_says_which_command_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingExtraError, match=r"gradstream\[bench\]"):
        require("tokenizers")
    assert main(["retrieval", "--steps", "1"]) == 2
    assert "'gradstream[bench]'" in capsys.readouterr().err


def test_the_header_says_on_what_and_how_it_was_measured() -> None:
    environment = here()
    assert environment.cores >= 1
    assert environment.memory_bytes > 2**20
    shown = "\n".join(environment.lines())
    for part in (environment.date, environment.command, environment.cpu, environment.torch, environment.memory_kind):
        assert part in shown
    assert json.loads(json.dumps(environment.as_json()))["environment"]["torch"] == environment.torch


def test_the_header_says_what_the_host_gave_to_others_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [ProcessorTime(100.0, 30.0), ProcessorTime(100.5, 30.5), ProcessorTime(140.0, 40.0)]
    monkeypatch.setattr("benchmarks.frame.environment.processor_time", lambda: clock[0])
    environment = replace(here(), processor=clock.pop(0))
    assert "taken by others" not in "\n".join(environment.lines())
    assert environment.as_json()["environment"]["stolen"] is None
    clock.pop(0)
    assert ", 25% of its processor time taken by others of its host" in dict(environment.facts())["machine"]
    assert environment.as_json()["environment"]["stolen"] == 0.25


def test_processor_time_is_counted_and_only_rises() -> None:
    before = processor_time()
    after = processor_time()
    assert after.asked >= before.asked > 0
    assert after.asked >= after.stolen >= before.stolen >= 0


def test_the_kind_of_a_file_system_is_that_of_the_deepest_mount(tmp_path: Path) -> None:
    assert filesystem_of(tmp_path) == filesystem_of(tmp_path / "not there yet")
    if sys.platform == "linux":
        assert filesystem_of(Path("/proc/self")) == "proc"


def test_a_table_is_markdown_with_columns_in_line() -> None:
    lines = markdown_table(["rung", "s"], [["a long name", "1.25"], ["b", "10"]]).splitlines()
    assert lines == [
        "| rung        |    s |",
        "|-------------|-----:|",
        "| a long name | 1.25 |",
        "| b           |   10 |",
    ]
    with pytest.raises(ValueError, match="2 cells in each row, got 1 in row 0"):
        markdown_table(["a", "b"], [["c"]])
    assert mebibytes(1.5 * 2**30) == "1,536 MiB"
    assert (ratio(1, 4), ratio(1, 0)) == ("0.25x", "-")


def test_losses_are_compared_over_all_pairs_of_rungs_and_all_steps() -> None:
    rungs = [outcome("a", [1.0, 2.0]), outcome("b", [1.5, 2.0]), outcome("c", [0.75, 2.0])]
    assert greatest_difference(rungs) == 0.75
    assert greatest_difference([rungs[0], outcome("d", [9.0], failure="killed")]) is None
    broken = greatest_difference([rungs[0], outcome("e", [1.0, math.nan])])
    assert broken is not None
    assert math.isnan(broken)


def test_the_table_holds_every_rung_also_the_one_that_failed() -> None:
    rungs = [
        outcome("whole", [3.0, 2.0]),
        outcome("dead", [3.0], failure="killed by SIGKILL"),
        outcome("small", [3.0, 2.0], 150 * 2**20),
    ]
    shown = table(rungs, Settings(), RATES)
    assert "dead: killed by SIGKILL" in shown
    small = next(line for line in shown.splitlines() if line.startswith("| small"))
    cells = [cell.strip() for cell in small.strip("|").split("|")]
    assert cells == [
        "small",
        "150 MiB",
        "0.50x",
        "50 MiB",
        "120 MiB",
        "0.75",
        "1.00 (1.00 to 1.00)",
        f"{Settings().training_flops / 1e9:.3g} s",
        f"{0.75e9 / Settings().training_flops - 1:+.0%}",
        "3.0000",
        "2.0000",
        "50.0% -> 75.0%",
    ]
    assert "chance finds 5.0% of 200" in shown


def test_pictures_and_lines_are_written(tmp_path: Path) -> None:
    rungs = [outcome("whole", [3.0, 2.0]), outcome("dead", [], failure="killed")]
    picture = draw(tmp_path / "new" / "a.png", rungs, Settings(), here())
    assert picture.read_bytes().startswith(PNG)
    lines = write_json_lines(tmp_path / "a.json", here(), rungs).read_text().splitlines()
    assert [next(iter(json.loads(line))) for line in lines] == ["environment", "rung", "rung"]
    assert json.loads(lines[2])["failure"] == "killed"


def asked(**files: Path) -> argparse.Namespace:
    nowhere = dict.fromkeys(("out", "json", "markdown", "plot", "against"))
    return argparse.Namespace(question="a-question", summary="what is it?", **(nowhere | files))


def test_one_stem_names_the_page_the_lines_and_the_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rungs = [outcome("whole", [3.0, 2.0])]
    stem = tmp_path / "results" / "v1.2"

    def picture(path: Path) -> Path:
        path.write_bytes(PNG)
        return path

    (tmp_path / "results").mkdir()
    assert publish(asked(out=stem), here(), sections=["| a |", "Words."], outcomes=rungs, draw=picture) == 0
    page = (tmp_path / "results" / "v1.2.md").read_text()
    assert page.startswith("# a-question\n\nWhat is it?\n\n| | |\n|---|---|\n| date | ")
    assert page.endswith("| a |\n\nWords.\n\nAll bounds hold.\n\n![a-question](v1.2.png)\n")
    assert str(tmp_path) not in page
    assert len((tmp_path / "results" / "v1.2.jsonl").read_text().splitlines()) == 2
    assert "all bounds hold" in capsys.readouterr().out


def test_a_run_that_broke_a_bound_leaves_its_page_but_a_failed_one_no_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def picture(path: Path) -> Path:
        raise AssertionError("there is nothing to draw")

    rungs = [outcome("dead", [], failure="killed")]
    arguments = asked(markdown=tmp_path / "a.md", plot=tmp_path / "a.png")
    assert publish(arguments, here(), sections=["x"], outcomes=rungs, broken=["dead: killed"], draw=picture) == 1
    assert (tmp_path / "a.md").read_text().endswith("x\n\n* does not hold: dead: killed\n")
    assert "dead: killed" in capsys.readouterr().err


def test_a_page_shows_no_path_that_only_this_machine_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", [str(ROOT / "benchmarks" / "__main__.py"), "x", "--home", str(tmp_path)])
    page = markdown_page("x", "y", here().facts(), [])
    assert f"| command | `python -m benchmarks x --home {tmp_path.name}` |" in page
    assert str(tmp_path.parent) not in page


NO_MEMORY = "exit status 1: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 40 bytes."


@pytest.mark.parametrize(
    ("losses", "failure", "complaint"),
    [
        ([1.0, 2.0], None, ""),
        ([1.0, 2.0002], None, "losses must agree"),
        ([1.0, math.nan], None, "losses must agree"),
        ([1.0], "killed", "b: killed"),
        ([1.0], NO_MEMORY, ""),
    ],
    ids=["equal", "different", "not a number", "dead", "no memory"],
)
def test_rungs_must_run_and_agree_but_one_in_memory_may_find_none(
    losses: list[float], failure: str | None, complaint: str
) -> None:
    ours, other = outcome("a", [1.0, 2.0]), outcome("b", losses, failure=failure)
    broken = broken_bounds_of_retrieval({"gradcache-offload": ours, "whole": other}, {})
    assert len(broken) == bool(complaint)
    assert all(complaint in line for line in broken)
    assert broken_bounds_of_retrieval({"gradcache-offload": outcome("a", [1.0], failure=NO_MEMORY)}, {})


def timed(streamed: float, waited: float) -> Outcome:
    steps = [{"resident": 1.0, "streamed": streamed, "ratio": streamed, "waited": waited}] * 3
    return Outcome(Rung("time", "m:f"), result={}, steps=steps)


def peaks(*mebibytes_above_torch: int, held: int = 0) -> list[Outcome]:
    """Rungs of more and more shards; the engine holds ``held`` MiB more from each to the next."""
    return [
        Outcome(
            Rung(f"{k} shards", "m:f"),
            result={
                "parameters": 100 * 2**20 // 8,
                "statistics": {"peak_device_bytes": (20 + k * held) * 2**20},
            },
            moments={FLOOR: 2**20},
            peaks={"steps": (1 + above) * 2**20},
        )
        for k, above in enumerate(mebibytes_above_torch)
    ]


@pytest.mark.parametrize(
    ("time", "finer", "deeper", "complaints"),
    [
        (timed(1.05, 0.01), peaks(90, 70, 50), peaks(40, 41, 42), []),
        (timed(1.20, 0.01), peaks(90, 70, 50), peaks(40, 41, 42), ["at most 1.05, is 1.200"]),
        (timed(1.05, 0.06), peaks(90, 70, 50), peaks(40, 41, 42), ["below 5% of the step, is 5.7%"]),
        (
            timed(1.05, 0.01),
            peaks(90, 70, 50),
            peaks(40, 50, 60),
            ["from 0 shards to 2 shards it does: 40 MiB to 60 MiB"],
        ),
        (timed(1.05, 0.01), peaks(90, 70, 50), peaks(40, 42, 43), ["40 MiB to 43 MiB"]),
        (
            timed(1.05, 0.01),
            peaks(90, 70, 50, held=1),
            peaks(40, 41, 42),
            ["engine holds must not grow, but from 0 shards to 2 shards it does: 20 MiB to 22 MiB"],
        ),
        (timed(math.nan, 0.01), peaks(40, 60), peaks(40, 41), ["is nan", "is nan", "40 MiB to 60 MiB"]),
    ],
)
def test_each_bound_of_the_streamed_step_is_checked(
    time: Outcome, finer: list[Outcome], deeper: list[Outcome], complaints: list[str]
) -> None:
    broken = broken_bounds(time, finer, deeper)
    assert len(broken) == len(complaints)
    for line, complaint in zip(broken, complaints, strict=True):
        assert complaint in line


def test_the_bounds_of_the_engine_alone_and_of_the_disk_are_checked() -> None:
    def streamed(share: float) -> Outcome:
        step = {
            "share": share,
            "seconds": 1.0,
            "plain_direct": 3.0,
            "plain_cached": 2.0,
            "streamed": 2.9,
            "stored": 0.0,
        }
        return Outcome(Rung("disk", "m:f"), result={"bytes": 2**30, "predicted": 1.25}, steps=[step] * 3)

    def alone(ratio: float, loads: int) -> Outcome:
        return Outcome(Rung("alone", "m:f"), result={}, steps=[{"ratio": ratio, "loads": loads}] * 3)

    fine = [streamed(0.95), streamed(0.3)]
    assert broken_speeds(alone(1.01, 0), fine) == []
    for engine, streams, complaint in (
        (alone(1.05, 0), fine, "must be at most 1.02, is 1.050"),
        (alone(1.01, 1), fine, "nothing must be loaded"),
        (
            alone(1.01, 0),
            [streamed(0.8), streamed(0.9)],
            "must get 90% of what a plain read gets from the disk, gets 80",
        ),
        (Outcome(Rung("alone", "m:f"), failure="killed"), fine, "alone: killed"),
    ):
        (line,) = broken_speeds(engine, streams)
        assert complaint in line
    rates = replace(RATES, disk_read_bytes=2.9e9)
    shown = " ".join(disk_table(fine, rates).split())
    assert "| 3.00 | 2.00 | 2.90 | 0.00 | 95.0% (95% to 95%) | 1.00 (predicted 1.25) | 1 s | +0% |" in shown


def test_a_rung_without_a_result_breaks_the_bounds_by_its_reason() -> None:
    dead = Outcome(Rung("dead", "m:f"), failure="killed by SIGKILL")
    assert broken_bounds(dead, peaks(1), peaks(1)) == ["dead: killed by SIGKILL"]
