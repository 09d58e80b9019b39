"""Every test process computes in one thread, so that as many processes as there are cores run side by side."""

from __future__ import annotations

import contextlib
import os
import sys

# torch reads it once, when it is imported; processes that tests start inherit it.
assert "torch" not in sys.modules or os.environ.get("OMP_NUM_THREADS"), "torch was imported before tests/conftest.py"
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # not installed where only the tests that need torchrec run
    from hypothesis import settings

    settings.register_profile("no test depends on time", deadline=None)
    settings.load_profile("no test depends on time")
