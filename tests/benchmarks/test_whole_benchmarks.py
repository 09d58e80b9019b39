"""Each benchmark from its options to its page, at the smallest sizes that still have every part.

Cases run in the test's own process; one benchmark runs in processes, as a user runs it. Times mean nothing here: what
cannot depend on them is there, and equal.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import Group
from benchmarks.retrieval.corpus import build_corpus
from tests.benchmarks.here import RATES, lines_of, run_here

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("in_its_own_folder")


@pytest.fixture(autouse=True)
def without_caps_and_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cap would be this process's, and rates take seconds to measure."""
    monkeypatch.setattr("benchmarks.harness.benchmark.measure_limits", lambda *_, **__: RATES)
    for module in ("retrieval.methods", "gradcache_batch.methods", "build_huge.workload"):
        monkeypatch.setattr(f"benchmarks.{module}.cap_memory", lambda nbytes: None)


def pages(stem: str) -> str:
    """The page; the picture is there, and no files of cases are left."""
    assert Path(f"{stem}.png").stat().st_size > 10_000
    assert [path for path in Path("cache/gradstream").iterdir() if path.is_dir()] == []
    return Path(f"{stem}.md").read_text()


def test_retrieval_trains_three_ways_to_the_same_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout on, a last chunk that is smaller, boundaries that are written to disk."""
    monkeypatch.setattr("benchmarks.retrieval.benchmark.build_corpus", lambda pairs: build_corpus(pairs=400))
    small = "--dim 64 --depth 2 --batch 10 --chunk 4 --steps 3 --slices 3 --vocabulary 300 --held-out 20"
    assert run_here("retrieval", f"{small} --boundary-bytes 20000", Path("r")) == 0
    assert "Greatest difference between the methods' losses at any step" in pages("r")
    cases = lines_of(Path("r.jsonl"))
    assert [case["case"] for case in cases] == ["whole batch", "GradCache", "GradCache + offload"]
    losses = [[step["loss"] for step in case["steps"]] for case in cases]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert losses[2] == pytest.approx(losses[0], abs=1e-5)
    assert len(set(losses[0])) == 3  # it trains
    assert cases[2]["result"]["statistics"]["bytes_spilled"] > 0
    assert run_here("retrieval", f"{small} --methods gradcache-offload --chunk 10", Path("s")) == 0
    loads = [case["result"]["statistics"]["shard_loads"] for case in (cases[2], *lines_of(Path("s.jsonl")))]
    assert loads[0] == loads[1]  # the number of chunks makes no difference


def test_offload_step_compares_the_streamed_step_with_the_resident_one() -> None:
    sizes = "--dim 64 --rows 2 --positions 4 --pairs 2 --shards 2 4 --width 64"
    assert run_here("offload-step", sizes, Path("s")) in (0, 1)
    assert "median ratio of pairs" in pages("s")
    cases = {case["case"]: case for case in lines_of(Path("s.jsonl"))}
    names = ["4 layers, 2 shards", "4 layers, 4 shards", "1 layer each, 2 shards", "1 layer each, 4 shards"]
    more = ["all in slots", "disk, inputs take gradients", "disk, weights take gradients"]
    assert list(cases) == ["time, 8 shards", *names, f"{names[-1]}, allocator as it comes", *more]
    assert [step["loads"] for step in cases["all in slots"]["steps"]] == [0, 0]
    assert len({cases[name]["result"]["parameters"] for name in (names[0], names[1], names[3])}) == 1


def test_optimizer_ends_at_the_parameters_of_the_resident_model() -> None:
    sizes = "--dim 64 --rows 2 --positions 4 --blocks 2 --pairs 2 --ways disk"
    status = run_here("optimizer", sizes, Path("o"))
    page = pages("o")
    assert status == (1 if "does not hold" in page else 0)
    assert "difference of parameters" not in page
    cases = lines_of(Path("o.jsonl"))
    assert [case["result"]["difference"] is not None for case in cases] == [True] * 2
    assert all(case["result"]["difference"] <= 1e-6 for case in cases)


def test_optimizer_trains_a_model_that_is_on_disk_from_the_start() -> None:
    assert run_here("optimizer", "--dim 64 --rows 2 --positions 4 --parameters 150e3 --ways deepspeed", Path("o")) == 0
    assert re.search(r"\| on disk, from birth +\|", pages("o"))
    assert "in 3 blocks" in pages("o")
    assert [case["skipped"] for case in lines_of(Path("o.jsonl"))] == [None, "peers need a process"]
    with pytest.raises(ValueError, match="GB of free disk"):
        run_here("optimizer", "--parameters 1e15")


def test_build_huge_trains_to_the_losses_of_the_resident_model() -> None:
    run_here("build-huge", "--cap 1 --dim 64 --blocks 9 --rows 4 --steps 3", Path("b"))
    page = pages("b")
    assert "must not fit under the cap, but it trained" in page  # there is no cap here
    assert "difference of losses" not in page
    cases = {case["case"]: case for case in lines_of(Path("b.jsonl"))}
    losses = {name: [step["loss"] for step in case["steps"]] for name, case in cases.items()}
    assert losses["offloaded, capped"] == pytest.approx(losses["resident, no cap"], rel=1e-6)
    assert losses["resident, no cap"][2] < losses["resident, no cap"][0]


def test_gradcache_batch_runs_all_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from benchmarks.gradcache_batch.benchmark import FUSED, PEERS
    from benchmarks.gradcache_batch.methods import METHODS

    time = "--dim 64 --depth 2 --vocabulary 300 --positions 8 --pairs 4 --chunk 2 --rounds 1"
    memory = "--limit 64 --most 64 --small-dim 64 --chunks 1 4 --chunked-dim 64 --loss-rows 512"
    # The reference is a peer, which needs a process: plain torch stands in for it.
    upstream = [name for name in PEERS if name.startswith("upstream")]
    for name in upstream:
        monkeypatch.setitem(METHODS, name, METHODS["plain torch"])
        monkeypatch.delitem(PEERS, name)
    monkeypatch.setattr("benchmarks.gradcache_batch.benchmark.GROWING", (*upstream, "plain torch", FUSED))
    run_here("gradcache-batch", f"{time} {memory}", Path("g"))
    page = pages("g")
    assert re.search(r"\| ours over OffloadModel +\|\s+64 \|", page)
    assert "difference of gradients" not in page
    cases = lines_of(Path("g.jsonl"))
    assert not [case["failure"] for case in cases if case["failure"]]
    (loads,) = [c["result"]["bytes_loaded"] for c in cases if c["part"] == "chunks" and c["case"].endswith("Model")]
    assert len({*loads.values()}) == 1


def test_pipe_ladder_runs_all_its_parts() -> None:
    assert run_here("pipe-ladder", "--dim 16 --blocks 2 --rows 8 --chunks 1 2 --rounds 1", Path("p")) in (0, 1)
    assert "| ours, 1F1B " in pages("p")
    by_part = {case["part"] for case in lines_of(Path("p.jsonl"))}
    assert by_part == {"time", "tiny cells", "peaks", "bubble"}


def test_memory_latency_computes_the_gradients_of_plain_pytorch_with_each_setting() -> None:
    words = "--layers 4 --dim 64 --rows 4 --positions 4 --pairs 1 --only budget micro-batches forward"
    assert run_here("memory-latency", words, Path("m")) == 0
    page = pages("m")
    assert all(part in page for part in ("| training ", "| prediction ", "| forward only ", "limit", "distance"))
    cases = lines_of(Path("m.jsonl"))
    ours = [case for case in cases if case["part"] == "training" and case["case"].startswith("ours:")]
    assert len(ours) == 5
    assert {f"{case['case']}, in use" for case in ours} <= {case["case"] for case in cases}
    assert all(case["result"]["difference"] <= 1e-5 for case in ours)
    assert all(case["result"]["estimate"]["memory_bytes"] > 0 for case in ours)


def test_train_overlap_runs_every_balance() -> None:
    threads = torch.get_num_threads()
    try:
        sizes = "--table-rows 300 --table-dim 4 --bags 16 --indices 2 --width 8 --rounds 2 --batches 2"
        run_here("train-overlap", sizes, Path("t"))
    finally:
        torch.set_num_threads(threads)
    pages("t")
    cases = lines_of(Path("t.jsonl"))
    assert [bool(case["result"]) for case in cases] == [True] * 4 + [False]
    result = cases[0]["result"]
    assert result["undistributed"] == {}
    assert 0 < result["rows_refreshed"] < result["rows_read"]


def test_gpu_train_begins_with_the_same_loss_in_every_way() -> None:
    sizes = "--device cpu --layers 3 --dim 64 --rows 4 --positions 4 --steps 3"
    assert run_here("gpu-train", sizes, Path("t")) == 0
    done = [case for case in lines_of(Path("t.jsonl")) if case["result"] is not None]
    assert len(done) == 3
    assert all(case["steps"][-1]["loss"] < case["steps"][0]["loss"] for case in done)


# --- in processes ----------------------------------------------------------------------------------------------------


def test_a_benchmark_runs_in_processes_as_a_user_runs_it(capsys: pytest.CaptureFixture[str]) -> None:
    words = "optimizer --blocks 1 --dim 64 --rows 2 --positions 4 --pairs 1 --ways disk --out o"
    assert main(words.split()) in (0, 1), "".join(capsys.readouterr())
    reference, ours = lines_of(Path("o.jsonl"))
    assert [case["failure"] for case in (reference, ours)] == [None, None]
    assert len(ours["steps"]) == len(ours["reference"]) == 1
    assert ours["result"]["difference"] <= 1e-6
    assert ours["peaks"]["steps"] > ours["moments"]["interpreter and torch"] > 0


def test_a_run_that_is_terminated_leaves_no_process_and_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "offload-step", "--dim", "64", "--rows", "1", "--pairs", "100000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        while not process.stdout.readline().startswith("limits"):
            pass
        while "step/s" not in process.stderr.readline(200):  # the first case is under way
            pass
        children = psutil.Process(process.pid).children()
        assert children
        process.terminate()
        process.communicate()
    assert process.returncode == 128 + signal.SIGTERM
    assert not [child for child in children if child.is_running()]
    assert list((tmp_path / "cache" / "gradstream").iterdir()) == []


# --- gpu -------------------------------------------------------------------------------------------------------------


def gpu_parts(words: str) -> list[Case]:
    import argparse

    from benchmarks.gpu.benchmark import BENCHMARK, Settings, plan
    from benchmarks.harness.report import add_arguments
    from benchmarks.harness.settings import settings_of

    parser = argparse.ArgumentParser()
    add_arguments(parser, BENCHMARK)
    return list(next(plan(settings_of(Settings, vars(parser.parse_args(words.split()))), "home")).cases)


@pytest.mark.parametrize("dry_run", [False, True])
def test_every_part_of_gpu_is_a_command_that_its_benchmark_understands(dry_run: bool) -> None:
    import argparse

    from benchmarks.harness.report import add_arguments

    entries = {entry.name: entry for entry in BENCHMARKS}
    parts = gpu_parts("--dry-run" if dry_run else "")
    assert [part.name for part in parts][-1] == "train-7b"  # the largest model is the last part
    if not dry_run:
        assert sum(part.arguments["seconds"] for part in parts) < 600
    for part in parts[1:]:
        flag, package, name, *words = part.arguments["words"]
        assert (flag, package) == ("-m", "benchmarks")
        parser = argparse.ArgumentParser()
        add_arguments(parser, entries[name].load())
        parsed = parser.parse_args(words)
        assert parsed.device == ("cpu" if dry_run else "cuda")
        assert parsed.out == Path(f"gpu-{part.name}")


def test_a_part_that_fails_or_hangs_is_told_and_leaves_no_process() -> None:
    from benchmarks.gpu.benchmark import run_part

    def part(program: str, seconds: float) -> tuple[str | None, str]:
        found = run_part(Case("a", "", {"words": ["-c", program], "seconds": seconds}))
        return found.failure, found.steps[0]["tail"]

    assert part("print('x' * 3)", 60) == (None, "xxx")
    assert part("raise SystemExit('why')", 60) == ("exit status 1", "why")
    program = (
        "import signal, subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()"
    )
    failure, tail = part(program, 2)
    assert failure == "not done after 2 s"
    while is_alive(int(tail)):  # it was killed, and is gone as soon as it is scheduled
        pass


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_part_of_gpu_that_breaks_is_on_the_page_and_does_not_stop_the_others() -> None:
    """pytest finds nothing at a path that is not there."""
    from benchmarks.gpu.benchmark import run_parts

    parts = [Case(name, "", {"words": ["-c", name], "seconds": 60}) for name in ("raise SystemExit(3)", "pass")]
    assert [found.failure for found in run_parts(Group("parts", parts))] == ["exit status 3", None]
    nowhere = str(Path("nowhere").absolute())
    assert main(["gpu", "--dry-run", "--tests", nowhere, "--parts", "tests", "--out", "g"]) == 1
    (line,) = lines_of(Path("g.jsonl"))
    assert line["failure"].startswith("exit status")
    (command,) = [line for line in Path("g.md").read_text().splitlines() if line.startswith("`python -m")]
    assert str(Path.cwd()) not in command  # only this machine has such a path


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
@pytest.mark.parametrize("name", ["gpu", "gpu-train"])
def test_without_a_gpu_the_command_says_what_runs_instead(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert "cpu" in capsys.readouterr().err.lower()


def test_the_results_folder_lists_every_page_and_has_its_lines() -> None:
    results = ROOT / "benchmarks" / "results"
    listed = (results / "README.md").read_text(encoding="utf-8")
    for path in sorted(results.glob("*.md")):
        if path.name != "README.md":
            assert f"({path.name})" in listed
            assert json.loads(path.with_suffix(".jsonl").read_text().splitlines()[0])["environment"]
