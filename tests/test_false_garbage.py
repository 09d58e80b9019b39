"""A garbage collection in another thread harms nothing that a graph holds, whatever it takes for garbage meanwhile.

Rarely a loss was refused, since a collection had cleared a weak reference of a node of its graph.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradcache import GradCache
from offload import MemoryPolicy, OffloadEmbeddingBag, OffloadModel
from pipe import Pipe
from tests.false_garbage import contexts, false_garbage, harmed
from tests.gradcache.wrapped_towers import KINDS, rows, with_offload
from tests.offload.blocks.towers import loss_of, make, words

WIDTH = 8


class Layer(nn.Module):
    """Draws random numbers, and reads a buffer too large to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout, self.norm = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.LayerNorm(WIDTH)
        self.register_buffer("table", torch.ones(1 << 15))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.dropout(self.linear(x))) * self.table[0]
        return out


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4)))


def offloaded(home: Path, **choices: Any) -> OffloadModel:
    return OffloadModel(layers(), "cpu", home, 4, **choices)


def batch() -> Tensor:
    return torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(0))


def spilling(home: Path) -> OffloadModel:
    return offloaded(home, checkpoint_activation=True, memory=MemoryPolicy.fixed(boundary_bytes=0))


def called(model: nn.Module) -> tuple[Tensor, nn.Module]:
    return model(batch()), model


def encoded(*models: nn.Module, value: Callable[[], Tensor] = batch) -> tuple[Tensor, GradCache]:
    step = GradCache(list(models), 2, lambda *reps: reps[0].sum())
    return torch.cat(step.encode(*(value() for _ in models))), step


def in_chunks(home: Path) -> tuple[Tensor, nn.Module]:
    model = spilling(home)
    return torch.cat(model.forward_chunks([batch(), batch()])), model


def looked_up(home: Path) -> tuple[Tensor, nn.Module]:
    table = OffloadEmbeddingBag(10, WIDTH, mode="sum", offload_device=home)
    return table(torch.tensor([[1, 2], [3, 3]])), table


def with_blocks(home: Path) -> tuple[Tensor, nn.Module]:
    model = OffloadModel(make(), "cpu", home, checkpoint_activation=True, blocks="encoder.layer")
    return loss_of(model(words=words())), model


GRAPHS: dict[str, Callable[[Path], tuple[Tensor, Any]]] = {
    "kept graphs": lambda home: called(offloaded(home)),
    "recomputation, boundaries on disk": lambda home: called(spilling(home)),
    "blocks of a model": with_blocks,
    "stages": lambda home: called(Pipe(layers(), [2, 2], ["cpu", "cpu"], chunks=2, checkpoint="always")),
    "chunks of plain and offloaded towers": lambda home: encoded(layers(), spilling(home)),
    "chunks of towers around offloaded models": lambda home: encoded(
        with_offload(KINDS["normalised"](), home, checkpoint_activation=True), value=lambda: rows(6)
    ),
    "chunks": in_chunks,
    "rows of a table": looked_up,
}


@pytest.mark.parametrize("kind", GRAPHS)
def test_what_only_a_graph_holds_has_no_weak_reference_and_no_finalizer(kind: str, tmp_path: Path) -> None:
    before = {id(each) for each in contexts()}
    output, _owner = GRAPHS[kind](tmp_path)
    lost = [each for each in contexts() if id(each) not in before]
    assert lost
    assert harmed(false_garbage(lost)) == []
    del lost
    output.sum().backward()


def test_such_a_reference_is_found() -> None:
    class Held:
        pass

    class Holds(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, held: Held) -> Tensor:
            ctx.held, ctx.seen = held, weakref.ref(held)
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return gradients[0], None

    held: Held | None = Held()
    output = Holds.apply(torch.zeros(1, requires_grad=True), held)  # type: ignore[no-untyped-call]
    lost = [output.grad_fn]
    assert [text.split(" to ")[0] for text in harmed(false_garbage(lost))] == ["a weak reference"]
    held = None
    assert sorted(text.split(" to ")[0] for text in harmed(false_garbage(lost))) == [
        "a weak reference",
        "weak references",
    ]
