"""The heap of a rung, told to give freed blocks back."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc: other C libraries have no mallopt")
def test_a_freed_block_leaves_the_process_once_the_heap_was_told() -> None:
    """In a process of its own: the heap belongs to all of it, and is not told twice otherwise."""
    program = """
import os, torch
from benchmarks.frame.heap import give_back_at_once
from benchmarks.frame.memory import resident_bytes
assert give_back_at_once()
before = resident_bytes(os.getpid())
pieces = [torch.ones(1 << 18) for _ in range(64)]
held = resident_bytes(os.getpid()) - before
last = pieces[-1]
del pieces
left = resident_bytes(os.getpid()) - before
assert held > 60 << 20 and left < 8 << 20, (held, left)
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2])
