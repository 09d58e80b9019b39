"""Cases that tests run in processes of their own."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.case import CannotRunError
from benchmarks.harness.memory import cap_memory, memory_of
from benchmarks.harness.worker import Reporter

#: What the programs of :func:`runs` use.
NAMES = {each.__name__: each for each in (mmap, os, signal, subprocess, sys, CannotRunError, cap_memory, memory_of)}


def runs(report: Reporter, code: str) -> dict[str, Any]:
    """Runs a program that may report."""
    print("a stray line on standard output")
    exec(code, {**NAMES, "report": report})
    return {name: os.environ.get(name) for name in ("SET_BY_USER", "ONLY_OURS")}


def takes_turns(report: Reporter, name: str, seconds: list[float], log: str, last: int | None) -> dict[str, Any]:
    """Each writes down in a shared file who takes it; one may be the last. Tells how many it took."""
    turns = 0
    for k in report.turns():
        if k == last:
            raise ArithmeticError("the reason it died of")
        turns += 1
        if log:
            with Path(log).open("a") as shared:
                shared.write(name)
        report.step(seconds=seconds[min(k, len(seconds) - 1)])
    return {"turns": turns}


def takes_turns_as_a_rank(report: Reporter, mebibytes: int, fails: str = "") -> dict[str, Any]:
    """Rank r holds r times so much memory; both must be in a turn at the same time."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if fails == str(rank):
        raise ArithmeticError("this rank fails")
    held = bytearray(b"\1") * (mebibytes * rank << 20)
    report.phase("steps")
    for k in report.turns():
        Path(f"{k}-{rank}").touch()
        while not all(Path(f"{k}-{other}").exists() for other in range(ranks)):
            pass
        report.step(rank=rank)
    return {"rank": rank, "held": len(held)}
