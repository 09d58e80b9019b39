"""The question ``train-overlap``: its rungs run, and its bounds are bounds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.frame.rungs import Outcome, Rung
from benchmarks.train_overlap.question import MAXIMUM_RATIO, PARTS, _broken, _table, limit_seconds
from benchmarks.train_overlap.steps import Shape, measure
from tests.benchmarks.here import RATES

SHAPE = {"table_rows": 300, "table_dim": 4, "bags": 16, "indices": 2, "width": 8}


class Report:
    def __init__(self):
        self.steps = []

    def total(self, steps):
        self.expected = steps

    def step(self, **values):
        self.steps.append(values)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_both_ways_train_the_same_model_and_every_part_is_timed(tmp_path):
    report = Report()
    result = measure(report, SHAPE, str(tmp_path), load=0.1, rows=0.1, rounds=2, batches=3)
    assert len(report.steps) == report.expected == 2
    assert set(report.steps[0]) == {*PARTS, "in turn", "pipelined", "slowest", "ratio"}
    assert result["losses"] == 2 * (3 + 4)
    assert result["undistributed"] == {}
    assert 0 < result["rows_refreshed"] < result["rows_read"]


def outcome(ratio, undistributed=None):
    step = {**dict.fromkeys((*PARTS, "in turn", "pipelined", "slowest"), 0.01), "ratio": ratio}
    result = {"rows_refreshed": 1, "rows_read": 10, "undistributed": undistributed or {}}
    result |= {"latencies": [0.001, 0.005], "bytes_of_rows": 8.0}
    return Outcome(Rung("even", "module:function", {"shape": SHAPE}), result=result, steps=[step] * 3)


def test_a_step_that_takes_longer_than_its_slowest_part_allows_is_broken():
    assert _broken([outcome(MAXIMUM_RATIO)]) == []
    (line,) = _broken([outcome(MAXIMUM_RATIO + 0.01)])
    assert "takes 1.110" in line
    (line,) = _broken([outcome(1.0, {"bag": "the first forward did not call it"})])
    assert "rows did not run ahead" in line


def test_a_rung_that_failed_is_in_the_table_and_breaks_the_run():
    failed = Outcome(Rung("even", "module:function"), failure="killed by SIGKILL")
    assert "failed: killed by SIGKILL" in _table([outcome(1.0), failed], RATES)
    assert _broken([failed]) == ["even: killed by SIGKILL"]


def test_a_peer_is_shown_and_held_to_no_bound():
    peer = outcome(2.0)
    peer = Outcome(replace(peer.rung, name="even: torchrec", peer="torchrec"), result=peer.result, steps=peer.steps)
    assert "2.000" in _table([peer], RATES)
    assert _broken([peer]) == []


def test_no_machine_shortens_a_latency_and_nobody_is_spared_the_arithmetic():
    slow = outcome(1.0)
    assert limit_seconds(slow, RATES) == 0.005
    slow.result["latencies"] = [0.0, 0.0]
    assert limit_seconds(slow, RATES) == Shape(**SHAPE).training_flops / RATES.matmul_flops
