"""Locks that say when they are held, and a queue that may only be read under its lock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["Condition", "Guarded"]


class Condition:
    """A lock, or a condition. A thread that waits for it is helped by ``helper``, once, and then waits for ever."""

    def __init__(self) -> None:
        self.held = False
        self.notified = 0
        self.helper: Callable[[], None] | None = None

    def __enter__(self) -> None:
        assert not self.held, "a thread would wait for itself"
        self.held = True

    def __exit__(self, *_: object) -> None:
        self.held = False

    def wait(self) -> None:
        assert self.held, "waited for without the lock"
        helper, self.helper = self.helper, None
        assert helper is not None, "it would wait for ever"
        self.held = False
        helper()
        self.held = True

    def notify(self) -> None:
        assert self.held, "notified without the lock"
        self.notified += 1


class Guarded(deque[Any]):
    """Is looked at only by who holds ``condition``, and not for ever."""

    def __init__(self, condition: Condition) -> None:
        super().__init__()
        self.condition = condition
        self.looks = 0

    def _look(self) -> None:
        assert self.condition.held, "the queue was read without its lock"
        self.looks += 1
        assert self.looks < 100, "the queue was polled instead of waited for"

    def __len__(self) -> int:
        self._look()
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        self._look()
        return super().__iter__()

    def popleft(self) -> Any:
        self._look()
        return super().popleft()

    def append(self, item: Any) -> None:
        self._look()
        super().append(item)

    def appendleft(self, item: Any) -> None:
        self._look()
        super().appendleft(item)

    def clear(self) -> None:
        self._look()
        super().clear()
