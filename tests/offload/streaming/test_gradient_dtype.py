"""Gradients of 16 bits at home: each is rounded once, and everything after it is computed from what is stored."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.optim.update_blocks
import offload.streaming.grad_norm
from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.storage.disk import DiskBlock
from offload.streaming.grad_norm import norm_of
from tests.offload.twins import CLASSES

BF16 = torch.bfloat16


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(72, 72), nn.Tanh(), nn.LayerNorm(72), nn.Linear(72, 80), nn.Tanh(), nn.Linear(80, 8))


def batch(k: int) -> Tensor:
    return torch.randn(8, 72, generator=torch.Generator().manual_seed(k))


def loss_of(outputs: Tensor) -> Tensor:
    return (outputs - 1).pow(2).sum()


class Twins:
    """A plain model whose gradients are rounded once a step, and the same offloaded with ``gradient_dtype``."""

    def __init__(self, name: str, home: str, *, max_norm: float | None = None, **more: Any) -> None:
        kind, arguments = CLASSES[name]
        self.bare, self.max_norm = layers(), max_norm
        for_optimizer = {key: more.pop(key) for key in ("states", "update_in_backward") if key in more}
        more = {"num_slices": 6, "memory": MemoryPolicy.fixed(), "num_microbatches": 2, **more}
        self.chunks = more["num_microbatches"]
        self.model = OffloadModel(copy.deepcopy(self.bare), "cpu", home, gradient_dtype=BF16, **more)
        self.plain = kind(self.bare.parameters(), **arguments)
        self.ours = OffloadOptimizer(self.model, kind, max_norm=max_norm, **arguments, **for_optimizer)
        self.count = 0

    def backward(self) -> None:
        """Of both."""
        self.count += 1
        for chunk in batch(self.count).chunk(self.chunks):
            loss_of(self.bare(chunk)).backward()
        loss_of(self.model(batch(self.count))).backward()

    def check_step(self, between: Any = lambda: None) -> None:
        self.backward()
        stored = [p.grad.to(BF16) for p in self.bare.parameters() if p.grad is not None]
        for p, q, rounded in zip(self.bare.parameters(), self.model.parameters(), stored, strict=True):
            assert q.grad is not None
            assert q.grad.dtype == BF16
            assert torch.equal(q.grad, rounded)
            p.grad = rounded.float()
        if self.max_norm is not None:
            total = torch.linalg.vector_norm(torch.stack([norm_of(gradient) for gradient in stored]))
            for p in self.bare.parameters():
                assert p.grad is not None
                p.grad.mul_(torch.clamp(self.max_norm / (total + 1e-6), max=1.0))
        between()
        for optimizer in (self.plain, self.ours):
            optimizer.step()
            optimizer.zero_grad()
        if self.max_norm is not None:
            assert self.ours.last_norm is not None
            assert torch.equal(self.ours.last_norm, total)
        self.assert_equal()

    def assert_equal(self) -> None:
        for (name, p), q in zip(self.bare.named_parameters(), self.model.parameters(), strict=True):
            assert torch.equal(p, q), name


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix is updated, and its gradient rounded and stored, in several parts."""
    monkeypatch.setattr(offload.optim.update_blocks, "MAX_BLOCK_BYTES", 4096)
    monkeypatch.setattr(offload.streaming.grad_norm, "PIECE", 1000)


@pytest.mark.parametrize("name", ["adafactor", "adamw", "momentum"])
@pytest.mark.parametrize("max_norm", [None, 0.3])
@pytest.mark.usefixtures("small_blocks")
def test_training_is_that_of_a_model_whose_gradients_are_rounded_once(
    home: str, name: str, max_norm: float | None
) -> None:
    twins = Twins(name, home, max_norm=max_norm)
    for _ in range(3):
        twins.check_step()


