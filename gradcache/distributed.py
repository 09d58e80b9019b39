"""Averages the gradients of a GradCache step over processes, once per step, instead of DistributedDataParallel.

DistributedDataParallel reduces gradients during backward. With two towers it would reduce twice, with tied towers the
second reduction would average gradients that are averages already, and with chunks it would reduce once per chunk
without ``no_sync``; its static graph expects one backward per forward. So GradCache calls the wrapped modules directly,
and averages every gradient once at the end of the step, those of the loss's parameters included.

Guarantees
    * No collective runs while chunks run: processes may have different numbers of chunks, and of rows.
    * After the step ``.grad`` is the same on every process: the mean of the processes' gradients. A parameter that no
      process used keeps its ``.grad``; if only some processes used it, its gradient counts as 0 in the others.
    * Trainable parts outside towers (a loss, a head, ``process_fn``) are averaged as well: they are found in the
      functions, see ``used_modules``. A trainable tensor that is not found is refused before any ``.grad`` is written.
    * Towers with DTensors as parameters (``fully_shard``, ``OffloadModel`` with ``mesh=``) reduce their own gradients.
      Other parameters of such a tower, and trainable parts outside that are found, are averaged beside them.
    * The caller's own forward of a wrapper, in the same backward or across a step, is reduced by the wrapper. With a
      static graph its first backward must come before the first step.

Each forward of a tower that FSDP shards is a collective, so every process must run
equally many chunks of it, in the same order. With unequal numbers some processes would wait for ever; so the numbers
are compared before any chunk runs.

Limits: communication hooks registered on DistributedDataParallel are not called. If a process fails inside a step, the
others wait for it until the process group's timeout.

Rows are gathered with gradients from processes with different numbers of them: the processes first exchange these
numbers; shorter tensors are padded for the collective, and the padding is removed afterwards.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.parallel import DistributedDataParallel

from gradcache import representations
from gradcache.autograd_node import Gradients, wide, with_backward
from gradcache.used_modules import UsedModules
from offload.identities import identities_only
from pipe.gradients import leaves_of
from pipe.nested import tensors_in
from pipe.torch_private.autograd import at_end_of_backward
from pipe.torch_private.distributed import has_counted_graph

__all__ = [
    "Reduction",
    "RowsOfAll",
    "after_backward",
    "broadcast_buffers",
    "check_equal_chunks",
    "gather_own",
    "gather_rows",
    "over_processes",
    "rows_per_rank",
    "unwrapped",
    "watch",
]


def rows_per_rank(*rows: int, device: torch.device, group: dist.ProcessGroup | None = None) -> list[tuple[int, ...]]:
    """The ``rows`` of every process, in rank order; one collective for all values."""
    mine = torch.tensor(rows, dtype=torch.int64, device=device)
    world = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(world, mine, group=group)
    return [tuple(int(n) for n in row.tolist()) for row in world]


def _gathered(tensor: Tensor, rows: list[int], group: dist.ProcessGroup | None) -> list[Tensor]:
    longest = max(rows)
    padded = tensor.contiguous()
    if tensor.size(0) < longest:
        padded = torch.cat([padded, padded.new_zeros(longest - tensor.size(0), *tensor.shape[1:])])
    world = [torch.empty_like(padded) for _ in rows]
    dist.all_gather(world, padded, group=group)
    return [part[:n] for part, n in zip(world, rows, strict=True)]


def gather_own(tensor: Tensor, axis: int = 0, group: dist.ProcessGroup | None = None) -> Tensor:
    """All processes' tensors along ``axis``; only this process's part gets a gradient, with no communication."""
    moved = tensor.movedim(axis, 0) if tensor.dim() else tensor.reshape(1)
    rows = [n for (n,) in rows_per_rank(moved.size(0), device=moved.device, group=group)]
    parts = _gathered(moved.detach(), rows, group)
    parts[dist.get_rank(group)] = moved
    joined = torch.cat(parts)
    return joined.movedim(0, axis) if tensor.dim() else joined


def gather_rows(tensor: Tensor, rows: list[int], group: dist.ProcessGroup | None = None) -> Tensor:
    """All processes' ``rows`` of ``tensor``; the gradient of a row is the sum over the losses of all processes."""

    def backward(gradients: Gradients) -> Gradients:
        # Every process computed a part of every row's gradient: the sum of all parts is the gradient.
        (gradient,) = gradients
        assert gradient is not None
        summed = gradient.contiguous().clone()
        dist.all_reduce(summed, group=group)
        return [summed.split(rows)[dist.get_rank(group)].clone()]

    return with_backward([torch.cat(_gathered(tensor.detach(), rows, group))], [tensor], backward)[0]


