"""Groups: chunks that run together where only one layer's activations are alive.

A user chooses the chunk size for the activations of a whole model. Where one layer is alive at a time, several such
chunks fit, and larger matrix products are faster. But a group must be what its chunks are one by one: a layer that
looks across rows (BatchNorm) would tell them apart.

Invariant: chunks are only put together if their members have equal types and trailing shapes, every layer passed a
trial (the same result for two chunks together as for each alone), and no layer moved a buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pipe.microbatch import rows_of
from pipe.nested import flatten, map_tensors, tensors_in, unflatten
from pipe.recompute.replay import Replay, devices_of

__all__ = ["SavedBytes", "can_group", "cut", "joined", "kind_of", "rows_in", "runs_of_like_chunks"]


def kind_of(chunk: Any) -> Any:
    """What chunks must agree on to be put together; None for a chunk that stays alone."""
    leaves, spec = flatten(chunk)
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if not tensors or any(t.dim() == 0 for t in tensors) or len({t.size(0) for t in tensors}) != 1:
        return None
    facts = [(x.dtype, x.device, x.shape[1:], x.requires_grad) if isinstance(x, Tensor) else x for x in leaves]
    return spec, facts


def rows_in(chunk: Any) -> int:
    """Rows of a chunk; 0 where its tensors do not agree on them."""
    sizes = {tensor.size(0) if tensor.dim() else 0 for tensor in tensors_in(chunk)}
    return sizes.pop() if len(sizes) == 1 else 0


def runs_of_like_chunks(chunks: Sequence[Any], most: int) -> list[list[int]]:
    """Neighbouring chunks that may run together, at most ``most`` at a time, as lists of their numbers."""
    groups: list[list[int]] = []
    last: Any = None
    for i, chunk in enumerate(chunks):
        kind = kind_of(chunk)
        if groups and kind is not None and kind == last and len(groups[-1]) < most:
            groups[-1].append(i)
        else:
            groups.append([i])
        last = kind
    return groups


def joined(chunks: Sequence[Any]) -> Any:
    """Several chunks as one, rows below each other."""
    if len(chunks) == 1:
        return chunks[0]
    columns = zip(*(flatten(chunk)[0] for chunk in chunks), strict=True)
    leaves = [torch.cat(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
    return unflatten(leaves, flatten(chunks[0])[1])


def cut(value: Any, rows: Sequence[int]) -> list[Any]:
    """The inverse of :func:`joined`, for chunks of these numbers of rows."""
    if len(rows) == 1:
        return [value]
    leaves, spec = flatten(value)
    columns = [leaf.split(list(rows)) if isinstance(leaf, Tensor) else (leaf,) * len(rows) for leaf in leaves]
    return [unflatten(list(parts), spec) for parts in zip(*columns, strict=True)]


def can_group(call: Callable[[int, Any], Any], layers: Sequence[nn.Module], first: Any, second: Any) -> bool:
    """A trial in evaluation mode: whether each layer treats two chunks together as it treats each of them alone.

    ``call(j, value)`` runs layer j. A layer that looks across rows while it trains, and only then, without moving a
    buffer, is not found out.
    """
    modules = [module for layer in layers for module in layer.modules()]
    modes = [module.training for module in modules]
    rows = rows_of(first) + rows_of(second)
    try:
        for module in modules:
            module.training = False
        # Again: whatever the trial draws, the generators are afterwards where they were.
        with torch.no_grad(), Replay.capture(devices_of(first, list(modules[0].parameters()))).again():
            alone, together = [_copied(first), _copied(second)], _copied(joined([first, second]))
            for j in range(len(layers)):
                alone, together = [call(j, value) for value in alone], call(j, together)
                if runs_of_like_chunks(alone, 2) != [[0, 1]] or not _rows_are(together, rows):
                    return False
                if not _close(joined(alone), together):
                    return False
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    return True


def _copied(value: Any) -> Any:
    return map_tensors(torch.clone, value)


def _rows_are(value: Any, rows: int) -> bool:
    return all(tensor.dim() > 0 and tensor.size(0) == rows for tensor in tensors_in(value))


def _close(a: Any, b: Any) -> bool:
    for x, y in zip(tensors_in(a), tensors_in(b), strict=True):
        if x.is_floating_point() or x.is_complex():
            # Kernels may add in another order for another shape; a layer that looks across rows is further off.
            tolerance = 16 * torch.finfo(x.dtype).eps ** 0.5
            if not torch.allclose(x, y, rtol=tolerance, atol=tolerance, equal_nan=True):
                return False
        elif not torch.equal(x, y):
            return False
    return True


class SavedBytes:
    """A context that counts what a graph keeps, each storage once. The graph is not for a backward."""

    def __init__(self, parameters: Sequence[Tensor], on_saved: Callable[[Tensor], None] = lambda tensor: None) -> None:
        self._on_saved = on_saved
        self._parameters = {tensor.untyped_storage().data_ptr() for tensor in parameters}
        # Storages are held, since the address of one that is freed would soon be another one's. So nothing may keep
        # this object longer than its user: hooks that were a part of it would, until the garbage is collected.
        self._counted: dict[int, torch.UntypedStorage] = {}
        self._hooks: torch.autograd.graph.saved_tensors_hooks | None = None

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._saved, self._never)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        hooks, self._hooks = self._hooks, None
        assert hooks is not None
        hooks.__exit__(*error)

    @property
    def total(self) -> int:
        """Bytes so far."""
        return sum(storage.nbytes() for storage in self._counted.values())

    def count(self, tensor: Tensor) -> None:
        """Counts a tensor's storage, unless it was counted before or is a parameter's."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._counted[storage.data_ptr()] = storage

    def forget(self, tensor: Tensor) -> None:
        """Takes a tensor's storage out of the count again."""
        self._counted.pop(tensor.untyped_storage().data_ptr(), None)

    def _saved(self, tensor: Tensor) -> None:
        self._on_saved(tensor)
        self.count(tensor)

    @staticmethod
    def _never(_: None) -> Tensor:
        raise AssertionError("the graph of a forward that keeps no activations was used")
