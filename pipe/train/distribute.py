"""Starts the input distribution of sharded embedding modules before the forward that uses it.

Modules that implement the protocol :class:`Distributes` (that of torchrec's sharded modules) take part: their forward
is ``compute_and_output_dist(context, input_dist(context, ...).wait().wait())``. ``input_dist`` needs only the batch,
so it can run while an earlier batch computes. It must know which part of the batch the module will be called with.
The first forward records this: which objects of the batch each module received. Later batches are distributed by that
record, and each call checks it by identity: a module that is called with other objects runs its own forward.

Guarantees
    * The result of a module never depends on the prediction; only the time at which its distribution starts does.
    * A started distribution is used once. A recomputation in backward runs the module's own forward.
    * ``forward`` of participating modules is replaced only while the model's forward runs, and restored after it.
    * Modules are identified by their qualified name in the model, never by an ``id``.

Assumes
    * ``input_dist`` reads no parameter that the optimizer updates (or keeps its own result up to date).
    * In several processes: all ranks run the same model code, so predictions hold or fail on all of them.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from pipe.torch_private.data import pytree
from pipe.train.batch import follow, record_stream, walk
from pipe.train.lane import Lane, Ticket

__all__ = ["Distributes", "Distribution", "Request", "children_of"]


@runtime_checkable
class Distributes(Protocol):
    """The protocol of modules whose input distribution can run ahead of their forward.

    ``input_dist`` returns an awaitable whose ``wait()`` starts the exchange of the features and returns another
    awaitable, whose ``wait()`` returns the distributed input. Both are called on the distribute lane.
    """

    def create_context(self) -> Any:
        """A new context for one forward."""

    def input_dist(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Starts to distribute the input over ranks."""

    def compute_and_output_dist(self, ctx: Any, dist_input: Any) -> Any:
        """Looks up the distributed input and returns the output of the forward."""


class _Call(NamedTuple):
    """How a module was called: the leaves of its arguments, objects of the batch replaced by their paths (tuples)."""

    name: str
    leaves: list[Any]
    spec: pytree.TreeSpec


@dataclass
class Request:
    """A started distribution."""

    name: str
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    context: Any
    awaitable: Any  # after the exchange, what its wait() returned
    dist_input: Ticket[Any] | None = None  # of the second wait: of a forward, or of a prefetch before it

    def fits(self, *arguments: Any) -> bool:
        """Whether these are the same objects that were distributed."""
        (mine, spec), (theirs, other) = _leaves(self.arguments), _leaves(arguments)
        return spec == other and all(map(_same, mine, theirs))


_CONSTANTS = (str, bytes, int, float, bool, type(None), torch.dtype, torch.device)


def _leaves(call: Any, objects: Container[int] = ()) -> tuple[list[Any], pytree.TreeSpec]:
    """The members of nested lists, tuples and dicts that are none of ``objects`` (by ``id``), and their structure."""
    return pytree.tree_flatten(call, lambda x: type(x) not in (list, tuple, dict) or id(x) in objects)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _CONSTANTS) and bool(a == b))


