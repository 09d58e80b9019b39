"""The runners of one shard: one for all of its layers, or one for each where the model's own code runs in between.

::

    layers of an nn.Sequential     shard 0: [runner 0: layers 0, 1]              a cell is one run of both
    blocks of any other model      shard 0: [runner 0: block 0, runner 1: block 1]   a cell is a run of each

A cell of a plan is all the work of its shard. A step of it, the run of one runner, is a cell as well, with the number
of the runner in place of the shard's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass

from offload.engine.cell import ShardRunner
from offload.streaming.shard import Shard

__all__ = ["ShardRunners"]


@dataclass(frozen=True, eq=False)
class ShardRunners:
    """Runners of one shard, in the order of calls. ``steps``: their numbers in the model."""

    runners: list[ShardRunner]
    steps: range

    @classmethod
    def by_shard(cls, runners: Iterable[ShardRunner]) -> list[ShardRunners]:
        """Those of all shards of a model."""
        found: list[ShardRunners] = []
        for _, group in itertools.groupby(runners, key=lambda runner: runner.shard.index):
            first = found[-1].steps.stop if found else 0
            members = list(group)
            found.append(cls(members, range(first, first + len(members))))
        return found

    @property
    def shard(self) -> Shard:
        """The shard."""
        return self.runners[0].shard

    @property
    def needs_copy(self) -> bool:
        """Whether the next forward must not use the home in place."""
        return any(runner.needs_copy for runner in self.runners)

    @property
    def writes_weights(self) -> bool:
        """Whether a layer has written its own parameters."""
        return any(runner.writes_weights for runner in self.runners)

    @property
    def repeats_writes(self) -> bool | None:
        """Whether recomputations write what the forwards wrote; None if that is not known."""
        found = [runner.repeats_writes for runner in self.runners]
        return False if False in found else None if None in found else True

    @property
    def failed(self) -> bool:
        """Whether a layer raised an error."""
        return any(runner.failed for runner in self.runners)

    def begin(self) -> None:
        """Begins a visit: no layer has failed."""
        for runner in self.runners:
            runner.failed = False

    def compares_weights(self) -> bool:
        """Whether parameters are compared with their homes after the forward of this visit."""
        each = [runner.compares_weights() for runner in self.runners]  # all of them: each counts its forwards
        return any(each)

    @property
    def measures_graphs(self) -> bool:
        """Whether recorded forwards measure the graphs that could be kept."""
        return all(runner.measures_graphs for runner in self.runners)

    @property
    def graph_bytes_per_row(self) -> float | None:
        """Bytes of a kept graph for each row; None before it was measured."""
        each = [runner.graph_bytes_per_row for runner in self.runners]
        return None if None in each else sum(nbytes for nbytes in each if nbytes is not None)
