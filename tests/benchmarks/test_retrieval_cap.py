"""A hard cap on memory: where it lies, who dies under it, and what counts as having died of it."""

from __future__ import annotations

import math
from pathlib import Path

import psutil
import pytest

from benchmarks.__main__ import main
from benchmarks.frame.cap import cap_memory
from benchmarks.frame.memory import PeakMeter
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.rungs import run_rung
from benchmarks.retrieval.batch_sizes import BatchSizes, sentence
from benchmarks.retrieval.cap import broken_cap, cap_table, died_of_memory, midway
from benchmarks.retrieval.corpus import build_corpus
from benchmarks.retrieval.settings import Settings
from tests.benchmarks.here import run_here

linux = pytest.mark.skipif(not psutil.LINUX, reason="needs Linux: RLIMIT_DATA counts private mappings there")
NO_MEMORY = (
    "exit status 1: RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 25165824 bytes. Error code 12 (Cannot allocate memory)"
)


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds ``tests`` from the root of the clone."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def outcome(name: str, losses: list[float], needs: int = 0, failure: str | None = None) -> Outcome:
    steps = [{"loss": loss, "seconds": 1.0} for loss in losses]
    result = None if failure else {"recall_before": 0.1, "recall_after": losses[-1], "held_out": 10, "parameters": 1}
    return Outcome(Rung(name, "m:f"), result=result, failure=failure, steps=steps, data_peak_bytes=needs)


@linux
def test_a_capped_process_can_take_what_the_cap_leaves_and_dies_of_more_as_of_a_want_of_memory() -> None:
    target = "tests.benchmarks.rungs_of_tests:allocates_under_a_cap"
    assert run_rung(Rung("fits", target, {"cap_mebibytes": 96, "mebibytes": 32})).failure is None
    dead = run_rung(Rung("does not", target, {"cap_mebibytes": 96, "mebibytes": 128}))
    assert died_of_memory(dead), dead.failure
    assert "died in step 1: cannot allocate 134,217,728 bytes" in cap_table([dead], 1 << 20)


@linux
def test_a_cap_below_what_the_process_holds_is_refused_as_a_want_of_memory() -> None:
    import resource

    with pytest.raises(
        MemoryError, match=r"the cap of 1 MiB is no more than the [\d,]+ MiB that the process has"
    ) as told:
        cap_memory(1 << 20)
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 1 << 20
    dead = outcome("dead", [], failure=f"exit status 1: MemoryError: {told.value}")
    assert "died in step 1: cannot allocate memory" in cap_table([dead], 1 << 20)


@linux
def test_the_meter_sees_private_memory_that_is_mapped_and_not_used() -> None:
    with PeakMeter(psutil.Process().pid) as meter:
        pass
    assert meter.data_peak_bytes >= 2**20


def test_the_cap_lies_midway_between_ours_and_the_least_of_the_others() -> None:
    ours, others = outcome("ours", [1.0], 100), [outcome("whole", [1.0], 500), outcome("cached", [1.0], 200)]
    assert midway(ours, others) == 150
    assert midway(ours, [*others, outcome("dead", [], 50, NO_MEMORY)]) == 150
    assert midway(outcome("ours", [1.0], 200), others) is None
    assert midway(outcome("ours", [], 100, "killed"), others) is None
    assert midway(ours, []) is None


def test_under_the_cap_ours_must_train_to_its_losses_and_the_others_must_find_no_memory() -> None:
    free, ours, dead = outcome("o", [1.0, 2.0]), outcome("o", [1.0]), outcome("w", [], failure=NO_MEMORY)
    assert broken_cap(ours, [dead], free, 1e-4) == []
    assert "losses must agree" in broken_cap(outcome("o", [1.001]), [dead], free, 1e-4)[0]
    assert "losses must agree" in broken_cap(outcome("o", [math.nan]), [dead], free, 1e-4)[0]
    assert "but it trained" in broken_cap(ours, [outcome("w", [1.0])], free, 1e-4)[0]
    assert "but failed: killed" in broken_cap(ours, [outcome("w", [], failure="killed")], free, 1e-4)[0]
    assert broken_cap(dead, [dead], free, 1e-4) == ["w: died in step 1: cannot allocate 25,165,824 bytes"]


def test_every_batch_size_sees_as_many_pairs() -> None:
    sizes = BatchSizes([4, 16], 64, Settings())
    assert [(s.batch, s.steps) for s in sizes.settings] == [(4, 16), (16, 4)]
    assert sizes.settings[1].learning_rate == pytest.approx(2 * sizes.settings[0].learning_rate)
    for wrong in ([16, 4], [1, 4], [4, 4], [4, 65]):
        with pytest.raises(ValueError, match="expected batch sizes"):
            BatchSizes(wrong, 64, Settings())


@pytest.mark.parametrize(
    ("recalls", "words"),
    [
        ([0.1, 0.2, 0.3], "rises with the batch, from 10.0% to 30.0%"),
        ([0.1, 0.4, 0.3], "higher with the largest batch than with the smallest"),
        ([0.3, 0.2, 0.1], "does not rise with the batch"),
        ([0.3], "says nothing"),
    ],
)
def test_the_sentence_says_what_the_table_shows(recalls: list[float], words: str) -> None:
    assert words in sentence([outcome(str(k), [recall]) for k, recall in enumerate(recalls)])


SMALL = "--dim 64 --depth 2 --chunk 4 --slices 3 --vocabulary 300 --held-out 20"


def test_batches_of_several_sizes_end_in_a_table(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("benchmarks.retrieval.question.build_corpus", lambda pairs: build_corpus(pairs=400))
    monkeypatch.setattr("benchmarks.retrieval.question.run_rungs", run_here)
    monkeypatch.setattr("benchmarks.retrieval.training.cap_memory", lambda nbytes: True)
    options = ["--batches", "8", "16", "--examples", "32", "--home", str(tmp_path), "--out", str(tmp_path / "b")]
    assert main(["retrieval", *SMALL.split(), *options]) == 0
    page = (tmp_path / "b.md").read_text()
    assert "| 8 pairs" in page
    assert "|     2 |" in page  # steps of the larger batch
    assert (tmp_path / "b.png").exists()
    assert "all bounds hold" in capsys.readouterr().out


@linux
def test_rungs_that_find_no_memory_under_a_cap_are_shown_as_such(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A cap below what an interpreter with torch holds: nobody can do anything, and each one says so."""
    monkeypatch.setattr("benchmarks.retrieval.question.build_corpus", lambda pairs: build_corpus(pairs=400))
    options = ["--batch", "10", "--steps", "2", "--rungs", "gradcache", "--cap", "1", "--capped-steps", "1"]
    status = main(["retrieval", *SMALL.split(), *options, "--home", str(tmp_path), "--out", str(tmp_path / "c")])
    shown = capsys.readouterr()
    assert status == 1
    assert "Under a hard cap of 1 MiB" in shown.out
    assert "GradCache + offload, capped: died in step 1: cannot allocate memory" in shown.err
    assert "GradCache, capped: expected" not in shown.err
