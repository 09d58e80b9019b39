"""What tests of whole benchmarks share."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def in_its_own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The benchmark writes here alone, and its processes use one thread."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def from_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child imports ``tests`` from the root of the clone."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
