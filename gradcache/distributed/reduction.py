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
    * The caller's own forward of a wrapper, in the same backward or across a step, is reduced by the wrapper.

Limits: communication hooks registered on DistributedDataParallel are not called. If a process fails inside a step, the
others wait for it until the process group's timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradcache import representations
from gradcache.used_modules import UsedModules, leaves_of
from offload.identities import identities_only
from pipe.nested import tensors_in
from pipe.recompute.module_contents import EngineHook
from pipe.torch_private.autograd import at_end_of_backward

__all__ = ["Reduction", "after_backward", "broadcast_buffers", "unwrapped", "watch", "wrappers_in"]

_BUCKET_BYTES = 25 << 20
# For each wrapper, the number of forwards whose backward has not run.
_pending: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel; any other module itself."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


@identities_only()
def wrappers_in(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Each DistributedDataParallel among ``modules`` and their submodules, once."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    found = [inner for module in modules for inner in module.modules() if isinstance(inner, DistributedDataParallel)]
    return list({id(wrapper): wrapper for wrapper in found}.values())


def watch(modules: Iterable[nn.Module]) -> None:
    """Starts to count, for each wrapper, the caller's own forwards, whose backward the wrapper reduces itself."""
    for wrapper in wrappers_in(modules):
        if wrapper not in _pending:
            _pending[wrapper] = 0
            wrapper.register_forward_hook(EngineHook(_note_forward))


def _note_forward(wrapper: nn.Module, args: Any, output: Any) -> None:
    outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    if not outputs or not torch.is_grad_enabled() or not wrapper.require_backward_grad_sync:
        return
    _pending[wrapper] += 1
    reached = False

    def on_gradient(gradient: Tensor) -> None:
        nonlocal reached
        if not reached:
            reached = True
            after_backward(lambda: _pending.update({wrapper: max(_pending[wrapper] - 1, 0)}))

    for tensor in outputs:
        tensor.register_hook(on_gradient)


def after_backward(function: Callable[[], None]) -> None:
    """Calls a function at the end of the running backward, after the callbacks that others queued."""
    # A callback queued by a callback runs after those that were queued before, such as DDP's reductions.
    at_end_of_backward(lambda: at_end_of_backward(function))


def broadcast_buffers(modules: Iterable[nn.Module]) -> None:
    """Copies rank 0's buffers to every process, as DistributedDataParallel does before a training forward."""
    for wrapper in wrappers_in(modules):
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
        self._wrapped = wrappers_in([*models, *heads.modules])
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
        used = torch.tensor(
            [gradients[k] is not None for k in mine], dtype=torch.int32, device=parameters[mine[0]].device
        )
        for group in self._groups:
            dist.all_reduce(used, op=dist.ReduceOp.MAX, group=group)
        taking_part = [k for k, flag in zip(mine, used.tolist(), strict=True) if flag]
        for k in taking_part:
            gradients[k] = _dense(gradients[k], parameters[k])
        for bucket in _buckets(taking_part, gradients):
            self._average_bucket(bucket, gradients)
        return gradients

    def _average_bucket(self, bucket: list[int], gradients: list[Tensor | None]) -> None:
        parts = [gradient for k in bucket if (gradient := gradients[k]) is not None]
        flat = torch.cat([part.reshape(-1) for part in parts])
        for group in self._groups:
            dist.all_reduce(flat, group=group)
            flat /= dist.get_world_size(group)
        for k, part, mean in zip(bucket, parts, flat.split([part.numel() for part in parts]), strict=True):
            gradients[k] = part.copy_(mean.view_as(part))


def _groups_of_mesh(models: Sequence[nn.Module]) -> list[dist.ProcessGroup | None]:
    """The groups of the mesh on which the parameters of a tower are DTensors; none without one."""
    mesh = next((found for model in models if (found := _mesh_of(model)) is not None), None)
    return [] if mesh is None else [*mesh.get_all_groups()]


def _mesh_of(model: nn.Module) -> Any:
    """The mesh on which parameters of a module are DTensors; None without any."""
    return next((p.device_mesh for p in model.parameters() if hasattr(p, "device_mesh")), None)


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A dense gradient of the same dtype on every process: 32 bits for narrow types, as ``Accumulation`` sums them."""
    wide = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
    if gradient is None:
        return torch.zeros_like(parameter, dtype=wide, requires_grad=False)
    return gradient.to_dense() if gradient.is_sparse else gradient.to(wide)


def _buckets(indices: list[int], gradients: list[Tensor | None]) -> Iterable[list[int]]:
    """Groups of consecutive gradients of one dtype and device, up to 25 MiB each, to be flattened together."""
    bucket: list[int] = []
    kind, size = None, 0
    for k in indices:
        gradient = gradients[k]
        assert gradient is not None
        bytes_ = gradient.numel() * gradient.element_size()
        if bucket and (kind != (gradient.dtype, gradient.device) or size + bytes_ > _BUCKET_BYTES):
            yield bucket
            bucket, size = [], 0
        kind, size = (gradient.dtype, gradient.device), size + bytes_
        bucket.append(k)
    if bucket:
        yield bucket
