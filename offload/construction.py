"""Makes what an offloaded model consists of from its arguments: homes of its layers, lanes, the engine."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload.arguments import check_choices, check_gradient_dtype, check_separate, compute_device, layers_of
from offload.blocks.find import BlockNames, Blocks, find_blocks, modules_outside, parameters_outside, with_rest
from offload.blocks.own_forward import OwnForward
from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.files.pretrained import Pretrained
from offload.forms.quantised import check_storable, is_taken_apart, separate, stored_tensors
from offload.forms.weight_forms import WeightForm
from offload.limits import GAPS_SHARE, MemoryLimits
from offload.memory import Needs, layout_of, limits_for, memory_of, recomputes
from offload.mesh.engine import MeshEngine
from offload.mesh.sharding import Sharding, check_mesh
from offload.meta_device.materialize import Values, move_buffers
from offload.persistence import PersistentHome
from offload.planner.memory_planner import plan_memory
from offload.planner.outside import bytes_staying
from offload.policy import MemoryPolicy, numbers_of
from offload.public_parameters import PublicParameters
from offload.rollback import Rollback
from offload.running import LayersInOrder
from offload.storage import DiskHome, Tier, home_of, open_tier
from offload.streaming.current_values import leave_pending_updates, read_current_values
from offload.streaming.lane import CopyLanes, open_lanes
from offload.streaming.layer_homes import make_shards
from offload.streaming.resident import chosen, chosen_form, resident_shard
from offload.streaming.shard import round_gradients
from offload.streaming.streamer import Streamer
from offload.telemetry.peak import anonymous_bytes
from offload.telemetry.statistics import Meter
from pipe.process import finalize_here
from pipe.torch_private.amp import complete_copies_of_grad_scalers
from pipe.torch_private.tracing import import_compiler

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["Arguments", "Offloaded", "construct"]

#: States of an optimizer for each trained parameter that are counted before there is one: those of Adam.
STATES_EXPECTED = 2


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """Arguments of :func:`offload.offload` besides the model; a copy is made with those of its original."""

    device: torch.device | str | int
    offload_device: torch.device | str | os.PathLike[str]
    num_slices: int | None
    checkpoint_activation: bool | None
    num_microbatches: int
    memory: MemoryPolicy | int | str | Mapping[str, int | str] | None
    param_dtype: torch.dtype | None
    store_dtype: torch.dtype | str | None
    pretrained: Pretrained | str | os.PathLike[str] | None
    blocks: Blocks | BlockNames | None
    mesh: DeviceMesh | None
    gradient_divide_factor: float | None
    gradient_dtype: torch.dtype | None
    accumulate_in_gradient_dtype: bool
    resident: str | Sequence[str] | None
    #: Layers of each shard, of a copy; and the class of which the model is to be one.
    _cuts: list[int] | None
    _base: type[Any]


@dataclass
class Offloaded:
    """What an offloaded model has. Nothing here refers to the model, so that one that is dropped is freed at once."""

    #: The class that the model had.
    kind: type[nn.Module]
    #: For a copy.
    arguments: Arguments
    device: torch.device
    memory_limits: MemoryLimits | None
    persistent_home: PersistentHome
    homes: ModelHomes
    calls: LayersInOrder | OwnForward
    finalizer: Callable[[], Any]


def construct(
    model: nn.Module, given: Arguments, undo: contextlib.ExitStack, *, in_order: bool, one_each: bool
) -> Offloaded:
    """Moves the layers of ``model`` to their homes, and makes what runs them.

    Args:
        model: any module; its class is not changed here.
        given: see :func:`offload.offload`, which also says what is raised.
        undo: gets what leaves the model as it was after a failure.
        in_order: whether its layers are called one after the other, and not by its own forward.
        one_each: whether each layer is a shard.
    """
    if given.memory is not None:
        import_compiler()  # else the first optimizer does, and what it takes would be measured as the model's
    made_bytes = anonymous_bytes()
    device, offload_device, num_slices = compute_device(given.device), given.offload_device, given.num_slices
    if device.type == "cuda":
        complete_copies_of_grad_scalers()  # gradients are in host memory
    if not in_order and isinstance(given.memory, MemoryPolicy) and given.memory.activation_bytes is not None:
        raise ValueError(
            f"expected activation_bytes=None with blocks, got activation_bytes={given.memory.activation_bytes!r}; use "
            f"larger chunks"
        )
    named: Mapping[str, nn.Module] = layers_of(model) if in_order else find_blocks(model, given.blocks)
    outside = {} if in_order else parameters_outside(model, named)
    parameters = [(f"{k}.{path}", p) for k, layer in named.items() for path, p in layer.named_parameters()]
    check_storable(parameters, named.values(), device)
    check_storable([(name, p) for name, p in outside.items() if is_taken_apart(p)], [model], device)
    stored_parts = stored_tensors(named.items())
    quantised = [each.name for each in stored_parts if each.part_of is not None]
    refused: dict[str, Any] = {"a model with quantised weights": quantised or None, "store_dtype=": given.store_dtype}
    mesh = check_mesh(given.mesh, given.gradient_divide_factor, device, refused)
    staying = chosen(named, given.resident, offload_device, outside)
    form = chosen_form(given.store_dtype, stored_parts, staying, named.values(), offload_device)
    separate([model])
    plans = num_slices is None and given.checkpoint_activation is None and mesh is None
    # In another form, values of what streams are not those of what stays.
    finest = num_slices is None and form is None and given.gradient_dtype is None
    check_choices(num_slices, given.num_microbatches, given.param_dtype)
    check_gradient_dtype(given.gradient_dtype, accumulates=given.accumulate_in_gradient_dtype)
    memory = memory_of(given.memory, plans=plans, mesh=mesh, device=device)
    recompute = recomputes(memory, given.checkpoint_activation)
    ranks = 1 if mesh is None else mesh.size(mesh.ndim - 1)
    replicas = 1 if mesh is None else mesh.size() // ranks
    offload_device = home_of(offload_device) or offload_device

    def needs_of(blocks: Mapping[str, nn.Module], states: int = 0) -> Needs:
        around = [] if in_order else modules_outside(model, blocks).values()
        return Needs(
            [*blocks.values()],
            None if memory is None else memory.slots,
            device=device,
            on_disk=home_of(offload_device) is not None,
            param_dtype=given.param_dtype,
            outside=bytes_staying(around, staying, given.param_dtype, states=states),
            ranks=ranks,
            replicas=replicas,
            apart=not in_order,
            form=form,
        )

    limit = None if memory is None else numbers_of(memory, device)[0]
    # A kept home is laid out by the blocks, and opened with any memory.
    if finest and not in_order and limit and not (isinstance(offload_device, DiskHome) and offload_device.keep):
        named = _with_more(model, named, limit, needs_of, given.resident)
    check_separate(stored_tensors(named.items()))
    if one_each if in_order else num_slices is None:
        num_slices = len(named)
    needs = needs_of(named)
    cuts, policy = layout_of(memory, needs, num_slices, given._cuts)
    stored: Mapping[torch.Tensor, Any] = {}
    if given.pretrained is not None:
        files = given.pretrained if isinstance(given.pretrained, Pretrained) else Pretrained(given.pretrained)
        stored, _ = files.match({"": model})
    copied = replace(
        given,
        device=device,
        offload_device=offload_device.for_a_copy() if isinstance(offload_device, DiskHome) else offload_device,
        num_slices=num_slices,
        checkpoint_activation=recompute,
        memory=memory,
        pretrained=None,
        blocks=None if in_order else BlockNames(tuple(named)),
        mesh=mesh,
    )
    # Not the model, which is one of them: one that is dropped is freed at once.
    around = weakref.WeakValueDictionary({} if in_order else modules_outside(model, named))
    calls = LayersInOrder(named) if in_order else OwnForward(model, named, around, device, given.param_dtype)
    meter = Meter(device)
    sharding = None if mesh is None else Sharding(mesh, given.gradient_divide_factor, meter, device)
    tier = open_tier(offload_device, device, keeps=sharding is None)
    # A failure from here on, such as a full disk or an interrupt, leaves the layers as they were.
    undo.callback(tier.close)
    memory_limits = None if memory is None else limits_for(memory, cuts, needs, meter)
    if memory_limits is not None:
        undo.callback(memory_limits.release)
    home = PersistentHome(tier, named, stored, around)
    # With a mesh, homes do not hold whole values to restore.
    every = {*model.parameters()}
    replaced = {*home.values} if sharding is None else every
    if form is not None:
        replaced |= {p for p in every if form.stores(p) and not p.is_meta}  # homes round them
    undo.callback(Rollback(model, replaced).restore)
    # A copy that changes the type is converted on the host, which must not block this thread.
    blocking = tier.blocking_io or given.param_dtype is not None or form is not None
    lanes = sharding.open_lanes(device) if sharding else open_lanes(device, blocking_io=blocking)
    undo.callback(lanes.close)
    homes = _homes_of(
        named,
        cuts,
        home.values,
        given,
        sharding,
        staying=staying,
        form=form,
        policy=policy,
        device=device,
        tier=tier,
        lanes=lanes,
        meter=meter,
        recompute=recompute,
        layers_apart=not in_order,
    )
    calls.join(model, homes, home.values, undo.callback)
    # Of the homes, to which graphs refer: a backward still runs after the model is collected.
    shards = [weakref.ref(shard) for shard in homes.shards]
    close = partial(_close, lanes, tier)
    finalizer = finalize_here(homes, leave_pending_updates, shards, close)
    with homes.public.whole():
        calls.engine = (MeshEngine if homes.public.sharded else Engine)(homes, calls.forwards)
    homes.run_by(calls.engine)
    homes.public.recount(homes.shards, calls.engine.held())
    if memory is not None and memory_limits is not None and recompute:
        plan_memory(homes, memory_limits, memory, made_bytes)
    home.begin()
    calls.micro_batches = given.num_microbatches
    return Offloaded(
        kind=type(model),
        arguments=copied,
        device=device,
        memory_limits=memory_limits,
        persistent_home=home,
        homes=homes,
        calls=calls,
        finalizer=finalizer,
    )


def _homes_of(
    layers: Mapping[str, nn.Module],
    cuts: Sequence[int],
    values: Mapping[torch.Tensor, Values],
    given: Arguments,
    sharding: Sharding | None,
    *,
    staying: set[nn.Parameter],
    form: WeightForm | None,
    policy: MemoryPolicy,
    device: torch.device,
    tier: Tier,
    lanes: CopyLanes,
    meter: Meter,
    recompute: bool,
    layers_apart: bool,
) -> ModelHomes:
    """Moves the parameters of ``layers`` to their homes, in shards of ``cuts`` layers, and buffers to the device.

    ``values`` are the sources of parameters and buffers that are not read from the layers.
    """
    resident, dtype = resident_shard(layers, staying, len(cuts), device), given.param_dtype
    if resident is not None and resident.home is not None:
        meter.hold(resident.home.nbytes)
    if sharding is None:
        shards = make_shards([*layers.items()], cuts, tier, dtype, values, resident, form)
    else:
        shards = sharding.make_shards([*layers.items()], cuts, tier, dtype, values, resident)
    if given.gradient_dtype is not None:
        round_gradients(shards, given.gradient_dtype, accumulates=given.accumulate_in_gradient_dtype)
    move_buffers(layers.values(), device)
    streamer = Streamer(
        shards,
        slots=policy.slots or 2,
        device=device,
        tier=tier,
        lanes=lanes,
        meter=meter,
        own_slots=layers_apart,  # an embedding beside blocks is much larger than they are
    )
    if sharding is not None:
        streamer.gradient_offload = sharding.gradient_offload(
            shards, lane=lanes.drain, device=device, tier=tier, meter=meter
        )
    read_current_values(shards, streamer)
    return ModelHomes(
        shards,
        resident,
        PublicParameters() if sharding is None else sharding.public(shards),
        streamer,
        policy=policy,
        device=device,
        tier=tier,
        lanes=lanes,
        meter=meter,
        recompute=recompute,
        param_dtype=dtype,
        layers_apart=layers_apart,
    )


def _with_more(
    model: nn.Module,
    blocks: Mapping[str, nn.Module],
    limit: int,
    needs_of: Callable[..., Needs],
    resident: str | Sequence[str] | None,
) -> Mapping[str, nn.Module]:
    """``blocks``, and of the modules around them those that have to stream for a step to fit in ``limit`` bytes."""

    def needed(blocks: Mapping[str, nn.Module], states: int = STATES_EXPECTED) -> int:
        return needs_of(blocks, states)([1] * len(blocks))

    patterns = [resident] if isinstance(resident, str) else resident or ()
    found = with_rest(model, blocks, limit - limit // GAPS_SHARE, needed, patterns)
    # Without states, as the limit is checked, what stays may take less.
    return found if needed(found, 0) <= max(limit, needed(blocks, 0) - 1) else blocks


def _close(lanes: Any, tier: Any) -> None:
    lanes.close()
    tier.close()
