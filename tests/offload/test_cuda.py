"""What only a CUDA device can show: streams that run late, page-locked homes, device bytes, no host wait in the loop.

Each test names its twin, which makes the same claim on any machine.
"""

from __future__ import annotations

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.engine.engine import Engine
from offload.engine.visit import _Enter
from offload.streaming.lane import Arrival, StreamCopyLane
from tests.offload.blocks.towers import loss_of, make, words
from tests.offload.side_by_side import close
from tests.offload.zoo import WIDTH, build

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

CYCLES = 20_000_000  # some ten milliseconds of a device's clock: much longer than any copy or kernel here
ROOT = Path(__file__).parents[2]


def train(model: nn.Module, steps: int = 3) -> list[Tensor]:
    """Losses, and the final parameters on the host."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        loss = model(x).pow(2).mean()
        loss.backward()
        losses.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().cpu().clone() for p in model.parameters())]


def assert_trains_alike(home: str, *, recompute: bool = True, boundary_bytes: int | None = None) -> None:
    bare = build(["linear", "dropout", "linear"])
    model = OffloadModel(
        copy.deepcopy(bare),
        "cuda",
        home,
        num_slices=4,
        checkpoint_activation=recompute,
        memory=MemoryPolicy.fixed(boundary_bytes=boundary_bytes if recompute else None),
    )
    for expected, got in zip(train(bare.cuda()), train(model), strict=True):
        # The optimizer of the bare model computes on the device, the other one on the host.
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("late", ["L", "D", "spill", "fetch", "compute"])
def test_a_stream_that_runs_late_changes_nothing(late: str, recompute: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twin: ``late`` of the setups of the fuzz."""
    submit = StreamCopyLane.submit

    def slow_submit(
        self: StreamCopyLane, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()
    ) -> Arrival:
        def slow_copy() -> None:
            if token.startswith(late):
                torch.cuda._sleep(CYCLES)
            copy()

        return submit(self, token, slow_copy, after)

    monkeypatch.setattr(StreamCopyLane, "submit", slow_submit)
    if late == "compute":
        forward = nn.Linear.forward

        def slow_forward(self: nn.Linear, x: Tensor) -> Tensor:
            torch.cuda._sleep(CYCLES)
            return forward(self, x)

        monkeypatch.setattr(nn.Linear, "forward", slow_forward)
    assert_trains_alike("cpu", recompute=recompute, boundary_bytes=0)


SANITIZED = """
import torch
from torch import nn
from offload import MemoryPolicy, OffloadModel
from pipe.recompute.recomputed import Call
init = Call.__init__
# The sanitizer loses exceptions that pass through torch, as one that ends a second run.
def to_the_end(call, *args, **more):
    init(call, *args, **more)
    call.to_the_end = True
Call.__init__ = to_the_end
torch.manual_seed(0)
layers = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)) for _ in range(5)]
for recompute in (True, False):
    model = OffloadModel(layers, "cuda", checkpoint_activation=recompute, num_microbatches=2,
                         memory=MemoryPolicy.fixed(boundary_bytes=0 if recompute else None))
    for _ in range(2):
        model(torch.randn(8, 32)).sum().backward()
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)) for _ in range(5)]
torch.cuda.synchronize()
"""


