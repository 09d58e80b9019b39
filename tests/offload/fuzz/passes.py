"""Statements that run the model: forwards, backwards, penalties, and what torch does with functions."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn

from pipe.nested import map_tensors, tensors_in
from tests.offload.fuzz.layers import trip
from tests.offload.fuzz.program import Statement
from tests.offload.fuzz.world import Live, World


def loss_of(output: Any, kind: str) -> Tensor:
    """A scalar of an output: "square" and "sum" of all of it, "first" or "last" of what is in it."""
    leaves = [t for t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    leaves = {"first": leaves[:1], "last": leaves[-1:]}.get(kind, leaves)
    parts = [t.sum() if kind == "sum" else (t - 1).pow(2).mean() * (k + 1) for k, t in enumerate(leaves)]
    return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, requires_grad=True)


def detached(value: Any) -> Any:
    return map_tensors(lambda t: t.detach().clone(), value)


def picked(world: World, which: tuple[int, ...]) -> list[Live]:
    """The waiting outputs of these numbers, the latest is 0."""
    if not world.live:
        return []
    numbers = dict.fromkeys((-1 - k) % len(world.live) for k in which)
    return [world.live[k] for k in numbers]


def forget(world: World, used: list[Live]) -> None:
    world.live = [live for live in world.live if all(live is not other for other in used)]


def contexts(mode: str, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
    """What is around a forward of this mode."""

    stack = contextlib.ExitStack()
    if mode.startswith("eval"):
        model.eval()
        stack.callback(model.train)
    if mode in ("no_grad", "eval"):
        stack.enter_context(torch.no_grad())
    if mode == "inference":
        stack.enter_context(torch.inference_mode())
    if mode == "save_on_cpu":
        stack.enter_context(torch.autograd.graph.save_on_cpu())
    return stack


WITH_GRAPH = "train", "eval_grad", "save_on_cpu"


class Forward(Statement):
    """``y = model(x)`` in a mode.

    "train", "no_grad", "eval" (without gradients), "eval_grad" (with), "inference" or "save_on_cpu".
    """

    seed: int = 0
    mode: str = "train"
    rows: int = 4
    x_grad: bool = False

    def run(self, world: World) -> Any:
        x = world.input(self.seed, self.rows)
        if self.x_grad and x.is_floating_point():
            x.requires_grad_()
        with contexts(self.mode, world.model):
            output = world.model(x)
        if self.mode in WITH_GRAPH and any(t.requires_grad for t in tensors_in(output)):
            world.live.append(Live(output, x))
        world.keep("output", output)
        world.inputs = [*world.inputs[-3:], x]
        # Without gradients a layer that returns its parameter still returns what requires one; ours returns a copy.
        needed = [t.requires_grad for t in tensors_in(output)]
        return detached(output), needed if self.mode in WITH_GRAPH else None


class MutateInput(Statement):
    """The batch of the latest forward is written in place, as by a loader that reuses its memory."""

    def run(self, world: World) -> None:
        if world.inputs and world.inputs[-1].is_floating_point():
            with torch.no_grad():
                world.inputs[-1].mul_(2)


class MutateOutput(Statement):
    """The latest output is written in place before its loss."""

    def run(self, world: World) -> None:
        for live in picked(world, (0,)):
            for leaf in tensors_in(live.output):
                if leaf.is_floating_point():
                    leaf.mul_(2)


class Backward(Statement):
    """``loss.backward()`` of some of the outputs that wait; the latest is number 0."""

    which: tuple[int, ...] = (0,)
    loss: str = "square"
    retain: bool = False
    create_graph: bool = False
    #: None, "all", "first", "last" (of the parameters), or "x".
    inputs: str | None = None

    def run(self, world: World) -> Any:
        used = picked(world, self.which)
        if not used:
            return None
        loss = torch.stack([loss_of(live.output, self.loss) * (k + 1) for k, live in enumerate(used)]).sum()
        inputs = targets(world, used, self.inputs)
        if self.inputs is not None and not inputs:
            return None
        loss.backward(retain_graph=self.retain or None, create_graph=self.create_graph, inputs=inputs)
        if not self.retain and not self.create_graph:
            forget(world, used)
        return loss.detach()


def targets(world: World, used: list[Live], which: str | None) -> list[Tensor] | None:
    if which is None:
        return None
    if which == "x":
        return [live.x for live in used if live.x.requires_grad]
    trainable: list[Tensor] = [p for p in world.parameters() if p.requires_grad]
    return {"all": trainable, "first": trainable[:1], "last": trainable[-1:]}[which]


class Grad(Statement):
    """``torch.autograd.grad(loss, ..., allow_unused=True)`` of "all", "first" or "last" parameters, or of "x"."""

    which: tuple[int, ...] = (0,)
    of: str = "all"
    retain: bool = False
    loss: str = "square"

    def run(self, world: World) -> Any:
        used = picked(world, self.which)
        wanted = targets(world, used, self.of)
        if not used or not wanted:
            return None
        loss = torch.stack([loss_of(live.output, self.loss) for live in used]).sum()
        found = torch.autograd.grad(loss, wanted, retain_graph=self.retain or None, allow_unused=True)
        if not self.retain:
            forget(world, used)
        world.keep("grad()", [g for g in found if g is not None])
        return detached(list(found))


class Penalty(Statement):
    """A gradient penalty: on the gradient of "x", of "all" parameters, or on ``.grad`` after ``create_graph``."""

    of: str = "x"
    seed: int = 0
    #: Whether the plain loss is added, whose gradient does not require one.
    with_loss: bool = True

    def run(self, world: World) -> Any:
        x = world.input(self.seed, 4)
        if x.is_floating_point():
            x.requires_grad_()
        output = world.model(x)
        loss = loss_of(output, "square")
        if self.of == ".grad":
            world.model.zero_grad()
            loss.backward(create_graph=True)
            found = [p.grad for p in world.parameters() if p.grad is not None]
            world.model.zero_grad()
        else:
            wanted = [x] if self.of == "x" and x.requires_grad else [p for p in world.parameters() if p.requires_grad]
            found = [
                g for g in torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True) if g is not None
            ]
        penalty = torch.stack([(g.pow(2).sum() - 1).pow(2) for g in found]).sum() if found else loss
        total = loss + penalty if self.with_loss else penalty
        total.backward()
        return total.detach(), detached(found)


class Functional(Statement):
    """What ``torch.func`` and ``torch.autograd.functional`` do with a model."""

    kind: str = "call"
    seed: int = 0

    def run(self, world: World) -> Any:
        model, x = world.model, world.input(self.seed, 4)
        if self.kind == "call":
            new = {name: (p.detach() + 0.1).requires_grad_() for name, p in model.named_parameters()}
            output = torch.func.functional_call(model, new, (x,))
            loss_of(output, "square").backward()
            return detached(output), [None if p.grad is None else p.grad.clone() for p in new.values()]
        # Under torch.func, other ``.data`` for a parameter ends the interpreter in torch itself.
        if not x.is_floating_point() or world.setup.model == "renormed":
            return None

        def f(value: Tensor) -> Tensor:
            leaves = [t for t in tensors_in(model(value)) if t.is_floating_point()]
            return torch.stack([t.pow(2).sum() for t in leaves]).sum()

        if self.kind == "jvp":
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
                return [t.detach().clone() for t in torch.autograd.forward_ad.unpack_dual(f(dual)) if t is not None]
        kinds = {
            "vjp": torch.autograd.functional.vjp,
            "hvp": torch.autograd.functional.hvp,
            "func_jvp": torch.autograd.functional.jvp,
        }
        if self.kind in kinds:
            v = torch.ones(()).double() if self.kind == "vjp" else torch.ones_like(x)
            return kinds[self.kind](f, x, v)
        if self.kind == "hessian":
            return torch.autograd.functional.hessian(f, x)
        return torch.func.grad(f)(x)


class Interrupt(Statement):
    """Ctrl-C in a layer, in a forward or a backward; the loop goes on with a new step."""

    #: "forward", "backward", or "recomputation", which the plain model has none of: there it is the backward.
    where: str = "forward"
    after: int = 1
    seed: int = 0

    def run(self, world: World) -> Any:
        if world.steps_in_hooks and self.where != "forward":
            return None
        world.model.zero_grad()
        event = self.where
        if event == "recomputation":
            event = "forward" if world.ours and world.setup.checkpoint else "backward"
        struck = False
        try:
            if self.where == "forward":
                trip.left = {"forward": self.after}
            output = world.model(world.input(self.seed, 4))
            trip.left = {event: self.after} if self.where != "forward" else {}
            loss_of(output, "square").backward()
        except KeyboardInterrupt as error:
            if "in a" not in str(error):
                raise
            struck = True
        finally:
            trip.left = {}
        world.model.zero_grad()
        # A recomputation passes other layers than a backward does.
        return struck if self.where == "forward" else None
