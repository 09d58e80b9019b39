"""Runs a function in forked children of a process that has imported torch already: a rank costs milliseconds."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from typing import Any

__all__ = ["Child", "fork"]


class Child:
    """A forked child, and the reading end of the pipe for its result."""

    def __init__(self, pid: int, pipe: int) -> None:
        self.pid, self._pipe = pid, pipe

    def result(self) -> tuple[int, Any]:
        """Waits for its end; returns its exit status, negative for a signal, and what it returned."""
        with os.fdopen(self._pipe) as pipe:
            text = pipe.read()
        status = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return status, json.loads(text) if text else None


def fork(function: Callable[[], Any]) -> Child:
    """Starts ``function``, whose result has a JSON form, in a child."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reading)
            write = os.write  # a function may replace it
            write(writing, json.dumps(function()).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writing)
    return Child(pid, reading)
