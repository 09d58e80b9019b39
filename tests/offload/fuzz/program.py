"""Training loops as data: what is wrapped, and the statements that run one after the other.

A program prints as the Python expression that makes it again, so that a failure is a few lines to paste. Each statement
does the same to two worlds, the plain model's and ours; what it returns is compared, and so is all that can be seen.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, dataclass_transform

if TYPE_CHECKING:
    from tests.offload.fuzz.world import World


def brief(value: Any) -> str:
    """A dataclass as the call that makes it; arguments that are the defaults are left out."""
    given = [f"{f.name}={getattr(value, f.name)!r}" for f in fields(value) if getattr(value, f.name) != f.default]
    return f"{type(value).__name__}({', '.join(given)})"


@dataclass(frozen=True, repr=False)
class Setup:
    """What is wrapped, and how."""

    #: Name in :data:`tests.offload.fuzz.models.MODELS`.
    model: str = "mlp"
    #: "cpu", "disk", or "kept": files that the next model adopts.
    home: str = "cpu"
    checkpoint: bool = False
    slices: int = 4
    slots: int = 2
    microbatches: int = 1
    #: Bytes of boundaries that stay in memory; None: as many as by default.
    boundary: int | None = None
    #: Bytes of graphs that are kept where the rest is recomputed.
    graphs: int | None = None
    #: With a limit of memory, of which nothing is left to choose: bytes of shards that rest in memory, and of gradients
    #: that wait there. Boundaries and graphs are as above, from the second step on.
    planned: tuple[int, int] | None = None
    #: Bytes of a device with memory of its own, where weights rest, and are updated, as far as it reaches.
    device: int | None = None
    #: Patterns of the names of parameters that stay on the compute device.
    resident: tuple[str, ...] | None = None
    #: Name in :data:`tests.offload.fuzz.world.OPTIMIZERS`.
    optimizer: str = "sgd"
    #: How ours updates: "plain" by that class itself, "offload" by OffloadOptimizer, "backward" by update_in_backward.
    updates: str = "plain"
    #: Whether biases are a group with a rate of their own.
    grouped: bool = False
    #: The most bytes that are updated at once.
    block_bytes: int = 8 << 20
    #: Clip by global norm in each step; with "offload" as ``max_norm``.
    max_norm: float | None = None
    #: Copies arrive as late as they may, in the order of this seed, and slots hold NaN until they are filled; 0: no.
    late: int = 0
    #: Layers between the others in which an interrupt can strike.
    trips: bool = False
    #: Compare parameters, gradients and states after each statement, not only where a program looks.
    looks: bool = True

    __repr__ = brief


@dataclass_transform(frozen_default=True)
class Statement:
    """One statement of a loop, a dataclass. Fields have defaults, the simplest value, which shrinking tries first."""

    def __init_subclass__(cls) -> None:
        dataclass(frozen=True, repr=False)(cls)

    def run(self, world: World) -> Any:
        """Does it in one world; returns what a user gets to see."""
        raise NotImplementedError

    __repr__ = brief


@dataclass(frozen=True, repr=False)
class Program:
    """A training loop."""

    setup: Setup
    statements: tuple[Statement, ...]

    def __repr__(self) -> str:
        lines = "".join(f"    {statement!r},\n" for statement in self.statements)
        return f"Program({self.setup!r}, (\n{lines}))"
