"""Imports the scripts in ``docs/examples``."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path
from typing import Any

__all__ = ["EXAMPLES", "load_example"]

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"


@functools.cache
def load_example(name: str) -> Any:
    """The module of an example."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
