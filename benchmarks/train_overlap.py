"""``train-overlap``: how near to its slowest part training comes when a slow loader, slow rows and compute overlap.

Each case has another balance of the three, and takes steps with nothing overlapped, with everything overlapped, and of
each part alone. An ideal pipeline takes as long as its slowest part alone; in turn, parts take their sum. torchrec's
pipeline runs over the same model, table and loader, where it is installed.

Latencies are added to the real work of loader and rows as a share of the measured compute time, so that each case has
the balance that its name says on any machine: without them, rows in the page cache would be fast. Rows that must be
read again because they were just updated carry no latency, because they are in the page cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case
from benchmarks.harness.schedule import rounds_until_known
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, spread
from benchmarks.harness.worker import Reporter

MAXIMUM_RATIO = 1.10  # of the overlapped step to the slowest part alone
EVEN = "all are even"
BALANCES = {  # latency of the loader and of the rows, as shares of the compute time
    "compute is slowest": (0.5, 0.5),
    "the loader is slowest": (1.5, 0.6),
    "rows are slowest": (0.6, 1.5),
    EVEN: (1.0, 1.0),
}
IN_TURN, PIPELINED = "in turn", "pipelined"  # how the parts of a step run
OURS, TORCHREC = "ours", "torchrec"  # whose pipeline
WARMUP = 4  # batches: as many as may have been fetched while the others ran, and one more
PARTS = ("load", "rows", "compute")


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


def measure(run: Run) -> None:
    """A case for each balance, and torchrec's pipeline with an even one."""

    def case(balance: str, pipeline: str) -> Case:
        load, rows = BALANCES[balance]
        name, peer = (balance, "") if pipeline == OURS else (f"{balance}: {pipeline}", pipeline)
        how = {"settings": asdict(run.settings), "load": load, "rows": rows, "pipeline": pipeline}
        return Case(name, "benchmarks.train_overlap:balance", how, peer=peer)

    run.group("balances", [*(case(balance, OURS) for balance in BALANCES), case(EVEN, TORCHREC)])


def report(run: Run) -> list[str]:
    """One table."""

    def milliseconds(name: str) -> Any:
        return lambda outcome: f"{1e3 * outcome.median(name):.1f} ms"

    columns = {
        **{f"{part} alone": milliseconds(part) for part in PARTS},
        IN_TURN: milliseconds(IN_TURN),
        PIPELINED: milliseconds(PIPELINED),
        "pipelined / slowest": lambda o: spread(o.ratios()),
        "read again": lambda o: f"{o.result['rows_refreshed'] / o.result['rows_read']:.1%}",
    }
    return [case_table(run.outcomes, columns)]