class Distribution:
    """Starts the input distributions of a batch, and gives their results to the modules in the forward.

    Args:
        model: its outermost modules with the protocol take part.
        lane: the lane on which distributions run.
        optimizers: given to ``check_optimizer`` of each module that has it, which raises to refuse one.
        prefetches: whether :meth:`prefetch` will be called.

    Attributes:
        calls: how a forward has called the modules; None before one has been observed.
        undistributed: for each module whose distribution does not run ahead, the reason.
    """

    def __init__(
        self, model: nn.Module, lane: Lane, optimizers: Iterable[torch.optim.Optimizer], *, prefetches: bool
    ) -> None:
        self._lane = lane
        self._modules: dict[str, Any] = dict(_outermost(model))
        self.calls: list[_Call] | None = None
        self.undistributed: dict[str, str] = {}
        for module, optimizer in itertools.product(self._modules.values(), optimizers):
            if hasattr(module, "check_optimizer"):
                module.check_optimizer(optimizer)
        if prefetches:
            self._check_caches()

    def serves(self, model: nn.Module) -> bool:
        """Whether the participating modules of ``model`` are those of this distribution."""
        return dict(_outermost(model)) == self._modules

    def _check_caches(self) -> None:
        """Refuses cached tables (UVM caching) that do not track which rows were fetched for which batch."""
        for name, module in self._modules.items():
            for part in _parts(module, set()):
                cache = getattr(part, "lxu_cache_weights", None)
                cached = isinstance(cache, torch.Tensor) and cache.numel() > 0
                if cached and getattr(part, "prefetch_pipeline", None) is False:
                    raise ValueError(
                        f"expected tables that can be prefetched, but a {type(part).__name__} of module {name!r} "
                        f"caches rows with prefetch_pipeline=False, so that its backward would use the cache slots of "
                        f"another batch's rows; shard it with fused_params={{'prefetch_pipeline': True}}, or use "
                        f"TrainPipelineSparseDist"
                    )

    def start(self, batch: Any) -> list[Request]:
        """Starts the distributions of a batch, in the order in which the first forward called the modules."""
        requests = []
        for call in self.calls or ():
            try:
                leaves = [follow(batch, x) if isinstance(x, tuple) else x for x in call.leaves]
            except (LookupError, AttributeError, TypeError):
                self.undistributed[call.name] = "a batch does not have the part that the first batch had"
                continue
            arguments = args, kwargs = pytree.tree_unflatten(leaves, call.spec)
            record_stream(arguments, self._lane.stream)
            module = self._modules[call.name]
            context = module.create_context()
            requests.append(Request(call.name, arguments, context, module.input_dist(context, *args, **kwargs)))
        return requests

    def exchange(self, requests: list[Request]) -> None:
        """Waits for the sizes of each request, which starts the exchange of its features."""
        for request in requests:
            request.awaitable = request.awaitable.wait()

    def prefetch(self, requests: list[Request], forward_stream: torch.cuda.Stream | None) -> None:
        """Calls ``prefetch`` of each module that has it, to fetch the rows of its request. Called on the prefetch lane.

        ``forward_stream`` will use the rows; it is None on the CPU.
        """
        for request in requests:
            module = self._modules[request.name]
            if hasattr(module, "prefetch"):
                dist_input = self._distributed(request)
                if forward_stream is not None:
                    record_stream((dist_input, request.context), forward_stream)
                module.prefetch(ctx=request.context, dist_input=dist_input, forward_stream=forward_stream)

    @contextlib.contextmanager
    def serving(self, requests: Sequence[Request], batch: Any) -> Iterator[None]:
        """A context in which participating modules use ``requests``; the first one records their arguments."""
        waiting, seen = list(requests), list[tuple[str, Any, Any]]()
        # Instance attributes that were set by other code; those of the class are none of them.
        own = {name: vars(module).get("forward") for name, module in self._modules.items()}
        try:
            for name, module in self._modules.items():
                module.forward = partial(self._forward, name, module.forward, waiting, seen)
            yield
        finally:
            for name, module in self._modules.items():
                vars(module).pop("forward", None)
                if own[name] is not None:
                    module.forward = own[name]
        if self.calls is None:
            self.calls = self._learn(seen, batch)

    def _forward(
        self, name: str, plain: Any, waiting: list[Request], seen: list[Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        request = next((r for r in waiting if r.name == name and r.fits(args, kwargs)), None)
        if request is not None:
            waiting.remove(request)
            return self._modules[name].compute_and_output_dist(request.context, self._distributed(request))
        if any(r.name == name and r.dist_input is not None for r in waiting):
            raise RuntimeError(
                f"module {name!r} has prefetched rows for other objects than it is called with, and would compute with "
                f"those rows; call it with the same part of every batch, or use TrainPipelineSparseDist, which "
                f"prefetches nothing"
            )
        if self.calls is not None:
            self.undistributed.setdefault(name, "it was called with other objects than in the first forward")
        seen.append((name, args, kwargs))
        return plain(*args, **kwargs)

    def _distributed(self, request: Request) -> Any:
        """Waits for the distributed input; the result is safe to use on the current stream."""
        if request.dist_input is None:
            request.dist_input = self._lane.submit(request.awaitable.wait)
        # Without this wait, the lookup would read indices (or rows) before they are received.
        dist_input = request.dist_input.wait()
        if self._lane.stream is not None:
            record_stream((dist_input, request.context), torch.cuda.current_stream(self._lane.stream.device))
        return dist_input

    def _learn(self, seen: list[tuple[str, tuple[Any, ...], dict[str, Any]]], batch: Any) -> list[_Call]:
        paths = {id(value): path for path, value in walk(batch)}  # ids of objects that the batch keeps alive
        calls = []
        for name, args, kwargs in seen:
            leaves, spec = _leaves((args, kwargs), paths)
            found = [x if isinstance(x, _CONSTANTS) else paths.get(id(x)) for x in leaves]
            strange = [x for x, path in zip(leaves, found, strict=True) if x is not None and path is None]
            if strange:
                kind = type(strange[0]).__name__
                self.undistributed[name] = f"it was called with a {kind} that is no part of the batch"
            else:
                calls.append(_Call(name, found, spec))
        for name in self._modules.keys() - {name for name, _, _ in seen}:
            self.undistributed[name] = "the first forward did not call it"
        return calls


def _outermost(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if isinstance(module, Distributes):
        yield name, module
        return
    for key, child in module.named_children():
        yield from _outermost(child, f"{name}.{key}" if name else key)


def children_of(module: nn.Module) -> Iterator[nn.Module]:
    """The children of a module, those in plain list attributes included, where torchrec keeps its lookups.

    Such a list may hold modules above it, too: ``FullyShardedDataParallel`` keeps one of all its instances.
    """
    yield from module.children()
    for value in vars(module).values():
        if isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, nn.Module))


def _parts(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        yield module
        for child in children_of(module):
            yield from _parts(child, seen)
