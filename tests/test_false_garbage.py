"""A garbage collection in another thread harms nothing that a graph holds, whatever it takes for garbage meanwhile.

Rarely a loss was refused, since a collection had cleared a weak reference of a node of its graph; see
:mod:`pipe.freed`. The race itself depends on when two threads run. So this counts as the collection does, in the case
that is worst for it: all objects with which autograd functions remember their forwards have lost the reference that
their output has.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from gradcache import GradCache
from offload import MemoryPolicy, OffloadEmbeddingBag, OffloadModel
from pipe import Pipe
from tests.gradcache.wrapped_towers import KINDS, rows, with_offload
from tests.offload.blocks.towers import loss_of, make, words

WIDTH = 8


def contexts() -> list[Any]:
    """The ``ctx`` objects of all graphs."""
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, FunctionCtx)]


def _reached(begin: Iterable[Any], within: Mapping[int, Any]) -> dict[int, Any]:
    """By identity: the objects ``begin``, and those ``within`` that they lead to."""
    left = list(begin)
    reached = {id(each): each for each in left}
    while left:
        for held in gc.get_referents(left.pop()):
            if id(held) in within and id(held) not in reached:
                reached[id(held)] = held
                left.append(held)
    return reached


def false_garbage(lost: Sequence[Any]) -> list[Any]:
    """``lost``, and what only they hold."""
    # Without what is frozen, of which collections know nothing.
    reached = _reached(lost, {id(each): each for each in gc.get_objects()})
    count = dict.fromkeys(reached, 0)
    for key in reached:
        for held in gc.get_referents(reached[key]):
            if id(held) in count:
                count[id(held)] += 1
    for each in lost:
        count[id(each)] = sys.maxsize
    # Two more are that of the dict and that of the call.
    elsewhere = [key for key in reached if sys.getrefcount(reached[key]) - 2 > count[key]]
    in_use = _reached((reached[key] for key in elsewhere), reached)
    return [each for key, each in reached.items() if key not in in_use]


def harmed(garbage: Sequence[Any]) -> list[str]:
    """What of it a collection would change before it finds that it is no garbage."""
    found = []
    for each in garbage:
        if isinstance(each, weakref.ref):
            found.append(f"a weak reference to {each()!r:.80} is cleared")
        elif weakref.getweakrefcount(each):
            found.append(f"weak references to {each!r:.80} are cleared")
        if hasattr(type(each), "__del__"):
            found.append(f"__del__ of {each!r:.80} is called")
    return found


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
