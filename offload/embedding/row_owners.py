"""Exchanges rows of an embedding table, and their gradients, with the ranks of a mesh that own them.

::

    rank that looks up     numbers of its distinct rows  --+            +-->  rows  -->  lookup, pooling
    rank that owns them                                    +-->  rows --+
    backward               gradients of these rows  -------------------------> summed at the owner, in rank order

Rank r of N owns rows ``r * ceil(rows / N)`` and following, as ``torch.distributed.tensor.Shard(0)`` cuts a tensor, so
sorted row numbers are sorted by owner, and the rows that arrive are in the order in which they were asked for.

Numbers are exchanged by the thread that reads rows, all else by the thread that computes, each in a process group of
its own. All ranks make the same calls in the same order, so the collectives of both groups are the same sequences
everywhere.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.dlpack import from_dlpack
from torch.utils.weak import WeakTensorKeyDictionary

from offload.mesh.parts import Part
from offload.mesh.ranks import naming
from pipe.torch_private.distributed import timeout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["AskedRows", "RowOwners", "check_alone", "follow_optimizers"]

#: Elements of a table that are drawn at once, a multiple of 16.
DRAWN_TOGETHER = 1 << 20

#: For each table of a mesh, what is called with the optimizers that update it.
_checks: Any = WeakTensorKeyDictionary()
_hooks: list[Any] = []


def check_alone() -> None:
    """Raises ValueError if this is one of several processes."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        ranks = dist.get_world_size()
        raise ValueError(
            f"this is one of {ranks} processes, each of which would train an OffloadEmbeddingBag of its own; pass "
            f"mesh=init_device_mesh('cpu', ({ranks},)), over whose ranks its rows are dealt (for a table of this "
            f"process alone: a mesh of one rank)"
        )


def follow_optimizers(table: Tensor, check: Callable[[torch.optim.Optimizer], None]) -> None:
    """Calls ``check`` with each optimizer that updates ``table``: before its steps, and when ours is made."""
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(lambda optimizer, args, kwargs: check_tables(optimizer)))
    # Weakly: a table lives as long as its module.
    _checks[table] = weakref.WeakMethod(check)


