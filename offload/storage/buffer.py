"""Allocates page-aligned, huge-page, page-locked host buffers for fast copies from and to files and accelerators.

``torch.empty`` aligns to a cache line, but direct file I/O and the CUDA driver work on whole pages. Both, and address
translation, are faster with few large pages than with many small ones.

Guarantees
    * A buffer begins on a page, is zeroed, has exactly the requested size, and allocates less than a page more.
    * Its memory is freed with the last tensor that views it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import warnings
from collections import defaultdict
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from offload.storage.contract import bytes_of
from pipe.process import finalize_here
from pipe.stream import use_device
from pipe.torch_private.dispatch import is_traceable_wrapper_subclass

__all__ = [
    "PAGE_BYTES",
    "PIECE",
    "copied_to",
    "device_buffer",
    "empty_on_host",
    "has_own_memory",
    "host_buffer",
    "on_own_storage",
    "on_own_storages",
    "page_lock",
    "thread_memory",
    "view_memory",
    "whole_pages",
]

#: Alignment of addresses, offsets and sizes in direct I/O: the page, and the largest usual sector.
PAGE_BYTES = max(4096, mmap.PAGESIZE)

#: Bytes from which a tensor has a mapping of its own; smaller ones fit into free blocks of the heap.
_LEAST_MAPPING = 1 << 20

_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


#: Types of devices that compute in host memory. Tests take the CPU out, which then counts as one with its own memory.
IN_HOST_MEMORY = {"cpu"}


def has_own_memory(device: torch.device) -> bool:
    """Whether layers compute in other memory than that of the host."""
    return device.type not in IN_HOST_MEMORY


def whole_pages(nbytes: int) -> int:
    """``nbytes`` rounded up to whole pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def host_buffer(nbytes: int) -> Tensor:
    """A zeroed flat uint8 CPU tensor that begins on a page, in huge pages where available; OSError without memory."""
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # Private: huge pages of shared mappings have a system setting of their own, which is usually off.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def empty_on_host(meta: Tensor) -> Tensor:
    """A CPU tensor for a meta tensor that is soon dropped again; a large one in a mapping of its own.

    ``torch.empty`` would take it from the heap, where small objects soon lie in the freed block, so that the next
    tensor of that size does not fit: the heap's size, not its pages, would grow by each, up to ``RLIMIT_DATA``.
    """
    like = torch.empty_like(meta)
    if like.nbytes < _LEAST_MAPPING:
        return torch.empty_like(meta, device="cpu")
    return host_buffer(like.nbytes).view(like.dtype).as_strided(like.shape, like.stride())


def device_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Flat uint8 memory of a slot on the compute device; on the CPU, files are read into it without a copy."""
    return host_buffer(nbytes) if device.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)


def on_own_storage(tensor: Tensor) -> Tensor:
    """The same tensor on the same memory, whose storage begins at its first element and keeps the memory alive."""
    # Only an exchange of memory with another library makes a storage in the middle of another one; here both are torch.
    with use_device(tensor.device):  # torch refuses memory of another device
        alone: Tensor = from_dlpack(tensor)
    return alone


def copied_to(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device, itself if it is there; from a GPU to the host in page-locked memory, which is reused."""
    if device.type != "cpu" or not tensor.is_cuda or tensor.layout is not torch.strided:
        return tensor.to(device)
    # Pages of ordinary memory would be taken from the system for each copy, which takes longer than the copy.
    return torch.empty_like(tensor, device=device, pin_memory=True).copy_(tensor)


def view_memory(tensor: Tensor) -> memoryview:
    """The bytes of a flat uint8 host tensor for system calls. The caller keeps the tensor alive."""
    view: memoryview = _memory_view(tensor.data_ptr(), tensor.numel(), _WRITABLE)
    return view


def page_lock(tensor: Tensor, label: str, device: torch.device) -> bool:
    """Page-locks the memory of a host tensor until it is freed, so that its copies overlap with compute; or warns.

    By the CUDA driver: torch's pinned-memory allocator rounds each request up to a power of two. Returns whether it
    did. ``device``: that of the copies. CUDA works on the current one of a thread, and would make a context there if
    that is another, which takes some hundred MiB of its memory.
    """
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    with use_device(device):
        code = int(runtime.cudaHostRegister(address, tensor.numel(), 0))
    if code != 0:
        # CUDA keeps this error, and torch would raise it from its next kernel: a kernel here takes it.
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=device)
        warnings.warn(
            f"{label}: cannot page-lock {tensor.numel():,} bytes of host memory (CUDA error {code}); copies will not "
            f"overlap with compute. Raise the limit on locked memory (ulimit -l) or use a directory as home",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    finalize_here(tensor.untyped_storage(), _unlock, address, device)
    return True


def _unlock(address: int, device: torch.device) -> None:
    with use_device(device):
        torch.cuda.cudart().cudaHostUnregister(address)


def on_own_storages(values: Iterable[Any]) -> dict[int, Tensor]:
    """Another view of each tensor whose storage other tensors view as another dtype, by ``id(tensor)``.

    For ``state_dict()``: tensors of one home are views of one storage, and ``torch.save`` refuses a storage that is
    viewed as several dtypes. So such tensors get storages of their own, each of which begins at the tensor's first byte
    in the same memory.

    Tensors with the same bytes still share a storage. The views are dense, and keep their memory alive.
    """
    tensors = [v for v in values if isinstance(v, Tensor) and v.layout is torch.strided and v.device.type == "cpu"]
    tensors = [t for t in tensors if t.numel() and not is_traceable_wrapper_subclass(t)]
    types: dict[int, set[torch.dtype]] = defaultdict(set)
    for t in tensors:
        types[t.untyped_storage().data_ptr()].add(t.dtype)
    memory: dict[tuple[int, int], Tensor] = {}
    found: dict[int, Tensor] = {}
    for t in tensors:
        if len(types[t.untyped_storage().data_ptr()]) > 1:
            flat = bytes_of(t)
            flat = memory.setdefault((flat.data_ptr(), flat.numel()), on_own_storage(flat))
            found[id(t)] = flat.view(t.dtype).as_strided(t.shape, t.stride())
    return found


#: Elements of states or weights that are converted, updated and stored at a time: few enough for the processor's
#: cache, and so many that calls of torch count little: half as many take a fifth more time.
PIECE = 1 << 17


_kept = threading.local()


def thread_memory(name: Hashable, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` elements (flat, of any values), the calling thread's until it asks for this name again.

    For results that are soon dropped: an allocator returns freed blocks of :data:`PIECE` elements to the kernel, and
    the page faults of the next ones take several times as long as a pass of arithmetic over them.

    A name keeps as many bytes as it was ever asked for, until the thread ends. OSError without memory.
    """
    nbytes = count * dtype.itemsize
    kept: Any = vars(_kept)  # of this thread
    memory: Tensor | None = kept.get(name)
    if memory is None or memory.numel() < nbytes:
        kept.pop(name, None)
        memory = None  # before the larger one is made
        # Else later writes outside of inference mode would be refused.
        with torch.inference_mode(False):
            memory = kept[name] = host_buffer(nbytes)
    return memory[:nbytes].view(dtype)
