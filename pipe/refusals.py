"""Checks of a Pipe before it runs: refuses models and optimizers whose results would differ from the bare module's."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from pipe.turn import TakesTurns

__all__ = ["beyond_layers", "check_plain", "check_reduced", "check_rows_first", "check_updates"]


#: A wrapped module has no reference to its wrapper; but the wrapper registers it as a submodule, and torch calls a hook
#: for each registration.
_wrappers: WeakSet[DistributedDataParallel] = WeakSet()


def _record_wrapper(parent: nn.Module, name: str, child: nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel):
        _wrappers.add(parent)


register_module_module_registration_hook(_record_wrapper)


def check_plain(module: nn.Sequential) -> None:
    """Refuses a Sequential with state or behaviour of its own, and layers that do not take exactly one argument."""
    if not isinstance(module, nn.Sequential):
        raise TypeError(f"expected nn.Sequential to split into stages, got {type(module).__name__}")
    own = beyond_layers(module)
    if own:
        raise TypeError(
            f"expected an nn.Sequential of layers alone to split into stages, got {type(module).__name__} with "
            f"{', '.join(own)} of its own; move them into a layer, or onto the Pipe"
        )
    for name, layer in module.named_children():
        try:
            signature = inspect.signature(layer.forward)
        except (TypeError, ValueError):  # a scripted layer
            continue
        try:
            signature.bind(None)
        except TypeError as error:
            raise TypeError(
                f"expected layers that take one argument, got layer {name!r} ({type(layer).__name__}), whose forward "
                f"takes {signature}; take a tuple and unpack it: def forward(self, inputs): a, b = inputs"
            ) from error


def beyond_layers(module: nn.Sequential) -> list[str]:
    """The names of what a Sequential has besides its layers: a forward, parameters, buffers or hooks of its own."""
    found = {
        "a forward": type(module).forward is not nn.Sequential.forward or "forward" in vars(module),
        "parameters": any(p is not None for p in module._parameters.values()),
        "buffers": any(b is not None for b in module._buffers.values()),
        "hooks": any(value for name, value in vars(module).items() if name.endswith("_hooks")),
    }
    return [name for name, there in found.items() if there]


def check_rows_first(first: nn.Module, input: Any) -> None:
    """Refuses a recurrent first layer that takes dimension 0, along which micro-batches are cut, for time."""
    if isinstance(first, nn.RNNBase) and isinstance(input, Tensor) and (input.dim() == 2 or not first.batch_first):
        raise ValueError(
            f"expected a first layer whose input has the rows in dimension 0, got {type(first).__name__}("
            f"batch_first={first.batch_first}) and an input of shape {tuple(input.shape)}, whose dimension 0 is time; "
            f"pass batch_first=True and (rows, time, width), or chunks=1"
        )


def check_reduced(module: nn.Module) -> None:
    """Refuses ``train_step`` under DistributedDataParallel: it bypasses DDP's forward, so no gradient is reduced."""
    for wrapper in _wrappers if _wrappers else ():
        reduces = wrapper.require_backward_grad_sync and wrapper.process_group.size() > 1
        if reduces and any(inner is module for inner in wrapper.module.modules()):
            raise RuntimeError(
                f"expected train_step() of a Pipe that DistributedDataParallel does not wrap, got one on "
                f"{wrapper.process_group.size()} ranks: gradients would stay on their rank; run the wrapper forward "
                f"and call loss.backward(), or run train_step() inside `with ddp.no_sync():` and reduce the gradients"
            )


def check_updates(takers: Iterable[TakesTurns], parameters: Iterable[nn.Parameter] = ()) -> None:
    """Refuses optimizers that update in backward, of modules and parameters: they would step for each micro-batch."""
    found: list[Any] = [taker for taker in takers if getattr(taker, "updates_in_backward", False)]
    found += [parameter for parameter in parameters if getattr(parameter, "_in_backward_optimizers", None)]
    if found:
        raise RuntimeError(
            f"expected stages whose gradients can accumulate over micro-batches, got a {type(found[0]).__name__} with "
            f"an optimizer that updates it in backward (update_in_backward=True, _apply_optimizer_in_backward()); step "
            f"it after backward, or use chunks=1"
        )