def bounds(run: Run) -> list[str]:
    """Rows run ahead, and an overlapped step is hardly longer than its slowest part; peers have no bounds."""
    broken = []
    for outcome in run.outcomes:
        if outcome.case.peer:
            continue
        if outcome.result["undistributed"]:
            broken.append(f"{outcome.name}: rows did not run ahead: {outcome.result['undistributed']}")
        what = f"{outcome.name}: pipelined / slowest"
        broken += at_most(what, outcome.ratio(), MAXIMUM_RATIO, "{:.3f}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """The overlapped step beside its slowest part, a ratio for each balance."""
    ratios = [outcome.ratio() for outcome in run.outcomes if not outcome.case.peer]
    return [
        Claim(
            "train pipeline with a slow loader and slow embedding rows, four balances", "its slowest part alone", ratios
        )
    ]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)

# --- cases -----------------------------------------------------------------------------------------------------------


class _Model(nn.Module):
    def __init__(self, settings: Settings, bag: nn.Module) -> None:
        super().__init__()
        self.bag = bag
        torch.manual_seed(1)
        first, last = nn.Linear(settings.table_dim, settings.width), nn.Linear(settings.width, 1)
        middle = nn.Linear(settings.width, settings.width)
        self.dense = nn.Sequential(first, nn.GELU(), middle, nn.GELU(), last)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        return self.head(self.bag(batch["indices"]), batch)

    def head(self, pooled: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses = (self.dense(pooled) - batch["labels"]).square().mean()
        return losses, losses.detach()


class _Together(list[torch.optim.Optimizer]):
    """Several optimizers as one, for a pipeline that takes one."""

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()


class Workload:
    """One model and what feeds it; the latencies are set once compute has been timed."""

    def __init__(self, settings: Settings) -> None:
        from offload import OffloadEmbeddingBag, RowWiseAdagrad

        workload = self

        class SlowRows(OffloadEmbeddingBag):
            def _read(self, *arguments: Any) -> Any:
                time.sleep(workload.rows_latency)
                return super()._read(*arguments)

        self.load_latency = self.rows_latency = 0.0
        self._settings = settings
        torch.manual_seed(0)
        self.bag = SlowRows(settings.table_rows, settings.table_dim, "sum", offload_device="./rows")
        self.model = _Model(settings, self.bag)
        dense = torch.optim.SGD(self.model.dense.parameters(), 0.01)
        self.optimizers = _Together([RowWiseAdagrad(self.bag.parameters(), 0.01), dense])
        self.loader = self._batches()

    def _batches(self) -> Iterator[dict[str, Tensor]]:
        settings = self._settings
        generator = torch.Generator().manual_seed(2)
        while True:
            time.sleep(self.load_latency)
            indices = torch.randint(settings.table_rows, (settings.bags, settings.indices), generator=generator)
            yield {"indices": indices, "labels": torch.randn(settings.bags, 1, generator=generator)}

    def alone(self, batches: int) -> dict[str, float]:
        """Seconds for each of the three, with nothing beside it; means over some batches."""
        seconds = dict.fromkeys(PARTS, 0.0)
        for _ in range(batches):
            marks = [time.perf_counter()]
            batch = next(self.loader)
            marks.append(time.perf_counter())
            request = self.bag.input_dist(None, batch["indices"]).wait().wait()
            marks.append(time.perf_counter())
            self.optimizers.zero_grad()
            losses, _ = self.model.head(self.bag.compute_and_output_dist(None, request), batch)
            losses.backward()
            self.optimizers.step()
            marks.append(time.perf_counter())
            for name, begin, end in zip(seconds, marks, marks[1:], strict=False):
                seconds[name] += (end - begin) / batches
        return seconds


def _ours(workload: Workload, *, in_turn: bool) -> Any:
    from pipe.train import Lanes, TrainPipelineSparseDist

    ahead = {"load": 0, "copy": 0, "distribute": 0} if in_turn else None
    lanes = Lanes.serial() if in_turn else None
    return TrainPipelineSparseDist(workload.model, workload.optimizers, "cpu", ahead=ahead, lanes=lanes)


class _Movable(dict[str, Tensor]):
    """A batch as torchrec needs it."""

    def to(self, device: torch.device, non_blocking: bool = False) -> _Movable:
        return _Movable({name: tensor.to(device, non_blocking=non_blocking) for name, tensor in self.items()})

    def record_stream(self, stream: Any) -> None:
        """There is no stream on the CPU."""

    def pin_memory(self) -> _Movable:
        return self


def _torchrec(workload: Workload) -> Any:
    """torchrec's base pipeline: its sparse one needs tables that torchrec itself has sharded."""
    from torchrec.distributed.train_pipeline import TrainPipelineBase
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_Movable)
    workload.loader = map(_Movable, workload.loader)
    return TrainPipelineBase(workload.model, workload.optimizers, torch.device("cpu"))


def balance(report: Reporter, settings: dict[str, Any], load: float, rows: float, pipeline: str) -> dict[str, Any]:
    """Rounds of the three parts alone, of all in turn, and of a pipeline: a slow minute of the machine hits all.

    ``load`` and ``rows`` are the latencies of each, as shares of the time that compute takes alone. There are more
    rounds while the median of the ratios is in doubt.
    """
    torch.set_num_threads(1)  # one core computes; the others read and wait
    chosen = Settings(**settings)
    batches = chosen.batches
    reference = Workload(chosen)
    reference.alone(WARMUP)
    compute = reference.alone(batches)["compute"]
    methods = {}
    for name in (IN_TURN, PIPELINED):
        workload = Workload(chosen)
        peer = name == PIPELINED and pipeline == TORCHREC
        methods[name] = (workload, _torchrec(workload) if peer else _ours(workload, in_turn=name == IN_TURN))
    for workload in (reference, *(workload for workload, _ in methods.values())):
        workload.load_latency, workload.rows_latency = load * compute, rows * compute
    losses: dict[str, list[float]] = {name: [] for name in methods}
    ratios: list[float] = []
    for k in rounds_until_known(lambda: ratios, chosen.rounds):
        alone = reference.alone(batches)
        seconds = {}
        for name in sorted(methods, reverse=k % 2 == 1):
            workload, runner = methods[name]
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
    workload, runner = methods[PIPELINED]
    read = workload.bag.statistics()
    return {
        "losses": len(losses[PIPELINED]),
        "rows_refreshed": read.rows_refreshed,
        "rows_read": read.rows_read,
        "undistributed": dict(runner.statistics().undistributed) if pipeline == OURS else {},
    }
