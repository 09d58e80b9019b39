"""Parameters that each rank stores whole, such as those outside of blocks; their gradients are means over ranks.

All of them are reduced by two collectives at the end of a backward, on the lane of ranks::

    backward            whole gradients, of the rows of this rank
    all_to_all          the elements of each are cut into one piece for each rank, which adds its piece in rank order
    all_gather          each rank gets the means of the others: the same bits on all of them
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from offload.mesh.gradients import means_of_parts
from offload.mesh.parts import Part, WholePart, offsets_of
from offload.mesh.ranks import Ranks
from offload.mesh.shard import without_memory
from offload.streaming.lane import error_context
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

__all__ = ["ReplicatedGradients", "resident_parts"]


def resident_parts(resident: Shard, ranks: Ranks) -> dict[nn.Parameter, tuple[Shard, Slice, Part]]:
    """Stores what ``resident`` owns in parameters of their own; the layers' parameters lose their memory.

    All ranks get the values of the first one. Returns where each parameter of the layers is stored.
    """
    found: dict[nn.Parameter, tuple[Shard, Slice, Part]] = {}
    for k, s in enumerate(resident.own):
        whole, home = s.parameter, resident.home_view(s)
        home.copy_(ranks.copied_from_first(home))
        one = nn.Parameter(home, whole.requires_grad)
        one.grad, whole.grad = whole.grad, None
        part = WholePart.of(s.name, whole, ranks.count)
        resident.own[k] = replace(s, parameter=one)
        found[whole] = resident, resident.own[k], part
        whole.data = without_memory(whole)
    return found


class ReplicatedGradients:
    """Reduces the gradients of parameters, given with their names, that each of the ``ranks`` stores whole."""

    def __init__(self, named: Mapping[str, nn.Parameter], ranks: Ranks) -> None:
        self._ranks = ranks
        #: The cut of the elements of each.
        self._parts = {p: Part(name, (p.numel(),), (1,), p.dtype, ranks.count) for name, p in named.items()}

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter is one of these."""
        return parameter in self._parts

    def reduce(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Adds the mean over ranks of each gradient to the ``.grad`` of its parameter.

        All ranks call it with as many trained parameters. One that has no gradient here counts as zeros.

        Raises RuntimeError for a sparse gradient.
        """
        trained = [p for p in self._parts if p.requires_grad]
        if not trained:
            return
        for p, gradient in gradients.items():
            if gradient.layout is not torch.strided:
                raise RuntimeError(
                    f"the gradient of {self._parts[p].name} is sparse, which is not supported with mesh=; use a layer "
                    f"with sparse=False"
                )
        found: list[tuple[nn.Parameter, Tensor]] = []
        lane = self._ranks.lane
        arrival = lane.submit("R-outside", lambda: found.extend(self._means(trained, gradients)))
        with error_context("reducing gradients of what each rank stores whole"):
            # Lane of ranks -> host. Without this, the gradients are read before they are there.
            arrival.synchronize()
        for p, mean in found:
            if p.grad is None:
                p.grad = mean
            else:
                p.grad.add_(mean)

    def _means(
        self, trained: Sequence[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """The mean of each gradient that any rank has. On the lane."""
        ranks, parts = self._ranks, [self._parts[p] for p in trained]
        flat = [None if p not in gradients else gradients[p].detach().reshape(-1) for p in trained]
        means = means_of_parts(parts, flat, ranks)
        offsets, nbytes = offsets_of(parts)
        staging = ranks.buffer("staging", ranks.count * nbytes).view(ranks.count, nbytes)
        for part, offset, mean in zip(parts, offsets, means, strict=True):
            if mean is not None:
                part.view(staging[ranks.rank], offset, ranks.rank).copy_(mean)
        ranks.all_gather(staging)
        found = []
        for p, part, offset, mean in zip(trained, parts, offsets, means, strict=True):
            if mean is None:
                continue
            whole = torch.cat([part.view(staging[rank], offset, rank) for rank in range(ranks.count)])
            found.append((p, torch.empty_like(p, requires_grad=False).copy_(whole.view(p.shape))))
        return found
