"""The cases of ``scale``: traced steps of one or several ranks, and the rate of their collectives."""

import importlib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness.case import FLOOR
from benchmarks.harness.io_counters import measure
from benchmarks.harness.ranks import Ranks
from benchmarks.harness.worker import Reporter
from benchmarks.mesh.methods import Training, ours

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


def exchange(report: Reporter, sizes: Sequence[int], repeats: int) -> dict[str, Any]:
    """Seconds of a gather and of an exchange in which each rank sends so many bytes to each other one."""
    torch.set_num_threads(1)
    ranks = Ranks()
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    found: dict[str, dict[int, float]] = {"gather": {}, "reduce": {}}
    for size in sizes:
        area, other = (torch.ones(ranks.count, size, dtype=torch.uint8) for _ in range(2))
        ways = {
            "gather": lambda area=area: gather(area.view(-1), area[ranks.rank]),
            "reduce": lambda area=area, other=other: dist.all_to_all_single(other.view(-1), area.view(-1)),
        }
        for name, exchanged in ways.items():
            seconds = []
            for _ in range(repeats + 1):
                dist.barrier()
                started = time.perf_counter()
                exchanged()
                seconds.append(time.perf_counter() - started)
            found[name][size] = statistics.median(seconds[1:])
    return {"seconds": found}
