"""Runs a function in forked children of a process that has imported torch already: a rank costs milliseconds."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["Child", "check_claims", "fork"]


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

    ``stages``, one after the other: a number of ranks, and claims that each of these ranks checks.
    """
    found: dict[str, str] = {}
    for number, (ranks, claims) in enumerate(stages):
        check = partial(_broken, ranks, folder / f"store{number}", claims)
        children = [fork(partial(check, rank)) for rank in range(ranks)]
        for status, broken in [child.result() for child in children]:
            assert status == 0
            for name in claims:
                found[name] = found.get(name, "") + broken.get(name, "")
    return found


def _broken(ranks: int, store: Path, claims: Mapping[str, Callable[[], None]], rank: int) -> dict[str, str]:
    """The claims that do not hold on one rank."""
    if ranks > 1:
        how: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": timedelta(seconds=30)}
        dist.init_process_group("gloo", f"file://{store}", **how)
    broken = {}
    for name, claim in claims.items():
        try:
            claim()
        except BaseException:  # such as DCP's
            broken[name] = traceback.format_exc()
    if ranks > 1:
        dist.destroy_process_group()
    return broken
