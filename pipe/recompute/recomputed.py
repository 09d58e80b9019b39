"""Runs a call whose graph keeps only what enters it, and runs the call again when backward asks for what it saved.

The graph is that of the call itself. In place of each tensor that it would save there is a number; the first one that
backward asks for runs the call again until all of them have been made::

    forward     call(input)      saved: input;  0, 1, 2, ...
    backward    asks for 2  ->   call(input) again: makes 0, 1, 2, ... and stops after the last
                asks for 1, 0    they are there; each is freed when it is used

So a loss on any activation inside, ``torch.autograd.grad``, ``backward(inputs=...)``, a retained graph and a nested
checkpoint are what they are without it. Every backward that asks runs the call once.

Guarantees
    * What enters is saved as autograd saves it: hooks around the call (``save_on_cpu``) see it, and a change in place
      raises torch's error.
    * The second run has the state of the first (:mod:`pipe.recompute.replay`) and its settings (autocast, modes), and
      leaves the present state as it is.
    * A second run that saves other tensors than the first (another number, shape, type or device) raises RuntimeError.

Source: ``torch.utils.checkpoint`` without reentrant autograd, which keeps a holder for each saved tensor.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from pipe.nested import LEAVES, TreeSpec, flatten, unflatten
from pipe.recompute.phase import phase
from pipe.recompute.replay import Replay, Rewound
from pipe.recompute.thread_state import close_contexts, holds_generators, release_generators, shared_generators
from pipe.torch_private.autograd import at_end_of_backward, backward_number
from pipe.torch_private.dispatch import with_subclasses
from pipe.torch_private.tracing import uncompiled_hooks

__all__ = ["Call", "Stop", "unchanged"]


References = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
Around = Callable[[], contextlib.AbstractContextManager[Any]]


class Stop(BaseException):
    """Ends a second run when all tensors have been made."""


class _Inputs(torch.autograd.Function):
    """A node that saves what enters, for nothing but to be read by the second run."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return phony.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


_PLAIN = Tensor, torch.nn.Parameter
_PHONY = torch.empty(0, requires_grad=True)


@dataclass(slots=True)
class _Input:
    """A tensor among the arguments: its number, and what makes the tensor of the second run like it."""

    number: int
    requires_grad: bool
    kind: type[Tensor]
    attributes: dict[str, Any]

    def made_of(self, saved: Tensor) -> Tensor:
        tensor = saved.detach()
        # What autograd returns of a subclass is a plain tensor, unless that has a ``__torch_dispatch__``.
        if type(tensor) is not self.kind:
            tensor = tensor.as_subclass(self.kind)
            vars(tensor).update(self.attributes)
        return tensor.requires_grad_(self.requires_grad)


