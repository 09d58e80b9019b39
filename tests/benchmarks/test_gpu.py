"""The one command for a GPU: its parts are commands that exist, fit in ten minutes, and fail one by one."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.frame.limits import Limits
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.gpu.question import Part, parts_of, run_part
from benchmarks.gpu_train.question import broken_bounds, limit_seconds
from benchmarks.memory_latency.shape import Shape
from benchmarks.questions import QUESTIONS
from tests.benchmarks.here import run_here

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


def asked(dry_run: bool) -> argparse.Namespace:
    return argparse.Namespace(dry_run=dry_run, tests=["tests"], parts=[], home=Path("home"))


@pytest.mark.parametrize("dry_run", [False, True])
def test_every_part_is_a_command_that_its_question_understands(dry_run: bool) -> None:
    questions = {question.name: question for question in QUESTIONS}
    for part in parts_of(asked(dry_run), Path("gpu"))[1:]:
        flag, package, name, *words = part.words
        assert (flag, package) == ("-m", "benchmarks")
        parser = argparse.ArgumentParser()
        from benchmarks.frame.report import add_output_arguments

        add_output_arguments(parser)
        questions[name].load().add_arguments(parser)
        parsed = parser.parse_args(words)
        assert parsed.device == ("cpu" if dry_run else "cuda")
        assert parsed.out == Path(f"gpu-{part.name}")


def test_all_parts_together_take_less_than_ten_minutes_and_the_largest_model_comes_last() -> None:
    parts = parts_of(asked(False), Path("gpu"))
    assert sum(part.seconds for part in parts) < 600
    assert [part.name for part in parts][-1] == "train-7b"


def test_a_part_that_fails_or_hangs_is_told_and_leaves_no_process() -> None:
    passed, tail = run_part(Part("a", ("-c", "print('x' * 3)"), 60))
    assert (passed.status, tail) == ("", "xxx")
    failed, tail = run_part(Part("b", ("-c", "raise SystemExit('why')"), 60))
    assert (failed.failure, tail) == ("exit status 1", "why")
    program = (
        "import signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()"
    )
    hung, tail = run_part(Part("c", ("-c", program), 2))
    assert hung.failure == "not done after 2 s"
    while is_alive(int(tail)):  # it was killed, and is gone as soon as it is scheduled
        os.sched_yield()


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_the_dry_run_runs_its_parts_and_a_broken_one_does_not_stop_the_others(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A real run of two parts: pytest finds nothing at a path that is not there, training passes."""
    nowhere = str(Path("nowhere").absolute())
    status = main(["gpu", "--dry-run", "--tests", nowhere, "--parts", "tests", "train-small", "--out", "g"])
    shown = capsys.readouterr()
    assert status == 1
    assert "tests: exit status" in shown.err
    lines = [json.loads(line) for line in Path("g.jsonl").read_text().splitlines()[1:]]
    assert [bool(line["failure"]) for line in lines] == [True, False], shown.out
    assert "All bounds hold." in Path("g-train-small.md").read_text()
    assert Path("g-train-small.png").exists()
    assert Path("g.png").exists()
    commands = [line for line in Path("g.md").read_text().splitlines() if line.startswith("`python -m")]
    assert len(commands) == 2
    assert not any(str(Path.cwd()) in line for line in commands)  # that is of this machine alone


def test_the_limit_counts_adamw_where_its_states_are_and_what_must_travel_then() -> None:
    shape = Shape(layers=1, dim=64, rows=1, positions=1)
    rates = {"matmul_flops": 1e15, "copy_bytes": 1e6, "disk_read_bytes": 1.0, "disk_read_buffered_bytes": 1.0}
    bus = {"host_to_device_bytes": 1e5, "device_to_host_bytes": 1e9, "device_copy_bytes": 1e8}
    gpu = Limits(threads=1, device="cuda", dtype="bfloat16", disk_write_bytes=1.0, direct=True, **rates, **bus)
    found = {
        way: limit_seconds(Outcome(Rung(way, "m:f", {"way": way}), steps=[{"seconds": 1.0, **moved}]), shape, gpu)
        for way, moved in (
            ("resident", {}),
            ("torchao_optimizer", {}),
            ("ours", {"bytes_loaded": 2, "bytes_stored": 2}),
        )
    }
    assert found["resident"] == 14 * shape.parameters / 1e8
    assert found["torchao_optimizer"] == 4 * shape.parameters / 1e5
    assert found["ours"] == 14 * shape.parameters / 1e6


def test_a_part_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpu", "--dry-run", "--parts", "train-70b"]) == 2
    assert "train-7b" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("question", ["gpu", "gpu-train"])
def test_without_a_gpu_the_command_says_what_runs_instead(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([question]) == 2
    assert "cpu" in capsys.readouterr().err.lower()


def test_all_ways_of_training_begin_with_the_same_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu_train.question.run_rungs", run_here)
    sizes = ["--layers", "3", "--dim", "64", "--rows", "4", "--positions", "4", "--steps", "3"]
    assert main(["gpu-train", "--device", "cpu", *sizes, "--json", "t.json"]) == 0
    rungs = [json.loads(line) for line in Path("t.json").read_text().splitlines()[1:]]
    done = [rung for rung in rungs if rung["result"] is not None]
    assert len(done) == 3
    assert all(rung["steps"][-1]["loss"] < rung["steps"][0]["loss"] for rung in done)


def test_another_first_loss_is_told() -> None:
    first, same, other = (
        Outcome(Rung(name, "m:f"), result={}, steps=[{"loss": loss}])
        for name, loss in (("a", 1.0), ("b", 1.01), ("c", 1.2))
    )
    assert broken_bounds([first, same]) == []
    assert broken_bounds([first, other]) == ["c: begins with loss 1.2000, a with 1.0000"]


def test_the_inner_pieces_run_and_are_not_part_of_the_suite() -> None:
    collected = subprocess.run(
        [sys.executable, "-m", "pytest", "benchmarks", "--collect-only", "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    for piece in ("plan_a_step[1000]", "moves_parameters[disk]", "fork_and_join", "contrastive_loss", "balance_layers"):
        assert piece in collected
    assert 'testpaths = ["tests"]' in (ROOT / "pyproject.toml").read_text()
