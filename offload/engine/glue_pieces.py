"""The pieces of graph of one chunk, in a model whose own forward calls blocks: see :mod:`offload.engine.glue`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node
from torch.multiprocessing.reductions import StorageWeakRef

from pipe.nested import LEAVES

__all__ = ["ChunkPieces", "Entered", "PassedCall", "Place", "Shared", "place_of"]

#: Identifies a tensor in a graph: its node, and the number of the output of that node.
Place = tuple[Node, int]


@dataclass(frozen=True)
class Shared:
    """The place, in what enters a block, of a tensor that entered an earlier block as well."""

    number: int


LEAVES.add(Shared)


@dataclass(frozen=True)
class Entered:
    """A tensor that entered a block: its number, and what shows whether its memory still holds the same values."""

    number: int
    storage: StorageWeakRef
    version: int | None


@dataclass(frozen=True)
class PassedCall:
    """The arguments of a block in a forward without a backward, which are passed on as they are: one leaf."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(eq=False)
class ChunkPieces:
    """The pieces of graph of one chunk."""

    #: The inputs of the chunk, flat, with the graph that the caller has, and where they begin a graph here.
    inputs: list[Any] = field(default_factory=list)
    #: By block: for each output that needs a gradient, its number and its edge; and how many outputs there are.
    begins: dict[int, dict[int, GradientEdge]] = field(default_factory=dict)
    outputs: dict[int, int] = field(default_factory=dict)
    #: Block and number of each such output.
    begun: dict[Place, tuple[int, int]] = field(default_factory=dict)
    #: Of each tensor that enters blocks: the first of them, and its edge.
    first: dict[Place, tuple[int, GradientEdge]] = field(default_factory=dict)
    #: By block: the tensors that enter it, with their numbers among its arguments.
    uses: dict[int, list[tuple[int, Place]]] = field(default_factory=dict)
    #: The edges of the result, or None for each leaf that needs no gradient.
    result: list[GradientEdge | None] = field(default_factory=list)
    #: Parameters and other leaves that its pieces reach, with the first of these pieces.
    leaves: dict[Tensor, int] = field(default_factory=dict)
    #: Where the gradients of leaves arrive: ``set_()`` on a leaf gives it another node, which is in no graph.
    nodes: dict[Tensor, Node] = field(default_factory=dict)
    #: By number: tensors that enter several blocks, with their versions; None for those that entered one.
    shared: list[tuple[Tensor, int | None] | None] = field(default_factory=list)
    # While the forward runs:
    entered: dict[tuple[Any, ...], Entered] = field(default_factory=dict)
    #: The nodes of its graph, with the piece that each belongs to: the number of the first block that it leads to.
    seen: dict[Node, int] = field(default_factory=dict)
    # While a backward runs:
    entering: dict[Place, Tensor] = field(default_factory=dict)
    returned: dict[int, dict[int, Tensor]] = field(default_factory=dict)


def place_of(edge: GradientEdge) -> Place:
    """The tensor that the edge leads to."""
    return edge.node, edge.output_nr
