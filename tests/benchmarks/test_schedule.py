"""The order of turns: methods that are compared share their moments, and a case that ends early stops no other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.schedule import known, rounds_until_known, run_group

ROOT = Path(__file__).parents[2]
HERE = "tests.benchmarks.cases_of_tests"
DYING = Case("dying", f"{HERE}:ends_in_its_second_turn")

pytestmark = pytest.mark.usefixtures("from_the_root")


def run(cases: Sequence[Case], order: str = "alone", turns: int = 0, warmup: int = 0) -> list[Outcome]:
    return run_group(cases, ROOT, order, turns, warmup)


def turns(name: str, log: Path, seconds: float = 1.0) -> Case:
    return Case(name, f"{HERE}:takes_turns", {"name": name, "seconds": seconds, "log": str(log)})


def test_pairs_alternate_who_starts_and_the_reference_keeps_its_process(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cases = [turns("r", log), turns("a", log, 3.0), turns("b", log)]
    reference, first, second = run(cases, "pairs", 2, warmup=1)
    assert log.read_text() == "r" + "ra" + "raar" + "rb" + "rbbr"
    assert reference.result == {"turns": 7}
    assert first.result == second.result == {"turns": 3}
    assert first.ratios() == [3.0 * 2 / 3, 3.0 * 3 / 4], "a turn takes as many seconds as there were, times its own"
    assert [step["seconds"] for step in second.reference] == [6.0, 7.0]
    assert len(first.steps) == 2
    assert len(reference.steps) == 6


@pytest.mark.parametrize(("order", "expected"), [("alone", ["r", "ra", "rab"]), ("pairs", ["ra", "rab"])])
def test_outcomes_are_handed_on_whenever_a_case_has_ended(order: str, expected: list[str], tmp_path: Path) -> None:
    """An interruption of a long run does not lose what was measured."""
    seen: list[str] = []
    cases = [turns(name, tmp_path / "log") for name in "rab"]
    run_group(cases, ROOT, order, 1, done=lambda outcomes: seen.append("".join(o.name for o in outcomes)))
    assert seen == expected


def test_pairs_that_leave_the_median_in_doubt_are_followed_by_more() -> None:
    steady, disturbed, never = (Case(f"{n}", f"{HERE}:is_disturbed", {"turns": n}) for n in (0, 1, 99))
    _, calm, other, last = run([steady, steady, disturbed, never], "pairs", 3)
    assert len(calm.steps) == 3
    assert 3 < len(other.steps) <= 9
    assert known(other.ratios())
    assert other.ratio() == 1.0
    assert len(last.steps) == 9
    assert not known(last.ratios())


@pytest.mark.parametrize(("ratios", "expected"), [([1.0] * 4, 4), ([0.5, 2.0] * 6, 12), ([0.5, 2.0] + [1.0] * 10, 5)])
def test_rounds_continue_until_the_median_is_known_and_end_at_three_times_as_many(
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
    assert known([1.0, 3.0])  # two cannot tell


def test_a_case_that_ends_between_its_turns_keeps_its_pairs_and_takes_no_step_of_the_reference(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reference, first, second = run([turns("r", log), DYING, turns("b", log)], "pairs", 3)
    assert first.ratios() == [1.0]
    assert first.reason == "failed: exit status 1: ArithmeticError: the reason it died of"
    assert reference.failure is None
    assert len(second.steps) == len(second.reference) >= 3


def test_a_case_that_cannot_run_costs_the_reference_no_turn(tmp_path: Path) -> None:
    log = tmp_path / "log"
    reference, skipped = run([turns("r", log), Case("x", f"{HERE}:cannot_run_here")], "pairs", 3, warmup=1)
    assert skipped.skipped is not None
    assert log.read_text() == "r"
    assert reference.steps == []


def test_a_round_has_one_turn_of_each_and_who_starts_changes(tmp_path: Path) -> None:
    log = tmp_path / "log"
    outcomes = run([turns("a", log, 2.0), turns("b", log, 3.0)], "rounds", 3, warmup=1)
    assert log.read_text() == "ab" + "ab" + "ba" + "ab"
    assert [found.result for found in outcomes] == [{"turns": 4}] * 2
    assert [len(found.steps) for found in outcomes] == [3, 3]
    assert outcomes[1].ratios() == [1.5] * 3


def test_a_case_that_ends_is_left_out_of_further_rounds_and_of_the_comparison(tmp_path: Path) -> None:
    dead, other = run([DYING, turns("b", tmp_path / "log")], "rounds", 3)
    assert dead.reason == "failed: exit status 1: ArithmeticError: the reason it died of"
    assert len(dead.steps) == 1
    assert len(other.steps) == 3
    assert len(other.ratios()) == 1  # the reference took no other step


def test_a_case_alone_takes_its_turns(tmp_path: Path) -> None:
    (found,) = run([turns("a", tmp_path / "log")], turns=3, warmup=1)
    assert found.result == {"turns": 4}
    assert len(found.steps) == 3
