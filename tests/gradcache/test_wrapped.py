"""Towers with an OffloadModel inside: shard by shard inside it, and everything else as in the plain tower."""

from __future__ import annotations

import contextlib
import copy
import re
import threading
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradcache import GradCache
from offload import OffloadOptimizer
from offload.streaming.streamer import Streamer
from pipe.checkpoint import checkpoint as pipe_checkpoint
from tests.gradcache.towers import offloaded
from tests.gradcache.wrapped_towers import (
    KINDS,
    SHARDS,
    WIDTH,
    Embedding,
    Residual,
    Tower,
    TwoBodies,
    assert_same,
    bodies,
    layers,
    loads,
    rows,
    square,
    with_offload,
)


@pytest.fixture(params=["host", "disk"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return tmp_path if request.param == "disk" else "cpu"


# --- several steps, optimizers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["embedding", "two bodies"])
@pytest.mark.parametrize("update_in_backward", [False, True])
def test_offload_optimizers_train_a_wrapped_model_as_the_plain_one(
    update_in_backward: bool, kind: str, home: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates that are pending run beside the next step, which reads no values before a shard is loaded."""
    plain = KINDS[kind]()
    ours = with_offload(plain, home)
    own = [p for name, p in ours.named_parameters() if not name.startswith(("body", "second"))]
    inner = [
        OffloadOptimizer(body, torch.optim.SGD, lr=0.1, update_in_backward=update_in_backward) for body in bodies(ours)
    ]
    finished: list[int] = []
    for model, optimizers in (
        (plain, [torch.optim.SGD(plain.parameters(), lr=0.1)]),
        (ours, [*inner, torch.optim.SGD(own, lr=0.1)]),
    ):
        for seed in (3, 4, 5):
            with monkeypatch.context() as patch:
                patch.setattr(Streamer, "apply_pending_updates", lambda self: finished.append(1))
                GradCache([model], 2, square)(rows(6, seed))
            assert finished == []
            for optimizer in optimizers:
                optimizer.step()
            assert update_in_backward or home == "cpu" or all(s.pending for b in bodies(model) for s in b._homes.shards)
            for optimizer in optimizers:
                optimizer.zero_grad()
    torch.testing.assert_close(list(ours.parameters()), list(plain.parameters()), rtol=1e-12, atol=1e-13)


# --- who shares what -----------------------------------------------------------------------------------------------


def test_different_towers_around_one_model_share_its_visits(home: Any) -> None:
    class Around(nn.Module):
        def __init__(self, body: nn.Module, seed: int) -> None:
            super().__init__()
            torch.manual_seed(seed)
            self.body, self.last = body, nn.Linear(WIDTH, 4).double()

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.body(x))

    bare = layers()
    body = offloaded(copy.deepcopy(bare), home if home == "cpu" else home / "body")
    plain: list[nn.Module] = [Around(bare, 1), Around(bare, 2), bare]
    ours: list[nn.Module] = [Around(body, 1), Around(body, 2), body]
    inputs = [rows(6), rows(5, 4), rows(7, 5)]
    before = body.statistics().shard_loads

    def loss(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return square(a, b) + square(c) + a.sum() * c.mean()

    GradCache(plain, 2, loss)(*inputs)
    GradCache(ours, 2, loss)(*inputs)
    assert body.statistics().shard_loads - before <= 2 * SHARDS
    for expected, actual in zip(plain[:2], ours[:2], strict=True):
        assert_same(expected, actual)


def test_a_model_waits_for_the_chunks_of_a_tower_that_calls_another_one_first() -> None:
    both = TwoBodies()
    ours = with_offload(both)
    inputs = [rows(4), rows(12, 4)]
    for model in (both, ours):
        GradCache([model, nn.Sequential(model.second, nn.Identity())], 2, square)(*inputs)
    assert_same(both, ours)
    assert max(loads(ours)) <= 2 * SHARDS


def test_micro_batches_of_the_model_stay_micro_batches() -> None:
    """Batch normalisation inside the body sees the rows that it sees in the model's own forward."""
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, 4))).double()
    ours = with_offload(plain, num_slices=2, num_microbatches=2)
    square(torch.cat([plain(part) for part in rows(16).split(4)])).backward()
    GradCache([ours], 8, square)(rows(16))
    assert_same(plain, ours)


