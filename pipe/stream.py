"""Functions on streams and devices that work for CUDA and for the CPU.

Code that orders copies and kernels uses a stream for each device. The CPU has no streams: its operations complete
immediately and in order, so its stream is a placeholder and waiting for it does nothing. With these functions the same
code serves both, and this is the only module of the pipeline that uses ``torch.cuda``.
"""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any, TypeGuard

import torch
from torch import Tensor

__all__ = [
    "AbstractStream",
    "CPUStream",
    "CPUStreamType",
    "copy_stream",
    "current_stream",
    "get_device",
    "is_cuda",
    "new_stream",
    "normalize_device",
    "record_stream",
    "to_device",
    "use_device",
    "use_stream",
    "wait_stream",
]


class CPUStreamType:
    """The type of :data:`CPUStream`."""

    def __repr__(self) -> str:
        return "CPUStream"


CPUStream = CPUStreamType()
"""The placeholder for a stream of a device that is not CUDA."""

_NOTHING: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

AbstractStream = torch.cuda.Stream | CPUStreamType


def normalize_device(device: torch.device | int | str) -> torch.device:
    """The device with the index that torch would use: ``cuda`` is the current one, and all CPUs are one."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    if device.type == "cpu":
        return torch.device("cpu")
    return device


def is_cuda(stream: AbstractStream) -> TypeGuard[torch.cuda.Stream]:
    """Whether it is a CUDA stream."""
    return not isinstance(stream, CPUStreamType)


def new_stream(device: torch.device) -> AbstractStream:
    """A new stream of ``device``."""
    return torch.cuda.Stream(device) if device.type == "cuda" else CPUStream


@cache
def copy_stream(device: torch.device, stage: int, micro_batch: int) -> AbstractStream:
    """The stream of ``device`` for copies of a micro-batch to and from a stage.

    It is kept for the process, since the caching allocator has a memory pool for each stream.
    """
    return new_stream(device)


def current_stream(device: torch.device) -> AbstractStream:
    """The current stream of ``device``."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else CPUStream


def get_device(stream: AbstractStream) -> torch.device:
    """The device of a stream."""
    return stream.device if is_cuda(stream) else torch.device("cpu")


def use_device(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``device`` is the current CUDA device; does nothing for other devices."""
    return torch.cuda.device(device) if device.type == "cuda" else _NOTHING


def use_stream(stream: AbstractStream) -> contextlib.AbstractContextManager[Any]:
    """A context in which ``stream`` is the current stream of its device."""
    return torch.cuda.stream(stream) if is_cuda(stream) else _NOTHING


def wait_stream(source: AbstractStream, target: AbstractStream) -> None:
    """Makes ``source`` wait for the work queued on ``target`` now. The host waits only if ``source`` is the CPU."""
    if not is_cuda(target):
        return
    if is_cuda(source):
        source.wait_stream(target)
    else:
        # The CPU has no queue; without this, it reads memory before the copy has written it.
        target.synchronize()


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device; the host waits for copies to itself, and of its page-locked memory."""
    # Without waiting, a copy from page-locked memory reads what a loader has written there since.
    goes_on = device.type == "cpu" or (tensor.layout is torch.strided and tensor.is_pinned())
    return tensor.to(device, non_blocking=not goes_on)


def record_stream(tensor: Tensor, stream: AbstractStream) -> None:
    """Tells the allocator that ``stream`` uses the tensor, so that its memory is not reused before that use ends."""
    if not is_cuda(stream) or not tensor.is_cuda:
        return
    # The allocator knows the beginnings of storages only, and a view may start in the middle of one.
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    storage.record_stream(stream)
