"""What users pass to a step over a wrapped OffloadModel, and what a tower does around its call."""

from __future__ import annotations

import contextlib
import copy
import threading
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradcache import GradCache
from tests.gradcache.wrapped_towers import (
    KINDS,
    SHARDS,
    WIDTH,
    Embedding,
    Residual,
    Tower,
    TwoBodies,
    assert_same,
    layer_by_layer,
    layers,
    loads,
    rows,
    square,
    with_offload,
)

# --- what users pass -----------------------------------------------------------------------------------------------


def test_process_fn_and_get_rep_fn_with_parameters_run_around_the_tower() -> None:
    torch.manual_seed(11)
    process, rep = nn.Linear(4, WIDTH).double(), nn.Sequential(nn.Dropout(0.3), nn.Linear(WIDTH, 3)).double()
    plain = Embedding()
    ours, process_again, rep_again = with_offload(plain), copy.deepcopy(process), copy.deepcopy(rep)
    x = torch.randn(5, 4, dtype=torch.float64)
    torch.manual_seed(2)
    square(rep(plain(process(x)))).backward()
    torch.manual_seed(2)
    GradCache([ours], 5, square, get_rep_fn=rep_again, process_fn=process_again)(x)
    assert_same(plain, ours)
    assert_same(rep, rep_again)


def test_encode_leaves_the_second_pass_to_the_callers_backward() -> None:
    plain = Embedding(dropout=0.4)
    ours = with_offload(plain)
    torch.manual_seed(1)
    square(layer_by_layer(plain, rows(6).split(2))).backward()
    torch.manual_seed(1)
    (encoded,) = GradCache([ours], 2, square).encode(rows(6))
    loss = square(encoded)
    assert loads(ours) == [SHARDS]
    loss.backward()
    assert_same(plain, ours)
    assert max(loads(ours)) <= 2 * SHARDS


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


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_call_inside_a_checkpoint_of_torch_is_run_where_it_is(reentrant: bool) -> None:
    class Checkpointed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, self.first(x), use_reentrant=reentrant)

    plain = Checkpointed()
    ours = with_offload(plain)
    square(plain(rows(6))).backward()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        GradCache([ours], 2, square)(rows(6))
    assert_same(plain, ours)
    said = [str(warning.message) for warning in caught if "Sequential in Checkpointed" in str(warning.message)]
    assert len(said) == (not reentrant)


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
    **{kind.__name__: (kind, 2) for kind in (CheckpointedPrefix, KeepsMask, Toggles, FlagsAround, InPlace)},
    **{kind.__name__: (kind, 4) for kind in (Several, NormBehind, Evaluates, Replaces)},
    "Unrecorded": (Unrecorded, 1),
    **{
        f"Shared {place}": (lambda place=place: Shared(place), 2)
        for place in ("global", "thread-local", "deep object", "stack")
    },
}


@pytest.mark.parametrize("recompute", [True, False], ids=["checkpoint", "graphs"])
@pytest.mark.parametrize("name", TOWERS)
def test_a_tower_around_a_model_trains_as_the_plain_one_with_few_loads(
    name: str, recompute: bool, tmp_path: Path
) -> None:
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