@dataclass(slots=True)
class Call:
    """One call: what it saved, and what its second run needs.

    Attributes:
        name: for errors.
        again: what runs in backward, with the arguments of :meth:`save_inputs`.
        state: of the modules that run, begun just before.
        references: what replaces a tensor of the second run until it is used, and what makes the tensor of it.
        around: makes a context for a second run.
        on_save: called with each tensor that the call would save.
        begins: called before a second run, and before what it gets is read.
        to_the_end: whether second runs do not stop when all tensors have been made, so that all that they save is
            compared.
    """

    name: str
    again: Callable[..., Any]
    state: Replay
    references: References | None = None
    around: Around = contextlib.nullcontext
    on_save: Callable[[Tensor], None] | None = None
    begins: Callable[[], None] | None = None
    to_the_end: bool = False
    #: Whether the first run has ended. Until then, backwards inside it run the part before them again.
    ended: bool = False
    #: Number, and shape, type and device, of the tensors that the first run saved.
    count: int = 0
    kinds: list[tuple[Any, ...]] = field(default_factory=list)
    #: The same tensors of the second run, in the backward of this number; None where used.
    made: list[Any] | None = None
    number: int = -1
    #: What enters: a tensor whose node holds it, the other leaves, and their structure.
    saved: Tensor = field(init=False)
    leaves: list[Any] = field(init=False)
    spec: TreeSpec = field(init=False)

    def save_inputs(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Saves the arguments of further runs, which may be nested."""
        leaves, self.spec = flatten((args, kwargs))
        objects = [x for x in leaves if type(x) not in LEAVES and not isinstance(x, Tensor)]
        if objects:
            self.state.add_arguments(objects)
        # One tensor at several places is one in the second run, too: a write to it is seen at all of them.
        inputs: dict[int, _Input] = {}
        tensors: list[Tensor] = []
        for k, x in enumerate(leaves):
            if isinstance(x, Tensor):
                if id(x) not in inputs:
                    own = vars(x) if type(x) not in _PLAIN else {}
                    kind = Tensor if type(x) in _PLAIN else type(x)
                    inputs[id(x)] = _Input(len(tensors), x.requires_grad, kind, dict(own))
                    tensors.append(x)
                leaves[k] = inputs[id(x)]
        if any(x.is_nested and x.layout is torch.strided for x in tensors):
            raise TypeError(
                f"expected dense, sparse or jagged tensors, got a nested tensor of the strided layout that enters "
                f"{self.name}, which autograd cannot save; use layout=torch.jagged, or compute without recomputation"
            )
        # The output, not its node: before torch 2.13 what a node has saved goes with the last tensor that it made.
        self.saved = _Inputs.apply(_PHONY, *tensors)  # type: ignore[no-untyped-call]
        self.leaves = leaves

    def first(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The first run: ``function(*args, **kwargs)``."""
        flags = phase.flags
        phase.flags = True, flags[1]
        try:
            with saved_tensors_hooks(*uncompiled_hooks(self.pack, _unpack)):
                output = function(*args, **kwargs)
        finally:
            phase.flags = flags
        self.state.record_changes()
        self.ended = True
        return output

    def pack(self, tensor: Tensor) -> Any:
        """What the graph of the first run keeps of a tensor."""
        self.kinds.append((tensor.shape, tensor.dtype, tensor.device))
        if self.on_save is not None:
            self.on_save(tensor)
        self.count += 1
        return self, self.count - 1

    def prepare(self) -> None:
        """Within a backward: runs the call again, unless what this backward needs is there."""
        if self.made is None or self.number != backward_number():
            self.run_again()

    def run_again(self) -> None:
        """Makes all tensors that the first run saved."""
        if self.ended:
            self.state.check(self.name)
        if self.begins is not None:
            self.begins()
        leaves = list(self.leaves)
        entered = self.saved.grad_fn.saved_tensors  # type: ignore[union-attr]
        known: dict[int, Tensor] = {}
        for k, x in enumerate(leaves):
            if type(x) is _Input:
                if x.number not in known:
                    known[x.number] = x.made_of(entered[x.number])
                leaves[k] = known[x.number]
        args, kwargs = unflatten(leaves, self.spec)
        made: list[Any] = []
        left = self.count
        stops = not (self.to_the_end and self.ended)
        refer = None if self.references is None else self.references[0]

        def pack(tensor: Tensor) -> Any:
            nonlocal left
            detached = tensor.detach()
            kind = tensor.shape, tensor.dtype, tensor.device
            made.append((detached if refer is None else refer(detached), detached._version, kind))
            left -= 1
            if left == 0 and stops:
                raise Stop
            return detached

        hooks = saved_tensors_hooks(*uncompiled_hooks(pack, _same))
        state, lock = Rewound(self.state), self.state.lock
        held = lock is not shared_generators or holds_generators()
        try:
            with lock, state, with_subclasses(), torch.enable_grad(), hooks, self.around():
                self.state.settings.run(self.again, *args, **kwargs)
        except Stop:
            pass
        except BaseException as error:
            # An interrupt may keep the ``with`` statement from ending them.
            close_contexts(error)
            state.restore()
            if not held:
                release_generators()
            raise
        found = [kind for _, _, kind in made]
        if found != self.kinds:
            raise RuntimeError(
                f"expected the recomputation of {self.name} to save what its forward saved, {_shown(self.kinds)}, got "
                f"{_shown(found)}; make it deterministic, or compute it without recomputation"
            )
        self.made, self.number = made, backward_number()
        if self.number != -1:
            # Frees what this backward does not use. It does not refer to the call, whose input is freed before.
            at_end_of_backward(made.clear)


def _unpack(place: tuple[Call, int]) -> Tensor:
    call, k = place
    number = backward_number()
    if not call.made or call.number != number or call.made[k] is None:
        call.run_again()
    made = call.made
    assert made is not None
    saved, version, _ = made[k]
    made[k] = None
    if isinstance(saved, Tensor):
        return unchanged(saved, version, call.name)
    assert call.references is not None
    return call.references[1](saved)


def unchanged(tensor: Tensor, version: int, name: str) -> Tensor:
    """A saved tensor. Raises RuntimeError if it was changed in place since it was saved."""
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that the graph of {name} needs for its backward was changed in "
            f"place after it was saved; clone it before changing it"
        )
    return tensor


def _same(tensor: Any) -> Any:
    return tensor


def _shown(kinds: list[tuple[Any, ...]]) -> str:
    shown = ", ".join(f"{tuple(shape)} {dtype}" for shape, dtype, _ in kinds[:8])
    return f"{len(kinds)} tensors ({shown}{', ...' if len(kinds) > 8 else ''})"
