"""Statements that register hooks, which log what they see, change it, or step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from pipe import is_recomputing
from pipe.nested import map_tensors, tensors_in
from tests.offload.fuzz.passes import picked
from tests.offload.fuzz.program import Statement
from tests.offload.fuzz.world import World

__all__ = ["Hook", "RemoveHooks"]


@dataclass(frozen=True, repr=False)
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
        scale = self.does == "scale"

        def forward(module: nn.Module, args: Any, output: Any) -> Any:
            if not is_recomputing():
                log(world, "forward", output)
            return map_tensors(halved, output) if scale else None

        def forward_pre(module: nn.Module, args: Any) -> Any:
            if not is_recomputing():
                if self.does != "step":  # the first run that writes weights is taken back, and repeated with its graph
                    log(world, "forward_pre", args)
                with torch.no_grad():
                    for p in module.parameters(recurse=False) if self.does == "step" else ():
                        p.mul_(0.9)
            return map_tensors(halved, args) if scale else None

        def backward(module: nn.Module, inner: Any, outer: Any) -> Any:
            log(world, "backward", outer)
            return map_tensors(halved, inner) if scale else None

        def backward_pre(module: nn.Module, outer: Any) -> Any:
            log(world, "backward_pre", outer)
            return map_tensors(halved, outer) if scale else None

        world.steps_in_hooks |= self.on == "forward_pre" and self.does == "step"
        register: dict[str, Callable[[], Any]] = {
            "forward": lambda: module.register_forward_hook(forward),
            "forward_pre": lambda: module.register_forward_pre_hook(forward_pre),
            "backward": lambda: module.register_full_backward_hook(backward),
            "backward_pre": lambda: module.register_full_backward_pre_hook(backward_pre),
        }
        world.handles.append(register[self.on]())

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


@dataclass(frozen=True, repr=False)
class RemoveHooks(Statement):
    """All hooks are removed."""

    def run(self, world: World) -> None:
        for handle in world.handles:
            handle.remove()
        world.handles.clear()
        world.steps_in_hooks = False
