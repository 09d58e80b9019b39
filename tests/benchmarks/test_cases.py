"""Processes of cases: what they report and held, why they ended, whose turn it is; and peers in other environments."""

from __future__ import annotations

import resource
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.harness import peers
from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.memory import PeakMeter, cap_memory
from benchmarks.harness.peers import find_peer, variable_of
from benchmarks.harness.process import CaseProcess
from benchmarks.harness.schedule import known, run_group
from tests.benchmarks.here import outcome

MEBIBYTE = 2**20
HERE = "tests.benchmarks.cases_of_tests"
ROOT = Path(__file__).parents[2]
DIED = "failed: exit status 1: ArithmeticError: the reason it died of"
linux = pytest.mark.skipif(not psutil.LINUX, reason="needs Linux: /proc tells anonymous pages from file pages")

pytestmark = pytest.mark.usefixtures("from_the_root")


def case(code: str = "", name: str = "case", **how: Any) -> Case:
    return Case(name, f"{HERE}:runs", {"code": code}, **how)


def turns(name: str, log: Path | str = "", *seconds: float, last: int | None = None) -> Case:
    how = {"name": name, "seconds": seconds or (1.0,), "log": str(log), "last": last}
    return Case(name, f"{HERE}:takes_turns", how)


def run(*cases: Case, order: str = "alone", count: int = 0, warmup: int = 0, **how: Any) -> list[Outcome]:
    return run_group(cases, ROOT, order, count, warmup, **how)


def run_alone(code: str = "", **how: Any) -> Outcome:
    return run(case(code, **how))[0]


# --- what a case tells -----------------------------------------------------------------------------------------------