# --- what a tower does around the call ------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["in the tower", "around encode()"])
def test_autocast_around_the_call_is_in_force_when_the_model_runs_also_in_a_later_backward(where: str) -> None:
    class Cast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.first, self.body = nn.Linear(WIDTH, WIDTH), layers().float()

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.body(x)
            return h.float()

    plain = Cast()
    ours = with_offload(plain)
    for model in (plain, ours):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=where != "in the tower"):
            (encoded,) = GradCache([model], 2, square).encode(rows(6).float())
        square(encoded).backward()
    assert_same(plain, ours, 1e-6)
    assert max(loads(ours)) <= 2 * SHARDS


class ReadsMask(nn.Module):
    """A layer that is told something by the tower, past its arguments."""

    mask: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask


class SetsMaskOfLayer(nn.Module):
    """Layers are configured for one call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers(), ReadsMask())

    def forward(self, x: Tensor) -> Tensor:
        list(self.body.children())[-1].mask = (x > 0).double()  # type: ignore[assignment]
        return self.body(x)


class CopiesIntoBuffer(nn.Module):
    """The next chunk overwrites the arguments of the call."""

    def __init__(self) -> None:
        super().__init__()
        self.body = layers()
        self.register_buffer("place", torch.zeros(2, WIDTH, dtype=torch.float64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        assert isinstance(self.place, Tensor)
        self.place.copy_(x)
        return self.body(self.place)


class EitherOrder(TwoBodies):
    """Chunks call models in different orders."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.body, self.second) if float(x[0, 0]) > 0 else (self.second, self.body)
        return second(first(self.first(x)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SetsMaskOfLayer, "Sequential in SetsMaskOfLayer .* changes its state only during the call"),
        (CopiesIntoBuffer, "overwritten by the next chunk"),
        (EitherOrder, "in EitherOrder .* in another order"),
    ],
)
def test_calls_that_cannot_run_together_are_right_with_one_warning(kind: Any, words: str) -> None:
    plain = kind()
    ours = with_offload(plain)
    step = GradCache([ours], 2, square)
    for k in range(2):
        GradCache([plain], 2, square)(rows(12, 6))
        with pytest.warns(RuntimeWarning, match=words) if k == 0 else contextlib.nullcontext():
            step(rows(12, 6))
    assert_same(plain, ours)
    assert kind is not EitherOrder or sum(loads(ours)) <= 2 * 6 * SHARDS


@pytest.mark.parametrize("kind", ["reentrant", "not reentrant", "pipe"])
def test_a_call_inside_a_checkpoint_is_run_where_it_is(kind: str) -> None:
    class Checkpointed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            if kind == "pipe":
                return pipe_checkpoint(lambda v: self.body(v) * 2, self.first(x))
            return checkpoint(self.body, self.first(x), use_reentrant=kind == "reentrant")

    plain = Checkpointed()
    ours = with_offload(plain)
    square(plain(rows(6))).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GradCache([ours], 2, square)(rows(6))
    assert_same(plain, ours)
    said = [str(warning.message) for warning in caught if "Sequential in Checkpointed" in str(warning.message)]
    assert len(said) == (kind != "reentrant")


# --- towers that train as the plain ones ---------------------------------------------------------------------------


class CheckpointedPrefix(Embedding):
    """With batch normalisation, which counts each chunk once."""

    def prefix(self, x: Tensor) -> Tensor:
        return checkpoint(super().prefix, x, use_reentrant=False)


class KeepsMask(Tower):
    """Keeps things in attributes between prefix and suffix."""

    def forward(self, x: Tensor) -> Tensor:
        self.mask = (x > 0).double()
        return self.body(self.first(x)) * self.mask


class Toggles(Tower):
    """Training flags that it sets for its call hold when the model runs."""

    dropout = 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.body.eval()
        h = self.body(x)
        self.body.train()
        return nn.functional.dropout(h, 0.0, self.training)


class FlagsAround(Tower):
    """Training flags that it sets before its call hold in its suffix, and not in the next chunk."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm_before(self.first(x))
        self.norm_before.eval()
        self.drop.p = 0.5
        self.drop.eval()
        h = self.drop(self.body(x))
        self.norm_before.train()
        self.drop.train()
        return self.last(h)


class InPlace(Tower):
    """Writes over its input, and over what the body returns."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*layers(), nn.Linear(WIDTH, WIDTH).double())

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        h = self.body(self.first(x * 1))
        h.mul_(3).tanh_()
        return h + x.add_(1)


