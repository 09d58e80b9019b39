"""What leaves a run: one JSON line for the environment and one for each rung."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.frame.cache import write_whole
from benchmarks.frame.environment import Environment
from benchmarks.frame.rungs import Outcome

__all__ = ["write_json_lines"]


def write_json_lines(path: Path, environment: Environment, outcomes: Sequence[Outcome]) -> Path:
    """Writes the file, whole or not at all; it is replaced where it exists."""
    objects = [environment.as_json(), *(outcome.as_json() for outcome in outcomes)]
    text = "".join(json.dumps(value) + "\n" for value in objects)
    return write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
