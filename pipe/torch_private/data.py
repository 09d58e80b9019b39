"""Private names of ``torch.utils``: nested containers (``pytree``), and the iterators of a ``DataLoader``."""

from __future__ import annotations

from torch.utils import _pytree as pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

__all__ = ["DataLoaderIterator", "is_persistent", "pytree"]


def is_persistent(iterator: DataLoaderIterator) -> bool:
    """Whether a ``DataLoader`` with ``persistent_workers=True`` gives out this iterator again in its next epoch."""
    return bool(iterator._persistent_workers)
