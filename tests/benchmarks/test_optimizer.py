"""The question ``optimizer``: every way trains the same model, is timed fairly, and its bounds are bounds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from benchmarks.__main__ import main
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.pairs import Paired
from benchmarks.frame.traffic import bytes_of_step
from benchmarks.optimizer.deepspeed_way import _Blocks
from benchmarks.optimizer.question import (
    COMPARED,
    DISK,
    LARGE,
    NAMES,
    PEER,
    _rung,
    _way_of,
    broken_bounds,
    broken_large,
)
from benchmarks.optimizer.shape import Shape, parameters_of_block
from benchmarks.optimizer.steps import FLOOR, STEPS, greatest_difference, run_way, train
from benchmarks.optimizer.ways import WAYS, Way
from tests.benchmarks.here import Recorder, apart_here, in_turn_here, pairs_here

SHAPE = Shape(blocks=3, dim=64, rows=2, positions=4)
TURNS = 3


def recorder(turns: int) -> Recorder:
    return Recorder(Outcome(Rung("recorded", "module:function")), turns)


def trained(way: str, folder: Path) -> tuple[Path, Outcome]:
    report = recorder(TURNS)
    saved = folder / f"{way}.pt"
    home = folder / way
    home.mkdir()
    report.outcome.result = train(report, way, asdict(SHAPE), str(home), 1 + TURNS, str(saved))
    return saved, report.outcome


def test_every_clipped_way_ends_at_the_resident_model_and_counts_its_bytes(tmp_path: Path) -> None:
    reference, _ = trained("resident", tmp_path)
    for way in COMPARED:
        saved, outcome = trained(way, tmp_path)
        assert greatest_difference(reference, saved) <= 1e-6
        assert len(outcome.steps) == TURNS
        if way == DISK and "written" in outcome.steps[0]:
            written = bytes_of_step(outcome.steps)[1] / SHAPE.parameters
            assert 16 <= written < 21  # parameter, two moments, gradient; boundaries between blocks


def test_clipping_clips_at_every_step(tmp_path: Path) -> None:
    way = WAYS["serial"](SHAPE, tmp_path)
    for k in range(3):
        way.step(*SHAPE.batch(k))
        assert way.optimizer.last_norm > 2 * SHAPE.max_norm  # type: ignore[attr-defined]


def test_the_model_that_is_on_disk_from_birth_is_the_same_model(tmp_path: Path) -> None:
    reference, _ = trained("resident", tmp_path)
    saved, outcome = trained(LARGE, tmp_path)
    assert greatest_difference(reference, saved) <= 1e-6
    assert len(outcome.steps) == TURNS


def test_a_model_is_counted_and_made_block_by_block() -> None:
    assert SHAPE.parameters == sum(p.numel() for block in SHAPE.model() for p in block.parameters())
    assert parameters_of_block(64) * 3 == SHAPE.parameters
    for once, again in zip(SHAPE.block(1).parameters(), SHAPE.model()[1].parameters(), strict=True):
        assert once.equal(again)


@pytest.mark.parametrize("leaves_work", [False, True])
def test_a_way_that_leaves_work_behind_is_timed_on_a_second_step_and_finishes_before_others(leaves_work: bool) -> None:
    calls: list[str] = []

    class Recorded(Way):
        def step(self, state: Any, target: Any) -> float:
            calls.append("step")
            return 0.0

        def settle(self) -> None:
            calls.append("settle")

        def parameters(self) -> Any:
            return iter(())

    way = Recorded(SHAPE, Path())
    way.leaves_work = leaves_work
    report = recorder(2)
    assert run_way(report, way, 0, None)["steps"] == (5 if leaves_work else 3)
    turn = ["step", "step", "settle"] if leaves_work else ["step", "settle"]
    assert calls == ["step", *turn, *turn]
    assert len(report.outcome.steps) == 2


def test_sizes_that_nobody_could_train_are_refused_all_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["optimizer", "--dim", "100", "--blocks", "0"]) == 2
    shown = capsys.readouterr().err
    assert "dim=100" in shown
    assert "blocks=0" in shown


@pytest.mark.parametrize(("keeps", "forwards"), [(False, 2), (True, 1)])
def test_the_peer_recomputes_each_block_unless_it_is_to_keep_its_activations(
    tmp_path: Path, keeps: bool, forwards: int
) -> None:
    rung = _rung(PEER, SHAPE, tmp_path, 0, keeps)
    assert rung.name == NAMES[PEER] + (", activations kept" if keeps else "")
    assert rung.arguments["checkpointed"] is not keeps
    assert _way_of(Outcome(rung)) == PEER
    model = _Blocks(SHAPE.model(), rung.arguments["checkpointed"])
    ran: list[nn.Module] = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda module, _: ran.append(module))
    model(*SHAPE.batch(0)).backward()
    assert [ran.count(block) for block in model.blocks] == [forwards] * SHAPE.blocks


def paired(way: str, seconds: float = 1.0, peak: int = 100) -> Paired:
    outcome = Outcome(Rung(NAMES[way], "module:function"), result={}, peaks={STEPS: peak}, moments={FLOOR: 10})
    steps = [{"seconds": seconds, "kernel": 0.0, "waited": 0.0}] * 3
    outcome.steps = list(steps)
    return Paired(outcome, steps, [{"seconds": 1.0}] * 3)


@pytest.mark.parametrize(
    ("found", "differences", "complaints"),
    [
        ({DISK: paired(DISK, 1.05), PEER: paired(PEER, 1.6, 400)}, {DISK: 1e-7, PEER: 1e-3}, []),
        ({DISK: paired(DISK, 1.06)}, {DISK: 0.0}, ["at most 1.05"]),
        ({DISK: paired(DISK)}, {DISK: 2e-6}, ["must agree"]),
        ({DISK: paired(DISK)}, {DISK: math.nan}, ["must agree"]),
        ({DISK: paired(DISK), PEER: paired(PEER, 1.4, 300)}, {}, ["at least 1.5 times as fast", "of the memory"]),
    ],
)
def test_each_bound_is_checked(found: dict[str, Paired], differences: dict[str, float], complaints: list[str]) -> None:
    broken = broken_bounds(paired("resident").outcome, found, differences)
    assert len(broken) == len(complaints)
    for line, complaint in zip(broken, complaints, strict=True):
        assert complaint in line


def test_a_rung_that_failed_breaks_the_run_and_one_that_was_skipped_does_not() -> None:
    dead, absent = paired(DISK), paired(PEER)
    dead.outcome.result, dead.outcome.failure = None, "killed by SIGKILL"
    absent.outcome.result, absent.outcome.skipped = None, "not installed"
    assert broken_bounds(paired("resident").outcome, {DISK: dead, PEER: absent}, {}) == ["on disk: killed by SIGKILL"]


def large(way: str, seconds: float, peak: int, loss: float = 1.0) -> Outcome:
    steps = [{"loss": loss, "seconds": seconds}]
    return Outcome(Rung(NAMES[way], "m:f"), result={"first": {"loss": 2.0}}, steps=steps, peaks={STEPS: peak})


@pytest.mark.parametrize(
    ("ours", "theirs", "complaints"),
    [
        (large(LARGE, 1.0, 2 << 30), large(PEER, 1.6, 8 << 30), []),
        (large(LARGE, 1.0, 2 << 30), None, []),
        (large(LARGE, 1.0, 3 << 30), large(PEER, 1.6, 12 << 30), ["at most 2 GiB, takes 3.00 GiB"]),
        (large(LARGE, 1.0, 1 << 30), large(PEER, 1.4, 3 << 30), ["at least 1.5 times as fast", "of the memory"]),
        (large(LARGE, 1.0, 1 << 30, math.nan), None, ["losses must be numbers"]),
    ],
)
def test_the_one_that_is_larger_than_memory_has_bounds(
    ours: Outcome, theirs: Outcome | None, complaints: list[str]
) -> None:
    broken = broken_large(ours, theirs)
    assert len(broken) == len(complaints)
    for line, complaint in zip(broken, complaints, strict=True):
        assert complaint in line


SIZES = ["--dim", "64", "--rows", "2", "--positions", "4", "--blocks", "2", "--pairs", "2", "--other-pairs", "1"]


def test_the_question_ends_in_a_page_and_a_picture(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At sizes where times mean nothing: what cannot depend on them is there, and equal."""
    monkeypatch.setattr("benchmarks.optimizer.question.run_pairs", pairs_here)
    ways = ["--ways", "disk", "host", "in backward", "serial"]
    status = main(["optimizer", *SIZES, *ways, "--home", str(tmp_path / "home"), "--out", str(tmp_path / "o")])
    shown = capsys.readouterr()
    assert status == (1 if "at most" in shown.err else 0), shown.err
    assert "must agree" not in shown.err
    page = (tmp_path / "o.md").read_text()
    for way in ("resident", DISK, "host", "in backward", "serial"):
        assert f"| {NAMES[way]}" in page
    rungs = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()[1:]]
    assert len(rungs) == 5
    assert (tmp_path / "o.png").stat().st_size > 10_000
    assert list((tmp_path / "home").iterdir()) == []


@pytest.mark.parametrize("alone", [False, True])
def test_a_model_is_on_disk_from_birth(
    alone: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if alone:
        monkeypatch.setattr("benchmarks.optimizer.question.run_apart", apart_here)
    else:
        monkeypatch.setattr("benchmarks.optimizer.question.run_in_turn", in_turn_here)
    options = [
        "--parameters",
        "150e3",
        "--ways",
        "disk",
        "--home",
        str(tmp_path / "home"),
        "--out",
        str(tmp_path / "o"),
        *(["--alone"] if alone else []),
    ]
    assert main(["optimizer", *SIZES, *options]) == 0
    shown = capsys.readouterr().out
    assert "0.000 billion parameters in 3 blocks" in shown
    assert f"| {NAMES[LARGE]}" in shown
    assert (tmp_path / "o.png").exists()


def test_a_model_that_the_disk_cannot_hold_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimizer", "--parameters", "1e15", "--home", str(tmp_path)]) == 2
    assert "of free disk" in capsys.readouterr().err
