"""The model, its embedding table on disk, and a loader; the latter two are slowed down by a latency.

Latencies are added to the real work as a share of the measured compute time, so that each case has the balance that its
name says on any machine: without them, rows in the page cache would be fast. Rows that must be read again because they
were just updated carry no latency, because they are in the page cache.
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


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


class Workload:
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
