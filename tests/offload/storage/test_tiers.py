"""Every tier keeps the same contract."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offload.storage import DiskTier, HostTier, Tier
from offload.storage.buffer import host_buffer
from tests.offload.open_files import open_files
from tests.programs import run_program

CPU = torch.device("cpu")


#: In these tests transfers are cut into smaller pieces: by ``small_pieces`` of ``conftest``.
UNSTAGED, STAGED = 1 << 20, 1 << 19
#: Larger than a few pieces of a transfer, and no multiple of one.
MANY = UNSTAGED + STAGED + 5 * 4096  # several pieces either way
#: No multiple of a page.
SIZE = MANY + 100


NOISE = torch.randint(0, 256, (2 * MANY,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def noise(nbytes: int, seed: int) -> torch.Tensor:
    """Other bytes for each seed."""
    return NOISE[seed * 1009 : seed * 1009 + nbytes].clone()


class TierContract:
    """What the engine relies on; each tier inherits these tests."""

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        raise NotImplementedError

    @settings(
        max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.differing_executors]
    )
    @given(
        moves=st.lists(
            st.tuples(
                st.sampled_from(["write", "assign", "read"]),
                st.sampled_from([0, 1, MANY - 1]) | st.integers(0, SIZE - 1),
                st.sampled_from([1, 64, 4096, 300_000, 700_000, SIZE]),
                st.booleans(),
            ),
            max_size=8,
        )
    )
    def test_any_ranges_at_any_offsets_and_addresses(self, tier: Tier, moves: list[tuple[str, int, int, bool]]) -> None:
        """Each way sees what the other one wrote."""
        block, model = tier.allocate(SIZE, "weights"), torch.zeros(SIZE, dtype=torch.uint8)
        for k, (kind, offset, size, on_a_page) in enumerate(moves):
            offset = offset // 4096 * 4096 if on_a_page else offset
            size = min(size, SIZE - offset)
            memory = host_buffer(size + 64)[0 if on_a_page else 64 :][:size]
            if kind == "read":
                block.read_into(memory, offset)
                assert torch.equal(memory, model[offset : offset + size])
                continue
            memory.copy_(noise(size, k))
            model[offset : offset + size] = memory
            if kind == "write":
                block.write(memory, offset)
            else:
                block.tensor[offset : offset + size] = memory
        memory = host_buffer(SIZE)
        block.read_into(memory)
        assert torch.equal(memory, model)
        assert torch.equal(block.tensor, model)

    def test_a_block_outlives_its_tier(self, tier: Tier) -> None:
        block = tier.allocate(100, "weights")
        block.tensor.fill_(3)
        tier.close()
        slot = torch.empty(100, dtype=torch.uint8)
        block.read_into(slot)
        assert (slot == 3).all()


class TestHostTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return HostTier(CPU)


class TestDiskTier(TierContract):
    @pytest.fixture
    def tier(self, tmp_path: Path) -> Tier:
        return DiskTier(tmp_path, CPU)

    def test_scratch_returns_what_was_stored(self, tier: Tier) -> None:
        scratch = tier.scratch()
        assert scratch is not None
        tensors = [
            torch.randn(3, 5),
            torch.arange(4),
            torch.tensor([True, False]),
            torch.tensor(2.5),
            torch.empty(0, 3),
            torch.randn(2, 3, dtype=torch.complex64).conj(),
            torch.randn(4, 6).t(),
            torch.randn(4, 6)[:, ::2],
            torch.randn(1, 3).expand(4, 3),
            torch.randn(2, 3, dtype=torch.bfloat16),
        ]
        stored = [scratch.store(tensor) for tensor in tensors]
        for tensor, read_back in zip(tensors, stored, strict=True):
            back = torch.empty_like(tensor).resolve_conj()
            read_back(back)
            assert torch.equal(back, tensor)

    def test_files_have_no_names_and_end_with_their_blocks(self, tmp_path: Path) -> None:
        tier = DiskTier(tmp_path, CPU)
        block = tier.allocate(100, "weights")
        part, tensor = block.part(0, 8), block.tensor.fill_(3)
        assert list(tmp_path.iterdir()) == []
        assert len(open_files(tmp_path)) == 1
        tier.close()
        del tier, block
        part.read_into(torch.empty(8, dtype=torch.uint8))
        del part
        assert open_files(tmp_path) == []
        assert (tensor == 3).all()

    def test_more_blocks_than_the_usual_limit_of_open_files(self, tmp_path: Path) -> None:
        code = (
            "import resource, sys, torch\n"
            "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 512))\n"
            "from offload.storage import DiskTier\n"
            "tier = DiskTier(sys.argv[1], torch.device('cpu'))\n"
            "blocks = [tier.allocate(8, 'weights') for _ in range(300)]"
        )
        ended = run_program(code, tmp_path)
        assert ended.status == 0, ended.errors


def test_a_directory_that_is_memory_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.storage.disk.file_system", lambda path: "tmpfs")
    with pytest.warns(RuntimeWarning, match=r"is memory \(tmpfs\)"):
        DiskTier(tmp_path, CPU)