def test_a_case_reports_steps_and_gets_its_environment_unless_the_user_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_USER", "theirs")
    environment = {"SET_BY_USER": "", "ONLY_OURS": "1"}
    found = run_alone("report.step(loss=0.0); report.step(loss=1.0)", environment=environment)
    assert found.failure is None
    assert found.result == {"SET_BY_USER": "theirs", "ONLY_OURS": "1"}
    assert found.steps == [{"loss": 0.0}, {"loss": 1.0}]


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise ArithmeticError('the reason it died of')", DIED),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed: killed by SIGKILL (out of memory?)"),
        ("os._exit(0)", "failed: exit status 0: a stray line on standard output"),
        ("raise CannotRunError('needs what this machine has not')", "skipped: needs what this machine has not"),
    ],
)
def test_a_case_without_a_result_tells_its_reason(code: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_alone(code)
    assert found.result is None
    assert found.reason == reason
    assert reason in "".join(capsys.readouterr())


def test_a_case_that_is_not_done_in_time_ends_with_what_it_has_started() -> None:
    child = "subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])"
    found = run_alone(f"report.step(pid={child}.pid); signal.pause()", seconds=3.0)
    assert found.failure == "not done after 3 s"
    other = found.steps[0]["pid"]
    while psutil.pid_exists(other) and psutil.Process(other).status() != psutil.STATUS_ZOMBIE:
        pass  # it was killed, and is gone as soon as it is scheduled


def test_an_interrupted_parent_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(psutil.Process().children())

    def interrupt(meter: object, name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(PeakMeter, "phase", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_alone("report.phase('a'); signal.pause()")
    assert set(psutil.Process().children()) <= before


def test_a_case_is_ready_before_its_first_turn_and_gone_after_its_context(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with CaseProcess(turns("a", log), ROOT) as process:
        process.start()
        assert not log.exists()
        assert process.turn() == {"seconds": 1.0}
    assert process.outcome.failure == "killed by SIGKILL (out of memory?)"
    assert process.turn() is None


# --- memory ----------------------------------------------------------------------------------------------------------


@linux
def test_anonymous_memory_is_measured_in_its_phase_and_pages_of_a_file_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (64 * MEBIBYTE))
    code = f"""
report.phase("before")
mapped = mmap.mmap(os.open({str(path)!r}, os.O_RDONLY), 0, access=mmap.ACCESS_READ)
assert set(mapped[::4096]) == {{1}}  # touches every page
for phase, count in [("mapped", 0), ("held", 64), ("small", 0), ("after", 0)]:
    held = bytearray(b"\\1") * (count << 20)
    report.phase(phase)
"""
    found = run_alone(code)
    assert found.moments["mapped"] - found.moments["before"] < 4 * MEBIBYTE
    assert 64 * MEBIBYTE <= found.moments["held"] - found.moments["before"] < 72 * MEBIBYTE
    assert found.peaks["small"] < found.moments["held"] - 48 * MEBIBYTE


@linux
def test_a_capped_process_can_take_what_the_cap_leaves_and_dies_of_more() -> None:
    code = "cap_memory(memory_of(os.getpid())[1] + (96 << 20)); held = bytearray(b'\\1') * ({} << 20)"
    assert run_alone(code.format(32)).failure is None
    assert run_alone(code.format(128)).lacked_memory


@linux
def test_a_cap_below_what_the_process_holds_is_refused_as_a_want_of_memory() -> None:
    with pytest.raises(MemoryError, match=r"the cap of 1 MiB is no more than the [\d,]+ MiB") as told:
        cap_memory(1 << 20)
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 1 << 20
    assert outcome("dead", failure=f"exit status 1: MemoryError: {told.value}").lacked_memory


# --- ranks -----------------------------------------------------------------------------------------------------------


@linux
def test_ranks_of_a_case_take_turns_together_and_the_greatest_peak_of_any_counts(tmp_path: Path) -> None:
    ranks = Case("ranks", f"{HERE}:takes_turns_as_a_rank", {"mebibytes": 20}, ranks=2)
    (found,) = run_group([ranks], tmp_path, turns=2)
    assert found.result == {"rank": 0, "held": 0}
    assert found.steps == [{"rank": 0}] * 2
    assert found.peaks["steps"] - found.moments["steps"] > 15 * MEBIBYTE
    (found,) = run_group([replace(ranks, arguments={"mebibytes": 0, "fails": "1"})], tmp_path)
    assert found.result is None
    assert found.failure == "rank 1: exit status 1: ArithmeticError: this rank fails"


# --- whose turn it is ------------------------------------------------------------------------------------------------


def test_pairs_alternate_who_starts_and_the_reference_keeps_its_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cases = [turns("r", log, 1.0, 2.0, 3.0, 4.0), turns("a", log, 3.0, 6.0, 9.0), turns("b", log)]
    seen: list[str] = []  # an interruption of a long run does not lose what was measured
    done = lambda outcomes: seen.append("".join(o.name for o in outcomes))  # noqa: E731
    reference, first, second = run(*cases, order="pairs", count=2, warmup=1, done=done)
    assert seen == ["ra", "rab"]
    assert log.read_text() == "r" + "ra" + "raar" + "rb" + "rbbr"
    assert [each.result["turns"] for each in (reference, first, second)] == [7, 3, 3]
    assert first.ratios() == [6 / 3, 9 / 4]
    assert [step["seconds"] for step in second.reference] == [4.0, 4.0]
    assert (len(first.steps), len(reference.steps)) == (2, 6)


def test_a_round_has_one_turn_of_each_and_who_starts_changes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes = run(turns("a", log, 2.0), turns("b", log, 3.0), order="rounds", count=3, warmup=1)
    assert log.read_text() == "ab" + "ab" + "ba" + "ab"
    assert [(found.result["turns"], len(found.steps)) for found in outcomes] == [(4, 3)] * 2
    assert outcomes[1].ratios() == [1.5] * 3


def test_a_case_that_ends_early_or_cannot_run_keeps_its_pairs_and_costs_others_no_turn(tmp_path: Path) -> None:
    log, dying = tmp_path / "log", turns("dying", last=1)
    reference, first, skipped, second = run(
        turns("r", log), dying, case("raise CannotRunError('')"), turns("b"), order="pairs", count=3, warmup=0
    )
    assert first.ratios() == [1.0]
    assert first.reason == DIED
    assert skipped.skipped is not None
    assert reference.failure is None
    assert log.read_text() == "r" * len(reference.steps)
    assert len(second.steps) == len(second.reference) >= 3
    dead, other = run(dying, turns("b"), order="rounds", count=3)
    assert (len(dead.steps), len(other.steps), len(other.ratios())) == (1, 3, 1)


def test_pairs_that_leave_the_median_in_doubt_are_followed_by_more() -> None:
    steady, never = turns("0"), turns("9", "", *(2.0 + k for k in range(99)))
    disturbed = turns("1", "", 2.0, *[1.0] * 98)
    _, calm, other, last = run(steady, steady, disturbed, never, order="pairs", count=3)
    assert len(calm.steps) == 3
    assert 3 < len(other.steps) <= 9
    assert known(other.ratios())
    assert other.ratio() == 1.0
    assert len(last.steps) == 9
    assert not known(last.ratios())


# --- peers -----------------------------------------------------------------------------------------------------------


def test_a_peer_is_looked_for_in_the_environment_that_its_variable_names_and_skipped_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(peers.PEERS, "no-such", "no-such==1")
    found = run_alone(peer="no-such")
    assert found.reason.startswith("skipped: no no-such in this environment; pip install no-such==1")
    assert found.peaks == {}
    monkeypatch.setitem(peers.PEERS, "pytest", "pytest")
    assert variable_of("sentence-transformers") == "GRADSTREAM_PEER_PYTHON_SENTENCE_TRANSFORMERS"
    assert find_peer("pytest") == (sys.executable, pytest.__version__)
    monkeypatch.setenv(variable_of("pytest"), str(tmp_path / "no-python"))
    with pytest.raises(CannotRunError, match="in the environment of GRADSTREAM_PEER_PYTHON_PYTEST"):
        find_peer("pytest")
    monkeypatch.setenv(variable_of("pytest"), sys.executable)
    assert run_alone(peer="pytest").title == f"case ({pytest.__version__})"
