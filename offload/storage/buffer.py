"""Host memory that files and accelerators copy to and from at full speed: whole pages, large ones, page-locked.

``torch.empty`` aligns to a cache line. A file that is read past the page cache needs whole pages, a driver locks whole
pages, and both, as well as the processor's tables, are quicker with few large pages than with many small ones.

Guarantees
    * A buffer begins on a page, is zero, has exactly the bytes asked for, and takes less than a page more.
    * Its memory goes with the last tensor that views it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import warnings

import torch
from torch import Tensor

from offload.process import finalize_here

__all__ = ["PAGE_BYTES", "device_buffer", "host_buffer", "page_lock", "view_memory", "whole_pages"]

#: What addresses, offsets and sizes of direct transfers are a multiple of: the page, and the largest usual sector.
PAGE_BYTES = max(4096, mmap.PAGESIZE)

_memory_view = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_view.restype = ctypes.py_object
_memory_view.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)
_WRITABLE = 0x200


def whole_pages(nbytes: int) -> int:
    """``nbytes``, rounded up to pages."""
    return -(-nbytes // PAGE_BYTES) * PAGE_BYTES


def host_buffer(nbytes: int) -> Tensor:
    """A zeroed flat uint8 tensor on the CPU that begins on a page, in huge pages where the system has them.

    Raises:
        OSError: if there is no room.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    # Private: huge pages of shared memory are another setting of the system, and usually off.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    # The tensor holds the mapping, which goes with it.
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


def device_buffer(nbytes: int, device: torch.device) -> Tensor:
    """Memory of a compute device for a slot, flat, uint8: what a file can be read into straight if that is the CPU."""
    return host_buffer(nbytes) if device.type == "cpu" else torch.empty(nbytes, dtype=torch.uint8, device=device)


def view_memory(tensor: Tensor) -> memoryview:
    """The bytes of a flat uint8 host tensor for calls of the system. Whoever uses the view keeps the tensor."""
    view: memoryview = _memory_view(tensor.data_ptr(), tensor.numel(), _WRITABLE)
    return view


def page_lock(tensor: Tensor, label: str) -> bool:
    """Registers the memory of a host tensor with the CUDA driver, so that copies to and from it run beside compute.

    torch's own allocator of page-locked memory rounds each request to a power of two, up to 1.9 times the bytes. Where
    the driver refuses, copies still work, but they no longer overlap with compute: a warning says so.

    Returns:
        Whether the memory is locked. It is unlocked when it goes.
    """
    runtime = torch.cuda.cudart()
    address = tensor.data_ptr()
    code = int(runtime.cudaHostRegister(address, tensor.numel(), 0))
    if code != 0:
        warnings.warn(
            f"{label}: cannot page-lock {tensor.numel():,} bytes of host memory (CUDA error {code}); copies will not "
            f"overlap with compute. Raise the limit on locked memory (ulimit -l) or use a directory as home",
            RuntimeWarning,
            stacklevel=2,
        )
        return False
    finalize_here(tensor.untyped_storage(), runtime.cudaHostUnregister, address)
    return True
