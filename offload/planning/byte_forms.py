"""Forms in which a model can store float32 weights, gradients and optimizer states, and the bytes that each leaves.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

__all__ = ["ByteForm"]

#: Stored bytes of a state for each byte in full: codes of one byte, and a scale of four for 256 of them.
_STATE_SHARES = {"full": 1.0, "bfloat16": 0.5, "8bit": (1 + 4 / 256) / 4}
_WEIGHTS = {"split": '"split"', "bfloat16": "torch.bfloat16"}
_STATES = {"bfloat16": "torch.bfloat16", "8bit": '"8bit"'}


@dataclass(frozen=True)
class ByteForm:
    """What is stored in fewer bytes; shares are of the bytes in full."""

    #: ``store_dtype``: full, split or bfloat16.
    weights: str = "full"
    #: ``gradient_dtype``: full or bfloat16.
    gradients: str = "full"
    #: ``states``: full, bfloat16 or 8bit.
    states: str = "full"

    @property
    def load_share(self) -> float:
        """Of weights, what a load reads."""
        return 1.0 if self.weights == "full" else 0.5

    @property
    def lower_share(self) -> float:
        """Of weights, what an update reads beside what loads read."""
        return 0.5 if self.weights == "split" else 0.0

    @property
    def weight_share(self) -> float:
        """Of weights, what is stored, and written by an update."""
        return self.load_share + self.lower_share

    @property
    def gradient_share(self) -> float:
        """Of gradients."""
        return 1.0 if self.gradients == "full" else 0.5

    @property
    def state_share(self) -> float:
        """Of states of matrices."""
        return _STATE_SHARES[self.states]

    @property
    def model_arguments(self) -> str:
        """Arguments of ``OffloadModel``, as Python."""
        given = [f"store_dtype={_WEIGHTS[self.weights]}"] if self.weights != "full" else []
        given += ["gradient_dtype=torch.bfloat16"] if self.gradients != "full" else []
        return ", ".join(given)

    @property
    def optimizer_arguments(self) -> str:
        """Arguments of ``OffloadOptimizer``, as Python."""
        return f"states={_STATES[self.states]}" if self.states != "full" else ""

    @property
    def arguments(self) -> str:
        """All of them, for people."""
        return ", ".join(filter(None, [self.model_arguments, self.optimizer_arguments])) or "as it is"

    def smaller(self, *, states: bool = True, weights: bool = True) -> Iterator[ByteForm]:
        """Forms that store less: one kind in another form each, and last everything in the fewest bytes.

        ``states``, ``weights``: whether these can have a form.
        """
        tried = [replace(self, states=form) for form in _STATES if states]
        tried += [replace(self, weights=form) for form in _WEIGHTS if weights]
        tried.append(replace(self, gradients="bfloat16"))
        least = replace(self, gradients="bfloat16", states="8bit" if states else self.states)
        tried.append(replace(least, weights="bfloat16") if weights else least)
        yield from (form for form in dict.fromkeys(tried) if form.bytes_of_a_step() < self.bytes_of_a_step())

    def bytes_of_a_step(self, states: float = 2.0, *, stores_gradients: bool = True) -> float:
        """Bytes of a parameter that a step moves, nothing of it kept in memory: both loads, drain and update.

        ``states``: of the optimizer. Without ``stores_gradients`` it is updated in backward, in its slot.
        """
        gradient = self.gradient_share if stores_gradients else 0.0
        return 4 * (2 * self.load_share + gradient + self.share_of_update(states, stores_gradients=stores_gradients))

    def share_of_update(self, states: float, *, stores_gradients: bool = True) -> float:
        """What an update reads and writes, but for the weights in its slot, to the bytes of weights in full."""
        gradient = self.gradient_share if stores_gradients else 0.0
        return gradient + self.lower_share + self.weight_share + 2 * states * self.state_share
