"""The question ``gradcache-batch`` at the smallest sizes that still have every part."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.__main__ import main
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.pairs import Paired
from benchmarks.gradcache_batch.question import CHUNK_BY_CHUNK, FUSED, REFERENCE, broken_bounds
from benchmarks.gradcache_batch.shape import Shape
from benchmarks.gradcache_batch.steps import growing, sketch
from benchmarks.gradcache_batch.ways import PEERS, WAYS, make
from tests.benchmarks.here import Recorder

TINY = Shape(
    vocabulary=300,
    positions=4,
    dim=64,
    depth=2,
    pairs=4,
    chunk=2,
    kept_mebibytes=1,
    graph_mebibytes=1,
    activation_mebibytes=1,
)


@pytest.mark.parametrize("way", [way for way in WAYS if way not in PEERS])
def test_every_way_gives_the_gradient_of_the_whole_batch_in_its_first_and_in_its_second_step(
    way: str, tmp_path: Path
) -> None:
    model, step = make("plain torch", TINY, tmp_path)
    expected_loss = step(*TINY.batch())
    expected = torch.tensor(sketch(model))
    model, step = make(way, TINY, tmp_path)
    for _ in range(2):
        model.zero_grad()
        torch.testing.assert_close(step(*TINY.batch()), expected_loss)
        assert (torch.tensor(sketch(model)) - expected).norm() <= 1e-5 * expected.norm()


def test_a_sketch_tells_two_gradients_apart() -> None:
    layer = nn.Linear(300, 300)
    layer(torch.ones(1, 300)).sum().backward()
    before = torch.tensor(sketch(layer))
    assert layer.weight.grad is not None
    layer.weight.grad[7, 7] += 1
    assert (torch.tensor(sketch(layer)) - before).norm() > 0


@pytest.mark.parametrize("unknown", ["cap_memory", "data_bytes"])
def test_without_a_limit_batches_do_not_grow(unknown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "benchmarks.gradcache_batch.steps.cap_memory", lambda nbytes: True
    )  # it would be this process's
    monkeypatch.setattr(f"benchmarks.gradcache_batch.steps.{unknown}", lambda argument: 0)
    report = Recorder(Outcome(Rung("recorded", "module:function")), 1)
    with pytest.raises(OSError, match="limits a process's private memory"):
        growing(report, "plain torch", asdict(TINY), str(tmp_path), 1, 4)
    assert report.outcome.steps == []


def test_all_parts_run_and_leave_a_page_and_no_homes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("benchmarks.gradcache_batch.question.measure_limits", lambda path, tries: _limits())
    # Two ways of each part: every one is a process.
    for part, way in {"TIMED": REFERENCE, "GROWING": "plain torch", "CHUNKED": CHUNK_BY_CHUNK}.items():
        monkeypatch.setattr(f"benchmarks.gradcache_batch.question.{part}", (way, FUSED))
    monkeypatch.setattr("benchmarks.gradcache_batch.question.MAXIMUM_RATIO", {FUSED: 0.55})
    home = tmp_path / "homes"
    time = "--dim 64 --depth 2 --vocabulary 300 --positions 8 --pairs 4 --chunk 2 --rounds 1"
    memory = "--limit 64 --most 64 --small-dim 64 --chunks 1 4 --chunked-dim 64 --loss-rows 512"
    main(["gradcache-batch", *time.split(), *memory.split(), "--home", str(home), "--out", str(tmp_path / "page")])
    page = (tmp_path / "page.md").read_text()
    assert re.search(r"\| ours over OffloadModel +\|\s+64 \|", page), page + "".join(capsys.readouterr())
    rungs = [json.loads(line) for line in (tmp_path / "page.jsonl").read_text().splitlines()][1:]
    assert not [rung["failure"] for rung in rungs if rung["failure"]]
    loads = [r["result"]["bytes_loaded"] for r in rungs if r["rung"] == FUSED and "bytes_loaded" in r["result"]]
    assert len({*loads[0].values()}) == 1
    assert not list(home.iterdir())


def _limits() -> object:
    from benchmarks.frame.limits import Limits

    return Limits(1, "cpu", "float32", 1e11, 1e10, 1e9, 1e9, 1e9, True)


def _outcome(name: str, result: dict[str, object], **values: object) -> Outcome:
    return Outcome(Rung(name, ""), result, peaks={"steps": 100}, moments={"interpreter and torch": 50}, **values)  # type: ignore[arg-type]


def test_bounds_are_told_when_they_do_not_hold() -> None:
    reference = _outcome(REFERENCE, {"sketch": [3.0, 4.0]})
    steps = [{"seconds": 1.0}]
    good = Paired(_outcome("ours", {"sketch": [3.0, 4.0]}), [{"seconds": 0.5}], steps)
    bad = Paired(_outcome("ours over OffloadModel, chunks apart", {"sketch": [3.0, 4.1]}), [{"seconds": 0.9}], steps)
    peaks = [_outcome(name, {}) for name in (REFERENCE, "ours", "ours over OffloadModel, chunks apart")]
    peaks[2].peaks["steps"] = 200
    grown = [_outcome("plain torch", {"pairs": 8, "sketches": {}}), _outcome(FUSED, {"pairs": 4, "sketches": {}})]
    laddered = [
        _outcome(CHUNK_BY_CHUNK, {"bytes_loaded": {"1": 1}}, steps=[{"chunks": 4, "seconds": 4.0}]),
        _outcome(FUSED, {"bytes_loaded": {"1": 1, "4": 2}}, steps=[{"chunks": 4, "seconds": 1.0}]),
    ]
    loss = _outcome("loss", {"given": 1 << 30})
    told = broken_bounds(reference, [good, bad], peaks, grown, laddered, loss)
    assert [line.split(":")[0].split(" must")[0] for line in told] == [
        "ours over OffloadModel, chunks apart",
        "ours over OffloadModel, chunks apart",
        "ours over OffloadModel, chunks apart",
        FUSED,
        "4 chunks",
        "bytes loaded",
        "the loss",
    ]
