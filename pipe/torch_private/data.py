"""Private names of ``torch.utils``: nested containers (``pytree``), and the iterators of a ``DataLoader``."""

from __future__ import annotations

from torch.utils import _pytree as pytree
from torch.utils.data.dataloader import _BaseDataLoaderIter as DataLoaderIterator

__all__ = ["DataLoaderIterator", "pytree"]
