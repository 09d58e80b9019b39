"""Models with blocks inside of what is around them, and with the choices of an ``OffloadModel``."""

from __future__ import annotations

import copy
import threading
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from gradcache import GradCache
from offload import OffloadModel, OffloadOptimizer
from pipe import Pipe
from tests.offload.blocks.towers import WIDTH, Block, assert_equal, close, loss_of, make, step, words


def wrap(bare: nn.Module, home: Any = "cpu", **choices: Any) -> Any:
    choices = {"checkpoint_activation": True, "blocks": "encoder.layer", **choices}
    return OffloadModel(copy.deepcopy(bare), "cpu", home, **choices)


def test_a_tensor_that_enters_every_block_is_stored_once() -> None:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList(Block(0.0) for _ in range(6))

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            bias = None
            for block in self.layer:
                x, bias = block(x, mask, bias=bias)
            return x

    model = wrap(Wide(), blocks="layer")
    rows = 50
    x, mask = torch.randn(rows, 3, WIDTH), torch.randn(rows, 3, WIDTH)
    model(x, mask).sum().backward()  # the first forward of layers runs on copies of their inputs
    output = model(x, mask)
    one = x.nbytes
    held = model._homes.meter.held_bytes
    assert held < 7.5 * one  # the input of each block, the mask, and the bias, which is narrower
    output.sum().backward()


class Around(nn.Module):
    def __init__(self, tower: nn.Module) -> None:
        super().__init__()
        self.tower, self.out = tower, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.tower(x)["states"].mean(1))


def loss(x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.cross_entropy(x @ y.T, torch.arange(len(x)))


@pytest.mark.parametrize("inside", [True, False])
def test_gradcache_takes_one_visit_for_all_chunks(inside: bool) -> None:
    bare = make(dropout=0.0)
    model = wrap(bare)
    torch.manual_seed(0)
    plain: Any = Around(bare) if inside else bare
    ours: Any = copy.deepcopy(plain) if inside else model
    if inside:
        ours.tower = model

    def rep(output: Any) -> Any:
        return output if inside else output["states"].mean(1)

    x, y = words(4), words(4, 3, seed=5)
    expected = loss(rep(plain(x)), rep(plain(y)))
    expected.backward()
    cache = GradCache([ours, ours], 2, loss, get_rep_fn=rep)
    assert close(expected.detach(), cache(x, y))
    for p, q in zip(plain.parameters(), ours.parameters(), strict=True):
        assert close(p.grad, q.grad)
    assert model.statistics().shard_loads <= 2 * 4


def test_it_is_a_stage_of_a_pipe() -> None:
    class Words(nn.Module):
        def __init__(self, tower: nn.Module) -> None:
            super().__init__()
            self.tower = tower

        def forward(self, x: Tensor) -> Tensor:
            states: Tensor = self.tower(x)["states"]
            return states

    bare = make(dropout=0.0)
    model = wrap(bare)
    pipe = Pipe(nn.Sequential(Words(model), nn.Linear(WIDTH, 2)), [1, 1], devices=["cpu", "cpu"], chunks=2)
    plain = nn.Sequential(Words(bare), copy.deepcopy(pipe[1]))
    for each in (plain, pipe):
        each(words(4)).square().sum().backward()
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None)
        assert p.grad is None or close(p.grad, q.grad)


def checkpointed(model: nn.Module, *, reentrant: bool) -> None:
    torch.manual_seed(0)
    x = torch.ones(3, 5, WIDTH, requires_grad=True)
    output: Any = torch.utils.checkpoint.checkpoint(
        lambda x: loss_of(model(words(), extra=x)), x, use_reentrant=reentrant
    )
    output.backward()


def test_it_runs_inside_a_reentrant_checkpoint_and_is_refused_inside_others() -> None:
    bare = make()
    model = wrap(bare)
    checkpointed(bare, reentrant=True)
    checkpointed(model, reentrant=True)
    assert_equal(bare, model)
    with pytest.raises(RuntimeError, match=r"inside torch\.utils\.checkpoint"):
        checkpointed(model, reentrant=False)


