"""Gradient accumulation as a window: micro-steps that together are one optimizer step.

A window is opened by the first batch that needs it and closed by its last: the ``size``-th, or the loader's last one
if that comes earlier. The optimizer then steps with the *mean* over the batches that the window really holds. Which
batch is the loader's last one is known ahead of its backward only if the next read is under way. If it is not, since
batches are read when they are needed and not before, the window is closed once the loader has said that it ended.

Guarantees
    * Gradients are zeroed when a window opens, so nothing from before leaks in, and only then, so nothing is lost
      while the pipeline waits for the loader.
    * A partial window is scaled by its true size, and its all-reduce happens as in a full one.
    * Replicas communicate once per window: all but its last backward run in the models' ``no_sync``. A backward that
      may be the last communicates too; a mean over replicas stays what it is in the next.

After an exception in a forward or backward the open window is abandoned: the parameters hold the last complete step,
the next batch opens a new window, and no half-accumulated gradient is stepped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from pipe.nested import tensors_in
from pipe.train.in_backward import refuse_updates_between_micro_batches, refuse_updates_in_backward

__all__ = ["MicroStep", "Window"]


@dataclass(frozen=True)
class MicroStep:
    """One batch's place in its window.

    Attributes:
        number: 1 for the first batch of the window.
        closes: whether the optimizer steps after it. None: nothing has been read beyond it, so it may be the last.
    """

    number: int
    closes: bool | None


class Window:
    """Accumulates, scales and steps.

    Args:
        model: whose replicas are kept silent.
        optimizer: one, or several that are zeroed and stepped together (a table's and the rest's).
        size: batches per optimizer step; None means 1.
        scaler: scales losses and steps the optimizer (fp16 only), or None.
        steps_nothing: whether there may be no optimizer.

    Raises:
        TypeError: if ``size`` is no integer, or an optimizer is none.
        ValueError: if ``size`` is not positive, or an optimizer updates inside backward where it would update with
            part of a window's gradient or with a scaled one; :meth:`open` looks again. One with an ``accumulate()``
            context, as that of ``offload``, is deferred instead.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        size: int | None = None,
        scaler: torch.amp.GradScaler | None = None,
        *,
        steps_nothing: bool = False,
    ) -> None:
        if size is not None and (not isinstance(size, int) or isinstance(size, bool)):
            raise TypeError(
                f"expected grad_accum to be None or an int, got {type(size).__name__} (grad_accum={size!r})"
            )
        if size is not None and size < 1:
            raise ValueError(f"expected grad_accum >= 1 batches per optimizer step, got grad_accum={size}")
        optimizers = (optimizer,) if isinstance(optimizer, torch.optim.Optimizer) else tuple(optimizer)
        wrong = [type(one).__name__ for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
        if wrong or not (optimizers or steps_nothing):
            raise TypeError(f"expected a torch.optim.Optimizer, or several, got {wrong or 'none'}")
        self.size = size or 1
        self.scaler = scaler
        self.steps = 0
        self.position = 0
        self._reduced = True  # whether the latest backward was not silent
        self.optimizers = optimizers
        self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Takes another model, whose parameters the optimizers step.

        Raises:
            ValueError: if updates inside backward would come too early; the model before stays.
        """
        refuse_updates_between_micro_batches(model, self.optimizers)
        self._refuse_updates_in_backward(model)
        self.model = model
        self._static_graphs_known = False

    def _refuse_updates_in_backward(self, model: nn.Module) -> None:
        if self.size > 1:
            because = f"accumulates {self.size} batches (grad_accum={self.size})"
            refuse_updates_in_backward(model, self.optimizers, because, deferred=True)
        if self.scaler is not None:
            because = "scales its loss for fp16 (enable_grad_scaling=True)"
            refuse_updates_in_backward(model, self.optimizers, because)

    @property
    def must_know_the_end(self) -> bool:
        """Whether the next batch closes the window only if it is the loader's last."""
        return self.position + 1 < self.size

    def open(self, *, last: bool | None) -> MicroStep:
        """The place of the next batch; zeroes the gradients if it is the first of its window.

        Args:
            last: whether it is the last batch of its loader; None if that is not known yet.
        """
        self._refuse_updates_in_backward(self.model)  # hooks may have come since construction
        if self.position == 0:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=True)
        return MicroStep(self.position + 1, last if self.must_know_the_end else True)

    @contextlib.contextmanager
    def synchronization(self, micro: MicroStep) -> Iterator[None]:
        """Surrounds the forward, and the backward, of one batch: replicas keep silent unless it may be the last."""
        with contextlib.ExitStack() as stack:
            if micro.closes is False:
                for module in _replicated(self.model):
                    if getattr(module, "static_graph", False) and not self._static_graphs_known:
                        # Such a replica learns its graph in its first backward, which must not be silent. The one
                        # all-reduce too many changes nothing: a mean over replicas stays what it is in the next.
                        continue
                    if callable(getattr(module, "no_sync", None)):
                        stack.enter_context(module.no_sync())
                    else:
                        module.set_requires_gradient_sync(False)
                        stack.callback(module.set_requires_gradient_sync, True)
            yield

    def backward(self, micro: MicroStep, losses: Any, before_step: Callable[[], None] | None = None) -> None:
        """Accumulates the gradient of one batch's losses (the sum of all their elements), and steps at the end.

        Args:
            micro: the batch's place.
            losses: tensors of any shape, nested or not.
            before_step: called between the backward that closes the window and the step.
        """
        weight = 1.0 / self.size
        if micro.closes and micro.number < self.size:
            # The earlier batches were weighed as parts of a full window. Put right before the last backward, so that
            # what this backward hands on (an all-reduce) is already the mean over the true size.
            weight = 1.0 / micro.number
            self._weigh_anew(micro.number)
        loss = _total(losses)
        if weight != 1.0:
            loss = loss * weight
        with self._deferral(micro), self.synchronization(micro):
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        self._static_graphs_known = True
        self.position = micro.number
        self._reduced = micro.closes is not False
        if micro.closes:
            self._step(before_step)

    def finish(self, before_step: Callable[[], None] | None = None) -> None:
        """Closes the open window, if there is one, after the loader's end has come without being foreseen.

        A window of replicas whose latest backward was silent stays open for the next loader's batches: it was to be
        closed by a batch that was lost to an exception, and ranks must not step with different gradients.
        """
        if self.position and (self._reduced or not _replicated(self.model)):
            self._weigh_anew(self.position)
            self._step(before_step)

    def _weigh_anew(self, batches: int) -> None:
        """Makes parts of a full window's mean parts of the mean over so many batches."""
        for parameter in self._parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(self.size / batches)

    @contextlib.contextmanager
    def _deferral(self, micro: MicroStep) -> Iterator[None]:
        """Optimizers that update inside backward, and can be told to wait, wait for the backward that closes."""
        with contextlib.ExitStack() as stack:
            for optimizer in self.optimizers:
                accumulate = getattr(optimizer, "accumulate", None)
                if callable(accumulate) and not micro.closes:
                    stack.enter_context(accumulate())
            yield

    def _step(self, before_step: Callable[[], None] | None) -> None:
        if before_step is not None:
            before_step()
        for optimizer in self.optimizers:
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
        if self.scaler is not None:
            self.scaler.update()
        self.position = 0
        self.steps += 1

    def abandon(self) -> None:
        """Forgets the open window; the next batch opens a new one with zeroed gradients."""
        self.position = 0

    def _parameters(self) -> list[Tensor]:
        groups = (group for optimizer in self.optimizers for group in optimizer.param_groups)
        return [parameter for group in groups for parameter in group["params"]]

    def state_dict(self) -> dict[str, Any]:
        """Position, gradients accumulated so far (in the order of the optimizer's parameters), steps and scaler."""
        grads = [p.grad for p in self._parameters()] if self.position else []
        return {
            "position": self.position,
            "size": self.size,
            "steps": self.steps,
            "gradients": [None if grad is None else grad.detach().clone() for grad in grads],
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues a window where :meth:`state_dict` left it.

        Raises:
            ValueError: if the state belongs to a window of another size, other parameters, or other scaling; nothing
                is changed then.
        """
        parameters = self._parameters()
        wrong = []
        if state["size"] != self.size:
            wrong.append(f"grad_accum {self.size}, got {state['size']}")
        if state["position"] and len(state["gradients"]) != len(parameters):
            wrong.append(f"gradients of {len(parameters)} parameters, got {len(state['gradients'])}")
        if (state["scaler"] is None) != (self.scaler is None):
            wrong.append(f"{'no ' if self.scaler is None else ''}gradient scaling, got the opposite")
        if wrong:
            raise ValueError(f"expected the state of a pipeline with {'; and '.join(wrong)}")
        if state["position"]:
            for parameter, grad in zip(parameters, state["gradients"], strict=True):
                parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)
        if self.scaler is not None:
            self.scaler.load_state_dict(state["scaler"])
            if state["position"]:
                # It takes its scale with the first loss; there may be none before finish() steps.
                self.scaler.scale(torch.zeros((), device=parameters[0].device))
        self.position, self.steps = state["position"], state["steps"]


def _total(losses: Any) -> Tensor:
    """The sum over everything the model calls a loss: tensors of any shape, alone or nested."""
    tensors = tensors_in(losses)
    if not tensors:
        raise TypeError(
            f"expected the model to return (losses, output) with tensors as losses, got losses of type "
            f"{type(losses).__name__}"
        )
    total = tensors[0].sum()
    for tensor in tensors[1:]:
        total = total + tensor.sum()
    return total


def _replicated(model: nn.Module) -> list[Any]:
    """The modules that all-reduce in backward: every DDP module, and the outermost of other kinds (FSDP).

    A sharded embedding collection of torchrec keeps DDP modules in a plain list, where ``modules()`` does not look.
    """
    found: dict[int, nn.Module] = {}  # by id, while the list below keeps each module alive

    def visit(module: nn.Module, inside: bool) -> None:
        ddp = isinstance(module, DistributedDataParallel)
        silent = ddp or any(callable(getattr(module, f, None)) for f in ("no_sync", "set_requires_gradient_sync"))
        if ddp or (silent and not inside):
            found.setdefault(id(module), module)
        for child in module.children():
            visit(child, inside or (silent and not ddp))
        for value in vars(module).values():
            if isinstance(value, (list, tuple)):
                for item in value:
                    if isinstance(item, nn.Module):
                        visit(item, inside or (silent and not ddp))

    visit(model, False)
    return list(found.values())
