"""A question asked again: its ratios stand beside those of before, and only where the two runs can be compared."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.frame.again import Earlier, again_table, ratios_of, read_earlier
from benchmarks.frame.environment import Environment, here
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.report import publish


def ran(name: str, peak: int, ratio: float | None = None, *pairs: float) -> Outcome:
    steps = [{"seconds": 1.0, "ratio": value} for value in pairs]
    return Outcome(Rung(name, "m:f"), result={}, steps=steps, peaks={"steps": peak}, ratio=ratio)


def asked(**files: Path) -> argparse.Namespace:
    nowhere = dict.fromkeys(("out", "json", "markdown", "plot", "against"))
    return argparse.Namespace(question="q", summary="what is it?", **(nowhere | files))


def run(arguments: argparse.Namespace, *ratios: float, environment: Environment | None = None) -> int:
    outcomes = [ran("plain", 100), *(ran(f"way {k}", 100, ratio) for k, ratio in enumerate(ratios))]
    return publish(arguments, environment or here(), sections=["| a |"], outcomes=outcomes)


def test_ratios_are_those_of_pairs_and_of_peaks_never_seconds() -> None:
    outcomes = [
        ran("plain", 200),
        ran("paired", 100, 1.5),
        ran("inside", 300, None, 1.0, 3.0, 1.2),
        Outcome(Rung("dead", "m:f"), failure="killed"),
    ]
    assert ratios_of(outcomes) == {"paired: time": 1.5, "inside: time": 1.2, "paired: peak": 0.5, "inside: peak": 1.5}


def test_a_run_that_replaces_another_shows_how_far_each_ratio_moved(tmp_path: Path) -> None:
    stem = tmp_path / "q"
    assert run(asked(out=stem), 1.0, 2.0) == 0
    assert "Again" not in (tmp_path / "q.md").read_text()
    assert run(asked(out=stem), 1.05, 2.5) == 0
    page = (tmp_path / "q.md").read_text()
    assert "3 of 4 ratios are within 10%; the one that moved most is way 1: time, by +25.0%." in page
    assert [line.split()[1:-1] for line in page.splitlines() if "way 1: time  " in line or "| way 1: time |" in line]
    (now,) = [json.loads(line)["ratios"] for line in (tmp_path / "q.jsonl").read_text().splitlines()[:1]]
    assert now["way 1: time"] == 2.5


def test_told_to_come_out_like_another_run_it_fails_where_it_does_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = tmp_path / "before.jsonl"
    run(asked(json=before), 1.0, 2.0)
    assert run(asked(against=before), 1.09, 1.9) == 0
    assert run(asked(against=before), 1.0, 1.7) == 1
    assert "way 1: time: must be within 10% of before, moved by -15.0%" in capsys.readouterr().err
    assert run(asked(against=tmp_path / "nothing.jsonl"), 1.0) == 1
    assert "nothing.jsonl: holds no ratios" in capsys.readouterr().err


def test_another_machine_or_another_command_is_another_question() -> None:
    now = here()
    same = replace(now, date="earlier", command="python -m benchmarks q --out elsewhere --rounds 3")
    ours = replace(now, command="python -m benchmarks q --rounds 3 --home h --against=x.jsonl")
    ratios = {"a": 1.0}
    for environment, words in (
        (same, ""),
        (replace(same, cpu="another"), "on another machine"),
        (replace(same, threads=now.threads + 1), "on another machine"),
        (replace(same, command="python -m benchmarks q --rounds 4"), "of another command"),
    ):
        earlier = Earlier(environment.as_json()["environment"], {"a": 1.0})
        assert words in (reason := earlier.why_not(ours, ratios))
        assert bool(words) == bool(reason)
        assert (reason or "Again: the same command") in again_table(earlier, ours, ratios)
    assert "no ratio in common" in Earlier(same.as_json()["environment"], {"b": 1.0}).why_not(ours, ratios)


@pytest.mark.parametrize("text", ["", "no JSON", "[1]", '{"environment": {}}'])
def test_a_file_without_ratios_is_no_earlier_run(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert read_earlier(path) is None


def test_a_ratio_that_is_not_a_number_has_moved() -> None:
    earlier = Earlier({}, {"a": 1.0, "b": 1.0})
    assert earlier.moved({"a": float("nan"), "b": 1.1}) == ["a", "b"]
    assert earlier.moved({"a": 1.0, "b": 0.9001}) == []
