"""Private names of ``torch.distributed``: stores and timeouts of process groups, what checkpoints consist of."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch

__all__ = ["metadata_types", "store_of_processes", "timeout_of"]


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


def metadata_types() -> list[Any]:
    """Classes of what ``torch.distributed.checkpoint`` says of tensors, for ``torch.serialization.safe_globals``."""
    from torch.distributed.checkpoint import filesystem, metadata

    names = "Metadata MetadataIndex TensorStorageMetadata ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING"
    return [*(getattr(metadata, name) for name in names.split()), filesystem._StorageInfo]