def over_processes(mine: Tensor, count: int, dtype: torch.dtype, group: dist.ProcessGroup | None = None) -> Tensor:
    """The sum of every process's ``mine`` over ``count``, on every process.

    Its gradient is this process's, scaled so that the mean over processes is the gradient of the whole.
    """
    world = dist.get_world_size(group)
    loss = mine * (world / max(count, 1))
    value = loss.detach().clone()
    dist.all_reduce(value, group=group)
    # The difference is exactly zero; it adds this process's gradient to the big batch's value.
    return (value / world + (loss - loss.detach())).to(dtype)


class RowsOfAll:
    """The rows of a batch in columns: those of all processes if ``gathers`` and there are several, else this one's.

    Raises:
        ValueError: if the ``columns`` of this process, each (rows, width), differ in their rows.
    """

    def __init__(self, columns: Sequence[Tensor], gathers: bool) -> None:
        rows, device = columns[0].size(0), columns[0].device
        if any(column.size(0) != rows for column in columns):
            sizes = [column.size(0) for column in columns[1:]]
            raise ValueError(f"expected as many rows in each column as anchors, got {sizes} for {rows} anchors")
        self._gathers = gathers and dist.is_available() and dist.is_initialized()
        self._per_rank = [n for (n,) in rows_per_rank(rows, device=device)] if self._gathers else [rows]
        start = sum(self._per_rank[: dist.get_rank()]) if self._gathers else 0
        #: The numbers of this process's rows among all.
        self.own = torch.arange(start, start + rows, device=device)

    def gathered(self, column: Tensor) -> Tensor:
        """A column of all processes, as :func:`gather_rows` does."""
        return gather_rows(column, self._per_rank) if self._gathers else column

    def mean(self, mine: Tensor, dtype: torch.dtype) -> Tensor:
        """The mean over all rows of a loss whose sum over this process's rows is ``mine``, in ``dtype``."""
        total = sum(self._per_rank)
        return over_processes(mine, total, dtype) if self._gathers else (mine / max(total, 1)).to(dtype)


_BUCKET_BYTES = 25 << 20
#: For each wrapper, the number of forwards whose backward has not run.
_pending: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
#: Wrappers whose static graph took a backward of a step for their own first one: they would reduce nothing later.
_miscounted: WeakSet[nn.Module] = WeakSet()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel; any other module itself."""
    return cast(nn.Module, model.module) if isinstance(model, DistributedDataParallel) else model


@identities_only()
def _wrappers_in(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Each DistributedDataParallel among ``modules`` and their submodules, once."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    found = [inner for module in modules for inner in module.modules() if isinstance(inner, DistributedDataParallel)]
    return list({id(wrapper): wrapper for wrapper in found}.values())


def watch(modules: Iterable[nn.Module]) -> None:
    """Starts to count, for each wrapper, the caller's own forwards, whose backward the wrapper reduces itself."""
    for wrapper in _wrappers_in(modules):
        if wrapper not in _pending:
            _pending[wrapper] = 0
            wrapper.register_forward_hook(_note_forward)


def _note_forward(wrapper: nn.Module, args: Any, output: Any) -> None:
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs or not torch.is_grad_enabled() or not wrapper.require_backward_grad_sync:
        return
    if wrapper in _miscounted:
        raise RuntimeError(
            "expected DistributedDataParallel(static_graph=True) to run a first backward of its own before GradCache "
            "steps, since it counts gradients in its first one; run one before them, or leave out static_graph"
        )
    _pending[wrapper] += 1

    def on_first_gradient(gradient: Tensor) -> None:
        handle.remove()
        after_backward(lambda: _pending.update({wrapper: _pending[wrapper] - 1}))

    handle = register_multi_grad_hook(outputs, on_first_gradient, mode="any")


