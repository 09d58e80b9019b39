"""The order in which the cases of a group run: each alone, in pairs with the first, or in rounds.

Methods whose times are compared take turns: the steps of a pair share their moment, so a slow minute of the machine
hits both, and the median of the ratios ignores moments that hit only one. Which one starts alternates, so that neither
always finds the caches that the other one left. Between its turns a process sleeps on a pipe.
"""

import contextlib
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.process import CaseProcess

MAXIMUM_ERROR = 0.03  # of a median: two runs then rarely differ by a tenth
MOST_TIMES = 3


def run_group(
    cases: Sequence[Case],
    folder: str | Path,
    order: str = "alone",
    turns: int = 0,
    warmup: int = 0,
    done: Callable[[list[Outcome]], None] = lambda outcomes: None,
) -> list[Outcome]:
    """Runs cases in one of three orders; their outcomes in the order of the cases.

    * ``alone``: one after the other, each with ``turns`` turns if it waits for turns.
    * ``rounds``: one turn of each in a round, ``turns`` rounds; all processes are alive.
    * ``pairs``: each in turn with the first, which keeps its process, ``turns`` times; where these leave the median of
      the ratios in doubt, up to three times as often. A case that ends early has the pairs that were complete by then.

    Before the counted turns come ``warmup`` turns whose steps are dropped; those of ``pairs`` are taken in turn, too.
    The reference is the first case. ``done`` gets the outcomes so far whenever a case has ended.
    """
    from offload.progress import progress  # not above: a case may import the packages of another commit

    kept = 1 if order == "pairs" else 0
    lots = [cases] if order == "rounds" else [[case] for case in cases[kept:]]
    with contextlib.ExitStack() as stack:
        first = [_start(case, folder, warmup, stack) for case in cases[:kept]]
        outcomes: list[Outcome] = []
        for lot in lots:
            with contextlib.ExitStack() as inner:
                processes = first + [_start(case, folder, 0 if first else warmup, inner) for case in lot]
                _warm_up(processes, warmup if first else 0)
                ratios = processes[-1].outcome.ratios
                rounds = rounds_until_known(ratios, turns) if first else progress(range(turns), "steps", "round")
                for k in rounds:
                    if len(lot) > 1 and not sys.stderr.isatty():
                        print(f"step {k + 1} of {turns} of each", flush=True)
                    if first and not all(process.waiting for process in processes):
                        break  # one of the two has ended; its outcome says why
                    _round(processes, k)
                outcomes += [process.finish() for process in processes[kept:]]
                done([*(process.outcome for process in first), *outcomes])
        return [process.finish() for process in first] + outcomes


def _start(case: Case, folder: str | Path, warmup: int, stack: contextlib.ExitStack) -> CaseProcess:
    """Starts the cases one after the other: building takes time and memory, too."""
    process = stack.enter_context(CaseProcess(case, folder))
    process.start()
    for _ in range(warmup):
        process.turn()
    del process.outcome.steps[:warmup]
    return process


def _warm_up(processes: Sequence[CaseProcess], rounds: int) -> None:
    """Rounds of a pair whose steps are dropped."""
    for k in range(rounds):
        if all(process.waiting for process in processes):
            _round(processes, k)
    if rounds:
        outcome = processes[-1].outcome
        outcome.reference = []
        del outcome.steps[:rounds]


def _round(processes: Sequence[CaseProcess], k: int) -> None:
    """Runs one turn of each case, and stores the first case's times of this round beside those of every case."""
    begin = k % len(processes)
    taken = {process: process.turn() for process in (*processes[begin:], *processes[:begin])}
    step = taken[processes[0]] or {}
    for process in processes if len(processes) > 1 and step else ():
        if taken[process]:
            times = {key: step[key] for key in ("seconds", "processor") if key in step}
            process.outcome.reference.append(times)


def rounds_until_known(ratios: Callable[[], Sequence[float]], rounds: int) -> Iterator[int]:
    """Counts rounds: as many as asked for, then more until the median is :func:`known`, at most three times as many."""
    for k in range(MOST_TIMES * rounds):
        if k >= rounds and known(ratios()):
            return
        yield k


def known(ratios: Sequence[float]) -> bool:
    """Whether the standard error of the median is at most 3 % of it; fewer than three ratios cannot tell.

    The middle half of normal deviations is 1.349 standard deviations wide, and the median of n has a standard error of
    1.253 of them over the root of n. Taken from the middle half, the error ignores the moments that the median ignores.
    """
    if len(ratios) < 3:
        return True
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(ratios)) <= MAXIMUM_ERROR * middle
