"""What each choice of a plan takes and saves, and why another plan lost."""

from __future__ import annotations

from dataclasses import replace

from offload.planning.explain import explain, lost_by
from offload.planning.peak_memory import PeakMemory
from offload.planning.plan import Plan
from offload.planning.search import search
from offload.planning.step_model import Choice, Prediction, predict, predicted_seconds
from tests.offload.planning.test_search import MIB, least_of, model_of


def test_each_choice_has_its_bytes_and_the_seconds_that_a_step_takes_more_without_it() -> None:
    model = model_of(8, contention=0.3)
    limit = least_of(model) + 500 * MIB
    found = search(model, limit).best
    choice = found.choice
    parts, more = explain(model, found, 2 * limit)
    named = {part.what.split()[0]: part for part in parts}
    graphs = named["graphs"]
    assert graphs.what == f"graphs of {len(choice.kept)} of 8 cells kept"
    assert graphs.nbytes == max(moment.graphs for moment in found.course)
    assert graphs.seconds == predicted_seconds(model, replace(choice, kept=frozenset())) - found.seconds > 0
    resting = next(part for part in parts if "in memory" in part.what)
    assert resting.nbytes == len(choice.in_memory) * 4 * 20 * MIB
    assert resting.seconds > 0
    assert more is not None
    assert more.seconds < found.seconds
    assert explain(model, found, 1)[1] is None
    assert explain(None, None, limit) == ((), None)


def test_the_leanest_plan_has_chosen_nothing() -> None:
    model = replace(model_of(4), spills=False)
    assert explain(model, predict(model, Choice(2)), 1)[0] == []


def test_a_plan_lost_by_what_it_spends_more_seconds_on() -> None:
    def taking(seconds: float, waits: float, computes: float) -> Prediction:
        return Prediction(Choice(2), Plan((), 2), seconds, waits, computes, 0, PeakMemory(0), ())

    best = taking(10.0, 1.0, 8.0)
    assert lost_by(best, taking(12.0, 1.5, 9.5)) == "+1.5 s computing, +0.5 s waiting for copies and updates"
    assert lost_by(best, taking(12.0, 0.5, 8.0)) == (
        "-0.5 s waiting for copies and updates, +2.5 s after the last cell"
    )
    assert lost_by(best, taking(10.001, 1.001, 8.0)) == "as fast"
