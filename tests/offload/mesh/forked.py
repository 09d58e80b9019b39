"""Runs a function in forked children of a process that has imported torch already: a rank costs milliseconds."""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class Child:
    """A forked child, and the reading end of the pipe for its result."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self._pipe = pid, pipe

    def result(self) -> tuple[int, Any]:
        """Waits for its end; returns its exit status, negative for a signal, and what it returned."""
        with os.fdopen(self._pipe) as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return status, json.loads(text) if text else None


def fork(function: Callable[[], Any]) -> Child:
    """Starts ``function``, whose result has a JSON form, in a child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            write = os.write  # a function may replace it
            write(writing, json.dumps(function()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    return Child(pid, reading)


def check_claims(stages: Iterable[tuple[int, Mapping[str, Callable[[], None]]]], folder: Path) -> dict[str, str]:
    """By name: how each claim is broken on any rank; empty if it holds.

    ``stages``, one after the other: a number of ranks, and claims that so many ranks check. They are new for each
    claim: groups of processes last as long as these, and the thread of each wakes up a hundred times a second.
    """
    importlib.import_module("torch._dynamo")  # what a mesh imports: seconds, which each rank would take for itself
    gc.collect()
    gc.freeze()
    found: dict[str, str] = {}
    numbers = itertools.count()
    for ranks, claims in stages:
        for name, claim in claims.items():
            check = partial(_how_broken, ranks, folder / f"store{next(numbers)}", claim)
            children = [fork(partial(check, rank)) for rank in range(ranks)]
            ended = [child.result() for child in children]
            assert all(status == 0 for status, _ in ended), name
            found[name] = found.get(name, "") + "".join(how for _, how in ended)
    return found


def main(folder: str, *workers: str) -> None:
    """Prints how the claims of modules are broken, by module; each one's name, or with those of its stages: "a/b"."""
    torch.set_num_threads(1)
    made: list[tuple[str, Path, Any]] = []
    for name in workers:
        module, *titles = name.split("/")
        place = Path(folder) / module
        place.mkdir()
        made.append((name, place, importlib.import_module(f"tests.offload.mesh.{module}").stages(place, *titles)))
    print(json.dumps({name: check_claims(stages, place) for name, place, stages in made}))


def _how_broken(ranks: int, store: Path, claim: Callable[[], None], rank: int) -> str:
    """Why a claim does not hold on one rank; empty if it does."""
    if ranks > 1:
        how: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=30)}
        dist.init_process_group("gloo", f"file://{store}", **how)
    broken = ""
    try:
        claim()
    except BaseException:  # such as DCP's
        broken = traceback.format_exc()
    if ranks > 1:
        dist.destroy_process_group()
    return broken
