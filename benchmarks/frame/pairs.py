"""Times that are compared are taken in turn: this one, that one, this one, that one, each in a process of its own.

A machine has slow minutes. Measured one after the other, two ways are compared across minutes; measured in turn, each
pair shares its moment, and the median of the pairs' ratios forgets the moments that hit only one of the two. Who goes
first alternates from pair to pair, so that neither always finds the caches that the other one left. Between its turns a
process sleeps on a pipe: it takes memory, but no time.
"""

from __future__ import annotations

import contextlib
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from benchmarks.frame.extra import require
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.process import RungProcess
from benchmarks.frame.rungs import listener, run_rung

__all__ = ["Paired", "known", "rounds_until_known", "run_apart", "run_in_turn", "run_pairs", "spread", "step_ratios"]

MAXIMUM_ERROR = 0.03  # so that two runs rarely come to differ by a tenth
MOST_TIMES = 3


@dataclass
class Paired:
    """What came of a rung beside the reference: for each pair its step, and the reference's step of the same moment."""

    outcome: Outcome
    steps: list[dict[str, float]] = field(default_factory=list)
    reference: list[dict[str, float]] = field(default_factory=list)

    def ratios(self, key: str = "seconds") -> list[float]:
        """``key`` of the rung to that of the reference, pair by pair."""
        return [mine[key] / theirs[key] for mine, theirs in zip(self.steps, self.reference, strict=True)]

    def ratio(self, key: str = "seconds") -> float:
        """The median of :meth:`ratios`; nan where there was no pair."""
        return statistics.median(self.ratios(key)) if self.steps else float("nan")


def run_pairs(
    reference: Rung, rungs: Iterable[Rung], pairs: int, *, warmup: int = 1, progress: bool = True
) -> tuple[Outcome, list[Paired]]:
    """Runs each rung in turn with the reference: first ``warmup`` turns that are not counted, then ``pairs`` pairs.

    Where these leave the median in doubt, because something else ran on the machine, there are more: up to three times
    as many.

    Each function must call ``report.turns()`` and report one step (``seconds`` and more) for each turn. The reference
    keeps its process throughout; a rung's process is there only while that rung is measured, so that at no time more
    than two ways hold memory.

    Returns:
        the reference's outcome and, in the order of ``rungs``, what came of each. A rung that was skipped or failed has
        the pairs that were complete by then.
    """
    tqdm = require("tqdm").tqdm
    found: list[Paired] = []
    with RungProcess(reference) as first:
        first.prepare()
        for _ in range(warmup):
            first.turn()
        for rung in rungs:
            with tqdm(
                desc=rung.name, unit="step", total=warmup + pairs, disable=not progress, dynamic_ncols=True
            ) as bar:
                with RungProcess(rung, listener(bar)) as second:
                    paired = Paired(second.outcome)
                    second.prepare()
                    for _ in range(warmup):
                        second.turn()
                    for k in rounds_until_known(paired.ratios, pairs):
                        order = (first, second) if k % 2 == 0 else (second, first)
                        taken = {id(process): process.turn() for process in order}
                        if not all(taken.values()):
                            break  # one of the two has ended; its outcome says why
                        paired.reference.append(taken[id(first)][-1])
                        paired.steps.append(taken[id(second)][-1])
                    second.finish()
                    second.outcome.ratio = paired.ratio() if paired.steps else None
                if second.outcome.reason:
                    bar.write(f"{rung.name}: {second.outcome.reason}")
            found.append(paired)
        return first.finish(), found


def run_in_turn(rungs: Sequence[Rung], turns: int, *, warmup: int = 0, progress: bool = True) -> list[Outcome]:
    """Takes ``turns`` turns of every rung, one of each in a round; who begins changes from round to round.

    Before them come ``warmup`` rounds whose steps are not counted. All rungs hold their memory at once. One that ends
    before its time is left out from then on; the others go on. A rung's ``ratio`` is to the first one that ran to its
    end.
    """
    tqdm = require("tqdm").tqdm
    with contextlib.ExitStack() as stack:
        processes = []
        for rung in rungs:
            processes.append(stack.enter_context(RungProcess(rung)))
            processes[-1].prepare()  # one after the other: building is work too
        bar = stack.enter_context(
            tqdm(desc=", ".join(r.name for r in rungs), unit="round", disable=not progress, dynamic_ncols=True)
        )
        bar.reset(warmup + turns)
        for k in range(warmup + turns):
            begin = k % len(processes)
            for process in processes[begin:] + processes[:begin]:
                process.turn()
            bar.update()
        outcomes = [process.finish() for process in processes]
        for outcome in outcomes:
            del outcome.steps[:warmup]
            if outcome.reason:
                bar.write(f"{outcome.rung.name}: {outcome.reason}")
        _compare(outcomes)
        return outcomes


