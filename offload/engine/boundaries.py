"""Writes what enters recomputed cells to scratch space when memory cannot hold it, and reads it back for backward.

Autograd saves these tensors through :attr:`Boundaries.hooks`. As many bytes as the budget allows stay in memory.
Backward uses the last ones first, so the earliest are written; they are read back one cell ahead of use.

Guarantees
    * With those that are being written, read or used, they take at most ``budget_bytes``, which leaves room for
      :data:`~offload.planning.step_model.MOVING` of them at least.
    * A tensor that several cells save is in memory once, and is freed with the graph of the last of them.
    * A tensor that was changed in place since it was saved raises RuntimeError.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.engine.sizes import bytes_of_boundary, is_plain
from offload.planning.plan import Action, Kind
from offload.planning.step_model import MOVING, WRITES_IN_FLIGHT
from offload.storage import Scratch
from offload.streaming.lane import Arrival, CopyLane
from offload.telemetry.statistics import Meter
from pipe.freed import WhenFreed

__all__ = ["Boundaries"]


#: A shard and a micro-batch.
Cell = tuple[int, int]


class _Boundary:
    """A tensor: in memory, in scratch space, or both."""

    __slots__ = (
        "arrival", "cell", "empty", "fetching", "nbytes", "order", "place", "read_back", "stays", "tensor", "uses",
        "version",
    )  # fmt: skip

    def __init__(self, tensor: Tensor, place: Any, order: int, cell: Cell) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.nbytes = bytes_of_boundary(tensor)
        #: The first cell that it enters.
        self.cell = cell
        self.place, self.order = place, order
        #: Graphs of cells that save it.
        self.uses = 0
        #: Whether it never leaves memory.
        self.stays = not is_plain(tensor)
        #: Memory for it, and what reads it from scratch space into that.
        self.empty: Callable[[], Tensor] | None = None
        self.read_back: Callable[[Tensor], None] | None = None
        #: Of the write, and of the read that is under way, with what is read.
        self.arrival: Arrival | None = None
        self.fetching: tuple[Arrival, Tensor] | None = None


class Boundaries:
    """The boundaries of one forward.

    Args:
        budget_bytes: see the module.
    """

    def __init__(self, scratch: Scratch, lane: CopyLane, meter: Meter, budget_bytes: float) -> None:
        self._scratch, self._lane, self._meter, self._budget = scratch, lane, meter, budget_bytes
        self._largest = 0
        #: Those in memory, the earliest first, by their order; those that are being written; those in scratch space.
        self._held: dict[int, _Boundary] = {}
        self._writing: list[_Boundary] = []
        self._away: dict[int, _Boundary] = {}
        self._held_bytes = 0
        self._count = 0
        #: Called with the kind and the cell of each move; None if no step is observed. And the cells that are not whole
        #: in memory.
        self.act: Callable[[Kind, int, int], None] | None = None
        self._moved: set[Cell] = set()
        #: By the memory of a tensor that is in memory.
        self._known: dict[Any, _Boundary] = {}
        self._closes = WhenFreed(partial(_close, scratch, meter, self._writing))

    def hooks(self, cell: Cell) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]:
        """Saved-tensor hooks for what enters a cell."""
        return partial(self._save, cell), self._load

    def expect(self, cell: Cell) -> None:
        """Begins to read what enters a cell whose backward comes next, and the one before."""
        while self._writing:
            self._end_write(self._writing[0])
        orders = sorted(order for order, b in [*self._away.items(), *self._held.items()] if b.cell == cell)
        for order in [order for order in reversed(orders) if order in self._away]:
            self._fetch(self._away[order])
        if orders:
            self._fetch_before(orders[0])

    def _save(self, cell: Cell, tensor: Tensor) -> Any:
        place: Any = object()
        if is_plain(tensor):
            place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        boundary = self._known.get(place)
        if boundary is None:
            boundary = self._known[place] = _Boundary(tensor.detach(), place, self._count, cell)
            self._count += 1
            self._largest = max(self._largest, boundary.nbytes)
            self._meter.hold(boundary.nbytes)
            self._hold(boundary)
        boundary.uses += 1
        saved = boundary, WhenFreed(partial(self._unused, boundary))  # the graph of the cell holds both
        while self._held_bytes > self._budget - MOVING * self._largest and self._write_earliest():
            pass
        return saved

    def _hold(self, boundary: _Boundary) -> None:
        self._held[boundary.order] = boundary
        self._held_bytes += boundary.nbytes

    def _let_go(self, boundary: _Boundary) -> bool:
        if self._held.pop(boundary.order, None) is None:
            return False
        self._held_bytes -= boundary.nbytes
        self._known.pop(boundary.place, None)
        return True

    def _unused(self, boundary: _Boundary) -> None:
        """Called when a graph that saved a boundary is freed, in any thread."""
        boundary.uses -= 1
        if boundary.uses:
            return
        self._away.pop(boundary.order, None)
        fetching, boundary.fetching = boundary.fetching, None
        if fetching is not None and fetching[0].done:
            # Boundary lane -> compute. Without this, memory is freed, and used again, while a stream writes it. A
            # thread, which is not waited for since it may be this one, keeps the memory itself until then.
            with contextlib.suppress(Exception):  # which nothing needs any more
                fetching[0].synchronize()
        if self._let_go(boundary) or fetching is not None:
            self._meter.release(boundary.nbytes)

    def _write_earliest(self) -> bool:
        """Writes the earliest tensor that is in memory only; False if there is none."""
        held = list(self._held.values())[:-1]  # the last one is used by the cell that runs, and first by backward
        boundary = next((b for b in held if not b.stays), None)
        if boundary is None:
            return False
        while len(self._writing) >= WRITES_IN_FLIGHT:
            self._end_write(self._writing[0])
        tensor, nbytes = _unchanged(boundary), boundary.nbytes
        token = self._done(Kind.SPILL, boundary.cell)

        def store() -> None:  # refers to this object, whose end closes the scratch space
            with self._meter.on_lane("boundary", token, nbytes):
                boundary.read_back = self._scratch.store(tensor)

        self._let_go(boundary)
        # Strides, as empty_like() has them: a meta tensor that lives as long as the step would fragment the heap.
        strides = torch.empty_like(tensor, device="meta").stride()
        boundary.empty = partial(torch.empty_strided, tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
        boundary.arrival = self._lane.submit("spill boundary", store)
        self._meter.bytes_spilled += nbytes
        self._writing.append(boundary)
        return True

    def _end_write(self, boundary: _Boundary) -> None:
        assert boundary.arrival is not None
        with self._meter.waiting("spill", f"spilling a boundary to {self._scratch.name}"):
            # Boundary lane -> compute. Without this, memory of a tensor is freed, and used again, while it is written.
            boundary.arrival.wait()
        self._writing.remove(boundary)
        self._meter.release(boundary.nbytes)
        if boundary.uses:
            _unchanged(boundary)  # else what was written may be the later values
            self._away[boundary.order] = boundary
        boundary.tensor = boundary.arrival = None

    def _load(self, saved: tuple[_Boundary, WhenFreed]) -> Tensor:
        boundary, _ = saved
        while self._writing:
            self._end_write(self._writing[0])
        if boundary.tensor is None:
            self._fetch(boundary)
            assert boundary.fetching is not None
            arrival, tensor = boundary.fetching
            with self._meter.waiting("boundary", f"reading a boundary from {self._scratch.name}"):
                # Boundary lane -> compute. Without this, a cell runs on what has not been read yet.
                arrival.wait()
            boundary.tensor, boundary.fetching = tensor, None
            boundary.version = tensor._version
            self._away.pop(boundary.order, None)
            self._hold(boundary)
            self._forget_later(boundary.order)
        self._fetch_before(boundary.order)
        return _unchanged(boundary)

    def _fetch(self, boundary: _Boundary) -> None:
        if boundary.fetching is not None:
            return
        empty, read_back, nbytes = boundary.empty, boundary.read_back, boundary.nbytes
        assert empty is not None
        assert read_back is not None, "a boundary is read before it was written"
        token = self._done(Kind.PREFETCH, boundary.cell)
        tensor = empty()  # on the stream that uses it

        def fetch() -> None:
            with self._meter.on_lane("boundary", token, nbytes):
                read_back(tensor)

        self._meter.hold(nbytes)
        boundary.fetching = self._lane.submit("fetch boundary", fetch), tensor

    def _fetch_before(self, order: int) -> None:
        """Begins to read what backward uses next, unless that is in memory."""
        if self._away:
            before = max((each for each in (*self._away, *self._held) if each < order), default=None)
            if before in self._away:
                self._fetch(self._away[before])

    def _done(self, kind: Kind, cell: Cell) -> str:
        """Notes that a boundary leaves memory or returns, once for all tensors that enter a cell."""
        if self.act is not None and (kind is Kind.PREFETCH) == (cell in self._moved):
            self.act(kind, *cell)
        (self._moved.discard if kind is Kind.PREFETCH else self._moved.add)(cell)
        return str(Action(kind, *cell))

    def _forget_later(self, order: int) -> None:
        """Frees the memory of what was read back for later cells, whose graph is retained."""
        for boundary in list(self._held.values()):
            if boundary.order > order and boundary.read_back is not None and self._let_go(boundary):
                boundary.tensor = None
                self._away[boundary.order] = boundary
                self._done(Kind.FORGET, boundary.cell)
                self._meter.release(boundary.nbytes)


def _close(scratch: Scratch, meter: Meter, writing: Sequence[_Boundary]) -> None:
    scratch.close()
    meter.release(sum(boundary.nbytes for boundary in writing))


def _unchanged(boundary: _Boundary) -> Tensor:
    """The tensor of a boundary in memory. Raises RuntimeError if it was changed in place."""
    tensor = boundary.tensor
    assert tensor is not None
    if tensor._version != boundary.version:
        raise RuntimeError(
            f"an activation of shape {tuple(tensor.shape)} that enters a block was changed in place between the "
            f"forward and its backward; clone it before changing it"
        )
    return tensor
