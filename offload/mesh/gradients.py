"""Reduces gradients over ranks on their way home: each rank stores the mean of its part of every gradient.

::

    visit of shard j      whole gradients
    lane of ranks         piece by piece: one row of bytes for each rank
                          all_to_all: row r of every rank arrives at rank r
                          the sum of these in rank order, in float32 at least  -->  this rank's part
                          on GPUs reduce_scatter makes the sum, of types of 32 bits or more
                          with two dimensions, these sums are added over replicas as well
    next drain            the part is stored, as a gradient of the stored parameter

A whole gradient is freed when its last piece is sent, and memory for a sum is taken with its first piece. A parameter
without a gradient on this rank counts as zeros. One without on any rank keeps none: the first piece of each row begins
with a byte for each parameter that says whether there was one; these bytes are gathered by themselves where
``reduce_scatter`` would add them.

``all_to_all`` moves each byte once; gloo's ``reduce_scatter`` moves twice as many. The order of the sum is fixed, so
results have the same bits from run to run. ``reduce_scatter`` of nccl moves as many bytes as ``all_to_all``, in rings
or trees that fit the links; the order of its sums is that of nccl.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from offload.mesh.local_sums import LocalSums
from offload.mesh.parts import Cut, Part, WholePart, cuts_between, offsets_of
from offload.mesh.pieces import pieces_of
from offload.mesh.ranks import Ranks
from offload.mesh.traffic import LEAST_AT_ONCE, bytes_at_once, widened
from offload.planning.partition import aligned
from offload.streaming.gradient_offload import GradientOffload
from offload.streaming.lane import Arrival, error_context
from offload.streaming.shard import Shard
from offload.telemetry.statistics import REDUCTION

if TYPE_CHECKING:
    from offload.mesh.shard import MeshShard

__all__ = ["MeshGradientOffload", "add_over", "means_of_parts"]


class MeshGradientOffload(GradientOffload):
    """Offloads the gradients of a model that ``ranks`` share.

    A drain submits one reduction. What is to be stored is known when that is done, so it is stored at the next drain,
    while further shards compute.
    """

    def __init__(self, *args: Any, ranks: Ranks, sums: LocalSums, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks
        self._sums = sums
        #: What follows the last reduction.
        self._deferred: list[Callable[[], None]] = []
        #: Bytes of whole gradients that are being reduced.
        self._reducing = 0
        #: Gradients of what each rank stores whole, reduced at the end of the backward.
        self._whole: dict[nn.Parameter, Tensor] = {}

    def begin(
        self,
        waiting: int,
        to_return: Collection[nn.Parameter] = (),
        *,
        drop_others: bool = False,
        order: Sequence[int] | None = None,
    ) -> bool:
        """See :meth:`GradientOffload.begin`."""
        updates = super().begin(waiting, to_return, drop_others=drop_others, order=order)
        try:
            self._sums.check_trained()
            if updates and self._sums.keeps:
                raise RuntimeError(
                    "update_in_backward uses the gradients of this backward, which keeps them on each rank, inside of "
                    "the model's accumulate(); enter the optimizer's accumulate() as well"
                )
        except RuntimeError:
            self._end_backward(failed=True)
            raise
        return updates

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
        if self._sums.keeps:
            self._sums.keep(cast("MeshShard", shard), gradients)
            return
        self._sums.add_to(cast("MeshShard", shard), gradients)
        self._reducing = sum(g.numel() * g.element_size() for g in gradients if g is not None)
        self._meter.hold(self._reducing)
        parts: list[Tensor | None] = [None] * len(gradients)

        # What is being stored now. Updates in backward keep gradients of more than one shard, as in one process.
        storing = [] if self._updates else [arrival for arrival, _, _ in self._drains]

        def reduce() -> None:
            with self._meter.on_lane("drain", f"R{shard.index}", self._reducing, kind=REDUCTION):
                _reduce(cast("MeshShard", shard), gradients, parts, self._ranks, storing)

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


def _reduce(
    shard: MeshShard,
    gradients: list[Tensor | None],
    reduced: list[Tensor | None],
    ranks: Ranks,
    storing: Sequence[Arrival],
) -> None:
    """Fills ``reduced`` with this rank's part of the mean of each gradient; empties ``gradients``. On the lane."""
    positions = _trainable(shard)
    whole = [gradients[k] for k in positions]
    gradients[:] = [None] * len(gradients)
    means = means_of_parts([shard.parts[k] for k in positions], whole, ranks, storing)
    for k, mean in zip(positions, means, strict=True):
        reduced[k] = mean


