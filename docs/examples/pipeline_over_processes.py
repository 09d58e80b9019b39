"""Trains a pipeline whose stages run in several processes, and whose layers are loaded from storage while they run.

::

    torchrun --standalone --nproc-per-node 2 docs/examples/pipeline_over_processes.py

Each stage of ``torch.distributed.pipelining`` is an ``OffloadModel``: a process holds the weights of a few layers at a
time, and those of its stages at home. ``Pipe`` is the pipeline within one process.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

from offload import OffloadModel, OffloadOptimizer

MICROBATCHES = 4


def build() -> list[nn.Module]:
    """All layers; a process keeps those of its stages."""
    torch.manual_seed(0)
    return [nn.Linear(16, 16) if k % 2 == 0 else nn.GELU() for k in range(15)] + [nn.Linear(16, 1)]


def stages_of(rank: int, ranks: int, stages_per_rank: int) -> dict[int, OffloadModel]:
    """The stages of a rank by their number: stage k is on rank k modulo ``ranks``."""
    layers, count = build(), ranks * stages_per_rank
    size = len(layers) // count
    mine = range(rank, count, ranks)
    return {
        k: OffloadModel(layers[k * size : (k + 1) * size], "cpu", num_slices=2, checkpoint_activation=True)
        for k in mine
    }


def schedule_of(models: dict[int, OffloadModel], ranks: int) -> Schedule1F1B | ScheduleInterleaved1F1B:
    """1F1B with one stage on each rank, else interleaved 1F1B. Gradients are those of the mean over all rows."""
    count = ranks * len(models)
    stages = [PipelineStage(model, k, count, torch.device("cpu")) for k, model in models.items()]
    if len(stages) == 1:
        return Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
    return ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)


def run(schedule: Schedule1F1B | ScheduleInterleaved1F1B, rank: int, ranks: int, x: Tensor, y: Tensor) -> float | None:
    """One forward and backward of a batch. Returns the loss on the last rank."""
    losses: list[Tensor] = []
    inputs = (x,) if rank == 0 else ()  # the first stage takes the batch, the last one the targets
    if rank == ranks - 1:
        schedule.step(*inputs, target=y, losses=losses)
        return float(torch.stack(losses).detach().mean())
    schedule.step(*inputs)
    return None


def main() -> None:
    """Trains with both schedules."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(32, 16, generator=torch.Generator().manual_seed(1))
    y = x[:, :1].sin()
    for stages_per_rank in (1, 2):
        models = stages_of(rank, ranks, stages_per_rank)
        optimizers = [OffloadOptimizer(model, torch.optim.AdamW, lr=1e-2) for model in models.values()]
        schedule = schedule_of(models, ranks)
        losses = []
        for _ in range(20):
            losses.append(run(schedule, rank, ranks, x, y))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        if rank == ranks - 1:
            print(f"{type(schedule).__name__}: loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