def run_apart(
    rungs: Sequence[Rung], rounds: int, *, turns: int = 1, warmup: int = 0, progress: bool = True
) -> list[Outcome]:
    """As :func:`run_in_turn`, but each rung has the machine and all its memory to itself.

    In a round each has a process of its own, which ends before the next one begins; it takes ``turns`` turns, and
    before them ``warmup`` that are not counted. So each process must get ready in each round, and a step shares not its
    moment with the other's, but its quarter of an hour.
    """
    tqdm = require("tqdm").tqdm
    joined: dict[int, Outcome] = {}
    with tqdm(
        desc=", ".join(r.name for r in rungs), unit="process", total=rounds * len(rungs), disable=not progress
    ) as bar:
        for k in range(rounds):
            order = [(k + place) % len(rungs) for place in range(len(rungs))]
            for place in order:
                if place in joined and joined[place].reason:
                    continue
                outcome = run_rung(rungs[place], turns=warmup + turns)
                del outcome.steps[:warmup]
                joined[place] = _joined(joined[place], outcome) if place in joined else outcome
                bar.update()
                if outcome.reason:
                    bar.write(f"{outcome.rung.name}: {outcome.reason}")
    outcomes = [joined[place] for place in range(len(rungs))]
    _compare(outcomes)
    return outcomes


def _joined(before: Outcome, after: Outcome) -> Outcome:
    """Two processes of one rung as one: all steps, and the most that either held."""
    phases = {**before.peaks, **after.peaks}
    return replace(
        after,
        steps=before.steps + after.steps,
        peaks={phase: max(before.peaks.get(phase, 0), after.peaks.get(phase, 0)) for phase in phases},
        data_peak_bytes=max(before.data_peak_bytes, after.data_peak_bytes),
        seconds=before.seconds + after.seconds,
    )


def _compare(outcomes: Sequence[Outcome]) -> None:
    """Ratios to the first rung that ran to its end."""
    done = [outcome for outcome in outcomes if outcome.result is not None and outcome.steps]
    for outcome in done[1:]:
        outcome.ratio = statistics.median(step_ratios(outcome, done[0]))


def step_ratios(outcome: Outcome, reference: Outcome, key: str = "seconds") -> list[float]:
    """``key`` of each step to that of the reference's step in the same round, of rungs that ran in turn."""
    return [mine[key] / theirs[key] for mine, theirs in zip(outcome.steps, reference.steps, strict=False)]


def rounds_until_known(ratios: Callable[[], Sequence[float]], rounds: int) -> Iterator[int]:
    """Counts ``rounds``, and goes on while the median of ``ratios()`` is in doubt: up to three times as far."""
    for k in range(MOST_TIMES * rounds):
        if k >= rounds and known(ratios()):
            return
        yield k


def known(ratios: Sequence[float]) -> bool:
    """Whether the standard error of the median is at most 3 % of it; fewer than three ratios say nothing of that.

    The middle half of normal deviations is 1.349 standard deviations wide, and the median of n has a standard error of
    1.253 of them over the root of n. Taken from the middle half, the error forgets the moments that the median forgets.
    """
    if len(ratios) < 3:
        return True
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return 1.253 * (high - low) / 1.349 / math.sqrt(len(ratios)) <= MAXIMUM_ERROR * middle


def spread(values: Iterable[float], digits: int = 3) -> str:
    """The median, and from where to where the values go: ``1.050 (0.95 to 1.06)``; ``-`` where there are none."""
    ordered = sorted(values)
    if not ordered:
        return "-"
    middle = statistics.median(ordered)
    return f"{middle:.{digits}f} ({ordered[0]:.2f} to {ordered[-1]:.2f})"
