"""An embedding whose rows are read beside compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload.embedding.bag import OffloadEmbeddingBag
from pipe.train import InlineLane, Lane, Ticket
from tests.late_cuda import LateCuda, LateStream
from tests.waits import fails_with


class _LateTicket(Ticket[Any]):
    def __init__(self, job: Callable[[], Any]) -> None:
        super().__init__()
        self._job = job

    def succeeded(self) -> bool:
        if not self.done:
            self.run(self._job)
        return super().succeeded()


def unfilled(ticket: Ticket[Any]) -> Any:
    """What a ticket returns, in memory that its copies have not filled yet."""
    assert isinstance(ticket, _LateTicket)
    rows = ticket._job()
    return replace(rows, values=torch.full_like(rows.values, torch.nan))


class LateLane(Lane):
    def submit(self, job: Callable[[], Any]) -> Ticket[Any]:
        return _LateTicket(job)


def _bag() -> tuple[nn.EmbeddingBag, OffloadEmbeddingBag]:
    torch.manual_seed(0)
    theirs = nn.EmbeddingBag(9, 4)
    torch.manual_seed(0)
    ours = OffloadEmbeddingBag(9, 4)
    ours.lane = LateLane()  # type: ignore[assignment]
    return theirs, ours


@fails_with("Tensor-likes are not")
def a_lookup_finds_its_rows(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    theirs, ours = _bag()
    indices = torch.tensor([[1, 2], [7, 2]])
    torch.testing.assert_close(ours(indices), theirs(indices))
    request = ours.input_dist(None, indices).wait()  # a request may be used without waiting for its rows
    torch.testing.assert_close(ours.compute_and_output_dist(None, request), theirs(indices))


@fails_with("DID NOT RAISE .*IndexError", error=pytest.fail.Exception)
def a_read_that_failed_is_told_by_its_wait(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    with pytest.raises(IndexError, match="from 0 to 8"):
        _bag()[1].input_dist(None, torch.tensor([[1, 99]])).wait().wait()


@fails_with("Tensor-likes are not")
def indices_are_read_after_they_have_come(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    theirs, ours = _bag()
    indices = torch.zeros(1, 2, dtype=torch.int64)
    monkeypatch.setattr("offload.embedding.bag.fence", lambda device: _LateTicket(lambda: indices.fill_(5)))
    got = ours(indices)
    torch.testing.assert_close(got, theirs(torch.full((1, 2), 5)))


@fails_with("the allocator does not know its users")
def what_crosses_streams_is_known_to_the_allocator(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    cuda, stream = LateCuda(monkeypatch), LateStream()
    _, ours = _bag()
    ours.lane = InlineLane(stream)  # type: ignore[arg-type, assignment]
    log: list[tuple[int, object]] = []
    monkeypatch.setattr(
        "offload.embedding.bag.record_stream",
        lambda value, user: log.append((len(value) if isinstance(value, list) else 0, user)),
    )
    ours(torch.tensor([[1, 2]]))
    assert log == [(0, stream), (2, cuda.compute)], "the allocator does not know its users"
