"""``docs/examples/pipeline_over_processes.py`` in forked ranks of one process, compared with the plain model.

Run as ``python -m tests.offload.mesh.pipeline_worker FOLDER``; prints the claims that do not hold, by claim.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.tensor import DTensor

from offload import OffloadModel, OffloadOptimizer
from tests.offload.mesh.forked import fork

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "pipeline_over_processes.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location("pipeline_over_processes", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(16, 16, generator=torch.Generator().manual_seed(2))
    return x, x[:, :1].cos()


def compare(models: dict[int, nn.Module], stages: int, steps: int = 2, tolerance: float = 1e-6) -> None:
    """The gradients of each stage with those of the plain model, accumulated over so many steps."""
    layers = example().build()
    x, y = batch()
    for _ in range(steps):
        nn.functional.mse_loss(nn.Sequential(*layers)(x), y).backward()
    size = len(layers) // stages
    most = max(float(p.grad.abs().max()) for layer in layers for p in layer.parameters())
    for k, model in models.items():
        plain = [p for layer in layers[k * size : (k + 1) * size] for p in layer.parameters()]
        for p, q in zip(model.parameters(), plain, strict=True):
            assert p.grad is not None, k
            found = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            assert float((found - q.grad).abs().max()) <= tolerance * most, (k, found, q.grad)


def gradients_of_example(stages_per_rank: int) -> None:
    """Those of one step, and with what is left from a step before."""
    module, rank, ranks = example(), dist.get_rank(), dist.get_world_size()
    models = module.stages_of(rank, ranks, stages_per_rank)
    schedule = module.schedule_of(models, ranks)
    module.run(schedule, rank, ranks, *batch())
    compare(models, ranks * stages_per_rank, steps=1)


def trains_as_the_plain_model(stages_per_rank: int) -> None:
    """With ``OffloadOptimizer`` and clipping."""
    module, rank, ranks = example(), dist.get_rank(), dist.get_world_size()
    models = module.stages_of(rank, ranks, stages_per_rank)
    optimizers = [OffloadOptimizer(m, torch.optim.AdamW, lr=0.01, max_norm=0.01) for m in models.values()]
    schedule = module.schedule_of(models, ranks)
    layers, (x, y) = module.build(), batch()
    size = len(layers) // (ranks * stages_per_rank)
    parts = [layers[k : k + size] for k in range(0, len(layers), size)]
    references = [torch.optim.AdamW([p for m in part for p in m.parameters()], lr=0.01) for part in parts]
    for _ in range(3):
        loss = module.run(schedule, rank, ranks, x, y)
        expected = nn.functional.mse_loss(nn.Sequential(*layers)(x), y)
        assert loss is None or abs(loss - float(expected)) < 1e-5
        expected.backward()
        for part, reference in zip(parts, references, strict=True):
            nn.utils.clip_grad_norm_([p for m in part for p in m.parameters()], 0.01)
            reference.step()
            reference.zero_grad()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for k, model in models.items():
        plain = [p for m in parts[k] for p in m.parameters()]
        for p, q in zip(model.parameters(), plain, strict=True):
            assert float((p - q).detach().abs().max()) < 1e-5


def stages_are_sharded_over_a_mesh() -> None:
    """(stages, ranks that store a stage together): each row of the mesh takes its part of the batch."""
    module = example()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    stage, shard = mesh["stage"], mesh["shard"]
    rank = stage.get_local_rank()
    part = module.build()[rank * 8 : rank * 8 + 8]
    model = OffloadModel(part, "cpu", num_slices=2, checkpoint_activation=True, mesh=shard)
    x, y = (rows.chunk(2)[shard.get_local_rank()] for rows in batch())
    made = PipelineStage(model, rank, 2, torch.device("cpu"), group=stage.get_group())
    schedule = Schedule1F1B(made, 4, loss_fn=nn.functional.mse_loss)
    module.run(schedule, rank, 2, x, y)
    compare({rank: model}, 2, steps=1)


def zero_bubble_is_right_or_refused(mesh: bool) -> None:
    """Its backward asks for the gradients of inputs first and for those of weights later, by ``autograd.grad``."""
    module, rank, ranks = example(), dist.get_rank(), dist.get_world_size()
    models = module.stages_of(rank, ranks, 2)
    stages = [PipelineStage(model, k, 4, torch.device("cpu")) for k, model in models.items()]
    schedule = ScheduleInterleavedZeroBubble(stages, 4, loss_fn=nn.functional.mse_loss)
    module.run(schedule, rank, ranks, *batch())
    compare(models, 4, steps=1)


CLAIMS: dict[int, dict[str, Callable[[], None]]] = {
    2: {
        "gradients_of_1f1b": partial(gradients_of_example, 1),
        "gradients_of_interleaved_1f1b": partial(gradients_of_example, 2),
        "training_by_1f1b": partial(trains_as_the_plain_model, 1),
        "training_by_interleaved_1f1b": partial(trains_as_the_plain_model, 2),
        "zero_bubble": partial(zero_bubble_is_right_or_refused, False),
    },
    4: {"sharded_stages": stages_are_sharded_over_a_mesh},
}


def check(rank: int, ranks: int, store: Path) -> dict[str, str]:
    how: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=30)}
    dist.init_process_group("gloo", f"file://{store}", **how)
    broken = {}
    for name, claim in CLAIMS[ranks].items():
        try:
            claim()
            broken[name] = ""
        except BaseException:  # such as DCP's
            broken[name] = traceback.format_exc()
    return broken


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    found: dict[str, str] = {}
    for ranks in CLAIMS:
        for status, broken in [
            child.result()
            for child in [fork(partial(check, rank, ranks, folder / f"store{ranks}")) for rank in range(ranks)]
        ]:
            assert status == 0
            for name, text in broken.items():
                found[name] = found.get(name, "") + text
    print(json.dumps(found))


if __name__ == "__main__":
    main()
