"""What a step needs of the ``GradCache`` whose step it is: the hooks that a subclass may replace."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from gradcache.representations import Joined

__all__ = ["StepOwner"]


class StepOwner(Protocol):
    """The ``GradCache`` of a step."""

    process_fn: Callable[[Any], Any] | None
    towers: list[nn.Module]

    def get_input_tensors(self, model_input: Any) -> list[Tensor]:
        """Tensors of a chunk."""

    def encoder_of(self, model: nn.Module) -> Callable[[Any], Any]:
        """A function from a chunk to its representations."""

    def processed(self, chunk: Any) -> Any:
        """The model's input."""

    def representation_of(self, model_out: Any) -> Any:
        """What is selected of an output."""

    def joined(self, chunks: Sequence[Any]) -> Joined:
        """Joins the representations of these chunks."""

    def rows_in_input(self, model_input: Any) -> int | None:
        """Rows of an input or a chunk; None if they cannot be counted."""

    def replaced(self, *hooks: str) -> bool:
        """Whether a subclass, or an attribute of the object, replaces one of these hooks."""

    def autocast(self, *owners: Any) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of the step for the device of these modules or tensors."""

    def forward_no_grad(self, model: nn.Module, model_inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The first pass over plain modules."""

    def forward_backward(
        self, model: nn.Module, model_inputs: Sequence[Any], cached_gradients: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """The second pass over plain modules."""
