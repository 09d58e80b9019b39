"""The rungs: a model with an embedding table on disk, trained from a slow loader, in turn and overlapped.

Three things take time: the loader, the rows of the table, and compute. The first two are made slow by a latency that
is added to the real work, as a share of the measured compute time, so that each rung has the balance that its name
says on any machine. (The table's file is in the page cache after a while; without the latency rows would be fast.)
Rows that must be read again because they were just updated carry no latency: they are in the page cache for certain.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from benchmarks.frame.child import Report
from benchmarks.frame.pairs import rounds_until_known

__all__ = ["IN_TURN", "OURS", "PIPELINED", "TORCHREC", "Shape", "measure"]

IN_TURN, PIPELINED = "in turn", "pipelined"  # the ways that are timed
OURS, TORCHREC = "ours", "torchrec"  # whose pipeline

WARMUP = 4  # batches: as many as may have been fetched while the other ways ran, and one more


@dataclass(frozen=True)
class Shape:
    """A table, a dense part, and a batch."""

    table_rows: int
    table_dim: int
    bags: int
    indices: int  # of one bag
    width: int
    seed: int = 0

    @property
    def training_flops(self) -> float:
        """Of the matrix products of a forward and a backward of the dense part."""
        return 3 * 2.0 * self.bags * self.width * (self.table_dim + self.width + 1)


class _Model(nn.Module):
    def __init__(self, shape: Shape, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag
        torch.manual_seed(shape.seed + 1)
        self.dense = nn.Sequential(
            nn.Linear(shape.table_dim, shape.width),
            nn.GELU(),
            nn.Linear(shape.width, shape.width),
            nn.GELU(),
            nn.Linear(shape.width, 1),
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.head(self.bag(batch["indices"]), batch)

    def head(self, pooled: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses = (self.dense(pooled) - batch["labels"]).square().mean()
        return losses, losses.detach()


class _Workload:
    """One model and what feeds it; the latencies are set once compute has been timed."""

    def __init__(self, shape: Shape, home: str) -> None:
        from offload import OffloadEmbeddingBag, RowWiseAdagrad

        workload = self

        class SlowRows(OffloadEmbeddingBag):
            def _read(self, *arguments: Any) -> Any:
                time.sleep(workload.rows_latency)
                return super()._read(*arguments)

        self.load_latency = self.rows_latency = 0.0
        self._shape = shape
        torch.manual_seed(shape.seed)
        self.bag = SlowRows(shape.table_rows, shape.table_dim, "sum", offload_device=home)
        self.model = _Model(shape, self.bag)
        dense = torch.optim.SGD(self.model.dense.parameters(), 0.01)
        self.optimizers = (RowWiseAdagrad(self.bag.parameters(), 0.01), dense)
        self.loader = self._batches()

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        shape = self._shape
        generator = torch.Generator().manual_seed(shape.seed + 2)
        while True:
            time.sleep(self.load_latency)
            indices = torch.randint(shape.table_rows, (shape.bags, shape.indices), generator=generator)
            yield {"indices": indices, "labels": torch.randn(shape.bags, 1, generator=generator)}

    def compute(self, request: Any, batch: dict[str, Tensor]) -> None:
        """All of a step but the loader and the rows."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses, _ = self.model.head(self.bag.compute_and_output_dist(None, request), batch)
        losses.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def alone(self, batches: int) -> dict[str, float]:
        """Seconds for each of the three, with nothing beside it; medians over some batches."""
        seconds: dict[str, list[float]] = {"load": [], "rows": [], "compute": []}
        for _ in range(batches):
            marks = [time.perf_counter()]
            batch = next(self.loader)
            marks.append(time.perf_counter())
            request = self.bag.input_dist(None, batch["indices"]).wait().wait()
            marks.append(time.perf_counter())
            self.compute(request, batch)
            marks.append(time.perf_counter())
            for k, name in enumerate(seconds):
                seconds[name].append(marks[k + 1] - marks[k])
        return {name: sum(values) / len(values) for name, values in seconds.items()}


