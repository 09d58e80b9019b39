"""Ranks of which one fails, in forked children of one process.

Prints for each way to fail what each call of each rank raised.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from offload import OffloadModel
from tests.offload.mesh.forked import fork

#: Number of ranks, and which one fails, by the way in which it does.
WAYS = {"ends": (2, 0), "goes on": (2, 0), "all": (2, -1), "backward": (2, 0)}


class FailsOnce(nn.Linear):
    failure: Callable[[], None] | None = None

    def forward(self, x: Tensor) -> Tensor:
        failure, FailsOnce.failure = FailsOnce.failure, None
        if failure is not None:
            failure()
        return super().forward(x)


def fail() -> None:
    raise ValueError("this layer fails")


def run(rank: int, way: str, folder: Path) -> list[str]:
    """What each call of one rank raised."""
    ranks, failing = WAYS[way]
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    dist.barrier()
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=8)), "cpu")
    layers = [FailsOnce(4, 4) for _ in range(6)]
    model = OffloadModel(layers, "cpu", folder, mesh=mesh, checkpoint_activation=True)
    x = torch.ones(2, 4)
    model(x)
    if failing in (rank, -1):
        FailsOnce.failure = fail
    raised = []
    for _ in range(3):
        try:
            if way == "backward":
                failure, FailsOnce.failure = FailsOnce.failure, None
                loss = model(x).sum()
                FailsOnce.failure = failure
                loss.backward()
            else:
                model(x)
        except BaseException as error:
            raised.append(f"{type(error).__name__}: {error}".splitlines()[0])
            if rank == failing and way == "ends":
                break
        else:
            raised.append("")
    return raised


def main(name: str) -> None:
    folder = Path(name)
    torch.set_num_threads(1)
    started = {}
    for way, (ranks, _) in WAYS.items():
        (folder / way).mkdir()
        started[way] = [fork(partial(run, rank, way, folder / way)) for rank in range(ranks)]
    print(json.dumps({way: [child.result() for child in children] for way, children in started.items()}))
