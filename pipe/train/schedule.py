"""The schedule of a train pipeline as data: which stage runs on which batch in each call of ``progress``.

A pipeline is a list of :class:`Stage`. Each says how many batches it runs *ahead* of the batch that computes, and
*after* which stages of the same batch it may start. One call of ``progress`` is one tick; tick ``i`` runs every stage,
in the order of the list, on its next batches up to batch ``i + ahead``::

    load  ahead 2    tick 0   load.0 load.1 load.2  copy.0 copy.1 copy.2  forward.0 backward.0     fill
    copy  ahead 2    tick 1   load.3 copy.3  forward.1 backward.1                                  steady state
    forward          tick 2   load.4 copy.4  forward.2 backward.2
    backward         tick 3   ...            after the loader's end, load and copy do nothing,     drain
                                             and the batches in flight compute

A stage that a batch needs but that is listed later (the exchange of sparse lengths runs between forward and backward
of the batch before) runs earlier on demand while the pipeline fills.

Invariant: every stage runs once for every batch, in the order of the batches, and after the stages it names.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from pipe.train.lane import Lane

__all__ = ["Stage", "StageRun", "TrainSchedule", "plan"]


@dataclass(frozen=True)
class Stage:
    """One stage of a train pipeline.

    Attributes:
        name: its name in plans, statistics and errors.
        lane: the queue that it runs on.
        work: called with the batch in flight; not called for the end of a loader.
        ahead: how many batches it runs ahead of the one that computes.
        after: names of the stages of the same batch that it waits for.
    """

    name: str
    lane: Lane = field(repr=False)
    work: Callable[[Any], None] = field(repr=False)
    ahead: int = 0
    after: tuple[str, ...] = ()

    def of(self, owner: object) -> Stage:
        """The same stage for ``owner`` to keep: a method of its own is held weakly, so that there is no cycle."""
        if getattr(self.work, "__self__", None) is not owner:
            return self
        method = weakref.WeakMethod(self.work)

        def work(batch: Any) -> None:
            run = method()
            assert run is not None  # the owner runs its stages
            run(batch)

        return replace(self, work=work)


class StageRun(NamedTuple):
    """Run ``stage`` on batch ``batch``."""

    stage: Stage
    batch: int

    def __str__(self) -> str:
        return f"{self.stage.name}.{self.batch}"


class TrainSchedule:
    """Generates the actions of each tick, independent of batches, loaders and devices.

    An action counts as done when the next one is requested. If its execution raises, it is yielded again later.

    Raises:
        ValueError: if names repeat, or ``ahead`` is negative.
    """

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages = tuple(stages)
        self._named = {stage.name: stage for stage in stages}
        self._next = dict.fromkeys(self._named, 0)
        if len(self._named) != len(stages):
            raise ValueError(f"expected stages of different names, got {[stage.name for stage in stages]}")
        if behind := [f"{stage.name}={stage.ahead}" for stage in stages if stage.ahead < 0]:
            raise ValueError(f"expected ahead >= 0, got {', '.join(behind)}")

    def tick(self, i: int, may_run_ahead: Callable[[], bool] = lambda: True) -> Iterator[StageRun]:
        """Yields the actions of tick ``i``.

        Args:
            i: the batch that computes.
            may_run_ahead: called before each action on a batch later than ``i``, after all earlier actions have been
                executed; False skips it in this tick.
        """
        for stage in self.stages:
            yield from self.reach(stage.name, i)
            for k in range(max(i + 1, self._next[stage.name]), i + stage.ahead + 1):
                if not may_run_ahead():
                    break
                yield from self.reach(stage.name, k)

    def reach(self, name: str, batch: int) -> Iterator[StageRun]:
        """Yields the missing actions up to stage ``name`` on ``batch``, each after the stages it waits for."""
        stage = self._named[name]
        while self._next[name] <= batch:
            k = self._next[name]
            for needed in stage.after:
                yield from self.reach(needed, k)
            yield StageRun(stage, k)
            self._next[name] = k + 1


def plan(stages: Sequence[Stage], batches: int) -> str:
    """The schedule of ``batches`` batches as text, one line for each call of ``progress``."""
    schedule = TrainSchedule(stages)
    ticks = ([action for action in schedule.tick(i) if action.batch < batches] for i in range(batches))
    return "\n".join(" ".join(map(str, tick)) for tick in ticks)