def means_of_parts(
    parts: Sequence[Part], gradients: list[Tensor | None], ranks: Ranks, storing: Sequence[Arrival] = ()
) -> list[Tensor | None]:
    """This rank's parts of the means over ranks of whole ``gradients``; empties the list. On the lane of ranks.

    None for a gradient that no rank has. What a rank sends to each other one are the bytes of ``parts``, and one for
    each of them in whole cache lines. ``storing``: copies of means of an earlier call, which are freed then.
    """
    # Rows that a collective adds have no place for flags.
    there = ranks.any_rank_has([g is not None for g in gradients]) if ranks.transport.adds else None
    given, gradients[:] = [*gradients], [None] * len(gradients)
    totals: list[Tensor | None] = [None] * len(parts)
    for positions in ranks.transport.together(parts):
        mine = [given[k] for k in positions]
        for k in positions:
            given[k] = None
        flags = None if there is None else [there[k] for k in positions]
        sums = _Sums([parts[k] for k in positions], mine, ranks, storing, flags)
        for begin, end in pieces_of(sums.nbytes, ranks.count):
            sums.add_piece(begin, end)
        sums.move_totals(totals, positions)
    if ranks.replicas > 1:
        add_over(totals, parts, ranks, replicas=True)
    for n, part in enumerate(parts):
        total, totals[n] = totals[n], None
        if total is not None:
            totals[n] = part.rows_of(total.div_(ranks.divide_factor).to(part.dtype), ranks.rank)
    return totals


def add_over(totals: list[Tensor | None], parts: Sequence[Part], ranks: Ranks, *, replicas: bool = False) -> None:
    """Adds ``totals`` over ranks, or over the replicas of what this rank stores, in place. On the lane of ranks.

    They are flat, in float32 at least, and have what this rank stores of ``parts``; None counts as zeros, and stays
    None where no rank has one. A ring adds each element once, so all ranks have the same bits.
    """
    wide = widened(parts)
    there = ranks.any_rank_has([total is not None for total in totals], replicas=replicas)
    for n, part in enumerate(wide):
        if there[n] and totals[n] is None:
            count = part.stored_elements(ranks.rank)
            totals[n] = torch.zeros(count, dtype=part.dtype, device=ranks.transport.device)
    nbytes = sum(aligned(part.stored_bytes(0)) for part in wide)
    ranks.all_reduce(_joined([total for total in totals if total is not None], ranks), nbytes, replicas=replicas)


