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

from offload.arguments import (
    check_choices,
    check_gradient_dtype,
    check_separate,
    compute_device,
    layers_of,
    resident_parameters,
    stored_form,
)
from offload.blocks.embeddings_and_heads import with_embeddings_and_heads
from offload.blocks.find import BlockNames, Blocks, find_blocks, modules_outside, parameters_outside
from offload.blocks.own_forward import OwnForward
from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.files.pretrained import Pretrained
from offload.forms.quantised import check_storable, is_taken_apart, separate, stored_tensors
from offload.forms.weight_forms import WeightForm
from offload.layers_in_order import LayersInOrder
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
from offload.storage import DiskHome, Tier, home_of, open_tier
from offload.streaming.current_values import leave_pending_updates, read_current_values
from offload.streaming.gradient_offload import GradientOffload
from offload.streaming.lane import CopyLanes, open_lanes
from offload.streaming.layer_homes import make_shards
from offload.streaming.resident import resident_shard
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


@dataclass(frozen=True, kw_only=True)
class _Checked:
    """What the arguments stand for. Nothing is opened, and no value has moved."""

    model: nn.Module
    given: Arguments
    #: Whether the layers are called one after the other, and not by the model's own forward.
    in_order: bool
    #: The layers, or the blocks, by name.
    layers: Mapping[str, nn.Module]
    device: torch.device
    offload_device: torch.device | str | os.PathLike[str]
    mesh: DeviceMesh | None
    #: The parameters of layers that stay on the compute device.
    resident: set[nn.Parameter]
    #: In which homes store weights; None: as they are.
    form: WeightForm | None
    #: None: nothing bounds the memory.
    memory: MemoryPolicy | None
    recompute: bool

    def needs(self, layers: Mapping[str, nn.Module], states: int = 0) -> Needs:
        """The least bytes if these layers stream, with ``states`` of an optimizer for what stays on the device."""
        outside = [] if self.in_order else modules_outside(self.model, layers).values()
        ranks = 1 if self.mesh is None else self.mesh.size(self.mesh.ndim - 1)
        return Needs(
            [*layers.values()],
            None if self.memory is None else self.memory.slots,
            device=self.device,
            on_disk=isinstance(self.offload_device, DiskHome),
            param_dtype=self.given.param_dtype,
            outside=bytes_staying(outside, self.resident, self.given.param_dtype, states=states),
            ranks=ranks,
            replicas=1 if self.mesh is None else self.mesh.size() // ranks,
            apart=not self.in_order,
            form=self.form,
        )


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """How the layers are cut into shards."""

    #: What streams, by name: the layers, or the blocks and modules beside them that do not fit on the device.
    layers: Mapping[str, nn.Module]
    #: The number of shards, if it does not follow from the memory.
    num_slices: int | None
    #: Layers of each shard.
    cuts: Sequence[int]
    #: With the slots and bytes that were decided.
    policy: MemoryPolicy
    needs: Needs


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What holds and copies the bytes of the model; each is closed after a failure."""

    meter: Meter
    sharding: Sharding | None
    tier: Tier
    memory_limits: MemoryLimits | None
    persistent_home: PersistentHome
    lanes: CopyLanes


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
    checked = _check(model, given, in_order=in_order)
    cut = _cut(checked, one_each=one_each)
    stored: Mapping[torch.Tensor, Values] = {}
    if given.pretrained is not None:
        files = given.pretrained if isinstance(given.pretrained, Pretrained) else Pretrained(given.pretrained)
        stored, _ = files.match({"": model})
    # Not the model, which is one of them: one that is dropped is freed at once.
    around = weakref.WeakValueDictionary({} if in_order else modules_outside(model, cut.layers))
    device, dtype = checked.device, given.param_dtype
    calls = LayersInOrder(cut.layers) if in_order else OwnForward(model, cut.layers, around, device, dtype)
    # A failure from here on, such as a full disk or an interrupt, leaves the layers as they were.
    opened = _open(checked, cut, stored, around, undo)
    homes = _fill(checked, cut, opened)
    calls.join(model, homes, opened.persistent_home.values, undo.callback)
    # Of the homes, to which graphs refer: a backward still runs after the model is collected.
    shards = [weakref.ref(shard) for shard in homes.shards]
    close = partial(_close, opened.lanes, opened.tier)
    finalizer = finalize_here(homes, leave_pending_updates, shards, close)
    with homes.public.whole():
        calls.engine = (MeshEngine if homes.public.sharded else Engine)(homes, calls.forwards)
    homes.run_by(calls.engine)
    homes.public.recount(homes.shards, calls.engine.held())
    if checked.memory is not None and opened.memory_limits is not None and checked.recompute:
        plan_memory(homes, opened.memory_limits, checked.memory, made_bytes)
    opened.persistent_home.begin()
    calls.micro_batches = given.num_microbatches
    return Offloaded(
        kind=type(model),
        arguments=_for_a_copy(checked, cut),
        device=device,
        memory_limits=opened.memory_limits,
        persistent_home=opened.persistent_home,
        homes=homes,
        calls=calls,
        finalizer=finalizer,
    )


def _check(model: nn.Module, given: Arguments, *, in_order: bool) -> _Checked:
    """Raises TypeError or ValueError for arguments that cannot be used with the model."""
    device = compute_device(given.device)
    if device.type == "cuda":
        complete_copies_of_grad_scalers()  # gradients are in host memory
    if not in_order and isinstance(given.memory, MemoryPolicy) and given.memory.activation_bytes is not None:
        raise ValueError(
            f"expected activation_bytes=None with blocks, got activation_bytes={given.memory.activation_bytes!r}; use "
            f"larger chunks"
        )
    layers: Mapping[str, nn.Module] = layers_of(model) if in_order else find_blocks(model, given.blocks)
    outside = {} if in_order else parameters_outside(model, layers)
    parameters = [(f"{name}.{path}", p) for name, layer in layers.items() for path, p in layer.named_parameters()]
    check_storable(parameters, layers.values(), device)
    check_storable([(name, p) for name, p in outside.items() if is_taken_apart(p)], [model], device)
    stored = stored_tensors(layers.items())
    quantised = [tensor.name for tensor in stored if tensor.part_of is not None]
    refused: dict[str, Any] = {"a model with quantised weights": quantised or None, "store_dtype=": given.store_dtype}
    mesh = check_mesh(given.mesh, given.gradient_divide_factor, device, refused)
    resident = resident_parameters(layers, given.resident, given.offload_device, outside)
    form = stored_form(given.store_dtype, stored, resident, layers.values(), given.offload_device)
    separate([model])
    check_choices(given.num_slices, given.num_microbatches, given.param_dtype)
    check_gradient_dtype(given.gradient_dtype, accumulates=given.accumulate_in_gradient_dtype)
    plans = given.num_slices is None and given.checkpoint_activation is None and mesh is None
    memory = memory_of(given.memory, plans=plans, mesh=mesh, device=device)
    return _Checked(
        model=model,
        given=given,
        in_order=in_order,
        layers=layers,
        device=device,
        mesh=mesh,
        resident=resident,
        form=form,
        memory=memory,
        recompute=recomputes(memory, given.checkpoint_activation),
        offload_device=home_of(given.offload_device) or given.offload_device,
    )


def _cut(checked: _Checked, *, one_each: bool) -> _Cut:
    """Raises ValueError if the memory is less than any cut needs, or if parameters that get homes share memory."""
    given, num_slices = checked.given, checked.given.num_slices
    layers = _streamed(checked)
    check_separate(stored_tensors(layers.items()))
    if one_each if checked.in_order else num_slices is None:
        num_slices = len(layers)
    needs = checked.needs(layers)
    cuts, policy = layout_of(checked.memory, needs, num_slices, given._cuts)
    return _Cut(layers=layers, num_slices=num_slices, cuts=cuts, policy=policy, needs=needs)


def _streamed(checked: _Checked) -> Mapping[str, nn.Module]:
    """The layers; or the blocks, and of the modules around them those that have to stream for a step to fit."""
    given, blocks, home = checked.given, checked.layers, checked.offload_device
    limit = None if checked.memory is None else numbers_of(checked.memory, checked.device)[0]
    # In another form, values of what streams are not those of what stays.
    stored_as_given = checked.form is None and given.gradient_dtype is None
    # A kept home is laid out by the blocks, and opened with any memory.
    kept = isinstance(home, DiskHome) and home.keep
    if not limit or checked.in_order or given.num_slices is not None or not stored_as_given or kept:
        return blocks

    def needed(layers: Mapping[str, nn.Module], states: int = STATES_EXPECTED) -> int:
        return checked.needs(layers, states)([1] * len(layers))

    patterns = [given.resident] if isinstance(given.resident, str) else given.resident or ()
    more = with_embeddings_and_heads(checked.model, blocks, limit - limit // GAPS_SHARE, needed, patterns)
    # Without states, as the limit is checked, what stays may take less.
    return more if needed(more, 0) <= max(limit, needed(blocks, 0) - 1) else blocks


def _for_a_copy(checked: _Checked, cut: _Cut) -> Arguments:
    """The arguments of a copy of the model."""
    home = checked.offload_device
    return replace(
        checked.given,
        device=checked.device,
        offload_device=home.for_a_copy() if isinstance(home, DiskHome) else home,
        num_slices=cut.num_slices,
        checkpoint_activation=checked.recompute,
        memory=checked.memory,
        pretrained=None,
        blocks=None if checked.in_order else BlockNames(tuple(cut.layers)),
        mesh=checked.mesh,
    )


def _open(
    checked: _Checked,
    cut: _Cut,
    stored: Mapping[torch.Tensor, Values],
    around: Mapping[str, nn.Module],
    undo: contextlib.ExitStack,
) -> _Opened:
    """Opens the storage and the lanes, and records the model as it is before its parameters move.

    ``stored``: sources of parameters and buffers that are not read from the model. ``around``: modules that do not
    stream. Raises TypeError, ValueError or OSError for storage that cannot be used.
    """
    given, device, form = checked.given, checked.device, checked.form
    meter = Meter(device)
    sharding = None if checked.mesh is None else Sharding(checked.mesh, given.gradient_divide_factor, meter, device)
    tier = open_tier(checked.offload_device, device, keeps=sharding is None)
    undo.callback(tier.close)
    limits = None if checked.memory is None else limits_for(checked.memory, cut.cuts, cut.needs, meter)
    if limits is not None:
        undo.callback(limits.release)
    home = PersistentHome(tier, cut.layers, stored, around)
    # With a mesh, homes do not hold whole values to restore.
    every = {*checked.model.parameters()}
    replaced = {*home.values} if sharding is None else every
    if form is not None:
        replaced |= {p for p in every if form.stores(p) and not p.is_meta}  # homes round them
    undo.callback(Rollback(checked.model, replaced).restore)
    # A copy that changes the type is converted on the host, which must not block this thread.
    blocking = tier.blocking_io or given.param_dtype is not None or form is not None
    lanes = sharding.open_lanes(device) if sharding else open_lanes(device, blocking_io=blocking)
    undo.callback(lanes.close)
    return _Opened(meter=meter, sharding=sharding, tier=tier, memory_limits=limits, persistent_home=home, lanes=lanes)


def _fill(checked: _Checked, cut: _Cut, opened: _Opened) -> ModelHomes:
    """Moves the parameters of layers to their homes, and their buffers to the device."""
    given, layers, device, sharding = checked.given, [*cut.layers.items()], checked.device, opened.sharding
    tier, lanes, meter, values = opened.tier, opened.lanes, opened.meter, opened.persistent_home.values
    resident = resident_shard(cut.layers, checked.resident, len(cut.cuts), device)
    if resident is not None and resident.home is not None:
        meter.hold(resident.home.nbytes)
    if sharding is None:
        shards = make_shards(layers, cut.cuts, tier, given.param_dtype, values, resident, checked.form)
    else:
        shards = sharding.make_shards(layers, cut.cuts, tier, given.param_dtype, values, resident)
    if given.gradient_dtype is not None:
        round_gradients(shards, given.gradient_dtype, accumulates=given.accumulate_in_gradient_dtype)
    move_buffers(cut.layers.values(), device)
    offload_of: Callable[..., GradientOffload] = GradientOffload if sharding is None else sharding.gradient_offload
    streamer = Streamer(
        shards,
        offload_of(shards, device=device, tier=tier, lane=lanes.drain, meter=meter),
        slots=cut.policy.slots or 2,
        device=device,
        tier=tier,
        lanes=lanes,
        meter=meter,
        own_slots=not checked.in_order,  # an embedding beside blocks is much larger than they are
    )
    read_current_values(shards, streamer)
    return ModelHomes(
        streamer,
        resident,
        PublicParameters() if sharding is None else sharding.public(shards),
        policy=cut.policy,
        recompute=checked.recompute,
        param_dtype=given.param_dtype,
        layers_apart=not checked.in_order,
    )


def _close(lanes: Any, tier: Any) -> None:
    lanes.close()
    tier.close()
