"""What the claims of ``mesh_worker`` share: this rank, the models that it makes, and comparisons with one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from offload import OffloadModel


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
