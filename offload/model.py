"""``offload``: changes a model in place, so that its parameters are stored off the device and loaded shard by shard."""

from __future__ import annotations

import atexit
import contextlib
import copy
import inspect
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from offload.blocks.find import BlockNames, Blocks
from offload.blocks.fixed_structure import methods_refused
from offload.construction import Arguments, Offloaded, construct
from offload.copies import Copies
from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.files.pretrained import KeyMap, Pretrained
from offload.heap import return_freed_memory
from offload.identities import identities_only
from offload.loading import adapted, build_model, names_of_transformers
from offload.module import refuse_copies, refuse_moves, show_values, store_values
from offload.planner.measured import Estimate, next_plan, predict_step
from offload.planning.plan import Plan
from offload.policy import MemoryPolicy
from offload.streaming.streamer import share_slots
from offload.telemetry.memory_report import MemoryReport
from offload.telemetry.statistics import Statistics
from offload.telemetry.trace import Event
from offload.units import shown_bytes
from pipe.torch_private.tracing import breaks_compiled_graphs

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["OffloadModel", "offload"]

M = TypeVar("M", bound="OffloadModel")


class OffloadModel(nn.Module):
    """An ``nn.Module`` that was offloaded: its class derives from this one and from the class that it had.

    ``OffloadModel(model, ...)`` is :func:`offload`: it changes ``model`` in place and returns it, as ``fully_shard``
    of torch does. So the object keeps its identity, attributes, methods, names and hooks, and these methods are added.
    It takes the arguments of :func:`offload`; the order of the positional ones is that of fairscale.
    """

    _offloaded: Offloaded

    # Not __init__: the object is the model that was given.
    def __new__(
        cls: type[M],
        model: nn.Module | Sequence[nn.Module],
        device: torch.device | str | int,
        offload_device: torch.device | str | os.PathLike[str] = "cpu",
        num_slices: int | None = None,
        checkpoint_activation: bool | None = None,
        num_microbatches: int = 1,
        **options: Any,
    ) -> M:
        """Changes ``model`` and returns it."""
        given = {name: value for name, value in locals().items() if name not in ("cls", "options")}
        return cast("M", offload(**given, **options, _base=cls))

    if not TYPE_CHECKING:
        # Python calls it with the arguments of __new__, on a model that is initialised; that of object ignores them.
        __init__ = object.__init__

    @classmethod
    def from_pretrained(
        cls: type[M],
        path: str | os.PathLike[str],
        device: torch.device | str | int,
        offload_device: torch.device | str | os.PathLike[str] = "cpu",
        *,
        model: Callable[[], nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        key_map: KeyMap | None = None,
        strict: bool = True,
        adapt: Callable[[nn.Module], nn.Module] | None = None,
        **options: Any,
    ) -> M:
        """A model whose weights are read from safetensors files straight into their homes.

        The model is built without memory for its parameters; then each block is read into its home, and what is outside
        of the blocks onto the compute device. So construction needs memory for what is outside of the blocks, homes in
        host memory, and one shard. Buffers that no file holds have the values that the model gives them.

        Args:
            path: a directory with ``config.json`` and safetensors files, as ``save_pretrained`` of transformers writes
                it (``huggingface_hub.snapshot_download`` returns one); or, with a function ``model``, whatever
                :class:`~offload.Pretrained` takes.
            device: of the :class:`~offload.OffloadModel`.
            offload_device: of the :class:`~offload.OffloadModel`.
            model: a class of transformers, such as ``AutoModelForCausalLM``; or a function or class that builds any
                model without arguments. None: the class that ``config.json`` names (``architectures``).
            dtype: type of the parameters of a class of transformers; None: that of its configuration. Values are
                converted as they are read.
            key_map: see :class:`~offload.Pretrained`. Without it, names are mapped as transformers maps them: those of
                older releases, and where only the model or only the files have a head around a base model
                (``model.layers.0`` and ``layers.0``); the files' head is skipped then.
            strict: see :class:`~offload.Pretrained`.
            adapt: called with the model before anything is read, returns the model to offload: adapters over a base
                that is never whole in memory, ``lambda base: get_peft_model(base, lora)``. What it adds is in no file,
                and is initialised as ``adapt`` does it.
            options: further arguments of the :class:`~offload.OffloadModel`, such as ``blocks``.

        Returns:
            The model. One of a class of transformers is in evaluation mode, as that library's ``from_pretrained``
            leaves it: call ``train()``.

        Raises:
            FileNotFoundError, ValueError: see :class:`~offload.Pretrained`: every missing and unexpected name and every
                other shape is listed. Or if transformers would convert values as it loads (experts that it merges).
                Nothing was stored then.
            ImportError: if a class of transformers is needed and transformers is not installed.
        """
        bare = build_model(Path(path), model, dtype)
        if key_map is None:
            key_map = names_of_transformers(bare, [name for name, _, _ in Pretrained(path).headers()])
        weights = Pretrained(path, key_map=key_map, strict=strict)
        if adapt is not None:
            bare, weights = adapted(bare, weights, path, adapt)
        return cls(bare, device, offload_device, pretrained=weights, **options)

    # --- parts -------------------------------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        """The compute device."""
        return self._offloaded.device

    @property
    def memory_policy(self) -> MemoryPolicy:
        """What the model may hold, with the slots and bytes that were decided."""
        return self._homes.policy

    @property
    def _homes(self) -> ModelHomes:
        return self._offloaded.homes

    @property
    def _engine(self) -> Engine:
        return self._offloaded.calls.engine

    def _rows(self, batch_rows: int | None) -> Sequence[int]:
        """Rows of each micro-batch; one row each where nothing is known of the batch."""
        rows = batch_rows or self._offloaded.calls.micro_batches
        count = min(self._offloaded.calls.micro_batches, rows)
        return [rows // count + (i < rows % count) for i in range(count)]

    @property
    def hf_device_map(self) -> dict[str, Any]:
        """Where the model computes: trainers do not move a model that has such a map."""
        return {"": self.device}

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether gradients are reduced by the model itself: the Trainer does not wrap such a model."""
        return self._offloaded.arguments.mesh is not None

    # --- running -----------------------------------------------------------------------------------------------------

    @breaks_compiled_graphs
    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Runs the model's own forward; or, of an ``nn.Sequential`` or list, each layer with the result of the last.

        The first layer may get several arguments. Tensors may be nested in tuples, lists and dicts; with several
        micro-batches all of them are split along dimension 0, and outputs are concatenated again. Tensors on other
        devices are copied to the compute device.

        ``torch.compile`` of this model, or of a module that contains it, breaks the graph here: a compiled graph would
        take the weights of a slot for constants. Layers that were compiled themselves (``layer.compile()``) stay
        compiled.
        """
        return self._offloaded.calls.run(self, inputs, kwargs)

    def forward_chunks(
        self,
        chunks: Sequence[Any],
        *,
        output_fn: Callable[[Any], Any] | None = None,
        input_fn: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Runs many chunks through each shard while it is loaded, in a pass that loads each shard once.

        Args:
            chunks: each a tensor, or (args, kwargs) for the model. Each chunk is one micro-batch.
            output_fn: applied to each chunk's output, and recomputed with it.
            input_fn: makes a tensor or (args, kwargs) of each chunk, which then may be any object. Where layers are
                called one after the other its result is recomputed for the backward, gets no gradient, and its chunks
                do not run together.

        Returns:
            The outputs in the order of the chunks, with one graph. A backward from all of them at once, of a loss of
            them or ``torch.autograd.backward(outputs, gradients)``, loads each shard once more and stores its
            gradients once, whatever the number of chunks; one for each chunk needs ``retain_graph=True`` of layers
            that the chunks share, and loads shards for each.
        """
        if isinstance(chunks, Tensor) or not isinstance(chunks, Sequence) or not chunks:
            raise ValueError(
                f"expected a sequence of at least one chunk, got {type(chunks).__name__}; cut a batch with "
                f"batch.split(rows), for example"
            )
        return self._offloaded.calls.forward_chunks(self, chunks, output_fn, input_fn)

    def activation_bytes(self, chunk: Any, *, output_fn: Callable[[Any], Any] | None = None) -> int:
        """Bytes that autograd saves for a chunk in the shard that saves most: the activations of one cell in backward.

        Runs the chunk forward once, and leaves buffers and generators unchanged. 0 if no parameter takes a gradient.
        Raises ValueError for a model that is called by its own forward.
        """
        return self._offloaded.calls.activation_bytes(chunk, output_fn)

    def accumulate(self) -> contextlib.AbstractContextManager[None]:
        """A context in which backwards reduce no gradients over the ranks of ``mesh=``; without one it changes nothing.

        Each rank adds its whole gradients in its host memory, in the types of homes: as many bytes as all parameters
        that train. The first backward outside of the context reduces the sums, so that ``.grad`` is what it would have
        been without, up to rounding, and only that backward sends gradients::

            with model.accumulate():
                for batch in batches[:-1]:
                    loss(model(batch)).backward()
            loss(model(batches[-1])).backward()
            optimizer.step()

        Until then ``.grad`` lacks these gradients: ``step()`` of an ``OffloadOptimizer`` raises RuntimeError. Its
        ``zero_grad()`` and that of the model drop them; that of another optimizer cannot. With ``memory=`` there is no
        room that is not planned, so each backward reduces its gradients.
        """
        if self._homes.steps.planner is not None:
            return contextlib.nullcontext()
        return self._homes.public.accumulates()

    # --- reports -----------------------------------------------------------------------------------------------------

    def statistics(self) -> Statistics:
        """Counts of loads, stores and waits since the model was made."""
        return self._homes.meter.read()

    def plan(self, batch_rows: int | None = None, *, training: bool = True) -> Plan:
        """The plan of a step: ``print(model.plan())``.

        That of the last step which ran, if its batch had ``batch_rows`` rows, or None is given. Otherwise that of the
        next step, from empty slots; with an ``OffloadOptimizer`` it begins with the updates of a step before.
        Boundaries of unknown size are assumed to stay in memory.

        Args:
            batch_rows: a batch of few rows has fewer micro-batches.
            training: whether there is a backward.
        """
        ran = self._homes.steps.last(batch_rows, training=training)
        return ran or next_plan(self._homes, self._rows(batch_rows), training=training)

    def estimate(self, batch_rows: int) -> Estimate:
        """Predicts a training step on a batch of ``batch_rows`` rows: seconds, bytes moved, bytes at the peak.

        Seconds follow from the median of the latest layer times and bandwidths, without the first step's: compute and
        copies run side by side, and what takes longest decides. Times of layers are assumed to be proportional to rows.
        A process is often slow in its second step, too, so times are better after some more steps. Bytes are as good
        after the first.

        Raises:
            RuntimeError: if no training step has run yet.
            ValueError: if ``memory`` is too small for such a batch.
        """
        return predict_step(self._homes, self._rows(batch_rows))

    def memory_report(self) -> MemoryReport:
        """How steps use the memory that they may, and why: ``print(model.memory_report())``.

        It has each use with its bytes, predicted and measured, and what more memory would buy; ``.plot("memory.png")``
        draws the bytes. Plans follow from counted bytes alone. What the latest steps took beside these is added to the
        prediction, as a use of its own: buffers inside of operations; on a CPU, all that the process has grown by since
        the model was made, with free memory that its allocator keeps. Raises RuntimeError if there is no ``memory``.
        """
        planner = self._homes.steps.planner
        if planner is None:
            raise RuntimeError("expected a model with memory=..., whose plan is chosen; this one has no limit")
        report: MemoryReport = planner.report()
        return report

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[list[Event]]:
        """Records compute and each lane in this context, and writes the trace to ``path`` for https://ui.perfetto.dev.

        ``with model.trace("step.json") as events: ...``; the events are named as in the plan.
        """
        tracer = self._homes.meter.tracer
        with tracer.recording() as events:
            yield events
        tracer.write(path, events)

    def extra_repr(self) -> str:
        """One line about the shards."""
        shards = self._homes.shards
        largest = max(shard.slot_bytes for shard in shards)
        return f"{len(shards)} shards of at most {shown_bytes(largest)} at home in {self._homes.tier.name}"

    # --- slots -------------------------------------------------------------------------------------------------------

    @property
    def updates_in_backward(self) -> bool:
        """Whether the next backward updates parameters: gradients cannot accumulate over micro-batches then."""
        updater = self._homes.streamer.gradient_offload.optimizers.in_backward
        return updater is not None and not updater.accumulating

    def share_slots(self, stages: Sequence[Sequence[object]]) -> None:
        """Shares device memory with models that never compute at the same time.

        Args:
            stages: for each stage of a pipe, in order, the models that it runs.
        """
        models = [m for stage in stages for m in stage if isinstance(m, OffloadModel)]
        if any(m._homes.public.sharded for m in models):
            raise ValueError("models with mesh= cannot share slots yet: leave out share_slots, or mesh=")
        share_slots([[m._homes.streamer for m in stage if isinstance(m, OffloadModel)] for stage in stages])

    def frozen_weights(self) -> contextlib.AbstractContextManager[None]:
        """A context in which no code changes parameters, so that loaded shards are reused by the next call.

        ``with model.frozen_weights(): ...`` around an evaluation loads each shard once where all shards fit in slots.
        Outside, each forward loads its shards, since their homes may have been written to.
        """
        return self._homes.frozen_weights()

    def prefetch(self, *, backward: bool = False) -> None:
        """Begins to load the first shards of the next pass into free slots."""
        self._homes.prefetch(backward=backward)

    # --- state and gradients -----------------------------------------------------------------------------------------

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As in torch; with ``store_dtype``, copies of what homes store in a form."""
        found = super().state_dict(*args, **kwargs)
        show_values(self._homes, found)
        return found

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *args: Any) -> None:
        if local_metadata.get("assign_to_params_buffers"):
            raise ValueError(
                f"expected load_state_dict with assign=False for the OffloadModel {prefix.rstrip('.') or 'itself'!r}, "
                f"got assign=True: values are copied into the homes of its parameters"
            )
        store_values(self._homes, self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch. A pending update owns its gradients, so only ``set_to_none=False`` has to finish it."""
        with identities_only() if set_to_none else contextlib.nullcontext():
            super().zero_grad(set_to_none)
            self._homes.public.drop_sums(self.parameters())

    def __setattr__(self, name: str, value: Any) -> None:
        added = isinstance(value, (nn.Module, nn.Parameter))
        if added and self._modules.get(name) is not value and self._parameters.get(name) is not value:
            raise TypeError(f"cannot add {name} to an OffloadModel: its layers are fixed when it is made")
        super().__setattr__(name, value)

    # --- moves and copies --------------------------------------------------------------------------------------------

    def _apply(self: M, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> M:
        """Raises if ``fn`` would move or cast parameters away from their homes; otherwise does nothing."""
        refuse_moves(self, fn, self.device, self._homes.tier)
        return self

    def _replicate_for_data_parallel(self) -> Any:
        """Called by ``nn.DataParallel``: refused."""
        raise RuntimeError(
            "expected one device, got an OffloadModel in nn.DataParallel, whose copies would share its homes. Trainers "
            "make one where they see several GPUs: let them see one (CUDA_VISIBLE_DEVICES=0)"
        )

    def __copy__(self) -> Any:
        """Refused: a shallow copy would share parameters, but their homes belong to one model."""
        raise TypeError(
            "cannot copy an OffloadModel by copy.copy(): the copy would share parameters, whose homes belong to one "
            "model; use the model itself, or copy.deepcopy() for another one with homes of its own"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another model with homes of its own."""
        return _rebuild(*self._copied(memo))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the bare model, and the arguments that offload it again."""
        return _rebuild, self._copied({})

    def _copied(self, memo: dict[int, Any]) -> tuple[nn.Module, Arguments]:
        """A copy of the bare model, and the arguments that offload it again."""
        offloaded, calls = self._offloaded, self._offloaded.calls
        refuse_copies(formed=offloaded.arguments.store_dtype is not None, sharded=offloaded.arguments.mesh is not None)
        # A forward that was set later is around the one of this class.
        own = {key: value for key, value in vars(self).items() if key not in ("_offloaded", "forward")}
        if calls.forward_of_instance is not None:
            own["forward"] = calls.forward_of_instance
        bare = memo[id(self)] = offloaded.kind.__new__(offloaded.kind)
        with Copies():
            vars(bare).update(copy.deepcopy(own, memo))
        arguments = offloaded.arguments
        if offloaded.homes.layers_apart:
            for name in calls.named:
                block = bare.get_submodule(name)
                if getattr(block.forward, "__func__", None) is type(block).forward:  # none of its own
                    vars(block).pop("forward", None)
        else:
            cuts = [len(shard.layers) for shard in offloaded.homes.shards]
            arguments = replace(arguments, num_slices=len(cuts), _cuts=cuts)
        return bare, arguments

    # --- closing -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Closes the model: finishes pending updates, writes the manifest of a home that is kept, removes other files.

        Parameters, gradients and buffers can still be read, but must not be changed where the home is kept. Forwards
        raise from now on. Further calls do nothing.

        Raises:
            RuntimeError, ValueError, OSError: if the manifest of a kept home cannot be written; the model is as before.
        """
        homes, home = self._homes, self._offloaded.persistent_home
        if homes.closed:
            return
        if home.keeps and homes.structure is not None:
            homes.structure.check()
        self._homes.streamer.apply_pending_updates()
        homes.assigned_data.store()
        if home.keeps:
            homes.write_back()
        home.close()
        homes.closed = True
        self._offloaded.finalizer()
        if self._offloaded.memory_limits is not None:
            self._offloaded.memory_limits.release()


def offload(
    model: nn.Module | Sequence[nn.Module],
    device: torch.device | str | int,
    offload_device: torch.device | str | os.PathLike[str] = "cpu",
    *,
    num_slices: int | None = None,
    checkpoint_activation: bool | None = None,
    num_microbatches: int = 1,
    memory: MemoryPolicy | int | str | Mapping[str, int | str] | None = None,
    param_dtype: torch.dtype | None = None,
    store_dtype: torch.dtype | str | None = None,
    pretrained: Pretrained | str | os.PathLike[str] | None = None,
    blocks: Blocks | BlockNames | None = None,
    mesh: DeviceMesh | None = None,
    gradient_divide_factor: float | None = None,
    gradient_dtype: torch.dtype | None = None,
    accumulate_in_gradient_dtype: bool = False,
    resident: str | Sequence[str] | None = None,
    _cuts: list[int] | None = None,
    _base: type[OffloadModel] = OffloadModel,
) -> OffloadModel:
    """Makes a model train on a device whose memory cannot hold it: an ``nn.Sequential``, or any with a list of blocks.

    The module is changed in place, as by ``fully_shard`` of torch: ``offload(model, ...) is model``. Its class becomes
    a subclass of its class and of :class:`OffloadModel`, whose methods it has from now on. Of a Python list a new
    ``nn.Sequential`` is made.

    The layers are cut into shards. Shards are stored in host memory or in files, and are loaded to the compute device
    ahead of use. With one micro-batch, losses, gradients, buffers and generator states are those of the bare model;
    parameters, their gradients and ``state_dict()`` keep the bare model's names and may be used by any
    optimizer between steps. The next forward raises if layers or parameters were replaced after this call.

    Args:
        model: an ``nn.Sequential``; a list of modules, each of which is one shard; or any module (see ``blocks``).
            Layers on the meta device get memory and values shard by shard: the whole model need not fit in memory.
        device: the compute device, which may be ``"cpu"``.
        offload_device: storage of the shards: ``"cpu"`` for host memory, or a directory (an ``os.PathLike``, or a
            string with a path separator), for files that end with the model. A :class:`~offload.DiskHome` is a
            directory with more options, among them files that are kept and adopted by the next model.
        num_slices: number of shards, balanced by bytes; from 1 to the number of layers. None: one for each of
            ``blocks``; else with ``memory`` one for each layer, or for neighbours that are small; else 3.
        checkpoint_activation: if True, keep only the inputs of each shard and recompute the rest in backward; if False,
            keep all activations of the layers, but no second copy of their weights, nor of casts of those that train.
            None: True with ``memory``, else False.
        num_microbatches: parts into which a batch is split along dimension 0. Each shard is loaded once per pass and
            runs all of them. Any number of rows; the last micro-batch may be smaller. The result is that of the bare
            model where layers treat each row on its own. Layers that look across rows (batch normalisation) see one
            micro-batch at a time, and random numbers are drawn shard by shard and micro-batch by micro-batch: with more
            than one, a model with dropout draws other masks than the bare model does.
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
            use or that have hooks, sparse ones, and those of what stays on the compute device keep their type. It
            excludes ``update_in_backward``, which stores none. None: the type of each parameter.
        accumulate_in_gradient_dtype: with ``gradient_dtype``, allow several backwards before gradients are cleared: the
            sum is rounded with each; that of two forwards in one backward with each forward, or once where their shard
            is used in place, as the plan decides. False: they are refused, before they run.
        resident: names of parameters that stay on the compute device, with their gradients and optimizer states, or
            shell patterns of such: ``"*.lora_*"`` for adapters over a frozen base that streams. None: those of the
            layers stream.
        pretrained: a safetensors file, an index of several or the directory of one, or a :class:`~offload.Pretrained`:
            parameters and buffers are read from there straight into their homes, without being initialised first. See
            :meth:`OffloadModel.from_pretrained`.

    Returns:
        The model itself.

    Raises:
        TypeError, ValueError: if an argument cannot be used, or the model is offloaded already.
        OSError: if the storage is full, or ``pretrained`` cannot be read.

    After any exception here the given model is as before: its class, and the same parameters and buffers with their
    values, in ordinary memory or on the meta device.

    After an exception in forward or backward the model is usable, and every parameter holds its last value.

    Inputs are never changed in place, by an in-place first layer either. ``.to()`` and similar methods raise if they
    would move or cast a parameter away from its home: convert the model before it is offloaded. ``.to()`` the compute
    device changes nothing.

    Source: L2L (Pudipeddi et al., 2020) and fairscale's OffloadModel.
    """
    arguments = Arguments(**{name: given for name, given in locals().items() if name != "model"})
    in_order = not isinstance(model, nn.Module) or (
        blocks is None and isinstance(model, (nn.Sequential, nn.ModuleList))
    )
    one_each = in_order and not isinstance(model, nn.Sequential)
    model = _module(model)
    offloaded_kind = _class_for(_base, model, in_order=in_order)
    undo = contextlib.ExitStack()
    try:
        state = construct(model, arguments, undo, in_order=in_order, one_each=one_each)
        _change(model, offloaded_kind, state, undo.callback)
        if state.persistent_home.keeps:
            atexit.register(_close_at_exit, weakref.ref(model), os.getpid())
        return_freed_memory()
        # Within the try: an interrupt here is the last one that changes the model back.
        return cast(OffloadModel, model)
    except BaseException:
        undo.close()
        raise


def _module(model: Any) -> nn.Module:
    """The module to change: the one that was given, or a Sequential of the modules in a list."""
    if isinstance(model, (list, tuple)) and model and all(isinstance(each, nn.Module) for each in model):
        model = nn.Sequential(*model)
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected an nn.Module or a list of modules, got {type(model).__name__} (model)")
    for name, module in model.named_modules():
        if isinstance(module, OffloadModel):
            where = f"in {name}" if name else "itself"
            raise TypeError(
                f"expected a model that is not offloaded yet, got an OffloadModel {where} (model); a model is changed "
                f"in place, so use it as it is, or copy the bare model before"
            )
    return model


def _class_for(base: type[OffloadModel], model: nn.Module, *, in_order: bool) -> type[nn.Module]:
    """The class of ``model`` once it is offloaded: a subclass of ``base`` and of its class."""
    kind = type(model)

    def plain(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """An ordinary object of the class that the model had: code makes such by ``type(model)(...)``, as slices do."""
        return kind(*args, **kwargs)

    members: dict[str, Any] = {"__new__": plain, **methods_refused(model)}
    if not in_order:

        def forward(self: OffloadModel, *inputs: Any, **kwargs: Any) -> Any:
            return OffloadModel.forward(self, *inputs, **kwargs)

        forward.__doc__ = kind.forward.__doc__
        # Not __wrapped__: code that takes the wrappers of a forward off would take this one off, too.
        vars(forward)["__signature__"] = inspect.signature(kind.forward)
        members["forward"] = forward
    if hasattr(kind, "from_pretrained"):
        members["from_pretrained"] = kind.from_pretrained
    members |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    meta: Any = type(kind)
    made: type[nn.Module] = meta(kind.__name__, (base, kind), members)
    return made


def _change(model: nn.Module, offloaded_kind: type[nn.Module], state: Offloaded, undo: Callable[..., Any]) -> None:
    """Makes the model one of ``offloaded_kind``; ``undo`` gets what changes it back."""
    attributes = dict(vars(model))

    def back() -> None:
        object.__setattr__(model, "__class__", state.kind)
        vars(model).clear()
        vars(model).update(attributes)

    undo(back)
    vars(model).pop("forward", None)
    vars(model)["_offloaded"] = state
    object.__setattr__(model, "__class__", offloaded_kind)


def _rebuild(bare: nn.Module, arguments: Arguments) -> OffloadModel:
    return offload(bare, **vars(arguments))


def _close_at_exit(model: weakref.ref[nn.Module], made_in: int) -> None:
    """Closes a model with a kept home that lives when the program ends."""
    left = model()
    if isinstance(left, OffloadModel) and os.getpid() == made_in:
        left.close()
