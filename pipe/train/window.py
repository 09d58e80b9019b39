"""Gradient accumulation: a window of several batches, loss scaling, and one optimizer step at its end.

A window ends with its ``size``-th batch, or with the loader's last batch if that is earlier. The optimizer then steps
with the *mean* gradient over the batches that the window holds. Where batches are read on demand, so that the last one
is not known before its backward, the window is closed when the loader raises ``StopIteration``.

Guarantees
    * Gradients are zeroed when a window opens, and only then: none is lost while the pipeline waits for the loader.
    * A partial window is scaled by its true size, and its all-reduce happens as in a full one.
    * Replicas communicate once per window: all backwards except the last run in the models' ``no_sync``. A backward
      that may be the last communicates too; a gradient that is a mean over replicas is not changed by the next
      all-reduce. Models of ``fully_shard`` communicate in every backward, see :func:`_replicated`.

An optimizer that updates inside backward steps as soon as a gradient has been accumulated. It is refused where that is
too early: where the gradient is one part of a window (``grad_accum``), is scaled (fp16), or is that of one micro-batch
of several.

After an exception in a forward or backward the open window is discarded: the parameters hold the last complete step,
the next batch opens a new window, and no half-accumulated gradient is stepped.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipe.nested import tensors_in
from pipe.pipe import Pipe
from pipe.train.distribute import children_of

__all__ = ["Window", "check_count", "checked_pair"]


class Window:
    """Accumulates, scales and steps.

    Refuses an optimizer that updates inside backward with part of a window's gradient or with a scaled one. One with an
    ``accumulate()`` context, as that of ``offload``, is deferred instead.

    Args:
        model: trained in ``train`` mode. Its replicas do not communicate before the last backward of a window.
        optimizer: one, or several that are zeroed and stepped together.
        size: batches per optimizer step; None means 1.
        scaler: scales losses and steps the optimizers, if it is enabled (fp16 only).
        forward_only: whether nothing is trained, whatever the model's mode; there may be no optimizer.
    """

    #: Steps between two averages of a torchrec ``DMPCollection``'s tables over their replicas, or None.
    table_interval: int | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        size: int | None,
        scaler: torch.amp.GradScaler,
        *,
        forward_only: bool = False,
    ) -> None:
        check_count("grad_accum", size)
        optimizers = tuple(optimizer) if isinstance(optimizer, Iterable) else (optimizer,)
        wrong = [type(one).__name__ for one in optimizers if not isinstance(one, torch.optim.Optimizer)]
        if wrong or not (optimizers or forward_only):
            raise TypeError(f"expected a torch.optim.Optimizer, or several, got {wrong or 'none'}")
        for one in optimizers:
            _refuse_closure(one)
        self.size = size or 1
        self.scaler = scaler
        self._forward_only = forward_only
        self.steps = 0
        self.position = 0  # batches in the open window
        #: Of the latest batch. True: the optimizer steps after it. False: more batches of its window follow. None:
        #: nothing was read beyond it, so that it may be the last.
        self._closes: bool | None = True
        self.optimizers = optimizers
        self.attach(model)

    def attach(self, model: nn.Module) -> None:
        """Replaces the model, unless an optimizer would update inside backward before gradients are complete."""
        for module in model.modules():
            if isinstance(module, Pipe) and module.chunks > 1:
                own = set(map(id, module.parameters()))
                inside = [each for each in self.optimizers if own & {id(p) for p in _parameters(each)}]
                because = f"runs micro-batches inside each backward (Pipe(chunks={module.chunks}))"
                # Without checkpoints autograd sums over micro-batches before it calls any hook.
                _refuse_updates_in_backward(module, inside, because, hooks=module.checkpoint != "never")
        self._refuse_early_updates(model)
        self.model = model
        self._static_graphs_known = False

    def _refuse_early_updates(self, model: nn.Module) -> None:
        if self.size > 1:
            # Those that can be deferred are deferred.
            eager = [optimizer for optimizer in self.optimizers if not hasattr(optimizer, "accumulate")]
            _refuse_updates_in_backward(model, eager, f"accumulates {self.size} batches (grad_accum={self.size})")
        if self.scaler.is_enabled():
            because = "scales its loss for fp16 (enable_grad_scaling=True)"
            _refuse_updates_in_backward(model, self.optimizers, because)

    def trains(self) -> bool:
        """Whether a batch that is run now is trained on."""
        return not self._forward_only and self.model.training and torch.is_grad_enabled()

    @contextlib.contextmanager
    def forward(self, trains: bool, is_last: Callable[[], bool | None]) -> Iterator[None]:
        """A context for the forward of one batch, which opens a window with zeroed gradients if none is open.

        ``is_last`` is called if it may be the last batch of its loader and must close the window then; it returns None
        if that is not known yet.
        """
        if trains:
            self._refuse_early_updates(self.model)  # hooks may have been added since construction
            if self.position == 0:
                for optimizer in self.optimizers:
                    optimizer.zero_grad(set_to_none=True)
            self._closes = is_last() if self.position + 1 < self.size else True
        with self._accumulation() if trains else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def _accumulation(self) -> Iterator[None]:
        """A context for forward or backward of one batch: ``no_sync`` of replicas, unless the batch may be the last.

        Optimizers that can defer updates inside backward defer them, unless the batch closes the window.
        """
        with contextlib.ExitStack() as stack:
            for module in _replicated(self.model) if self._closes is False else ():
                # DDP with a static graph records it in its first backward, which must not run in no_sync. The
                # additional all-reduce changes nothing: a mean over replicas is not changed by the next one.
                if self._static_graphs_known or not getattr(module, "static_graph", False):
                    stack.enter_context(module.no_sync())
            for optimizer in () if self._closes else self.optimizers:
                if hasattr(optimizer, "accumulate"):
                    stack.enter_context(optimizer.accumulate())
            yield

    def backward(self, losses: Any) -> None:
        """Accumulates the gradient of the batch's losses (the sum of all their elements), and steps at the end."""
        batches = self.position + 1
        weight = 1.0 / self.size
        if self._closes and batches < self.size:
            # The earlier batches were weighted as parts of a full window. This is corrected before the last backward,
            # so that an all-reduce in this backward already sees the mean over the true size.
            weight = 1.0 / batches
            self._reweight(batches)
        loss = _total(losses)
        if weight != 1.0:
            loss = loss * weight
        with self._accumulation():
            self.scaler.scale(loss).backward()
        self._static_graphs_known = True
        self.position = batches
        if self._closes:
            self._step()

    def finish(self) -> None:
        """Closes the open window, if there is one, after an end of the loader that was not known in advance.

        A window of replicas whose latest backward ran in ``no_sync`` stays open for the next loader's batches: the
        batch that should have closed it was lost to an exception, and ranks must not step with different gradients.
        """
        if self.position and (self._closes is not False or not _replicated(self.model)):
            self._reweight(self.position)
            self._step()

    def _reweight(self, batches: int) -> None:
        """Rescales the gradients from parts of a full window's mean to parts of the mean over ``batches``."""
        for parameter in _parameters(*self.optimizers):
            if parameter.grad is not None:
                parameter.grad.mul_(self.size / batches)

    def _step(self) -> None:
        # Compared by name, so that torchrec need not be imported (or installed).
        collection = any(kind.__name__ == "DMPCollection" for kind in type(self.model).__mro__)
        if collection and self.table_interval is not None and self.steps % self.table_interval == 0:
            self.model.sync()  # type: ignore[operator]  # a collective call
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.scaler.update()
        self.position = 0
        self.steps += 1

    def discard(self) -> None:
        """Discards the open window; the next batch opens a new one with zeroed gradients."""
        self.position = 0

    def state_dict(self) -> dict[str, Any]:
        """Position, gradients accumulated so far (in the order of the optimizer's parameters), steps and scaler."""
        grads = [p.grad for p in _parameters(*self.optimizers)] if self.position else []
        return {
            "kind": self._kind(),
            "position": self.position,
            "steps": self.steps,
            "gradients": [None if grad is None else grad.detach().clone() for grad in grads],
            "scaler": self.scaler.state_dict(),
        }

    def _kind(self) -> dict[str, Any]:
        parameters = len(_parameters(*self.optimizers))
        return {"grad_accum": self.size, "parameters": parameters, "gradient scaling": self.scaler.is_enabled()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues the window of a :meth:`state_dict`; refuses one of another size, parameters, or scaling."""
        parameters = _parameters(*self.optimizers)
        if state["kind"] != self._kind():
            raise ValueError(f"expected the state of a pipeline with {self._kind()}, got {state['kind']}")
        self.scaler.load_state_dict(state["scaler"])
        if state["position"]:
            for parameter, grad in zip(parameters, state["gradients"], strict=True):
                parameter.grad = None if grad is None else grad.to(parameter.device, copy=True)
            # A scaler initializes its scale tensor with the first loss; finish() may step before any loss.
            self.scaler.scale(torch.zeros((), device=parameters[0].device))
        self.position, self.steps = state["position"], state["steps"]


def _parameters(*optimizers: torch.optim.Optimizer) -> list[Tensor]:
    return [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]


def _refuse_closure(optimizer: Any) -> None:
    """Refuses an optimizer whose ``step`` cannot be called without a closure, also in a wrapper as accelerate's."""
    kind = type(getattr(optimizer, "optimizer", optimizer))
    try:
        inspect.signature(kind.step).bind(optimizer)  # of the class: a scheduler wraps the method of the instance
    except TypeError as error:
        raise TypeError(
            f"expected an optimizer whose step() can be called without a closure, got {kind.__name__}, whose step has "
            f"a {error}: a train pipeline runs each batch once, so it cannot compute the loss of a batch again; take a "
            f"first-order optimizer, or train with this one in a plain loop"
        ) from None


def _refuse_updates_in_backward(
    model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], because: str, *, hooks: bool = True
) -> None:
    """Refuses optimizers that update inside backward, among ``optimizers``, in ``model`` and at its parameters.

    Args:
        model: its parameters and modules are searched.
        optimizers: those of the pipeline that cannot be deferred.
        because: for the error, what makes gradients incomplete: ``f"this pipeline {because}"``.
        hooks: whether hooks at the parameters are called before their gradients are complete.
    """
    eager = [each for each in optimizers if getattr(each, "update_in_backward", False)]
    found = [f"{type(each).__name__}(update_in_backward=True)" for each in eager]
    for name, parameter in model.named_parameters() if hooks else ():
        if getattr(parameter, "_in_backward_optimizers", None):
            found.append(f"parameter {name!r} (apply_optimizer_in_backward)")
        elif any(map(_may_update, (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values())):
            found.append(f"parameter {name!r} (register_post_accumulate_grad_hook)")
    for name, module in model.named_modules():
        if getattr(getattr(module, "fused_optimizer", None), "params", None):
            found.append(f"module {name!r} (fused optimizer)")
    if found:
        raise ValueError(
            f"expected no optimizer that updates inside backward, because this pipeline {because} and such an "
            f"optimizer would update before the gradient is complete, got: {', '.join(found[:8])}"
            f"{f' and {len(found) - 8} more' if len(found) > 8 else ''}; step them after backward (for torchrec: "
            f"the dense compute kernel), or train without it"
        )


def _may_update(hook: Any) -> bool:
    """Whether a hook on an accumulated gradient may be an optimizer: all except those of torch.distributed."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    return not str(getattr(hook, "__module__", "")).startswith("torch.distributed.")


def check_count(name: str, count: Any) -> None:
    """Raises unless it is None or an int of at least 1."""
    if count is not None and (not isinstance(count, int) or isinstance(count, bool)):
        raise TypeError(f"expected {name} to be None or an int, got {type(count).__name__} ({name}={count!r})")
    if count is not None and count < 1:
        raise ValueError(f"expected {name} >= 1 or None, got {name}={count}")


def checked_pair(returned: Any) -> tuple[Any, Any]:
    """What a model has returned, if that is ``(losses, output)``; else raises."""
    if not isinstance(returned, tuple) or len(returned) != 2:
        got = type(returned).__name__ + (f" of {len(returned)}" if isinstance(returned, tuple) else "")
        raise TypeError(f"expected the model to return a tuple (losses, output), got {got}")
    return returned


def _total(losses: Any) -> Tensor:
    """The sum of all elements of all loss tensors, alone or nested."""
    tensors = tensors_in(losses)
    if not tensors:
        raise TypeError(
            f"expected the model to return (losses, output) with tensors as losses, got losses of type "
            f"{type(losses).__name__}"
        )
    return functools.reduce(operator.add, [tensor.sum() for tensor in tensors])


def _replicated(model: nn.Module) -> list[Any]:
    """The outermost modules that can leave out the all-reduce of a backward.

    Those of ``fully_shard`` are not among them: they reduce in every backward. What they would keep in one that does
    not is in no ``.grad``, so a window could not be reweighted, saved or discarded.
    """
    found, seen, left = [], set[int](), [model]  # ids, while the model keeps all of them alive
    while left:
        module = left.pop()
        if callable(getattr(module, "no_sync", None)):
            found.append(module)
        elif id(module) not in seen:
            seen.add(id(module))
            left += children_of(module)
    return list(dict.fromkeys(found))
