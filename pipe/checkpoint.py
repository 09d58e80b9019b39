"""Activation checkpointing that can recompute a function before the gradient of its output has been received.

``torch.utils.checkpoint`` recomputes when the gradient is available. In a pipeline the gradient is still being copied
from the next device while this one is idle. So checkpointing is split into two autograd functions, and the wait for the
gradient is placed between them::

     input ──┬───────────────────╮
             │                   │ saved once, by Checkpoint
        ╭────┴─────╮             │
        │Checkpoint│ [3] runs backward through the recomputed graph
        ╰────┬─────╯
           (Wait)    [2] waits until the gradient has been copied
        ╭────┴─────╮
        │Recompute │ [1] runs the function again, while the gradient is being copied
        ╰────┬─────╯
          output     (numbers: order in backward)

Invariants
    * Exactly the outputs that would need a gradient without checkpointing need one: the function runs with grad mode on
      and every tensor that its graph would save is dropped. The other outputs (integers, constants, None) bypass
      autograd, so no gradient can be paired with the wrong output.
    * A gradient for any output starts the recomputation; without one, nothing is recomputed.
    * Each input tensor is saved once, through the active saved-tensor hooks.
    * The second run starts from the state of the first: see :mod:`pipe.recompute.rerun`.

After an exception in the recomputation the generators, buffers and settings are restored and the graph is dead.

Source: GPipe (Huang et al., 2019); torchgpipe (Kim et al., 2020), section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pipe.microbatch import Batch
from pipe.nested import flatten, unflatten
from pipe.phony import get_phony
from pipe.recompute.input_writes import refuse_writes
from pipe.recompute.module_state import WatchedModule
from pipe.recompute.phase import enable_checkpointing, enable_recomputing, is_checkpointing, is_recomputing
from pipe.recompute.rerun import Rerun
from pipe.recompute.thread_state import restores_thread_state
from pipe.torch_private.autograd import accumulates_everywhere

__all__ = [
    "Checkpoint",
    "Checkpointing",
    "Recompute",
    "checkpoint",
    "enable_checkpointing",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
    "refuse_double_backward",
]


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    use_reentrant: bool | None = None,
    preserve_rng_state: bool = True,
    **kwargs: Any,
) -> Any:
    """``function(*args, **kwargs)``, of which only the arguments are kept; backward computes the function again.

    Args:
        function: a module or callable. If it is a module, changes between forward and backward raise.
        args: tensors or any nested values, as are ``kwargs``.
        use_reentrant: without effect, as is ``preserve_rng_state``; accepted because ``torch.utils.checkpoint`` has
            them. There is one kind of checkpoint here, and its recomputation always draws the same random numbers.

    Returns:
        The output of ``function``: a tensor or any nested value.

    Raises:
        TypeError: for options of ``torch.utils.checkpoint`` that choose what is kept or compared.
    """
    unknown = sorted({"context_fn", "determinism_check", "debug", "early_stop"} & kwargs.keys())
    if unknown:
        raise TypeError(
            f"expected a function and its arguments, got {', '.join(unknown)} of torch.utils.checkpoint, which this "
            f"checkpoint does not have; leave them out"
        )
    if len(args) == 1 and not kwargs:
        checkpointing = Checkpointing(function, Batch(args[0]))
    else:
        watched = WatchedModule(function) if isinstance(function, nn.Module) else None
        checkpointing = Checkpointing(partial(_apply, function), Batch((args, kwargs)), watched=watched)
    output = checkpointing.checkpoint()
    checkpointing.recompute(output)
    return output.value


def _apply(function: Callable[..., Any], arguments: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
    args, kwargs = arguments
    return function(*args, **kwargs)


def refuse_double_backward(name: str) -> None:
    """Refuses ``create_graph=True`` in a backward that recomputes the forward of ``name``.

    The gradients are computed by another graph, which is freed afterwards: a second derivative would silently lack
    their contribution.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"expected a backward without create_graph=True through {name}: its gradients cannot be differentiated "
            f"again (gradient penalties, Hessians); compute the penalty on the bare module, or approximate it by "
            f"differences of first gradients"
        )


