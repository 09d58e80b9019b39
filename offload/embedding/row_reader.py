"""Reads the rows of an embedding table that a batch needs, in a thread, and again those that have changed since.

A read may begin while batches before still compute. Rows that get a gradient between the beginning of a read and the
use of the rows are read again right before that use.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch
from torch import Tensor

from offload.embedding.row_owners import AskedRows, RowOwners
from pipe.train.batch import record_stream
from pipe.train.lane import ThreadLane, Ticket, fence

__all__ = ["RowReader", "RowRequest", "Rows"]


@dataclass(frozen=True)
class Rows:
    """The distinct rows of one batch, copied to the device; with a mesh those of this rank's that all ranks need."""

    rows: Tensor  # (k,) int64 on the host: row numbers, sorted, distinct
    used: int  # distinct indices of the batch; 0 if it has none, while a lookup needs at least one row
    values: Tensor  # (k, dim) on the device; with a mesh on the host
    positions: Tensor  # the input's shape, on the device: position among the distinct indices of each index
    padding: int | None  # position of the padding row there
    asked: AskedRows | None = None  # with a mesh


@dataclass(eq=False)
class RowRequest:
    """The arguments of one forward and its rows, while they are read."""

    offsets: Tensor | None
    per_sample_weights: Tensor | None
    ticket: Ticket[Rows]
    version: int  # of the table when the read was submitted
    refreshes: int
    touched: list[Tensor] = field(default_factory=list)  # rows whose update the read may have missed

    def wait(self) -> RowRequest:
        """Waits for the rows. (The protocol's first wait does nothing.)"""
        self.ticket.wait()
        return self


class RowReader:
    """Reads rows of one table of ``num_embeddings`` rows; with a mesh, the part that this rank stores, for all."""

    def __init__(
        self, num_embeddings: int, padding_idx: int | None, owners: RowOwners | None, device: torch.device
    ) -> None:
        self._num_embeddings = num_embeddings
        self._padding_idx = padding_idx
        self._owners = owners
        self._outstanding: weakref.WeakSet[RowRequest] = weakref.WeakSet()
        self._unapplied: list[tuple[int, Tensor]] = []  # (version of the table, rows) of gradients
        self._refreshes = 0
        #: Rows copied to the device, and those of them that were read again.
        self.rows_read = self.rows_refreshed = 0
        self.read_to(device)

    def read_to(self, device: torch.device) -> None:
        """Copies rows to this device from now on."""
        self._device = device
        stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.lane = ThreadLane("embedding-rows", stream)

    def refresh(self) -> None:
        """All rows of batches in flight are read again."""
        self._refreshes += 1

    def begin(
        self, weight: Tensor, input: Tensor, offsets: Tensor | None, per_sample_weights: Tensor | None
    ) -> RowRequest:
        """Starts to read the rows of ``input`` from the table ``weight``, in the I/O thread."""
        version = weight._version
        # A gradient older than the table's last change has been applied, so the read below includes it.
        self._unapplied = [(seen, rows) for seen, rows in self._unapplied if seen >= version]
        before = fence(self._device)
        request = RowRequest(
            offsets,
            per_sample_weights,
            self.lane.submit(lambda: self._read(weight, input, before)),
            version,
            self._refreshes,
            [rows for _, rows in self._unapplied],
        )
        self._outstanding.add(request)
        return request

    def _read(self, weight: Tensor, input: Tensor, before: Ticket[None]) -> Rows:
        """In the I/O thread: gathers the distinct rows of a batch and copies them to the device."""
        # Without this wait, the indices are read before the copy that writes them has run.
        before.wait()
        record_stream(input, self.lane.stream)
        distinct, positions = torch.unique(input, return_inverse=True)
        rows = distinct.to("cpu", torch.int64)
        used = rows.numel()
        error = None
        if used and (int(rows[0]) < 0 or int(rows[-1]) >= self._num_embeddings):
            error = IndexError(
                f"expected indices from 0 to {self._num_embeddings - 1}, got {int(rows[0])} to {int(rows[-1])}"
            )
        asked = None if self._owners is None else self._owners.ask(rows, error)
        if error is not None:
            raise error
        padding = None
        if self._padding_idx is not None:
            found = int(torch.searchsorted(rows, self._padding_idx))
            padding = found if found < len(rows) and int(rows[found]) == self._padding_idx else None
        if asked is not None:
            return Rows(asked.rows, used, self._gather(weight, asked.rows), positions, padding, asked)
        if not used:
            rows = torch.zeros(1, dtype=torch.int64)  # a lookup needs a table with at least one row
        values = self._gather(weight, rows).to(self._device, non_blocking=True)
        return Rows(rows, used, values, positions.to(self._device), padding)

    def _gather(self, weight: Tensor, rows: Tensor) -> Tensor:
        """Rows of the table, in page-locked host memory if the device is an accelerator."""
        table = weight.detach()
        staging = torch.empty(len(rows), table.shape[1], dtype=table.dtype, pin_memory=self._device.type == "cuda")
        torch.index_select(table, 0, rows, out=staging)
        return staging

    def collect(self, weight: Tensor, request: RowRequest) -> tuple[Rows, Tensor]:
        """Waits for the rows of a batch: what was read, and the values of the rows that the batch looks up."""
        self._outstanding.discard(request)
        batch = request.ticket.wait()
        if self.lane.stream is not None:
            record_stream([batch.values, batch.positions], torch.cuda.current_stream(self._device))
        self.rows_read += len(batch.rows)
        self.refresh_stale(weight, request, batch)
        values = batch.values
        if self._owners is not None and batch.asked is not None:
            values = self._owners.fetch(batch.asked, values)
        return batch, values

    def refresh_stale(self, weight: Tensor, request: RowRequest, batch: Rows) -> None:
        """Reads rows again that changed during or after the read."""
        if request.refreshes != self._refreshes:
            stale = torch.arange(len(batch.rows))
        elif weight._version != request.version and request.touched:
            stale = torch.isin(batch.rows, torch.cat(request.touched)).nonzero().squeeze(1)
        else:
            return
        if len(stale):
            fresh = self._gather(weight, batch.rows[stale])
            self.rows_read += len(stale)
            self.rows_refreshed += len(stale)
            batch.values.index_copy_(0, stale.to(self._device), fresh.to(self._device, non_blocking=True))

    def take_gradient(
        self, weight: Tensor, rows: Tensor, used: int, asked: AskedRows | None, gradient: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The rows of the stored table that get a gradient, sorted and distinct, and these gradients.

        Args:
            weight: the table.
            rows, used, asked: see :class:`Rows`.
            gradient: of the values that :meth:`collect` returned.
        """
        values = gradient[:used].to("cpu")
        if self._owners is not None and asked is not None:
            values = self._owners.sum_gradients(asked, values)
        else:
            rows = rows[:used]
        # An update may follow at any time.
        self._unapplied.append((weight._version, rows))
        for request in list(self._outstanding):
            request.touched.append(rows)
        return rows, values
