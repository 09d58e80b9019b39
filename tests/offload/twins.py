"""A plain model that rounds what it keeps, beside an OffloadModel that stores it rounded: tests of such options."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True, "foreach": False}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1, "fused": False}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),  # updates a matrix as a whole
}


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    # Multiples of 8: kernels round alike wherever a row begins. Not of 16: the last scale is of fewer elements.
    parts = [nn.Linear(72, 72), nn.Tanh(), nn.LayerNorm(72), nn.Linear(72, 72), nn.Tanh(), nn.Linear(72, 80)]
    return nn.Sequential(*parts)


def exchanged(forms: Sequence[Any]) -> pytest.MarkDecorator:
    """Every pair of forms ``here`` and ``there``, None among them, in host memory or in files: each form in both."""
    pairs = list(itertools.product([None, *forms], repeat=2))
    cases = [(here, there, ["host", "disk"][k % 2]) for k, (here, there) in enumerate(pairs)]
    return pytest.mark.parametrize(("here", "there", "home"), cases, indirect=["home"], ids=str)


def resumed(forms: Sequence[Any]) -> pytest.MarkDecorator:
    """Each of two forms ``through`` a checkpoint and a ``state_dict()``, in host memory and in files."""
    ways = [("checkpoint", "disk"), ("state_dict", "host")], [("checkpoint", "host"), ("state_dict", "disk")]
    cases = [(form, *way) for form, two in zip(forms, ways, strict=True) for way in two]
    return pytest.mark.parametrize(("form", "through", "home"), cases, indirect=["home"], ids=str)


def folder_in(home: str, name: str) -> str:
    """A home of its own for one of several models of a test."""
    return home if home == "cpu" else f"{home}{name}/"


class Twins(ABC):
    """Both take the same steps. Subclasses make ``bare``, ``model``, and their optimizers ``plain`` and ``ours``."""

    bare: nn.Sequential
    model: OffloadModel
    plain: torch.optim.Optimizer
    ours: OffloadOptimizer
    count = 0

    def batch(self) -> Tensor:
        self.count += 1
        return torch.randn(8, 72, generator=torch.Generator().manual_seed(self.count))

    @abstractmethod
    def step(self, times: int = 1) -> None:
        """Takes steps of both models."""

    @abstractmethod
    def assert_equal(self) -> None:
        """Compares weights and optimizer states, bit by bit."""

    def assert_equal_where_shards_move(self) -> None:
        """Takes steps between which shards move from files to memory and back."""
        self.step()
        for shards in ([], [0, 2], [1, 2, 3, 4, 5]):
            self.model._homes.keep_in_memory(shards)
            self.step()
            self.assert_equal()

    def take_over(self, other: Twins) -> None:
        """Goes on with the plain model of another pair, whose model this one's equals."""
        self.bare, self.plain, self.count = other.bare, other.plain, other.count

    def assert_resumes(self, first: Twins, through: str, folder: Path) -> None:
        """Loads what ``first`` saves, ``through`` a "checkpoint" or a "state_dict", and goes on bit for bit."""
        if through == "checkpoint":
            save_checkpoint(folder / "saved", first.model, first.ours)
            load_checkpoint(folder / "saved", self.model, self.ours)
        else:
            torch.save([first.model.state_dict(), first.ours.state_dict()], folder / "saved.pt")
            model, optimizer = torch.load(folder / "saved.pt")
            self.model.load_state_dict(model)
            self.ours.load_state_dict(optimizer)
        self.take_over(first)
        self.assert_equal()
        self.step(2)
        self.assert_equal()


def bytes_of_a_step(home: str, *, states: Any, **options: Any) -> tuple[int, int]:
    """Bytes that a step of Adam with clipping reads and writes, of 5 matrices of 64 x 64, each a shard, and 2 slots."""
    policy = MemoryPolicy.fixed(slots=2)
    matrices = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(5)))
    model = OffloadModel(matrices, "cpu", home, num_slices=5, memory=policy, **options)
    optimizer = OffloadOptimizer(model, torch.optim.Adam, states=states, max_norm=0.1)

    def counted() -> tuple[int, int]:
        s = model.statistics()
        return s.bytes_loaded + s.update_bytes_read, s.bytes_stored + s.update_bytes_written

    for _ in range(3):
        before = counted()
        model(torch.ones(2, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    after = counted()
    assert model.statistics().bytes_moved == sum(after)
    return after[0] - before[0], after[1] - before[1]
