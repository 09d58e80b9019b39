"""The order in which the cases of a group run: each alone, in pairs with the first, or in rounds.

Methods whose times are compared take turns: the steps of a pair share their moment, so a slow minute of the machine
hits both, and the median of the ratios ignores moments that hit only one. Which one starts alternates, so that neither
always finds the caches that the other one left. Between its turns a process sleeps on a pipe.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from benchmarks.harness.case import Case, Outcome, times_of
from benchmarks.harness.process import CaseProcess

MAXIMUM_ERROR = 0.03  # of a median: two runs then rarely differ by a tenth
MOST_TIMES = 3


def run_group(
    cases: Sequence[Case], folder: str | Path, order: str = "alone", turns: int = 0, warmup: int = 0
) -> list[Outcome]:
    """Runs cases in one of three orders; their outcomes in the order of the cases.

    * ``alone``: one after the other, each with ``turns`` turns if it waits for turns.
    * ``pairs``: each in turn with the first, ``turns`` times or more; two processes are alive at a time.
    * ``rounds``: one turn of each in a round, ``turns`` rounds; all processes are alive.

    Before the counted turns come ``warmup`` turns whose steps are dropped.
    """
    if order == "pairs" and cases:
        return _run_pairs(cases, folder, turns, warmup)
    if order == "rounds":
        return _run_rounds(cases, folder, turns, warmup)
    return [outcome for case in cases for outcome in _run_rounds([case], folder, turns, warmup)]


def _run_rounds(cases: Sequence[Case], folder: str | Path, turns: int, warmup: int) -> list[Outcome]:
    """A case that ends is left out from then on. The reference is the first that ran to its end."""
    with contextlib.ExitStack() as stack:
        processes = [stack.enter_context(CaseProcess(case, folder)) for case in cases]
        for process in processes:
            process.start()  # one after the other: building takes time and memory, too
        for k in range(warmup + turns):
            begin = k % len(processes)
            for process in processes[begin:] + processes[:begin]:
                process.turn()
        outcomes = [process.finish() for process in processes]
    for outcome in outcomes:
        del outcome.steps[:warmup]
    steps = next((outcome.steps for outcome in outcomes if outcome.result is not None and outcome.steps), [])
    for outcome in outcomes if len(outcomes) > 1 else ():
        outcome.reference = times_of(steps[: len(outcome.steps)])
    return outcomes


def _run_pairs(cases: Sequence[Case], folder: str | Path, pairs: int, warmup: int) -> list[Outcome]:
    """The reference keeps its process. Where so many pairs leave the median in doubt, there are more of them."""
    found: list[Outcome] = []
    with CaseProcess(cases[0], folder) as first:
        first.start()
        for _ in range(warmup):
            first.turn()
        for case in cases[1:]:
            with CaseProcess(case, folder) as second:
                found.append(_pair(first, second, pairs, warmup))
        outcome = first.finish()
    del outcome.steps[:warmup]
    outcome.reference = times_of(outcome.steps)
    return [outcome, *found]


def _pair(first: CaseProcess, second: CaseProcess, pairs: int, warmup: int) -> Outcome:
    """A case that ended early has the pairs that were complete by then."""
    outcome = second.outcome
    second.start()
    for _ in range(warmup):
        second.turn()
    outcome.steps.clear()
    for k in rounds_until_known(outcome.ratios, pairs):
        if not (first.waiting and second.waiting):
            break  # one of the two has ended; its outcome says why
        taken = {process: process.turn() for process in ((first, second) if k % 2 == 0 else (second, first))}
        if None in taken.values():
            break
        outcome.reference += times_of(first.outcome.steps[-1:])
    second.finish()
    del outcome.steps[len(outcome.reference) :]
    return outcome


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
