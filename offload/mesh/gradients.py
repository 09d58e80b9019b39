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

What each rank stores whole, such as parameters outside of blocks, has its gradients added by ``all_reduce`` at the end
of a backward: the same bits on all ranks.

Inside of ``OffloadModel.accumulate()`` a backward adds its gradients here and sends none. The first backward outside
adds what is kept to its own gradients before ranks reduce them. The result is the mean over ranks of the same sums, so
it differs by rounding alone from that of a reduction in each backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from offload.mesh.parts import LEAST_AT_ONCE, Cut, Part, WholePart, bytes_at_once, cuts_between, offsets_of, pieces_of
from offload.mesh.ranks import Ranks
from offload.mesh.traffic import ExchangeBytes, widened
from offload.planning.partition import aligned
from offload.streaming.gradient_offload import GradientOffload
from offload.streaming.lane import Arrival, error_context
from offload.streaming.shard import Shard
from offload.telemetry.statistics import REDUCTION

if TYPE_CHECKING:
    from offload.mesh.shard import MeshShard
    from offload.telemetry.statistics import Meter

__all__ = ["LocalSums", "MeshGradientOffload", "ReplicatedGradients", "exchange_bytes", "means_of_parts"]


class LocalSums:
    """The sums of one rank, by stored parameter: of each shard, and for None of what each rank stores whole."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._entered = 0
        self._kept: dict[MeshShard | None, dict[nn.Parameter, Tensor]] = {}

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
        return bool(self._kept)

    def described(self) -> str:
        """What ranks compare before a backward: whether it keeps, and of what sums are kept."""
        shards = ",".join(str(shard.index) for shard in self.shards)
        return f"{'keeps' if self.keeps else 'reduces'}:sums-of={shards}"

    @property
    def shards(self) -> list[MeshShard]:
        """The shards of which sums are kept, in their order."""
        return sorted((shard for shard in self._kept if shard is not None), key=lambda shard: shard.index)

    def check_trained(self) -> None:
        """Raises RuntimeError if a parameter of which a sum is kept was frozen since."""
        names = {s.parameter: s.name for shard in self.shards for s in shard.at_home}
        for p in [p for kept in self._kept.values() for p in kept if not p.requires_grad]:
            raise RuntimeError(
                f"{names.get(p, 'a parameter that each rank stores whole')} has a gradient from a backward in "
                f"accumulate(), which was not reduced yet, but does not require one now. Freeze parameters after the "
                f"backward that reduces, or clear gradients by model.zero_grad() before"
            )

    def keep(self, shard: MeshShard | None, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Adds the gradients of one backward to the sums, in the types of homes."""
        kept = self._kept.setdefault(shard, {})
        for p, gradient in gradients.items():
            if p in kept:
                kept[p] += gradient
            else:
                # What is kept is added to in place, and autograd may use a gradient in several places.
                kept[p] = gradient.to(p.dtype, copy=True)
                self._meter.hold(kept[p].nbytes)

    def with_kept(
        self, shard: MeshShard | None, gradients: Mapping[nn.Parameter, Tensor]
    ) -> dict[nn.Parameter, Tensor]:
        """The gradients with what is kept of them, which is kept no longer.

        Every backward that stores gradients visits all shards that train.
        """
        kept = self._kept.pop(shard, {})
        self._meter.release(sum(total.nbytes for total in kept.values()))
        return {**gradients, **{p: total.add_(gradients[p]) if p in gradients else total for p, total in kept.items()}}

    def drop(self, parameters: Collection[nn.Parameter]) -> None:
        """Drops the sums of some stored parameters, as ``zero_grad()`` does with gradients."""
        for shard, kept in list(self._kept.items()):
            for p in [p for p in kept if p in parameters]:
                self._meter.release(kept.pop(p).nbytes)
            if not kept:
                del self._kept[shard]


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

    def begin(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GradientOffload.begin`."""
        updates = super().begin(*args, **kwargs)
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
        if not shard.trainable:
            return
        for position, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_sparse:
                raise RuntimeError(
                    f"the gradient of {shard.slices[position].name} is sparse, which is not supported with mesh=; use "
                    f"a layer with sparse=False"
                )
        self._set_whole_aside(cast("MeshShard", shard), gradients)
        if not _trainable(cast("MeshShard", shard)):
            return
        pairs = zip(shard.at_home, gradients, strict=True)
        found = {s.parameter: gradient for s, gradient in pairs if gradient is not None}
        gradients[:] = [None] * len(gradients)
        if self._sums.keeps:
            self._sums.keep(cast("MeshShard", shard), found)
            return
        found = self._sums.with_kept(cast("MeshShard", shard), found)
        gradients[:] = [found.pop(s.parameter, None) for s in shard.at_home]
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
            with self._meter.waiting(f"R{shard.index}", f"reducing gradients of shard {shard.index}"):
                # Lane of ranks -> compute. Without this, gradients are stored before they are summed.
                arrival.wait()
            self._release()
            super(MeshGradientOffload, self).drain(shard, parts)

        self._deferred.append(store)

    def _set_whole_aside(self, shard: MeshShard, gradients: list[Tensor | None]) -> None:
        for k, part in enumerate(shard.parts):
            gradient = gradients[k]
            if gradient is None or not isinstance(part, WholePart):
                continue
            stored, gradients[k] = shard.owner_of(k)[1].parameter, None
            known = self._whole.get(stored)
            self._whole[stored] = gradient.to(part.dtype) if known is None else known + gradient.to(part.dtype)

    def take_whole(self) -> dict[nn.Parameter, Tensor]:
        """Gradients of this rank that are not reduced yet, since each rank stores the parameters whole."""
        whole, self._whole = self._whole, {}
        return whole

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
    _make_means(totals, parts, ranks)
    return totals


def _make_means(totals: list[Tensor | None], parts: Sequence[Part], ranks: Ranks) -> None:
    """Turns sums over the ranks of a row into means over all, in the types of homes."""
    if ranks.replicas > 1:
        add_over(totals, parts, ranks, replicas=True)
    for n, part in enumerate(parts):
        total, totals[n] = totals[n], None
        if total is not None:
            totals[n] = part.rows_of(total.div_(ranks.divide_factor).to(part.dtype), ranks.rank)


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


class ReplicatedGradients:
    """Reduces the gradients of parameters that each of the ``ranks`` stores whole; ``parts``: what each is."""

    def __init__(self, parts: Mapping[nn.Parameter, Part], ranks: Ranks) -> None:
        self._ranks = ranks
        self._parts = parts

    def __contains__(self, parameter: object) -> bool:
        """Whether a parameter is one of these."""
        return parameter in self._parts

    def reduce(self, gradients: Mapping[nn.Parameter, Tensor]) -> None:
        """Adds the mean over ranks of each gradient to the ``.grad`` of its parameter.

        All ranks call it with as many trained parameters. One that has no gradient here counts as zeros.
        """
        trained = [p for p in self._parts if p.requires_grad]
        if not trained:
            return
        found: list[tuple[nn.Parameter, Tensor]] = []
        lane = self._ranks.lane
        arrival = lane.submit("R-outside", lambda: found.extend(self._means(trained, gradients)))
        with error_context("reducing gradients of what each rank stores whole"):
            # Lane of ranks -> host. Without this, the gradients are read before they are there.
            arrival.synchronize()
        for p, mean in found:
            self._ranks.transport.use(mean)
            if p.grad is None:
                p.grad = mean
            else:
                p.grad.add_(mean)

    def trained_parts(self) -> list[Part]:
        """The cuts of those that take a gradient."""
        return [part for p, part in self._parts.items() if p.requires_grad]

    def _means(
        self, trained: Sequence[nn.Parameter], gradients: Mapping[nn.Parameter, Tensor]
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """The mean of each gradient that any rank has. On the lane."""
        ranks, parts = self._ranks, [self._parts[p] for p in trained]
        totals: list[Tensor | None] = [None] * len(parts)
        for k, (p, wide) in enumerate(zip(trained, widened(parts), strict=True)):
            if (gradient := gradients.get(p)) is not None:
                ranks.transport.use(gradient)
                totals[k] = wide.flat(gradient.detach()).to(wide.dtype, copy=True)
        add_over(totals, parts, ranks)
        _make_means(totals, parts, ranks)
        return [(p, mean) for p, mean in zip(trained, totals, strict=True) if mean is not None]


def exchange_bytes(shards: Sequence[MeshShard], replicated: Sequence[Part], ranks: Ranks) -> ExchangeBytes:
    """The bytes of these ``shards``; ``replicated``: the cuts of what each rank stores whole, and trains."""
    trained = [
        [p for p, s in zip(shard.parts, shard.slices, strict=True) if s.parameter.requires_grad] for shard in shards
    ]
    reduced = [[part for part in parts if not isinstance(part, WholePart)] for parts in trained]
    staging = [_gathering(shard.parts, ranks) for shard in shards] + [_reducing(parts, ranks) for parts in reduced]
    sums = [_whole(part) for part in widened(replicated)]
    staging.append(min(sum(each for each in sums if each <= LEAST_AT_ONCE // 2), LEAST_AT_ONCE))
    draining, before = [0] * len(shards), 0
    for j in range(len(shards) - 1, -1, -1):
        if reduced[j]:
            draining[j] = sum(map(_whole, reduced[j])) + _stored(widened(reduced[j]), ranks) + before
            before = _stored(reduced[j], ranks)
    return ExchangeBytes(
        staging=max(staging),
        gradients=[sum(map(_whole, parts)) for parts in trained],
        draining=draining,
        outside=sum(sums) + sum(_whole(part) for part in replicated if part not in widened([part])),
    )


def _whole(part: Part) -> int:
    return torch.Size(part.shape).numel() * part.dtype.itemsize


def _stored(parts: Iterable[Part], ranks: Ranks) -> int:
    return sum(part.stored_bytes(ranks.rank) for part in parts)


def _gathering(parts: Sequence[Part], ranks: Ranks) -> int:
    """Bytes of the staging area for a gather."""
    nbytes = offsets_of(parts)[1]
    return ranks.count * bytes_at_once(nbytes, ranks.count) if nbytes else 0


def _reducing(parts: Sequence[Part], ranks: Ranks) -> int:
    """The same for a reduction."""
    most = 0
    for positions in ranks.transport.together(parts):
        some = [parts[k] for k in positions]
        # What the collective adds arrives as one row.
        rows = 1 if ranks.transport.adds_in(some[0].dtype) else ranks.count
        most = max(most, (ranks.count + rows) * bytes_at_once(offsets_of(some)[1], ranks.count))
    return most
