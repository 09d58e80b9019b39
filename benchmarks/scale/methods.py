"""The cases of ``scale``: traced steps of one or several ranks, and the rate of their collectives."""

import importlib
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import offload.mesh.ranks
from benchmarks.harness.case import FLOOR
from benchmarks.harness.io_counters import measure
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.worker import Reporter
from benchmarks.mesh.methods import Training, ours
from offload.mesh.gradients import means_of_parts
from offload.mesh.parts import Part, offsets_of
from offload.mesh.pieces import gather_parts
from offload.telemetry.statistics import Meter

WARM_STEPS = 2  # the first makes files, and a process is often slow in its second


def train(report: Reporter, training: dict[str, Any], rows: int, together: bool, on_disk: bool) -> dict[str, Any]:
    """A step in each turn on ``rows`` rows of this rank, with the seconds of each token of its plan."""
    torch.set_num_threads(1)  # the cores are shared by ranks, not by threads
    importlib.import_module("torch._dynamo")
    report.phase(FLOOR)
    ranks = Ranks() if together else None
    chosen = Training(**training)
    home = Path(f"home-{ranks.count if ranks else 1}").absolute()
    home.mkdir(parents=True, exist_ok=True)
    made = ours(chosen, home, ranks, on_disk=on_disk)
    model: Any = made.model
    taken: dict[str, list[float]] = defaultdict(list)
    first = (ranks.rank if ranks else 0) * rows

    def take(index: int) -> dict[str, float]:
        batch, target = (whole[first : first + rows].clone() for whole in (chosen.batch(index), chosen.target(index)))
        loss, values = measure(lambda: made.step(batch, target), model)
        return {"loss": loss if ranks is None else ranks.mean(loss), **values}

    for k in range(WARM_STEPS):
        take(k)
    report.phase("steps")
    for k in report.turns():
        if ranks is not None:
            dist.barrier()
        with model.trace(f"trace-{home.name}-{ranks.rank if ranks else 0}.json") as events:
            values = take(WARM_STEPS + k)
        # An update that reads the weights of the next load has a span of its own with the token of that load.
        totals: Counter[str] = Counter()
        for event in events:
            totals[event.token] += event.end - event.begin
        for token, seconds in totals.items():
            taken[token].append(seconds)
        report.step(**values)
    report.phase("end")
    plan = model.plan()
    return {
        "seconds": {token: statistics.median(seconds) for token, seconds in taken.items()},
        "plan": str(plan),
        "slots": plan.slots,
        "pending": sorted(plan.pending),
    }


def exchange(report: Reporter, training: dict[str, Any], repeats: int) -> dict[str, Any]:
    """What ranks do for a shard while each of them computes: a gather, and a reduction.

    Both are the engine's own, with the copies of the pieces that are sent. Returns the median seconds of each, and what
    a block loses to a second of them.
    """
    torch.set_num_threads(1)
    ranks = Ranks()
    chosen = Training(**training)
    parameters = [parameter.detach().clone() for parameter in chosen.block(0).parameters()]
    parts = [Part.of("", parameter, ranks.count) for parameter in parameters]
    offsets, nbytes = offsets_of(parts)
    stored = torch.ones(nbytes, dtype=torch.uint8)
    wholes = [part.flat(torch.empty_like(each)) for part, each in zip(parts, parameters, strict=True)]
    engine = offload.mesh.ranks.Ranks(ranks.mesh, None, Meter(torch.device("cpu")))

    def read(memory: torch.Tensor, begin: int) -> None:
        memory.copy_(stored[begin : begin + memory.numel()])

    ways = {
        "gather": lambda: gather_parts(parts, offsets, nbytes, wholes, read, engine),
        "reduce": lambda: means_of_parts(parts, [each.clone() for each in parameters], engine),
    }
    found: dict[str, float] = {}
    with _Computing(chosen):
        for exchanged in ways.values():
            exchanged()
        dist.barrier()
        for name, exchanged in ways.items():
            seconds = []

            def several(exchanged: Callable[[], Any] = exchanged, seconds: list[float] = seconds) -> None:
                for _ in range(repeats):
                    started = time.perf_counter()
                    exchanged()
                    seconds.append(time.perf_counter() - started)

            dist.barrier()
            several()
            found[name] = statistics.median(seconds)
        dist.barrier()
    return {"seconds": found}


class _Computing:
    """Computes forwards and backwards of a block on one row, in a thread."""

    def __init__(self, training: Training) -> None:
        self._block, self._row = training.block(0), training.batch(0)[:1]
        self._count, self._ended = 0, False
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "_Computing":
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended = True
        self._thread.join()

    def _run(self) -> None:
        while not self._ended:
            self._block(self._row).sum().backward()
            self._count += 1
