"""Reduces gradients over ranks on their way home: each rank stores the mean of its part of every gradient.

::

    visit of shard j      whole gradients
    lane of ranks         piece by piece: one row of bytes for each rank
                          all_to_all: row r of every rank arrives at rank r
                          the sum of these in rank order, in float32 at least  -->  this rank's part
                          with two dimensions, these sums are added over replicas as well
    next drain            the part is stored, as a gradient of the stored parameter

A whole gradient is freed when its last piece is sent, and memory for a sum is taken with its first piece. A parameter
without a gradient on this rank counts as zeros. One without on any rank keeps none: before, ranks tell each other by
messages of the host which they have.

``all_to_all`` moves each byte once, and 16 bits are widened where they are added. The order of the sum is fixed, so
results have the same bits from run to run.

What each rank stores whole, such as parameters outside of blocks, has its gradients reduced in the same way at the end
of a backward, as if it were cut; then the means are gathered: the same bits on all ranks.

Inside of ``OffloadModel.accumulate()`` a backward adds its gradients here and sends none. The first backward outside
adds what is kept to its own gradients before ranks reduce them. The result is the mean over ranks of the same sums, so
it differs by rounding alone from that of a reduction in each backward.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from offload.mesh.parts import Part, WholePart, bytes_at_once, cuts_between, offsets_of, pieces_of
from offload.mesh.ranks import Ranks
from offload.mesh.shard import MeshShard, gather_parts
from offload.mesh.traffic import ExchangeBytes, widened
from offload.partition import aligned
from offload.storage.contract import in_order
from offload.streaming.gradient_offload import GradientOffload
from offload.streaming.lane import Arrival
from offload.streaming.shard import Shard
from offload.telemetry.statistics import REDUCTION

if TYPE_CHECKING:
    from offload.telemetry.statistics import Meter

__all__ = ["LocalSums", "MeshGradientOffload", "exchange_bytes", "means_of_parts", "means_of_whole"]


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
        self.whole: dict[nn.Parameter, Tensor] = {}

    def begin(self, *args: Any, **kwargs: Any) -> bool:
        """See :meth:`GradientOffload.begin`."""
        self._sums.check_trained()
        updates = super().begin(*args, **kwargs)
        if updates and self._sums.keeps:
            self._end_backward(failed=True)
            raise RuntimeError(
                "update_in_backward uses the gradients of this backward, which keeps them on each rank, inside of the "
                "model's accumulate(); enter the optimizer's accumulate() as well"
            )
        return updates

    def drain(self, shard: Shard, gradients: list[Tensor | None]) -> None:
        """Starts to reduce the ``gradients`` of the last visit. Those before are stored meanwhile."""
        self._continue()
        assert isinstance(shard, MeshShard)
        if not shard.trainable:
            return
        for position, gradient in enumerate(gradients):
            if gradient is not None and gradient.is_sparse:
                raise RuntimeError(
                    f"the gradient of {shard.slices[position].name} is sparse, which is not supported with mesh=; use "
                    f"a layer with sparse=False"
                )
        for k, part in enumerate(shard.parts):
            if (gradient := gradients[k]) is not None and isinstance(part, WholePart):
                self.add_whole(shard.places[k][1].parameter, gradient.to(part.dtype))
        positions = _trainable(shard)
        if not positions:
            return
        found = {shard.at_home[k].parameter: g for k in positions if (g := gradients[k]) is not None}
        gradient, gradients[:] = None, [None] * len(gradients)
        if self._sums.keeps:
            self._sums.keep(shard, found)
            return
        found = self._sums.with_kept(shard, found)
        given = [found.pop(shard.at_home[k].parameter, None) for k in positions]
        self._reducing = sum(g.numel() * g.element_size() for g in given if g is not None)
        self._meter.hold(self._reducing)
        parts: list[Tensor | None] = [None] * len(gradients)
        # What is being stored now. Updates in backward keep gradients of more than one shard, as in one process.
        storing = [] if self._updater is not None else [arrival for arrival, _, _ in self._drains]

        def reduce() -> None:
            with self._meter.on_lane("drain", f"R{shard.index}", self._reducing, kind=REDUCTION):
                means = means_of_parts([shard.parts[k] for k in positions], given, self._ranks, storing)
                for k, mean in zip(positions, means, strict=True):
                    parts[k] = mean

        arrival = self._ranks.lane.submit(f"R{shard.index}", reduce)

        def store() -> None:
            with self._meter.waiting(f"R{shard.index}", f"reducing gradients of shard {shard.index}"):
                # Lane of ranks -> compute. Without this, gradients are stored before they are summed.
                arrival.wait()
            self._release()
            super(MeshGradientOffload, self).drain(shard, parts)

        self._deferred.append(store)

    def add_whole(self, stored: nn.Parameter, gradient: Tensor) -> None:
        """Adds a gradient of this rank to :attr:`whole`."""
        known = self.whole.get(stored)
        self.whole[stored] = gradient if known is None else known + gradient

    def update(self, shard: Shard, slot: Tensor | None = None) -> None:
        """Starts to update a shard once its gradients are reduced; nothing if none were. No slot holds its part."""
        assert isinstance(shard, MeshShard)
        if _trainable(shard):
            self._deferred.append(partial(super().update, shard))

    def wait_idle(self) -> None:
        """Waits until all gradients are stored, at the end of the backward."""
        self._continue()
        super().wait_idle()

    def cancel(self) -> None:
        """Resets all state after a failure, once no copy is running."""
        self._deferred.clear()
        self.whole.clear()
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


def means_of_parts(
    parts: Sequence[Part], gradients: list[Tensor | None], ranks: Ranks, storing: Sequence[Arrival] = ()
) -> list[Tensor | None]:
    """This rank's parts of the means over ranks of whole ``gradients``; empties the list. On the lane of ranks.

    None for a gradient that no rank has. What a rank sends to each other one are the bytes of ``parts``, and one for
    each of them in whole cache lines. ``storing``: copies of means of an earlier call, which it waits for.
    """
    count, device = ranks.count, ranks.transport.device
    there = ranks.any_rank_has([gradient is not None for gradient in gradients])
    given, gradients[:] = [*gradients], [None] * len(gradients)
    offsets, nbytes = offsets_of(parts)
    wide = widened(parts)
    totals: list[Tensor | None] = [None] * len(parts)
    for arrival in storing:
        with suppress(Exception):  # the thread that runs the model raises it
            # Drain lane -> lane of ranks. Without this, a rank holds more than a shard beside one process.
            arrival.synchronize()
    for begin, end in pieces_of(nbytes, count):
        sent, received = ranks.staging(2 * count * (end - begin)).view(2, count, end - begin)
        cuts = [*cuts_between(parts, offsets, begin, end)]
        for cut in cuts:
            n, part, gradient = cut.number, parts[cut.number], given[cut.number]
            if gradient is not None and not cut.first:
                ranks.transport.use(gradient)
                given[n] = gradient = part.flat(gradient)
            for rank in range(count):
                place = cut.sent(part, rank, sent[rank])
                place.zero_() if gradient is None else place.copy_(cut.of_rank(part, rank, gradient))
            if cut.ends:
                given[n] = None
        gradient = None  # else the last one would not be freed
        ranks.reduce(received, sent)
        for cut in cuts:
            n, total = cut.number, totals[cut.number]
            if not there[n]:
                continue
            if total is None:
                elements = wide[n].stored_elements(ranks.rank)
                totals[n] = total = torch.empty(elements, dtype=wide[n].dtype, device=device)
            # In the order of ranks: the same bits in each run, and on each replica.
            here = cut.at_rank(parts[n], ranks.rank, total).copy_(cut.sent(parts[n], ranks.rank, received[0]))
            for row in received[1:]:
                here += cut.sent(parts[n], ranks.rank, row)
    ranks.add_replicas([total for total in totals if total is not None], sum(aligned(p.stored_bytes(0)) for p in wide))
    for n, part in enumerate(parts):
        total, totals[n] = totals[n], None
        if there[n]:
            if total is None:  # without elements
                total = torch.empty(0, dtype=part.dtype, device=device)
            totals[n] = part.rows_of(total.div_(ranks.divide_factor).to(part.dtype), ranks.rank)
    return totals


def means_of_whole(parts: Sequence[Part], gradients: list[Tensor | None], ranks: Ranks) -> list[Tensor | None]:
    """The means over ranks of ``gradients`` of what each rank stores whole; empties the list. On the lane of ranks.

    None for a gradient that no rank has.
    """
    for k, gradient in enumerate(gradients):
        if gradient is not None:
            ranks.transport.use(gradient)
            gradients[k] = parts[k].flat(gradient)
    gradient = None
    cut = [part.as_flat() for part in parts]
    means = means_of_parts(cut, gradients, ranks)
    there = [k for k, mean in enumerate(means) if mean is not None]
    cut, mine = [cut[k] for k in there], [mean for mean in means if mean is not None]
    offsets, nbytes = offsets_of(cut)
    device = ranks.transport.device
    wholes = [torch.empty_strided(p.shape, p.stride, dtype=p.dtype, device=device) for p in (parts[k] for k in there)]

    def read(memory: Tensor, begin: int) -> None:
        for part in cuts_between(cut, offsets, begin, begin + memory.numel()):
            stored = part.at_rank(cut[part.number], ranks.rank, mine[part.number])
            part.sent(cut[part.number], ranks.rank, memory).copy_(stored)

    gather_parts(cut, offsets, nbytes, [in_order(whole) for whole in wholes], read, ranks)
    found = dict(zip(there, wholes, strict=True))
    return [found.get(k) for k in range(len(parts))]


def exchange_bytes(shards: Sequence[MeshShard], replicated: Sequence[Part], ranks: Ranks) -> ExchangeBytes:
    """The bytes of these ``shards``; ``replicated``: the cuts of what each rank stores whole, and trains."""
    trained = [
        [p for p, s in zip(shard.parts, shard.slices, strict=True) if s.parameter.requires_grad] for shard in shards
    ]
    reduced = [[part for part in parts if not isinstance(part, WholePart)] for parts in trained]

    def rows(parts: Sequence[Part]) -> int:
        """Bytes of one collective over these parts, from or to all ranks."""
        return ranks.count * bytes_at_once(offsets_of(parts)[1], ranks.count)

    def stored(parts: Sequence[Part]) -> int:
        return sum(part.stored_bytes(ranks.rank) for part in parts)

    cut = [part.as_flat() for part in replicated]
    staging = [rows(shard.parts) for shard in shards] + [2 * rows(parts) for parts in (*reduced, cut)]
    draining, before = [0] * len(shards), 0
    for j in range(len(shards) - 1, -1, -1):
        if reduced[j]:
            draining[j] = sum(map(_whole, reduced[j])) + stored(widened(reduced[j])) + before
            before = stored(reduced[j])
    return ExchangeBytes(
        staging=max(staging),
        gradients=[sum(map(_whole, parts)) for parts in trained],
        draining=draining,
        # What reduces them; or before, in autograd, another gradient of each that is used several times.
        outside=max(
            stored(widened(cut)) + stored([part for part in cut if part not in widened([part])]),
            sum(map(_whole, replicated)),
        ),
    )


def _whole(part: Part) -> int:
    return torch.Size(part.shape).numel() * part.dtype.itemsize