class _Pipeline(Protocol):
    def progress(self, batches: Iterator[Any]) -> Any:
        """Trains on the next batch; returns its loss."""
        ...


def _ours(workload: _Workload, *, in_turn: bool) -> _Pipeline:
    from pipe.train import Lanes, TrainPipelineSparseDist

    ahead = {"load": 0, "copy": 0, "distribute": 0} if in_turn else None
    lanes = Lanes.serial() if in_turn else None
    return TrainPipelineSparseDist(workload.model, workload.optimizers, "cpu", ahead=ahead, lanes=lanes)


class _Movable(dict[str, Tensor]):
    """A batch as torchrec wants it."""

    def to(self, device: torch.device, non_blocking: bool = False) -> _Movable:
        return _Movable({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()})

    def record_stream(self, stream: Any) -> None:
        """There is no stream on the CPU."""

    def pin_memory(self) -> _Movable:
        return self


class _Together:
    """Several optimizers as one."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self._optimizers:
            optimizer.step()


def _torchrec(workload: _Workload) -> _Pipeline:
    """Its base pipeline: the sparse one wants tables that torchrec itself has sharded."""
    from torchrec.distributed.train_pipeline import TrainPipelineBase
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_Movable)
    workload.loader = map(_Movable, workload.loader)
    return TrainPipelineBase(workload.model, _Together(workload.optimizers), torch.device("cpu"))


def measure(
    report: Report,
    shape: dict[str, Any],
    home: str,
    load: float,
    rows: float,
    rounds: int,
    batches: int,
    pipeline: str = OURS,
) -> dict[str, Any]:
    """Rounds of the three alone, of all in turn, and of a pipeline, so that a slow minute of the machine hits all.

    Args:
        report: where steps go.
        shape: of the model and the batch.
        home: a directory on disk.
        load, rows: latency added to each, as a share of the time that compute takes alone.
        rounds: how often all of it is repeated at the least; more often while the median of the ratios is in doubt.
        batches: timed batches of each way in a round.
        pipeline: whose: :data:`OURS` or :data:`TORCHREC`.
    """
    torch.set_num_threads(1)  # one core computes; reading and waiting have the rest
    chosen = Shape(**shape)
    reference = _Workload(chosen, home)
    reference.alone(WARMUP)
    compute = reference.alone(batches)["compute"]
    ways = {}
    for name in (IN_TURN, PIPELINED):
        workload = _Workload(chosen, home)
        peer = name == PIPELINED and pipeline == TORCHREC
        ways[name] = (workload, _torchrec(workload) if peer else _ours(workload, in_turn=name == IN_TURN))
    for workload in (reference, *(workload for workload, _ in ways.values())):
        workload.load_latency, workload.rows_latency = load * compute, rows * compute
    losses: dict[str, list[float]] = {name: [] for name in ways}
    report.total(rounds)
    ratios: list[float] = []
    for k in rounds_until_known(lambda: ratios, rounds):
        alone = reference.alone(batches)
        seconds = {}
        for name in sorted(ways, reverse=k % 2 == 1):
            workload, runner = ways[name]
            for _ in range(WARMUP):
                losses[name].append(float(runner.progress(workload.loader)))
            started = time.perf_counter()
            for _ in range(batches):
                losses[name].append(float(runner.progress(workload.loader)))
            seconds[name] = (time.perf_counter() - started) / batches
        slowest = max(alone.values())
        ratios.append(seconds[PIPELINED] / slowest)
        report.step(**alone, **seconds, slowest=slowest, ratio=ratios[-1])
    if losses[IN_TURN] != losses[PIPELINED]:
        raise AssertionError("the pipeline does not compute the same losses as the run in turn")
    workload, runner = ways[PIPELINED]
    read = workload.bag.statistics()
    return {
        "losses": len(losses[PIPELINED]),
        "latencies": [workload.load_latency, workload.rows_latency],
        "bytes_of_rows": read.bytes_loaded / len(losses[PIPELINED]),
        "rows_refreshed": read.rows_refreshed,
        "rows_read": read.rows_read,
        "undistributed": dict(runner.statistics().undistributed) if pipeline == OURS else {},
    }
