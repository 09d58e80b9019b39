"""Past the page cache, through staging buffers, and which of them when."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from offload import OffloadModel, OffloadOptimizer
from offload.storage import DiskTier, Tier
from offload.storage import page_cache as cache_module
from offload.storage.buffer import PAGE_BYTES, host_buffer
from offload.storage.page_cache import CACHE_HOLDS
from offload.storage.transfer import IN_FLIGHT
from tests.offload.side_by_side import assert_equal, drawn, train
from tests.offload.storage.test_tiers import MANY, STAGED, TierContract, noise

CPU = torch.device("cpu")


class Calls:
    """What is asked of the system: (call, whether past the page cache, bytes, offset)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, bool, int, int]] = []
        self.fault: Callable[[str, bool, int], int | None] = lambda call, direct, offset: None
        for name in ("preadv", "pwritev"):
            monkeypatch.setattr(os, name, self._watched(name, getattr(os, name)))

    def _watched(self, name: str, original: Callable[..., int]) -> Callable[..., int]:
        import fcntl

        def call(fd: int, buffers: list[memoryview], offset: int) -> int:
            direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            self.log.append((name, direct, len(buffers[0]), offset))
            short = self.fault(name, direct, offset)
            return original(fd, [buffers[0][:short]], offset)

        return call

    def bytes_moved(self, *, direct: bool) -> int:
        return sum(nbytes for _, past, nbytes, _ in self.log if past is direct)


class TestDirectTier(TierContract):
    @pytest.fixture
    def tier(self, direct_folder: Path) -> Tier:
        return DiskTier(direct_folder, CPU, direct=True)

    @pytest.mark.parametrize("shift", [0, 64])
    def test_whole_pages_bypass_the_page_cache_and_the_remainder_does_not(
        self, tier: Tier, shift: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        block = tier.allocate(MANY, "weights")
        memory = host_buffer(MANY + shift)[shift:]
        block.read_into(memory)
        calls = Calls(monkeypatch)
        block.read_into(memory)
        assert calls.bytes_moved(direct=True) == MANY
        assert calls.bytes_moved(direct=False) == 0
        calls.log.clear()
        block.write(memory[100:-100], 100)
        assert calls.bytes_moved(direct=True) == MANY - 2 * PAGE_BYTES
        assert calls.bytes_moved(direct=False) == 2 * (PAGE_BYTES - 100)

    @pytest.mark.parametrize(("name", "number"), [("preadv", errno.EIO), ("pwritev", errno.ENOSPC)])
    def test_a_fault_names_the_file_and_leaves_nothing_going_on(
        self, tier: Tier, name: str, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        block, memory = (tier.allocate(8 * STAGED, "shard3-weights"), host_buffer(8 * STAGED + 64)[64:])
        block.read_into(memory)
        calls = Calls(monkeypatch)

        begun: list[int] = []

        def fault(call: str, direct: bool, offset: int) -> None:
            if offset == STAGED:
                begun.append(len(calls.log))
                raise OSError(number, os.strerror(number))

        calls.fault = fault
        with pytest.raises(OSError, match=rf"shard3-weights: {os.strerror(number)}") as caught:
            block.read_into(memory) if name == "preadv" else block.write(memory, 0)
        assert caught.value.errno == number
        assert len(calls.log) <= begun[0] + IN_FLIGHT  # what was on its way ended; nothing more was begun
        assert tier.transfers.staging.nbytes > 0  # type: ignore[attr-defined]  # and its buffers are free
        calls.fault = lambda *_: None
        block.write(noise(8, 1), 0)
        block.read_into(memory)
        assert torch.equal(memory, block.tensor)

    def test_a_call_that_moves_less_than_it_should_is_continued(
        self, tier: Tier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        block = tier.allocate(MANY, "weights")
        block.tensor.copy_(noise(MANY, 1))
        block.read_into(host_buffer(MANY))
        calls = Calls(monkeypatch)
        calls.fault = lambda call, direct, offset: 4096 if direct else 1000
        slot = host_buffer(MANY)
        block.read_into(slot)
        assert torch.equal(slot, block.tensor)
        assert calls.bytes_moved(direct=True) == MANY
        assert sum(not direct for _, direct, _, _ in calls.log) > 3


# --- which way ------------------------------------------------------------------------------------------------------


def test_states_that_switch_between_cached_and_direct_transfers_keep_their_values(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a step passes once, always in the same order, is served worst by a cache that drops the oldest first."""
    available = [1000]
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Linear(700, 700, bias=False) for _ in range(3)))
    nbytes = 700 * 700 * 4
    monkeypatch.setattr(cache_module, "available_bytes", lambda: available[0])
    monkeypatch.setattr(cache_module, "RECHECK_BYTES", 1)
    layers = [nn.Linear(700, 700, bias=False) for _ in range(3)]
    model = OffloadModel(layers, "cpu", direct_folder, checkpoint_activation=True, num_slices=3)
    model.load_state_dict(bare.state_dict())
    ours = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, momentum=0.9)
    plain = torch.optim.SGD(bare.parameters(), lr=0.1, momentum=0.9)
    calls, ways = Calls(monkeypatch), []
    for k, fitting in enumerate((9, 6, 8, 0, 7, 9)):
        calls.log.clear()
        available[0] = int((fitting + 0.5) * nbytes / CACHE_HOLDS)
        assert train(model, ours, [drawn(k, 4, 700)]) == train(bare, plain, [drawn(k, 4, 700)])
        ours.synchronize()
        ways.append(calls.bytes_moved(direct=True) > 0)
    assert ways == [False, True, True, True, True, False]
    assert_equal(bare, model)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
def test_a_file_system_that_refuses_direct_transfers_gets_the_page_cache(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, original = [], os.open

    def refusing(path: object, flags: int, *more: object, **named: object) -> int:
        if flags & os.O_DIRECT:
            asked.append(path)
            raise OSError(number, os.strerror(number))
        return original(path, flags, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", refusing)
    tier = DiskTier(tmp_path, CPU, direct=True)
    for k in range(3):
        block = tier.allocate(MANY, "weights")
        block.write(noise(MANY, k), 0)
        slot = host_buffer(MANY)
        block.read_into(slot)
        assert torch.equal(slot, noise(MANY, k))
    assert len(asked) == 1  # the tier asks once
