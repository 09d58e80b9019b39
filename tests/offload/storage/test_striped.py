"""A home in several directories is one home: bytes are dealt over them, and nothing else differs."""

from __future__ import annotations

import errno
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from offload import (
    DiskHome,
    HomeError,
    MemoryPolicy,
    OffloadEmbeddingBag,
    OffloadModel,
    OffloadOptimizer,
    load_checkpoint,
    save_checkpoint,
)
from offload.storage import DiskTier, Tier, open_tier, stripes, transfer
from offload.storage.buffer import PAGE_BYTES, host_buffer
from offload.storage.stripes import Stripes
from tests.offload.persistent import everything, layers, offloaded, train
from tests.offload.storage.test_tiers import MANY, TierContract

CPU = torch.device("cpu")


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> int:
    """Stripes of one page, so that small models are dealt over all directories."""
    monkeypatch.setattr(stripes, "STRIPE_BYTES", PAGE_BYTES)
    return PAGE_BYTES


def three(folder: Path) -> list[Path]:
    return [folder / name for name in "abc"]


class TestStripedTier(TierContract):
    @pytest.fixture
    def tier(self, direct_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Tier:
        monkeypatch.setattr(stripes, "STRIPE_BYTES", (1 << 20) + PAGE_BYTES)  # no divisor of the sizes of requests
        return DiskTier(three(direct_folder), CPU, direct=True)

    @pytest.mark.parametrize("nbytes", [MANY + 100])
    def test_large_blocks_are_read_bit_equal_whichever_way_they_were_written(self, tier: Tier, nbytes: int) -> None:
        super().test_large_blocks_are_read_bit_equal_whichever_way_they_were_written(tier, nbytes)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 4), st.integers(0, 200), st.integers(0, 200))
def test_every_byte_has_one_place_and_files_have_no_gaps(
    count: int, first: int, stripe: int, begin: int, nbytes: int
) -> None:
    dealt = Stripes(count, first % count, 8 * stripe)
    every = [(e.file, k + e.shift) for e in dealt.extents(0, begin + nbytes) for k in range(e.begin, e.end)]
    assert sorted(every) == [(k, at) for k in range(count) for at in range(dealt.part_bytes(begin + nbytes, k))]
    some = [(e.file, k + e.shift) for e in dealt.extents(begin, begin + nbytes) for k in range(e.begin, e.end)]
    assert some == every[begin:]
    assert all(e.shift % 8 == 0 for e in dealt.extents(begin, begin + nbytes))  # offsets within pages are kept


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_one_transfer_uses_all_disks_at_once(
    name: str, direct: bool, direct_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stripes, "STRIPE_BYTES", 1 << 20)
    tier = DiskTier(three(direct_folder), CPU, direct=direct)
    block = tier.allocate(3 << 20, "weights")
    together, original, used = threading.Barrier(3, timeout=60), getattr(os, name), set()
    memory = host_buffer(3 << 20)
    block.read_into(memory)  # and the probe of direct transfers

    def call(fd: int, buffers: list[memoryview], offset: int) -> int:
        together.wait()  # a disk alone would wait in vain
        used.add(Path(os.readlink(f"/proc/self/fd/{fd}")).parent.parent.name)
        return int(original(fd, buffers, offset))

    monkeypatch.setattr(os, name, call)
    block.read_into(memory) if name == "preadv" else block.write(memory, 0)
    assert used == {*"abc"}


def test_the_mapping_of_a_striped_block_ends_with_its_last_view(tmp_path: Path, narrow: int) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text(encoding="utf-8").count(f"{tmp_path}/")

    tier = DiskTier(three(tmp_path), CPU)
    block = tier.allocate(7 * narrow, "weights")
    view = block.part(3 * narrow, narrow).tensor.view(torch.int32)
    view.fill_(7)
    assert block.staged().view(torch.int32).count_nonzero() == view.numel() == narrow // 4
    del block
    gc.collect()
    assert mapped() == 7
    view.add_(1)
    del view
    gc.collect()
    assert mapped() == 0