@pytest.mark.usefixtures("small_blocks")
def test_where_gradients_wait_changes_no_bit(tmp_path: Path) -> None:
    waits = Twins("adamw", f"{tmp_path}/waits/", max_norm=0.3, memory=MemoryPolicy.fixed(gradient_bytes=20_000))
    moves = Twins("adamw", f"{tmp_path}/moves/", max_norm=0.3, checkpoint_activation=True)
    waits.check_step()
    for shards in ([0, 3], [3, 5], []):
        waits.check_step()
        # Between backward and step: gradients move with their shard.
        moves.check_step(between=lambda shards=shards: moves.model._homes.keep_in_memory(shards))  # type: ignore[misc]


@pytest.mark.parametrize("fails_at", [0, 7, 15])
@pytest.mark.usefixtures("small_blocks")
def test_an_update_goes_on_after_a_disk_that_was_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    twins = Twins("adamw", f"{tmp_path}/", max_norm=0.3)
    twins.check_step()
    counts, write = iter(range(1000)), DiskBlock.write

    def faulty(self: DiskBlock, source: Tensor, offset: int) -> None:
        if next(counts) == fails_at:
            raise OSError(28, "No space left")
        write(self, source, offset)

    def break_disk() -> None:
        monkeypatch.setattr(DiskBlock, "write", faulty)
        with pytest.raises(OSError, match="No space left"):
            (twins.ours.step(), twins.ours.synchronize())
        twins.ours.synchronize()
        twins.ours.step = lambda: None  # type: ignore[method-assign, assignment]

    twins.check_step(between=break_disk)


def test_a_gradient_that_is_not_zeroed_stays_clipped(home: str) -> None:
    twins = Twins("momentum", home, max_norm=0.3)
    twins.backward()
    before = [p.grad.float() for p in twins.model.parameters() if p.grad is not None]
    twins.ours.step()
    twins.ours.synchronize()
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in before]))
    for gradient, p in zip(before, twins.model.parameters(), strict=True):
        assert torch.equal(p.grad, (gradient * torch.clamp(0.3 / (norm + 1e-6), max=1.0)).to(BF16))


@pytest.mark.usefixtures("small_blocks")
def test_a_gradient_in_memory_is_clipped_once_though_writes_are_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fails_at in range(12):
        memory = MemoryPolicy.fixed(gradient_bytes="1MiB")
        twins = Twins("momentum", f"{tmp_path}/{fails_at}/", max_norm=0.3, memory=memory)
        twins.backward()
        before = [p.grad.float() for p in twins.model.parameters() if p.grad is not None]
        counts, write = iter(range(1000)), DiskBlock.write

        def faulty(
            self: DiskBlock, source: Tensor, offset: int, counts: Any = counts, write: Any = write, at: int = fails_at
        ) -> None:
            if next(counts) == at:
                raise OSError(28, "No space left")
            write(self, source, offset)

        with monkeypatch.context() as patch:
            patch.setattr(DiskBlock, "write", faulty)
            with pytest.raises(OSError, match="No space left"):
                (twins.ours.step(), twins.ours.synchronize())
            twins.ours.synchronize()
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in before]))
        for gradient, p in zip(before, twins.model.parameters(), strict=True):
            assert torch.equal(p.grad, (gradient * torch.clamp(0.3 / (norm + 1e-6), max=1.0)).to(BF16))


def test_a_parameter_of_several_layers_keeps_its_gradient_in_full(home: str) -> None:
    bare = layers()
    bare[0].weight = bare[3].weight = nn.Parameter(torch.randn(72, 72) / 9)  # type: ignore[assignment]
    bare[3].bias = bare[0].bias = nn.Parameter(torch.zeros(72))  # type: ignore[assignment]
    bare[5] = nn.Linear(72, 8)
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=6, gradient_dtype=BF16)
    for run in (bare, model):
        loss_of(run(batch(0))).backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    for name, p in bare.named_parameters():
        assert p.grad is not None
        whole = name.startswith("0.")
        assert found[name].dtype == (torch.float32 if whole else BF16), name  # type: ignore[union-attr]
        torch.testing.assert_close(found[name], p.grad if whole else p.grad.to(BF16))


