"""The methods: one after the other, our train pipeline, torchrec's pipeline; all over the same workload."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.schedule import rounds_until_known
from benchmarks.harness.worker import Reporter
from benchmarks.train_overlap.workload import Settings, Workload

IN_TURN, PIPELINED = "in turn", "pipelined"  # how the parts of a step run
OURS, TORCHREC = "ours", "torchrec"  # whose pipeline

WARMUP = 4  # batches: as many as may have been fetched while the others ran, and one more


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


class _Together(list[torch.optim.Optimizer]):
    """Several optimizers as one."""

    def zero_grad(self) -> None:
        for optimizer in self:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self:
            optimizer.step()


def _torchrec(workload: Workload) -> Any:
    """Its base pipeline: the sparse one wants tables that torchrec itself has sharded."""
    from torchrec.distributed.train_pipeline import TrainPipelineBase
    from torchrec.streamable import Pipelineable

    Pipelineable.register(_Movable)
    workload.loader = map(_Movable, workload.loader)
    return TrainPipelineBase(workload.model, _Together(workload.optimizers), torch.device("cpu"))


def measure(
    report: Reporter, settings: dict[str, Any], home: str, load: float, rows: float, pipeline: str
) -> dict[str, Any]:
    """Rounds of the three parts alone, of all in turn, and of a pipeline: a slow minute of the machine hits all.

    ``load`` and ``rows`` are the latencies of each, as shares of the time that compute takes alone. There are more
    rounds while the median of the ratios is in doubt.
    """
    torch.set_num_threads(1)  # one core computes; the others read and wait
    chosen = Settings(**settings)
    batches = chosen.batches
    reference = Workload(chosen, home)
    reference.alone(WARMUP)
    compute = reference.alone(batches)["compute"]
    methods = {}
    for name in (IN_TURN, PIPELINED):
        workload = Workload(chosen, home)
        peer = name == PIPELINED and pipeline == TORCHREC
        methods[name] = (workload, _torchrec(workload) if peer else _ours(workload, in_turn=name == IN_TURN))
    for workload in (reference, *(workload for workload, _ in methods.values())):
        workload.load_latency, workload.rows_latency = load * compute, rows * compute
    losses: dict[str, list[float]] = {name: [] for name in methods}
    report.total(chosen.rounds)
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
        "latencies": [workload.load_latency, workload.rows_latency],
        "bytes_of_rows": read.bytes_loaded / len(losses[PIPELINED]),
        "rows_refreshed": read.rows_refreshed,
        "rows_read": read.rows_read,
        "undistributed": dict(runner.statistics().undistributed) if pipeline == OURS else {},
    }
