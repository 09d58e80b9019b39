"""The most that a process may take on a CPU, whose allocator keeps what was freed as it likes."""

from __future__ import annotations

__all__ = ["memory_bound"]


def memory_bound(limit_bytes: int) -> int:
    """Bytes by which the anonymous memory of a process may rise, with ``memory=limit_bytes``."""
    return int(1.10 * limit_bytes) + (32 << 20)
