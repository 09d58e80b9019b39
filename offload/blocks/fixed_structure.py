"""Refuses a model's methods that would replace modules or parameters, before they have replaced any of them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["methods_refused"]

#: Methods of transformers and peft that replace modules or parameters, and what to do instead.
_SETTING = ("set_input_embeddings", "set_output_embeddings")
_RESIZING = ("resize_token_embeddings", "resize_position_embeddings", "prune_heads", "dequantize")
_ADAPTING = ("add_adapter", "load_adapter", "delete_adapter", "add_weighted_adapter")
_REPLACING = {
    **dict.fromkeys(_SETTING + _RESIZING + _ADAPTING, "call it on the model before it is wrapped"),
    "merge_and_unload": "merge_adapter() keeps the layers; or unload the model and wrap it afterwards",
    "unload": "unload the model and wrap it afterwards",
}


def methods_refused(model: nn.Module) -> dict[str, Callable[..., Any]]:
    """Functions that refuse, by the names of the methods of ``model`` that would replace modules or parameters.

    Among them those of another object that a model passes on, as a model with adapters does.
    """
    return {name: _refused(type(model), name) for name in _REPLACING if callable(getattr(model, name, None))}


def _refused(kind: type[nn.Module], name: str) -> Callable[..., Any]:
    def refuse(self: Any, *args: Any, **kwargs: Any) -> Any:
        if name == "resize_token_embeddings":
            embeddings = self.get_input_embeddings()
            size = args[0] if args else kwargs.get("new_num_tokens")
            rounded = args[1] if len(args) > 1 else kwargs.get("pad_to_multiple_of")
            if rounded is None and size in (None, embeddings.weight.shape[0]):
                return embeddings
        given = [*args, *kwargs.values()]
        adapter = args[1] if len(args) > 1 else kwargs.get("adapter_name")
        if name == "load_adapter" and own is not None and adapter in getattr(self, "peft_config", ()):
            return own(self, *args, **kwargs)  # values for one that is there, as a trainer that resumes loads them
        if name in _SETTING and len(given) == 1 and given[0] is getattr(self, name.replace("set", "get"))():
            return None
        raise RuntimeError(
            f"{kind.__name__}.{name}() would replace modules or parameters of an OffloadModel, which has a home for "
            f"each parameter since it was made: {_REPLACING[name]}"
        )

    own = getattr(kind, name, None)
    return refuse if own is None else functools.wraps(own)(refuse)