class Unrecorded(Embedding):
    """Calls its body without gradients, and writes over what it returns."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            h = self.body(self.prefix(x))
        return self.suffix(h.mul_(3).tanh_())


class FrozenBody(Embedding):
    """Passes gradients to what is trained before it."""

    def __init__(self) -> None:
        super().__init__()
        self.body.requires_grad_(False)


class Several(Tower):
    """Calls its model never, once or twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(int(x.detach()[0, 0] > 0) + int(x.detach()[0, 1] > 0)):
            x = self.body(x)
        return x


class NormBehind(Several):
    """Writes running statistics behind the last call, and draws there."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.norm_after(super().forward(x)), 0.4, self.training)


class Evaluates(Tower):
    """Its second call is in evaluation."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if float(x.detach()[0, 0]) > 0:
            self.body.eval()
            h = h + self.body(x)
            self.body.train()
        return self.norm_after(h)


class Replaces(Several):
    """Replaces a buffer behind its last call."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(0, WIDTH, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        self.seen = torch.cat([self.seen, h.detach()])
        return h


_GLOBALS, _LOCALS = types.SimpleNamespace(), threading.local()


class Shared(Tower):
    """Keeps something of each chunk in one place before the body, and reads it behind the body."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place, self.stack = place, []
        self.outer = types.SimpleNamespace(inner=types.SimpleNamespace())

    def forward(self, x: Tensor) -> Tensor:
        mask = (x > 0).double()
        kept: Any = {"global": _GLOBALS, "thread-local": _LOCALS, "deep object": self.outer.inner}.get(self.place)
        if kept is None:
            self.stack.append(mask)
        else:
            kept.mask = mask
        h = self.body(self.first(x))
        return self.last(h * (self.stack.pop() if kept is None else kept.mask))


#: Each, and how often a step loads its shards.
TOWERS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    **{name: (kind, 2) for name, kind in KINDS.items()},
    **{kind.__name__: (kind, 2) for kind in (CheckpointedPrefix, KeepsMask, Toggles, FlagsAround, InPlace, FrozenBody)},
    **{kind.__name__: (kind, 4) for kind in (Several, NormBehind, Evaluates, Replaces)},
    "Unrecorded": (Unrecorded, 1),
    **{
        f"Shared {place}": (lambda place=place: Shared(place), 2)
        for place in ("global", "thread-local", "deep object", "stack")
    },
}


@pytest.mark.parametrize("recompute", [True, False], ids=["checkpoint", "graphs"])
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_around_a_model_is_the_plain_one_with_few_loads(name: str, recompute: bool, tmp_path: Path) -> None:
    """All chunks run in their order: what they write, and draw outside of the body, is as in the plain tower."""
    make, most = TOWERS[name]
    plain = make()
    ours = with_offload(plain, tmp_path if recompute else "cpu", checkpoint_activation=recompute)
    inputs = [rows(16, 6)] * (2 if name in KINDS else 1)
    for seed in range(2):
        states = []
        before = loads(ours)
        for model in (plain, ours):
            torch.manual_seed(seed)
            GradCache([model] * len(inputs), 4 if name in KINDS else 2, square)(*inputs)
            states.append(torch.get_rng_state())
        assert torch.equal(*states)
        taken = [now - then for now, then in zip(loads(ours), before, strict=True)]
        assert max(taken) <= (2 if name in KINDS else most) * SHARDS
    assert_same(plain, ours)
    assert torch.equal(inputs[0], rows(16, 6))
    assert all(module.training for module in ours.modules())


def test_a_subclass_with_a_model_call_of_its_own_runs_chunk_by_chunk_and_warns_once() -> None:
    class Doubled(GradCache):
        def model_call(self, model: nn.Module, model_input: Any) -> Any:
            return 2 * super().model_call(model, model_input)

    plain = Residual()
    ours = with_offload(plain)
    (2 * plain(rows(4))).square().sum().backward()
    step = Doubled([ours], 2, lambda r: r.square().sum())
    with pytest.warns(RuntimeWarning, match="Sequential in Residual .* Doubled replaces model_call"):
        step(rows(4))
    assert_same(plain, ours)
    step(rows(4))


