"""Finishes the pending update of a parameter before code reads it as an attribute of its module.

``model.layer[0].weight`` finds the parameter in the ``_parameters`` of a module, past the model that knows of pending
updates. So modules whose parameters stream have a dict there that finishes the update of their shard first: a log, or a
forward that uses the weight of a block outside of it, sees the values that the optimizer's step has decided.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from offload.streaming.lane import error_context
from offload.streaming.shard import Shard

__all__ = ["read_current_values"]


class _Parameters(dict[str, Any]):
    """The parameters of a module, some of which are stored in shards."""

    __slots__ = ("shards",)

    #: Weak references, since shards refer to their modules.
    shards: tuple[weakref.ref[Shard], ...]

    def __getitem__(self, name: str) -> Any:
        for each in self.shards:
            shard = each()
            if shard is not None and (pending := shard.pending) is not None:
                with error_context(f"updating shard {shard.index}, of which {name} is read"):
                    # Update lane -> host. Without this, values from before the optimizer's step are read.
                    pending.start().synchronize()
        return super().__getitem__(name)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as a plain dict."""
        return dict, (dict(self),)


def read_current_values(shards: Iterable[Shard]) -> None:
    """Makes the modules of ``shards`` finish pending updates before a parameter is read. May be called again."""
    for shard in shards:
        stored = tuple(weakref.ref(each) for each in dict.fromkeys([shard, *(owner for owner, _ in shard.loans)]))
        for module in (module for layer in shard.layers for module in layer.modules()):
            found: Any = module._parameters
            if found and type(found) is dict:
                found = _Parameters(found)
                found.shards = stored
                # Not by an attribute: the layer of a block shares the dict of its attributes with the block.
                vars(module)["_parameters"] = found
            elif isinstance(found, _Parameters):
                found.shards = stored
