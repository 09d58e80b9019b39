"""Trains in several processes and saves every few steps; started again, it goes on from the last checkpoint.

::

    torchrun --standalone --nproc-per-node 2 --max-restarts 3 docs/examples/resume_after_faults.py FOLDER

If a process dies, torchrun ends the others and starts all of them again, up to three times. Started by hand later, also
with another number of processes, it goes on as well: losses are those of a run without the fault.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from offload import OffloadModel, OffloadOptimizer


def begin() -> None:
    """Makes the process group of this attempt.

    Attempts of one torchrun share a store, where ranks would find addresses of the attempt before: each has a part of
    its own.
    """
    store, rank, ranks = next(dist.rendezvous("env://"))
    attempt = dist.PrefixStore(f"attempt{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    dist.init_process_group("gloo", store=attempt, rank=rank, world_size=ranks)


def last_step(folder: Path) -> int:
    """The step of the last checkpoint that is complete, 0 if there is none.

    DCP writes ``.metadata`` when all ranks have written their parts.
    """
    steps = [int(path.parent.name.removeprefix("step")) for path in folder.glob("step*/.metadata")]
    return max(steps, default=0)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    """The rows of all ranks. They depend on the step alone, so a run that resumes sees what the other would have."""
    inputs = torch.randn(24, 16, generator=torch.Generator().manual_seed(step))
    return inputs, inputs[:, :1].sin()


def train(
    folder: Path, steps: int, save_every: int, home: str = "cpu", report: Callable[[int, float], None] = print
) -> None:
    """Trains from the last checkpoint in ``folder`` up to ``steps``; rank 0 reports each step and its loss."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rank, ranks = mesh.get_local_rank(), mesh.size()
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 1))
    model = OffloadModel(layers, "cpu", home, num_slices=3, checkpoint_activation=True, mesh=mesh)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-2, max_norm=1.0)

    def states() -> dict[str, object]:
        return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))

    begin = [last_step(folder)]
    dist.broadcast_object_list(begin)  # all ranks resume from the checkpoint that rank 0 found
    if begin[0]:
        loaded = states()
        dcp.load(loaded, checkpoint_id=folder / f"step{begin[0]}")
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])

    for step in range(begin[0], steps):
        inputs, targets = (rows.chunk(ranks)[rank] for rows in batch_of(step))
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(mean := loss.detach() / ranks)
        if rank == 0:
            report(step, float(mean))
        if (step + 1) % save_every == 0 or step + 1 == steps:
            dcp.save(states(), checkpoint_id=folder / f"step{step + 1}")
            if rank == 0:  # the one before is needed until this one is complete
                for path in folder.glob("step*"):
                    if path.name != f"step{step + 1}":
                        shutil.rmtree(path, ignore_errors=True)
    model.close()


if __name__ == "__main__":
    begin()
    folder = Path(sys.argv[1])
    train(folder, steps=20, save_every=4, report=lambda step, loss: print(f"step {step}: loss {loss:.6f}", flush=True))
    dist.destroy_process_group()
