"""Private names of ``torch.distributed``: timeouts of process groups, what checkpoints consist of."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch

__all__ = ["has_counted_graph", "metadata_types", "timeout_of"]


def has_counted_graph(wrapper: Any) -> bool:
    """Whether a DistributedDataParallel with a static graph has run its first backward, which counts gradients."""
    return bool(getattr(wrapper, "_static_graph_delay_allreduce_enqueued", True))


def timeout_of(group: Any, device_type: str = "cpu") -> timedelta:
    """The timeout of the collectives of a process group on the CPU, or on devices of another type."""
    timeout: timedelta = group._get_backend(torch.device(device_type)).options._timeout
    return timeout


def metadata_types() -> list[Any]:
    """Classes of what ``torch.distributed.checkpoint`` says of tensors, for ``torch.serialization.safe_globals``."""
    from torch.distributed.checkpoint import filesystem, metadata

    names = "Metadata MetadataIndex TensorStorageMetadata ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING"
    return [*(getattr(metadata, name) for name in names.split()), filesystem._StorageInfo]
