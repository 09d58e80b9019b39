"""``pipe-ladder`` measures the same work for every way, and says when a bound does not hold."""

import threading
from dataclasses import asdict

import pytest
import torch

from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.pipe_ladder import steps
from benchmarks.pipe_ladder.question import PIPES, broken_bounds, limit_seconds, ratio_of
from tests.benchmarks.here import RATES

SHAPE = steps.Shape(dim=4, blocks=2, rows=6, threads=torch.get_num_threads())
OURS = [name for name in steps.ONES if name.startswith("ours")]


class FakeReport:
    def __init__(self):
        self.steps, self.moments, self.phases = [], [], []

    def total(self, count):
        self.expected = count

    def step(self, **values):
        self.steps.append(values)

    def memory(self, moment):
        self.moments.append(moment)
        return 0

    def phase(self, name):
        self.phases.append(name)


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("chunks", [1, 3])
def test_every_way_of_ours_gives_the_gradients_of_the_bare_model(name, chunks, monkeypatch):
    models = []
    make = steps.Shape.model
    monkeypatch.setattr(steps.Shape, "model", lambda shape: models.append(make(shape)) or models[-1])
    x = SHAPE.batch()
    steps.ONES[name](SHAPE, chunks)(x)
    bare = make(SHAPE)
    bare(x).square().mean().backward()
    for p, q in zip(models[0].parameters(), bare.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_rounds_time_every_way_by_clock_and_processor():
    report = FakeReport()
    steps.time_rounds(report, asdict(SHAPE), 2, OURS[:2], 3, 1)
    assert report.expected == len(report.steps) == 3
    assert set(report.steps[0]) == {f"{name}: {kind}" for name in OURS[:2] for kind in ("clock", "processor")}


def test_a_turn_of_several_steps_tells_the_time_of_one(monkeypatch):
    taken = []
    monkeypatch.setitem(steps.ONES, "counted", lambda shape, chunks: taken.append)
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(steps.time, clock, lambda: 8.0 * len(taken))
    report = FakeReport()
    steps.time_rounds(report, asdict(SHAPE), 2, ["counted"], 3, 4)
    assert report.steps == [{"counted: clock": 8.0, "counted: processor": 8.0}] * 3
    assert len(taken) == steps.WARMUP + 3 * 4


def test_a_peak_is_counted_above_the_model_and_the_batch():
    report = FakeReport()
    assert steps.peak(report, asdict(SHAPE), 2, "ours", 2)["above_model"] >= 0
    assert report.moments == [steps.FLOOR]
    assert report.phases == ["steps"]
    assert len(report.steps) == 2


def test_bubbles_stand_beside_the_formula():
    report = FakeReport()
    steps.bubbles(report, asdict(SHAPE), [1, 3], 2)
    assert [step["chunks"] for step in report.steps] == [1, 3]
    assert [step["ideal"] for step in report.steps] == [0.5, 0.25]
    for step in report.steps:
        for name in ("fill-drain", "1F1B"):
            assert 0 <= step[f"{name}: measured"] < 1
            assert 0 <= step[f"{name}: simulated"] < 1
            assert step[f"{name}: speed-up"] > 0


def test_to_measure_a_bubble_each_stage_has_a_thread(monkeypatch):
    threads = set()
    act = steps.Step._act

    def noted(self, action):
        threads.add((action.stage, threading.get_ident()))
        return act(self, action)

    monkeypatch.setattr(steps.Step, "_act", noted)
    pipe = steps._ours(SHAPE, 3)
    with steps._a_processor_each(pipe) as spans:
        pipe.train_step(SHAPE.batch(), None, lambda y, _: y.square().mean(), reduction="mean")
    assert len(spans) == 2 * 2 * 3
    assert len(threads) == len({thread for _, thread in threads}) == 2


def outcomes(*, slower=1.0, larger=1):
    rows = [{f"{name}: {kind}": 1.0 for name in PIPES for kind in ("clock", "processor")} for _ in range(3)]
    for row in rows:
        row["ours: processor"] = slower
    timed = [Outcome(Rung("time", "", {"names": PIPES}), result={"chunks": 2}, steps=rows)]
    peaks = [
        Outcome(
            Rung(name, "", {}, peer="" if name == "ours" else name),
            result={"above_model": 100 + (larger if name == "ours" else 0)},
        )
        for name in PIPES
    ]
    return timed, peaks, Outcome(Rung("bubble", "", {}), result={})


def test_bounds_hold_where_ours_is_as_fast_and_as_small():
    assert ratio_of(outcomes()[0][0], "fairscale") == 1.0
    assert broken_bounds(*outcomes()) == []


def test_a_slower_or_larger_pipe_breaks_the_bounds():
    assert [line.split(",")[0] for line in broken_bounds(*outcomes(slower=1.1))] == ["processor time"] * 2
    assert [line.split(",")[0] for line in broken_bounds(*outcomes(larger=5))] == ["peak"] * 2


def test_an_ancestor_that_is_not_installed_breaks_nothing():
    timed, peaks, bubble = outcomes()
    timed[0].rung.arguments["names"] = PIPES[:1]
    for outcome in peaks[1:]:
        outcome.result, outcome.skipped = None, "not installed"
    assert broken_bounds(timed, peaks, bubble) == []


def test_a_rung_that_failed_is_named():
    timed, peaks, bubble = outcomes()
    peaks[1].failure = "exit status 1"
    assert broken_bounds(timed, peaks, bubble) == ["torchgpipe: exit status 1"]


def test_the_limit_is_the_arithmetic_that_torch_counts_where_nothing_is_recomputed():
    from torch.utils.flop_counter import FlopCounterMode

    model = SHAPE.model()
    with FlopCounterMode(display=False) as counter:
        model(SHAPE.batch()).square().mean().backward()
    assert counter.get_total_flops() == SHAPE.training_flops
    assert sum(p.numel() for p in model.parameters()) == SHAPE.parameters
    outcome = Outcome(Rung("time", "", {"shape": asdict(SHAPE)}))
    assert limit_seconds(outcome, RATES) == SHAPE.training_flops / RATES.matmul_flops
