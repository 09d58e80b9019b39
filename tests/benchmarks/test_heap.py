"""The heap of a rung, told to give back what is free."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.memory_latency.question import GIVE_BACK


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc: other C libraries have no such threshold")
def test_a_freed_block_leaves_a_process_that_was_started_to_give_back() -> None:
    program = """
import os, torch
from benchmarks.frame.memory import resident_bytes
before = resident_bytes(os.getpid())
pieces = [torch.ones(1 << 18) for _ in range(64)]
held = resident_bytes(os.getpid()) - before
last = pieces[-1]
del pieces
left = resident_bytes(os.getpid()) - before
assert held > 60 << 20 and left < 8 << 20, (held, left)
"""
    environment = {**os.environ, **GIVE_BACK}
    subprocess.run([sys.executable, "-c", program], check=True, cwd=Path(__file__).parents[2], env=environment)
