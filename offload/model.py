"""``OffloadModel``: a model whose parameters are stored off the device and loaded shard by shard."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from offload import core
from offload.arguments import (
    check_choices,
    check_gradient_dtype,
    check_separate,
    compute_device,
    names_taken,
)
from offload.blocks.core_engine import engine_of
from offload.blocks.face import class_for
from offload.blocks.find import Blocks
from offload.engine.executor import Executor
from offload.engine.outside import bytes_staying
from offload.files.pretrained import Pretrained
from offload.limits import MemoryLimits
from offload.memory import layout_of, limits_for, memory_of
from offload.mesh.sharding import Sharding, check_mesh, open_home
from offload.optim.access import OptimizerAccess
from offload.persistence import PersistentHome
from offload.policy import MemoryPolicy
from offload.running import RunningModule
from offload.storage import DiskHome, absolute_home, is_directory
from offload.streaming.current_values import leave_pending_updates
from offload.streaming.heap import return_freed_memory
from offload.streaming.lane import open_lanes
from offload.streaming.quantised import check_storable, separate, stored_tensors
from offload.streaming.resident import chosen, chosen_form
from offload.streaming.rollback import Rollback
from offload.telemetry.statistics import Meter
from pipe.process import finalize_here
from pipe.torch_private.amp import complete_copies_of_grad_scalers

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["OffloadModel"]


class OffloadModel(RunningModule):
    """A model that trains on a device whose memory cannot hold it: an ``nn.Sequential``, or any with a list of blocks.

    The layers are cut into shards. Shards are stored in host memory or in files, and are loaded to the compute device
    ahead of use. With one micro-batch, losses, gradients, buffers and generator states are those of the bare model;
    parameters, their gradients and ``state_dict()`` keep the bare model's names and may be used by any
    optimizer between steps. The next forward raises if layers or parameters were replaced after this call.

    Args:
        model: an ``nn.Sequential``; a list of modules, each of which is one shard; or any module (see ``blocks``).
            Layers on the meta device get memory and values shard by shard: the whole model need not fit in memory.
        device: the compute device, which may be ``"cpu"``.
        offload_device: storage of the shards: ``"cpu"`` for host memory, or a directory (an ``os.PathLike``, or a
            string with a path separator), for files that are removed with the model. A :class:`~offload.DiskHome` is a
            directory with more options, among them files that are kept and adopted by the next model.
        num_slices: number of shards, balanced by bytes; from 1 to the number of layers. None: one for each of
            ``blocks``; else with ``memory`` one for each layer, or for neighbours that are small; else 3.
        checkpoint_activation: if True, keep only the inputs of each shard and recompute the rest in backward; if False,
            keep all activations of the layers, but no second copy of their weights, nor of casts of them. None: True
            with ``memory``, else False.
        num_microbatches: parts into which a batch is split along dimension 0. Each shard is loaded once per pass and
            runs all of them. Any number of rows; the last micro-batch may be smaller. The result is that of the bare
            model where layers treat each row on its own. Layers that look across rows (batch normalisation) see one
            micro-batch at a time, and random numbers are drawn shard by shard and micro-batch by micro-batch: with more
            than one, a model with dropout draws other masks than the bare model does. None, with ``memory`` and layers
            that are called one after the other: as few as fit, from the second training step on, by what the first one
            measured; always one where layers look across rows, or draw and the policy's ``join_chunks`` is not True.
        memory: the memory that the model, its optimizer and its steps may use: bytes, a string such as ``"2GiB"``,
            ``"auto"`` for what the machine has free, ``{"device": ..., "host": ...}``, or a
            :class:`~offload.MemoryPolicy`, which says what counts. Decides ``num_slices`` and
            ``checkpoint_activation`` where they are None. None: ``"auto"`` where both are None, else no limit, and
            nothing is planned.
        param_dtype: floating-point type in which layers compute, such as ``torch.bfloat16``: slots hold parameters in
            it and floating-point inputs are cast to it, while homes keep the parameters as they are (fp32 masters) and
            gradients are summed in the home's type. Buffers stay as they are. Parameters outside of ``blocks`` are cast
            in each forward.
        store_dtype: how homes store float32 parameters. None: as they are. ``"split"``: bfloat16 values, nearest to the
            float32 ones, which loads read; and beside them the bits that they lack, which only updates read. Layers
            compute with the bfloat16 values, updates with the exact float32. ``torch.bfloat16``: bfloat16 only; updates
            compute in float32, and round stochastically to what is stored. Parameters are then bfloat16 outside of
            passes, and only :class:`~offload.OffloadOptimizer` writes them; gradients stay float32. Values are read by
            ``state_dict()`` (copies in float32 with ``"split"``), and written by ``load_state_dict()`` and
            ``load_checkpoint()``. Not with a mesh, or a home that is kept. Parameters of other types, those outside of
            ``blocks``, and ``resident`` ones are stored as they are.
        blocks: for a model that is called by its own forward: the name of the ``nn.ModuleList`` or ``nn.Sequential`` of
            its blocks; several names, of lists and of other modules, each of which is a block (an embedding, a head);
            or a class of blocks. The first forward with gradients decides the order of calls. Each block is a shard,
            unless ``num_slices`` says how many shards they make. Parameters outside of them stay on the compute device,
            except where a number of bytes is given as ``memory`` and is too small for that: then the largest embeddings
            and heads among them are shards. None: the layers of a Sequential or list; else the longest list of modules
            of one class, with a warning that names it.
        mesh: a ``DeviceMesh`` of processes that train the model together, each on its own rows: of one dimension
            (shard), or two (replicate, shard). Each rank stores a part of each parameter, its gradient and its
            optimizer states; all may pass one directory. ``parameters()`` are DTensors, and gradients are means over
            ranks. All ranks make the same calls. What does not stream is stored whole by each; ``memory`` is a rank's.
            Its type is that of ``device``: ``"cpu"`` with gloo, or ``"cuda"`` with nccl (of which one GPU has run).
        gradient_divide_factor: with ``mesh``, divide sums of gradients by this instead of the number of ranks.
        gradient_dtype: ``torch.bfloat16`` to store gradients at home in 16 bits, rounded once from their sum over
            micro-batches: ``.grad`` has this type, norms are those of what is stored, and an
            :class:`~offload.OffloadOptimizer` computes with it in the parameters' type. Other optimizers see 16 bits
            beside wider parameters, which most classes of torch refuse. Gradients of parameters that several layers
            use or that have hooks, sparse ones, and those of what stays on the compute device keep their type; what is
            updated in backward is not stored, and so not rounded. None: the type of each parameter.
        accumulate_in_gradient_dtype: with ``gradient_dtype``, allow several backwards before gradients are cleared: the
            sum is rounded with each. False: they are refused, before they run.
        resident: names of parameters that stay on the compute device, with their gradients and optimizer states, or
            shell patterns of such: ``"*.lora_*"`` for adapters over a frozen base that streams. None: those of the
            layers stream.
        pretrained: a safetensors file, an index of several or the directory of one, or a :class:`~offload.Pretrained`:
            parameters and buffers are read from there straight into their homes, without being initialised first. See
            :meth:`from_pretrained`.
        detect_weight_writes: for debugging. A layer may write its own parameters while it runs (an initialisation from
            data, a renormalisation). In-place writes are always detected; writes through ``.data`` are found by
            comparing bytes after the first two forwards of each mode, and always in layers that did so before. If
            True, after every forward, which reads each home once more. Forwards that compare for a backward also take
            checksums of homes, and that backward refuses homes that were written through ``.data`` in between.

    Raises:
        TypeError, ValueError: if an argument cannot be used.
        OSError: if the storage is full, or ``pretrained`` cannot be read.

    After any exception here the given layers are as before: the same parameters and buffers with their values, in
    ordinary memory or on the meta device.

    After an exception in forward or backward the model is usable, and every parameter holds its last value.

    Inputs are never changed in place, by an in-place first layer either. ``.to()`` and similar methods raise if they
    would move or cast a parameter away from its home: convert the model before it is wrapped. ``.to()`` the compute
    device changes nothing.

    Source: L2L (Pudipeddi et al., 2020) and fairscale's OffloadModel, whose signature this keeps.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        device: torch.device | str | int,
        offload_device: torch.device | str | os.PathLike[str] = "cpu",
        num_slices: int | None = None,
        checkpoint_activation: bool | None = None,
        num_microbatches: int | None = 1,
        *,
        memory: MemoryPolicy | int | str | Mapping[str, int | str] | None = None,
        param_dtype: torch.dtype | None = None,
        store_dtype: torch.dtype | str | None = None,
        pretrained: Pretrained | str | os.PathLike[str] | None = None,
        detect_weight_writes: bool = False,
        blocks: Blocks | None = None,
        mesh: DeviceMesh | None = None,
        gradient_divide_factor: float | None = None,
        gradient_dtype: torch.dtype | None = None,
        accumulate_in_gradient_dtype: bool = False,
        resident: str | Sequence[str] | None = None,
        _cuts: list[int] | None = None,
    ) -> None:
        self._adopt(model)
        choices: dict[str, Any] = {"param_dtype": param_dtype}
        choices["activation_bytes"] = memory.activation_bytes if isinstance(memory, MemoryPolicy) else None
        self.device = compute_device(device)
        if self.device.type == "cuda":
            complete_copies_of_grad_scalers()  # gradients are in host memory
        named = self._layers_of(model, blocks, **choices)
        parameters = [(f"{k}.{path}", p) for k, layer in named.items() for path, p in layer.named_parameters()]
        check_storable(parameters, named.values(), self.device)
        stored_parts = stored_tensors(named.items())
        check_separate(stored_parts)
        quantised = [each.name for each in stored_parts if each.part_of is not None]
        called = getattr(type(self), "_kind", None)  # the class of a model that is called by its own forward
        refused: dict[str, Any] = {"a model with quantised weights": quantised or None, "store_dtype=": store_dtype}
        mesh = check_mesh(mesh, gradient_divide_factor, self.device, refused)
        staying = chosen(named, resident, offload_device, self._names_around())
        form = chosen_form(store_dtype, stored_parts, staying, named.values(), offload_device)
        separate([model] if isinstance(model, nn.Module) else named.values())
        plans = num_slices is None and checkpoint_activation is None and mesh is None
        # In another form, values of what streams are not those of what stays.
        finest = num_slices is None and form is None and gradient_dtype is None
        if not isinstance(model, nn.Sequential) if called is None else num_slices is None:
            num_slices = len(named)
        check_choices(num_slices, num_microbatches, param_dtype)
        check_gradient_dtype(gradient_dtype, accumulates=accumulate_in_gradient_dtype)
        resources = memory_of(memory, plans=plans, mesh=mesh, device=self.device)
        recompute = resources.recomputes(checkpoint_activation)
        self._check_splitting(num_microbatches, plans=resources.bounds and recompute)
        ranks = 1 if mesh is None else mesh.size(mesh.ndim - 1)
        replicas = 1 if mesh is None else mesh.size() // ranks
        offload_device = absolute_home(offload_device)
        choices |= {"offload_device": offload_device, "resident": resident, "staying": staying, "ranks": ranks}
        choices["replicas"] = replicas
        more = self._with_rest(model, resources, **choices) if finest else None
        if more is not None:
            named, num_slices = more, len(more)
            check_separate(stored_tensors(named.items()))
        layers = list(named.values())
        layout, self._policy, needs = layout_of(
            resources,
            layers,
            num_slices,
            _cuts,
            device=self.device,
            on_disk=is_directory(offload_device),
            param_dtype=param_dtype,
            outside=bytes_staying(self._around.values(), staying, param_dtype),
            ranks=ranks,
            replicas=replicas,
            apart=called is not None,
            form=form,
        )
        owners = self._owners(model, named)
        stored = {} if pretrained is None else Pretrained.at(pretrained).match(owners)[0]
        self._arguments = {
            "device": self.device,
            "offload_device": offload_device.for_a_copy() if isinstance(offload_device, DiskHome) else offload_device,
            "num_slices": num_slices,
            "checkpoint_activation": recompute,
            "num_microbatches": num_microbatches,
            "memory": resources,
            "param_dtype": param_dtype,
            "store_dtype": store_dtype,
            "detect_weight_writes": detect_weight_writes,
            "mesh": mesh,
            "gradient_dtype": gradient_dtype,
            "accumulate_in_gradient_dtype": accumulate_in_gradient_dtype,
            "resident": resident,
        }
        self._num_microbatches = num_microbatches
        self._taken_later = {name for layer in layers[1:] for name in names_taken(layer)}
        self._rows_together: dict[str, int] = {}
        self._meter = Meter(self.device)
        sharding = None if mesh is None else Sharding(mesh, gradient_divide_factor, self._meter, self.device)
        self._tier = open_home(offload_device, self.device, sharding)
        with contextlib.ExitStack() as undo:
            # A failure from here on, such as a full disk or an interrupt, leaves the layers as they were.
            undo.callback(self._tier.close)
            #: What the planner may use; None without a memory.
            self._memory_limits = limits_for(resources, layout, needs, self.device, self._meter)
            undo.callback(_release, self._memory_limits)
            self._persistent_home = PersistentHome(self._tier, named, stored, self._around, sharding)
            # With a mesh, homes do not hold whole values to restore.
            every = {*nn.ModuleList(owners.values()).parameters()}
            replaced = {*self._persistent_home.values} if sharding is None else every
            if form is not None:
                replaced |= {p for p in every if form.stores(p) and not p.is_meta}  # homes round them
            undo.callback(Rollback(owners.values(), replaced).restore)
            # A copy that changes the type is converted on the host, which must not block this thread.
            blocking = self._tier.blocking_io or param_dtype is not None or form is not None
            lanes = sharding.open_lanes(self.device) if sharding else open_lanes(self.device, blocking_io=blocking)
            undo.callback(lanes.close)
            self._executor = Executor(
                named,
                layout.cuts,
                self._persistent_home.values,
                policy=self._policy,
                device=self.device,
                tier=self._tier,
                lanes=lanes,
                meter=self._meter,
                recompute=recompute,
                param_dtype=param_dtype,
                sharding=sharding,
                resident=staying,
                layers_apart=called is not None,
                form=form,
                gradient_dtype=gradient_dtype,
                accumulates=accumulate_in_gradient_dtype,
            )
            self._join(self._executor, named, self._persistent_home.values, undo.callback)
            for runner in self._executor.runners:
                runner.compares_always = detect_weight_writes
            # Of the executor, which tapes refer to: a backward still runs after the model is collected.
            shards = [weakref.ref(shard) for shard in self._executor.shards]
            close = partial(_close, lanes, self._tier)
            self._finalizer = finalize_here(self._executor, leave_pending_updates, shards, close)
            if core.IN_USE and self.device.type == "cpu":
                self._engine = engine_of(self._executor, list(named), apart=called is not None)
            if self._memory_limits is not None and recompute:
                self._executor.plan_memory(self._memory_limits, resources.policy)
            self._persistent_home.begin()
            return_freed_memory()
            undo.pop_all()

    def __new__(cls, model: Any = None, *args: Any, blocks: Blocks | None = None, **kwargs: Any) -> Any:
        """An object of this class; for a model that is called by its own forward, of one that is the model's, too."""
        return super().__new__(class_for(cls, model, blocks))

    # --- other parts of the package ------------------------------------------------------------------------------

    def optimizer_access(self) -> OptimizerAccess:
        """The interface for an :class:`~offload.OffloadOptimizer`."""
        return OptimizerAccess(self._executor, self._tier, self._meter)

    def extra_repr(self) -> str:
        """One line about the shards."""
        shards = self._executor.shards
        largest = max(shard.slot_bytes for shard in shards)
        return f"{len(shards)} shards of at most {largest:,} bytes at home in {self._tier.name}"

    # --- closing -------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the model: finishes pending updates, writes the manifest of a home that is kept, removes other files.

        Parameters, gradients and buffers can still be read, but must not be changed where the home is kept. Forwards
        raise from now on. Further calls do nothing.

        Raises:
            RuntimeError, ValueError, OSError: if the manifest of a kept home cannot be written; the model is as before.
        """
        if self._executor.closed:
            return
        if self._persistent_home.keeps and self._executor.structure is not None:
            self._executor.structure.check()
        self._executor.streamer.apply_pending_updates()
        self._executor.assigned_data.store()
        if self._persistent_home.keeps:
            self._executor.write_back()
        self._persistent_home.close()
        self._executor.closed = True
        self._finalizer()
        _release(self._memory_limits)


def _release(limits: MemoryLimits | None) -> None:
    if limits is not None:
        limits.release()


def _close(lanes: Any, tier: Any) -> None:
    lanes.close()
    tier.close()
