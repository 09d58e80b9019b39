"""Statements about gradients and steps: what is kept, taken away, combined, clipped and applied."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.offload.fuzz.passes import loss_of
from tests.offload.fuzz.program import Statement
from tests.offload.fuzz.world import World


class ZeroGrad(Statement):
    """By the "model", the "optimizer", or a "loop" of the user's own over the parameters."""

    by: str = "model"
    set_to_none: bool = True

    def run(self, world: World) -> None:
        if self.by == "model":
            world.model.zero_grad(set_to_none=self.set_to_none)
        elif self.by == "optimizer":
            world.optimizer.zero_grad(set_to_none=self.set_to_none)
        else:
            for p in world.parameters():
                if self.set_to_none:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.detach_().zero_()


class KeepGradients(Statement):
    """``[p.grad for p in model.parameters()]``: references, not copies."""

    def run(self, world: World) -> Any:
        found = [p.grad for p in world.parameters()]
        world.gradients.append(found)
        world.keep("gradient", [g for g in found if g is not None])
        return [g is None for g in found]


class UseKept(Statement):
    """Kept gradients are projected onto the present ones, and the result is assigned or copied; or "fresh" ones are."""

    how: str = "assign"

    def run(self, world: World) -> Any:
        if self.how == "fresh":
            for p in world.parameters():
                p.grad = torch.full_like(p, 0.25)
        if not world.gradients:
            return None
        norms = []
        with torch.no_grad():
            for p, kept in zip(world.parameters(), world.gradients[-1], strict=False):
                if kept is None or p.grad is None or kept.shape != p.grad.shape or kept.is_sparse:
                    continue
                dot = (kept * p.grad).sum()
                norms.append(dot.clone())
                mixed = p.grad - dot / (kept.pow(2).sum() + 1) * kept
                if self.how == "assign":
                    p.grad = mixed
                elif self.how == "kept":
                    p.grad = kept
                else:
                    p.grad.copy_(mixed)
        return norms


class Clip(Statement):
    """By the global norm, or each number ("value")."""

    by: str = "norm"
    most: float = 0.3

    def run(self, world: World) -> Any:
        if all(p.grad is None for p in world.parameters()):
            return None
        if self.by == "value":
            torch.nn.utils.clip_grad_value_(world.model.parameters(), self.most)
            return None
        return torch.nn.utils.clip_grad_norm_(world.model.parameters(), self.most)


def step(world: World) -> Tensor | None:
    """One step of the optimizer, clipped as the setup says, which takes the gradients away; returns the norm."""
    setup, norm = world.setup, None
    by_optimizer = world.ours and setup.updates == "offload"
    if setup.max_norm is not None and not by_optimizer:
        members = [p for group in world.optimizer.param_groups for p in group["params"]]
        norm = torch.nn.utils.clip_grad_norm_(members, setup.max_norm)
    world.optimizer.step()
    if setup.max_norm is not None:
        norm = world.optimizer.last_norm if by_optimizer else norm
        world.optimizer.zero_grad()
    return norm


class Step(Statement):
    """``optimizer.step()``."""

    def run(self, world: World) -> Any:
        return step(world)


class TrainStep(Statement):
    """``accumulate`` batches forward and backward, a step, and gradients away: all that update_in_backward takes."""

    seed: int = 0
    accumulate: int = 1
    set_to_none: bool = True

    def run(self, world: World) -> Any:
        losses = []
        for k in range(self.accumulate):
            loss = loss_of(world.model(world.input(self.seed + k, 4)), "square")
            if k + 1 < self.accumulate and hasattr(world.optimizer, "accumulate"):
                with world.optimizer.accumulate():
                    loss.backward()
            else:
                loss.backward()
            losses.append(loss.detach())
        norm = step(world)
        world.optimizer.zero_grad(set_to_none=self.set_to_none)
        if world.setup.updates == "backward":
            world.optimizer.zero_grad()
        return losses, norm


class NewOptimizer(Statement):
    """A new optimizer over the parameters that there are now."""

    def run(self, world: World) -> None:
        world.optimizer = None
        world.new_optimizer()


class Rate(Statement):
    """Another learning rate, as a schedule sets it."""

    lr: float = 0.02

    def run(self, world: World) -> None:
        for group in world.optimizer.param_groups:
            group["lr"] = self.lr


class Look(Statement):
    """Everything is compared."""

    def run(self, world: World) -> None:
        world.wait_idle()
