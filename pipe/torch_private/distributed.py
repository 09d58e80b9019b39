"""Private names of ``torch.distributed``: the store and the timeouts of process groups."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

__all__ = ["store_of_processes", "timeout_of"]


def timeout_of(group: Any, device_type: str = "cpu") -> timedelta:
    """The timeout of the collectives of a process group on the CPU, or on devices of another type."""
    timeout: timedelta = group._get_backend(torch.device(device_type)).options._timeout
    return timeout


def store_of_processes() -> tuple[Any, Callable[[], Any]]:
    """The key-value store of the default process group, and what makes a connection of its own to it.

    Without a connection of its own, a thread has to wait as long as another one waits for a key.
    """
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()
    return store, getattr(store, "clone", lambda: store)  # torch 2.8 has one connection