def _joined(tensors: Sequence[Tensor], ranks: Ranks) -> Iterator[Tensor]:
    """The tensors, small ones of a type as one: in the staging area, from which they are copied after their use."""
    small = [tensor for tensor in tensors if tensor.nbytes <= LEAST_AT_ONCE // 2]
    yield from (tensor for tensor in tensors if tensor.nbytes > LEAST_AT_ONCE // 2)
    while small:
        dtype, members, nbytes = small[0].dtype, list[Tensor](), 0
        while small and small[0].dtype == dtype and nbytes + small[0].nbytes <= LEAST_AT_ONCE:
            members.append(small.pop(0))
            nbytes += members[-1].nbytes
        flat = torch.cat(members, out=ranks.staging(nbytes).view(dtype))
        yield flat
        for member, values in zip(members, flat.split([member.numel() for member in members]), strict=True):
            member.copy_(values)


class _Sums:
    """This rank's parts of the sums of ``gradients`` over all ranks, made piece by piece. Empties the list."""

    def __init__(
        self,
        parts: Sequence[Part],
        gradients: list[Tensor | None],
        ranks: Ranks,
        storing: Sequence[Arrival],
        there: list[bool] | None,
    ) -> None:
        """``there``: which of the gradients any rank has; None: the first piece is to tell."""
        self._parts, self._gradients, self._ranks = parts, gradients, ranks
        self._offsets, nbytes = offsets_of(parts)
        self.nbytes = nbytes
        self._wide = widened(parts)
        self._totals: list[Tensor | None] = [None] * len(parts)
        self._in_rows = there is None
        #: Whether any rank has each of the gradients.
        self._there = [False] * len(parts) if there is None else there
        #: Bytes of sums less those of gradients that are freed; and how many there may be while others are stored: with
        #: these and the collectives 3/4 of a shard.
        self._more_bytes = 0
        piece = bytes_at_once(nbytes, ranks.count)
        self._most_bytes = max(nbytes // 4, ranks.count * (3 * nbytes // 4 - 2 * piece) - nbytes)
        self._storing = storing

    def add_piece(self, begin: int, end: int) -> None:
        """Sends the bytes ``[begin, end)`` of the parts of each rank, and adds what arrives."""
        parts, ranks = self._parts, self._ranks
        flags = aligned(len(parts)) if self._in_rows and not begin else 0
        row = flags + end - begin
        if not row:
            return  # no rank has a byte
        dtype = parts[0].dtype  # that of all parts, where a collective adds them
        rows = 1 if ranks.transport.adds_in(dtype) else ranks.count
        sent, received = ranks.staging((ranks.count + rows) * row).view(-1, row).split([ranks.count, rows])
        if flags:
            for n, gradient in enumerate(self._gradients):
                sent[:, n] = gradient is not None
            gradient = None  # else the last one would not be freed
        cuts = list(cuts_between(parts, self._offsets, begin, end, flags))
        for cut in cuts:
            self._send(cut, sent)
        ranks.reduce(received, sent, dtype)
        if flags:
            self._there = [bool(there) for there in received[:, : len(parts)].any(dim=0).tolist()]
        for cut in cuts:
            if self._there[cut.number]:
                self._add(cut, received)

    def move_totals(self, totals: list[Tensor | None], positions: Sequence[int]) -> None:
        """Moves flat sums, in float32 at least, to ``positions``, once all pieces are added; none that no rank has."""
        self._gradients[:] = [None] * len(self._parts)  # those without elements
        for n, (k, wide) in enumerate(zip(positions, self._wide, strict=True)):
            totals[k], self._totals[n] = self._totals[n], None
            if self._there[n] and totals[k] is None:
                totals[k] = torch.empty(0, dtype=wide.dtype, device=self._ranks.transport.device)

    def _send(self, cut: Cut, sent: Tensor) -> None:
        """Copies a gradient to where it is sent from, and frees it after its last elements."""
        part, gradient = self._parts[cut.number], self._gradients[cut.number]
        if gradient is not None and not cut.first:
            self._ranks.transport.use(gradient)
            self._gradients[cut.number] = gradient = part.flat(gradient)
        for rank in range(self._ranks.count):
            there = cut.sent(part, rank, sent[rank])
            there.zero_() if gradient is None else there.copy_(cut.of_rank(part, rank, gradient))
        if cut.ends and gradient is not None:
            self._more_bytes -= gradient.nbytes
            self._gradients[cut.number] = None

    def _add(self, cut: Cut, received: Tensor) -> None:
        part, rank = self._parts[cut.number], self._ranks.rank
        total = self._totals[cut.number]
        if total is None:
            self._totals[cut.number] = total = self._new(cut.number)
        # In the order of ranks: the same bits in each run, and on each replica.
        here = cut.at_rank(part, rank, total).copy_(cut.sent(part, rank, received[0]))
        for row in received[1:]:
            here += cut.sent(part, rank, row)

    def _new(self, number: int) -> Tensor:
        """Memory for one sum. What is being stored is freed first where both would be too much."""
        wide = self._wide[number]
        count = wide.stored_elements(self._ranks.rank)
        self._more_bytes += count * wide.dtype.itemsize
        if self._more_bytes > self._most_bytes:
            for arrival in self._storing:
                with suppress(Exception):  # the thread that runs the model raises it
                    # Drain lane -> lane of ranks. Without this, a rank holds more than a shard beside one process.
                    arrival.synchronize()
        return torch.empty(count, dtype=wide.dtype, device=self._ranks.transport.device)
