"""What a checkpointed module is made of, so that a recomputation runs the same modules on the same parameters.

Versions (:mod:`pipe.recompute.module_state`) tell of a parameter that was written. They do not tell of a parameter, or
a module, that another one replaced: the recomputation would run the new one, and hand its gradient to a tensor that the
forward never saw.

Invariant: a recomputation meets the modules and parameters of the forward, or :class:`RuntimeError` names what was
replaced.
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
    """What is to be watched in the layers of a checkpoint. Walks them once; serves one forward of all micro-batches."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._registers = [d for _, inner in self.modules for d in (inner._parameters, inner._modules) if d]

    def members(self) -> Members:
        """Parameters and children of each module, as they are now."""
        return list(chain.from_iterable(map(dict.values, self._registers)))

    def check(self, members: Members) -> None:
        """Compares with what :meth:`members` gave after the forward.

        Raises:
            RuntimeError: naming the parameters and modules that took the place of others.
        """
        now = self.members()
        if len(now) == len(members) and all(map(operator.is_, now, members)):
            return
        here, before = set(map(id, now)), set(map(id, members))
        if all(id(member) in here or _is_sharded(member) for member in members):
            return  # nothing is gone: a parameter was added, or registered in another order
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
    """Whether it is a DTensor: sharded modules put sharded and whole parameters in each other's place."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(member, module.DTensor)
