"""``torch.nn.EmbeddingBag`` with its table in host memory or a file; only the rows of a batch are copied to the device.

Forward copies the distinct rows of its batch to the device and looks up there. Backward returns their gradients as a
sparse gradient of the table, so any optimizer for sparse gradients updates the stored table, row by row.

The module implements ``pipe.train.Distributes``: a train pipeline reads the rows of batch i+1 in a thread while batch i
computes.

Guarantees
    * Forward uses the values that a table on the device would have, even if its rows were read before an update: rows
      that received a gradient since the read are read again right before their use.
    * ``weight`` is the only master copy: a parameter whose data is the stored table, with the name, the shape and the
      sparse gradient of ``torch.nn.EmbeddingBag(sparse=True)``.
    * The device holds the distinct rows of the batches in flight, and nothing that grows with the table.

Assumes
    * The optimizer changes only rows that have a gradient (:meth:`OffloadEmbeddingBag.check_optimizer`). After any
      other write to ``weight`` the user calls :meth:`OffloadEmbeddingBag.refresh`; ``load_state_dict`` calls it.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from offload.storage import home_of, open_tier
from pipe.process import check_process
from pipe.torch_private.amp import complete_copies_of_grad_scalers
from pipe.train.batch import record_stream
from pipe.train.lane import ThreadLane, Ticket, fence

__all__ = ["OffloadEmbeddingBag", "RowRequest", "Rows"]


@dataclass(frozen=True)
class Rows:
    """The distinct rows of one batch, copied to the device."""

    rows: Tensor  # (k,) int64 on the host: row numbers, sorted, distinct
    used: int  # distinct indices of the batch; 0 if it has none, while a lookup needs at least one row
    values: Tensor  # (k, dim) on the device
    positions: Tensor  # the input's shape, on the device: position among the rows of each index
    padding: int | None  # position of the padding row there


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


@dataclass(frozen=True)
class EmbeddingStatistics:
    """Counted since construction.

    Attributes:
        rows_read: rows copied to the device, including those read again.
        rows_refreshed: rows read again because they were updated after the first read.
        bytes_loaded: bytes of ``rows_read``.
    """

    rows_read: int
    rows_refreshed: int
    bytes_loaded: int


@dataclass(frozen=True)
class _Started:
    request: RowRequest

    def wait(self) -> RowRequest:
        return self.request


class OffloadEmbeddingBag(nn.Module):
    """``torch.nn.EmbeddingBag`` with its table in host memory or a file.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: columns.
        mode: ``"sum"``, ``"mean"`` or ``"max"``.
        include_last_offset: as in ``torch.nn.EmbeddingBag``.
        padding_idx: as in ``torch.nn.EmbeddingBag``.
        offload_device: storage of the table: ``"cpu"``, or a directory.
        device: of the lookups.
        dtype: of the table.

    Shapes:
        input ``(n,)`` with ``offsets`` ``(bags,)``, or ``(bags, n)``; ``per_sample_weights`` like input; output
        ``(bags, embedding_dim)`` on ``device``.

    Raises:
        ValueError: for a size that is not positive, an unknown mode, a padding index outside the table, a home that is
            neither host memory nor a directory, or in one of several processes.
        IndexError: in forward, for an index outside the table.
        RuntimeError: in forward, in a forked child of the process that created the table.

    Source: the prefetched caches of fbgemm's table batched embeddings and torchrec's ``PrefetchTrainPipeline``
    (Meta); here for a table in host memory or on disk, and with exact values.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        *,
        include_last_offset: bool = False,
        padding_idx: int | None = None,
        offload_device: str | torch.device | os.PathLike[str] = "cpu",
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        made_with = {name: given for name, given in locals().items() if name not in ("self", "__class__")}
        super().__init__()
        wrong = []
        if num_embeddings < 1 or embedding_dim < 1:
            wrong.append(f"a positive size, got num_embeddings={num_embeddings}, embedding_dim={embedding_dim}")
        if mode not in ("sum", "mean", "max"):
            wrong.append(f"mode 'sum', 'mean' or 'max', got mode={mode!r}")
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            wrong.append(f"padding_idx inside the table of {num_embeddings} rows, got padding_idx={padding_idx}")
        if wrong:
            raise ValueError(f"expected {'; and '.join(wrong)}")
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        self.include_last_offset = include_last_offset
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.offload_device = home_of(offload_device) or offload_device
        self._made_with = {**made_with, "offload_device": self.offload_device}
        self.device = torch.device(device)
        if self.device.type == "cuda":
            complete_copies_of_grad_scalers()  # gradients are in host memory
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise ValueError(
                f"this is one of {dist.get_world_size()} processes, each of which would train an OffloadEmbeddingBag "
                f"of its own; train in one process (for a table of this process alone: make it before "
                f"init_process_group)"
            )
        self._tier = open_tier(self.offload_device, self.device)
        nbytes = num_embeddings * embedding_dim * dtype.itemsize
        self._block = self._tier.allocate(nbytes, "embedding")
        self.weight = nn.Parameter(self._block.tensor[:nbytes].view(dtype).view(num_embeddings, embedding_dim))
        self._made_in = os.getpid()
        self._outstanding: weakref.WeakSet[RowRequest] = weakref.WeakSet()
        self._unapplied: list[tuple[int, Tensor]] = []  # (version of the table, rows) of gradients
        self._refreshes = self._rows_read = self._rows_refreshed = 0
        self._open_lane()
        self.reset_parameters()

    def _open_lane(self) -> None:
        stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.lane = ThreadLane("embedding-rows", stream)

    def reset_parameters(self) -> None:
        """Initialises the table with the same random numbers as ``torch.nn.EmbeddingBag``."""
        nn.init.normal_(self.weight)
        if self.padding_idx is not None:
            with torch.no_grad():
                self.weight[self.padding_idx].zero_()
        self.refresh()

    def refresh(self) -> None:
        """Declares that ``weight`` was written to: rows of batches in flight are read again."""
        self._refreshes += 1

    def create_context(self) -> None:
        """Returns None: the request holds all state of one forward."""

    def input_dist(
        self, ctx: None, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None
    ) -> _Started:
        """Starts to copy the rows of ``input`` to the device, in the I/O thread."""
        if input.dim() not in (1, 2) or input.is_floating_point():
            raise ValueError(
                f"expected indices as a 1- or 2-dimensional integer tensor, got shape {tuple(input.shape)}, "
                f"{input.dtype}"
            )
        check_process(self._made_in, "this OffloadEmbeddingBag")
        version = self.weight._version
        # A gradient older than the table's last change has been applied, so the read below includes it.
        self._unapplied = [(seen, rows) for seen, rows in self._unapplied if seen >= version]
        before = fence(self.device)
        ticket = self.lane.submit(lambda: self._read(input, before))
        touched = [rows for _, rows in self._unapplied]
        request = RowRequest(offsets, per_sample_weights, ticket, version, self._refreshes, touched)
        self._outstanding.add(request)
        return _Started(request)

    def compute_and_output_dist(self, ctx: None, dist_input: RowRequest) -> Tensor:
        """Waits for the rows and looks up."""
        request = dist_input
        self._outstanding.discard(request)
        batch = request.ticket.wait()
        if self.lane.stream is not None:
            record_stream([batch.values, batch.positions], torch.cuda.current_stream(self.device))
        self._rows_read += len(batch.rows)
        self._refresh_stale(request, batch)
        take = partial(self._take_gradient, batch)
        table: Tensor = _Lookup.apply(self.weight, batch.values, take)  # type: ignore[no-untyped-call]
        return F.embedding_bag(
            batch.positions,
            table,
            request.offsets,
            mode=self.mode,
            per_sample_weights=request.per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=batch.padding,
        )

    def _read(self, input: Tensor, before: Ticket[None]) -> Rows:
        """In the I/O thread: gathers the distinct rows of a batch and copies them to the device."""
        # Without this wait, the indices are read before the copy that writes them has run.
        before.wait()
        record_stream(input, self.lane.stream)
        distinct, positions = torch.unique(input, return_inverse=True)
        rows = distinct.to("cpu", torch.int64)
        used = rows.numel()
        if used and (int(rows[0]) < 0 or int(rows[-1]) >= self.num_embeddings):
            raise IndexError(
                f"expected indices from 0 to {self.num_embeddings - 1}, got {int(rows[0])} to {int(rows[-1])}"
            )
        padding = None
        if self.padding_idx is not None:
            found = int(torch.searchsorted(rows, self.padding_idx))
            padding = found if found < len(rows) and int(rows[found]) == self.padding_idx else None
        if not used:
            rows = torch.zeros(1, dtype=torch.int64)  # a lookup needs a table with at least one row
        values = self._gather(rows).to(self.device, non_blocking=True)
        return Rows(rows, used, values, positions.to(self.device), padding)

    def _gather(self, rows: Tensor) -> Tensor:
        """Rows of the table, in page-locked host memory if the device is an accelerator."""
        table = self.weight.detach()
        staging = torch.empty(len(rows), table.shape[1], dtype=table.dtype, pin_memory=self.device.type == "cuda")
        torch.index_select(table, 0, rows, out=staging)
        return staging

    def _refresh_stale(self, request: RowRequest, batch: Rows) -> None:
        """Reads rows again that changed during or after the read."""
        if request.refreshes != self._refreshes:
            stale = torch.arange(len(batch.rows))
        elif self.weight._version != request.version and request.touched:
            stale = torch.isin(batch.rows, torch.cat(request.touched)).nonzero().squeeze(1)
        else:
            return
        if len(stale):
            fresh = self._gather(batch.rows[stale])
            self._rows_read += len(stale)
            self._rows_refreshed += len(stale)
            batch.values.index_copy_(0, stale.to(self.device), fresh.to(self.device, non_blocking=True))

    def _take_gradient(self, batch: Rows, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The rows of the stored table that get a gradient of the looked up values, sorted and distinct; and these."""
        rows, values = batch.rows[: batch.used], gradient[: batch.used].to("cpu")
        # An update may follow at any time.
        self._unapplied.append((self.weight._version, rows))
        for request in list(self._outstanding):
            request.touched.append(rows)
        return rows, values

    def forward(self, input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None) -> Tensor:
        """Looks up bags of rows; see ``torch.nn.EmbeddingBag``."""
        return self.compute_and_output_dist(
            None, self.input_dist(None, input, offsets, per_sample_weights).wait().wait()
        )

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer that changes rows without a gradient, whose copies in flight would be outdated.

        Raises:
            ValueError: if ``optimizer`` updates this table with momentum or weight decay.
        """
        for group in optimizer.param_groups:
            if any(parameter is self.weight for parameter in group["params"]):
                for option in ("momentum", "weight_decay"):
                    if group.get(option):
                        raise ValueError(
                            f"expected an optimizer that changes only rows that have a gradient, got "
                            f"{type(optimizer).__name__}({option}={group[option]}), which changes others too; put the "
                            f"table in a group without it (SGD, Adagrad, SparseAdam or RowWiseAdagrad)"
                        )

    def statistics(self) -> EmbeddingStatistics:
        """Rows and bytes copied to the device."""
        nbytes = self._rows_read * self.embedding_dim * self.weight.element_size()
        return EmbeddingStatistics(self._rows_read, self._rows_refreshed, nbytes)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.refresh()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OffloadEmbeddingBag:
        """``.to(device)`` changes the device of the lookups; the table keeps its storage and type."""
        probe = fn(torch.empty(0, dtype=self.weight.dtype, device=self.device))
        if probe.dtype is not self.weight.dtype:
            raise TypeError(
                f"expected to keep the table's type {self.weight.dtype}, got a conversion to {probe.dtype}; pass "
                f"dtype to the constructor"
            )
        if probe.device != self.device:
            self.device = probe.device
            self._open_lane()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> OffloadEmbeddingBag:
        """A copy with a table of its own, in storage of the same kind."""
        clone = OffloadEmbeddingBag.__new__(type(self))
        memo[id(self)] = clone
        with torch.random.fork_rng(devices=()):  # a copy draws no numbers
            OffloadEmbeddingBag.__init__(clone, **{**self._made_with, "device": self.device})
        with torch.no_grad():
            clone.weight.copy_(self.weight)
        clone.weight.requires_grad_(self.weight.requires_grad)
        return clone.train(self.training)

    def extra_repr(self) -> str:
        """Size, mode and home."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}, home={self._tier.name}"


class _Lookup(torch.autograd.Function):
    """Returns the rows; backward returns their gradient as a sparse gradient of the table."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor, take: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Tensor:
        ctx.shape, ctx.take = weight.shape, take
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (grad,) = grads
        rows, values = ctx.take(grad)
        # Sorted, distinct and inside the table, as checked when the rows were read.
        sparse = torch.sparse_coo_tensor(rows[None], values, ctx.shape, is_coalesced=True, check_invariants=False)
        return sparse, None, None