def after_backward(function: Callable[[], None]) -> None:
    """Calls a function at the end of the running backward, after the callbacks that others queued."""
    # A callback queued by a callback runs after those that were queued before, such as DDP's reductions.
    at_end_of_backward(lambda: at_end_of_backward(function))


def broadcast_buffers(modules: Iterable[nn.Module]) -> None:
    """Copies rank 0's buffers to every process, as DistributedDataParallel does before a training forward."""
    for wrapper in _wrappers_in(modules):
        for buffer in wrapper.module.buffers() if wrapper.broadcast_buffers else ():
            dist.broadcast(buffer, dist.get_global_rank(wrapper.process_group, 0), wrapper.process_group)


class Reduction:
    """The single reduction of a step.

    Args:
        models: the towers; gradients of those wrapped in DistributedDataParallel, or that contain one, are averaged.
        heads: other trainable modules and tensors; averaged if any tower is, or has DTensors as parameters.

    Raises:
        ValueError: if towers are wrapped with different process groups.
    """

    @identities_only()
    def __init__(self, models: Sequence[nn.Module], heads: UsedModules) -> None:
        self._wrapped = _wrappers_in([*models, *heads.modules])
        groups = {id(model.process_group): model.process_group for model in self._wrapped}
        if len(groups) > 1:
            raise ValueError("expected all towers in one process group, got several; wrap them with the same one")
        #: Over which means are taken, one after the other: those of each dimension of a mesh.
        self._groups: list[dist.ProcessGroup | None] = [*groups.values()] or _groups_of_mesh(models)
        #: The averaged tensors, by ``id``, and all that are expected in a graph.
        self._members: set[int] = set()
        for model in self._wrapped:
            ignored = set(getattr(model, "parameters_to_ignore", ()))
            self._members |= {id(p) for name, p in model.module.named_parameters() if name not in ignored}
        if self._groups:
            mixed = (p for model in models if _mesh_of(model) is not None for p in model.parameters())
            self._members |= {id(p) for p in (*heads.parameters(), *mixed) if not hasattr(p, "device_mesh")}
        self._known = self._members | {id(p) for model in models for p in model.parameters()}
        self._known |= {id(tensor) for model in models for tensor in getattr(model, "tensors", ())}

    def __bool__(self) -> bool:
        return bool(self._groups)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """A context in which the wrappers do not reduce, in case a subclass calls them (``no_sync``)."""
        with contextlib.ExitStack() as stack:
            for model in self._wrapped:
                stack.enter_context(model.no_sync())
            if self.has_pending_forwards:
                stack.enter_context(representations.past_accumulation_hooks())
            else:
                _miscounted.update(w for w in self._wrapped if w.static_graph and not has_counted_graph(w))
            yield

    @property
    def has_pending_forwards(self) -> bool:
        """Whether a wrapper ran a forward of the caller's own whose backward has not run.

        It then takes the first gradient of each parameter for that backward's, so its hooks must not run in the step.
        """
        return any(_pending.get(model, 0) for model in self._wrapped)

    def check(self, output: Any, given: Any) -> None:
        """Raises ValueError if the gradient of a trainable leaf of ``output`` that is not ``given`` is not averaged."""
        if not self._wrapped:  # the leaves of a graph of other towers are not their parameters
            return
        known = self._known | {id(tensor) for tensor in tensors_in(given)}
        unknown = [tuple(leaf.shape) for leaf in leaves_of(*tensors_in(output)) if id(leaf) not in known]
        if unknown:
            raise ValueError(
                f"expected to find all that a step over DistributedDataParallel trains, got trainable tensors "
                f"(shapes {unknown}) that are neither parameters of a tower nor seen to be used by loss_fn, "
                f"get_rep_fn or process_fn, so that processes would drift apart; make the function an nn.Module that "
                f"has them as parameters"
            )

    def average(self, parameters: Sequence[Tensor], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The gradients, averaged over processes for the parameters that take part, unchanged for the others."""
        mine = [k for k, parameter in enumerate(parameters) if id(parameter) in self._members]
        if not mine:
            return gradients
        device = parameters[mine[0]].device
        used = torch.tensor([gradients[k] is not None for k in mine], dtype=torch.int32, device=device)
        for group in self._groups:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        dense: dict[int, Tensor] = {}
        for k in (k for k, is_used in zip(mine, used.tolist(), strict=True) if is_used):
            gradients[k] = dense[k] = _dense(gradients[k], parameters[k])
        for bucket in _buckets(dense):
            flat = torch.cat([dense[k].reshape(-1) for k in bucket])
            for group in self._groups:
                dist.all_reduce(flat, group=group)
                flat /= dist.get_world_size(group)
            for k, mean in zip(bucket, flat.split([dense[k].numel() for k in bucket]), strict=True):
                dense[k].copy_(mean.view_as(dense[k]))
        return gradients


def _groups_of_mesh(models: Sequence[nn.Module]) -> list[dist.ProcessGroup | None]:
    """The groups of the mesh on which the parameters of a tower are DTensors; none without one."""
    mesh = next((found for model in models if (found := _mesh_of(model)) is not None), None)
    return [] if mesh is None else [*mesh.get_all_groups()]


def _mesh_of(model: nn.Module) -> Any:
    """The mesh on which parameters of a module are DTensors; None without any."""
    return next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A dense gradient of the same dtype on every process: 32 bits for narrow types, as ``Accumulation`` sums them."""
    if gradient is None:
        return torch.zeros_like(parameter, dtype=wide(parameter.dtype), requires_grad=False)
    return gradient.to_dense() if gradient.is_sparse else gradient.to(wide(parameter.dtype))


def _buckets(gradients: dict[int, Tensor]) -> Iterable[list[int]]:
    """Groups of gradients of one dtype and device, to be flattened together: a new one from every 25 MiB on."""
    buckets: dict[Any, list[int]] = {}
    before = 0
    for k, gradient in gradients.items():
        buckets.setdefault((gradient.dtype, gradient.device, before // _BUCKET_BYTES), []).append(k)
        before += gradient.nbytes
    return buckets.values()


@identities_only()
def _is_sharded(module: nn.Module) -> bool:
    """Whether FSDP, of either kind, shards the module or a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here: a sharded module implies that it is imported
    if fsdp is None:
        return False
    kinds = fsdp.FSDPModule, fsdp.FullyShardedDataParallel
    return any(isinstance(inner, kinds) for inner in module.modules())


@identities_only()
def check_equal_chunks(models: Sequence[nn.Module], chunks: Sequence[int]) -> None:
    """Raises ValueError, in every process that shares a sharded tower, if their numbers of chunks differ."""
    counts = [count for model, count in zip(models, chunks, strict=True) if _is_sharded(model)]
    if not counts:
        return
    for group, device in _groups(models):
        limits = torch.tensor([*counts, *(-count for count in counts)], device=device)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=group)
        most, least = limits.tolist()[: len(counts)], [-limit for limit in limits.tolist()[len(counts) :]]
        if most != least:
            raise ValueError(
                f"expected as many chunks in every process for towers that FSDP shards, since each forward gathers "
                f"parameters from all of them, got {counts} here, and from {least} to {most} elsewhere; pass equal "
                f"rows and chunk_sizes, or wrap towers in DistributedDataParallel"
            )


def _groups(models: Sequence[nn.Module]) -> Iterable[tuple[dist.ProcessGroup, torch.device]]:
    """Each process group that a tower is sharded over, once, with a device for its collectives."""
    found: dict[dist.ProcessGroup, torch.device] = {}
    for module in (module for model in models for module in model.modules()):
        group = getattr(module, "process_group", None)  # of FullyShardedDataParallel
        mine = [group] if group is not None and _is_sharded(module) else []
        device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
        for parameter in module.parameters(recurse=False):
            mesh = getattr(parameter, "device_mesh", None)
            mine += mesh.get_all_groups() if mesh is not None else []
        for each in mine:
            found.setdefault(each, device)
    return found.items()
