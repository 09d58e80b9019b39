"""Transfers of these tests have small pieces, so that few bytes are several of them."""

from __future__ import annotations

import pytest

from tests.offload.storage.test_tiers import STAGED, UNSTAGED


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.storage.transfer.UNSTAGED_BYTES", UNSTAGED)
    monkeypatch.setattr("offload.storage.transfer.STAGED_BYTES", STAGED)
