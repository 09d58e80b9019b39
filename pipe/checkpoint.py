"""Activation checkpointing that can recompute a function before the gradient of its output has been received.

``torch.utils.checkpoint`` recomputes when the gradient is available. In a pipeline the gradient is still being copied
from the next device while this one is idle. So two nodes stand behind the graph of the function, and the wait for the
gradient is placed between them::

           input
        ╭────┴─────╮
        │ function │ [4] its own graph, whose saved tensors are there by now
        ╰────┬─────╯
        ╭────┴─────╮
        │Checkpoint│ [3] runs the function again, if Recompute did not
        ╰────┬─────╯
           (Wait)    [2] waits until the gradient has been copied
        ╭────┴─────╮
        │Recompute │ [1] runs the function again, while the gradient is being copied
        ╰────┬─────╯
          output     (numbers: order in backward)

The graph is that of the function (:mod:`pipe.recompute.recomputed`), so whatever autograd can do with it, it can do
here: ``autograd.grad``, ``backward(inputs=...)``, gradient penalties, hooks, a loss on an activation inside,
``find_unused_parameters``.

Invariants
    * Exactly the outputs that would need a gradient without checkpointing need one.
    * A gradient for any output starts the recomputation; without one, nothing is recomputed.
    * Each input tensor is saved once, through the active saved-tensor hooks.
    * The second run starts from the state of the first: random generators, autocast, and what the modules hold that
      the function uses, wherever it has them from (:mod:`pipe.recompute.captured`). What cannot be restored, and was
      changed since, is refused by name.

After an exception in the recomputation the generators, buffers and settings are restored.

Source: GPipe (Huang et al., 2019); torchgpipe (Kim et al., 2020), section 3.2.3.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pipe.nested import LEAVES, flatten, map_together
from pipe.recompute.captured import Captured, captured
from pipe.recompute.generators import generators_of
from pipe.recompute.phase import enable_recomputing, is_checkpointing, is_recomputing, lent_weights
from pipe.recompute.recomputed import Call
from pipe.recompute.replay import Layers, Replay, refuse_cached_parametrizations
from pipe.recompute.thread_state import Settings
from pipe.torch_private.autograd import keeps_graph

__all__ = [
    "Checkpoint",
    "Checkpointing",
    "Recompute",
    "checkpoint",
    "enable_recomputing",
    "is_checkpointing",
    "is_recomputing",
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
        function: any callable: a module, a lambda, a bound method, a closure over computed tensors.
        args: tensors or any nested values, as are ``kwargs``.
        use_reentrant: without effect, as is ``preserve_rng_state``; accepted because ``torch.utils.checkpoint`` has
            them. There is one kind of checkpoint here, and its recomputation always draws the same random numbers.

    Returns:
        The output of ``function``: a tensor or any nested value.

    Raises:
        TypeError: for options of ``torch.utils.checkpoint`` that choose what is kept or compared.
        RuntimeError: in backward, if the input (by the function, too), a parameter, or a tensor that the function reads
            has been changed in place since. Other values, and modes, are those of the forward again.

    Layers whose shapes are found in their first forward (``nn.LazyLinear``) are not recomputed in that forward. In code
    that ``torch.compile`` compiles it is ``torch.utils.checkpoint``.
    """
    unknown = [name for name in ("context_fn", "debug", "determinism_check", "early_stop") if name in kwargs]
    if unknown:
        raise TypeError(
            f"expected a function and its arguments, got {', '.join(unknown)} of torch.utils.checkpoint, which this "
            f"checkpoint does not have; leave them out"
        )
    if torch.compiler.is_compiling():
        return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
    call, output = _first(function, args, kwargs, None)
    return _behind(Recompute, call, _behind(Checkpoint, call, output))


def _first(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module | None
) -> tuple[Call | None, Any]:
    """The first run of a function: its call, to be repeated (None: nothing is to be), and its output.

    ``module``: all that the function uses; None if that is to be found out.
    """
    found = _before(function, args, kwargs, module) if torch.is_grad_enabled() else None
    if found is None:
        return None, function(*args, **kwargs)
    call = Call("a checkpointed function", function, found, to_the_end=True)
    if (lent := lent_weights.get()) is not None:
        call.references, call.around = lent
    call.save_inputs(args, kwargs)
    return call, call.first(function, args, kwargs)


def _before(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], module: nn.Module | None
) -> Replay | None:
    """The state before the first run; None if it cannot be repeated, since its layers find their shapes in this run."""
    leaves = flatten(args if module is not None else (args, kwargs))[0]
    others = [x for x in leaves if type(x) not in LEAVES and not isinstance(x, Tensor)]
    found = captured(function, *others) if module is None else Captured(modules=[module])
    layers = Layers(*found.modules)
    for each in layers.modules:
        if isinstance(each, LazyModuleMixin) and each.has_uninitialized_params():
            return None
    refuse_cached_parametrizations(layers.modules)
    devices = layers.own_devices | {x.device for x in (*leaves, *found.objects) if isinstance(x, Tensor)}
    held = {id(each): each for each in (*layers.generators, *found.generators)}
    lent = lent_weights.get() is not None
    if lent:
        layers.parameters.clear()  # they are of this run, and what lends them compares them
    return Replay(
        generators_of(devices, held.values()), Settings(devices), layers, compares=not lent, objects=found.objects
    )


def _behind(node: type[torch.autograd.Function], call: Call | None, output: Any) -> Any:
    """The output with a node behind those of its tensors that need a gradient; without one if nothing is repeated."""
    return output if call is None else map_together(partial(node.apply, call), output, only=attrgetter("requires_grad"))


class Checkpointing:
    """Makes the pair of :class:`Checkpoint` and :class:`Recompute` for one call.

    Args:
        function: called with ``value``, once now and once in backward.
        value: the input.
        module: all that the function uses besides its input, if that is known.
    """

    def __init__(self, function: Callable[[Any], Any], value: Any, *, module: nn.Module | None = None) -> None:
        self._function, self._value, self._module = function, value, module
        self._call: Call | None = None

    def checkpoint(self) -> Any:
        """Runs the function and returns its output as the result of :class:`Checkpoint`."""
        self._call, output = _first(self._function, (self._value,), {}, self._module)
        return _behind(Checkpoint, self._call, output)

    def recompute(self, output: Any) -> Any:
        """The output as the result of :class:`Recompute`. Nodes between the halves delay only Checkpoint.

        Without this call, Checkpoint recomputes when it receives its gradient.
        """
        call, self._call = self._call, None
        return _behind(Recompute, call, output)


class Checkpoint(torch.autograd.Function):
    """Passes the outputs of a function and their gradients through; its backward runs the function again, if needed."""

    @staticmethod
    def forward(ctx: Any, call: Call, *outputs: Tensor) -> tuple[Tensor, ...]:
        """``outputs``."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        return tuple([output.detach() for output in outputs])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients, unchanged and unread: they may still be being copied."""
        call: Call | None = ctx.call
        if call is not None:  # of a freed graph there is none, and the function's own nodes say so
            for gradient in gradients:
                if gradient is not None:
                    call.prepare()
                    break
            if not keeps_graph():
                ctx.call = None  # an output may be stored in what the function holds
        return None, *gradients


class Recompute(Checkpoint):
    """The same, before the gradient has arrived where it is needed."""
