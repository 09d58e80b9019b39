"""Finishes the pending updates of parameters before code reads them from the modules that have them.

An ``OffloadModel`` shares its layers with the module that was wrapped, and with every part of it. So each module whose
parameters stream has a dict in ``_parameters`` that finishes their updates first: an attribute, ``state_dict()``,
``parameters()``, ``load_state_dict()``, a copy or a pickle of the module, of a part, or of a module around it find the
values that the optimizer's step has decided. The engine reads the identities of parameters by ``dict`` itself.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, ItemsView, Iterable, Iterator, ValuesView
from typing import TYPE_CHECKING, Any

from offload.identities import values_may_be_read
from offload.streaming.lane import error_context
from offload.streaming.shard import Shard
from pipe.process import finalize_here

if TYPE_CHECKING:
    from offload.streaming.streamer import Streamer

__all__ = ["leave_pending_updates", "read_current_values"]


class _Parameters(dict[str, Any]):
    """The parameters of a module, some of which are stored in shards."""

    __slots__ = ("left", "shards", "streamers")

    #: Weak references, since shards refer to their modules: of each model that was made of the module.
    shards: tuple[weakref.ref[Shard], ...]
    streamers: tuple[weakref.ref[Streamer], ...]
    #: What the last model has left to be updated.
    left: _Left | None

    def _finish_all(self) -> None:
        """Finishes the updates of all parameters, unless the caller reads no values."""
        if not values_may_be_read():
            return
        for each in self.streamers:
            streamer = each()
            if streamer is not None:
                streamer.clean_up()
                if self._pending() or streamer.finish_step is not None:
                    streamer.apply_pending_updates()
        if self.left is not None:
            self._finish("a parameter")

    def _pending(self) -> bool:
        return any((shard := each()) is not None and shard.pending is not None for each in self.shards)

    def _finish(self, name: str) -> None:
        for each in self.shards:
            shard = each()
            if shard is not None and (pending := shard.pending) is not None:
                with error_context(f"updating shard {shard.index}, of which {name} is read"):
                    # Update lane -> host. Without this, values from before the optimizer's step are read.
                    pending.start().synchronize()
        self.left = None

    def __getitem__(self, name: str) -> Any:
        self._finish(name)
        return dict.__getitem__(self, name)

    def get(self, name: str, default: Any = None) -> Any:
        """As of a dict."""
        return self[name] if name in self else default  # noqa: SIM401

    def pop(self, name: str, *default: Any) -> Any:
        """As of a dict."""
        self.get(name)
        return super().pop(name, *default)

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """As of a dict."""
        self._finish_all()
        return super().items()

    def values(self) -> ValuesView[Any]:  # type: ignore[override]
        """As of a dict."""
        self._finish_all()
        return super().values()

    def __iter__(self) -> Iterator[str]:
        """As of a dict. Without it, ``dict(self)`` would not ask for the values above."""
        return super().__iter__()

    def copy(self) -> dict[str, Any]:
        """A plain dict."""
        return dict(self)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles as a plain dict."""
        return dict, (dict(self.items()),)


class _Left:
    """What a model that was collected has left: shards to be updated, which use its lanes and files until then."""

    def __init__(self, shards: list[Shard], close: Callable[[], None]) -> None:
        self._shards = shards
        finalize_here(self, close)


def _modules(shard: Shard) -> Iterator[Any]:
    return (module for layer in shard.layers for module in layer.modules())


def read_current_values(shards: Iterable[Shard], streamer: Streamer) -> None:
    """Makes the modules of ``shards`` finish pending updates before a parameter is read. May be called again."""
    for shard in shards:
        stored = [weakref.ref(each) for each in dict.fromkeys([shard, *(owner for owner, _ in shard.borrowed)])]
        for module in _modules(shard):
            found: Any = module._parameters
            if found and type(found) is dict:
                found = _Parameters(found)
                found.shards, found.streamers, found.left = (), (), None
                # Not by an attribute: the layer of a block shares the dict of its attributes with the block.
                vars(module)["_parameters"] = found
            if isinstance(found, _Parameters):
                found.shards = _living(found.shards, stored)
                found.streamers = _living(found.streamers, [weakref.ref(streamer)])


def _living(*references: Iterable[weakref.ref[Any]]) -> tuple[weakref.ref[Any], ...]:
    """Weak references without those to what is gone."""
    return tuple(dict.fromkeys(each for each in itertools.chain(*references) if each() is not None))


def leave_pending_updates(shards: Iterable[weakref.ref[Shard]], close: Callable[[], None]) -> None:
    """Ends a model: calls ``close`` now, or when the parameters whose updates are pending were read, or are gone.

    Nothing is finished here, since a collection of garbage may call this in any thread, that of updates included.
    """
    pending = [shard for each in shards if (shard := each()) is not None and shard.pending is not None]
    if not pending:
        close()
        return
    left = _Left(pending, close)
    for shard in pending:
        for module in _modules(shard):
            if isinstance(module._parameters, _Parameters):
                module._parameters.left = left
