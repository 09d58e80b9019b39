"""Runs Python programs in processes of their own, forked from one that has imported torch: a start costs milliseconds.

A program is run as by ``python -c``: with ``sys.argv``, ``__name__ == "__main__"``, and an interpreter that ends as any
does. Not for programs that depend on how an interpreter starts: its options, the allocator's variables, what is
imported.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["Ended", "Program", "claims_of", "outputs_of_ranks", "run_program", "run_programs"]

ROOT = Path(__file__).parents[1]


class Program(NamedTuple):
    """The source of a program, its arguments, and what is added to its environment."""

    code: str
    arguments: Sequence[object] = ()
    environment: Mapping[str, str] = {}


class Ended(NamedTuple):
    """A process that has ended: its exit status, negative for a signal, and what it printed."""

    status: int
    output: str
    errors: str


def run_program(code: str, *arguments: object, seconds: int = 120) -> Ended:
    """Runs a program to its end; after so many seconds it is killed."""
    return run_programs([Program(code, arguments)], seconds)[0]


def run_programs(programs: Sequence[Program], seconds: int = 120) -> list[Ended]:
    """Runs programs at the same time, such as ranks that wait for each other."""
    with tempfile.TemporaryDirectory() as folder:
        order = {"folder": folder, "seconds": seconds, "programs": programs}
        server = _server()
        print(json.dumps(order, default=str), file=server.stdin, flush=True)
        statuses = json.loads(server.stdout.readline())
        printed = [[(Path(folder) / f"{k}{name}").read_text() for name in "oe"] for k in range(len(programs))]
    return [Ended(status, *texts) for status, texts in zip(statuses, printed, strict=True)]


#: Programs of several ranks begin and end with these. Between them, functions without arguments are claims.
BEGIN = """
import copy, logging, os, sys, traceback, warnings, torch, torch.distributed as dist
from torch import nn
logging.disable(logging.WARNING)
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=world)

def run(pipeline, batches):
    outputs, iterator = [], iter(batches)
    while True:
        try:
            outputs.append(pipeline.progress(iterator))
        except StopIteration:
            return outputs
"""
END = """
for name in sys.argv[2:]:
    try:
        globals()[name]()
        print("held:", name, flush=True)
    except BaseException:
        print("broken:", name, traceback.format_exc(), flush=True)
        break
dist.destroy_process_group()
"""


def claims_of(program: str) -> list[str]:
    return re.findall(r"^def (\w+)\(\):$", program, re.MULTILINE)


def outputs_of_ranks(program: str, world: int, folder: Path) -> list[str]:
    """What so many ranks print that put every claim to the test: one start of the processes for all of them."""
    programs = []
    for rank in range(world):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        environment = {name: str(value) for name, value in ranks.items()}
        programs.append(Program(BEGIN + program + END, [folder / "store", *claims_of(program)], environment))
    return [rank.output + rank.errors for rank in run_programs(programs, 240)]


@functools.cache
def _server() -> Any:
    """The process that forks, one for each process of pytest. It ends when its input does."""
    command = [sys.executable, "-m", "tests.programs"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    pid = os.getpid()
    atexit.register(lambda: server.communicate() if os.getpid() == pid else None)  # not in what a test has forked
    return server


def _serve() -> Program | None:
    """Forks and waits, in turn; returns in each child what it shall run."""
    for line in sys.stdin:
        order = json.loads(line)
        children = []
        for k, (code, arguments, environment) in enumerate(order["programs"]):
            children.append(os.fork())
            if children[-1] == 0:
                signal.alarm(order["seconds"])
                for descriptor, path in enumerate((os.devnull, f"{order['folder']}/{k}o", f"{order['folder']}/{k}e")):
                    os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), descriptor)
                return Program(code, arguments, environment)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)
    return None


def main() -> None:
    for name in ("torch", "gradcache", "offload", "pipe.train"):
        importlib.import_module(name)
    torch: Any = sys.modules["torch"]
    torch.optim.AdamW([torch.zeros(1)])  # imports what every child would otherwise import for itself
    gc.collect()
    gc.freeze()
    program = _serve()
    if program is not None:
        os.environ.update(program.environment)
        sys.argv = ["-c", *map(str, program.arguments)]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(program.code, "<string>", "exec"), vars(module))


if __name__ == "__main__":
    main()
