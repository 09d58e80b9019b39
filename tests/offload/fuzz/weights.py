"""Statements that change weights and structure between calls: writes, averages, loads, copies and swaps of modules."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrizations, vector_to_parameters
from torch.nn.utils.weight_norm import weight_norm

from offload import OffloadModel, load_checkpoint, save_checkpoint
from offload.streaming.moves import HomeInUseError
from tests.offload.fuzz.layers import WIDTH
from tests.offload.fuzz.models import build
from tests.offload.fuzz.program import Statement
from tests.offload.fuzz.world import World, deep_copied


def values(like: Tensor, seed: int) -> Tensor:
    """New numbers of the shape and type of a tensor, of its own memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.dtype) * 0.5


#: What a write does with a parameter and new numbers.
WRITES: dict[str, Callable[[nn.Parameter, Tensor], Any]] = {
    "data": lambda p, v: setattr(p, "data", v),
    "data_copy": lambda p, v: p.data.copy_(v),
    "data_mul": lambda p, v: p.data.mul_(0.9),
    "numpy": lambda p, v: np.copyto(p.detach().numpy(), v.numpy()),
    "set": lambda p, v: p.set_(v),  # type: ignore[call-overload]
    "in_place": lambda p, v: p.copy_(v),
}


class Write(Statement):
    """Weights are written by the user.

    "data" (``p.data = v``), "data_copy", "data_mul", "in_place", "vector", "swap" (``.data`` of two of them), "numpy",
    "state_dict" (through what it returned) or "set".
    """

    how: str = "data"
    #: Number of the parameter; None: all.
    at: int | None = None
    seed: int = 0

    def run(self, world: World) -> None:
        if self.how == "vector":
            vector = parameters_to_vector(world.model.parameters())
            vector_to_parameters(vector * 0.9, world.model.parameters())
            return
        if self.how == "state_dict":
            for value in world.model.state_dict().values():
                if value.is_floating_point():
                    value.mul_(0.9)
            return
        chosen = world.parameters(self.at)
        if self.how == "swap":
            shapes: dict[torch.Size, nn.Parameter] = {}
            for p in world.parameters():
                other = shapes.setdefault(p.shape, p)
                if other is not p:
                    p.data, other.data = other.data, p.data
                    return
            return
        with torch.no_grad():
            for k, p in enumerate(chosen):
                WRITES[self.how](p, values(p, self.seed + k))


class Average(Statement):
    """An average of the weights over a list of references: "update" it, or "swap" it with them."""

    do: str = "update"

    def run(self, world: World) -> Any:
        world.wait_idle()
        if not world.references:
            world.references = world.parameters()
            world.average = [p.detach().clone() for p in world.references]
        with torch.no_grad():
            for average, p in zip(world.average, world.references, strict=True):
                if self.do == "update":
                    average.lerp_(p, 0.1)
                else:
                    held = p.data.clone()
                    p.data.copy_(average)
                    average.copy_(held)
        return [average.clone() for average in world.average]


class SaveState(Statement):
    """``state_dict()`` of model and optimizer: references, deep copies ("clone") or through a file ("file")."""

    how: str = "clone"

    def run(self, world: World) -> None:
        saved = world.model.state_dict(), world.optimizer.state_dict()
        # Of the plain model a reference keeps the values from before a layer assigned others to ``.data``.
        if self.how == "clone" or (self.how == "reference" and world.setup.model == "renormed"):
            saved = copy.deepcopy(saved)
        elif self.how == "file":
            file = io.BytesIO()
            torch.save(saved, file)
            file.seek(0)
            saved = torch.load(file, weights_only=False)
        world.states.append(saved)


class LoadState(Statement):
    """The latest saved state, or new numbers if there is none."""

    assign: bool = False
    optimizer: bool = False

    def run(self, world: World) -> None:
        if world.states:
            state, saved = world.states[-1]
        else:
            state = {
                k: values(v, 5) if v.is_floating_point() else v.clone() for k, v in world.model.state_dict().items()
            }
            saved = copy.deepcopy(world.optimizer.state_dict())
        world.model.load_state_dict(state, assign=self.assign)
        if self.optimizer:
            world.optimizer.load_state_dict(copy.deepcopy(saved))


class Checkpoint(Statement):
    """``save_checkpoint``, or ``load_checkpoint`` of the latest."""

    load: bool = False

    def run(self, world: World) -> None:
        folder = world.folder / "checkpoint"
        if not self.load:
            save_checkpoint(folder, world.model, world.optimizer)
            world.checkpoints += 1
        elif world.checkpoints:
            load_checkpoint(folder, world.model, world.optimizer)


