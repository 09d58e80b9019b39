"""A case that tests run in processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.harness.case import CannotRunError
from benchmarks.harness.memory import cap_memory, memory_of
from benchmarks.harness.worker import Reporter


def acts(report: Reporter, actions: list[list[Any]]) -> dict[str, Any]:
    """Does what it is told, action by action; tells how many turns it took."""
    held, turns = [], 0
    print("a stray line on standard output")
    for action, *how in actions:
        if action == "step":
            report.step(**how[0])
        elif action == "phase":
            report.phase(how[0])
        elif action == "hold":
            held.append(bytearray(b"\1") * (how[0] << 20))
        elif action == "drop":
            held.clear()
        elif action == "cap":
            cap_memory(memory_of(os.getpid())[1] + (how[0] << 20))
        elif action == "map":
            import mmap

            with Path(how[0]).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                held.append(sum(mapped[k] for k in range(0, len(mapped), 4096)))  # touches every page
                report.phase("mapped")
        elif action == "turns":  # each writes down in a shared file who takes it; one may be the last
            name, seconds, log, last = how
            for k in report.turns():
                if k == last:
                    raise ArithmeticError("the reason it died of")
                turns += 1
                if log:
                    with Path(log).open("a") as shared:
                        shared.write(name)
                report.step(seconds=seconds[min(k, len(seconds) - 1)])
        elif action == "raise":
            raise ArithmeticError("the reason it died of")
        elif action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif action == "leave":
            os._exit(0)
        elif action == "skip":
            raise CannotRunError("needs what this machine has not")
        elif action == "hang":
            report.step(pid=subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid)
            signal.pause()
        else:
            raise AssertionError(action)
    return {"turns": turns, "environment": {name: os.environ.get(name) for name in ("SET_BY_USER", "ONLY_OURS")}}


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
