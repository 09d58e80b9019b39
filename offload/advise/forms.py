"""Where the disk bounds a step: what it would cost if weights, gradients or states were stored in fewer bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from offload.advise.prediction import Advice, Situation, bound_of, moved_by
from offload.advise.rates import OptimizerRate
from offload.planning.byte_forms import ByteForm

__all__ = ["STATES", "WEIGHTS", "FormAdvice", "advise_forms"]

#: Names of forms, and the arguments that they are.
STATES: dict[str, Any] = {"full": None, "bfloat16": torch.bfloat16, "8bit": "8bit"}
WEIGHTS: dict[str, Any] = {"full": None, "split": "split", "bfloat16": torch.bfloat16}

#: Bounds of a step that fewer bytes change.
_OF_THE_DISK = ("reading", "writing")


@dataclass(frozen=True)
class FormAdvice:
    """The fastest plan of a limit in one form."""

    form: ByteForm
    situation: Situation
    advice: Advice

    @property
    def moved_bytes(self) -> float:
        """Of a step: read from homes and written there."""
        return sum(moved.nbytes for moved in moved_by(self.situation, self.advice))

    @property
    def home_bytes(self) -> int:
        """Of all files: weights, gradients, optimizer states."""
        shards, states = self.situation.shards, self.situation.optimizer.states
        return sum(shards.home_bytes) + sum(shards.stored_gradient_bytes) + sum(shards.state_bytes(states))


def advise_forms(
    situation: Situation, advice: Advice, measure: Callable[[Any, Any], OptimizerRate]
) -> Sequence[FormAdvice]:
    """The given situation, and what it would be in each form of fewer bytes, with plans of the same limit.

    ``measure``: the optimizer, with these ``states=`` and ``store_dtype=``. Nothing where the disk does not bound the
    plan, or there is none.
    """
    if advice.prediction is None or bound_of(situation, advice) not in _OF_THE_DISK:
        return ()
    present = situation.shards.form
    takes_forms = situation.shards.takes_forms
    found = [FormAdvice(present, situation, advice)]
    for form in present.smaller(states=takes_forms and situation.optimizer.count > 0, weights=takes_forms):
        try:
            rate = measure(STATES[form.states], WEIGHTS[form.weights])
        except ValueError:
            continue  # the class cannot store its states so
        other = replace(situation, shards=replace(situation.shards, form=form), optimizer=rate)
        found.append(FormAdvice(form, other, other.at(advice.limit_bytes)))
    return [each for each in found if each.advice.prediction is not None]
