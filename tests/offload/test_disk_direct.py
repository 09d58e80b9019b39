"""Past the page cache, through staging buffers, and which of them when."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from offload import OffloadModel
from offload.tier import DiskTier, Tier
from offload.tier import cache as cache_module
from offload.tier.buffer import PAGE_BYTES, host_buffer
from offload.tier.cache import available_bytes
from offload.tier.crew import Crew
from offload.tier.staging import Link, Staging
from offload.tier.transfer import IN_FLIGHT, PIECE_BYTES
from tests.offload.test_tier import MANY, TierContract, noise

CPU = torch.device("cpu")


@pytest.fixture
def direct_folder(tmp_path: Path) -> Path:
    if not cache_module._direct_works(tmp_path):
        pytest.skip("needs a temporary directory on a file system with direct transfers (O_DIRECT)")
    return tmp_path


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
    def test_whole_pages_go_past_the_page_cache_and_the_rest_does_not(
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

    def test_small_transfers_are_left_to_the_page_cache(self, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
        block = tier.allocate(MANY, "weights")
        calls = Calls(monkeypatch)
        block.write(noise(4096, 0), 4096)
        assert calls.bytes_moved(direct=True) == 0

    def test_a_file_that_was_cut_is_an_error_and_not_zeros(self, tier: Tier, tmp_path: Path) -> None:
        block = tier.allocate(MANY, "weights")
        os.truncate(next(tmp_path.glob("*/*weights")), PIECE_BYTES + 5000)
        with pytest.raises(OSError, match=rf"weights: the file ends after {PIECE_BYTES + 5000:,} bytes, expected"):
            block.read_into(host_buffer(MANY))

    @pytest.mark.parametrize(("name", "number"), [("preadv", errno.EIO), ("pwritev", errno.ENOSPC)])
    def test_a_fault_names_the_file_and_leaves_nothing_going_on(
        self, tier: Tier, name: str, number: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        block, memory = tier.allocate(8 * PIECE_BYTES, "shard3-weights"), host_buffer(8 * PIECE_BYTES + 64)[64:]
        block.read_into(memory)
        calls = Calls(monkeypatch)

        def fault(call: str, direct: bool, offset: int) -> None:
            if offset == PIECE_BYTES:
                raise OSError(number, os.strerror(number))

        calls.fault = fault
        with pytest.raises(OSError, match=rf"shard3-weights: {os.strerror(number)}") as caught:
            block.read_into(memory) if name == "preadv" else block.write(memory, 0)
        assert caught.value.errno == number
        assert len(calls.log) <= 1 + IN_FLIGHT  # what was on its way ended; nothing more was begun
        assert tier.transfers.staging.nbytes > 0  # type: ignore[attr-defined] - and its buffers are free
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

    def test_what_the_user_writes_between_steps_is_streamed(self, direct_folder: Path) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(700, 700) for _ in range(3)]
        bare = nn.Sequential(*layers)
        model = OffloadModel(
            [nn.Linear(700, 700) for _ in layers], "cpu", f"{direct_folder}/", checkpoint_activation=True
        )
        model._tier.transfers.cache._wanted = True  # type: ignore[attr-defined]
        model.load_state_dict(bare.state_dict())
        ours, plain = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, bare))
        for k in range(3):
            x = torch.randn(4, 700, generator=torch.Generator().manual_seed(k))
            for m, optimizer in ((model, ours), (bare, plain)):
                optimizer.zero_grad()
                m(x).square().mean().backward()
                optimizer.step()
        for p, q in zip(model.parameters(), bare.parameters(), strict=True):
            assert torch.equal(p, q)


class LateLink(Link):
    """A device that copies late: only when somebody waits, in order, as a stream would. Every block is far from it."""

    def __init__(self) -> None:
        self.pending: list[Callable[[], None]] = []
        self.prepared = 0
        self.lock = threading.Lock()

    def is_far(self, tensor: torch.Tensor) -> bool:
        return True

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

    def finish(self) -> None:
        while self.pending:
            self.pending.pop(0)()


class TestStagedTier(TierContract):
    """Disk -> staging -> device, with a device that is the CPU and copies late."""

    @pytest.fixture(params=[False, True], ids=["page cache", "direct"])
    def tier(self, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
        if request.param:
            request.getfixturevalue("direct_folder")
        from offload.tier.disk import DiskBlock

        link = LateLink()
        tier = DiskTier(tmp_path, CPU, direct=request.param, link=link)
        read = DiskBlock.read_into

        def read_and_wait(self: DiskBlock, destination: torch.Tensor, offset: int = 0) -> None:
            read(self, destination, offset)
            link.finish()  # what the lane does before it says that a copy has arrived

        monkeypatch.setattr(DiskBlock, "read_into", read_and_wait)
        return tier

    def test_what_is_page_locked_is_a_few_pieces_and_not_a_model(self, tier: DiskTier) -> None:
        blocks = [tier.allocate(6 * PIECE_BYTES, "weights") for _ in range(3)]
        slot = host_buffer(6 * PIECE_BYTES)
        for k, block in enumerate(blocks):
            block.write(noise(MANY, k), 0)
            block.read_into(slot)
            assert torch.equal(slot[:MANY], noise(MANY, k))
        assert tier.transfers.staging.link.prepared <= IN_FLIGHT  # type: ignore[attr-defined]
        assert tier.transfers.staging.nbytes <= IN_FLIGHT * PIECE_BYTES


def test_a_buffer_is_used_again_only_after_the_copy_out_of_it() -> None:
    """And a staging area that forgets the fence is seen: the device gets the next piece twice."""
    link = LateLink()
    staging = Staging(link, 1, 16)
    device = torch.zeros(16, dtype=torch.uint8)
    buffer = staging.take(wait=True)
    assert buffer is not None
    buffer.fill_(1)
    staging.give(buffer, link.copy(device, buffer))
    assert not device.any()  # it is late
    again = staging.take(wait=True)
    assert again is not None
    again.fill_(2)
    link.finish()
    assert (device == 1).all()


def test_a_lane_that_holds_a_buffer_never_waits_for_another() -> None:
    staging = Staging(LateLink(), 1, 16)
    held = staging.take(wait=True)
    assert staging.take(wait=False) is None
    assert held is not None
    staging.give(held)
    assert staging.take(wait=False) is held


def test_lanes_that_share_too_few_buffers_all_get_through(direct_folder: Path) -> None:
    link = LateLink()
    tier = DiskTier(direct_folder, CPU, direct=True, link=link)
    block = tier.allocate(8 * PIECE_BYTES, "weights")
    block.tensor.copy_(torch.arange(8 * PIECE_BYTES) // PIECE_BYTES)
    slots = [host_buffer(8 * PIECE_BYTES) for _ in range(4)]
    lanes = [threading.Thread(target=block.read_into, args=(slot,)) for slot in slots]
    for lane in lanes:
        lane.start()
    for lane in lanes:
        lane.join(60)
        assert not lane.is_alive()
    link.finish()
    assert all(torch.equal(slot, block.tensor) for slot in slots)


def test_a_job_that_no_thread_takes_is_done_by_whoever_waits_for_it() -> None:
    crew = Crew(1)
    gate, started, done = threading.Event(), threading.Event(), []
    blocker = crew.give(lambda: (started.set(), gate.wait(60), None)[2])
    started.wait(60)
    crew.give(lambda: done.append(threading.get_ident())).finish()
    assert done == [threading.get_ident()]
    gate.set()
    blocker.finish()


def test_an_error_of_a_job_is_raised_where_it_is_waited_for() -> None:
    def fail() -> None:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        Crew(1).give(fail).finish()


# --- which way ------------------------------------------------------------------------------------------------------


def test_files_go_past_the_page_cache_once_they_are_too_large_for_it(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "available_bytes", lambda: 2_000_000)
    tier = DiskTier(direct_folder, CPU)
    first = tier.allocate(3_000_000, "weights")
    assert not tier.transfers.cache.direct
    second = tier.allocate(1, "weights")
    assert tier.transfers.cache.direct
    assert first is not second
    del first
    gc.collect()
    assert not tier.transfers.cache.direct


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
        assert torch.equal(block.staged(), noise(MANY, k))
    assert len(asked) == 1  # the tier asks once


def test_a_file_system_whose_mappings_do_not_see_direct_writes_gets_the_page_cache(
    direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: len(buffers[0]))
    assert not cache_module._direct_works(direct_folder)
    assert list(direct_folder.iterdir()) == []


def test_available_memory_is_what_the_control_groups_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_control_groups", lambda: [(1000, 900, 50), (800, 700, 20)])
    assert available_bytes() == 120
    monkeypatch.undo()
    assert available_bytes() > 0
    assert all(limit > 0 and usage >= 0 <= cached for limit, usage, cached in cache_module._control_groups())


# --- host buffers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [0, 1, 4097, 1_000_003, 5 << 20])
def test_a_host_buffer_is_zero_on_a_page_and_has_exactly_its_bytes(nbytes: int) -> None:
    buffer = host_buffer(nbytes)
    assert buffer.numel() == buffer.untyped_storage().nbytes() == nbytes
    assert not nbytes or buffer.data_ptr() % PAGE_BYTES == 0
    assert not buffer.any()


def test_a_host_buffer_goes_with_the_last_view_of_it() -> None:
    def mapped() -> int:
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0]) * os.sysconf("SC_PAGESIZE")

    nbytes = 1 << 30
    before = mapped()
    view = host_buffer(nbytes)[64:128].view(torch.float32)
    assert mapped() >= before + nbytes
    del view
    gc.collect()
    assert mapped() < before + nbytes


def test_slots_on_the_cpu_begin_on_a_page(tmp_path: Path) -> None:
    """So that a file is read into them without a copy."""
    model = OffloadModel([nn.Linear(30, 30), nn.Linear(30, 30)], "cpu", f"{tmp_path}/")
    model(torch.zeros(1, 30))
    slots = {parameter.untyped_storage().data_ptr() for parameter in (shard.slot for shard in _loaded(model))}
    assert slots
    assert all(address % PAGE_BYTES == 0 for address in slots)


def _loaded(model: OffloadModel) -> list[object]:
    return [shard for shard in model._walk.shards if shard._slot is not None]


# --- a device -------------------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("direct", [False, True])
def test_disk_to_staging_to_a_cuda_device(tmp_path: Path, direct: bool) -> None:
    """The twin of TestStagedTier."""
    device = torch.device("cuda", torch.cuda.current_device())
    tier = DiskTier(tmp_path, device, direct=direct)
    block = tier.allocate(6 * PIECE_BYTES + 100, "weights")
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


@pytest.mark.parametrize("locks", [True, False])
def test_buffers_are_page_locked_once_and_a_refusal_is_a_warning(monkeypatch: pytest.MonkeyPatch, locks: bool) -> None:
    from offload.tier.staging import CudaLink

    log: list[tuple[str, int]] = []

    class Runtime:
        def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
            log.append(("lock", nbytes))
            return 0 if locks else 2

        def cudaHostUnregister(self, address: int) -> int:
            log.append(("unlock", address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Runtime())
    buffer = host_buffer(PIECE_BYTES)
    if locks:
        CudaLink().prepare(buffer)
    else:
        with pytest.warns(RuntimeWarning, match="staging between disk and device: cannot page-lock 8,388,608 bytes"):
            CudaLink().prepare(buffer)
    assert log == [("lock", PIECE_BYTES)]
    address = buffer.data_ptr()
    del buffer
    gc.collect()
    assert log[1:] == ([("unlock", address)] if locks else [])