def test_no_thread_outlives_a_forward() -> None:
    model = wrap(make(), num_microbatches=3)
    step(model)
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(words())
    assert not [thread for thread in threading.enumerate() if thread.name == "offload-forward"]


def test_threads_keep_the_settings_of_the_call() -> None:
    seen: list[Any] = []
    model = wrap(make(), num_microbatches=2)
    model.norm.register_forward_hook(
        lambda *_: seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(words())
    assert seen == [(False, True)] * 2


class Remembering(nn.Module):
    """Sets attributes before its blocks, on itself and on a block, that the block and the end read."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Scaled() for _ in range(2))
        self.count = 0
        self.ends = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean = x.detach().mean()
        self.layer[1].factor = float(x.detach().max())
        for block in self.layer:
            x = block(x)
        self.ends += 1
        return x * self.mean + self.count


class Scaled(nn.Linear):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.factor


def test_attributes_that_a_forward_sets_are_those_of_its_chunk() -> None:
    torch.manual_seed(0)
    bare = Remembering()
    model = wrap(bare, blocks="layer")
    chunks = [torch.randn(3, WIDTH) for _ in range(3)]
    for _ in range(2):
        expected = [bare(chunk) for chunk in chunks]
        outputs = model.forward_chunks(chunks)
        assert all(torch.equal(a, b) for a, b in zip(expected, outputs, strict=True))
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        sum(output.sum() for output in expected).backward()
        assert (model.count, model.ends) == (bare.count, bare.ends)
        assert torch.equal(model.mean, bare.mean)
        for p, q in zip(bare.parameters(), model.parameters(), strict=True):
            assert close(p.grad, q.grad)


def test_a_recomputation_reads_the_attributes_that_its_forward_set() -> None:
    torch.manual_seed(0)
    bare = Remembering()
    model = wrap(bare, blocks="layer")
    first, second = torch.randn(3, WIDTH), torch.randn(3, WIDTH)
    for each in (bare, model):
        (each(first).square().sum() + each(second).square().sum()).backward()
        assert each.layer[1].factor == float(second.max())
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert close(p.grad, q.grad)


SCOPE: ContextVar[float] = ContextVar("scope", default=1.0)


class Scoped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * SCOPE.get()).tanh()


class WithScopes(nn.Module):
    """Sets a context variable around each block, to a value of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Scoped() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scale = float(x.detach().max())
        for k, block in enumerate(self.layer):
            token = SCOPE.set(scale + k)
            x = block(x)
            SCOPE.reset(token)
        return x


@pytest.mark.parametrize("recompute", [True, False])
def test_context_variables_reach_blocks_and_recomputations_as_the_forward_of_their_chunk_set_them(
    recompute: bool,
) -> None:
    torch.manual_seed(0)
    bare = WithScopes()
    model = wrap(bare, blocks="layer", checkpoint_activation=recompute)
    chunks = [torch.randn(3, WIDTH) for _ in range(3)]
    for count in (1, 3):
        expected = [bare(chunk) for chunk in chunks[:count]]
        outputs = model.forward_chunks(chunks[:count])
        assert all(torch.equal(a, b) for a, b in zip(expected, outputs, strict=True))
        sum(output.square().sum() for output in expected).backward()
        torch.autograd.backward(outputs, [2 * output.detach() for output in outputs])
        for p, q in zip(bare.parameters(), model.parameters(), strict=True):
            assert close(p.grad, q.grad)
    assert SCOPE.get() == 1.0


class Counter:
    """An argument of blocks that keeps a number, and an array of NumPy beside it."""

    def __init__(self) -> None:
        self.count, self.array = 1.0, np.ones(WIDTH, dtype=np.float32)
        self.training = 1.0  # modules have an attribute of this name


class Reading(nn.Linear):
    """Reads objects that it gets, and changes one of them."""

    noise: torch.Generator | None = None

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, counter: Counter, array: Any, generator: torch.Generator | None) -> Tensor:
        counter.count *= 1.5
        x = super().forward(x) * counter.count * counter.training * torch.from_numpy(array.copy())
        return (x + torch.rand(x.shape, generator=generator) + torch.rand(x.shape, generator=self.noise)).sin()


