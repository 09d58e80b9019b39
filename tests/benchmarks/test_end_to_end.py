"""The questions, from the command line to the exit status, at the smallest sizes that still have every part."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.retrieval.corpus import build_corpus
from tests.benchmarks.here import RATES, run_here

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("in_a_folder_of_its_own")


@pytest.fixture
def small_corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.retrieval.question.build_corpus", lambda pairs: build_corpus(pairs=400))


SMALL = "--dim 64 --depth 2 --batch 10 --chunk 4 --steps 3 --slices 3 --vocabulary 300 --held-out 20"


def test_three_ways_train_with_the_same_losses(
    small_corpus: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dropout on, a last chunk that is smaller, boundaries that leave memory."""
    options = [*SMALL.split(), "--boundary-bytes", "20000", "--json", "r.json", "--plot", "r.png"]
    assert main(["retrieval", *options]) == 0, "".join(capsys.readouterr())
    shown = capsys.readouterr().out
    assert "Greatest difference between the rungs' losses at any step" in shown
    environment, *rungs = [json.loads(line) for line in Path("r.json").read_text().splitlines()]
    assert "environment" in environment
    assert [rung["rung"] for rung in rungs] == ["whole batch", "GradCache", "GradCache + offload"]
    losses = [[step["loss"] for step in rung["steps"]] for rung in rungs]
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], abs=1e-5)
    assert len(set(losses[0])) == 3  # it trains
    statistics = rungs[2]["result"]["statistics"]
    assert statistics["bytes_spilled"] > 0
    assert Path("r.png").stat().st_size > 10_000
    assert not [path for path in (tmp_path / "cache" / "gradstream").iterdir() if path.is_dir()]  # homes are gone


def test_shards_are_loaded_as_often_for_one_chunk_as_for_many(
    small_corpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.retrieval.question.run_in_turn", run_here)
    monkeypatch.setattr("benchmarks.retrieval.training.cap_memory", lambda nbytes: True)  # it would be this process's
    loads = []
    for chunk in ("2", "10"):
        options = [*SMALL.split(), "--chunk", chunk, "--rungs", "gradcache-offload", "--json", f"{chunk}.json"]
        assert main(["retrieval", *options]) == 0
        rung = json.loads(Path(f"{chunk}.json").read_text().splitlines()[1])
        loads.append(rung["result"]["statistics"]["shard_loads"])
    assert loads[0] == loads[1]


def test_the_streamed_step_is_measured_against_the_resident_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At sizes where times mean nothing: the loss is compared inside, and the tables and the picture are there."""
    monkeypatch.setattr("benchmarks.offload_step.question.run_rungs", run_here)
    monkeypatch.setattr("benchmarks.offload_step.question.measure_limits", lambda path: RATES)
    sizes = ["--dim", "64", "--rows", "2", "--positions", "4", "--pairs", "2", "--shards", "2", "4", "--width", "64"]
    status = main(["offload-step", *sizes, "--json", "s.json", "--plot", "s.png"])
    shown = capsys.readouterr()
    assert status == (1 if "must" in shown.err else 0)
    assert "median ratio of pairs" in shown.out
    rungs = [json.loads(line) for line in Path("s.json").read_text().splitlines()[1:]]
    names = ["4 layers, 2 shards", "4 layers, 4 shards", "1 layer each, 2 shards", "1 layer each, 4 shards"]
    more = ["all in slots", "disk, inputs take gradients", "disk, weights take gradients"]
    assert [rung["rung"] for rung in rungs[1:]] == [*names, f"{names[-1]}, allocator as it comes", *more]
    assert [step["loads"] for step in rungs[-3]["steps"]] == [0, 0]
    assert rungs[1]["result"]["parameters"] == rungs[2]["result"]["parameters"] == 2 * rungs[3]["result"]["parameters"]
    assert len(rungs[0]["steps"]) == 2
    assert Path("s.png").exists()


@pytest.mark.parametrize("shards", [["4", "6"], ["4", "4"], ["0"]])
def test_shards_that_cannot_be_compared_are_refused(shards: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["offload-step", "--shards", *shards]) == 2
    assert "each a multiple of the one before" in capsys.readouterr().err


def test_a_run_that_is_told_to_stop_leaves_no_process_and_no_home(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "offload-step", "--dim", "64", "--rows", "1", "--pairs", "100000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("homes"):
            pass
        while "step/s" not in process.stderr.readline(200):  # the first rung is under way
            pass
        children = psutil.Process(process.pid).children()
        assert children
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not [child for child in children if child.is_running()]
    assert list((tmp_path / "cache" / "gradstream").iterdir()) == []
