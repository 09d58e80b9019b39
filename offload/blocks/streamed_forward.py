"""A block in two roles: the module that the model's forward calls, and the layer that the engine runs.

The instance's ``forward`` of a block hands its call to the engine, which runs the block's own forward, without its
hooks. So hooks of a block run once, outside of the recomputation, on tensors of the model's graph.
"""

from __future__ import annotations

import copy
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn

from pipe.torch_private.tracing import breaks_compiled_graphs, compiled_alike

__all__ = ["StreamedForward", "own_forward"]


def own_forward(block: nn.Module) -> Callable[..., Any]:
    """The forward of a block, without its hooks; compiled if the block was compiled in place."""
    compiled = block._compiled_call_impl
    return block.forward if compiled is None else compiled_alike(compiled, block.forward)


class StreamedForward:
    """The ``forward`` of a block instance: hands the call to the engine of ``owner``, which is not kept alive."""

    def __init__(self, j: int, block: nn.Module, owner: Any) -> None:
        self._owner, self._block = weakref.ref(owner), weakref.ref(block)
        self._j = j
        self._own = vars(block).get("forward")
        #: Of a block that was compiled in place: its own forward runs compiled, and what calls the engine does not.
        self._compiled = block._compiled_call_impl
        #: For code that looks at the arguments that a block takes.
        self.__signature__ = inspect.signature(block.forward)

    @breaks_compiled_graphs
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the block."""
        owner = self._owner()
        if owner is None:
            raise RuntimeError("the OffloadModel of this block was deleted, and with it the block's parameters")
        return owner.engine.call_block(self._j, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward of a copied block, which does not stream."""
        if self._own is not None:
            return copy.deepcopy(self._own, memo)
        copied = memo[id(self._block())]
        return types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the block's own forward, which does not stream."""
        # A block that is loaded has no attributes yet when it is asked for its forward: that of its class.
        return (getattr, (self._block(), "forward")) if self._own is None else (_same, (self._own,))

    def put(self, block: nn.Module) -> None:
        """Makes this the forward of the block, until :meth:`remove` is called, after an interrupt as well."""
        block.forward = self
        block._compiled_call_impl = None

    def remove(self) -> None:
        """Gives the block its own forward back."""
        block = self._block()
        if block is not None and vars(block).get("forward") is self:
            del block.forward
            if self._own is not None:
                block.forward = self._own
            block._compiled_call_impl = self._compiled


def _same(value: Any) -> Any:
    return value
