"""Rungs that take turns, and peers: what is compared shares its moment, and what cannot run here says why."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.frame import peers
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.pairs import (
    Paired,
    known,
    rounds_until_known,
    run_apart,
    run_in_turn,
    run_pairs,
    spread,
    step_ratios,
)
from benchmarks.frame.peers import PEERS, Absent, Found, Peer, find_peer, variable_of
from benchmarks.frame.process import RungProcess
from benchmarks.frame.rungs import run_rung, run_rungs
from benchmarks.gpu_train import question as gpu_train
from benchmarks.gradcache_batch import ways as gradcache_batch
from benchmarks.memory_latency import question as memory_latency
from benchmarks.memory_latency.shape import Shape
from benchmarks.optimizer import question as optimizer
from benchmarks.pipe_ladder import question as pipe_ladder
from benchmarks.train_overlap import question as train_overlap

HERE = "tests.benchmarks.rungs_of_tests"


@pytest.fixture(autouse=True)
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds ``tests`` from the root of the clone."""
    monkeypatch.chdir(Path(__file__).parents[2])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def turns(name: str, log: Path, seconds: float = 1.0) -> Rung:
    return Rung(name, f"{HERE}:takes_turns", {"name": name, "seconds": seconds, "log": str(log)})


def test_two_rungs_take_turns_and_who_goes_first_alternates(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reference, (other,) = run_pairs(turns("r", log), [turns("a", log, 3.0)], 4, warmup=1, progress=False)
    assert log.read_text() == "r" + "a" + "ra" + "ar" + "ra" + "ar"
    assert reference.result == other.outcome.result == {"turns": 5}
    assert other.ratios() == [3.0] * 4


def test_the_reference_keeps_its_process_from_rung_to_rung(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reference, others = run_pairs(turns("r", log), [turns("a", log), turns("b", log)], 2, warmup=1, progress=False)
    assert reference.result == {"turns": 5}
    assert [[step["seconds"] for step in paired.reference] for paired in others] == [[2.0, 3.0], [4.0, 5.0]]


def test_pairs_that_leave_the_median_in_doubt_are_followed_by_more() -> None:
    steady, disturbed = (Rung("x", f"{HERE}:is_disturbed", {"turns": turns}) for turns in (0, 1))
    _, (calm, other, never) = run_pairs(
        steady, [steady, disturbed, Rung("y", f"{HERE}:is_disturbed", {"turns": 99})], 3, warmup=0, progress=False
    )
    assert len(calm.steps) == 3
    assert 3 < len(other.steps) <= 9
    assert known(other.ratios())
    assert other.ratio() == 1.0
    assert len(never.steps) == 9
    assert not known(never.ratios())


@pytest.mark.parametrize(("ratios", "expected"), [([1.0] * 4, 4), ([0.5, 2.0] * 6, 12), ([0.5, 2.0] + [1.0] * 10, 5)])
def test_rounds_go_on_until_the_median_is_known_and_end_at_three_times_as_many(
    ratios: list[float], expected: int
) -> None:
    seen: list[float] = []
    for k in rounds_until_known(lambda: seen, 4):
        seen.append(ratios[k])
    assert len(seen) == expected


def test_the_more_pairs_the_wider_apart_they_may_be() -> None:
    # In both the middle half is 6 % wide.
    assert not known([0.94, 1.0, 1.06])
    assert known([0.9, 0.94, 0.97, 0.97, 1.0, 1.03, 1.03, 1.06, 1.1])
    assert known([1.0, 3.0])  # two cannot say


def test_a_rung_that_ends_between_its_turns_keeps_its_pairs_and_its_reason(tmp_path: Path) -> None:
    dying = Rung("dying", f"{HERE}:ends_in_its_second_turn")
    log = tmp_path / "log"
    reference, (first, second) = run_pairs(turns("r", log), [dying, turns("b", log)], 3, warmup=0, progress=False)
    assert first.ratios() == [1.0]
    assert first.outcome.reason == "failed: exit status 1: ArithmeticError: the reason it died of"
    assert reference.failure is None
    assert len(second.steps) >= 3


def test_rungs_in_turn_take_one_of_each_in_a_round_and_who_begins_changes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes = run_in_turn([turns("a", log, 2.0), turns("b", log, 3.0), turns("c", log)], 4, progress=False)
    assert log.read_text() == "abc" + "bca" + "cab" + "abc"
    assert [outcome.result for outcome in outcomes] == [{"turns": 4}] * 3
    assert step_ratios(outcomes[1], outcomes[0]) == [1.5] * 4


def test_rounds_before_the_counted_ones_are_taken_and_not_counted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes = run_in_turn([turns("a", log, 2.0), turns("b", log, 3.0)], 2, warmup=1, progress=False)
    assert log.read_text() == "ab" + "ba" + "ab"
    assert [len(outcome.steps) for outcome in outcomes] == [2, 2]
    assert outcomes[1].ratio == 1.5


def test_a_rung_that_ends_is_left_out_from_then_on_and_the_others_go_on(tmp_path: Path) -> None:
    dying = Rung("dying", f"{HERE}:ends_in_its_second_turn")
    dead, other = run_in_turn([dying, turns("b", tmp_path / "log")], 3, progress=False)
    assert dead.reason == "failed: exit status 1: ArithmeticError: the reason it died of"
    assert len(dead.steps) == 1
    assert len(other.steps) == 3
    assert step_ratios(other, dead) == [1.0]


def test_rungs_apart_have_a_process_for_each_round_and_who_begins_changes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    rungs = [turns("a", log, 2.0), turns("b", log, 3.0)]
    outcomes = run_apart(rungs, 2, turns=2, warmup=1, progress=False)
    assert log.read_text() == "aaabbb" + "bbbaaa"
    assert [len(outcome.steps) for outcome in outcomes] == [4, 4]
    assert [outcome.result for outcome in outcomes] == [{"turns": 3}] * 2
    assert outcomes[1].ratio == 1.5


def test_rungs_apart_hold_what_the_largest_of_their_processes_held(monkeypatch: pytest.MonkeyPatch) -> None:
    held = [{"steps": 5, "before": 1}, {"steps": 3, "after": 2}]

    def run_rung(rung: Rung, turns: int) -> Outcome:
        return Outcome(rung, {}, peaks=held.pop(), seconds=1.0)

    monkeypatch.setattr("benchmarks.frame.pairs.run_rung", run_rung)
    (outcome,) = run_apart([Rung("a", "nowhere:nothing")], 2, progress=False)
    assert (outcome.peaks, outcome.seconds) == ({"steps": 5, "before": 1, "after": 2}, 2.0)


def test_a_rung_that_cannot_run_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def run_rung(rung: Rung, turns: int) -> Outcome:
        started.append(rung.name)
        return Outcome(rung, skipped="needs what this machine has not") if rung.name == "a" else Outcome(rung, {})

    monkeypatch.setattr("benchmarks.frame.pairs.run_rung", run_rung)
    dead, other = run_apart([Rung(name, "nowhere:nothing") for name in "ab"], 3, progress=False)
    assert dead.reason == "skipped: needs what this machine has not"
    assert other.result == {}
    assert started == ["a", "b", "b", "b"]


def test_a_rung_that_waits_for_turns_also_runs_alone(tmp_path: Path) -> None:
    assert run_rung(turns("a", tmp_path / "log"), turns=3).result == {"turns": 3}


def test_a_rung_is_ready_before_its_first_turn_and_gone_after_its_context(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with RungProcess(turns("a", log)) as process:
        process.prepare()
        assert not log.exists()
        assert [step["seconds"] for step in process.turn()] == [1.0]
    assert process.outcome.failure == "killed by SIGKILL (out of memory?)"
    assert process.turn() == []


def test_a_rung_may_find_that_it_cannot_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    (outcome,) = run_rungs([Rung("x", f"{HERE}:cannot_run_here")], progress=False)
    assert (outcome.result, outcome.failure) == (None, None)
    assert outcome.reason == "skipped: needs what this machine has not"
    assert outcome.reason in "".join(capsys.readouterr())


def test_a_rung_without_its_peer_is_skipped_and_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "nobody", Peer("no_such_module", "no-such", "no-such==1"))
    outcome = run_rung(Rung("x", f"{HERE}:reports", {"steps": 1}, peer="nobody"), turns=2)
    assert outcome.reason.startswith("skipped: no no_such_module in this environment; pip install no-such==1")
    assert outcome.peaks == {}


def test_a_peer_is_looked_for_where_its_variable_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(peers.PEERS, "for-test", Peer("pytest", "pytest", "pytest"))
    assert variable_of("for-test") == "GRADSTREAM_PEER_PYTHON_FOR_TEST"
    assert find_peer("for-test") == Found(sys.executable, pytest.__version__)
    monkeypatch.setenv(variable_of("for-test"), str(tmp_path / "no-python"))
    absent = find_peer("for-test")
    assert isinstance(absent, Absent)
    assert "in the environment of GRADSTREAM_PEER_PYTHON_FOR_TEST" in absent.reason
    monkeypatch.setenv(variable_of("for-test"), sys.executable)
    outcome = run_rung(Rung("x", f"{HERE}:reports", {"steps": 1}, peer="for-test"))
    assert (outcome.result, outcome.version) == ({"steps": 1}, pytest.__version__)


def test_a_peer_that_needs_an_accelerator_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "on-a-gpu", Peer("pytest", "pytest", "pytest", needs_accelerator=True))
    monkeypatch.setattr(peers, "_accelerator", lambda: False)
    assert find_peer("on-a-gpu") == Absent("needs an accelerator, and there is none")


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_is_found_or_gives_a_reason(name: str) -> None:
    found = find_peer(name)
    assert found.version if isinstance(found, Found) else found.reason


def test_every_peer_is_beside_ours_in_some_question() -> None:
    shape = asdict(Shape(layers=4, dim=64, rows=4, positions=4))
    common = {"shape": shape, "home": "h", "device": "cpu"}
    lists = (memory_latency._training, memory_latency._forward)
    in_curve = [rung for rungs in lists for rung in rungs(Shape(**shape), common, [""])]
    asked = {
        *(rung.peer for rung in in_curve if rung.peer),
        *(name for name in pipe_ladder.PIPES if name != "ours"),
        *gradcache_batch.PEERS.values(),
        *(peer for _, _, peer in gpu_train.WAYS if peer),
        train_overlap.TORCHREC,
        optimizer.PEER,
    }
    assert asked == PEERS.keys()
    torchs_own = {"torch.utils.checkpoint", "save_on_cpu", "FSDP2, CPUOffloadPolicy"}
    assert torchs_own <= {rung.name for rung in in_curve}


def test_a_spread_is_the_median_and_both_ends() -> None:
    assert spread([1.2, 1.0, 1.05]) == "1.050 (1.00 to 1.20)"
    assert spread([]) == "-"
    empty = Paired(run_rung(Rung("x", f"{HERE}:cannot_run_here")))
    assert empty.ratio() != empty.ratio()  # nan: there was no pair
