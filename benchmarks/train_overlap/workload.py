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

from benchmarks.harness.settings import option


@dataclass(frozen=True)
class Settings:
    """A table, a dense part, a batch, and the number of rounds."""

    table_rows: int = option(200_000, "rows of the table")
    table_dim: int = option(64, "columns of the table")
    bags: int = option(512, "rows of the batch")
    indices: int = option(4, "rows of the table for each of them")
    width: int = option(768, "channels of the dense part")
    rounds: int = option(9, "repetitions of each case")
    batches: int = option(12, "timed batches of each method in a round")

    @property
    def training_flops(self) -> float:
        """Of the matrix products of a forward and a backward of the dense part."""
        return 3 * 2.0 * self.bags * self.width * (self.table_dim + self.width + 1)


class _Model(nn.Module):
    def __init__(self, settings: Settings, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag
        torch.manual_seed(1)
        self.dense = nn.Sequential(
            nn.Linear(settings.table_dim, settings.width),
            nn.GELU(),
            nn.Linear(settings.width, settings.width),
            nn.GELU(),
            nn.Linear(settings.width, 1),
        )

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.head(self.bag(batch["indices"]), batch)

    def head(self, pooled: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses = (self.dense(pooled) - batch["labels"]).square().mean()
        return losses, losses.detach()


class Workload:
    """One model and what feeds it; the latencies are set once compute has been timed."""

    def __init__(self, settings: Settings, home: str) -> None:
        from offload import OffloadEmbeddingBag, RowWiseAdagrad

        workload = self

        class SlowRows(OffloadEmbeddingBag):
            def _read(self, *arguments: Any) -> Any:
                time.sleep(workload.rows_latency)
                return super()._read(*arguments)

        self.load_latency = self.rows_latency = 0.0
        self._settings = settings
        torch.manual_seed(0)
        self.bag = SlowRows(settings.table_rows, settings.table_dim, "sum", offload_device=home)
        self.model = _Model(settings, self.bag)
        dense = torch.optim.SGD(self.model.dense.parameters(), 0.01)
        self.optimizers = (RowWiseAdagrad(self.bag.parameters(), 0.01), dense)
        self.loader = self._batches()

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        settings = self._settings
        generator = torch.Generator().manual_seed(2)
        while True:
            time.sleep(self.load_latency)
            indices = torch.randint(settings.table_rows, (settings.bags, settings.indices), generator=generator)
            yield {"indices": indices, "labels": torch.randn(settings.bags, 1, generator=generator)}

    def compute(self, request: Any, batch: dict[str, Tensor]) -> None:
        """All of a step but the loader and the rows."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses, _ = self.model.head(self.bag.compute_and_output_dist(None, request), batch)
        losses.backward()
        for optimizer in self.optimizers:
            optimizer.step()

    def alone(self, batches: int) -> dict[str, float]:
        """Seconds for each of the three, with nothing beside it; means over some batches."""
        seconds = {"load": 0.0, "rows": 0.0, "compute": 0.0}
        for _ in range(batches):
            marks = [time.perf_counter()]
            batch = next(self.loader)
            marks.append(time.perf_counter())
            request = self.bag.input_dist(None, batch["indices"]).wait().wait()
            marks.append(time.perf_counter())
            self.compute(request, batch)
            marks.append(time.perf_counter())
            for name, begin, end in zip(seconds, marks, marks[1:], strict=False):
                seconds[name] += (end - begin) / batches
        return seconds
