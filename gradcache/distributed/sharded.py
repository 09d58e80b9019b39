"""Checks that all processes run the same number of chunks of towers that FSDP shards, or with tables dealt to ranks.

Each forward of a sharded tower is a collective, so every process must run equally many, in the same order. With
unequal numbers of chunks some processes would wait for ever; so the numbers are compared before any chunk runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn

from offload import OffloadEmbeddingBag
from offload.identities import identities_only

__all__ = ["check_equal_chunks", "is_sharded"]


@identities_only()
def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP, of either kind, shards the module or a part of it, or a table of it is dealt to ranks."""
    if any(isinstance(inner, OffloadEmbeddingBag) and inner.is_shared for inner in module.modules()):
        return True
    fsdp = sys.modules.get("torch.distributed.fsdp")  # not imported here: a sharded module implies that it is imported
    if fsdp is None:
        return False
    kinds = tuple(kind for name in ("FSDPModule", "FullyShardedDataParallel") if (kind := getattr(fsdp, name, None)))
    return any(isinstance(inner, kinds) for inner in module.modules())


@identities_only()
def check_equal_chunks(models: Sequence[nn.Module], chunks: Sequence[int]) -> None:
    """Raises ValueError, in every process that shares a sharded tower, if their numbers of chunks differ."""
    counts = [count for model, count in zip(models, chunks, strict=True) if is_sharded(model)]
    if not counts:
        return
    for group, device in _groups(models):
        limits = torch.tensor([*counts, *(-count for count in counts)], device=device)
        dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=group)
        most, least = limits.tolist()[: len(counts)], [-limit for limit in limits.tolist()[len(counts) :]]
        if most != least:
            raise ValueError(
                f"expected as many chunks in every process for towers that FSDP shards or that have an "
                f"OffloadEmbeddingBag with mesh=, since each forward gathers parameters from all of them, got {counts} "
                f"here, and from {least} to {most} elsewhere; pass equal rows and chunk_sizes, or wrap towers in "
                f"DistributedDataParallel"
            )


def _groups(models: Sequence[nn.Module]) -> Iterator[tuple[dist.ProcessGroup | None, torch.device]]:
    """Each process group that a tower is sharded over, once, with a device for its collectives."""
    seen: list[dist.ProcessGroup | None] = []
    for model in models:
        for module in model.modules():
            group = getattr(module, "process_group", None)  # of FullyShardedDataParallel
            mine = [group] if is_sharded(module) and group is not None else []
            device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
            for parameter in module.parameters(recurse=False):
                mesh = getattr(parameter, "device_mesh", None)
                mine += mesh.get_all_groups() if mesh is not None else []
            for each in mine:
                if not any(each is other for other in seen):
                    seen.append(each)
                    yield each, device
