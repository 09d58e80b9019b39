"""Resolves the arguments of ``OffloadModel`` that concern memory: shards and slots, the policy, and its limits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.arguments import layer_bytes
from offload.forms.weight_forms import WeightForm
from offload.limits import HOST, MemoryLimits, check_place, limits_of
from offload.mesh.sharding import least_of_ranks
from offload.mesh.traffic import bytes_beside_one_process, least_exchange_bytes
from offload.partition import cut_layers, cut_within
from offload.planning.step_bytes import step_bytes
from offload.planning.step_model import Choice, StepModel
from offload.policy import DEFAULT_MEMORY, PLACES, MemoryPolicy, numbers_of, policy_of
from offload.storage.buffer import has_own_memory
from offload.telemetry.statistics import Meter
from offload.units import shown_bytes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Needs", "layout_of", "limits_for", "memory_of", "recomputes"]

#: Device bytes for boundaries where the user sets none.
DEFAULT_BOUNDARY_BYTES = 64 << 20
#: Shards where neither their number nor a memory is given.
DEFAULT_SHARDS = 3


def memory_of(
    memory: Any, *, plans: bool, mesh: DeviceMesh | None = None, device: torch.device = HOST
) -> MemoryPolicy | None:
    """What the argument ``memory`` stands for; None: nothing bounds the memory.

    ``plans``: whether :data:`DEFAULT_MEMORY` stands for None: shards and recomputation are not given either. ``mesh``:
    its ranks, which compute on ``device``, take the least number that one of them was given for each place.
    Raises TypeError or ValueError for what is no memory.
    """
    policy = policy_of(DEFAULT_MEMORY if memory is None and plans else memory)
    if mesh is not None:  # also if this rank has no limit: the others would wait for it
        least = least_of_ranks(mesh, (None, None) if policy is None else numbers_of(policy, device))
        given_at = {place: n for place, n in zip(PLACES, least, strict=True) if n is not None}
        if policy is not None and given_at:
            on_host = not has_own_memory(device)  # one number then
            policy = replace(policy, memory=given_at["host"] if on_host else given_at)
    return policy


def recomputes(policy: MemoryPolicy | None, checkpoint_activation: bool | None) -> bool:
    """Whether cells are recomputed. Raises ValueError for a policy that needs it."""
    recompute = policy is not None if checkpoint_activation is None else bool(checkpoint_activation)
    if recompute or policy is None:
        return recompute
    if policy.graph_bytes:
        raise ValueError(
            f"graph_bytes needs checkpoint_activation=True, got graph_bytes={policy.graph_bytes}: without it all "
            f"graphs are kept anyway"
        )
    if policy.memory != "auto":
        raise ValueError(
            f"memory={policy.memory!r} also bounds activations, but checkpoint_activation=False keeps all of them; "
            f"leave it out, or pass memory='auto'"
        )
    return False


class Needs:
    """The least bytes that a model needs on the compute device and in host memory, for cuts into shards.

    Args:
        layers, device, param_dtype: of the model.
        slots: shards on the device at once; None: two.
        on_disk: whether homes are files.
        outside: bytes that stay on the compute device besides slots.
        ranks, replicas: processes that store a part each, and how often they store the model.
        apart: whether shards that are much larger than others have buffers of their own, see :func:`.slot_sizes`.
        form: in which homes store weights.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        slots: int | None,
        *,
        device: torch.device,
        on_disk: bool,
        param_dtype: torch.dtype | None,
        outside: int = 0,
        ranks: int = 1,
        replicas: int = 1,
        apart: bool = False,
        form: WeightForm | None = None,
    ) -> None:
        self.device = device
        self.slots = slots or 2
        #: Of what is in no shard, with gradients.
        self.outside = outside
        self.in_slot = layer_bytes(layers, param_dtype)
        self._at_home, self._ranks, self._replicas = layer_bytes(layers, form=form), ranks, replicas
        trained = (p for layer in layers for p in layer.parameters() if p.requires_grad)
        self._narrow = any(p.dtype.to_real().itemsize < torch.float32.itemsize for p in trained)
        self.gradients = layer_bytes(layers, trainable=True)
        self._apart = apart
        self.on_host = not has_own_memory(device)
        #: Bytes of homes in host memory.
        self.stored = 0 if on_disk else -(-(sum(self._at_home) + sum(self.gradients)) // ranks)
        if self.on_host and not on_disk:
            # A home in the memory in which layers compute takes gradients as they are.
            self.gradients = [0] * len(layers)

    def __call__(self, cuts: Sequence[int]) -> int:
        """On the compute device, without what layers allocate while they run."""
        ends = [0, *itertools.accumulate(cuts)]
        slots, gradients, at_home = (
            [sum(sizes[a:b]) for a, b in itertools.pairwise(ends)]
            for sizes in (self.in_slot, self.gradients, self._at_home)
        )
        model = StepModel(shards=len(cuts), slot_bytes=slots, gradient_bytes=gradients, own_slots=self._apart)
        streaming = step_bytes(model, Choice(min(self.slots, len(cuts)))).memory
        return streaming + self.outside + (self.stored if self.on_host else 0) + self._buffers(max(at_home, default=0))

    def _buffers(self, largest: int) -> int:
        """With several ranks: what they exchange takes, beside whole gradients; ``largest``: a shard at home."""
        if not self.on_host and self._ranks * self._replicas > 1:
            return least_exchange_bytes(largest, self._ranks, narrow=self._narrow)
        return 0 if self._ranks == 1 else bytes_beside_one_process(largest, self._ranks)

    def finest(self) -> list[int]:
        """The cuts that need least: a shard for each layer, or one, which needs one slot."""
        count = len(self.in_slot)
        return min(([1] * count, [count]), key=self)


def layout_of(
    given: MemoryPolicy | None, needs: Needs, num_slices: int | None, cuts: Sequence[int] | None
) -> tuple[Sequence[int], MemoryPolicy]:
    """Layers of each shard; and the policy with slots and bytes for boundaries, and zeros where it leaves bytes open.

    ``given``: None without bounds; ``num_slices``: of the model; ``cuts``: those of the model that is copied.
    Raises ValueError if a number is less than the least that these shards and slots need.
    """
    policy, slots, device, outside = given or MemoryPolicy(), needs.slots, needs.device, needs.outside
    on_device, on_host = numbers_of(policy, device)
    if cuts is None and num_slices is None and given is not None:
        cuts = cut_within(needs.in_slot, on_device)
        if on_device is not None and needs(cuts) > on_device:
            cuts = needs.finest()
    elif cuts is None:
        cuts = cut_layers(needs.in_slot, min(DEFAULT_SHARDS, len(needs.in_slot)) if num_slices is None else num_slices)
    least, finest = needs(cuts), needs.finest()
    finer = f"; num_slices={len(finest)} needs {shown_bytes(needs(finest))}" if needs(finest) < least else ""
    stays = f", {shown_bytes(outside)} of them for parameters in no shard and their gradients" if outside else ""
    check_place(device, on_device, least, f" with {len(cuts)} shards and {slots} slots{stays}{finer}")
    if not needs.on_host:
        check_place(torch.device("cpu"), on_host, needs.stored, " with homes in host memory; or pass a directory")
    boundaries = DEFAULT_BOUNDARY_BYTES if policy.boundary_bytes is None else policy.boundary_bytes
    if on_device is not None and policy.boundary_bytes is None:
        boundaries = min(boundaries, on_device - least)
    return cuts, replace(
        policy,
        slots=max(min(slots, len(cuts)), 2),
        boundary_bytes=boundaries,
        graph_bytes=policy.graph_bytes or 0,
        gradient_bytes=policy.gradient_bytes or 0,
        resident_bytes=policy.resident_bytes or 0,
    )


def limits_for(policy: MemoryPolicy, cuts: Sequence[int], needs: Needs, meter: Meter) -> MemoryLimits:
    """What the model may hold on the compute device and in host memory.

    ``meter``: counts what the model holds on the compute device.
    """
    stored, least = needs.stored, needs(cuts)
    homes = stored if needs.on_host else 0
    return limits_of(
        policy,
        needs.device,
        least=(least, least if needs.on_host else stored),
        held=(
            lambda: meter.held_bytes + homes + needs.outside + (meter.resting_bytes if needs.on_host else 0),
            lambda: stored + meter.resting_bytes,
        ),
    )