class Copy(Statement):
    """A "deepcopy" or "pickle" of the model, which takes its place, or is kept beside it."""

    how: str = "deepcopy"
    aside: bool = False

    def run(self, world: World) -> None:
        if self.how == "pickle" and world.handles:
            return  # hooks are closures here, which torch cannot pickle
        world.dropped += world.sides[:-1]
        other = deep_copied(world) if self.how == "deepcopy" else pickle.loads(pickle.dumps(world.model))
        if self.aside:
            world.sides = [*world.sides[-1:], other]
            return
        world.sides = [*world.sides[-1:], world.model]
        world.model = other
        world.optimizer = None
        world.new_optimizer()
        world.live.clear()


class Reopen(Statement):
    """The script ends, and another takes its weights up: a home that is kept is closed and adopted."""

    def run(self, world: World) -> None:
        if world.setup.home != "kept" or world.sides:
            return
        world.live.clear()
        world.references, world.average, world.optimizer = [], [], None
        if not world.ours:
            old, world.model = world.model, build(world.setup.model, trips=world.setup.trips)
            world.model.load_state_dict(old.state_dict())
        else:
            world.model.close()
            world.model = None
            gc.collect()
            with torch.device("meta"):
                layers = build(world.setup.model, trips=world.setup.trips)
            world.model = world.wrap(layers)
        world.new_optimizer()
        torch.manual_seed(4)


class Adapter(nn.Module):
    """A low-rank addition to a frozen linear layer."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        base.requires_grad_(False)
        self.down = nn.Parameter(values(torch.empty(2, WIDTH, dtype=torch.float64), seed))
        self.up = nn.Parameter(values(torch.empty(WIDTH, 2, dtype=torch.float64), seed + 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.t() @ self.up.t()


NORMS: dict[str, Callable[[nn.Module], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old_weight_norm": weight_norm,
}


class Swap(Statement):
    """A linear layer is replaced or rebuilt after the model was wrapped.

    "module", "parameter" (a new one in its place), "weight_norm", "old_weight_norm", "spectral_norm", "lora", "tie",
    "no_bias", "forward" (of the instance), "remove" (by an identity).
    """

    how: str = "module"
    at: int = 0
    seed: int = 0

    def run(self, world: World) -> Any:
        found = world.linears()
        if not found:
            return None
        parent, name = found[self.at % len(found)]
        layer: Any = parent._modules[name]
        if self.how == "module":
            new = nn.Linear(WIDTH, WIDTH).double()
            new.load_state_dict({key: values(v, self.seed) for key, v in new.state_dict().items()})
            setattr(parent, name, new) if parent is not world.model else parent._modules.update({name: new})
        elif self.how in ("lora", "remove"):
            parent._modules[name] = Adapter(layer, self.seed) if self.how == "lora" else nn.Identity()
        elif self.how == "parameter":
            layer.weight = nn.Parameter(values(layer.weight, self.seed))
        elif self.how == "tie":
            other, key = found[(self.at + 1) % len(found)]
            layer.weight = other._modules[key].weight  # type: ignore[union-attr]
        elif self.how == "no_bias":
            layer.bias = None
        elif self.how == "forward":
            call = layer.forward
            layer.forward = lambda x: call(x) * 0.5
        else:
            NORMS[self.how](layer)
        return None


class Freeze(Statement):
    """``requires_grad_`` of one parameter, or of all."""

    at: int | None = 0
    on: bool = False

    def run(self, world: World) -> None:
        for p in world.parameters(self.at):
            p.requires_grad_(self.on)


class SetMode(Statement):
    """``train()`` or ``eval()``, of the model or of one layer."""

    train: bool = False
    at: int | None = None

    def run(self, world: World) -> None:
        children = list(world.model.children())
        module = world.model if self.at is None else children[self.at % len(children)]
        module.train(self.train)


class SetBuffer(Statement):
    """Buffers are written in place, or replaced."""

    replace: bool = False

    def run(self, world: World) -> None:
        for module in list(world.model.modules()):
            for name, buffer in list(module._buffers.items()):
                if buffer is None or not buffer.is_floating_point():
                    continue
                if self.replace:
                    setattr(module, name, values(buffer, 3).abs())
                else:
                    buffer.mul_(0.5)


class KeepInMemory(Statement):
    """Other shards rest in memory from now on, and are used in place there."""

    shards: tuple[int, ...] = ()

    def run(self, world: World) -> None:
        if isinstance(world.model, OffloadModel):
            count = len(world.model._homes.shards)
            with contextlib.suppress(HomeInUseError):  # of what the program holds
                world.model._homes.keep_in_memory({j % count for j in self.shards})
