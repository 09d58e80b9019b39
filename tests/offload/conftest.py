"""Test doubles and models that the offload tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from offload.storage.page_cache import _direct_works


@pytest.fixture(params=["host", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: object) -> str:
    """Both kinds of home, as ``offload_device``."""
    return "cpu" if request.param == "host" else str(tmp_path) + os.sep


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    """A directory whose files can be read and written past the page cache."""
    if not _direct_works(tmp_path):
        pytest.skip("needs a temporary directory on a file system with direct transfers (O_DIRECT)")
    return tmp_path


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device with memory of its own: slots and shards that rest there are not at home."""
    monkeypatch.setattr("offload.storage.buffer.IN_HOST_MEMORY", frozenset[str]())
