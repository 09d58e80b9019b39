"""Opens ``mesh=`` of an ``OffloadModel``: checks it, and makes the parts of the engine that differ with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload.mesh.gradients import LocalSums, MeshGradientOffload
from offload.mesh.ranks import Ranks, check_devices, transport_for
from offload.mesh.shard import MeshShard, make_mesh_shards
from offload.mesh.sharded import MeshParameters, resident_parts
from offload.meta_device.materialize import Values
from offload.storage import Tier
from offload.streaming.lane import CopyLanes, ThreadCopyLane
from offload.streaming.shard import Shard
from offload.telemetry.statistics import Meter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Sharding", "check_mesh", "least_of_ranks"]


def check_mesh(
    mesh: Any,
    divide_factor: float | None,
    device: torch.device,
    refused: Mapping[str, object],
) -> DeviceMesh | None:
    """The mesh, if it has more than one rank: the engine of one rank is that without a mesh.

    ``refused``: arguments of the model that are not supported with a mesh, by name; None where they are not given.
    Raises TypeError or ValueError for what cannot be used, with a line for each.
    """
    if divide_factor is not None:
        if mesh is None:
            raise ValueError("gradient_divide_factor is the divisor of gradients that ranks sum; pass mesh= with it")
        if isinstance(divide_factor, bool) or not isinstance(divide_factor, (int, float)):
            raise TypeError(f"expected a number, got gradient_divide_factor={divide_factor!r}")
        if not divide_factor > 0 or math.isinf(divide_factor):
            raise ValueError(f"expected a positive number, got gradient_divide_factor={divide_factor!r}")
    if mesh is None:
        return None
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError(
            "mesh= needs an initialised process group: start the processes by torchrun and make the mesh by "
            "torch.distributed.init_device_mesh"
        )
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"expected a torch.distributed.DeviceMesh, got {type(mesh).__name__} (mesh)")
    wrong = []
    if mesh.ndim > 2:
        wrong.append(f"expected a mesh of one dimension (shard) or two (replicate, shard), got {mesh.ndim} (mesh)")
    elif mesh.size() == 1:
        if divide_factor not in (None, 1):
            raise ValueError(
                f"a mesh of one rank has nothing to sum, got gradient_divide_factor={divide_factor}; scale the loss"
            )
        return None  # the engine without a mesh
    backends = dist.get_backend_config(mesh.get_group(mesh.ndim - 1))
    unfit = check_devices(mesh.device_type, backends, device)
    if unfit is not None:
        wrong.append(unfit)
    given = [name for name, value in refused.items() if value is not None]
    wrong += [f"{name} does not support mesh= yet; leave it out" for name in given]
    if wrong:
        raise ValueError("\n".join(wrong))
    return mesh


def least_of_ranks(mesh: DeviceMesh, numbers: Sequence[int | None]) -> list[int | None]:
    """The least of each of the numbers that the ranks of a mesh were given; None if none was given. On all ranks."""
    largest = torch.iinfo(torch.int64).max
    least = torch.tensor([largest if n is None else n for n in numbers], device=mesh.device_type)
    for dimension in range(mesh.ndim):
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=mesh.get_group(dimension))
    return [None if n == largest else n for n in least.tolist()]


class Sharding:
    """What the engine makes in another way with a mesh."""

    def __init__(self, mesh: DeviceMesh, divide_factor: float | None, meter: Meter, device: torch.device) -> None:
        self.ranks = Ranks(mesh, divide_factor, meter, transport_for(device))
        self._sums = LocalSums(meter)

    def open_lanes(self, device: torch.device) -> CopyLanes:
        """Lanes of copies: loads are collectives.

        Threads also on a device: what a drain copies was allocated on the stream of the lane of ranks, and may be freed
        once the host knows that it is copied.
        """
        return CopyLanes(self.ranks.lane, ThreadCopyLane("drain", device), ThreadCopyLane("boundary", device))

    def make_shards(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        cuts: Sequence[int],
        tier: Tier,
        dtype: torch.dtype | None,
        values: Mapping[Tensor, Values],
        resident: Shard | None,
    ) -> list[Shard]:
        """See :func:`make_mesh_shards`. ``resident``: the owner of parameters that stay on the device of each rank."""
        whole = {} if resident is None else resident_parts(resident, self.ranks)
        #: For each of them, the parameter that layers use: the stored one, and what it is.
        self._resident = {p: (s.parameter, part) for p, (_, s, part) in whole.items()}
        return [*make_mesh_shards(layers, cuts, tier, dtype, values, ranks=self.ranks, whole_parts=whole)]

    def gradient_offload(self, shards: Sequence[Shard], **choices: Any) -> MeshGradientOffload:
        """What reduces and stores gradients."""
        return MeshGradientOffload(shards, ranks=self.ranks, sums=self._sums, **choices)

    def public(self, shards: Sequence[Shard]) -> MeshParameters:
        """The DTensors that users see; all ranks have compared their parameters then."""
        of_mesh = [shard for shard in shards if isinstance(shard, MeshShard)]
        public = MeshParameters(of_mesh, self.ranks, self._resident, self._sums)
        public.check_model()
        return public