def test_small_files_begin_in_different_directories(tmp_path: Path) -> None:
    tier = DiskTier(three(tmp_path), CPU)
    blocks = [tier.allocate(8192, "states") for _ in range(6)]
    sizes = [sum(path.stat().st_size for path in folder.glob("*states")) for folder in tier.folders]
    assert sizes == [len(blocks) // 3 * 8192] * 3


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for k in steps:
        optimizer.zero_grad()
        loss = model(torch.randn(8, 96, generator=torch.Generator().manual_seed(k))).square().mean()
        loss.backward()
        if not isinstance(optimizer, OffloadOptimizer):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(96, 96) for _ in range(4)))


@pytest.mark.parametrize("direct", [False, True])
def test_training_and_checkpoints_equal_those_in_one_directory(
    direct: bool, direct_folder: Path, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, gradients, moments and boundaries are all dealt."""
    monkeypatch.setattr(transfer, "DIRECT_LEAST_BYTES", narrow)

    def run(home: DiskHome, steps: range, load: bool) -> tuple[OffloadModel, list[float]]:
        memory = MemoryPolicy.fixed(boundary_bytes=0)
        model = OffloadModel(wide(), "cpu", home, 2, True, 2, memory=memory)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.1)
        if load:
            load_checkpoint(direct_folder / "saved", model, optimizer)
        losses = steps_of(model, optimizer, steps)
        optimizer.synchronize()
        save_checkpoint(direct_folder / "saved", model, optimizer)
        found.update({path: path.stat().st_size for path in direct_folder.glob("[abc]/*/0*")})
        return model, losses

    found: dict[Path, int] = {}

    one, expected = run(DiskHome(direct_folder / "one", direct=direct), range(4), False)
    first, losses = run(DiskHome(three(direct_folder), direct=direct), range(2), False)
    names = {path.name for path in found}
    assert {name.split("-")[-1] for name in names} == {"weights", "gradients", "states"}
    for name in names:
        sizes = [size for path, size in found.items() if path.name == name]
        assert len(sizes) == 3
        assert max(sizes) - min(sizes) <= narrow, name
    last, more = run(DiskHome(three(direct_folder)[:2], direct=direct), range(2, 4), True)
    assert losses + more == expected
    assert all(map(torch.equal, everything(last).values(), everything(one).values()))
    first.close()
    last.close()
    assert list(direct_folder.glob("[abc]/*")) == []


def test_boundaries_are_dealt_over_the_disks(tmp_path: Path, narrow: int) -> None:
    tier = DiskTier(three(tmp_path), CPU)
    scratch = tier.scratch()
    assert scratch is not None
    tensors = [torch.randn(size) for size in (7 * narrow // 4 + 1, 3, 5000)]
    tickets = [scratch.store(tensor) for tensor in tensors]
    assert all(torch.equal(scratch.fetch(ticket), tensor) for ticket, tensor in zip(tickets, tensors, strict=True))
    links = [(fd, os.readlink(fd)) for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
    sizes = [os.stat(fd).st_size for fd, link in links if link.startswith(f"{tmp_path}/") and "/boundaries-" in link]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) <= narrow


def test_an_embedding_table_may_be_striped(tmp_path: Path, narrow: int) -> None:
    rows = torch.tensor([[0, 700], [1500, 1999]])
    bags = []
    for home in (DiskHome(three(tmp_path)), DiskHome(tmp_path / "one")):
        torch.manual_seed(0)
        bags.append(OffloadEmbeddingBag(2000, 16, offload_device=home)(rows))
    assert torch.equal(*bags)


# --- kept -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def left(tmp_path: Path, narrow: int) -> tuple[list[Path], dict[str, Tensor]]:
    """The directories of a home that was trained on and closed, and what was in it."""
    model = offloaded(layers(width=300), three(tmp_path))
    train(model, range(2))
    model.close()
    return three(tmp_path), everything(model)


def test_a_kept_home_is_adopted_wherever_its_directories_are_now(
    left: tuple[list[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    folders, before = left
    sizes = [(folder / "weights.home").stat().st_size for folder in folders]
    assert max(sizes) - min(sizes) <= PAGE_BYTES
    moved = [folder.rename(tmp_path / f"disk-{folder.name}") for folder in folders]
    model = offloaded(layers("meta", width=300), moved, slices=2)
    assert all(torch.equal(value, before[name]) for name, value in everything(model).items())
    bare = layers(width=300)
    assert train(bare, range(4))[2:] == train(model, range(2, 4))
    model.close()
    again = offloaded(layers("meta", width=300), moved, slices=5)
    assert all(torch.equal(value, everything(bare)[name]) for name, value in everything(again).items())
    again.close()


def snapshot(folders: list[Path]) -> dict[Path, bytes]:
    return {path: path.read_bytes() for folder in folders for path in folder.glob("*.home")}


def assert_refused(folders: list[Path], match: str, meta: bool = True, **choices: bool) -> None:
    before = snapshot(folders)
    with pytest.raises(HomeError, match=match):
        offloaded(layers("meta" if meta else "cpu", width=300), folders, **choices)
    gc.collect()
    assert snapshot(folders) == before
    assert not [path for folder in folders for path in folder.iterdir() if path.is_dir()]


def test_other_directories_or_another_order_are_refused_and_told_apart(
    left: tuple[list[Path], dict[str, Tensor]], tmp_path: Path
) -> None:
    a, b, c = left[0]
    assert_refused(
        [b, a, c], r"/b/weights.home: expected directory 0 of 3,.* got directory 1 of 3,.* in the same order"
    )
    assert_refused([a, b], "/a/weights.home: expected directory 0 of 2,.* got directory 0 of 3")
    assert_refused([a], "/a/weights.home: expected a home of one directory, got directory 0 of 3")
    assert_refused([a, b, tmp_path / "d"], "/d' holds no part of a home, but the directories beside it do.*mounted")
    assert_refused([a, b, c], "a', .*b', .*c' holds a home already, and the layers have values", meta=False)
    offloaded(layers(width=300), tmp_path / "one").close()
    assert_refused(
        [tmp_path / "one", b, c], "/one/weights.home: expected directory 0 of 3,.* got a home of one directory"
    )
    offloaded(layers(width=300), [tmp_path / "x", tmp_path / "y", tmp_path / "z"]).close()
    assert_refused([a, b, tmp_path / "z"], "/z/weights.home .*the files were not written together")


def test_damage_in_any_directory_is_found_and_named(left: tuple[list[Path], dict[str, Tensor]]) -> None:
    a, b, c = left[0]
    for path, change, match in [
        (a / "weights.home", lambda whole: whole[:-1], "truncated"),
        (b / "buffers.home", lambda whole: bytes([whole[0] ^ 1]) + whole[1:], "contents do not match their checksum"),
        (c / "weights.home", lambda whole: bytes([whole[0] ^ 1]) + whole[1:], "contents do not match their checksum"),
        (c / "buffers.home", None, "expected a file, there is none"),
    ]:
        whole = path.read_bytes()
        path.unlink() if change is None else path.write_bytes(change(whole))
        assert_refused(left[0], f"/{path.parent.name}/{path.name} .*{match}")
        path.write_bytes(whole)
    offloaded(layers("meta", width=300), left[0]).close()


def test_a_directory_in_use_is_refused_in_any_company(left: tuple[list[Path], dict[str, Tensor]]) -> None:
    a, b, c = left[0]
    model = offloaded(layers("meta", width=300), left[0])
    for folders in ([a, b, c], [c.parent / "new", b], [b]):
        with pytest.raises(HomeError, match=f"/{folders[0 if folders[0] == a else -1].name}' is in use by another"):
            offloaded(layers("meta", width=300), folders)
    model.close()
    offloaded(layers("meta", width=300), left[0]).close()


def test_a_home_that_was_not_closed_is_recovered_from_all_directories(tmp_path: Path, narrow: int) -> None:
    values: dict[str, Tensor] = {}

    def lose() -> None:
        model = offloaded(layers(width=300), three(tmp_path))
        train(model, range(2))
        values.update((name, p.detach().clone()) for name, p in model.named_parameters())
        del model
        gc.collect()

    with pytest.warns(RuntimeWarning, match=r"home in '.*/a', '.*/b', '.*/c' ended without close\(\)"):
        lose()
    assert_refused(three(tmp_path), "/a/weights.home .*expected a home that was closed")
    with pytest.warns(RuntimeWarning, match="the contents of weights, buffers cannot be verified"):
        model = offloaded(layers("meta", width=300), three(tmp_path), recover=True)
    assert all(torch.equal(p, values[name]) for name, p in model.named_parameters())
    model.close()
    offloaded(layers("meta", width=300), three(tmp_path)).close()


# --- a directory that is missing or full ------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_a_full_disk_is_named_and_leaves_nothing_on_the_others(
    keep: bool, tmp_path: Path, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve: Callable[[int, int, int], None] = os.posix_fallocate

    def full(fd: int, offset: int, nbytes: int) -> None:
        if "/b/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        reserve(fd, offset, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    model = layers(width=300)
    before = everything(model)
    with pytest.raises(OSError, match=r"cannot reserve .* bytes: No space left on device: '.*/b/.*'") as caught:
        OffloadModel(model, "cpu", DiskHome(three(tmp_path), keep=keep), 3, checkpoint_activation=True)
    assert caught.value.errno == errno.ENOSPC
    assert all(torch.equal(value, before[name]) for name, value in everything(model).items())
    del caught
    gc.collect()
    assert {path.name for path in tmp_path.glob("[abc]/*")} == ({"home.lock"} if keep else set())


def test_a_disk_that_fails_in_the_middle_of_a_step_is_named(
    tmp_path: Path, narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = OffloadModel(layers(width=300), "cpu", DiskHome(three(tmp_path)), 3, checkpoint_activation=True)
    read, broken = os.preadv, [True]

    def call(fd: int, buffers: list[memoryview], offset: int) -> int:
        if broken[0] and "/b/" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", call)
    with pytest.raises(OSError, match=r"/b/.*weights: Input/output error"):
        train(model, range(1))
    broken[0] = False
    assert train(model, range(1)) == train(layers(width=300), range(1))


def test_a_second_directory_that_cannot_be_made_leaves_the_first_empty(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match=r"offload_device must be a directory.*/file'"):
        DiskTier([tmp_path / "a", tmp_path / "file"], CPU)
    assert [*(tmp_path / "a").iterdir()] == []


def test_files_of_an_ended_process_are_removed_from_all_directories(tmp_path: Path) -> None:
    tier = DiskTier(three(tmp_path), CPU)
    old = tier.folders
    tier._finalizer.detach()  # as if the process had been killed
    for lock in tier._locks:
        os.close(lock)
    DiskTier(three(tmp_path)[1:], CPU)
    assert [folder.exists() for folder in old] == [True, False, False]


def test_too_many_stripes_for_mappings_are_refused_and_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, narrow: int
) -> None:
    calls: list[tuple[int, ...]] = []
    reserve = stripes._mmap

    def call(*arguments: int) -> int | None:
        calls.append(arguments)
        return reserve(*arguments) if len(calls) == 1 else arguments[0] if len(calls) == 2 else None

    monkeypatch.setattr(stripes, "_mmap", call)
    tier = DiskTier(three(tmp_path), CPU)
    with pytest.raises(OSError, match=r"cannot map 40,000 bytes in stripes of .*raise vm.max_map_count"):
        tier.allocate(40_000, "weights")
    assert [*tmp_path.glob("*/*/*weights")] == []


# --- names ------------------------------------------------------------------------------------------------------------


def test_directories_are_checked_where_the_home_is_named(tmp_path: Path) -> None:
    assert DiskHome([tmp_path]) == DiskHome(tmp_path)
    assert DiskHome([tmp_path / "a", str(tmp_path / "b")]).directories == (tmp_path / "a", tmp_path / "b")
    assert {DiskHome([tmp_path / "a", tmp_path / "b"])}  # hashable, as it was
    (tmp_path / "link").symlink_to(tmp_path / "a")
    for directories, error, match in [
        ([], ValueError, "got none"),
        ([tmp_path, 3], TypeError, "expected a directory, got int"),
        ([tmp_path / "a", tmp_path / "link"], ValueError, "got one twice"),
    ]:
        with pytest.raises(error, match=match):
            DiskHome(directories)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="this home has 2 directories, not one path"):
        os.fspath(DiskHome([tmp_path / "a", tmp_path / "b"]))
    tier = open_tier(DiskHome([tmp_path / "a", tmp_path / "b"]), CPU)
    assert tier.name == f"disk ({tmp_path / 'a'}, {tmp_path / 'b'})"
