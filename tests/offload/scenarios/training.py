"""Steps whose copies are as late as they may be: right numbers, and order where numbers cannot tell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import MemoryPolicy, OffloadModel
from offload.storage.disk import DiskBlock
from offload.streaming.gradient_offload import GradientOffload
from offload.streaming.lane import Arrival, CopyLane, CopyLanes
from offload.streaming.shard import Shard
from tests.offload.fuzz.gradients import TrainStep
from tests.offload.fuzz.lockstep import run
from tests.offload.fuzz.passes import Forward
from tests.offload.fuzz.program import Program, Setup, Statement
from tests.offload.fuzz.weights import KeepInMemory
from tests.offload.late import LateLane, PromptLane, run_late
from tests.offload.pair import Pair
from tests.offload.scenarios.lanes import LateThread
from tests.offload.zoo import WIDTH, build
from tests.waits import fails_with

SEEDS = range(4)


def update_on(monkeypatch: pytest.MonkeyPatch, lane: LateLane) -> None:
    monkeypatch.setattr("offload.optim.optimizer.open_update_lane", lambda device: lane)


#: Models, and what trains them; each on a disk, in shards that are recomputed.
PROGRAMS: list[tuple[dict[str, Any], tuple[Statement, ...]]] = [
    ({"model": "inplace", "microbatches": 2, "boundary": 100}, (TrainStep(), TrainStep(accumulate=2), TrainStep())),
    ({"model": "tied", "slices": 2, "updates": "offload"}, (TrainStep(), Forward(mode="eval"))),
    (
        {"optimizer": "adamw", "updates": "offload"},
        (KeepInMemory((1, 2)), TrainStep(), KeepInMemory(), TrainStep(), Forward(mode="eval")),
    ),
]


@fails_with("it differs from the bare model")
def it_trains_like_the_bare_model(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    for seed in SEEDS:
        for setup, statements in PROGRAMS:
            outcome = run(Program(Setup(home="disk", checkpoint=True, late=seed + 1, looks=False, **setup), statements))
            assert outcome.kind == "equal", f"it differs from the bare model: {outcome}"


@fails_with("Tensor-likes are not")
def updates_in_backward_see_complete_gradients(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Some rest at home from the backward before, and are added to there; the update is as early as it may be."""
    run_late(monkeypatch, 0)
    update_on(monkeypatch, PromptLane())
    pair = Pair("adamw", f"{path}/", update_in_backward=True)
    pair.do("accumulate", "backward", "step", "zero", "eval")


