"""Every test process computes in one thread, so that as many processes as there are cores run side by side."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterator

import pytest

# torch reads it once, when it is imported; processes that tests start inherit it.
assert "torch" not in sys.modules or os.environ.get("OMP_NUM_THREADS"), "torch was imported before tests/conftest.py"
os.environ.setdefault("OMP_NUM_THREADS", "1")

with contextlib.suppress(ImportError):  # not installed where only the tests that need torchrec run
    from hypothesis import settings

    # What a checkout must pass is the same set of examples everywhere. New ones are drawn on purpose, by
    # --hypothesis-profile=search, or of longer searches thousands by --hypothesis-profile=long.
    settings.register_profile("same examples", deadline=None, derandomize=True)
    settings.register_profile("search", deadline=None)
    settings.register_profile("long", deadline=None, max_examples=10_000)
    settings.load_profile("same examples")


@pytest.fixture(scope="module", autouse=True)
def collect_only_what_tests_make() -> None:
    """Modules, collected tests and the like live as long as the process: a collection need not visit them each time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def leave_no_process_group() -> Iterator[None]:
    """Where a module leaves one, the module that makes the next one fails, in another order of modules another one."""
    import torch.distributed as dist

    yield
    assert not dist.is_initialized(), "a process group outlives the module that made it"


@pytest.fixture(scope="session", autouse=True)
def seed_no_device_that_is_not_there() -> Iterator[None]:
    """For each kind of such devices ``torch.manual_seed`` formats the stack, for later: half a millisecond each."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for kind in (torch.cuda, torch.xpu, torch.mtia):
            if not kind.is_available() and hasattr(kind, "manual_seed_all"):
                patch.setattr(kind, "manual_seed_all", lambda seed: None)
        yield
