"""The order in which the cases of a group run: each alone, in pairs with a reference, or in rounds.

Methods whose times are compared take turns: the steps of a pair share their moment, so a slow minute of the machine
hits both, and the median of the ratios ignores moments that hit only one. Which one starts alternates, so that neither
always finds the caches that the other one left. Between its turns a process sleeps on a pipe.
"""

import contextlib
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.peers import require
from benchmarks.harness.process import CaseProcess, Listener

MAXIMUM_ERROR = 0.03  # of a median: two runs then rarely differ by a tenth
MOST_TIMES = 3


@dataclass(frozen=True)
class Group:
    """Cases that run in one order.

    * ``alone``: one after the other, each with ``turns`` turns if it waits for turns.
    * ``pairs``: each in turn with the first, ``turns`` times or more; two processes are alive at a time.
    * ``rounds``: one turn of each in a round, ``turns`` rounds; all processes are alive.

    Before the counted turns come ``warmup`` turns whose steps are dropped.
    """

    name: str
    cases: Sequence[Case]
    order: Literal["alone", "pairs", "rounds"] = "alone"
    turns: int = 0
    warmup: int = 0


def run_group(group: Group) -> list[Outcome]:
    """Runs the cases of a group; their outcomes in the same order."""
    if not group.cases:
        return []
    if group.order == "pairs":
        return run_pairs(group.cases[0], group.cases[1:], group.turns, warmup=group.warmup)
    if group.order == "rounds":
        outcomes = run_rounds(group.cases, group.turns, warmup=group.warmup)
        refer_to_first(outcomes)
        return outcomes
    return [run_alone(case, group.turns, warmup=group.warmup) for case in group.cases]


def run_alone(case: Case, turns: int = 0, *, warmup: int = 0) -> Outcome:
    """Runs one case to its end, whatever that is; the process is gone when this returns or raises."""
    return run_rounds([case], turns, warmup=warmup)[0]


def run_rounds(cases: Sequence[Case], turns: int, *, warmup: int = 0) -> list[Outcome]:
    """Takes one turn of every case in each round; a case that ends is left out from then on."""
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(_bar(", ".join(case.name for case in cases), len(cases) * (warmup + turns)))
        processes: list[CaseProcess] = []
        for case in cases:
            processes.append(stack.enter_context(CaseProcess(case, _listener(bar))))
            processes[-1].prepare()  # one after the other: building takes time and memory, too
        for k in range(warmup + turns):
            begin = k % len(processes)
            for process in processes[begin:] + processes[:begin]:
                process.turn()
        for process in processes:
            del process.finish().steps[:warmup]
            _tell(bar, process.outcome)
        return [process.outcome for process in processes]


def run_pairs(reference: Case, cases: Sequence[Case], pairs: int, *, warmup: int = 1) -> list[Outcome]:
    """Runs each case in turn with the reference, which keeps its process; its outcome is the first.

    Where ``pairs`` pairs leave the median in doubt, there are more: up to three times as many. A case that ended early
    has the pairs that were complete by then.
    """
    found: list[Outcome] = []
    with CaseProcess(reference) as first:
        first.prepare()
        for _ in range(warmup):
            first.turn()
        for case in cases:
            with _bar(case.name) as bar, CaseProcess(case, _listener(bar)) as second:
                found.append(_pair(first, second, pairs, warmup))
                _tell(bar, found[-1])
        outcome = first.finish()
        del outcome.steps[:warmup]
        outcome.reference = outcome.steps
        return [outcome, *found]


def _pair(first: CaseProcess, second: CaseProcess, pairs: int, warmup: int) -> Outcome:
    outcome, reference = second.outcome, list[dict[str, Any]]()
    second.prepare()
    for _ in range(warmup):
        second.turn()
    del outcome.steps[:warmup]
    outcome.reference = reference
    for k in rounds_until_known(outcome.ratios, pairs):
        if not (first.alive and second.alive):
            break  # one of the two has ended; its outcome says why
        taken = {id(process): process.turn() for process in ((first, second) if k % 2 == 0 else (second, first))}
        if not all(taken.values()):
            break
        reference.append(taken[id(first)][-1])
    second.finish()
    del outcome.steps[len(reference) :]
    return outcome


def refer_to_first(outcomes: Sequence[Outcome]) -> None:
    """Gives each outcome the steps of the first one that ran to its end, round by round."""
    steps = next((outcome.steps for outcome in outcomes if outcome.result is not None and outcome.steps), [])
    for outcome in outcomes:
        outcome.reference = steps[: len(outcome.steps)]


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


def _bar(name: str, total: int = 0) -> Any:
    return require("tqdm").tqdm(desc=name, total=total or None, unit="step", dynamic_ncols=True)


def _tell(bar: Any, outcome: Outcome) -> None:
    if outcome.reason:
        bar.write(f"{outcome.name}: {outcome.reason}")


def _listener(bar: Any) -> Listener:
    """Shows the events of a case on a progress bar."""

    def show(event: dict[str, Any]) -> None:
        if event["event"] == "total":
            bar.reset(event["steps"])
        elif event["event"] == "step":
            shown = {key: value for key, value in event["values"].items() if isinstance(value, float)}
            bar.set_postfix({key: f"{value:.3g}" for key, value in shown.items()}, refresh=False)
            bar.update()

    return show
