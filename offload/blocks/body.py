"""A block in two roles: the module that the model's forward calls, and the layer that the engine runs.

The instance's ``forward`` of a block hands its call to the engine, which runs the :class:`Body` of the block: its own
forward, without its hooks. So hooks of a block run once, outside of the recomputation, on tensors of the model's graph.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.engine.mesh_engine import MeshEngine
from pipe.torch_private.tracing import compiled_alike, outside_of_compiled_graphs

__all__ = ["Body", "StreamedForward", "engine_of"]


class Body(nn.Module):
    """A view of a block: the same attributes, parameters and children, but a call runs only the block's own forward.

    The argument of a call is one (args, kwargs) pair.
    """

    #: Its attributes are not those of this package.
    shows_another = True
    #: ``reset_parameters`` is there if the block has it: for a block on the meta device.
    __slots__ = ("_block", "_run", "reset_parameters")

    def __init__(self, block: nn.Module) -> None:
        own = vars(block).get("forward")
        object.__setattr__(self, "__dict__", vars(block))
        function, this = type(block).forward, weakref.ref(block)
        object.__setattr__(self, "_block", this)
        if block._compiled_call_impl is not None:
            run = compiled_alike(block._compiled_call_impl, own or types.MethodType(function, block))
        else:  # not the bound method: a block would refer to itself
            run = own or (lambda *args, **kwargs: function(this(), *args, **kwargs))
        object.__setattr__(self, "_run", run)
        reset = getattr(type(block), "reset_parameters", None)
        if reset is not None:
            object.__setattr__(self, "reset_parameters", lambda: reset(this()))

    def __getattr__(self, name: str) -> Any:
        """What is no attribute of the instance, as ``training`` of a module that ``torch.compile`` returned."""
        return getattr(object.__getattribute__(self, "_block")(), name)

    def __call__(self, call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> Any:
        """Runs the forward of the block."""
        run: Callable[..., Any] = object.__getattribute__(self, "_run")
        args, kwargs = call
        return run(*args, **kwargs)


def run_of(body: nn.Module) -> Callable[..., Any]:
    """The forward of a block, of its :class:`Body`."""
    run: Callable[..., Any] = object.__getattribute__(body, "_run")
    return run


class StreamedForward:
    """The ``forward`` of a block instance: hands the call to the engine."""

    def __init__(self, j: int, block: nn.Module) -> None:
        self._engine: Callable[[], Engine | None] = lambda: None
        self._block = weakref.ref(block)
        self._j = j
        self._own = vars(block).get("forward")
        #: Of a block that was compiled in place: the :class:`Body` runs compiled, and what calls the engine does not.
        self._compiled, block._compiled_call_impl = block._compiled_call_impl, None
        #: For code that looks at the arguments that a block takes.
        self.__signature__ = inspect.signature(block.forward)
        block.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the block."""
        if torch.compiler.is_compiling():
            return self._outside_of_compiled_graphs(args, kwargs)
        return self._call(args, kwargs)

    @outside_of_compiled_graphs
    def _outside_of_compiled_graphs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        engine, block = self._engine(), self._block()
        if engine is None or block is None:
            raise RuntimeError("the OffloadModel of this block was deleted, and with it the block's parameters")
        return engine.call_block(self._j, args, kwargs)

    def run_by(self, engine: Engine) -> None:
        """Notes the engine that runs the block."""
        self._engine = weakref.ref(engine)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """The forward of a copied block, which does not stream."""
        block = self._block()
        copied = memo.get(id(block))
        return self._own if copied is None else types.MethodType(type(copied).forward, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the block's own forward, which does not stream."""
        # A block that is loaded has no attributes yet when it is asked for its forward: that of its class.
        return (getattr, (self._block(), "forward")) if self._own is None else (_same, (self._own,))

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


# --- Makes the engine of ``offload.engine`` for an ``OffloadModel`` --------------------------------------------------


def engine_of(homes: ModelHomes) -> Engine:
    """The engine that runs the layers of a model with these homes."""
    public = homes.public
    # Each layer is a block that the model's forward calls, or the layers of a shard run together.
    calls = [run_of(layer) for shard in homes.shards for layer in shard.layers] if homes.layers_apart else ()
    with public.whole():
        engine = (MeshEngine if public.sharded else Engine)(homes, calls)
    homes.run_by(engine)
    public.recount()
    return engine
