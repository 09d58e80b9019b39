"""The tape: everything that one forward saves for its backward. It belongs to that forward, not to the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.engine.boundary_store import BoundaryStore, SpillingStore
from offload.engine.cell import Cell
from offload.engine.cell_input import CellInput
from offload.engine.glue import Glue
from offload.planning.plan import Plan
from offload.planning.residency import Key, Residency
from pipe.freed import Life
from pipe.nested import TreeSpec, flatten, unflatten
from pipe.recompute.rerun import Rerun
from pipe.torch_private.autograd import has_hooks

if TYPE_CHECKING:
    from offload.engine.executor import Executor

__all__ = ["CellRecords", "KeptCell", "Tape", "TapeState"]


@dataclass
class KeptCell:
    """A cell that kept its graph instead of being recomputed: the begin of the graph, and its flat output."""

    source: CellInput
    outputs: list[Any]
    spec: TreeSpec

    def output(self) -> Any:
        """The output of the cell, with its graph."""
        return unflatten(list(self.outputs), self.spec)


@dataclass(eq=False, kw_only=True)
class CellRecords:
    """Records of the cells of one forward for those of its backward."""

    #: Whether the forward recorded what a backward needs.
    records: bool
    #: The first shard that backward has to reach: neither the input nor shards before it need a gradient.
    first: int
    boundaries: BoundaryStore
    output_fns: Sequence[Callable[[Any], Any] | None] = ()
    #: The cells that keep their graphs; the others are recomputed.
    graphs: Set[Key] = frozenset()
    #: Whether these graphs keep recipes of cheap results instead of the results.
    cheap_recompute: bool = False
    cells: dict[Cell, Rerun] = field(default_factory=dict)
    kept: dict[Cell, KeptCell] = field(default_factory=dict)
    #: For the boundary of each cell, and for the outputs: which of its leaves need a gradient.
    requires: dict[Cell, list[bool]] = field(default_factory=dict)
    #: The code between the shards, if there is any; and which outputs of each cell need a gradient then.
    glue: Glue | None = None
    returned: dict[Cell, list[bool]] = field(default_factory=dict)
    #: Cells whose block was called without gradients (``no_grad`` around a part of the model's forward).
    graphless: set[Cell] = field(default_factory=set)
    #: Version counters of each shard's parameters at the forward.
    versions: dict[int, tuple[int, ...]] = field(default_factory=dict)
    inputs: list[list[Any]] = field(default_factory=list)
    #: See :mod:`.row_units`.
    rows: list[float] = field(default_factory=list)
    input_specs: list[TreeSpec] = field(default_factory=list)
    input_versions: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(eq=False)
class TapeState:
    """What a model knows of a tape, apart from the tape, which a model must not hold."""

    #: Whether its backward began and freed what it used, or its forward failed.
    used: bool = False
    #: Those that the tape's node takes as inputs, besides the user's.
    parameters: Sequence[nn.Parameter] = ()


@dataclass(eq=False, kw_only=True)
class Tape(CellRecords):
    """Boundaries and replays of one forward.

    Made by :meth:`OffloadModel.forward_chunks <offload.OffloadModel.forward_chunks>`; :meth:`backward` may be called
    once. A tape that is deleted instead frees everything it holds.
    """

    executor: Executor
    boundaries: SpillingStore
    #: Plans which boundaries stay in memory.
    residency: Residency
    microbatches: int
    #: Number of calls that had stored assigned data until the forward.
    assignments: int = 0
    #: The sizes of micro-batches for which the step is planned: their rows, or more; see :mod:`.row_units`.
    planned: Sequence[float] = ()
    #: The parameters that took no gradient in the forward, where cells are recomputed.
    frozen: Sequence[nn.Parameter] = ()
    #: The buffers of the forward, likewise.
    buffers: Sequence[Tensor] = ()
    #: While the forward runs: new numbers of shards, from old to new, that its plan does not know yet.
    moved: Sequence[Mapping[int, int]] = ()
    #: The plan of the forward, until the backward.
    plan: Plan | None = None
    output_specs: list[TreeSpec] = field(default_factory=list)
    output_shapes: list[list[torch.Size | None]] = field(default_factory=list)
    state: TapeState = field(default_factory=TapeState)
    life: Life = field(default_factory=Life)

    @property
    def used(self) -> bool:
        """See :attr:`.TapeState.used`."""
        return self.state.used

    @property
    def trainable(self) -> list[nn.Parameter]:
        """The parameters that take a gradient in the backward, each once."""
        return [*self.executor.trainable(self.first), *(() if self.glue is None else self.glue.leaves)]

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Propagates gradients of the outputs back: adds to parameters' stored ``.grad``; each shard is loaded once.

        Args:
            output_gradients: one entry for each chunk, in order, of the structure of that chunk's output: tensors of
                the output's shapes, or None where there is no gradient; or a list of those of its leaves, in order. A
                whole entry may be None.

        Raises:
            RuntimeError: if the tape was used before, its forward ran without gradients, or a parameter changed since.
            ValueError: if the number, the structure or a shape differs from the outputs.

        Chunks that require a gradient get one, which is propagated through the graph that computed them.
        """
        if self.used:
            raise RuntimeError("this tape was used before; run forward_chunks again")
        if not self.records:
            raise RuntimeError(
                "this tape has no backward: forward_chunks ran under no_grad or inference_mode, or no "
                "parameter and no input requires a gradient"
            )
        if len(output_gradients) != self.microbatches:
            raise ValueError(
                f"expected one gradient for each of the {self.microbatches} chunks, got {len(output_gradients)}"
            )
        flat = [self._flat(i, gradient) for i, gradient in enumerate(output_gradients)]
        self.state.used = True
        try:
            # Autograd runs the hooks of a parameter, once, on its whole gradient.
            hooked = [p for p in self.trainable if has_hooks(p)]
            input_gradients, taken = self.executor.backward(self, flat, consume=True, returned=hooked)
        finally:
            self.close()
        roots: list[tuple[Tensor, Tensor]] = [
            (leaf, gradient)
            for leaves, gradients in zip(self.inputs, input_gradients, strict=True)
            for leaf, gradient in zip(leaves, gradients, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad and gradient is not None
        ]
        roots += taken.items()
        if roots:
            torch.autograd.backward([leaf for leaf, _ in roots], [gradient.to(leaf) for leaf, gradient in roots])

    def _flat(self, i: int, gradient: Any) -> list[Any]:
        spec = self.output_specs[i]
        if gradient is None:
            return [None] * spec.num_leaves
        leaves, given = flatten(gradient)
        if len(leaves) != spec.num_leaves:
            raise ValueError(f"chunk {i}: expected gradients of the output's structure {spec}, got {given}")
        for shape, leaf in zip(self.output_shapes[i], leaves, strict=True):
            if isinstance(leaf, Tensor) and leaf.shape != shape:
                expected = tuple(shape or ())
                raise ValueError(f"chunk {i}: expected a gradient of the shape {expected}, got {tuple(leaf.shape)}")
        return leaves

    def needed_again(self, cell: Cell) -> bool:
        """Whether backward needs what enters a cell."""
        return self.records and cell.j >= self.first and cell not in self.graphs

    def discard(self) -> None:
        """Frees the tape after a failure: it has no backward any more."""
        self.state.used = True
        self.close()

    def close(self) -> None:
        """Frees the tape."""
        self.boundaries.close()
        self.cells.clear()
        self.buffers = ()
        self.kept.clear()
        if self.glue is not None:
            self.glue.close()