def test_the_sanitizer_finds_no_race() -> None:
    """Twin: test_every_wait.py::test_without_this_wait."""
    result = subprocess.run(
        [sys.executable, "-c", SANITIZED],
        env={**os.environ, "TORCH_CUDA_SANITIZER": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert "CSAN" not in result.stderr, result.stderr


@pytest.mark.parametrize("shards", [4, 64])
def test_peak_device_bytes_are_those_of_the_formula(shards: int) -> None:
    """Twin: test_memory_limit.py."""
    width, rows = 1024, 64
    layers = [nn.Linear(width, width) for _ in range(shards)]
    x = torch.randn(rows, width, device="cuda")
    nn.functional.linear(x, torch.randn(width, width, device="cuda")).sum()  # cuBLAS takes its workspace
    model = OffloadModel(
        layers, "cuda", checkpoint_activation=True, num_slices=3, memory=MemoryPolicy.fixed(boundary_bytes=1 << 20)
    )
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        model(x).pow(2).mean().backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert abs(peak - model.statistics().peak_device_bytes) <= 64 << 20
    slot = model._homes.streamer.slot_bytes
    assert model.statistics().peak_device_bytes <= 2 * slot + 2 * slot + (1 << 20) + 8 * rows * width * 4


def stepped(recompute: bool, boundary_bytes: int | None) -> Callable[[], None]:
    """A step of a model whose slots, gradients and pinned memory are made already."""
    model = OffloadModel(
        build(["linear"] * 4),
        "cuda",
        num_slices=6,
        checkpoint_activation=recompute,
        num_microbatches=2,
        memory=MemoryPolicy.fixed(boundary_bytes=boundary_bytes),
    )
    x = torch.randn(4, WIDTH, device="cuda")

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    for _ in range(3):  # the first two forwards compare weights with homes
        step()
    return step


@contextlib.contextmanager
def assert_no_synchronisation() -> Iterator[None]:
    """Torch raises where the host waits for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


MODES = pytest.mark.parametrize(("recompute", "boundary_bytes"), [(True, None), (True, 0), (False, None)])


@MODES
def test_the_host_never_synchronises_in_the_loop(recompute: bool, boundary_bytes: int | None) -> None:
    """Twin: test_every_wait.py, the_host_waits_at_the_end_of_a_pass_and_never_before."""
    step = stepped(recompute, boundary_bytes)
    with assert_no_synchronisation():
        step()


@MODES
def test_the_host_waits_for_no_event_before_the_end_of_a_pass(
    recompute: bool, boundary_bytes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the debug mode of torch does not see. Twin: as above."""
    step = stepped(recompute, boundary_bytes)
    log: list[str] = []

    def noting(owner: type, name: str, what: str) -> None:
        method = getattr(owner, name)

        def noted(*args: Any, **more: Any) -> Any:
            log.append(what)
            return method(*args, **more)

        monkeypatch.setattr(owner, name, noted)

    noting(Engine, "run", "F")
    noting(_Enter, "backward", "B")
    noting(torch.cuda.Event, "synchronize", "wait")
    noting(torch.cuda.Stream, "synchronize", "wait")
    step()
    for kind in "FB":
        cells = [k for k, what in enumerate(log) if what == kind]
        assert len(cells) == 12
        assert "wait" not in log[cells[0] : cells[-1]]


BLOCKS, CHANNELS = 12, 512
WHOLE = BLOCKS * (CHANNELS + 1) * CHANNELS * 16  # weights, gradients and both moments


def resting(memory: int | str, home: Path | str) -> tuple[nn.Module, OffloadModel, OffloadOptimizer]:
    """A model on the device, its twin whose shards may rest there, and the twin's optimizer."""
    torch.manual_seed(0)
    bare = nn.Sequential(*(nn.Sequential(nn.Linear(CHANNELS, CHANNELS), nn.GELU()) for _ in range(BLOCKS)))
    model = OffloadModel(copy.deepcopy(bare), "cuda", home, memory=memory)
    return bare.cuda(), model, OffloadOptimizer(model, torch.optim.AdamW, max_norm=0.1, lr=1e-3)


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("part", [1, 2, 5])
def test_shards_rest_on_the_device_as_far_as_memory_goes(part: int, on_disk: bool, tmp_path: Path) -> None:
    """Twin: test_on_the_device.py."""
    memory = 2 * WHOLE if part == 1 else WHOLE // part
    bare, model, ours = resting(memory, tmp_path if on_disk else "cpu")
    plain = torch.optim.AdamW(bare.parameters(), lr=1e-3, fused=True)
    x = torch.randn(16, CHANNELS, device="cuda")
    for step in range(8):
        expected = bare(x).square().mean()
        expected.backward()
        nn.utils.clip_grad_norm_(bare.parameters(), 0.1)
        plain.step()
        plain.zero_grad()
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = model(x).square().mean()
        loss.backward()
        ours.step()
        ours.zero_grad()
        torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
        assert step < 4 or torch.cuda.max_memory_allocated() - held <= memory
    on_device = [p.is_cuda for p in model.parameters()]
    assert all(on_device) if part == 1 else any(on_device) and not all(on_device)
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.detach().cpu(), p.detach().cpu(), rtol=1e-4, atol=1e-5)


def test_the_host_never_synchronises_where_all_rests_on_the_device() -> None:
    """Twin: test_on_the_device.py."""
    _, model, ours = resting("auto", "cpu")
    x = torch.randn(16, CHANNELS, device="cuda")

    def step() -> None:
        model(x).square().mean().backward()
        ours.step()
        ours.zero_grad()

    for _ in range(6):
        step()
    with assert_no_synchronisation():
        step()


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_steps_of_a_model_with_blocks_are_those_of_the_plain_one(home: str, tmp_path: Path) -> None:
    """Twin: blocks/test_own_forward.py."""
    bare = make(dropout=0.0)
    model: Any = OffloadModel(
        copy.deepcopy(bare),
        "cuda",
        tmp_path if home == "disk" else "cpu",
        checkpoint_activation=True,
        blocks="encoder.layer",
    )
    bare.cuda()
    assert model.words.weight.is_cuda
    assert not model.encoder.layer[0].linear.weight.is_cuda
    plain = torch.optim.SGD(bare.parameters(), lr=0.05, momentum=0.9)
    ours = OffloadOptimizer(model, torch.optim.SGD, max_norm=0.5, lr=0.05, momentum=0.9)
    for seed in range(3):
        plain.zero_grad()
        ours.zero_grad()
        for each in (bare, model):
            # The words are on the host: the model brings them to its device.
            loss_of(each(words(seed=seed).to("cpu" if each is model else "cuda"))).backward()
        torch.nn.utils.clip_grad_norm_(bare.parameters(), 0.5)
        plain.step()
        ours.step()
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert close(p.detach().cpu(), q.detach().cpu())
