"""Many processes: each walks its own chunks alone, and all gradients of a step are averaged once.

DistributedDataParallel reduces gradients during backward, so over two towers it reduces twice, over tied towers the
second reduction averages what the first had averaged already, and over chunks once per chunk unless told otherwise; its
static graph expects one backward per forward. GradCache knows when a step is done, so it calls the wrapped modules
themselves and averages every gradient then, each once, parameters of the loss included.

Guarantees
    * No collective runs inside the walk: processes may have different numbers of chunks, and of rows.
    * After the step ``.grad`` is the same on every process: the mean of the processes' gradients. A parameter that no
      process used keeps its ``.grad``; one that some process used counts 0 for the others.

Limits: communication hooks registered on DistributedDataParallel are not called. A process that fails inside a step
leaves the others waiting for it until the process group's timeout.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["Reduction", "unwrapped"]

_BUCKET_BYTES = 25 << 20


def unwrapped(model: nn.Module) -> nn.Module:
    """The module inside DistributedDataParallel; any other module as it is."""
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    return model


class Reduction:
    """The one reduction of a step.

    Args:
        models: the towers; those wrapped in DistributedDataParallel take part.
        others: modules whose parameters take part as soon as any tower does, such as the loss.

    Raises:
        ValueError: if towers are wrapped with different process groups.
    """

    def __init__(self, models: Iterable[nn.Module], others: Iterable[nn.Module]) -> None:
        wrapped = [model for model in models if isinstance(model, DistributedDataParallel)]
        others = list(others)
        wrapped += [other for other in others if isinstance(other, DistributedDataParallel)]
        self._wrapped = list({id(model): model for model in wrapped}.values())
        groups = {id(model.process_group): model.process_group for model in self._wrapped}
        if len(groups) > 1:
            raise ValueError("expected all towers in one process group, got several; wrap them with the same one")
        self._group: dist.ProcessGroup | None = next(iter(groups.values()), None)
        self._members: set[int] = set()
        for model in self._wrapped:
            ignored = set(getattr(model, "parameters_to_ignore", ()))
            named = model.module.named_parameters()
            self._members |= {id(parameter) for name, parameter in named if name not in ignored}
        if self._wrapped:
            self._members |= {id(parameter) for other in others for parameter in other.parameters()}

    def __bool__(self) -> bool:
        return bool(self._wrapped)

    @contextlib.contextmanager
    def silenced(self) -> Iterator[None]:
        """Inside, the wrappers reduce nothing by themselves, should a caller of theirs run them."""
        with contextlib.ExitStack() as stack:
            for model in self._wrapped:
                stack.enter_context(model.no_sync())
            yield

    def broadcast_buffers(self) -> None:
        """Rank 0's buffers on every process, as DistributedDataParallel does before a training forward."""
        for model in self._wrapped:
            if model.broadcast_buffers:
                first = dist.get_global_rank(self._group, 0) if self._group is not None else 0
                for buffer in model.module.buffers():
                    dist.broadcast(buffer, src=first, group=self._group)

    def average(self, parameters: Sequence[nn.Parameter], gradients: list[Tensor | None]) -> list[Tensor | None]:
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


def _dense(gradient: Tensor | None, parameter: nn.Parameter) -> Tensor:
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
