"""Cases that tests run in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.case import CannotRunError
from benchmarks.harness.worker import Reporter

MEBIBYTE = 2**20


def reports(report: Reporter, steps: int) -> dict[str, Any]:
    print("a stray line on standard output")
    for k in range(steps):
        report.step(loss=float(k))
    report.phase("after")
    return {"steps": steps}


def shows(report: Reporter, names: list[str]) -> dict[str, Any]:
    return {name: os.environ[name] for name in names}


def takes_turns_as_a_rank(report: Reporter, mebibytes: int, fails: str = "") -> dict[str, Any]:
    """Rank r holds r times so much memory; both must be in a turn at the same time."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if fails == str(rank):
        raise ArithmeticError("this rank fails")
    held = bytearray(b"\1") * (mebibytes * MEBIBYTE * rank)
    report.phase("steps")
    for k in report.turns():
        Path(f"{k}-{rank}").touch()
        while not all(Path(f"{k}-{other}").exists() for other in range(ranks)):
            pass
        report.step(rank=rank)
    return {"rank": rank, "held": len(held), "store": os.environ.get("TORCHELASTIC_USE_AGENT_STORE")}


def raises(report: Reporter) -> dict[str, Any]:
    report.step(loss=0.0)
    raise ArithmeticError("the reason it died of")


def is_killed(report: Reporter) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def leaves_early(report: Reporter) -> dict[str, Any]:
    os._exit(0)


def starts_another_and_hangs(report: Reporter) -> dict[str, Any]:
    other = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    report.step(pid=other.pid)
    signal.pause()
    return {}


def allocates(report: Reporter, mebibytes: int) -> dict[str, Any]:
    report.phase("before")
    held = bytearray(b"\1") * (mebibytes * MEBIBYTE)
    report.phase("held")
    return {"bytes": len(held)}


def reads_a_file(report: Reporter, path: str) -> dict[str, Any]:
    import mmap

    report.phase("before")
    with Path(path).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        total = sum(mapped[k] for k in range(0, len(mapped), 4096))  # touches every page
        report.phase("mapped")
    return {"total": total}


def has_phases(report: Reporter, mebibytes: int) -> dict[str, Any]:
    held = bytearray(b"\1") * (mebibytes * MEBIBYTE)
    report.phase("held")
    del held
    report.phase("small")
    report.phase("after")
    return {}


def takes_turns(report: Reporter, name: str, seconds: float, log: str) -> dict[str, Any]:
    """Writes down who takes a turn when, in a file that two cases share."""
    taken = 0
    for taken in report.turns():
        with Path(log).open("a") as file:
            file.write(name)
        report.step(seconds=seconds * (taken + 1))
    return {"turns": taken + 1}


def is_disturbed(report: Reporter, turns: int) -> dict[str, Any]:
    """The first turns take longer and longer, all further ones a second."""
    taken = 0
    for taken in report.turns():
        report.step(seconds=2.0 + taken if taken < turns else 1.0)
    return {"turns": taken + 1}


def ends_in_its_second_turn(report: Reporter) -> dict[str, Any]:
    for k in report.turns():
        if k == 1:
            raise ArithmeticError("the reason it died of")
        report.step(seconds=1.0)
    return {}


def cannot_run_here(report: Reporter) -> dict[str, Any]:
    raise CannotRunError("needs what this machine has not")


def allocates_under_a_cap(report: Reporter, cap_mebibytes: int, mebibytes: int) -> dict[str, Any]:
    import torch

    from benchmarks.harness.memory import cap_memory, memory_of

    cap_memory(memory_of(os.getpid())[1] + cap_mebibytes * MEBIBYTE)
    return {"bytes": torch.ones(mebibytes * MEBIBYTE, dtype=torch.uint8).numel()}