class Checkpointing:
    """Makes the pair of :class:`Checkpoint` and :class:`Recompute` for one call.

    Args:
        function: called with the value of ``batch``, once now and once in backward.
        batch: the input.
        watched: the module that ``function`` runs; by default ``function`` itself, if it is a module.
        phony: the backward of its producer runs after that of this call (see :mod:`pipe.dependency`).
    """

    def __init__(
        self,
        function: Callable[[Any], Any],
        batch: Batch,
        *,
        watched: WatchedModule | None = None,
        phony: Tensor | None = None,
    ) -> None:
        if watched is None and isinstance(function, nn.Module):
            watched = WatchedModule(function)
        self.function = function
        self.batch = batch
        self._watched = watched
        self._phony = phony
        self._cell: _Cell | None = None
        self._node: Any = None

    def checkpoint(self) -> Batch:
        """Runs the function and returns its output as the result of :class:`Checkpoint`.

        Raises:
            RuntimeError: if the function changed its input in place.
        """
        if not torch.is_grad_enabled():  # nothing will be recomputed
            return self.batch.call(self.function)
        cell = _Cell(self.function, self.batch.value, self._watched)
        inputs = list({id(tensor): tensor for tensor in self.batch}.values())
        leaves, spec = flatten(cell.compute(inputs))
        cell.differentiable = [k for k, y in enumerate(leaves) if isinstance(y, Tensor) and y.requires_grad]
        if cell.differentiable:
            # If no input needs a gradient, the node is in the graph only because of the phony.
            phony = get_phony(inputs[0].device if inputs else torch.device("cpu"), requires_grad=True)
            if self._phony is not None and self._phony.requires_grad:
                phony = self._phony
            results = [leaves[k].detach() for k in cell.differentiable]
            for k in cell.differentiable:
                leaves[k] = None  # frees the graph, whose saved tensors were dropped
            call = _Call(cell, results)
            outputs = Checkpoint.apply(phony, call, *inputs)  # type: ignore[no-untyped-call]
            for k, output in zip(cell.differentiable, outputs, strict=True):
                leaves[k] = output
            self._cell, self._node = cell, call.node
        return Batch(unflatten(leaves, spec))

    def recompute(self, batch: Batch) -> None:
        """Applies :class:`Recompute` to the output in place. Nodes between the halves delay only Checkpoint.

        Without this call, Checkpoint recomputes when it receives its gradient.
        """
        cell, node = self._cell, self._node
        if cell is None:
            return
        leaves, spec = flatten(batch.value)
        marked = [leaves[k] for k in cell.differentiable]
        outputs = Recompute.apply(cell, node, *marked)  # type: ignore[no-untyped-call]
        for k, output in zip(cell.differentiable, outputs, strict=True):
            leaves[k] = output
        batch.value = unflatten(leaves, spec)
        self._cell = self._node = None


def _dropped(tensor: Tensor) -> None:
    """Saved-tensor hook of the first forward: its graph only determines which outputs need a gradient."""


def _never(_: None) -> Tensor:
    raise RuntimeError(
        "a loss depends on an activation inside a checkpointed function (an attribute that a layer keeps, a tensor "
        "that a hook took), which is not an output of the function and has no graph; return it as an output, detach it "
        "if no gradient is needed, or do not checkpoint (checkpoint='never')"
    )