class WithObjects(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ModuleList(Reading() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        counter, generator = Counter(), torch.Generator().manual_seed(1)
        for block in self.layer:
            counter.training += 1
            counter.array *= 2
            block.noise = torch.Generator().manual_seed(2)
            x = block(x, counter, counter.array, generator)
        return x * counter.count + torch.rand((), generator=generator)


def assert_step_equal(bare: nn.Module, model: Any) -> None:
    x = torch.randn(3, WIDTH)
    losses = [each(x).square().sum() for each in (bare, model)]
    for loss in losses:
        loss.backward()
    assert torch.equal(*losses)
    assert_equal(bare, model)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_recomputation_sees_the_objects_arrays_and_generators_that_its_block_got(recompute: bool) -> None:
    torch.manual_seed(0)
    bare = WithObjects()
    model = wrap(bare, blocks="layer", checkpoint_activation=recompute)
    for _ in range(2):
        assert_step_equal(bare, model)


class Turned(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor, forth: Tensor, back: Tensor) -> Tensor:
        turned = torch.view_as_complex(super().forward(x).view(len(x), -1, 2))
        return x + torch.view_as_real(turned * forth + turned.square() * back).reshape_as(x)


class WithTables(nn.Module):
    """Gives its blocks a table and another view of the same memory: its conjugate, or a negative imaginary part."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.ModuleList(Turned() for _ in range(3)), kind

    def forward(self, x: Tensor) -> Tensor:
        table = torch.polar(torch.ones(WIDTH // 2), torch.arange(WIDTH // 2) / 3)
        tables = (table, table.conj()) if self.kind == "conjugate" else (table.imag, table.conj().imag)
        for block in self.layer:
            x = block(x, *tables)
        return x


@pytest.mark.parametrize("kind", ["conjugate", "negative"])
def test_views_of_one_memory_that_enter_blocks_are_told_apart(kind: str) -> None:
    torch.manual_seed(0)
    bare = WithTables(kind)
    model = wrap(bare, blocks="layer")
    assert_step_equal(bare, model)


def test_a_block_that_calls_the_model_is_refused() -> None:
    model = wrap(make())
    hook = model.encoder.layer[1].linear.register_forward_hook(lambda *_: model(words()))
    with pytest.raises(RuntimeError, match="in the middle of a forward"):
        model(words())
    hook.remove()
    step(model)


def test_a_result_that_is_one_number_is_refused_with_micro_batches() -> None:
    class Loss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layer[1](self.layer[0](x)).sum()

    model = wrap(Loss(), blocks="layer", num_microbatches=2)
    with pytest.raises((RuntimeError, ValueError), match="dimension"):
        model(torch.ones(4, WIDTH))
    model._offloaded.calls.micro_batches.given = 1
    model(torch.ones(4, WIDTH)).backward()


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_create_graph_is_refused_before_gradients_are_made_unless_hooks_keep_them(
    hooked: bool, max_norm: float | None, tmp_path: Path
) -> None:
    bare = make(dropout=0.0)
    model = wrap(bare, tmp_path)
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1, max_norm=max_norm)
    for p in (*bare.parameters(), *model.parameters()) if hooked else ():
        p.register_hook(lambda gradient: gradient * 1)
    losses = [loss_of(run(words())) for run in (bare, model)]
    losses[0].backward(create_graph=True)
    if hooked:
        losses[1].backward(create_graph=True)
        for p, q in zip(bare.parameters(), model.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
            assert q.grad.requires_grad
    else:
        with pytest.raises(RuntimeError, match="without create_graph=True"):
            losses[1].backward(create_graph=True)
        assert all(p.grad is None for p in model.parameters())
    del optimizer
