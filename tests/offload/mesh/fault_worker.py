"""What each of two processes does in the tests of faults in ``test_mesh``: rank 0 fails in the middle of a forward.

Run as ``python -m tests.offload.mesh.fault_worker RANK WORLD FOLDER WAY``. Each rank prints what its last call raised.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from offload import OffloadModel


class FailsOnce(nn.Linear):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if FailsOnce.fails:
            FailsOnce.fails = False
            raise ValueError("this layer fails")
        return super().forward(x)


def main(rank: int, ranks: int, folder: Path, way: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks)
    # Ranks start at different times, and wait for each other here; collectives of the model wait for less.
    dist.barrier()
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=8)), "cpu")
    layers = [FailsOnce(4, 4) for _ in range(6)]
    model = OffloadModel(layers, "cpu", folder, mesh=mesh, checkpoint_activation=True)
    x = torch.ones(2, 4)
    model(x)
    FailsOnce.fails = rank == 0
    for call in range(3):
        try:
            model(x)
        except BaseException as error:
            print(f"{call} {type(error).__name__}: {error}".splitlines()[0], flush=True)
            if rank == 0 and way == "ends":
                raise SystemExit(1) from error
        else:
            print(f"{call} ended", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
