"""Process groups of models, which later models over the same ranks use again.

A model needs groups of its own, since its collectives run beside those of other models and of the user. Torch gives
none back by itself: each keeps its connections and threads until ``destroy_process_group``, and a rank must not call
that while another still communicates. A model ends on each rank at another time, when it is closed or collected. So its
groups are kept, and the next model takes those that have come back on all their ranks, which these compare while they
make the model, all at the same time.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch.distributed as dist

from offload.mesh.notices import is_default
from pipe.torch_private.distributed import store_of_processes

__all__ = ["Group", "Groups", "Kind", "new_group"]


class Kind(NamedTuple):
    """What distinguishes process groups."""

    members: tuple[int, ...]
    backend: str
    timeout: timedelta


@dataclass(eq=False)
class Group:
    """A process group, with the number of its collectives that this rank has begun."""

    kind: Kind
    handle: Any
    collectives: int = 0

    def begin(self) -> Any:
        """The process group, for one more collective."""
        self.collectives += 1
        return self.handle


class Groups:
    """Those of one rank that no model uses. :meth:`of_this_process` has the same for all models."""

    #: By process and rank; threads may be ranks, too.
    _open: ClassVar[dict[tuple[int, int], Groups]] = {}

    def __init__(self, is_open: Callable[[], bool] = lambda: True) -> None:
        self._is_open = is_open
        self._free: list[Group] = []
        #: In which the ranks of a mesh compare what is free.
        self._meetings: dict[Kind, Any] = {}

    @classmethod
    def of_this_process(cls) -> Groups:
        """Those of this process in the present default process group."""
        key = os.getpid(), dist.get_rank()
        found = cls._open.get(key)
        if found is None or not found._is_open():
            found = cls._open[key] = cls(partial(is_default, weakref.ref(store_of_processes()[0])))
        return found

    def take(self, kinds: Sequence[Kind], everybody: Sequence[int], timeout: timedelta) -> list[Group]:
        """A group of each kind. Called by all ranks ``everybody``, among which are all members of the kinds.

        One that has come back is taken if all of its members have it back after as many collectives: else a rank has
        missed one, after an error, and the next would meet it.
        """
        meeting = Kind(tuple(everybody), "gloo", timeout)
        if meeting not in self._meetings:
            self._meetings[meeting] = new_group(meeting)
        mine = [(group.handle.group_name, group.collectives) for group in [*self._free]]
        answers: list[Any] = [None] * len(everybody)
        dist.all_gather_object(answers, mine, group=self._meetings[meeting])
        free = dict(zip(everybody, answers, strict=True))
        return [self._taken(kind, free) or Group(kind, new_group(kind)) for kind in kinds]

    def _taken(self, kind: Kind, free: dict[int, list[tuple[str, int]]]) -> Group | None:
        everywhere = set.intersection(*(set(free[rank]) for rank in kind.members))
        for group in sorted(self._free, key=lambda group: group.handle.group_name):
            if group.kind == kind and (group.handle.group_name, group.collectives) in everywhere:
                self._free.remove(group)
                return group
        return None

    def give_back(self, groups: Sequence[Group]) -> None:
        """Keeps the groups of a model, after its last collective. Called in any thread."""
        self._free.extend(groups)


def new_group(kind: Kind) -> Any:
    """Makes a process group. Called by its members."""
    return dist.new_group([*kind.members], backend=kind.backend, timeout=kind.timeout, use_local_synchronization=True)
