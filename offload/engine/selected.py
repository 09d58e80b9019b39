"""Recomputation that keeps the results of some operations, such as those of attention: they are not computed again.

Results that are kept take memory from forward to backward, as a part of a graph. An operation that draws random numbers
is computed again all the same: without it, what draws after it would draw other numbers.

Source: selective activation recomputation (Korthikanti et al., 2022), by torch's selective checkpointing.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from pipe.nested import tensors_in

__all__ = ["Selected"]

#: The fused kernels of attention, whichever torch chooses.
ATTENTION = frozenset(
    name
    for name in dir(torch.ops.aten)
    if name.endswith(("_attention", "_attention_for_cpu", "_attention_overrideable", "_attention_forward"))
)


class Selected:
    """The results of ``operations`` that one cell keeps: of ``"attention"``, or overloads such as ``aten.mm.default``.

    The first run of the cell is within the first one of :attr:`contexts`, each further one within the second.
    """

    def __init__(self, operations: str | Collection[Any]) -> None:
        self._operations = operations
        #: The storages of the results, with their bytes.
        self._kept: dict[StorageWeakRef, int] = {}
        self.contexts = create_selective_checkpoint_contexts(self._policy)

    @property
    def nbytes(self) -> int:
        """Bytes of the results."""
        return sum(self._kept.values())

    def _policy(self, context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if self._operations == "attention":
            chosen = operation.namespace == "aten" and operation.overloadpacket.__name__ in ATTENTION
        else:
            chosen = operation in self._operations
        if not chosen or _draws(operation, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        results: list[Tensor] = tensors_in(context.op_output)
        self._kept |= {StorageWeakRef(x.untyped_storage()): x.untyped_storage().nbytes() for x in results}
        return CheckpointPolicy.MUST_SAVE


def _draws(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers: fused attention does if it drops out."""
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    for k, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = args[k] if k < len(args) else argument.default_value
            return bool(kwargs.get("dropout_p", given) != 0)
    return True
