"""Writes what enters recomputed cells to scratch space when memory cannot hold it, and reads it back for backward.

Autograd saves these tensors through hooks (:meth:`Boundaries.hooks`). As many bytes as the budget allows stay in memory.
Backward uses the last ones first, so the earliest are written; they are read back one cell ahead of use.

Guarantees
    * At most ``budget_bytes`` stay in memory, besides the tensors that are being written or read.
    * A tensor that several cells save is stored once.
    * A tensor that was changed in place since it was saved raises RuntimeError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from offload.storage import Scratch
from offload.streaming.lane import Arrival, CopyLane, error_context
from offload.telemetry.statistics import Meter
from pipe.freed import WhenFreed

__all__ = ["Boundaries"]

#: Tensors that are written at the same time.
WRITES_IN_FLIGHT = 2


class _Saved:
    """A saved tensor: in memory, in scratch space, or both."""

    __slots__ = ("arrival", "fetching", "life", "nbytes", "order", "tensor", "ticket", "version")

    def __init__(self, tensor: Tensor, order: int) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor._version
        self.nbytes = tensor.untyped_storage().nbytes()
        self.order = order
        self.ticket: list[Any] = []
        #: Of the write, and of the read that is under way.
        self.arrival: Arrival | None = None
        self.fetching: tuple[Arrival, list[Tensor]] | None = None


class Boundaries:
    """The boundaries of one forward.

    Args:
        scratch: None: they stay in memory.
        budget_bytes: see the module.
    """

    def __init__(self, scratch: Scratch | None, lane: CopyLane, meter: Meter, budget_bytes: float) -> None:
        self._scratch, self._lane, self._meter, self._budget = scratch, lane, meter, budget_bytes
        #: Those in memory, the earliest first, by their order; and those that are being written.
        self._held: dict[int, _Saved] = {}
        self._writing: list[_Saved] = []
        #: Those in scratch space only, by their order.
        self._away: dict[int, _Saved] = {}
        self._held_bytes = 0
        self._count = 0
        #: By the memory of a tensor that is held.
        self._known: dict[tuple[Any, ...], _Saved] = {}
        self._closes = None if scratch is None else WhenFreed(scratch.close)

    @property
    def hooks(self) -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
        """Saved-tensor hooks for what enters a cell; None where everything stays in memory."""
        return None if self._scratch is None else (self._save, self._load)

    def _save(self, tensor: Tensor) -> Any:
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        saved = self._known.get(place)
        if saved is None or saved.tensor is None:
            saved = _Saved(tensor.detach(), self._count)
            self._count += 1
            self._known[place] = self._held[saved.order] = saved
            self._hold(saved.nbytes)
            while self._held_bytes > self._budget and self._write_earliest():
                pass
        saved.life = None
        return saved

    def _hold(self, nbytes: int) -> None:
        self._held_bytes += nbytes
        self._meter.hold(nbytes)

    def _write_earliest(self) -> bool:
        """Writes the earliest tensor that is in memory; False if there is none."""
        earliest = next(iter(self._held.values()), None)
        if earliest is None:
            return False
        while len(self._writing) >= WRITES_IN_FLIGHT:
            self._end_write(self._writing[0])
        tensor, scratch = earliest.tensor, self._scratch
        assert tensor is not None and scratch is not None
        _check(tensor, earliest.version)

        def store() -> None:
            with self._meter.on_lane("boundary", "S", earliest.nbytes):
                earliest.ticket.append(scratch.store(tensor))

        earliest.arrival = self._lane.submit("S", store)
        self._meter.bytes_spilled += earliest.nbytes
        del self._held[earliest.order]
        self._writing.append(earliest)
        self._held_bytes -= earliest.nbytes
        return True

    def _end_write(self, saved: _Saved) -> None:
        assert saved.arrival is not None
        with self._meter.waiting("S"), error_context("writing an activation"):
            # Boundary lane -> compute. Without this, memory of a tensor is freed while it is written.
            saved.arrival.wait()
        self._writing.remove(saved)
        saved.tensor = None
        self._meter.release(saved.nbytes)
        self._away[saved.order] = saved

    def _load(self, saved: Any) -> Tensor:
        assert isinstance(saved, _Saved)
        if saved in self._writing:
            self._end_write(saved)
        if saved.tensor is None:
            self._fetch(saved)
            assert saved.fetching is not None
            arrival, found = saved.fetching
            with self._meter.waiting("P"), error_context("reading an activation back"):
                # Boundary lane -> compute. Without this, a cell runs on what has not been read yet.
                arrival.wait()
            saved.fetching = None
            saved.tensor, saved.version = found[0], found[0]._version
            self._away.pop(saved.order, None)
            self._held[saved.order] = saved
        self._fetch_before(saved.order)
        tensor = saved.tensor
        _check(tensor, saved.version)
        return tensor

    def _fetch(self, saved: _Saved) -> None:
        if saved.fetching is not None:
            return
        scratch, found = self._scratch, list[Tensor]()
        assert scratch is not None

        def fetch() -> None:
            with self._meter.on_lane("boundary", "P", saved.nbytes):
                found.append(scratch.fetch(saved.ticket[0]))

        self._hold(saved.nbytes)
        saved.fetching = self._lane.submit("P", fetch), found

    def _fetch_before(self, order: int) -> None:
        """Begins to read what backward uses next."""
        before = max((each for each in self._away if each < order), default=None)
        if before is not None:
            self._fetch(self._away[before])


def _check(tensor: Tensor, version: int) -> None:
    if tensor._version != version:
        raise RuntimeError(
            f"an activation of shape {tuple(tensor.shape)} that enters a block was changed in place between the "
            f"forward and its backward; clone it before changing it"
        )
