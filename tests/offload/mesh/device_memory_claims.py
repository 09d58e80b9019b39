"""Claims of ``mesh_worker`` about ``memory=`` where collectives are those of a device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import MemoryPolicy, OffloadOptimizer
from tests.offload.blocks.towers import Large
from tests.offload.mesh.graph_claims import a_limit_of_memory_is_planned_for_by_all_ranks_alike
from tests.offload.mesh.world import LateLane, World, batch, loss_of
from tests.offload.planning.test_peak_memory import Living
from tests.offload.side_by_side import advance


class LivingInBackward(Living):
    """Adds gradients in place, as autograd does where it sees no mode."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.add.Tensor and not torch.is_grad_enabled() and args[0].shape == args[1].shape:
            func = torch.ops.aten.add_.Tensor
        return super().__torch_dispatch__(func, types, args, kwargs)


def stack() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(256, 512), nn.Tanh(), nn.Linear(512, 256)) for _ in range(4)))


def a_step_on_a_device_holds_no_more_than_is_predicted(world: World) -> None:
    """Collectives run when they are waited for, so all that may be held at once is."""
    cases: list[tuple[nn.Module, Tensor, dict[str, Any]]] = [
        (stack(), torch.randn(8, 256), {"slices": 4}),
        # Nearly all of it is stored whole by each rank.
        (Large(words=20001, width=24), batch(0), {"slices": None, "blocks": "layers"}),
    ]
    policy = MemoryPolicy("64MiB", slots=2)  # a search would choose them by times
    for bare, rows, how in cases:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("offload.mesh.ranks.CollectiveLane", LateLane)
            model = world.model(bare, world.folder / "homes", memory=policy, **how)
        optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
        planner: Any = model._homes.steps.planner
        for planned in (False, True, True):
            with LivingInBackward() as living:
                loss_of(model(world.part(rows))).backward()
            advance(optimizer)
            if planned:
                predicted = planner._prediction.peak
                rise = predicted.memory - predicted.begin
                assert living.peak_bytes <= rise < 1.4 * living.peak_bytes, how
        model.close()


CLAIMS = [a_limit_of_memory_is_planned_for_by_all_ranks_alike, a_step_on_a_device_holds_no_more_than_is_predicted]
