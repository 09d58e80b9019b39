"""Free memory is kept for the next layer, but not for ever."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

import offload.streaming.gradient_offload
import offload.streaming.heap
from offload import OffloadModel
from offload.storage import Block
from offload.streaming.heap import Heap, anonymous_bytes
from tests.offload.zoo import WIDTH, build
from tests.programs import run_program

MIB = 1 << 20


def test_freed_memory_is_given_back_only_when_the_process_has_outgrown_what_it_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held, returned = [0], []

    def give_back() -> None:
        returned.append(held[0])
        held[0] = 300

    monkeypatch.setattr(offload.streaming.heap, "anonymous_bytes", lambda: held[0])
    monkeypatch.setattr(offload.streaming.heap, "return_freed_memory", give_back)
    monkeypatch.setattr(offload.streaming.heap, "KEEP_BYTES", 100)
    heap = Heap()
    for held[0] in (200, 300, 150, 250, 251, 400, 401):
        heap.trim_if_grown()
    # 300 is 100 more than 200; 251 is more than 100 more than 150; what is needed from then on is 300.
    assert returned == [251, 401]
    monkeypatch.setattr(offload.streaming.heap, "KEEP_BYTES", None)
    held[0] = 10**9
    heap.trim_if_grown()
    assert returned == [251, 401]


def test_what_the_process_takes_besides_the_model_is_told_apart_from_what_the_model_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0]
    monkeypatch.setattr(offload.streaming.heap, "anonymous_bytes", lambda: now[0])
    monkeypatch.setattr(offload.streaming.heap, "return_freed_memory", lambda: None)
    heap = Heap()
    now[0] = 100 + 20
    heap.measure_others_before(20)
    assert (heap.held(), heap.others_grown) == (None, 0)  # steps before the first plan are not bounded
    now[0] = 106 + 50
    heap.measure_others_before(50)  # only once
    heap.measure_others(50)
    assert (heap.held(), heap.others_grown) == (50, 6)
    now[0] = 90
    heap.measure_others(0)
    assert heap.others_grown == 0


@pytest.mark.parametrize("says", [True, False])
def test_gaps_between_blocks_are_the_models_as_far_as_a_plan_leaves_room_for_them(
    says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``says``: whether the allocator tells what it has given out; else gaps look like memory of other code."""
    given, gaps = [1000 * MIB], [7 * MIB]
    heap = offload.streaming.heap
    monkeypatch.setattr(heap, "anonymous_bytes", lambda: given[0] + gaps[0])
    monkeypatch.setattr(heap, "return_freed_memory", lambda: None)
    monkeypatch.setattr(heap, "_allocated_bytes", lambda: given[0] if says else None)
    bound = Heap()
    bound.measure_others_before(0)
    given[0] += (20 + 5) * MIB  # of the model and of other code
    gaps[0] += 3 * MIB
    bound.measure_others(20 * MIB, 4 * MIB)
    assert bound.gaps_bytes == 3 * MIB * says
    assert (bound.held(), bound.others_grown) == ((23 * MIB, 5 * MIB) if says else (20 * MIB, 8 * MIB))
    gaps[0] += 9 * MIB
    bound.measure_others(20 * MIB, 4 * MIB)
    assert bound.gaps_bytes == 4 * MIB * says
    assert bound.held() == (20 + 4 * says) * MIB


@pytest.mark.parametrize("says", [True, False])
def test_free_memory_is_returned_before_a_cell_that_could_exceed_the_limit_with_it(
    says: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``says``: whether the allocator tells what it has given out; else that is predicted."""
    others, used, free, returned = 1000 * MIB, [40 * MIB], [30 * MIB], []

    def give_back() -> None:
        returned.append(free[0])
        free[0] = 0

    heap = offload.streaming.heap
    monkeypatch.setattr(heap, "anonymous_bytes", lambda: others + used[0] + free[0])
    monkeypatch.setattr(heap, "return_freed_memory", give_back)
    monkeypatch.setattr(heap, "_allocated_bytes", lambda: used[0] if says else None)
    bound = Heap()
    bound.make_room(40 * MIB, 100 * MIB, 90 * MIB)
    assert not returned  # nothing is measured yet
    bound.measure_others(40 * MIB)
    assert returned.pop() == 30 * MIB
    assert bound.held() == 40 * MIB
    used[0], free[0] = 50 * MIB, 20 * MIB
    bound.make_room(50 * MIB, 20 * MIB, 90 * MIB)
    assert not returned  # it fits beside what is free
    bound.make_room(50 * MIB, 21 * MIB, 90 * MIB)
    assert returned.pop() == 20 * MIB
    bound.make_room(50 * MIB, 41 * MIB, 90 * MIB)
    assert not returned  # nothing is free


_STEPS = """
import sys, threading
import torch
from torch import nn
from offload import OffloadModel, OffloadOptimizer
from offload.streaming.heap import anonymous_bytes

torch.set_num_threads(1)
small = nn.Linear(8, 8)  # loads the libraries that a step needs
small(torch.randn(2, 8)).sum().backward()
torch.optim.AdamW(small.parameters()).step()

peak, ended = 0, threading.Event()
def sample():
    global peak
    while not ended.wait(0.0005):
        peak = max(peak, anonymous_bytes())
sampler = threading.Thread(target=sample)
sampler.start()

start = anonymous_bytes()
layers = nn.Sequential(*(nn.Linear(1024, 1024, device="meta") for _ in range(64)))
model = OffloadModel(layers, "cpu", sys.argv[1], memory=sys.argv[2])
optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=1e-4)
for _ in range(2):
    model(torch.randn(16, 1024)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
optimizer.synchronize()
ended.set()
sampler.join()
print(peak - start)
"""


@pytest.mark.xfail(reason="memory= does not count all that updates on disk take")
def test_with_an_optimizer_on_disk_the_process_grows_by_no_more_than_the_budget(tmp_path: Path) -> None:
    """Gradients of four MiB each are freed between smaller blocks, and 256 MiB of them are made in a step."""
    if not anonymous_bytes():
        pytest.skip("needs a system with /proc")
    ended = run_program(_STEPS, f"{tmp_path}/", "32MiB")
    assert ended.status == 0, ended.errors
    assert int(ended.output) < 1.03 * (32 << 20) + (8 << 20)


_BLOCKS = """
import gc, torch
from offload.streaming.heap import Heap, anonymous_bytes

def kept_of_31_mib() -> int:
    blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(32)]
    del blocks[:-1]  # below a block that lives
    kept = anonymous_bytes()
    blocks.clear()
    return (kept - before) >> 20

