"""No copy is read, or overwritten, before its wait: with late lanes a forgotten wait gives NaN, every time."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from offload import MemoryPolicy, OffloadModel
from offload.streaming.lane import StreamCopyLane
from offload.streaming.streamer import Streamer
from offload.telemetry.statistics import Meter
from pipe.threads import Threads
from tests.late_cuda import DEVICE, LateCuda
from tests.offload.late import LateLane
from tests.offload.zoo import WIDTH, build, reference

Late = Callable[..., list[LateLane]]


def train(model: nn.Module, run: Callable[[torch.Tensor], torch.Tensor], steps: int = 3) -> list[torch.Tensor]:
    """Losses, and the final parameters."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = run(x).pow(2).mean()
        loss.backward()
        losses.append(loss.detach())
        if step != 1:  # so that gradients accumulate at home once
            optimizer.step()
            optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.parameters())]


def both(
    home: str, *, tied: bool = True, microbatches: int = 2, recompute: bool = True, slots: int = 2, slices: int = 4
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What the bare model and an offloaded one train to."""
    bare = build(["linear", "dropout", "linear", "nested", "linear"], tied=tied)
    model = OffloadModel(
        copy.deepcopy(bare),
        "cpu",
        home,
        num_slices=slices,
        checkpoint_activation=recompute,
        num_microbatches=microbatches,
        memory=MemoryPolicy.fixed(slots=slots, boundary_bytes=100),
    )
    cuts = [len(shard.layers) for shard in model._homes.shards]
    return train(bare, lambda x: reference(bare, cuts, x, microbatches)), train(model, model)


def equal(pair: tuple[list[torch.Tensor], list[torch.Tensor]]) -> bool:
    return all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*pair, strict=True))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000),
    recompute=st.booleans(),
    microbatches=st.integers(1, 3),
    slots=st.integers(2, 5),
    slices=st.integers(2, 8),
)
def test_training_is_exact_in_whatever_order_copies_finish(
    late: Late, tmp_path: Path, seed: int, recompute: bool, microbatches: int, slots: int, slices: int
) -> None:
    late(seed)
    assert equal(both(f"{tmp_path}/", microbatches=microbatches, recompute=recompute, slots=slots, slices=slices))


def test_copies_overtake_each_other_at_all(late: Late, tmp_path: Path) -> None:
    lanes = late(3)
    assert equal(both(f"{tmp_path}/"))
    tokens = [token for lane in lanes for token in lane.log]
    assert {token[0] for token in tokens} == {"L", "D", "s", "f"}  # loads, drains, spills, fetches
    assert lanes[0].log != sorted(lanes[0].log)


def test_a_prefetch_that_was_interrupted_takes_no_slot(
    late: Late, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    late(0)
    bare = build(["linear"] * 2)
    model = OffloadModel(copy.deepcopy(bare), "cpu", f"{tmp_path}/", num_slices=4, checkpoint_activation=True)
    x = torch.randn(3, WIDTH)
    model(x).sum().backward()

    def interrupted(self: Streamer, *_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Streamer, "_fill", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model.prefetch()
    with torch.no_grad():
        torch.testing.assert_close(model(x), bare(x))


def test_the_second_step_begins_before_the_first_has_ended_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cells took in the first step is set apart then, without a wait."""
    cuda = LateCuda(monkeypatch)
    meter = Meter(DEVICE)
    for rows in (4, 2, 2):
        meter.begin_step()
        with meter.cell("F", 0, 0, rows):
            cuda.launch(lambda: None)
    assert cuda.host_waits == 0
    assert meter.cell_seconds_per_row("F", 0) == pytest.approx(2e-3 / 4)  # a late span takes a millisecond


def test_a_copy_of_what_an_update_still_writes_does_not_keep_its_submitter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that need neither go on meanwhile."""
    cuda, home, slot = LateCuda(monkeypatch), torch.zeros(4), torch.zeros(4)
    goes_on, updates = threading.Event(), Threads(1, "updates")
    update = updates.submit(lambda: (goes_on.wait(60), home.fill_(7)))
    lane = StreamCopyLane(DEVICE)
    load = lane.submit("L0", lambda: cuda.launch(lambda: slot.copy_(home)), [update])
    assert not update.done
    goes_on.set()
    load.synchronize()
    assert (slot == 7).all()
    lane.close()
