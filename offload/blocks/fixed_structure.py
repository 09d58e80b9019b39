"""Refuses a model's methods that would replace modules or parameters, before they have replaced any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["methods_refused"]

#: Methods of transformers and peft that replace modules or parameters, and what to do instead.
_WRAP_LATER = "call it on the model before it is wrapped"
_REPLACING = {
    "resize_token_embeddings": _WRAP_LATER,
    "set_input_embeddings": _WRAP_LATER,
    "set_output_embeddings": _WRAP_LATER,
    "resize_position_embeddings": _WRAP_LATER,
    "prune_heads": _WRAP_LATER,
    "add_adapter": _WRAP_LATER,
    "load_adapter": _WRAP_LATER,
    "delete_adapter": _WRAP_LATER,
    "add_weighted_adapter": _WRAP_LATER,
    "dequantize": _WRAP_LATER,
    "merge_and_unload": "merge_adapter() keeps the layers; or unload the model and wrap it afterwards",
    "unload": "unload the model and wrap it afterwards",
}


def methods_refused(kind: type[nn.Module]) -> dict[str, Callable[..., Any]]:
    """By name: what stands in for the methods of ``kind`` that would replace modules or parameters."""
    return {name: _refused(kind, name) for name in _REPLACING if callable(getattr(kind, name, None))}


def _refused(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    own = getattr(kind, name)

    @functools.wraps(own)
    def refuse(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _changes_nothing(self, name, args, kwargs):
            return own(self, *args, **kwargs)
        raise RuntimeError(
            f"{kind.__name__}.{name}() would replace modules or parameters of an OffloadModel, which has a home for "
            f"each parameter since it was made: {_REPLACING[name]}"
        )

    return refuse


def _changes_nothing(model: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call leaves the model as it is: embeddings of the same size, or the same module."""
    given = [*args, *kwargs.values()]
    if name == "resize_token_embeddings":
        size = args[0] if args else kwargs.get("new_num_tokens")
        rounds = args[1] if len(args) > 1 else kwargs.get("pad_to_multiple_of")
        return rounds is None and size in (None, model.get_input_embeddings().weight.shape[0])
    if name in ("set_input_embeddings", "set_output_embeddings") and len(given) == 1:
        return given[0] is getattr(model, name.replace("set", "get"))()
    return False
