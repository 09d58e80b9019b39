"""A dispatch mode that calls back before the first in-place write to a tensor, so that its value can be copied.

Copying every tensor that a forward might write would double its memory. Schemas of operations declare which arguments
they write; this mode reads them, and calls back before the first write to each watched tensor.

Limits: writes outside torch operations (through NumPy, or inside compiled code) are not detected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from pipe.torch_private.dispatch import OperationMode
from pipe.torch_private.tensors import memory_of

__all__ = ["FirstWrites"]


class FirstWrites(OperationMode):
    """Calls the function of each watched tensor before the first operation that writes to its memory."""

    def __init__(self, watched: Sequence[tuple[Tensor, Callable[[], None]]]) -> None:
        super().__init__()
        # By the address of the storage, which views share, and which is not reused while the tensor is watched.
        self._watched: dict[int, list[Callable[[], None]]] = {}
        for tensor, function in watched:
            self._watched.setdefault(memory_of(tensor), []).append(function)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls the functions of the watched tensors that the operation writes, and runs the operation."""
        kwargs = kwargs or {}
        writes = _written_by(func)
        if writes is not None and self._watched:
            positions, names = writes
            given = [args[k] for k in positions if k < len(args)] + [kwargs[name] for name in names if name in kwargs]
            for tensor in _tensors_of(given):
                if tensor.layout is torch.strided and type(tensor) in (Tensor, torch.nn.Parameter):
                    for function in self._watched.pop(memory_of(tensor), ()):
                        function()
        return func(*args, **kwargs)


@lru_cache(maxsize=4096)
def _written_by(func: Any) -> tuple[tuple[int, ...], tuple[str, ...]] | None:
    """Positions and names of the arguments that an operation may write to; None: it writes to none."""
    schema = func._schema
    # The schema of batch_norm does not declare that it updates running statistics; other libraries are not trusted.
    silent = "batch_norm" in schema.name or func.namespace not in ("aten", "prims", "prim")
    written = [
        (k, argument.name)
        for k, argument in enumerate(schema.arguments)
        if silent or (argument.alias_info is not None and argument.alias_info.is_write)
    ]
    return (tuple(k for k, _ in written), tuple(name for _, name in written)) if written else None


def _tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among an operation's arguments, including those in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors_of(value)
