"""Checks that no parameter or submodule of a checkpointed module was replaced between forward and recomputation.

Version counters (:mod:`pipe.recompute.module_state`) detect a parameter that was written, but not a parameter or module
that was replaced by another: the recomputation would run the new one, and write its gradient to a tensor that the
forward did not use.

Invariant: a recomputation runs the modules and parameters of the forward, or :class:`RuntimeError` names the replaced
ones.
"""

from __future__ import annotations

import operator
import sys
from itertools import chain
from typing import Any

from torch import nn

from pipe.recompute.module_state import WatchedModule

__all__ = ["Members", "WatchedLayers"]

Members = list[Any]
"""Parameters and children of all modules."""


class WatchedLayers(WatchedModule):
    """The modules and parameters of checkpointed layers, collected once for one forward of all micro-batches."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._registers = [d for _, inner in self.modules for d in (inner._parameters, inner._modules) if d]

    def members(self) -> Members:
        """The present parameters and children of each module."""
        return list(chain.from_iterable(map(dict.values, self._registers)))

    def check(self, members: Members) -> None:
        """Compares with the result of :meth:`members` after the forward.

        Raises:
            RuntimeError: naming the parameters and modules that replaced others.
        """
        now = self.members()
        if len(now) == len(members) and all(map(operator.is_, now, members)):
            return
        here, before = set(map(id, now)), set(map(id, members))
        if all(id(member) in here or _is_sharded(member) for member in members):
            return  # none was removed: a parameter was added, or registered in another order
        new = [
            f"{kind} {'.'.join(filter(None, (owner, name)))!r}"
            for owner, module in self.modules
            for kind, register in (("parameter", module._parameters), ("module", module._modules))
            for name, member in register.items()
            if id(member) not in before and not _is_sharded(member)
        ]
        if new:
            raise RuntimeError(
                f"expected the module of the checkpointed forward to be the same in backward, but another object took "
                f"the place of {', '.join(new)}; call backward() before replacing it, or compute without checkpointing"
            )


def _is_sharded(member: Any) -> bool:
    """Whether it is a DTensor: sharded modules replace sharded by whole parameters and vice versa."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(member, module.DTensor)
