"""Sums of whole gradients that a rank keeps in its memory over several backwards, until one of them reduces.

Inside of ``OffloadModel.accumulate()`` a backward adds its gradients here and sends none. The first backward outside
adds what is kept to its own gradients before ranks reduce them. The result is the mean over ranks of the same sums, so
it differs by rounding alone from that of a reduction in each backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from offload.mesh.parts import Part
    from offload.mesh.shard import MeshShard
    from offload.telemetry.statistics import Meter

__all__ = ["LocalSums"]


class LocalSums:
    """The sums of one rank: of shards by their parameters, and of parameters that each rank stores whole."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._entered = 0
        self._shards: dict[MeshShard, list[Tensor | None]] = {}
        self._replicated: dict[nn.Parameter, Tensor] = {}

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """A context in which backwards keep their gradients. May be nested."""
        self._entered += 1
        try:
            yield
        finally:
            self._entered -= 1

    @property
    def keeps(self) -> bool:
        """Whether the present backward is to keep its gradients."""
        return self._entered > 0

    def __bool__(self) -> bool:
        """Whether any sum is kept."""
        return bool(self._shards or self._replicated)

    def described(self) -> str:
        """What ranks compare before a backward: whether it keeps, and of what sums are kept."""
        shards = ",".join(str(shard.index) for shard in self.shards)
        return f"{'keeps' if self.keeps else 'reduces'}:sums-of={shards}"

    @property
    def shards(self) -> list[MeshShard]:
        """The shards of which sums are kept, in their order."""
        return sorted(self._shards, key=lambda shard: shard.index)

    def check_trained(self) -> None:
        """Raises RuntimeError if a parameter of which a sum is kept was frozen since."""
        frozen = [
            s.name
            for shard, kept in self._shards.items()
            for s, total in zip(shard.slices, kept, strict=True)
            if total is not None and not s.parameter.requires_grad
        ]
        frozen += ["a parameter that each rank stores whole" for p in self._replicated if not p.requires_grad]
        if frozen:
            raise RuntimeError(
                f"{frozen[0]} has a gradient from a backward in accumulate(), which was not reduced yet, but does not "
                f"require one now. Freeze parameters after the backward that reduces, or clear gradients by "
                f"model.zero_grad() before"
            )

    def keep(self, shard: MeshShard, gradients: list[Tensor | None]) -> None:
        """Adds the gradients of one visit, in the types of homes; empties the list."""
        self._shards[shard] = self._added(self._shards.get(shard, [None] * len(gradients)), gradients, shard.parts)
        gradients[:] = [None] * len(gradients)

    def add_to(self, shard: MeshShard, gradients: list[Tensor | None]) -> None:
        """Adds what is kept of a shard to the gradients of a visit, and keeps it no longer.

        Every backward that stores gradients visits all shards that train.
        """
        kept = self._shards.pop(shard, None)
        if kept is not None:
            self._meter.release(_nbytes(kept))
            gradients[:] = self._added(kept, gradients, shard.parts, holds=False)

    def keep_replicated(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Adds gradients of parameters that each rank stores whole."""
        for p, gradient in gradients.items():
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    "a gradient outside of the blocks is sparse, which is not supported with mesh=; use a layer with "
                    "sparse=False"
                )
            if p in self._replicated:
                self._replicated[p] += gradient
            else:
                self._replicated[p] = gradient.to(p.dtype, copy=True)
                self._meter.hold(self._replicated[p].nbytes)

    def with_replicated(self, gradients: Mapping[nn.Parameter, Tensor]) -> dict[nn.Parameter, Tensor]:
        """Gradients of parameters that each rank stores whole, with what is kept of them, which is kept no longer."""
        kept, self._replicated = self._replicated, {}
        self._meter.release(sum(g.nbytes for g in kept.values()))
        found = dict(gradients)
        for p, total in kept.items():
            found[p] = total + found[p] if p in found else total
        return found

    def drop(self, parameters: Collection[nn.Parameter]) -> None:
        """Drops the sums of some stored parameters, as ``zero_grad()`` does with gradients."""
        for shard, kept in list(self._shards.items()):
            for k, total in enumerate(kept):
                if total is not None and shard.owner_of(k)[1].parameter in parameters:
                    self._meter.release(total.nbytes)
                    kept[k] = None
            if not any(total is not None for total in kept):
                del self._shards[shard]
        for p in [p for p in self._replicated if p in parameters]:
            self._meter.release(self._replicated.pop(p).nbytes)

    def _added(
        self,
        kept: list[Tensor | None],
        gradients: Sequence[Tensor | None],
        parts: Sequence[Part],
        *,
        holds: bool = True,
    ) -> list[Tensor | None]:
        found = list(kept)
        for k, (gradient, part) in enumerate(zip(gradients, parts, strict=True)):
            if gradient is None:
                continue
            there = found[k]
            if there is None:
                # What is kept is added to in place, and autograd may use a gradient in several places.
                found[k] = new = gradient.to(part.dtype, copy=holds)
                if holds:
                    self._meter.hold(new.nbytes)
            else:
                there += gradient
        return found


def _nbytes(gradients: Sequence[Tensor | None]) -> int:
    return sum(g.nbytes for g in gradients if g is not None)