# --- small towers at random ----------------------------------------------------------------------------------------


class RandomTower(nn.Module):
    """A tower of pieces: a letter each. ``b`` and ``B`` are bodies, the others what stands around them."""

    def __init__(self, pieces: str, skips: bool) -> None:
        super().__init__()
        torch.manual_seed(len(pieces))
        self.pieces, self.skips = pieces, skips
        self.b, self.B = layers(1, 0.3), layers(2)
        self.linear = nn.Linear(WIDTH, WIDTH).double()
        self.frozen = nn.Linear(WIDTH, WIDTH).double().requires_grad_(False)
        self.norm = nn.BatchNorm1d(WIDTH).double()

    def step(self, piece: str, x: Tensor) -> Tensor:
        steps: dict[str, Callable[[Tensor], Tensor]] = {
            "l": self.linear,
            "f": self.frozen,
            "n": self.norm,
            "d": lambda x: nn.functional.dropout(x, 0.3, self.training),
            "i": lambda x: (x * 1).relu_() - 0.1,
            "0": Tensor.detach,
        }
        return steps[piece](x)

    def run(self, pieces: str, x: Tensor) -> Tensor:
        for piece in pieces:
            x = getattr(self, piece)(x) if piece in "bB" else self.step(piece, x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        h = self.run(self.pieces, x)
        return h + x * h if self.skips else h

    def layer_by_layer(self, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
        """The same for many chunks: each layer of a body, and all between bodies, for all chunks before the next."""
        values = list(chunks)
        for pieces in re.findall("[bB]|[^bB]+", self.pieces):
            for layer in getattr(self, pieces) if pieces in "bB" else [partial(self.run, pieces)]:
                values = [layer(value) for value in values]
        return (v + c * v if self.skips else v for v, c in zip(values, chunks, strict=True))


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    pieces=st.text("bBlfndi0", min_size=1, max_size=6),
    skips=st.booleans(),
    sizes=st.lists(st.integers(2, 4), min_size=1, max_size=4),
    recompute=st.booleans(),
    steps=st.integers(1, 2),
    microbatches=st.sampled_from([1, 1, 2]),
    needs_input=st.booleans(),
    encode=st.booleans(),
)
def test_any_small_tower_equals_the_plain_one_run_in_the_same_order(
    pieces: str,
    skips: bool,
    sizes: list[int],
    recompute: bool,
    steps: int,
    microbatches: int,
    needs_input: bool,
    encode: bool,
) -> None:
    """By a step, or by ``encode``, which leaves the second pass to the caller's backward."""

    class Uneven(GradCache):
        def split_inputs(self, model_input: Any, chunk_size: int) -> list[Any]:
            return list(model_input.split(sizes))

    if microbatches > 1:
        pieces = pieces.replace("b", "B")  # whose layers draw nothing, so that the order of the cells shows nowhere
    plain = RandomTower(pieces, skips)
    ours = with_offload(plain, checkpoint_activation=recompute, num_microbatches=microbatches)
    if not any(parameter.requires_grad for parameter in plain.parameters()):
        return
    norm_on_both_sides = sum("n" in segment for segment in pieces.replace("B", "b").split("b")) > 1
    for seed in range(steps):
        leaves = [rows(sum(sizes), seed).requires_grad_(needs_input) for _ in range(2)]
        inputs = [leaf * 1 for leaf in leaves]
        torch.manual_seed(seed)
        expected = square(torch.cat(list(plain.layer_by_layer(inputs[0].split(sizes)))))
        if expected.requires_grad:
            expected.backward()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        before = loads(ours)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            cache = Uneven([ours], 2, square)
            loss = square(*cache.encode(inputs[1])) if encode else cache(inputs[1])
            if loss.requires_grad:
                loss.backward()
        assert bool(caught) == (seed == 0 and norm_on_both_sides and len(sizes) > 1)
        torch.testing.assert_close(loss.detach(), expected.detach(), rtol=1e-12, atol=1e-13)
        assert torch.equal(torch.get_rng_state(), state)
        for body, then, now in zip(("b", "B"), before, loads(ours), strict=True):
            assert now - then <= 2 * SHARDS * pieces.count(body)
        if needs_input and leaves[0].grad is not None:
            torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-10, atol=1e-14)
    assert_same(plain, ours, 1e-11)