heaps = [Heap(), Heap()]
before = anonymous_bytes()
kept = []
for first, second in ((True, False), (True, True), (False, True), (False, False), (True, False)):
    heaps[0].return_at_once(first), heaps[1].return_at_once(second)
    kept.append(kept_of_31_mib())
heaps.clear()
gc.collect()  # with its last model, what it wanted ends
kept.append(kept_of_31_mib())
print(*kept)
"""


def test_large_blocks_are_returned_at_once_as_long_as_any_model_wants_that() -> None:
    if not anonymous_bytes() or offload.streaming.heap._mallinfo() is None:
        pytest.skip("needs a system with /proc and glibc")
    ended = run_program(_BLOCKS)
    assert ended.status == 0, ended.errors
    first, both, second, neither, first_again, after_both_died = map(int, ended.output.split())
    assert max(first, both, second) < 8
    assert neither > 24
    assert first_again > 24  # gaps that are there already are used
    assert after_both_died > 24


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "33554432"), ("GLIBC_TUNABLES", "glibc.malloc.trim_threshold=67108864")],
)
def test_when_blocks_are_returned_stays_as_the_environment_sets_it(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed: list[tuple[int, int]] = []

    class Library:
        @staticmethod
        def mallopt(parameter: int, value: int) -> None:
            changed.append((parameter, value))

    monkeypatch.setattr("offload.streaming.heap.ctypes.CDLL", lambda _: Library)
    monkeypatch.setattr("offload.streaming.heap._mallinfo", lambda: object())
    monkeypatch.setattr("offload.streaming.heap._returning", set())
    for setting in offload.streaming.heap._SETTINGS:
        monkeypatch.delenv(setting, raising=False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.tcache_count=7")
    heap = Heap()
    heap.return_at_once(True)
    heap.return_at_once(False)
    assert len(changed) == 3
    monkeypatch.setenv(name, value)
    heap.return_at_once(True)
    heap.return_at_once(False)
    assert len(changed) == 3


def test_anonymous_memory_counts_what_is_written_to_and_not_what_a_file_backs(tmp_path: Path) -> None:
    before = anonymous_bytes()
    if not before:
        pytest.skip("needs a system with /proc")
    path = tmp_path / "file"
    path.touch()
    os.truncate(path, 64 << 20)
    mapped = torch.from_file(str(path), shared=True, size=64 << 20, dtype=torch.uint8)
    mapped.fill_(1)
    assert anonymous_bytes() - before < 16 << 20
    ours = torch.ones(64 << 20, dtype=torch.uint8)
    assert anonymous_bytes() - before > 48 << 20
    del ours


def test_a_gradient_is_freed_as_soon_as_it_is_offloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = offload.streaming.gradient_offload._store
    alive: list[int] = []
    earlier: list[weakref.ref[torch.UntypedStorage]] = []

    def watched(block: Block, offset: int, gradient: torch.Tensor) -> Iterable[torch.Tensor]:
        alive.append(sum(storage() is not None for storage in earlier))
        earlier.append(weakref.ref(gradient.untyped_storage()))
        return store(block, offset, gradient)

    monkeypatch.setattr(offload.streaming.gradient_offload, "_store", watched)
    model = OffloadModel(build(["linear", "linear"]), "cpu", f"{tmp_path}/", num_slices=1, checkpoint_activation=False)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert alive == [0] * 8