def check_tables(optimizer: torch.optim.Optimizer) -> None:
    """Calls the checks that :func:`follow_optimizers` registered for tables among the optimizer's parameters."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        found = _checks.get(parameter)
        check = None if found is None else found()
        if check is not None:
            check(optimizer)


@dataclass(frozen=True)
class AskedRows:
    """The rows that ranks ask each other for in one forward."""

    #: Of this rank: how many it asked each rank for.
    asked: list[int]
    #: Of the others: how many each one asked this rank for; the distinct ones, sorted; positions in these of all.
    wanted: list[int]
    rows: Tensor  # (k,) int64, of the local table
    positions: Tensor  # (sum(wanted),) int64


class RowOwners:
    """The ranks of a ``mesh`` of one dimension that own a table ``(rows, columns)``. Made on all at the same time.

    ``divide_factor``: by which sums of gradients are divided; None: the number of ranks.

    Raises RuntimeError on all ranks if their tables differ (``words`` say how they are used).
    """

    def __init__(
        self,
        mesh: DeviceMesh,
        rows: int,
        columns: int,
        dtype: torch.dtype,
        divide_factor: float | None,
        words: Mapping[str, object],
    ) -> None:
        self.mesh = mesh
        self.count, self.rank = mesh.size(), mesh.get_local_rank()
        self.part = Part("weight", (rows, columns), (columns, 1), dtype, self.count)
        self.begin, self.end = self.part.span(self.rank)
        self.divide_factor = float(self.count if divide_factor is None else divide_factor)
        self.bytes_received = 0
        whole = mesh.get_group()
        members = dist.get_process_group_ranks(whole)
        self._numbers, self._rows = (
            dist.new_group(members, backend="gloo", timeout=timeout_of(whole), use_local_synchronization=True)
            for _ in range(2)
        )
        mine = f"rows={rows}, columns={columns}, {dtype}" + "".join(f", {key}={value}" for key, value in words.items())
        tables: list[Any] = [None] * self.count
        with naming("comparing embedding tables"):
            dist.all_gather_object(tables, mine, group=self._rows)
        for rank, other in enumerate(tables):
            if other != tables[0]:
                raise RuntimeError(
                    f"ranks of one mesh make different tables: rank 0 has {tables[0]}, and rank {rank} has {other}"
                )

    @torch.no_grad()
    def draw_normal(self, local: Tensor) -> None:
        """Gives this rank's rows the numbers that one process would draw: draws all, a piece at a time."""
        mine, columns = local.view(-1), self.part.shape[1]
        first, total = self.begin * columns, self.part.shape[0] * columns
        begin = 0
        while begin < total:
            # torch draws 16 numbers together, and those at the end again: the last piece must not be shorter.
            end = total if total - begin < 2 * DRAWN_TOGETHER else begin + DRAWN_TOGETHER
            drawn = torch.empty(end - begin, dtype=mine.dtype).normal_()
            there = slice(max(begin, first), min(end, first + len(mine)))
            if there.start < there.stop:
                mine[there.start - first : there.stop - first] = drawn[there.start - begin : there.stop - begin]
            begin = end

    # --- rows -----------------------------------------------------------------------------------------------------

    def ask(self, rows: Tensor, error: IndexError | None) -> AskedRows:
        """Tells the owners of ``rows`` (sorted, distinct, int64) that this rank needs them. On the reading thread.

        ``error``: that this rank cannot ask. It raises it then, and the others RuntimeError; all may go on.
        """
        bounds = torch.tensor([self.part.span(rank)[1] for rank in range(self.count)])
        ends = torch.searchsorted(rows, bounds)
        asked = torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)) if error is None else -torch.ones_like(ends)
        wanted = torch.empty_like(asked)
        with naming("exchanging row numbers of an OffloadEmbeddingBag"):
            dist.all_to_all_single(wanted, asked, group=self._numbers)
        if error is not None:
            raise error
        wrong = (wanted < 0).nonzero().flatten().tolist()
        if wrong:
            raise RuntimeError(f"rank {wrong[0]} of the mesh asked for a row outside of the table, see its error")
        to_each, from_each = asked.tolist(), wanted.tolist()
        numbers = torch.empty(sum(from_each), dtype=torch.int64)
        with naming("exchanging row numbers of an OffloadEmbeddingBag"):
            dist.all_to_all_single(numbers, rows, from_each, to_each, group=self._numbers)
        self.bytes_received += 8 * (self.count - 1 + len(numbers) - from_each[self.rank])
        local, positions = torch.unique(numbers - self.begin, return_inverse=True)
        return AskedRows(to_each, from_each, local, positions)

    def fetch(self, asked: AskedRows, values: Tensor) -> Tensor:
        """Receives the rows that this rank asked for, at least one, and sends ``values``, of :attr:`AskedRows.rows`."""
        sent = values[asked.positions]
        received = self._exchange("exchanging rows", sent, asked.wanted, asked.asked)
        return received if len(received) else received.new_zeros(1, self.part.shape[1])

    def sum_gradients(self, asked: AskedRows, gradient: Tensor) -> Tensor:
        """Sends ``gradient``, of the rows that this rank asked for; returns the means for :attr:`AskedRows.rows`.

        Added in rank order, in float32 at least: the same bits in each run.
        """
        received = self._exchange("exchanging gradients of rows", gradient, asked.asked, asked.wanted)
        wide = torch.promote_types(received.dtype, torch.float32)
        sums = torch.zeros(len(asked.rows), received.shape[1], dtype=wide)
        # A rank asks for distinct rows, so no sum depends on the order within its part.
        for places, rows in zip(asked.positions.split(asked.wanted), received.split(asked.wanted), strict=True):
            sums.index_add_(0, places, rows.to(wide))
        return sums.div_(self.divide_factor).to(received.dtype)

    def _exchange(self, what: str, sent: Tensor, to_each: list[int], from_each: list[int]) -> Tensor:
        """Sends rows of equal length to each rank; on the thread that computes."""
        sent = sent.detach().contiguous()
        received = torch.empty(sum(from_each), sent.shape[1], dtype=sent.dtype)
        row = sent.shape[1] * sent.element_size()
        with naming(f"{what} of an OffloadEmbeddingBag"):
            into, of = received.view(torch.uint8), sent.view(torch.uint8)
            dist.all_to_all_single(into, of, from_each, to_each, group=self._rows)
        self.bytes_received += row * (len(received) - from_each[self.rank])
        return received

    # --- what checkpoints see -------------------------------------------------------------------------------------

    def show(self, local: Tensor) -> Tensor:
        """A DTensor for a tensor with a row for each of this rank's rows; it shares the memory."""
        from torch.distributed.tensor import DTensor, Shard

        shape = torch.Size((self.part.shape[0], *local.shape[1:]))
        stride = torch.empty(shape, device="meta").stride()
        # A storage of its own, since async_save of torch copies storages.
        alone = from_dlpack(local.detach())
        shown: Tensor = DTensor.from_local(alone, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=stride)
        return shown

    def local(self, value: Any) -> Any:
        """This rank's rows of a DTensor, or of a tensor of all rows; any other value itself."""
        if hasattr(value, "to_local"):
            return value.to_local()
        if isinstance(value, Tensor) and value.dim() and len(value) == self.part.shape[0]:
            return value[self.begin : self.end]
        return value

    def show_states(self, optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
        """From now on ``optimizer.state_dict()`` has DTensors for the states of ``parameter``, and loads them.

        Without this, a checkpoint of all ranks would hold the states of one of them as those of all.
        """

        def shown(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            def wrap(value: Any) -> Any:
                is_rows = isinstance(value, Tensor) and value.dim() and len(value) == len(parameter)
                return self.show(value) if is_rows and not hasattr(value, "to_local") else value

            return _changed(optimizer, parameter, state_dict, wrap)

        def stored(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
            return _changed(optimizer, parameter, state_dict, self.local)

        optimizer.register_state_dict_post_hook(shown)
        optimizer.register_load_state_dict_pre_hook(stored)


def _changed(optimizer: Any, parameter: Tensor, state_dict: dict[str, Any], change: Any) -> dict[str, Any]:
    """A copy of ``state_dict`` in which ``change`` was applied to the states of one parameter."""
    ours = [p for group in optimizer.param_groups for p in group["params"]]
    theirs = [key for group in state_dict["param_groups"] for key in group["params"]]
    states = dict(state_dict["state"])
    for p, key in zip(ours, theirs, strict=False):  # load_state_dict() tells of groups that differ
        if p is parameter and key in states:
            states[key] = {name: change(value) for name, value in states[key].items()}
    return {**state_dict, "state": states}
