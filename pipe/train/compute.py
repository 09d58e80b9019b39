"""Calls the model with one batch under autocast, and checks that it returns ``(losses, output)``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from pipe.train.window import MicroStep, Window

__all__ = ["Compute"]


class Compute:
    """Runs the forward of a model under autocast; inside a window, replicas do not synchronize before its end.

    Args:
        model: called with one batch; trained if it is in ``train`` mode.
        window: the gradient accumulation window.
        device_type: of autocast.
        amp_dtype: autocast to this type, or None.
        custom_model_fwd: called with one batch instead of the model, or None.
        forward_only: whether nothing is trained, whatever the model's mode.
    """

    def __init__(
        self,
        model: nn.Module,
        window: Window,
        device_type: str,
        amp_dtype: torch.dtype | None = None,
        custom_model_fwd: Callable[[Any], Any] | None = None,
        *,
        forward_only: bool = False,
    ) -> None:
        if custom_model_fwd is not None and not callable(custom_model_fwd):
            raise TypeError(
                f"expected custom_model_fwd to be None or to be called with a batch, got "
                f"{type(custom_model_fwd).__name__}"
            )
        self.model = model
        self._window = window
        self._device_type = device_type
        self._amp_dtype = amp_dtype
        self._custom_model_fwd = custom_model_fwd
        self._forward_only = forward_only

    def trains(self) -> bool:
        """Whether a batch that is run now is trained on."""
        return not self._forward_only and self.model.training and torch.is_grad_enabled()

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of the model, or a null context."""
        if self._amp_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, dtype=self._amp_dtype)

    def call(self, batch: Any) -> Any:
        """Calls the model."""
        return self.model(batch) if self._custom_model_fwd is None else self._custom_model_fwd(batch)

    def forward(self, call: Callable[[], Any], micro: MicroStep | None) -> tuple[Any, Any]:
        """The losses and the output that ``call`` returns.

        Args:
            call: calls the model.
            micro: the batch's place in its window; None where nothing is trained.

        Raises:
            TypeError: if it does not return a pair.
        """
        synchronization = contextlib.nullcontext() if micro is None else self._window.synchronization(micro)
        with synchronization, self.autocast():
            returned = call()
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"expected the model to return a tuple (losses, output), got {type(returned).__name__}"
                f"{f' of {len(returned)}' if isinstance(returned, tuple) else ''}"
            )
        return returned
