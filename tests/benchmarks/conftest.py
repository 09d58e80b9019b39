"""What tests of whole questions share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def in_a_folder_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The question writes and keeps homes here alone, and its rungs leave the machine's other cores to others."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
