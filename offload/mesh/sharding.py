"""Opens ``mesh=`` of an ``OffloadModel``: checks it, and makes the parts of the engine that differ with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.mesh.gradients import MeshGradientOffload
from offload.mesh.public import ShardedParameters
from offload.mesh.ranks import Ranks
from offload.mesh.replicated import resident_parts
from offload.mesh.shard import MeshShard, make_mesh_shards
from offload.storage import DiskHome, Tier
from offload.streaming.lane import CopyLane, CopyLanes, ThreadCopyLane
from offload.streaming.layer_homes import LayerHomes
from offload.streaming.materialize import Values
from offload.streaming.shard import Shard
from offload.telemetry.statistics import Meter

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Sharding", "check_mesh", "least_of_ranks"]


def check_mesh(
    mesh: Any,
    divide_factor: float | None,
    device: torch.device,
    offload_device: object,
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
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
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
        _check_alone(divide_factor)
        return None
    if mesh.device_type != "cpu":
        wrong.append(
            f"expected a mesh of device_type 'cpu', where homes are, got {mesh.device_type!r}: "
            f"init_device_mesh('cpu', (ranks,))"
        )
    if device.type != "cpu":
        wrong.append(f"mesh= computes on the CPU only as yet, got device={str(device)!r}")
    if isinstance(offload_device, DiskHome) and offload_device.keep:
        wrong.append("DiskHome(keep=True) does not support mesh= yet; pass a directory, and save by dcp.save")
    given = [name for name, value in refused.items() if value is not None]
    wrong += [f"{name} does not support mesh= yet; leave it out" for name in given]
    if wrong:
        raise ValueError("\n".join(wrong))
    return mesh


def least_of_ranks(mesh: DeviceMesh, nbytes: int | None) -> int | None:
    """The least of the bytes that the ranks of a mesh were given; None if none was given any. On all ranks."""
    largest = torch.iinfo(torch.int64).max
    least = torch.tensor(largest if nbytes is None else nbytes)
    for dimension in range(mesh.ndim):
        torch.distributed.all_reduce(least, op=torch.distributed.ReduceOp.MIN, group=mesh.get_group(dimension))
    found = int(least)
    return None if found == largest else found


def _check_alone(divide_factor: float | None) -> None:
    """Raises ValueError if one rank would not be the engine without a mesh."""
    if divide_factor not in (None, 1):
        raise ValueError(
            f"a mesh of one rank has nothing to sum, got gradient_divide_factor={divide_factor}; scale the loss"
        )


class Sharding:
    """What the engine makes in another way with a mesh."""

    def __init__(self, mesh: DeviceMesh, divide_factor: float | None, meter: Meter) -> None:
        self.ranks = Ranks(mesh, divide_factor, meter)

    def open_lanes(self, device: torch.device) -> CopyLanes:
        """Lanes of copies: loads are collectives."""
        drain: CopyLane = ThreadCopyLane("drain", device)
        return CopyLanes(self.ranks.lane, drain, ThreadCopyLane("boundary", device))

    def make_shards(
        self,
        layers: Sequence[tuple[str, nn.Module]],
        cuts: Sequence[int],
        tier: Tier,
        dtype: torch.dtype | None,
        values: Mapping[Tensor, Values],
        resident: Shard | None,
    ) -> tuple[list[Shard], LayerHomes]:
        """See :func:`make_mesh_shards`. Homes are those of the shards, so these cannot be cut otherwise.

        ``resident``: the owner of parameters that stay on the compute device, on each rank.
        """
        whole = {} if resident is None else resident_parts(resident, self.ranks)
        #: For each of them, the parameter that layers use, and the stored one.
        self._resident = {p: (s.parameter, part) for p, (_, s, part) in whole.items()}
        made = make_mesh_shards(layers, cuts, tier, dtype, values, ranks=self.ranks, whole_parts=whole)
        shards: list[Shard] = list(made)
        return shards, LayerHomes(layers, tier, dtype, None)

    def gradient_offload(self, shards: Sequence[Shard], **choices: Any) -> MeshGradientOffload:
        """What reduces and stores gradients."""
        return MeshGradientOffload(shards, ranks=self.ranks, **choices)

    def public(self, shards: Sequence[Shard]) -> ShardedParameters:
        """The DTensors that users see; all ranks have compared their parameters then."""
        of_mesh = [shard for shard in shards if isinstance(shard, MeshShard)]
        public = ShardedParameters(of_mesh, self.ranks, self._resident)
        public.check_model()
        return public