class _Cell:
    """State shared by the two halves."""

    __slots__ = ("_leaves", "_positions", "_rerun", "_spec", "differentiable", "function", "recomputed")

    def __init__(self, function: Callable[[Any], Any], input: Any, watched: WatchedModule | None) -> None:
        self.function = function
        self._leaves, self._spec = flatten(input)
        order: dict[int, int] = {}
        #: (position among the leaves, index among the distinct tensors)
        self._positions: list[tuple[int, int]] = []
        devices = set() if watched is None else set(watched.devices)
        for position, leaf in enumerate(self._leaves):
            if isinstance(leaf, Tensor):
                devices.add(leaf.device)
                self._positions.append((position, order.setdefault(id(leaf), len(order))))
                self._leaves[position] = None
        self._rerun = Rerun(watched, devices)
        self.differentiable: list[int] = []
        self.recomputed: tuple[list[Tensor], list[Tensor]] | None = None

    def compute(self, inputs: list[Tensor]) -> Any:
        """The first run."""
        hooks = torch.autograd.graph.saved_tensors_hooks(_dropped, _never)
        with refuse_writes("a checkpointed function", inputs), self._rerun.first(), enable_checkpointing(), hooks:
            return self._run(_as_leaves(inputs))

    def recompute(self, inputs: tuple[Tensor, ...]) -> None:
        """The second run; stores its outputs, with their graph, in ``recomputed``. Raises if it differs."""
        leaves = _as_leaves(inputs)
        with self._rerun.again(strict=True), torch.enable_grad():
            outputs = flatten(self._run(leaves))[0]
        found = [k for k, y in enumerate(outputs) if isinstance(y, Tensor) and y.requires_grad]
        if found != self.differentiable:
            raise RuntimeError(
                f"expected the recomputation to return what the forward returned, with gradients for output leaves "
                f"{self.differentiable}, got gradients for {found}; make the function deterministic"
            )
        self.recomputed = ([outputs[k] for k in found], leaves)

    def _run(self, tensors: list[Tensor]) -> Any:
        leaves = list(self._leaves)
        for position, index in self._positions:
            leaves[position] = tensors[index]
        return self.function(unflatten(leaves, self._spec))


def _as_leaves(tensors: list[Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    return [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]


class _Call:
    """Passes the results of the first run into :class:`Checkpoint`, and its autograd node out."""

    __slots__ = ("cell", "node", "results")

    def __init__(self, cell: _Cell, results: list[Tensor]) -> None:
        self.cell = cell
        self.results = results
        self.node: Any = None


class Checkpoint(torch.autograd.Function):
    """Saves the input; its backward runs backward through the recomputed graph."""

    @staticmethod
    def forward(ctx: Any, phony: Tensor, call: _Call, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results, which were computed before."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.cell = call.cell
        call.node = ctx  # Recompute reads the saved input from this node, so that it is saved once
        return tuple(call.results)

    @staticmethod
    @restores_thread_state
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Accumulates the gradients of parameters, and returns those of the inputs."""
        refuse_double_backward("a checkpointed forward")
        cell: _Cell = ctx.cell
        nothing = (None,) * (2 + len(ctx.needs_input_grad[2:]))
        if all(gradient is None for gradient in gradients):
            # Reached only through edges that order micro-batches, not from a loss.
            return nothing
        if not accumulates_everywhere():
            raise RuntimeError(
                "expected backward() over a checkpointed forward, got torch.autograd.grad() or backward(inputs=...); "
                "it would write .grad of parameters that were not requested: compute without checkpointing"
            )
        if cell.recomputed is None:
            cell.recompute(ctx.saved_tensors)
        assert cell.recomputed is not None
        outputs, leaves = cell.recomputed
        cell.recomputed = None
        pairs = [(y, gradient) for y, gradient in zip(outputs, gradients, strict=True) if gradient is not None]
        torch.autograd.backward([y for y, _ in pairs], [gradient for _, gradient in pairs])
        return (None, None, *(leaf.grad for leaf in leaves))


class Recompute(torch.autograd.Function):
    """Passes outputs and gradients through; its backward runs the function again."""

    @staticmethod
    def forward(ctx: Any, cell: _Cell, node: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        """``outputs``."""
        ctx.set_materialize_grads(False)
        ctx.cell, ctx.node = cell, node
        return tuple(output.detach() for output in outputs)

    @staticmethod
    @restores_thread_state
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, unchanged and unread: they may still be being copied."""
        if any(gradient is not None for gradient in gradients):
            ctx.cell.recompute(ctx.node.saved_tensors)
        return (None, None, *gradients)
