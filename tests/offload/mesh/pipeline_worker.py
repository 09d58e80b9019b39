"""``docs/examples/pipeline_over_processes.py`` in forked ranks of one process, compared with the plain model."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor

from offload import OffloadModel, OffloadOptimizer
from tests.examples import load_example
from tests.offload.side_by_side import advance

EXAMPLE = "pipeline_over_processes"


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    return x, x[:, :1].cos()


def assert_equal_gradients(models: dict[int, nn.Module], stages: int) -> None:
    """The gradients of each stage with those of the plain model."""
    layers = load_example(EXAMPLE).build()
    x, y = batch()
    nn.functional.mse_loss(nn.Sequential(*layers)(x), y).backward()
    size = len(layers) // stages
    most = max(float(p.grad.abs().max()) for layer in layers for p in layer.parameters())
    for k, model in models.items():
        plain = [p for layer in layers[k * size : (k + 1) * size] for p in layer.parameters()]
        for p, q in zip(model.parameters(), plain, strict=True):
            assert p.grad is not None, k
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert float((found - q.grad).abs().max()) <= 1e-6 * most, (k, found, q.grad)


def trains_as_the_plain_model(stages_per_rank: int, *, zero_bubble: bool = False) -> None:
    """With ``OffloadOptimizer`` and clipping.

    ``zero_bubble`` asks for the gradients of inputs first and for those of weights later, by ``autograd.grad``.
    """
    module, rank, ranks = load_example(EXAMPLE), dist.get_rank(), dist.get_world_size()
    models = module.stages_of(rank, ranks, stages_per_rank)
    optimizers = [OffloadOptimizer(m, torch.optim.AdamW, lr=0.01, max_norm=0.01) for m in models.values()]
    schedule = module.schedule_of(models, ranks)
    if zero_bubble:
        made = [PipelineStage(model, k, 4, torch.device("cpu")) for k, model in models.items()]
        schedule = ScheduleInterleavedZeroBubble(made, 4, loss_fn=nn.functional.mse_loss)
    layers, (x, y) = module.build(), batch()
    size = len(layers) // (ranks * stages_per_rank)
    parts = [layers[k : k + size] for k in range(0, len(layers), size)]
    references = [torch.optim.AdamW([p for m in part for p in m.parameters()], lr=0.01) for part in parts]
    for step in range(3):
        loss = module.run(schedule, rank, ranks, x, y)
        if step == 0:
            assert_equal_gradients(models, len(parts))
        expected = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
        assert loss is None or abs(loss - float(expected)) < 1e-5
        expected.backward()
        for part, reference in zip(parts, references, strict=True):
            nn.utils.clip_grad_norm_([p for m in part for p in m.parameters()], 0.01)
            advance(reference)
        advance(*optimizers)
    for k, model in models.items():
        plain = [p for m in parts[k] for p in m.parameters()]
        for p, q in zip(model.parameters(), plain, strict=True):
            assert float((p - q).detach().abs().max()) < 1e-5


def stages_are_sharded_over_a_mesh() -> None:
    """(stages, ranks that store a stage together): each row of the mesh takes its part of the batch."""
    module = load_example(EXAMPLE)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage, shard = mesh["stage"], mesh["shard"]
    rank = stage.get_local_rank()
    part = module.build()[rank * 8 : rank * 8 + 8]
    model = OffloadModel(part, "cpu", num_slices=2, checkpoint_activation=True, mesh=shard)
    x, y = (rows.chunk(2)[shard.get_local_rank()] for rows in batch())
    made = PipelineStage(model, rank, 2, torch.device("cpu"), group=stage.get_group())
    schedule = Schedule1F1B(made, 4, loss_fn=nn.functional.mse_loss)
    module.run(schedule, rank, 2, x, y)
    assert_equal_gradients({rank: model}, 2)


def stages(folder: Path) -> list[tuple[int, dict[str, Callable[[], None]]]]:
    """By the number of ranks."""
    by_two: dict[str, Callable[[], None]] = {
        "training_by_1f1b": partial(trains_as_the_plain_model, 1),
        "training_by_interleaved_1f1b": partial(trains_as_the_plain_model, 2),
        "zero_bubble": partial(trains_as_the_plain_model, 2, zero_bubble=True),
    }
    return [(2, by_two), (4, {"sharded_stages": stages_are_sharded_over_a_mesh})]