@fails_with("gradients pile up")
def gradients_do_not_pile_up(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Two sets at a time: those on their way home, or those of an update and of the one before it."""
    waiting: list[int] = []
    for owner, name in ((GradientOffload, "drain"), (GradientOffload, "update")):
        method = getattr(owner, name)

        def noted(self: GradientOffload, *args: Any, method: Any = method) -> None:
            method(self, *args)
            waiting.append(len(self._drains))

        monkeypatch.setattr(owner, name, noted)
    for in_backward in (False, True):
        run_late(monkeypatch, 0)
        update_on(monkeypatch, LateLane(0))
        pair = Pair("sgd", f"{path}/", slices=6, kinds=("linear",) * 4, update_in_backward=in_backward)
        pair.backward()
    assert max(waiting) <= 2, "gradients pile up"


@fails_with("a gradient changed after the exception")
def nothing_moves_after_an_exception(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    lanes = run_late(monkeypatch, 0)
    model = OffloadModel(build(["linear"] * 3), "cpu", f"{path}/", num_slices=5, checkpoint_activation=True)
    first = next(iter(model.children()))

    def fail_in_backward(_: nn.Module, __: Any, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: 1 / 0)

    first.register_forward_hook(fail_in_backward)
    loss = model(torch.randn(3, WIDTH)).sum()
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    assert sum(g is not None for g in gradients) >= 2
    for lane in lanes:
        lane.close()  # whatever was left behind arrives now
    for before, p in zip(gradients, model.parameters(), strict=True):
        assert before is None or torch.equal(before, p.grad), "a gradient changed after the exception"


@fails_with("Tensor-likes are not")
def an_unused_load_never_lands(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """A model looks ahead; then its homes are written to, and what was loaded is not used."""
    run_late(monkeypatch, backwards=True)
    bare = build(["linear"] * 2)
    model = OffloadModel(build(["linear"] * 2), "cpu", f"{path}/", num_slices=4, checkpoint_activation=True)
    model(torch.zeros(1, WIDTH)).sum().backward()  # makes slots, and leaves them empty
    with torch.no_grad():
        model.prefetch()
        for p, q in zip(model.parameters(), bare.parameters(), strict=True):
            p.mul_(2)
            q.copy_(p)
        x = torch.randn(3, WIDTH)
        torch.testing.assert_close(model(x), bare(x))


@fails_with("it is still to come")
def an_update_that_was_cut_off_from_its_load_ends_first(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """An interrupt between the two: the update works in a slot that is about to be given away."""
    for seed in SEEDS:
        run_late(monkeypatch, seed)
        update_on(monkeypatch, LateLane(seed))
        pair = Pair("sgd", f"{path}/", slices=4)
        pair.do("backward", "step", "zero")

        def interrupted(self: Shard, *_: Any) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Shard, "load", interrupted)
            with pytest.raises(KeyboardInterrupt):
                pair.model(torch.zeros(1, WIDTH))
        assert pair.model._homes.shards[0].pending is None, "it is still to come, in a slot that was given back"
        pair.eval()


@fails_with("storing gradients .* No space left", error=OSError)
def a_store_that_failed_is_told_once(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """The gradients of the pass that failed are not waited for by the next."""
    run_late(monkeypatch, 0)
    model = OffloadModel(build(["linear"] * 3), "cpu", f"{path}/", num_slices=5, checkpoint_activation=True)
    write = DiskBlock.write

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(DiskBlock, "write", full)
    with pytest.raises(OSError, match="No space left"):
        model(torch.randn(3, WIDTH)).sum().backward()
    monkeypatch.setattr(DiskBlock, "write", write)
    model.zero_grad()
    model(torch.randn(3, WIDTH)).sum().backward()


class _Breaks(LateLane):
    """The next submission is interrupted, ``"before"`` it is queued or ``"after"``."""

    breaks = ""

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        breaks, self.breaks = self.breaks, ""
        if breaks == "before":
            raise KeyboardInterrupt
        arrival = super().submit(token, copy, after)
        if breaks == "after":
            raise KeyboardInterrupt
        return arrival


@fails_with("updated twice", "weights arrive twice")
def an_update_whose_start_was_interrupted_runs_once(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """What was queued is over before it is started again: else weights are read while they are being written."""
    for breaks in ("before", "after"):
        lane, io_threads = _Breaks(backwards=True), LateThread()
        update_on(monkeypatch, lane)
        pair = Pair("sgd", f"{path}/{breaks}/", slices=4)
        pair.ours._filler = io_threads
        pair.do("backward", "step", "zero")
        update = pair.model._homes.shards[0].pending
        assert update is not None
        slot = torch.zeros(4096, dtype=torch.uint8)
        lane.breaks = breaks
        with pytest.raises(KeyboardInterrupt):
            update.start(slot)
        update.start(slot)
        assert [arrival.token for arrival in lane.pending] == ["U0"], "updated twice"
        assert len(io_threads.waiting) <= 1, "weights arrive twice"
        update.wait_idle()
        pair.assert_equal()


class _Noted(Arrival):
    def __init__(self, token: str, log: list[tuple[str, str]]) -> None:
        self._token = token
        self._log = log

    def wait(self) -> None:
        self._log.append(("compute", self._token))

    def synchronize(self) -> None:
        self._log.append(("host", self._token))


class NotingLane(CopyLane):
    """Copies at once, and notes who waits for what: compute, which may be far behind, or the host."""

    def __init__(self, log: list[tuple[str, str]]) -> None:
        self._log = log

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        self._log.append(("copy", token))
        with torch.no_grad():
            copy()
        return _Noted(token, self._log)

    def wait_idle(self) -> None: ...

    def close(self) -> None: ...


@fails_with("the pass returned before its", "what is frozen in front")
def the_host_waits_at_the_end_of_a_pass_and_never_before(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """On a device the host is ahead. What it may read or write after a call must be done when the call returns."""
    log: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "offload.construction.open_lanes", lambda device, **_: CopyLanes(*(NotingLane(log) for _ in range(3)))
    )

    def waited(run: Callable[[], Any]) -> tuple[set[str], list[str], Any]:
        """What the host waited for in a pass, what was copied, and what the pass returned."""
        log.clear()
        result = run()
        kinds = [kind for kind, _ in log]
        last = len(kinds) - 1 - kinds[::-1].index("cell")
        assert "host" not in kinds[kinds.index("cell") : last], "the host waited in the middle of the pass"
        return (
            {token for kind, token in log if kind == "host"},
            [token for kind, token in log if kind == "copy"],
            result,
        )

    def make(slots: int, frozen: int) -> OffloadModel:
        bare = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
        bare[:frozen].requires_grad_(False)
        for layer in bare:
            layer.register_forward_pre_hook(lambda *_: log.append(("cell", "")))
        policy = MemoryPolicy.fixed(slots=slots, boundary_bytes=0)
        return OffloadModel(bare, "cpu", path, 4, True, 2, memory=policy)

    x = torch.randn(6, WIDTH)
    model = make(slots=4, frozen=2)
    with torch.no_grad():
        assert waited(lambda: model(x))[0] == {"L0", "L1", "L2", "L3"}, "the pass returned before its loads"
    model = make(slots=4, frozen=2)
    by_host, _, output = waited(lambda: model(x))
    assert by_host >= {"L0", "L1"}, "what is frozen in front may be changed before the backward"
    assert "D2" in waited(output.sum().backward)[0], "the pass returned before its drains"  # D2 is the last
    model = make(slots=2, frozen=4)
    output = model(x.clone().requires_grad_()).sum()
    by_host, copies, _ = waited(output.backward)
    assert [token for token in copies if token[0] == "L"][-1] in by_host, "the pass returned before its loads"


@fails_with("a load may read what is stored")
def data_assigned_in_a_forward_is_stored_when_no_load_reads_its_home(
    monkeypatch: pytest.MonkeyPatch, path: Path
) -> None:
    log: list[tuple[str, str]] = []
    monkeypatch.setattr(
        "offload.construction.open_lanes", lambda device, **_: CopyLanes(*(NotingLane(log) for _ in range(3)))
    )
    bare = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))

    def assign(*_: Any) -> None:
        bare[2].weight.data = torch.ones(WIDTH, WIDTH)
        log.clear()

    bare[1].register_forward_hook(assign)
    model = OffloadModel(bare, "cpu", path, 4, True, memory=MemoryPolicy.fixed(slots=3, boundary_bytes=0))
    stored = Shard.store_assigned_data
    waited = set[str]()

    def store(shard: Shard, *given: Any) -> None:
        waited.update(token for kind, token in log if kind == "host")
        stored(shard, *given)

    monkeypatch.setattr(Shard, "store_assigned_data", store)
    for _ in range(2):  # the second forward loads ahead
        waited.clear()
        model(torch.randn(2, WIDTH)).sum().backward()
    assert {"L2", "L3"} <= waited, "a load may read what is stored"
