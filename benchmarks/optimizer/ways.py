"""The ways to take a training step: what differs between the rungs, and nothing else.

Each way is built from a shape and a directory on disk; it takes one step at a time, clipping included, and gives its
parameters at the end. A step may leave an update behind that hides in the next one: that is the point of some of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.optimizer.shape import Shape, loss_of
from benchmarks.retrieval.encoder import State

__all__ = ["WAYS", "Way"]


class Way(ABC):
    """One way to train."""

    #: Whether a step leaves work behind that goes on while nobody calls.
    leaves_work = False

    def __init__(self, shape: Shape, home: Path) -> None:
        self.shape = shape
        self.home = home

    @abstractmethod
    def step(self, state: State, target: Tensor) -> float:
        """Forward, backward, clipping and update; the loss."""

    @abstractmethod
    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Names as in an ``nn.ModuleList`` of the blocks, and values with every update applied."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to finish
        """Finishes what goes on while nobody calls."""

    def waited_seconds(self) -> float:
        """Seconds in which compute stood still for a copy, since the way was made."""
        return 0.0

    def counts(self) -> dict[str, Any]:
        """What the way itself has counted since it was made."""
        return {}


class Resident(Way):
    """What anyone would do who has the memory: everything in it, each block checkpointed, one fused AdamW."""

    def __init__(self, shape: Shape, home: Path) -> None:
        super().__init__(shape, home)
        self.blocks = nn.ModuleList(shape.model())
        self.optimizer = torch.optim.AdamW(
            self.blocks.parameters(), lr=shape.learning_rate, weight_decay=shape.weight_decay, fused=True
        )

    def step(self, state: State, target: Tensor) -> float:
        """As in every tutorial."""
        self.optimizer.zero_grad()
        for block in self.blocks:
            state = checkpoint(block, state, use_reentrant=False)
        loss = loss_of(state, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.blocks.parameters(), self.shape.max_norm)
        self.optimizer.step()
        return loss.item()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """They are there."""
        for name, parameter in self.blocks.named_parameters():
            yield name, parameter.detach()


class Offloaded(Way):
    """``OffloadModel`` and ``OffloadOptimizer``; each block is a shard."""

    on_disk = True
    clipped = True
    serial = False

    def __init__(self, shape: Shape, home: Path) -> None:
        from offload import OffloadModel, OffloadOptimizer

        super().__init__(shape, home)
        self.model = OffloadModel(
            self.layers(),
            "cpu",
            offload_device=home if self.on_disk else "cpu",
            checkpoint_activation=True,
            num_slots=shape.slots,
            # A part of the memory that the model does without.
            graph_bytes=shape.graph_mebibytes << 20 or None,
        )
        self.optimizer = OffloadOptimizer(
            self.model,
            torch.optim.AdamW,
            max_norm=shape.max_norm if self.clipped else None,
            update_in_backward=not self.clipped,
            lr=shape.learning_rate,
            weight_decay=shape.weight_decay,
        )

    def layers(self) -> list[nn.Module]:
        """What is wrapped."""
        return self.shape.model()

    def step(self, state: State, target: Tensor) -> float:
        """Clipping is the optimizer's, and so is the order of updates."""
        self.optimizer.zero_grad()
        loss = loss_of(self.model(state), target)
        loss.backward()
        self.optimizer.step()
        if self.serial:
            self.optimizer.synchronize()
        return loss.item()

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Out of the homes."""
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach()

    def waited_seconds(self) -> float:
        """As the engine counts them."""
        return self.model.statistics().wait_seconds

    def counts(self) -> dict[str, Any]:
        """The engine's statistics."""
        from dataclasses import asdict

        return asdict(self.model.statistics())


class OffloadedToHost(Offloaded):
    """Parameters, gradients and moments in host memory, where updates start at once and need no slot."""

    on_disk = False
    leaves_work = True

    def settle(self) -> None:
        """Finishes the updates."""
        self.optimizer.synchronize()


class OffloadedInBackward(Offloaded):
    """A shard updates as soon as its gradients are complete; they never rest anywhere, and nothing is clipped."""

    clipped = False


class OffloadedSerial(Offloaded):
    """All updates in ``step()``, as everyone else does it: nothing hides behind the next forward."""

    serial = True


class OffloadedFromMeta(Offloaded):
    """The layers come without memory and get their values block by block: the model may be larger than memory."""

    def __init__(self, shape: Shape, home: Path) -> None:
        super().__init__(shape, home)
        for k in range(shape.blocks):
            values = {f"{k}.{name}": value for name, value in shape.block(k).state_dict().items()}
            self.model.load_state_dict(values, strict=False)

    def layers(self) -> list[nn.Module]:
        """Without memory."""
        with torch.device("meta"):
            return self.shape.model()


WAYS: dict[str, type[Way]] = {
    "resident": Resident,
    "disk": Offloaded,
    "host": OffloadedToHost,
    "in backward": OffloadedInBackward,
    "serial": OffloadedSerial,
    "from meta": OffloadedFromMeta,
}
