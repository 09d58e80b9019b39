"""Says what uses the memory and the time of a plan, what each choice takes and saves, and what more memory would buy.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from offload.planning.byte_forms import ByteForm
from offload.planning.choose import NothingFitsError, choose
from offload.planning.plan import Action, Kind
from offload.planning.simulate import Costs
from offload.planning.step_model import Choice, Prediction, StepModel, costs_of, predict, predicted_seconds

__all__ = ["FewerBytes", "Moved", "Part", "Stored", "bytes_at_peak", "explain", "fewer_bytes", "moves", "next_bytes"]

#: Share of a step that waits for copies and updates, from which on fewer bytes are offered.
WAITS = 0.1


@dataclass(frozen=True)
class Part:
    """One choice of a plan, with the bytes that it takes and the seconds that it saves."""

    #: The use of memory that it is, as :func:`bytes_at_peak` names it, and what was chosen, in words.
    use: str
    what: str
    #: The most bytes that it takes at one time.
    nbytes: int
    #: Predicted seconds that a step would take more without it, all else unchanged; negative where it costs time.
    seconds: float


@dataclass(frozen=True)
class Moved:
    """What one lane does in a step. Lanes run side by side, and beside layers."""

    what: str
    #: Different ones.
    shards: int
    #: Bytes that are copied; of updates, those of their gradients.
    nbytes: int
    #: Predicted.
    seconds: float


@dataclass(frozen=True)
class Stored:
    """How a model stores what it trains, and what of it can have another form."""

    form: ByteForm
    #: States of the optimizer for each parameter.
    states: float
    takes_weights: bool


@dataclass(frozen=True)
class FewerBytes:
    """What another form of stored weights, gradients or states would change."""

    #: Arguments of the model and of the optimizer.
    what: str
    #: Bytes of a parameter that a step moves if it keeps nothing in memory: now, and in this form.
    now: float
    then: float
    #: Predicted seconds that a step would take less at most: conversions between forms do not count.
    seconds: float


def fewer_bytes(model: StepModel | None, predicted: Prediction | None, stored: Stored | None) -> Sequence[FewerBytes]:
    """The forms of fewer bytes that would make a step faster, where it waits for copies and updates."""
    if model is None or predicted is None or stored is None:
        return ()
    if predicted.wait_seconds + _tail(predicted) < WAITS * predicted.seconds:
        return ()
    now, found = predicted_seconds(model, predicted.choice), []
    states, stores = stored.states, not model.updates["updates"]
    for form in stored.form.smaller(states=stored.states > 0, weights=stored.takes_weights):
        choice = predicted.choice
        if form.weights != stored.form.weights:  # layers compute in another type, and so not with homes in memory
            least = min(model.least_slots, model.shards)
            choice = replace(choice, in_memory=frozenset(), slots=max(choice.slots, least))
        costs = _in_form(model.costs, stored.form, form, states=states, stores_gradients=stores)
        saved = now - predicted_seconds(replace(model, costs=costs), choice)
        if saved > 0:
            before, after = (f.bytes_of_a_step(states, stores_gradients=stores) for f in (stored.form, form))
            found.append(FewerBytes(form.arguments, before, after, saved))
    return found


def _in_form(costs: Costs, now: ByteForm, form: ByteForm, *, states: float, stores_gradients: bool) -> Costs:
    """Measured seconds, of as many fewer bytes; an update takes no less than in memory."""
    share = form.share_of_update(states, stores_gradients=stores_gradients)
    share /= now.share_of_update(states, stores_gradients=stores_gradients)
    resting = costs.resting_update or costs.update
    return replace(
        costs,
        load=[seconds * form.load_share / now.load_share for seconds in costs.load],
        drain=[seconds * form.gradient_share / now.gradient_share for seconds in costs.drain],
        update=[max(min(a, b), share * a) for a, b in zip(costs.update, resting, strict=True)],
    )


def explain(
    model: StepModel | None, predicted: Prediction | None, more_bytes: int
) -> tuple[Sequence[Part], Prediction | None]:
    """The choices of a plan, and the fastest plan within ``more_bytes``: None if even there no plan fits.

    Nothing before a step was measured, when there is no model or no plan.
    """
    if model is None or predicted is None:
        return (), None
    more = None
    # A size of batch that ran goes on although it takes more than memory, and may take more than this, too.
    with contextlib.suppress(NothingFitsError):
        more = predict(model, choose(model, more_bytes))
    now = predicted_seconds(model, predicted.choice)
    parts = [
        Part(use, what, nbytes, predicted_seconds(model, without) - now)
        for use, what, nbytes, without in _choices(model, predicted)
    ]
    return parts, more


def next_bytes(limit_bytes: int) -> int:
    """How much more memory is worth a look: a GiB, or a quarter of a small limit."""
    return min(1 << 30, max(1 << 20, limit_bytes // 4))


def bytes_at_peak(predicted: Prediction) -> Mapping[str, int]:
    """Each use of the memory that layers compute in when most of it is used; together they are the predicted bytes."""
    top, choice, model = max(predicted.course, key=lambda moment: moment.nbytes), predicted.choice, predicted.model
    homes = model.home_bytes + sum(model.resting_bytes[j] for j in choice.in_memory)
    updates = model.buffer_bytes if len(choice.in_memory) < model.shards else 0
    transfers = model.sizes.constant_bytes - model.home_bytes
    return {
        "homes": homes,
        "slots": top.weights,
        "gradients": top.gradients,
        "boundaries": top.boundaries,
        "graphs": top.graphs,
        "running cell": top.cell,
        "outside": top.outside,
        "output": top.others - homes - updates - transfers,
        "update buffers": updates,
        "transfer buffers": transfers,
        "earlier steps": predicted.margin_bytes,
    }


def moves(model: StepModel | None, predicted: Prediction | None) -> Sequence[Moved]:
    """What the lanes of a plan do in a step: loads, gradients, updates, boundaries written out and read back."""
    if model is None or predicted is None:
        return ()
    plan, costs, sizes, choice = predicted.plan, costs_of(model, predicted.choice), model.sizes, predicted.choice
    resting = costs.resting_update or costs.update

    def moved(
        what: str,
        kinds: set[Kind],
        nbytes: Callable[[Action], int],
        seconds: Sequence[float],
        but: Set[int] = frozenset(),
    ) -> Moved:
        actions = [a for a in plan.actions if a.kind in kinds and a.shard not in but]
        return Moved(
            what, len({a.shard for a in actions}), sum(map(nbytes, actions)), sum(seconds[a.shard] for a in actions)
        )

    def gradient(action: Action) -> int:
        return sizes.gradient_bytes[action.shard]

    def boundary(action: Action) -> int:
        return sizes.boundaries((action.shard, action.microbatch or 0))

    update = [resting[j] if j in choice.in_memory else each for j, each in enumerate(costs.update)]
    found = [
        moved("loads", {Kind.LOAD}, lambda action: model.loaded_bytes[action.shard], costs.load, choice.in_memory),
        moved("gradients", {Kind.DRAIN}, gradient, costs.drain, choice.in_memory | choice.waiting),
        moved("updates", {Kind.UPDATE, Kind.UPDATE_IN_BACKWARD}, gradient, update),
        moved("boundaries", {Kind.SPILL, Kind.PREFETCH}, boundary, costs.boundary),
    ]
    return [each for each in found if each.shards]


def _choices(model: StepModel, predicted: Prediction) -> Iterator[tuple[str, str, int, Choice]]:
    """The use of memory of each choice, the choice in words, its bytes, and the same plan without it."""
    choice, sizes, course = predicted.choice, model.sizes, predicted.course
    least = min(model.least_slots, model.shards)
    if choice.slots > least:
        nbytes = (choice.slots - least) * model.slot_sizes(choice)[0]
        yield "slots", f"{choice.slots} slots instead of {least}", nbytes, replace(choice, slots=least)
    if choice.in_memory:
        nbytes = sum(model.resting_bytes[j] + sizes.gradient_bytes[j] for j in choice.in_memory)
        without = replace(choice, in_memory=frozenset(), slots=max(choice.slots, least))
        yield "homes", f"{len(choice.in_memory)} of {model.shards} shards in memory", nbytes, without
    if choice.kept:
        nbytes = max(moment.graphs for moment in course)
        cells = model.shards * len(sizes.rows)
        yield "graphs", f"graphs of {len(choice.kept)} of {cells} cells kept", nbytes, replace(choice, kept=frozenset())
    if choice.waiting:
        nbytes = sum(sizes.gradient_bytes[j] for j in choice.waiting)
        what = f"gradients of {len(choice.waiting)} shards wait for their update"
        yield "gradients", what, nbytes, replace(choice, waiting=frozenset())
    if choice.boundary_bytes > 0 and model.spills:
        nbytes = max(moment.boundaries for moment in course)
        yield "boundaries", "boundaries that stay", nbytes, replace(choice, boundary_bytes=0)


def _tail(one: Prediction) -> float:
    return one.seconds - one.compute_seconds - one.wait_seconds
