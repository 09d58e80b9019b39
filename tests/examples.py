"""Imports scripts in ``docs``, which is no package."""

from __future__ import annotations

import functools
import importlib.util
import sys
from pathlib import Path
from typing import Any

__all__ = ["DOCS", "EXAMPLES", "load_example", "load_script"]

DOCS = Path(__file__).parents[1] / "docs"
EXAMPLES = DOCS / "examples"


@functools.cache
def load_script(path: Path) -> Any:
    """The module of a script, which runs once."""
    spec: Any = importlib.util.spec_from_file_location(path.stem, path)
    sys.modules[path.stem] = module = importlib.util.module_from_spec(spec)  # where dataclasses look
    spec.loader.exec_module(module)
    return module


def load_example(name: str) -> Any:
    """The module of an example."""
    return load_script(EXAMPLES / f"{name}.py")
