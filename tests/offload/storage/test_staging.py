"""Between a file and a device: a few buffers, and a device on the CPU that copies late."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.storage import DiskTier, Tier
from offload.storage.buffer import host_buffer, on_own_storage
from offload.storage.transfer import IN_FLIGHT, Copy, Link
from tests.offload.storage.test_tiers import MANY, STAGED, TierContract, noise

CPU = torch.device("cpu")


class LateLink(Link):
    """A device that copies late: only when it is waited for, in order, as a stream does. No block is on the device."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.prepared = 0
        self.lock = threading.Lock()

    def copier(self, tensor: torch.Tensor) -> Copy:
        return self.copy

    def prepare(self, buffer: torch.Tensor) -> None:
        self.prepared += 1

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
        def run() -> None:
            destination.copy_(source)

        self.pending.append(run)

        def fence() -> None:
            with self.lock:
                while run in self.pending:
                    self.pending.pop(0)()

        return fence

    def synchronize(self) -> None:
        while self.pending:
            self.pending.pop(0)()


class TestStagedTier(TierContract):
    """Disk -> staging -> device, with a device that is the CPU and copies late."""

    @pytest.fixture(params=[False, True], ids=["page cache", "direct"])
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
        if request.param:
            request.getfixturevalue("direct_folder")
        from offload.storage.disk import DiskBlock

        link = LateLink()
        tier = DiskTier(tmp_path, CPU, direct=request.param, link=link)
        read = DiskBlock.read_into

        def read_and_wait(self: DiskBlock, destination: torch.Tensor, offset: int = 0) -> None:
            read(self, destination, offset)
            link.synchronize()  # what the lane does before it says that a copy has arrived

        monkeypatch.setattr(DiskBlock, "read_into", read_and_wait)
        return tier

    def test_what_is_page_locked_is_a_few_pieces_and_not_a_model(self, tier: DiskTier) -> None:
        blocks = [tier.allocate(6 * STAGED, "weights") for _ in range(3)]
        slot = host_buffer(6 * STAGED)
        for k, block in enumerate(blocks):
            block.write(noise(MANY, k), 0)
            block.read_into(slot)
            assert torch.equal(slot[:MANY], noise(MANY, k))
        assert tier.transfers.staging.link.prepared <= IN_FLIGHT  # type: ignore[attr-defined]
        assert tier.transfers.staging.nbytes <= IN_FLIGHT * STAGED


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("direct", [False, True])
def test_disk_to_staging_to_a_cuda_device(tmp_path: Path, direct: bool) -> None:
    """The twin of TestStagedTier."""
    device = torch.device("cuda", torch.cuda.current_device())
    tier = DiskTier(tmp_path, device, direct=direct)
    block = tier.allocate(6 * STAGED + 100, "weights")
    stream = torch.cuda.Stream(device)
    for k in range(4):
        source = torch.cat([noise(MANY, k), noise(block.nbytes - MANY, k + 7)])
        slot = torch.zeros(block.nbytes, dtype=torch.uint8, device=device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # the copies run late, and buffers are still used again in order
            block.write(source.to(device, non_blocking=True), 0)
            torch.cuda._sleep(20_000_000)
            block.read_into(slot)
        stream.synchronize()
        assert torch.equal(slot.cpu(), source)
        assert torch.equal(block.tensor, source)


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The contexts of CUDA devices that are open, the last one of the current device."""
    entered: list[object] = []

    @contextlib.contextmanager
    def device(each: object) -> Iterator[None]:
        entered.append(each)
        yield
        entered.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    return entered


def test_memory_of_a_device_is_exchanged_while_that_is_the_current_one(
    monkeypatch: pytest.MonkeyPatch, current: list[object]
) -> None:
    """Torch refuses it otherwise."""
    monkeypatch.setattr("offload.storage.buffer.from_dlpack", lambda tensor: current[-1])
    there: Any = SimpleNamespace(device=torch.device("cuda", 1))
    assert on_own_storage(there) == there.device


@pytest.mark.parametrize("locks", [True, False])
def test_buffers_are_page_locked_once_and_a_refusal_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, current: list[object], locks: bool
) -> None:
    """By a thread whose current device may be another one, which gets no context."""
    from offload.storage.transfer import CudaLink

    log: list[tuple[str, int]] = []
    device = torch.device("cuda", 1)

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            assert current == [device]
            log.append(("lock", nbytes))
            return 0 if locks else 2

        def cudaHostUnregister(self, address: int) -> int:
            assert current == [device]
            log.append(("unlock", address))
            return 0

    def raises(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime())
    monkeypatch.setattr(torch, "ones", raises)  # the driver tells its last error again
    buffer = host_buffer(STAGED)
    if locks:
        CudaLink(device).prepare(buffer)
    else:
        with pytest.warns(RuntimeWarning, match="staging between disk and device: cannot page-lock 524,288 bytes"):
            CudaLink(device).prepare(buffer)
    assert log == [("lock", STAGED)]
    address = buffer.data_ptr()
    del buffer
    gc.collect()
    assert log[1:] == ([("unlock", address)] if locks else [])
