"""Calls a function when an object is freed: not earlier, and not when a garbage collection only takes it for garbage.

An autograd function keeps objects for its backward as attributes of its ``ctx``. A garbage collection finds them
through the output of the function, as long as nothing else uses that node of the graph: then the output alone holds it.
Torch computes without Python's lock, so one thread may compute the next operation on the output while a collection runs
in another. The collection then finds the objects when it subtracts the references that it knows, and no longer when it
looks for what is in use. Before it counts once more, and keeps them, it has

* cleared weak references to them, and those that are among them;
* called their finalizers, ``weakref.finalize`` and ``__del__``.

So what a graph may hold has neither. It holds a :class:`WhenFreed` instead, which no collection looks at.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

__all__ = ["WhenFreed"]

#: Python tracks an object for its collections until it is told not to.
_untrack = ctypes.pythonapi.PyObject_GC_UnTrack
_untrack.argtypes, _untrack.restype = [ctypes.py_object], None


class WhenFreed:
    """Calls ``function`` when it is freed itself, with the object that it is an attribute of.

    ``function`` must not refer to that object, which would never be freed then. Like any finalizer it may be called in
    any thread, also in a forked child.
    """

    __slots__ = ("_function",)

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        _untrack(self)

    def __call__(self) -> None:
        """Calls the function now, if it was not called yet."""
        function, self._function = self._function, None
        if function is not None:
            function()

    def __del__(self) -> None:
        if hasattr(self, "_function"):  # not after an interrupt in the constructor
            self()
