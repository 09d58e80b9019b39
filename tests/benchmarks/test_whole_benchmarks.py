"""Each benchmark from its options to its page, at the smallest sizes that still have every part.

Cases run in the test's own process; one benchmark runs in processes, as a user runs it. Times mean nothing here: what
cannot depend on them is there, and equal.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks import qwen_embedding
from benchmarks.__main__ import main
from benchmarks.models.corpus import build_corpus
from benchmarks.models.methods import DISK, RESIDENT
from offload import Pretrained
from tests.benchmarks.here import outcomes_of, run_here

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


@pytest.fixture(autouse=True)
def without_caps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap would be this process's."""
    for module in ("retrieval", "gradcache_batch", "models.methods"):
        monkeypatch.setattr(f"benchmarks.{module}.cap_memory", lambda nbytes: None)


def pages(stem: str) -> str:
    """The page; no files of cases are left."""
    assert [path for path in Path("cache/gradstream").iterdir() if path.is_dir()] == []
    return Path(f"{stem}.md").read_text()


def test_retrieval_trains_three_ways_to_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on, a last chunk that is smaller."""
    monkeypatch.setattr("benchmarks.retrieval.build_corpus", lambda pairs: build_corpus(pairs=400))
    small = "--dim 64 --depth 2 --batch 10 --chunk 4 --steps 3 --memory 16MiB --vocabulary 300 --held-out 20"
    assert run_here("retrieval", small, "r") == 0
    assert "Greatest difference between the methods' losses at any step" in pages("r")
    cases = outcomes_of("r")["free"]
    assert [case.name for case in cases] == ["whole batch", "GradCache", "GradCache + offload"]
    losses = [case.values("loss") for case in cases]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5)
    assert len(set(losses[0])) == 3  # it trains
    assert all({*case.result[when]} == {"loss", "recall"} for case in cases for when in ("before", "after"))


def test_optimizer_trains_a_model_that_is_on_disk_from_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_here("optimizer", "--dim 64 --rows 2 --positions 4 --parameters 150e3 --ways deepspeed", "o") == 0
    page = pages("o")
    assert re.search(r"\| on disk, from birth +\|", page)
    assert "in 3 blocks" in page
    (cases,) = outcomes_of("o").values()
    assert [case.skipped for case in cases] == [None, "peers need a process"]
    assert run_here("optimizer", "--parameters 1e15") == 2
    assert "GB of free disk" in capsys.readouterr().err


def test_build_huge_trains_to_the_losses_of_the_resident_model() -> None:
    run_here("build-huge", "--cap 1 --dim 64 --blocks 9 --rows 4 --steps 3", "b")
    page = pages("b")
    assert "must not fit under the cap, but it trained" in page  # there is no cap here
    assert "difference of losses" not in page
    losses = {case.name: case.values("loss") for case in outcomes_of("b")["training"]}
    assert losses["offloaded, capped"] == pytest.approx(losses["resident, no cap"], rel=1e-6)
    for trained in (losses["resident, no cap"], fewer := losses["offloaded, fewer bytes, capped"]):
        assert trained[2] < trained[0]
    assert fewer == pytest.approx(losses["resident, no cap"], rel=0.01)
    assert fewer != losses["resident, no cap"]


def test_gradcache_batch_runs_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gradcache_batch import FUSED, PEERS, PLAIN, WAYS

    time = "--dim 64 --depth 2 --vocabulary 300 --positions 8 --pairs 4 --chunk 2 --rounds 1"
    memory = "--limit 64 --most 64 --small-dim 64 --chunks 1 4 --chunked-dim 64"
    # The reference is a peer, which needs a process: plain torch stands in for it.
    upstream = [name for name in PEERS if name.startswith("upstream")]
    for name in upstream:
        monkeypatch.setitem(WAYS, name, WAYS[PLAIN])
        monkeypatch.delitem(PEERS, name)
    monkeypatch.setattr("benchmarks.gradcache_batch.GROWING", (*upstream, PLAIN, FUSED))
    run_here("gradcache-batch", f"{time} {memory}", "g")
    page = pages("g")
    assert re.search(r"\| ours over OffloadModel +\|\s+64 \|", page)
    assert "difference of gradients" not in page
    (loads,) = [case.result["bytes_loaded"] for case in outcomes_of("g")["chunks"] if case.name.endswith("Model")]
    assert len({*loads.values()}) == 1


def test_qwen_embedding_has_the_sizes_of_the_model_that_it_names(tmp_path: Path) -> None:
    assert qwen_embedding.Settings().model.parameters == 595_776_512
    small = qwen_embedding.Settings(blocks=2, width=64, vocabulary=50).model
    assert small.write(tmp_path / "w") == 4 * small.parameters
    assert sum(torch.Size(shape).numel() for _, shape, _ in Pretrained(tmp_path / "w").headers()) == small.parameters


def test_qwen_embedding_trains_to_the_losses_of_the_plain_model(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers", reason="needs transformers: pip install transformers")
    ours, reference = qwen_embedding.OURS, qwen_embedding.REFERENCE
    cases = {ours: (DISK, ""), "plain": (RESIDENT, ""), reference: (RESIDENT, "")}
    monkeypatch.setattr(qwen_embedding, "CASES", cases)
    sizes = "--blocks 3 --width 64 --vocabulary 2000 --pairs 4 6 --positions 8 --chunk 4 --cap 1 --steps 2"
    run_here("qwen-embedding", sizes, "q")
    assert "difference of losses" not in pages("q")
    for group in outcomes_of("q").values():
        assert [len({*case.values("loss")}) for case in group] == [2, 2, 2]
        mine, plain = (case.values("loss") for case in group[:2])
        assert mine == pytest.approx(plain, rel=1e-5)


def test_pipe_ladder_runs_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.pipe_ladder.MORE_ROUNDS", 1)
    assert run_here("pipe-ladder", "--dim 16 --blocks 2 --rows 8 --chunks 1 2 --rounds 1", "p") in (0, 1)
    assert "| ours, 1F1B " in pages("p")
    assert [*outcomes_of("p")] == ["time", "tiny cells", "peaks"]


def test_memory_latency_computes_the_gradients_of_plain_pytorch_with_each_setting() -> None:
    words = "--layers 4 --dim 64 --rows 4 --positions 4 --pairs 1 --only slices"
    assert run_here("memory-latency", words, "m") == 0
    page = pages("m")
    assert Path("m.png").stat().st_size > 10_000
    assert "| training " in page
    groups = outcomes_of("m")
    ours = [case for case in groups["training"] if case.name.startswith("ours:")]
    assert len(ours) == 5
    assert [case.name for case in groups["in use"]] == [case.name for case in groups["training"]]
    assert all(case.result["difference"] <= 1e-5 for case in ours)


@pytest.mark.parametrize("work", ["training", "contrastive"])
def test_memory_latency_trains_under_memory_to_plain_losses(work: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, as a commit before, is this one."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    sizes = "--layers 4 --dim 64 --rows 4 --positions 4 --pairs 2 --shares 2 --only ours before checkpoint"
    before = f"--before {ROOT}" if work == "training" else ""
    run_here("memory-latency", f"--work {work} {sizes} {before}", "m")
    page = pages("m")
    assert "predicted peak" in page
    assert "the difference of its loss" not in page
    groups = outcomes_of("m")
    least = groups["alone"][1].result["bytes"]
    cases = {case.name: case for case in groups["in turn"]}
    for name in ("ours: the least", *(["before: the least"] if before else [])):
        assert cases[name].case.arguments["how"] == {"memory": least}
        assert cases[name].result["counted"] <= least
        assert cases[name].values("loss") == pytest.approx(cases["torch.utils.checkpoint"].values("loss"), rel=1e-5)
    losses = cases["ours: the least"].values("loss")
    assert losses[0] != losses[1]


def test_train_overlap_runs_every_balance() -> None:
    threads = torch.get_num_threads()
    try:
        sizes = "--table-rows 300 --table-dim 4 --bags 16 --indices 2 --width 8 --rounds 2 --batches 2"
        run_here("train-overlap", sizes, "t")
    finally:
        torch.set_num_threads(threads)
    pages("t")
    cases = outcomes_of("t")["balances"]
    assert [bool(case.result) for case in cases] == [True] * 4 + [False]
    result = cases[0].result
    assert result["undistributed"] == {}
    assert 0 < result["rows_refreshed"] < result["rows_read"]


# --- in processes ----------------------------------------------------------------------------------------------------


def test_a_benchmark_runs_in_processes_as_a_user_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = "optimizer --blocks 1 --dim 64 --rows 2 --positions 4 --pairs 1 --ways disk --out o"
    assert main(words.split()) in (0, 1), "".join(capsys.readouterr())
    ((reference, ours),) = outcomes_of("o").values()
    assert [case.failure for case in (reference, ours)] == [None, None]
    assert len(ours.steps) == len(ours.reference) == 1
    assert ours.result["difference"] <= 1e-6
    assert ours.peaks["steps"] > ours.moments["interpreter and torch"] > 0


def test_a_run_that_is_terminated_leaves_no_process_and_no_files(tmp_path: Path) -> None:
    sizes = "--blocks 1 --dim 64 --rows 4 --pairs 100000 --ways disk"
    command = [sys.executable, "-m", "benchmarks", "optimizer", *sizes.split()]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(line.startswith("resident") for line in process.stdout)  # the first case is starting
        while not (children := psutil.Process(process.pid).children()):
            pass
        process.terminate()
        _, errors = process.communicate()
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert not [child for child in children if child.is_running()]
    assert list((tmp_path / "cache" / "gradstream").iterdir()) == []
