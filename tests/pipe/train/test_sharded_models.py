"""Windows of gradient accumulation over models that torch shards: ``fully_shard`` and ``FullyShardedDataParallel``.

One rank shows it: what they keep of a backward that does not reduce is in no ``.grad`` there either.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pipe.train import TrainPipelineBase
from tests.programs import run_program

WAYS = ("fully_shard", "FullyShardedDataParallel")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, batch: Tensor) -> tuple[Tensor, Tensor]:
        output = self.layers(batch)
        return output.square().mean(), output


def trained(model: nn.Module) -> nn.Module:
    """After a full window of three batches, and one of two."""
    pipeline: Any = TrainPipelineBase(model, torch.optim.SGD(model.parameters(), lr=0.5), "cpu", grad_accum=3)
    batches = iter(torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0)))
    while True:
        try:
            pipeline.progress(batches)
        except StopIteration:
            return model


def main(way: str, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    torch.manual_seed(0)
    bare = Model()
    expected = [p.detach() for p in trained(copy.deepcopy(bare)).parameters()]
    if way == "fully_shard":
        mesh = init_device_mesh("cpu", (1,))
        for layer in (bare.layers[0], bare.layers[2], bare):
            fully_shard(layer, mesh=mesh)
        found: list[Any] = [p.full_tensor() for p in trained(bare).parameters()]  # type: ignore[attr-defined]
    else:
        whole = FullyShardedDataParallel(bare, use_orig_params=True, device_id=torch.device("cpu"))
        trained(whole)
        with FullyShardedDataParallel.summon_full_params(whole):
            found = [p.detach().clone() for p in whole.parameters()]
    dist.destroy_process_group()
    for p, q in zip(found, expected, strict=True):
        assert torch.allclose(p.detach().reshape(q.shape), q, atol=1e-6), float((p.reshape(q.shape) - q).abs().max())


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="needs a torch built with gloo")
@pytest.mark.parametrize("way", WAYS)
def test_windows_step_with_the_mean_of_their_batches_the_partial_one_included(way: str, tmp_path: Path) -> None:
    code = f"import sys; from {__name__} import main; main(*sys.argv[1:])"
    done = run_program(code, way, tmp_path, seconds=120)
    assert done.status == 0, done.errors
