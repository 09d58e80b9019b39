"""Rungs and memory: a rung that dies is a row of the table, and what is measured is what only that process holds."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.frame.arguments import at_least
from benchmarks.frame.memory import PeakMeter, resident_bytes
from benchmarks.frame.outcome import failures_of_ours
from benchmarks.frame.rungs import Outcome, Rung, run_rung, run_rungs

MEBIBYTE = 2**20
HERE = "tests.benchmarks.rungs_of_tests"
linux = pytest.mark.skipif(not psutil.LINUX, reason="needs Linux: /proc tells anonymous pages from file pages")


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds ``tests`` from the root of the clone."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def rung(function: str, **arguments: object) -> Rung:
    return Rung(function.replace("_", " "), f"{HERE}:{function}", dict(arguments))


def test_a_rung_returns_its_steps_its_moments_and_its_result() -> None:
    events: list[str] = []
    outcome = run_rung(rung("reports", steps=3), on_event=lambda event: events.append(event["event"]))
    assert outcome.failure is None
    assert outcome.result == {"steps": 3}
    assert outcome.steps == [{"loss": 0.0}, {"loss": 1.0}, {"loss": 2.0}]
    assert outcome.peak_bytes >= outcome.moments["after"] / 2 > 0
    assert events == ["total", "step", "step", "step", "memory", "result"]


def test_a_rung_gets_its_environment_unless_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_USER", "theirs")
    wanted = Rung(
        "env", f"{HERE}:shows", {"names": ["SET_BY_USER", "ONLY_OURS"]}, {"SET_BY_USER": "", "ONLY_OURS": "1"}
    )
    assert run_rung(wanted).result == {"SET_BY_USER": "theirs", "ONLY_OURS": "1"}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "exit status 1: ArithmeticError: the reason it died of"),
        ("is_killed", "killed by SIGKILL (out of memory?)"),
        ("leaves_early", "exit status 0"),
        ("is_not_there", "exit status 1: AttributeError: "),
    ],
)
def test_a_rung_that_dies_is_reported_with_its_reason(function: str, reason: str) -> None:
    outcome = run_rung(rung(function))
    assert outcome.result is None
    assert outcome.failure is not None
    assert outcome.failure.startswith(reason)


def test_a_rung_that_dies_does_not_stop_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = run_rungs([rung("raises"), rung("reports", steps=1)], progress=False)
    assert [outcome.failure is None for outcome in outcomes] == [False, True]
    assert outcomes[0].steps == [{"loss": 0.0}]
    assert "the reason it died of" in "".join(capsys.readouterr())


def test_an_interrupted_parent_leaves_no_child() -> None:
    processes = set(psutil.Process().children())

    def interrupt(event: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_rung(rung("reports", steps=2), on_event=interrupt)
    assert set(psutil.Process().children()) <= processes


def test_an_outcome_is_a_json_object_with_the_name_and_the_peak_of_its_rung() -> None:
    outcome = Outcome(Rung("a", "b:c", {}), result={}, peaks={"start": 3, "steps": 7})
    assert outcome.as_json()["rung"] == "a"
    assert outcome.as_json()["peak_bytes"] == 7


def test_an_anonymous_allocation_of_the_child_is_measured() -> None:
    outcome = run_rung(rung("allocates", mebibytes=64))
    grown = outcome.moments["held"] - outcome.moments["before"]
    assert 64 * MEBIBYTE <= grown < 72 * MEBIBYTE


@linux
def test_pages_of_a_file_are_not_counted(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (64 * MEBIBYTE))
    outcome = run_rung(rung("reads_a_file", path=str(path)))
    assert outcome.result == {"total": 64 * MEBIBYTE // 4096}
    assert outcome.moments["mapped"] - outcome.moments["before"] < 4 * MEBIBYTE


def test_a_peak_belongs_to_the_phase_in_which_it_was() -> None:
    outcome = run_rung(rung("has_phases", mebibytes=64))
    assert outcome.peaks["small"] < outcome.moments["held"] - 48 * MEBIBYTE


def test_the_meter_ends_with_the_process_and_keeps_its_peak() -> None:
    # The child answers once it holds the bytes, and leaves when its input is closed: no clock is involved.
    program = f"held = bytearray(b'1') * {32 * MEBIBYTE}\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        with PeakMeter(child.pid, interval_seconds=0.001) as meter:
            child.communicate(b"\n")
    assert meter.peak_bytes >= 32 * MEBIBYTE
    with pytest.raises(ProcessLookupError):
        resident_bytes(child.pid)
    assert resident_bytes(os.getpid()) > 0


def test_a_median_is_of_what_the_steps_report() -> None:
    outcome = Outcome(Rung("a", "m:f"), steps=[{"seconds": 3.0}, {"seconds": 1.0, "more": 6}, {"seconds": 2.0}])
    assert outcome.median("seconds") == 2.0
    assert outcome.median("more", 0) == 0.0
    with pytest.raises(KeyError):
        outcome.median("more")


def test_all_options_that_are_too_small_are_told_at_once() -> None:
    arguments = argparse.Namespace(rows=0, steps=1, dim=3)
    at_least(arguments, "dim", steps=1)
    with pytest.raises(ValueError, match=r"at least 1, got rows=0; expected at least 2, got steps=1$"):
        at_least(arguments, "rows", "dim", steps=2)


def test_a_peer_that_fails_is_no_fault_of_the_question() -> None:
    outcomes = [
        Outcome(Rung("a", "m:f"), failure="killed"),
        Outcome(Rung("b", "m:f", peer="torchao"), failure="killed"),
    ]
    assert failures_of_ours([*outcomes, Outcome(Rung("c", "m:f"), result={})]) == ["a: killed"]
