"""The process of a case: what it reports, what it held, and why it ended; and peers that run in other environments."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from benchmarks.harness import peers
from benchmarks.harness.case import CannotRunError, Case, Outcome
from benchmarks.harness.memory import PeakMeter, cap_memory
from benchmarks.harness.peers import PEERS, find_peer, variable_of
from benchmarks.harness.process import CaseProcess
from benchmarks.harness.schedule import run_group
from tests.benchmarks.here import outcome

MEBIBYTE = 2**20
HERE = "tests.benchmarks.cases_of_tests"
ROOT = Path(__file__).parents[2]
linux = pytest.mark.skipif(not psutil.LINUX, reason="needs Linux: /proc tells anonymous pages from file pages")

pytestmark = pytest.mark.usefixtures("from_the_root")


def case(function: str, **arguments: object) -> Case:
    return Case(function, f"{HERE}:{function}", arguments)


def run_alone(case: Case) -> Outcome:
    return run_group([case], ROOT)[0]


def test_a_case_reports_its_steps_its_moments_and_its_result() -> None:
    found = run_alone(case("reports", steps=3))
    assert found.failure is None
    assert found.result == {"steps": 3}
    assert found.steps == [{"loss": 0.0}, {"loss": 1.0}, {"loss": 2.0}]
    assert found.peak_bytes >= found.moments["after"] / 2 > 0


def test_a_case_gets_its_environment_unless_the_user_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SET_BY_USER", "theirs")
    names = {"names": ["SET_BY_USER", "ONLY_OURS"]}
    wanted = Case("env", f"{HERE}:shows", names, {"SET_BY_USER": "", "ONLY_OURS": "1"})
    assert run_alone(wanted).result == {"SET_BY_USER": "theirs", "ONLY_OURS": "1"}


@linux
def test_ranks_of_a_case_take_turns_together_and_the_greatest_peak_of_any_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under torchrun as well, which has set variables for the process that measures."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    ranks = replace(case("takes_turns_as_a_rank", mebibytes=20), ranks=2)
    (found,) = run_group([ranks], tmp_path, turns=2)
    assert found.result == {"rank": 0, "held": 0, "store": None}
    assert found.steps == [{"rank": 0}] * 2
    assert found.peaks["steps"] - found.moments["steps"] > 15 * MEBIBYTE


def test_a_rank_that_fails_is_named(tmp_path: Path) -> None:
    (found,) = run_group([replace(case("takes_turns_as_a_rank", mebibytes=0, fails="1"), ranks=2)], tmp_path)
    assert found.result is None
    assert found.failure == "rank 1: exit status 1: ArithmeticError: this rank fails"


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", "exit status 1: ArithmeticError: the reason it died of"),
        ("is_killed", "killed by SIGKILL (out of memory?)"),
        ("leaves_early", "exit status 0"),
        ("is_not_there", "exit status 1: AttributeError: "),
    ],
)
def test_a_case_that_dies_is_reported_with_its_reason(function: str, reason: str) -> None:
    found = run_alone(case(function))
    assert found.result is None
    assert found.failure is not None
    assert found.failure.startswith(reason)


def test_a_case_that_is_not_done_in_time_ends_with_what_it_has_started(tmp_path: Path) -> None:
    (found,) = run_group([replace(case("starts_another_and_hangs"), seconds=3.0)], tmp_path)
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
        run_alone(case("reports", steps=2))
    assert set(psutil.Process().children()) <= before


def test_a_case_is_ready_before_its_first_turn_and_gone_after_its_context(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with CaseProcess(case("takes_turns", name="a", seconds=1.0, log=str(log)), ROOT) as process:
        process.start()
        assert not log.exists()
        assert process.turn() == {"seconds": 1.0}
    assert process.outcome.failure == "killed by SIGKILL (out of memory?)"
    assert process.turn() is None


def test_a_case_may_find_that_it_cannot_run_here(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_alone(case("cannot_run_here"))
    assert (found.result, found.failure) == (None, None)
    assert found.reason == "skipped: needs what this machine has not"
    assert found.reason in "".join(capsys.readouterr())


@linux
def test_anonymous_memory_is_measured_and_pages_of_a_file_are_not(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\1" * (64 * MEBIBYTE))
    held = run_alone(case("allocates", mebibytes=64)).moments
    assert 64 * MEBIBYTE <= held["held"] - held["before"] < 72 * MEBIBYTE
    mapped = run_alone(case("reads_a_file", path=str(path)))
    assert mapped.result == {"total": 64 * MEBIBYTE // 4096}
    assert mapped.moments["mapped"] - mapped.moments["before"] < 4 * MEBIBYTE


def test_a_peak_belongs_to_the_phase_in_which_it_was() -> None:
    found = run_alone(case("has_phases", mebibytes=64))
    assert found.peaks["small"] < found.moments["held"] - 48 * MEBIBYTE


@linux
def test_a_capped_process_can_take_what_the_cap_leaves_and_dies_of_more() -> None:
    fits = run_alone(case("allocates_under_a_cap", cap_mebibytes=96, mebibytes=32))
    assert fits.failure is None
    dead = run_alone(case("allocates_under_a_cap", cap_mebibytes=96, mebibytes=128))
    assert dead.lacked_memory, dead.failure
    assert "allocate 134217728 bytes" in (dead.failure or "")


@linux
def test_a_cap_below_what_the_process_holds_is_refused_as_a_want_of_memory() -> None:
    import resource

    with pytest.raises(MemoryError, match=r"the cap of 1 MiB is no more than the [\d,]+ MiB") as told:
        cap_memory(1 << 20)
    assert resource.getrlimit(resource.RLIMIT_DATA)[0] != 1 << 20
    assert outcome("dead", failure=f"exit status 1: MemoryError: {told.value}").lacked_memory


# --- peers -----------------------------------------------------------------------------------------------------------


def test_a_case_without_its_peer_is_skipped_and_nothing_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "no-such", "no-such==1")
    found = run_alone(Case("x", f"{HERE}:reports", {"steps": 1}, peer="no-such"))
    assert found.reason.startswith("skipped: no no-such in this environment; pip install no-such==1")
    assert found.peaks == {}


def test_a_peer_is_looked_for_in_the_environment_that_its_variable_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(peers.PEERS, "pytest", "pytest")
    variable = variable_of("sentence-transformers")
    assert variable == "GRADSTREAM_PEER_PYTHON_SENTENCE_TRANSFORMERS"
    assert find_peer("pytest") == (sys.executable, pytest.__version__)
    monkeypatch.setenv(variable_of("pytest"), str(tmp_path / "no-python"))
    with pytest.raises(CannotRunError, match="in the environment of GRADSTREAM_PEER_PYTHON_PYTEST"):
        find_peer("pytest")
    monkeypatch.setenv(variable_of("pytest"), sys.executable)
    found = run_alone(Case("x", f"{HERE}:reports", {"steps": 1}, peer="pytest"))
    assert (found.result, found.version, found.title) == ({"steps": 1}, pytest.__version__, f"x ({pytest.__version__})")


@pytest.mark.parametrize("name", PEERS)
def test_every_peer_is_found_or_gives_a_reason(name: str) -> None:
    try:
        found = [*find_peer(name)]
    except CannotRunError as reason:
        found = re.findall("pip install .", str(reason))
    assert found
    assert all(found)