@pytest.mark.parametrize("how", ["stored", "a forward waits"])
def test_a_second_backward_is_refused_before_anything_ran(home: str, how: str) -> None:
    model = OffloadModel(layers(), "cpu", home, num_slices=6, gradient_dtype=BF16)
    if how == "a forward waits":
        first, second = model(batch(1)), model(batch(2))
        with pytest.raises(RuntimeError, match="1 more forwards of this model still need their backward, and the sum"):
            loss_of(second).backward()
        assert all(p.grad is None for p in model.parameters())
        del first
        loss_of(second).backward()
        return
    loss_of(model(batch(1))).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    loss = loss_of(model(batch(2)))
    loads = model.statistics().shard_loads
    with pytest.raises(RuntimeError, match=r"second backward before zero_grad.*accumulate_in_gradient_dtype=True"):
        loss.backward(retain_graph=True)
    assert model.statistics().shard_loads == loads
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))
    model.zero_grad()
    loss.backward()  # the refused one freed nothing of the model's


@pytest.mark.usefixtures("small_blocks")
def test_accumulation_that_was_asked_for_rounds_each_sum(home: str) -> None:
    model = OffloadModel(layers(), "cpu", home, num_slices=6, gradient_dtype=BF16, accumulate_in_gradient_dtype=True)
    each = []
    for k in (1, 2):
        bare = layers()
        loss_of(bare(batch(k))).backward()
        loss_of(model(batch(k))).backward()
        each.append([p.grad for p in bare.parameters()])
    for p, first, second in zip(model.parameters(), *each, strict=True):
        assert torch.equal(p.grad, (first.to(BF16).float() + second).to(BF16))  # type: ignore[union-attr, operator]


def test_gradients_that_autograd_itself_returns_are_not_rounded(home: str) -> None:
    """Those that are requested, and those of parameters with hooks: they are stored in no file."""
    bare, model = layers(), OffloadModel(layers(), "cpu", home, num_slices=6, gradient_dtype=BF16)
    seen: list[Tensor] = []
    model[0].weight.register_hook(seen.append)  # type: ignore[operator, union-attr]
    expected = torch.autograd.grad(loss_of(bare(batch(0))), list(bare.parameters()))
    found = torch.autograd.grad(loss_of(model(batch(0))), list(model.parameters()))
    loss_of(model(batch(0))).backward()
    for k, (gradient, requested, p) in enumerate(zip(expected, found, model.parameters(), strict=True)):
        assert torch.equal(requested, gradient)
        assert torch.equal(p.grad, gradient.to(BF16) if k else gradient)
    assert torch.equal(seen[-1], expected[0])


def test_sparse_gradients_and_those_of_updates_in_backward_are_not_rounded(home: str) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(nn.Embedding(50, 72, sparse=True), nn.Linear(72, 8))
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=2, gradient_dtype=BF16)
    for run in (bare, model):
        loss_of(run(torch.tensor([1, 5, 1]))).backward()
    assert torch.equal(model[0].weight.grad.to_dense(), bare[0].weight.grad.to_dense())  # type: ignore[union-attr]
    twins = Twins("adamw", home + "updates" if home != "cpu" else home, num_microbatches=1, update_in_backward=True)
    for _ in range(2):
        twins.backward()
        for optimizer in (twins.plain, twins.ours):
            optimizer.step()
            optimizer.zero_grad()
    twins.assert_equal()


def test_a_copy_of_the_model_stores_gradients_alike() -> None:
    model = copy.deepcopy(OffloadModel(layers(), "cpu", gradient_dtype=BF16, param_dtype=BF16))
    loss_of(model(batch(0))).backward()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {BF16}
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"gradient_dtype": torch.float16}, ValueError, "got gradient_dtype=torch.float16: float16 would overflow"),
        ({"gradient_dtype": "bfloat16"}, TypeError, "got gradient_dtype='bfloat16'"),
        ({"accumulate_in_gradient_dtype": True}, ValueError, "needs gradient_dtype=torch.bfloat16, got None"),
        ({"gradient_dtype": BF16, "accumulate_in_gradient_dtype": 1}, TypeError, "accumulate_in_gradient_dtype=1"),
    ],
)
def test_other_types_are_refused_at_construction(arguments: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        OffloadModel(layers(), "cpu", **arguments)
