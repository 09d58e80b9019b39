"""What each choice of a plan takes and saves, and why another plan lost."""

from __future__ import annotations

from dataclasses import replace

from offload.planning.byte_forms import ByteForm
from offload.planning.choose import choose
from offload.planning.explain import Stored, explain, fewer_bytes
from offload.planning.step_model import Choice, predict, predicted_seconds
from tests.offload.planning.test_choose import MIB, least_of, model_of


def test_each_choice_has_its_bytes_and_the_seconds_that_a_step_takes_more_without_it() -> None:
    model = model_of(8, update=0.01)
    limit = least_of(model) + 500 * MIB
    found = predict(model, choose(model, limit))
    choice = found.choice
    parts, more = explain(model, found, 10_000 * MIB)
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


def test_forms_of_fewer_bytes_are_offered_where_copies_are_waited_for_with_bytes_and_seconds() -> None:
    exact = Stored(ByteForm(), 2.0, takes_weights=True)
    waiting = model_of(8, load=0.5, update=0.6)
    waiting = replace(waiting, costs=replace(waiting.costs, resting_update=[0.05] * 8, drain=[0.1] * 8))
    found = predict(waiting, Choice(2))
    forms = {each.what: each for each in fewer_bytes(waiting, found, exact)}
    everything = forms['store_dtype=torch.bfloat16, gradient_dtype=torch.bfloat16, states="8bit"']
    assert (everything.now, everything.then) == (36, 14.0625)
    assert 0 < forms['store_dtype="split"'].seconds < everything.seconds
    assert 0 < forms['states="8bit"'].seconds < everything.seconds < found.seconds
    assert forms["gradient_dtype=torch.bfloat16"].then == 32
    kept = fewer_bytes(waiting, found, replace(exact, takes_weights=False))
    assert [each.what for each in kept if "store_dtype" in each.what] == []
    least = Stored(ByteForm("bfloat16", "bfloat16", "8bit"), 2.0, takes_weights=True)
    assert fewer_bytes(waiting, found, least) == []
    computing = model_of(8, load=0.001, update=0.001)
    assert fewer_bytes(computing, predict(computing, Choice(3)), exact) == ()
    assert fewer_bytes(None, None, exact) == fewer_bytes(waiting, found, None) == ()


def test_bytes_of_a_step_in_each_form() -> None:
    assert ByteForm().bytes_of_a_step() == 36
    assert ByteForm().bytes_of_a_step(stores_gradients=False) == 28
    assert ByteForm("split", "bfloat16").bytes_of_a_step() == 30
    assert ByteForm("bfloat16", "bfloat16", "8bit").bytes_of_a_step() == 14.0625
    assert [form.arguments for form in ByteForm(states="8bit").smaller(weights=False)] == [
        'gradient_dtype=torch.bfloat16, states="8bit"'
    ]


def test_the_leanest_plan_has_chosen_nothing() -> None:
    model = replace(model_of(4), spills=False)
    assert explain(model, predict(model, Choice(2)), 1)[0] == []
