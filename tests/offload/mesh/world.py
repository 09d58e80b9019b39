"""What claims about ranks share: models and batches, comparisons with one process, a lane that runs late."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from offload import OffloadModel
from offload.mesh.ranks import CollectiveLane
from offload.streaming.lane import Arrival


def whole(tensor: Any) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def greatest_error(model: nn.Module, bare: nn.Module) -> float:
    """Of the gradients, relative to the greatest of all."""
    names = [name for name, _ in bare.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    pairs = [(p.grad, q.grad) for p, q in zip(model.parameters(), bare.parameters(), strict=True)]
    assert [p is None for p, _ in pairs] == [q is None for _, q in pairs]
    most = max(float(q.abs().max()) for _, q in pairs if q is not None)
    return max(float((whole(p) - q).abs().max()) for p, q in pairs if q is not None) / most


def difference(model: nn.Module, bare: nn.Module) -> float:
    pairs = zip(model.parameters(), bare.parameters(), strict=True)
    return max(float((whole(p.detach()) - whole(q.detach())).abs().max()) for p, q in pairs)


class World:
    """This rank, and how it makes models."""

    def __init__(self, mesh: DeviceMesh, folder: Path) -> None:
        self.mesh, self.folder = mesh, folder
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()
        self.home = folder / "homes"

    def part(self, batch: Tensor) -> Tensor:
        return batch.chunk(self.ranks)[self.rank]

    def check_gradients(self, model: nn.Module, bare: nn.Module, *inputs: Tensor) -> None:
        """Of these rows, of which each rank has its part, added to those of before."""
        for x in inputs:
            loss_of(model(self.part(x))).backward()
            loss_of(bare(x)).backward()
        assert greatest_error(model, bare) < 1e-6

    def model(self, bare: Any, home: Any = "cpu", slices: int | None = None, **how: Any) -> Any:
        how = {"checkpoint_activation": True, "mesh": self.mesh, **how}
        slices = 4 if slices is None and "blocks" not in how else slices
        return OffloadModel(copy.deepcopy(bare), "cpu", home, slices, **how)

    @staticmethod
    def is_whole(p: Any) -> bool:
        """Whether each rank stores a parameter as a whole."""
        return isinstance(p, DTensor) and p.placements == (Replicate(),)

    def raises(self, kind: type[BaseException], call: Callable[[], Any], *words: str) -> None:
        with pytest.raises(kind) as raised:
            call()
        assert all(word in str(raised.value) for word in words), str(raised.value)


WORDS, WIDTH, LENGTH = 11, 7, 4


def build(seed: int = 0, *, tied: bool = False, meta: bool = False) -> nn.Sequential:
    """Rows that no number of ranks divides, a layer of one row, and one that may be used twice."""
    torch.manual_seed(seed)
    with torch.device("meta" if meta else "cpu"):
        again = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(
            *(nn.Linear(5, WIDTH), nn.Tanh(), again, nn.Tanh()),
            *(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), again if tied else nn.Linear(WIDTH, WIDTH)),
            *(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 1)),
        )


def rows(seed: int = 0) -> Tensor:
    """A batch for :func:`build`."""
    return torch.randn(24, 5, generator=torch.Generator().manual_seed(seed))


def batches(count: int = 3) -> Tensor:
    return torch.stack([rows(seed) for seed in range(count)])


def loss_of(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)) * scale)


class Encoder(nn.Module):
    """Parameters before, between and after blocks, a scalar, a tied one, and one that is never used.

    ``order`` of its blocks; ``how`` the last one of the order is called: "detached" from those before, or "unused".
    """

    order: tuple[int, ...] = (0, 1, 2)

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.between = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: Tensor, how: str = "") -> Tensor:
        x = self.words(ids)
        for k, j in enumerate(self.order):
            last = k + 1 == len(self.order)
            after = self.layers[j](x.detach() if how == "detached" and last else x, self.scale)
            x = x if how == "unused" and last else after
            if k == 0:
                x = self.between(x)
        found: Tensor = self.head(x).mean(1)
        return found


def batch(seed: int = 0) -> Tensor:
    """For an :class:`Encoder`."""
    return torch.randint(0, WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(seed))


class Adapted(nn.Module):
    """A frozen layer with an adapter, and a parameter that all of these share."""

    def __init__(self, shared: nn.Parameter) -> None:
        super().__init__()
        self.base = nn.Linear(5, 5).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(5, 2, bias=False), nn.Linear(2, 5, bias=False)
        self.lora_scale = shared

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.lora_b(self.lora_a(x)) * self.lora_scale)


class LateLane(CollectiveLane):
    """Runs each job when it, or a later one, is waited for; never in another order."""

    def __init__(self, *device: torch.device) -> None:
        super().__init__(*device)
        self.waiting: list[Callable[[], None]] = []
        self.done = 0

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Any:
        self.submitted += 1

        def job() -> None:
            for arrival in after:
                arrival.synchronize()
            copy()

        self.waiting.append(job)
        number = self.submitted

        class Late:
            def wait(late) -> None:
                while self.done < number:
                    self.done += 1
                    with torch.no_grad():
                        self.waiting.pop(0)()

            synchronize = wait

        return Late()

    def wait_idle(self) -> None:
        self.waiting.clear()
