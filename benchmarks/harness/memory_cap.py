"""A hard cap on a process's private memory.

``RLIMIT_DATA`` limits private writable mappings (heap, large tensors, thread stacks), touched or not; an allocation
beyond it fails. Shared mappings of files are not limited, because the kernel can drop their pages.
"""

import os
import re

import psutil

from benchmarks.harness.case import Outcome
from benchmarks.harness.memory import data_bytes
from benchmarks.harness.table import mebibytes

SHARE_OF_AVAILABLE = 0.9
LACKS_MEMORY = re.compile(
    r"allocate memory|MemoryError|out of memory|bad_alloc|ENOMEM|start new thread", re.IGNORECASE
)  # a thread needs a stack, and its error says nothing of memory


def available_bytes() -> int:
    """What a process may take without hurting others."""
    return int(SHARE_OF_AVAILABLE * psutil.virtual_memory().available)


def lacks_memory(text: str) -> bool:
    """Whether an error message tells of a failed allocation."""
    return bool(LACKS_MEMORY.search(text))


def died_of_memory(outcome: Outcome) -> bool:
    """Whether the case ended for want of memory."""
    return outcome.failure is not None and lacks_memory(outcome.failure)


def cap_memory(nbytes: int) -> None:
    """From here on this process maps at most ``nbytes`` of private memory.

    Raises:
        MemoryError: if it has mapped as much already.
        OSError: if the system has no such limit, or refuses it.
    """
    held = data_bytes(os.getpid())
    if held >= nbytes:
        raise MemoryError(
            f"cannot allocate memory: the cap of {mebibytes(nbytes)} is no more than the {mebibytes(held)} that the "
            f"process has mapped before it begins"
        )
    try:
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (nbytes, resource.getrlimit(resource.RLIMIT_DATA)[1]))
    except (ImportError, OSError, ValueError) as error:
        raise OSError(f"expected a system that caps a process at {nbytes:,} bytes of private memory") from error
