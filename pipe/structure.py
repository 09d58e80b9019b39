"""What a checkpointed module is made of, so that a recomputation runs the same modules on the same parameters.

Versions (:mod:`pipe.guard`) tell of a parameter that was written. They do not tell of a parameter, or a module, that
another one replaced: the recomputation would run the new one, and hand its gradient to a tensor that the forward never
saw.

Invariant: a recomputation meets the modules and parameters of the forward, or :class:`RuntimeError` names what was
replaced.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from pipe.generators import held_generators
from pipe.guard import Watched

__all__ = ["Members", "WatchedLayers"]

Members = list[tuple[dict[str, Any], dict[str, Any]]]
"""For each module, its parameters and its children by name."""


class WatchedLayers(Watched):
    """What is to be watched in the layers of a checkpoint. Walks them once; serves one forward of all micro-batches."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        #: Generators that the layers hold themselves.
        self.generators = held_generators(inner for _, inner in self.modules)

    def members(self) -> Members:
        """Parameters and children of each module, as they are now."""
        return [(module._parameters.copy(), module._modules.copy()) for _, module in self.modules]

    def check(self, members: Members) -> None:
        """Compares with what :meth:`members` gave after the forward.

        Raises:
            RuntimeError: naming the parameters and modules that were replaced.
        """
        changed: list[str] = []
        for (owner, module), (parameters, children) in zip(self.modules, members, strict=True):
            for name, parameter in parameters.items():
                now = module._parameters.get(name)
                if now is not parameter and now is not None and not _sharded(now, parameter):
                    changed.append(f"parameter {_joined(owner, name)!r}")
            for name, child in children.items():
                if module._modules.get(name) is not child:
                    changed.append(f"module {_joined(owner, name)!r}")
        if changed:
            raise RuntimeError(
                f"expected the module of the checkpointed forward to be the same in backward, but another object took "
                f"the place of {', '.join(changed)}; call backward() before replacing it, or compute without "
                f"checkpointing"
            )


def _joined(owner: str, name: str) -> str:
    return f"{owner}.{name}" if owner else name


def _sharded(*parameters: Any) -> bool:
    """Whether one of them is a DTensor: sharded modules put whole and sharded parameters in each other's place."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(parameter, module.DTensor) for parameter in parameters)
