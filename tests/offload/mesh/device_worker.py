"""A rank that trains on its GPU, started by torchrun: ``-m tests.offload.mesh.device_worker FOLDER``.

Each rank compares with one model on all rows, on the same device. One rank alone gathers from itself, although a mesh
of one is otherwise the engine without a mesh: so one GPU runs nccl, the copies and the order of streams.
"""

from __future__ import annotations

import copy
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from offload import OffloadModel, OffloadOptimizer
from tests.offload.mesh.world import Encoder, batch, batches, build, loss_of


def trained(model: Any, optimizer: Any, steps: list[Tensor], rank: int, ranks: int) -> tuple[Tensor, list[Tensor]]:
    """The last norm of the gradients, and the parameters, after steps with two backwards each."""
    norm = torch.zeros(())
    for rows in steps:
        for half in rows.chunk(2):
            loss_of(model(half.chunk(ranks)[rank])).backward()
        if isinstance(optimizer, OffloadOptimizer):
            optimizer.step()
            norm = optimizer.last_norm
        else:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
        optimizer.zero_grad()
    found = []
    for p in model.parameters():
        value = p.detach()
        found.append((value.full_tensor() if isinstance(value, DTensor) else value).cpu().clone())
    return norm.cpu(), found


def check(bare: nn.Module, steps: list[Tensor], mesh: Any, device: torch.device, home: Any, **how: Any) -> None:
    ranks, rank = mesh.size(), dist.get_rank()
    how = {"checkpoint_activation": True, **how}
    model = OffloadModel(copy.deepcopy(bare), device, home, mesh=mesh, **how)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.05)
    norm, found = trained(model, optimizer, steps, rank, ranks)
    counted = model.statistics()
    assert counted.shard_loads > 0
    assert (counted.bytes_gathered > 0) == (mesh.size(mesh.ndim - 1) > 1)
    assert (counted.bytes_reduced > 0) == (ranks > 1)
    plain = copy.deepcopy(bare).to(device)
    expected_norm, expected = trained(plain, torch.optim.AdamW(plain.parameters(), lr=0.01), steps, 0, 1)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-4, atol=0)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if ranks == 1:
        alone = OffloadModel(copy.deepcopy(bare), device, home, **how)
        again = OffloadOptimizer(alone, torch.optim.AdamW, lr=0.01, max_norm=0.05)
        assert all(map(torch.equal, found, trained(alone, again, steps, 0, 1)[1]))
    model.close()


#: For shards of 4 MiB: a half of it are two slots, whole gradients of two shards, and what their exchange takes.
LIMIT = 48 << 20


def check_memory(mesh: Any, device: torch.device, home: Any) -> None:
    """The peak of what torch has allocated on the GPU stays within ``memory=``, in every step; results are right.

    What cuBLAS keeps is there before: the plain model is trained first.
    """
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(8)))
    ranks = mesh.size()
    steps = [torch.randn(128, 1024, device=device) for _ in range(6)]
    plain = copy.deepcopy(bare).to(device)
    sgd = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in steps:
        loss_of(plain(rows)).backward()
        sgd.step()
        sgd.zero_grad()
    expected = [p.detach().cpu() for p in plain.parameters()]
    del plain, sgd
    begin = torch.cuda.memory_allocated(device)
    model = OffloadModel(bare, device, home, mesh=mesh, memory={"device": LIMIT})
    optimizer, peaks = OffloadOptimizer(model, torch.optim.SGD, lr=0.1), []
    for rows in steps:  # each step begins a new peak
        loss_of(model(rows.chunk(ranks)[dist.get_rank()])).backward()
        peaks.append(torch.cuda.max_memory_allocated(device) - begin)
        optimizer.step()
        optimizer.zero_grad()
    report = model.memory_report()
    assert report.limit_bytes == LIMIT
    assert report.predicted is not None
    assert 0 < max(peaks) <= LIMIT, (peaks, report)
    parameters: list[Any] = [*model.parameters()]
    torch.testing.assert_close([p.detach().full_tensor() for p in parameters], expected, rtol=1e-4, atol=1e-5)
    model.close()


def main(folder: Path) -> None:
    ranks, number = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", number)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60))
    mesh = init_device_mesh("cuda", (ranks,))
    with pytest.MonkeyPatch.context() as patch:
        if ranks == 1:
            patch.setattr("offload.construction.check_mesh", lambda mesh, *_: mesh)
        rows = [each.to(device) for each in batches()]
        for home in ("cpu", folder):
            check(build(tied=True), rows, mesh, device, home, num_slices=4)
            check(build(), rows, mesh, device, home, num_slices=3, num_microbatches=2)
            check_memory(mesh, device, home)
        words = [batch(seed).to(device) for seed in range(2)]
        if ranks == 1 or 4 % ranks == 0:  # as many rows on each rank, in halves of a batch
            check(Encoder(), words, mesh, device, "cpu", blocks="layers")
        if ranks > 1 and ranks % 2 == 0:
            two = init_device_mesh("cuda", (2, ranks // 2), mesh_dim_names=("replicate", "shard"))
            check(build(), rows, two, device, "cpu", num_slices=3)
    dist.destroy_process_group()
    print(f"rank {number} of {ranks} trained on {device}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
