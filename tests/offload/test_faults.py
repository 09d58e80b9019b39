"""When a place fails, the call says which shard and which place, nothing is lost, and the next step works."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import MemoryPolicy, OffloadModel
from offload.storage.disk import DiskBlock, DiskScratch
from tests.offload.open_files import open_files
from tests.offload.side_by_side import assert_equal, offloaded
from tests.offload.test_model import at_home, batch
from tests.offload.zoo import build


class Faults:
    """Makes the ``fatal``-th call of a method fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, error: BaseException) -> None:
        original = getattr(owner, name)
        self.calls = 0
        self.fatal = -1

        def faulty(*args: object, **named: object) -> object:
            self.calls += 1
            if self.calls == self.fatal:
                raise error
            return original(*args, **named)

        monkeypatch.setattr(owner, name, faulty)


@pytest.mark.parametrize(
    ("owner", "name", "number", "match"),
    [
        (
            DiskBlock,
            "read_into",
            errno.EIO,
            r"(loading shard \d from disk \(.*\)|comparing shard \d with its home): Input/output error",
        ),
        (DiskBlock, "write", errno.ENOSPC, r"storing gradients to disk \(.*\): No space left on device"),
        (DiskScratch, "store", errno.ENOSPC, r"boundary .*disk \(.*\): No space left on device"),
        (DiskScratch, "fetch", errno.EIO, r"reading a boundary from disk \(.*\): Input/output error"),
    ],
)
def test_a_fault_at_any_moment_of_a_step_raises_and_the_next_step_works(
    owner: type, name: str, number: int, match: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    faults = Faults(monkeypatch, owner, name, OSError(number, os.strerror(number)))
    bare = build(["linear", "inplace", "linear"])
    model = offloaded(bare, tmp_path, 5, num_microbatches=2, memory=MemoryPolicy.fixed(boundary_bytes=0))
    bare(batch()).pow(2).mean().backward()
    model(batch()).pow(2).mean().backward()
    in_a_step = faults.calls
    assert in_a_step > 3
    for fatal in range(1, in_a_step + 1):
        model.zero_grad()
        faults.calls, faults.fatal = 0, fatal
        with pytest.raises(OSError, match=match) as caught:
            model(batch()).pow(2).mean().backward()
        assert caught.value.errno == number
        faults.fatal = -1
        # What the forward left in slots stays there where its backward fails before its first cell.
        assert not model._homes.busy
        assert all(map(torch.equal, bare.parameters(), model.parameters()))
    model.zero_grad()
    model(batch()).pow(2).mean().backward()
    assert at_home(model)
    assert_equal(bare, model, exact=False)


def test_a_short_read_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    model = OffloadModel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "cpu", tmp_path, num_slices=2)
    (path,) = open_files(tmp_path, "weights")
    os.truncate(path, 20_480)
    with pytest.raises(OSError, match=r"loading shard 1 from disk .*weights: the file ends after 20,480 bytes"):
        model(torch.zeros(1, 64))
