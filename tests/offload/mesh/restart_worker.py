"""Ranks that train by ``docs/examples/resume_after_faults.py``, of which one is killed at a given event, and that are
started again.

An event is the n-th of a kind on one rank, counted over its threads. The others must end with an error. Then all are
started again, perhaps in another number. The losses that ranks have reported in the end must be those of a run without
a kill.
"""

from __future__ import annotations

import collections
import itertools
import json
import os
import random
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from offload.mesh.ranks import Ranks
from tests.examples import load_example
from tests.offload import checkpoint_worker
from tests.offload.mesh.forked import Child, fork

#: Kinds of events: those of one process, and begins and ends of collectives of the model, and of others.
KINDS = (*checkpoint_worker.KINDS, "ranks", "collective", "other collective")
STEPS, SAVE_EVERY = 5, 2


class Killer(checkpoint_worker.Killer):
    """Counts collectives as well."""

    def watch(self) -> None:
        super().watch()
        os.rename = self._saving(os.rename)
        for owner, names, kind in (
            (Ranks, ("all_gather", "reduce", "agree"), "collective"),
            (dist, ("all_reduce", "broadcast_object_list", "all_gather_object"), "other collective"),
            (FileSystemWriter, ("write_data", "finish"), "save"),
        ):
            for name in names:
                setattr(owner, name, self._counting(getattr(owner, name), kind))

    def _counting(self, action: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            with self._around(kind):
                return action(*args, **kwargs)

        return counted


def train(
    rank: int, ranks: int, attempt: Path, folder: Path, home: str, steps: int, fatal: tuple[str, int] | None
) -> tuple[dict[str, int], str]:
    """One rank. Returns the numbers of its events, and the error that ended it, if one did."""
    killer, error = Killer(fatal), ""
    try:
        dist.init_process_group("gloo", f"file://{attempt}", rank=rank, world_size=ranks, timeout=timedelta(seconds=30))

        def report(step: int, loss: float) -> None:
            with open(folder / "losses", "a", encoding="utf-8") as file:
                print(step, loss, file=file)

        killer.watch()
        load_example("resume_after_faults").train(folder, steps, SAVE_EVERY, home, report)
    except Exception as raised:
        error = f"{type(raised).__name__}: {raised}"
    return dict(killer.counts), error


def run(ranks: int, fatal_rank: int, fatal: tuple[str, int] | None, attempt: Path, **how: Any) -> list[Any]:
    """The exit status and result of each of ``ranks``."""
    children: list[Child] = [
        fork(partial(train, rank, ranks, attempt, fatal=fatal if rank == fatal_rank else None, **how))
        for rank in range(ranks)
    ]
    return [child.result() for child in children]


def losses_of(folder: Path) -> list[tuple[int, float]]:
    lines = (folder / "losses").read_text(encoding="utf-8").splitlines() if (folder / "losses").exists() else []
    return [(int(step), float(loss)) for step, loss in map(str.split, lines)]


def main(name: str, kills: int | str, seed: int | str = 0) -> None:
    """Prints how many ranks were killed at which kinds of events, and what the others said."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports what every child would otherwise import for itself
    path, kills = Path(name), int(kills)
    draw, home = random.Random(int(seed)), f"{path}/homes"
    how = {"steps": STEPS, "home": home}
    undisturbed = path / "undisturbed"
    undisturbed.mkdir(parents=True, exist_ok=True)
    results = run(2, -1, None, path / "store", folder=undisturbed, **how)
    assert [(status, result[1]) for status, result in results] == [(0, "")] * 2, results
    counts = [result[0] for _, result in results]
    expected = dict(losses_of(undisturbed))
    assert sorted(expected) == list(range(STEPS))
    kinds = itertools.cycle(draw.sample(KINDS, len(KINDS)))
    killed, errors = collections.Counter[str](), collections.Counter[str]()
    worst = 0.0
    for number in itertools.count():
        if killed.total() >= kills:
            break
        folder = path / f"round{number}"
        folder.mkdir()
        for attempt in itertools.count():
            ranks, kind, rank = draw.randint(2, 3), next(kinds), draw.randint(0, 1)
            fatal = None
            if killed.total() < kills and kind in counts[rank]:
                fatal = kind, draw.randint(1, counts[rank][kind])
            elif killed.total() >= kills:
                ranks = draw.randint(1, 3)
            how["home"] = home if kind in ("read", "write") else draw.choice(["cpu", home])
            results = run(ranks, rank, fatal, folder / f"store{attempt}", folder=folder, **how)
            if [status for status, _ in results] == [0] * ranks and not any(error for _, (_, error) in results):
                break
            what = f"round {number}, attempt {attempt}: rank {rank} of {ranks} at {fatal}: {results}"
            assert results[rank][0] == -signal.SIGKILL, what
            killed[kind] += 1
            for other, (status, result) in enumerate(results):
                if other != rank:
                    assert status == 0, what
                    errors[kind_of(result[1])] += 1
        reported = losses_of(folder)
        assert sorted({step for step, _ in reported}) == sorted(expected), (folder, reported)
        worst = max([worst, *(abs(loss - expected[step]) / abs(expected[step]) for step, loss in reported)])
    print(json.dumps({"killed": killed, "errors": errors, "rounds": number, "worst": worst}))


def kind_of(error: str) -> str:
    """What kind of error a rank that lives has ended with."""
    if not error:
        return "none"
    return "of the model" if "End all processes" in error else "of torch"
