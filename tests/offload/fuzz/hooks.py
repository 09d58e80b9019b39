"""Statements that register hooks, which log what they see, change it, or step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pipe import is_recomputing
from pipe.nested import map_tensors, tensors_in
from tests.offload.fuzz.passes import picked
from tests.offload.fuzz.program import Statement
from tests.offload.fuzz.world import World


class Hook(Statement):
    """A hook on parameter or layer number ``at``; None: on all parameters, or on the model.

    ``on``: "parameter", "accumulated" (``register_post_accumulate_grad_hook``), "forward", "forward_pre", "backward",
    "backward_pre", or "output" (of the latest forward). ``does``: "log", "scale", or "step", which writes parameters
    through ``.data``: for "accumulated" and "forward_pre".
    """

    on: str = "parameter"
    does: str = "log"
    at: int | None = 0

    def run(self, world: World) -> None:
        if self.on in ("parameter", "accumulated"):
            chosen = world.parameters(self.at)
            for k, p in enumerate(world.parameters()):
                if p.requires_grad and any(p is other for other in chosen):
                    self._on_parameter(world, k, p)
            return
        if self.on == "output":
            for live in picked(world, (0,)):
                for k, leaf in enumerate(tensors_in(live.output)):
                    if leaf.requires_grad:
                        leaf.register_hook(self._changing(world, f"output {k}"))
            return
        children = [module for module in world.model.modules() if module is not world.model]
        module = world.model if self.at is None else children[self.at % len(children)]
        self._on_module(world, module)

    def _on_parameter(self, world: World, k: int, p: nn.Parameter) -> None:
        if self.on == "parameter":
            world.handles.append(p.register_hook(self._changing(world, f"parameter {k}")))
            return

        def accumulated(parameter: Tensor) -> None:
            gradient = parameter.grad
            assert gradient is not None
            log(world, f"accumulated {k}", gradient)
            if self.does == "scale":
                gradient.mul_(0.5)
            elif self.does == "step":
                parameter.data.add_(gradient, alpha=-0.1)
                parameter.grad = None

        world.steps_in_hooks |= self.does == "step"
        world.handles.append(p.register_post_accumulate_grad_hook(accumulated))

    def _on_module(self, world: World, module: nn.Module) -> None:
        names = {
            "forward": "register_forward_hook",
            "forward_pre": "register_forward_pre_hook",
            "backward": "register_full_backward_hook",
            "backward_pre": "register_full_backward_pre_hook",
        }
        writes = self.on == "forward_pre" and self.does == "step"
        world.steps_in_hooks |= writes

        def hook(module: nn.Module, *given: Any) -> Any:
            """Gets arguments and outputs, or their gradients; those of the arguments may be changed."""
            if not (self.on.startswith("forward") and is_recomputing()):
                if not writes:  # the first run that writes weights is taken back, and repeated with its graph
                    log(world, self.on, given[-1])
                with torch.no_grad():
                    for p in module.parameters(recurse=False) if writes else ():
                        p.mul_(0.9)
            return map_tensors(halved, given[0 if self.on == "backward" else -1]) if self.does == "scale" else None

        world.handles.append(getattr(module, names[self.on])(hook))

    def _changing(self, world: World, name: str) -> Callable[[Tensor], Tensor | None]:
        def hook(gradient: Tensor) -> Tensor | None:
            log(world, name, gradient)
            return gradient * 0.5 if self.does == "scale" else None

        return hook


def log(world: World, name: str, value: Any) -> None:
    for tensor in tensors_in(value):
        world.log.append((name, tensor.detach().clone()))


def halved(tensor: Tensor) -> Tensor:
    return tensor * 0.5 if tensor.is_floating_point() else tensor


class RemoveHooks(Statement):
    """All hooks are removed."""

    def run(self, world: World) -> None:
        for handle in world.handles:
            handle.remove()
        world.handles.clear()
        world.steps_in_hooks = False
