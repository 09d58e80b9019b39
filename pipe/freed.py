"""Calls a function when an object is freed: not earlier, and not when a garbage collection only takes it for garbage.

An autograd function keeps objects for its backward as attributes of its ``ctx``. A garbage collection finds them
through the output of the function, as long as nothing else uses that node of the graph: then the output alone holds it.
Torch computes without Python's lock, so one thread may compute the next operation on the output while a collection runs
in another. The collection then finds the objects when it subtracts the references that it knows, and no longer when it
looks for what is in use. Before it counts once more, and keeps them, it has

* cleared weak references to them, and those that are among them;
* called their finalizers, ``weakref.finalize`` and ``__del__``.

So what a graph may hold has neither. It holds a :class:`Life` instead, which no collection looks at.
"""

from __future__ import annotations

import ctypes
import signal
import threading
import time
import weakref
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Life", "Living", "WhenFreed"]

T = TypeVar("T")

#: Python tracks an object for its collections until it is told not to.
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


def _interrupt_again() -> None:
    time.sleep(0.01)  # until the finalizer has returned, where it would be lost once more
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)  # which also ends a wait for a lock


class Life:
    """Ends when it is freed, with the object that it is an attribute of."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        _untrack(self)


class Living(Generic[T]):
    """Values, each as long as a life lasts. A value must not refer to the object whose life it is."""

    def __init__(self) -> None:
        self._values: dict[weakref.ref[Life], T] = {}

    def add(self, life: Life, value: T) -> None:
        """Adds a value."""
        # ``pop`` is no Python code, in which an interrupt could be raised and lost.
        self._values[weakref.ref(life, self._values.pop)] = value

    def get(self, life: Life) -> T | None:
        """The value of a life."""
        return self._values.get(weakref.ref(life))

    def __iter__(self) -> Iterator[T]:
        return iter([*self._values.values()])


class WhenFreed(Life):
    """Calls ``function`` when it is freed. ``function`` must not refer to the object that it is an attribute of.

    Like any finalizer it may be called in any thread, also in a forked child.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        super().__init__()

    def __call__(self) -> None:
        """Calls the function now, if it was not called yet."""
        function, self._function = self._function, None
        if function is not None:
            function()

    def __del__(self) -> None:
        try:
            if hasattr(self, "_function"):  # not after an interrupt in the constructor
                self()
        except KeyboardInterrupt:
            start_new_thread(_interrupt_again, ())  # Python drops what is raised here
