"""Many processes: each walks its own chunks alone, and all gradients of a step are averaged once.

DistributedDataParallel reduces gradients during backward, so over two towers it reduces twice, over tied towers the
second reduction averages what the first had averaged already, and over chunks once per chunk unless told otherwise; its
static graph expects one backward per forward. GradCache knows when a step is done, so it calls the wrapped modules
themselves and averages every gradient then, each once, parameters of the loss included.

Guarantees
    * No collective runs inside the walk: processes may have different numbers of chunks, and of rows.
    * After the step ``.grad`` is the same on every process: the mean of the processes' gradients. A parameter that no
      process used keeps its ``.grad``; one that some process used counts 0 for the others.
    * What the step trains besides towers (a loss, a head, what ``process_fn`` trains) is averaged as they are, however
      it is spelt: see ``reach``. A trainable tensor that is not found is refused before any ``.grad`` is written.
    * A forward of a wrapper of the caller's own, in the same backward or across a step, is reduced by the wrapper.

Limits: communication hooks registered on DistributedDataParallel are not called. A process that fails inside a step
leaves the others waiting for it until the process group's timeout.
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
from gradcache.reach import Reach, leaves_of
from pipe.module_hooks import EngineHook
from pipe.nested import tensors_in
from pipe.torch_private import at_end_of_backward

__all__ = ["Reduction", "after_backward", "unwrapped", "watch", "wrappers_in"]

_BUCKET_BYTES = 25 << 20
# Forwards of wrappers whose backward has not run.
_pending: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel; any other module as it is."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


def wrappers_in(modules: Iterable[nn.Module]) -> list[DistributedDataParallel]:
    """Each DistributedDataParallel among modules, and inside of them, once."""
    if not dist.is_available() or not dist.is_initialized():
        return []
    found = [inner for module in modules for inner in module.modules() if isinstance(inner, DistributedDataParallel)]
    return list({id(wrapper): wrapper for wrapper in found}.values())


def watch(modules: Iterable[nn.Module]) -> None:
    """Notes from now on which wrappers run forward for a backward that they reduce by themselves."""
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
    """Calls a function when the backward that is running is done, and what else waits for that."""
    # A callback of a callback runs after those that were there before, the wrappers' reductions among them.
    at_end_of_backward(lambda: at_end_of_backward(function))


class Reduction:
    """The one reduction of a step.

    Args:
        models: the towers; those wrapped in DistributedDataParallel, or that contain one, take part.
        heads: what else is trained; it takes part as soon as any tower does.

    Raises:
        ValueError: if towers are wrapped with different process groups.
    """

    def __init__(self, models: Sequence[nn.Module], heads: Reach) -> None:
        self._wrapped = wrappers_in([*models, *heads.modules])
        groups = {id(model.process_group): model.process_group for model in self._wrapped}
        if len(groups) > 1:
            raise ValueError("expected all towers in one process group, got several; wrap them with the same one")
        self._group: dist.ProcessGroup | None = next(iter(groups.values()), None)
        self._members: set[int] = set()
        for model in self._wrapped:
            ignored = set(getattr(model, "parameters_to_ignore", ()))
            named = model.module.named_parameters()
            self._members |= {id(parameter) for name, parameter in named if name not in ignored}
        self._known = set(self._members)
        if self._wrapped:
            self._members |= {id(tensor) for tensor in heads.parameters()}
            self._known |= self._members | {id(p) for model in models for p in model.parameters()}
            self._known |= {id(tensor) for model in models for tensor in getattr(model, "tensors", ())}

    def __bool__(self) -> bool:
        return bool(self._wrapped)

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside, the wrappers reduce nothing by themselves, should a caller of theirs run them."""
        with contextlib.ExitStack() as stack:
            for model in self._wrapped:
                stack.enter_context(model.no_sync())
            if self.awaited:
                stack.enter_context(representations.past_accumulation_hooks())
            yield

    @property
    def awaited(self) -> bool:
        """Whether a wrapper waits for the backward of a forward of the caller's own.

        It then counts the first gradient of each parameter as that backward's, so it must not see the step's.
        """
        return any(_pending.get(model, 0) for model in self._wrapped)

    def check(self, output: Any, given: Any) -> None:
        """Checks that all that is trained by a graph is known.

        Args:
            output: what the graph computes.
            given: what it begins with; tensors of the caller's that take a gradient stay with the process.

        Raises:
            ValueError: if gradients of some tensor would stay what they are in this process.
        """
        if not self._wrapped:
            return
        known = self._known | {id(tensor) for tensor in tensors_in(given)}
        outputs = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
        unknown = [tuple(leaf.shape) for leaf in leaves_of(*outputs) if id(leaf) not in known]
        if unknown:
            raise ValueError(
                f"expected to find all that a step over DistributedDataParallel trains, got trainable tensors "
                f"(shapes {unknown}) that are neither parameters of a tower nor seen to be used by loss_fn, "
                f"get_rep_fn or process_fn, so that processes would drift apart; make the function an nn.Module that "
                f"has them as parameters"
            )

    def broadcast_buffers(self) -> None:
        """Rank 0's buffers on every process, as DistributedDataParallel does before a training forward."""
        for model in self._wrapped:
            if model.broadcast_buffers:
                first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
                for buffer in model.module.buffers():
                    dist.broadcast(buffer, src=first, group=self._group)

    def average(self, parameters: Sequence[Tensor], gradients: list[Tensor | None]) -> list[Tensor | None]:
        """The mean over processes of the gradients of the parameters that take part; the others' as they are."""
        mine = [k for k, parameter in enumerate(parameters) if id(parameter) in self._members]
        if not mine:
            return gradients
        used = torch.tensor(
            [gradients[k] is not None for k in mine], dtype=torch.int32, device=parameters[mine[0]].device
        )
        dist.all_reduce(used, op=dist.ReduceOp.MAX, group=self._group)
        taking_part = [k for k, flag in zip(mine, used.tolist(), strict=True) if flag]
        for k in taking_part:
            gradients[k] = _dense(gradients[k], parameters[k])
        for bucket in _buckets(taking_part, gradients):
            self._average_bucket(bucket, gradients)
        return gradients

    def _average_bucket(self, bucket: list[int], gradients: list[Tensor | None]) -> None:
        parts = [gradient for k in bucket if (gradient := gradients[k]) is not None]
        flat = torch.cat([part.reshape(-1) for part in parts])
        dist.all_reduce(flat, group=self._group)
        flat /= dist.get_world_size(self._group)
        for k, part, mean in zip(bucket, parts, flat.split([part.numel() for part in parts]), strict=True):
            gradients[k] = part.copy_(mean.view_as(part))


def _dense(gradient: Tensor | None, parameter: Tensor) -> Tensor:
    """A gradient that every process lays out alike: 32 bits for narrow types, as ``Accumulation`` sums them."""
    wide = torch.float32 if parameter.dtype in (torch.bfloat16, torch.float16) else parameter.dtype
    if gradient is None:
        return torch.zeros_like(parameter, dtype=wide, requires_grad=False)
    return gradient.to_dense() if gradient.is_sparse else gradient.to(wide)


def _buckets(indices: list[int], gradients: list[Tensor | None]) -> Iterable[list[int]]:
    """Neighbours of one type and device, flattened together while they fit."""
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
