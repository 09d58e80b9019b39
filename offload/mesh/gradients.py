"""Reduces gradients over ranks on their way home: each rank stores the mean of its part of every gradient.

::

    visit of shard j      whole gradients  -->  one row of bytes for each rank
    lane of ranks         all_to_all: row r of every rank arrives at rank r
                          the sum of these in rank order, in float32 at least  -->  this rank's part
                          with two dimensions, these sums are added over replicas as well
    next drain            the part is stored, as a gradient of the stored parameter

A parameter without a gradient on this rank counts as zeros. One without on any rank keeps none: each row ends with a
byte for each parameter that says whether there was one.

``all_to_all`` moves each byte once; gloo's ``reduce_scatter`` moves twice as many. The order of the sum is fixed, so
results have the same bits from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn

from offload.mesh.parts import Part, WholePart, offsets_of
from offload.mesh.ranks import Ranks
from offload.mesh.replicas import add_over_replicas
from offload.mesh.traffic import widened
from offload.planning.partition import aligned
from offload.storage.buffer import host_buffer
from offload.streaming.gradient_offload import GradientOffload
from offload.streaming.lane import error_context
from offload.streaming.shard import Shard

if TYPE_CHECKING:
    from offload.mesh.shard import MeshShard

__all__ = ["MeshGradientOffload", "means_of_parts"]


class MeshGradientOffload(GradientOffload):
    """Offloads the gradients of a model that ``ranks`` share.

    A drain submits one reduction. What is to be stored is known when that is done, so it is stored at the next drain,
    while further shards compute.
    """

    def __init__(self, *args: Any, ranks: Ranks, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        #: What follows the last reduction.
        self._deferred: list[Callable[[], None]] = []
        #: Bytes of whole gradients that are being reduced.
        self._reducing = 0
        #: Gradients of what each rank stores whole, reduced at the end of the backward.
        self._whole: dict[nn.Parameter, Tensor] = {}

    def drain(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Starts to reduce the ``gradients`` of the last visit. Those before are stored meanwhile."""
        self._continue()
        if self._drop_others or not shard.trainable:
            return
        for position, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_sparse:
                raise RuntimeError(
                    f"the gradient of {shard.slices[position].name} is sparse, which is not supported with mesh=; use "
                    f"a layer with sparse=False"
                )
        self._take_whole(cast("MeshShard", shard), gradients)
        if not _trainable(cast("MeshShard", shard)):
            return
        self._reducing = sum(g.numel() * g.element_size() for g in gradients if g is not None)
        self._meter.hold(self._reducing)
        parts: list[Tensor | None] = [None] * len(gradients)

        def reduce() -> None:
            with self._meter.on_lane("drain", f"R{shard.index}", self._reducing):
                _reduce(cast("MeshShard", shard), gradients, parts, self._ranks)

        arrival = self._ranks.lane.submit(f"R{shard.index}", reduce)

        def store() -> None:
            with self._meter.waiting(f"R{shard.index}"), error_context(f"reducing gradients of shard {shard.index}"):
                # Lane of ranks -> compute. Without this, gradients are stored before they are summed.
                arrival.wait()
            self._release()
            super(MeshGradientOffload, self).drain(shard, parts)

        self._deferred.append(store)

    def _take_whole(self, shard: MeshShard, gradients: list[Tensor | None]) -> None:
        for k, part in enumerate(shard.parts):
            gradient = gradients[k]
            if gradient is None or not isinstance(part, WholePart):
                continue
            stored, gradients[k] = shard.owner_of(k)[1].parameter, None
            known = self._whole.get(stored)
            self._whole[stored] = gradient.to(part.dtype) if known is None else known + gradient.to(part.dtype)

    def pop_returned(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of this rank that are not reduced yet, since each rank stores the parameters whole."""
        whole, self._whole = self._whole, {}
        return super().pop_returned() | whole

    def update(self, shard: Shard, slot: Tensor | None = None) -> None:
        """Starts to update a shard once its gradients are reduced; nothing if none were. No slot holds its part."""
        if _trainable(cast("MeshShard", shard)):
            self._deferred.append(partial(super().update, shard))

    def wait_idle(self) -> None:
        """Waits until all gradients are stored, at the end of the backward."""
        self._continue()
        super().wait_idle()

    def cancel(self) -> None:
        """Resets all state after a failure, once no copy is running."""
        self._deferred.clear()
        self._whole.clear()
        self._release()
        super().cancel()

    def _continue(self) -> None:
        deferred, self._deferred = self._deferred, []
        for follow in deferred:
            follow()

    def _release(self) -> None:
        self._meter.release(self._reducing)
        self._reducing = 0


def _trainable(shard: MeshShard) -> list[int]:
    """The positions of parameters of which gradients are stored in parts."""
    each = zip(shard.slices, shard.parts, strict=True)
    return [k for k, (s, part) in enumerate(each) if s.parameter.requires_grad and not isinstance(part, WholePart)]


def _reduce(shard: MeshShard, gradients: list[Tensor | None], reduced: list[Tensor | None], ranks: Ranks) -> None:
    """Fills ``reduced`` with this rank's part of the mean of each gradient; empties ``gradients``. On the lane."""
    positions = _trainable(shard)
    whole = [gradients[k] for k in positions]
    gradients[:] = [None] * len(gradients)
    means = means_of_parts([shard.parts[k] for k in positions], whole, ranks)
    for k, mean in zip(positions, means, strict=True):
        reduced[k] = mean


def means_of_parts(parts: Sequence[Part], gradients: list[Tensor | None], ranks: Ranks) -> list[Tensor | None]:
    """This rank's parts of the means over ranks of whole ``gradients``; empties the list. On the lane of ranks.

    None for a gradient that no rank has. What a rank sends to each other one are the bytes of ``parts``, and one for
    each of them in whole cache lines.
    """
    offsets, flags = offsets_of(parts)
    nbytes = flags + aligned(len(parts))
    sent = ranks.staging(ranks.count * nbytes).view(ranks.count, nbytes)
    for n, (part, offset) in enumerate(zip(parts, offsets, strict=True)):
        gradient, gradients[n] = gradients[n], None
        sent[:, flags + n] = gradient is not None
        for rank in range(ranks.count):
            begin, end = part.span(rank)
            row = part.view(sent[rank], offset, rank)
            row.zero_() if gradient is None else row.copy_(gradient[begin:end])
    gradient = None  # frees the last one as well
    totals = _sums_of_all(sent, parts, ranks)
    if ranks.replicas > 1:
        totals = add_over_replicas(totals, parts, ranks)
    return [
        None if total is None else total.div_(ranks.divide_factor).to(part.dtype)
        for part, total in zip(parts, totals, strict=True)
    ]


def _sums_of_all(sent: Tensor, parts: Sequence[Part], ranks: Ranks) -> list[Tensor | None]:
    """This rank's part of the sum of each gradient over the rows of all ranks.

    What arrives takes the place of the whole gradients, which are freed by now. Sums are made where the rows were sent
    from, and get memory of their own once what arrived is freed as well.
    """
    received = host_buffer(sent.numel()).view(sent.shape)
    ranks.all_to_all(received, sent)
    offsets, flags = offsets_of(parts)
    sums = widened(parts)
    places, end = offsets_of(sums)
    memory = ranks.staging(end)
    totals = [
        _sum(received, part, offset, flags + n, ranks.rank, into=total.view(memory, place, ranks.rank))
        for n, (part, offset, total, place) in enumerate(zip(parts, offsets, sums, places, strict=True))
    ]
    del received
    return [None if total is None else total.clone() for total in totals]


def _sum(rows: Tensor, part: Part, offset: int, flag: int, rank: int, into: Tensor) -> Tensor | None:
    """The sum over rows of bytes of one gradient's part, in ``into``; None if no row has one."""
    if not bool(rows[:, flag].any()):
        return None
    # In the order of rows: the same bits in each run, and on each replica.
    total = into.copy_(part.view(rows[0], offset, rank))
    for row in rows[1:]:
        total += part.view(row, offset, rank)
    return total
