"""Memory for results that a thread soon drops, kept between its calls.

An allocator returns freed blocks of this size to the kernel. The page faults of the next ones take several times as
long as a pass of arithmetic over them.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable

import torch
from torch import Tensor

from offload.storage.buffer import host_buffer

__all__ = ["PIECE", "thread_memory"]

#: Elements of states or weights that are converted, updated and stored at a time: few enough for the processor's
#: cache, and so many that calls of torch count little: half as many take a fifth more time.
PIECE = 1 << 17


class _Kept(threading.local):
    def __init__(self) -> None:
        self.memory: dict[Hashable, Tensor] = {}


_kept = _Kept()


def thread_memory(name: Hashable, count: int, dtype: torch.dtype) -> Tensor:
    """``count`` elements (flat, of any values), the calling thread's until it asks for this name again.

    A name keeps as many bytes as it was ever asked for, until the thread ends. OSError without memory.
    """
    nbytes = count * dtype.itemsize
    memory = _kept.memory.get(name)
    if memory is None or memory.numel() < nbytes:
        _kept.memory.pop(name, None)
        memory = None  # before the larger one is made
        # Else later writes outside of inference mode would be refused.
        with torch.inference_mode(False):
            memory = _kept.memory[name] = host_buffer(nbytes)
    return memory[:nbytes].view(dtype)
