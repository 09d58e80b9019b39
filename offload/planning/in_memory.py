"""Plans the step of chunks through layers in memory: forward chunk by chunk, backward layer by layer.

::

    forward     F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 F0.2 F1.2 K2.2      the input of a cell is kept if it fits
    backward    B2.0 B2.1 B1.0 B1.1 B0.0 B0.1                     the chunks whose inputs were kept
                R0.2 G2.2 R0.2 B1.2 B0.2                          a chunk for which inputs are recomputed first

Without loads the order is free. In forward, only the kept inputs of a layer exist for several chunks. In backward, the
inputs kept for a layer are freed before the gradients of the next layer's parameters are made. Inputs that did not
fit are recomputed from the last kept one, one chunk at a time, after all chunks whose inputs were kept.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from offload.planning.plan import Action, Kind
from offload.planning.residency import Key

__all__ = ["InMemory"]


@dataclass(eq=False)
class InMemory:
    """The plan of one step; ``bytes_left`` are for inputs of layers and graphs, between forward and backward."""

    layers: int
    first: int  #: The first layer that backward has to reach.
    bytes_left: int
    #: The cells that keep their graphs, and those whose inputs are kept.
    graphs: set[Key] = field(default_factory=set)
    inputs: set[Key] = field(default_factory=set)

    def forward(self, i: int, graph_bytes: Mapping[int, int], input_bytes: Callable[[], int]) -> Iterator[Action]:
        """Plans the forward of chunk ``i``.

        Layers in ``graph_bytes`` keep their graphs, of so many bytes, if these fit; ``input_bytes``: of the next cell,
        called after the cell before.
        """
        for j in range(self.layers):
            keeps = j in graph_bytes and self._reserve(graph_bytes[j])
            if keeps:
                self.graphs.add((j, i))
            elif j >= max(self.first, 1) and self._reserve(input_bytes()):
                self.inputs.add((j, i))
            yield Action(Kind.FORWARD_KEPT if keeps else Kind.FORWARD, j, i)

    def _reserve(self, nbytes: int) -> bool:
        fits = nbytes <= self.bytes_left
        self.bytes_left -= nbytes if fits else 0
        return fits

    def groups(self, chunks: Sequence[int]) -> list[list[int]]:
        """The chunks whose backwards run together: those whose inputs were kept, then each other one alone."""
        return [[i for i in chunks if not self.missing(i)], *([i] for i in chunks if self.missing(i))]

    def backward(self, chunks: Iterable[int]) -> Iterator[Action]:
        """Plans the backward of chunks that run together."""
        for i in chunks:
            missing = self.missing(i)
            # Inputs of layers that backward does not reach are never kept.
            before = range(self.first - 1) if self.first in missing else ()
            for j in (*before, *(j - 1 for j in missing)):
                yield Action(Kind.REPEAT, j, i)
        for j in range(self.layers - 1, self.first - 1, -1):
            for i in chunks:
                yield Action(Kind.BACKWARD_KEPT if (j, i) in self.graphs else Kind.BACKWARD, j, i)

    def missing(self, i: int) -> list[int]:
        """The layers of the backward of a chunk whose inputs were not kept."""
        kept = self.graphs | self.inputs
        return [j for j in range(max(self.first, 1), self.layers) if (j, i) not in kept]
