"""Statements whose model is a part of something bigger: other losses, other modules, GradCache, a checkpoint."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from gradcache import GradCache
from pipe.nested import tensors_in
from tests.offload.fuzz.layers import WIDTH
from tests.offload.fuzz.models import RANDOM, STATEFUL, WRITERS
from tests.offload.fuzz.passes import loss_of
from tests.offload.fuzz.program import Statement
from tests.offload.fuzz.world import World


class AuxiliaryLoss(Statement):
    """A loss that layers left as an attribute is added to that of the output."""

    seed: int = 0

    def run(self, world: World) -> Any:
        loss = loss_of(world.model(world.input(self.seed, 4)), "square")
        extra = [module.loss for module in world.model.modules() if isinstance(getattr(module, "loss", None), Tensor)]
        total = torch.stack([loss, *extra]).sum()
        total.backward()
        return total.detach()


class Tower(nn.Module):
    """A module around the model, and a representation of its first output."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(first_float(self.body(x)), dim=-1)


def first_float(value: Any) -> Tensor:
    return next(t for t in tensors_in(value) if t.is_floating_point() and t.dim() == 2)


def contrastive(a: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(a @ b.t() * 5, torch.arange(a.size(0)))


class ChunkedStep(Statement):
    """A contrastive batch by GradCache, in chunks of two rows, over the model or a module around it."""

    seed: int = 0
    rows: int = 4
    bare: bool = False

    def run(self, world: World) -> Any:
        # All chunks pass a shard at once: they draw in another order than one by one, and hooks see their sum. Plain
        # autograd refuses weights that a layer has written since another chunk saved them; here each has its own.
        if world.setup.model in RANDOM | STATEFUL | WRITERS or world.handles:
            return None
        tower: Any = world.model if self.bare else Tower(world.model)
        cache = GradCache([tower, tower], 2, contrastive, get_rep_fn=first_float)
        return cache(world.input(self.seed, self.rows), world.input(self.seed + 100, self.rows))


class SetAside(Statement):
    """Gradients are set aside, a backward makes new ones, and the old ones are added."""

    seed: int = 0
    #: "old" is added to in place, "new", or neither.
    into: str = "old"

    def run(self, world: World) -> Any:
        parameters = world.parameters()
        old = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        loss = loss_of(world.model(world.input(self.seed, 4)), "square")
        loss.backward()
        with torch.no_grad():
            for p, g in zip(parameters, old, strict=True):
                if g is None or p.grad is None:
                    p.grad = p.grad if g is None else g
                elif self.into == "old":
                    p.grad = g.add_(p.grad)
                else:
                    p.grad = p.grad.add_(g) if self.into == "new" else p.grad + g
        return loss.detach()


class Regularised(Statement):
    """The loss also has a term of the parameters themselves, made before or after the forward."""

    seed: int = 0
    first: bool = False

    def run(self, world: World) -> Any:
        def term() -> Tensor:
            return torch.stack([p.pow(2).sum() for p in world.model.parameters()]).sum() * 0.1

        # In torch nothing tells that data was assigned, and the term's gradient is one of the later values.
        early = term() if self.first and world.setup.model != "renormed" else None
        loss = loss_of(world.model(world.input(self.seed, 4)), "square")
        total = loss + (term() if early is None else early)
        total.backward()
        return total.detach()


class TiedAround(Statement):
    """A weight of the model is also used in front of it and behind it."""

    seed: int = 0
    at: int = 0

    def run(self, world: World) -> Any:
        square = [p for p in world.parameters() if p.shape == (WIDTH, WIDTH)]
        x = world.input(self.seed, 4)
        if not square or not x.is_floating_point():
            return None
        weight = square[self.at % len(square)]
        y = first_float(world.model(x @ weight))
        total = (y @ weight.t() if y.size(1) == WIDTH else y).pow(2).mean()
        total.backward()
        return total.detach()


class Checkpointed(Statement):
    """The model is called under ``torch.utils.checkpoint``."""

    seed: int = 0
    reentrant: bool = False

    def run(self, world: World) -> Any:
        x = world.input(self.seed, 4)
        if world.setup.model in STATEFUL:
            return None
        # torch makes the checkpoint the origin of an output that is a parameter, so that its backward never ends.
        if self.reentrant and world.setup.model == "parameter":
            return None
        if x.is_floating_point():
            x.requires_grad_()
        output = checkpoint(world.model, x, use_reentrant=self.reentrant)
        loss = loss_of(output, "square")
        loss.backward()
        return loss.detach(), x.grad
