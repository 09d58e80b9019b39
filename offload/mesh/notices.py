"""Names the rank that made a collective fail: notices about exceptions in the store of the process group.

A collective fails with "connection closed by peer", or after the timeout, and does not say which rank is the cause.

::

    rank 1 raises                its notice: what it did and what it raised
    rank 2 is killed             writes nothing
    rank 0, collective failed    reads the notices; if no rank raised, asks all: those that live answer

A thread of each process looks once a second whether any rank has asked, and then tells what its own rank does.

A rank whose collective failed writes the cause that it found as a notice of another kind: when it ends, it closes
connections in its turn, and must not be taken for the cause.

A process that an exception ends outside of any pass asks as well, at exit: if all other ranks live, its exception is
the cause; else it says on standard error which rank is, since a collective of the user may have failed.
"""

from __future__ import annotations

import atexit
import itertools
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch.distributed as dist

from pipe.torch_private.distributed import store_of_processes

__all__ = ["Notices"]

#: How often a rank looks whether it is asked, and how long it may take to answer.
LOOK_SECONDS, GRACE_SECONDS = 1.0, 5.0
#: How often a rank that asked looks for answers.
_ANSWER_SECONDS = 0.05
#: Characters of an exception that a notice has.
_LENGTH = 500


def _first_line(error: BaseException) -> str:
    """Type and first line of an exception."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_LENGTH]}" if lines else type(error).__name__


def _is_default(store: weakref.ref[Any]) -> bool:
    """Whether the default process group, of this store, has not been destroyed."""
    return dist.is_initialized() and store_of_processes()[0] is store()


class Notices:
    """The notices of one rank, by its number in the default process group.

    :meth:`of_this_process` makes one for all models of a rank, which lives as long as the process group.
    """

    #: By process and rank; threads may be ranks, too.
    _open: ClassVar[dict[tuple[int, int], Notices]] = {}

    def __init__(self, rank: int, store: Any, is_open: Callable[[], bool]) -> None:
        self._rank, self._store = rank, store
        self._made_in = os.getpid()
        self._is_open = is_open
        #: What this rank answers.
        self._doing = "at its beginning"
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer, name="offload-notices", daemon=True)
        self._thread.start()
        self._raised = False
        #: Why a collective of this rank failed, once one has.
        self.cause: str | None = None
        self._lives = ""

    @classmethod
    def of_this_process(cls, rank: int) -> Notices:
        """Those of ``rank``, which is this process, in the present default process group."""
        key = os.getpid(), rank
        found = cls._open.get(key)
        if found is None or not found._is_open():
            # Weakly, since a store may be the server, whose port the next process group needs.
            shared, connect = store_of_processes()
            found = cls._open[key] = cls(rank, connect(), partial(_is_default, weakref.ref(shared)))
        return found

    def _answer(self) -> None:
        """Answers once a second, from the first question on, until the process group is destroyed."""
        with suppress(Exception):  # the store is gone, which a rank that asks tells
            # Without the condition, it would complain that the process which holds the store has ended.
            for number in itertools.takewhile(lambda _: self._is_open(), itertools.count()):
                if self._store.check(["offload/asked"]):
                    self._store.set(_key("lives", self._rank), f"{number} {self._doing}")
                if self._stop.wait(LOOK_SECONDS):
                    return

    # --- what this rank tells -------------------------------------------------------------------------------------

    def doing(self, what: str) -> None:
        """Sets what this rank answers when others ask what it is doing, and withdraws notices of earlier exceptions."""
        self._doing = what
        if self._raised:
            self._raised = False
            with suppress(Exception):
                self._store.set(_key("raised", self._rank), "")

    def raised(self, error: BaseException, where: str) -> None:
        """Tells that this rank raised, unless that is because of another rank."""
        if self.cause is None and not self._raised:
            self._raised = True
            with suppress(Exception):
                self._store.set(_key("raised", self._rank), f"raised {_first_line(error)} ({where})")

    def at_exit(self) -> None:
        """Tells what ends this process, if it is an exception. Then this rank answers no longer."""
        if os.getpid() != self._made_in:  # a forked child is no rank
            return
        error = getattr(sys, "last_value", None)
        if isinstance(error, Exception) and dist.is_initialized() and self.cause is None and not self._raised:
            if self._find([rank for rank in range(dist.get_world_size()) if rank != self._rank]):
                print(f"rank {self._rank} ends, since {self.cause}", file=sys.stderr)
            else:
                self.raised(error, f"{self._doing}, and its process ended")
        self._stop.set()
        # Without this, the thread could be in the store while the interpreter is taken down.
        self._thread.join(timeout=LOOK_SECONDS)

    # --- what it asks ---------------------------------------------------------------------------------------------

    def fail(self, what: str, ranks: Sequence[int], error: Exception) -> NoReturn:
        """Raises RuntimeError for ``error`` of the collective ``what`` of ``ranks``; it names the rank at fault."""
        if self.cause is None and not self._find([rank for rank in ranks if rank != self._rank]):
            self.cause = f"all ranks live, so one is late, or a connection is broken: {self._lives}"
        raise RuntimeError(
            f"{what} failed: {self.cause}. End all processes and resume from the last checkpoint "
            f"(torchrun --max-restarts). This rank saw: {_first_line(error)}"
        ) from error

    def told(self, ranks: Sequence[int]) -> str:
        """Exceptions that ranks raised in the last call, in words; empty if there were none."""
        with suppress(Exception):
            return self._raised_by(ranks)
        return ""

    def _find(self, others: Sequence[int]) -> str | None:
        """The :attr:`cause` among ``others``, also told to those who ask later; None if all live and none raised."""
        try:
            self.cause = self._told_by(others) or self._silent(others)
        except Exception as gone:
            self.cause = (
                f"the store of the process group does not answer, so the process that holds it (rank 0, or torchrun) "
                f"ended or cannot be reached: {_first_line(gone)}"
            )
        if self.cause is not None:
            with suppress(Exception):
                self._store.set(_key("found", self._rank), self.cause)
        return self.cause

    def _raised_by(self, ranks: Sequence[int]) -> str:
        found = {rank: self._read("raised", rank) for rank in ranks}
        return "; ".join(f"rank {rank} {text}" for rank, text in found.items() if text)

    def _told_by(self, ranks: Sequence[int]) -> str:
        return self._raised_by(ranks) or next(filter(None, (self._read("found", rank) for rank in ranks)), "")

    def _silent(self, others: Sequence[int]) -> str | None:
        """Names the ranks that do not answer. None if all do."""
        silent, answers = self._ask(others)
        # Those that ended meanwhile may have told why.
        if told := self._told_by(others):
            return told
        if silent:
            which = " and ".join(f"rank {rank}" for rank in silent)
            return f"no answer from {which} within {GRACE_SECONDS:g} s: killed, or not responding"
        answers[self._rank] = self._doing
        self._lives = "; ".join(f"rank {rank} is {answer}" for rank, answer in sorted(answers.items()))
        return None

    def _ask(self, others: Sequence[int]) -> tuple[list[int], dict[int, str]]:
        """The ranks that do not answer, and the answers of the others."""
        self._store.set("offload/asked", "")
        before, end = {rank: self._read("lives", rank) for rank in others}, time.monotonic() + GRACE_SECONDS
        while True:
            now = {rank: self._read("lives", rank) for rank in others}
            silent = [rank for rank in others if now[rank] == before[rank]]
            if not silent or time.monotonic() > end:
                return silent, {rank: text.partition(" ")[2] for rank, text in now.items()}
            self._stop.wait(_ANSWER_SECONDS)

    def _read(self, kind: str, rank: int) -> str:
        key = _key(kind, rank)
        return self._store.get(key).decode() if self._store.check([key]) else ""


def _key(kind: str, rank: int) -> str:
    return f"offload/{kind}/{rank}"


@atexit.register
def _at_exit() -> None:
    for notices in list(Notices._open.values()):
        notices.at_exit()
