"""Inside frozen_weights what one call loaded serves the next; outside, every write is seen by the next call."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from tests.offload.side_by_side import drawn
from tests.offload.zoo import WIDTH, build

X = drawn(0, 3, WIDTH)


def infer(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model(X)
    return output


def loads(model: OffloadModel) -> int:
    """Loads of one call."""
    before = model.statistics().shard_loads
    infer(model)
    return model.statistics().shard_loads - before


def test_with_frozen_weights_inference_loads_nothing_once_all_fits(home: str) -> None:
    bare = build(["linear", "linear"])
    model, tight = (
        OffloadModel(copy.deepcopy(bare), "cpu", home, 4, True, memory=MemoryPolicy.fixed(slots=slots))
        for slots in (4, 3)
    )
    held = list(model.parameters())  # a list of parameters does not matter
    with model.frozen_weights():
        assert [loads(model) for _ in range(4)] == [4, 0, 0, 0]
        assert torch.equal(infer(model), infer(bare))
        with torch.inference_mode():
            model(X)
        model.eval()
        assert loads(model) == 0
    assert [loads(model) for _ in range(2)] == [4, 4]  # outside, they might have been written to
    with tight.frozen_weights():
        assert [loads(tight) for _ in range(3)][1:] == [2, 2]  # the cache of a cycle that does not fit
    del held


@pytest.mark.parametrize("resident", [None, "*.bias"])
def test_gradients_take_the_room_of_what_trains(tmp_path: Path, resident: str | None) -> None:
    """Of parameters that stay on the compute device nothing is in files.

    The room shrinks and grows where parameters are frozen and thawed between steps, and no more is written.
    """
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = OffloadModel(layers, "cpu", tmp_path, 4, True, resident=resident)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW)
    for thawed in [False, True, False]:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(thawed or "bias" in name)
        trained = [p for p in model.parameters() if p.requires_grad]
        before = model.statistics()
        model(torch.randn(6, 64)).pow(2).mean().backward()
        optimizer.step()
        optimizer.synchronize()
        after = model.statistics()
        nbytes = sum(p.nbytes for p in trained if p.dim() > 1 or not resident)
        assert thawed or {p.grad.untyped_storage().nbytes() for p in trained} == {64 * 4}
        assert after.bytes_stored - before.bytes_stored == nbytes
        assert after.update_bytes_written - before.update_bytes_written <= 3 * nbytes + 4096 * 4
        optimizer.zero_grad()
