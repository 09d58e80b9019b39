"""Small towers at random, with OffloadModels anywhere in them, against the plain ones."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradcache import GradCache
from tests.gradcache.wrapped_towers import (
    SHARDS,
    WIDTH,
    assert_same,
    layers,
    loads,
    rows,
    square,
    with_offload,
)

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

    def forward(self, x: Tensor) -> Tensor:
        first = x
        for piece in self.pieces:
            x = getattr(self, piece)(x) if piece in "bB" else self.step(piece, x)
        return x + first * x if self.skips else x

    def layer_by_layer(self, chunks: Sequence[Tensor]) -> Iterator[Tensor]:
        """The same for many chunks, each piece for all chunks before the next."""
        values = list(chunks)
        segments: list[str] = [""]
        for piece in self.pieces:
            if piece in "bB":
                segments += [piece, ""]
            else:
                segments[-1] += piece
        for segment in segments:
            if segment in ("b", "B"):
                for layer in getattr(self, segment):
                    values = [layer(value) for value in values]
                continue
            for i, value in enumerate(values):
                for piece in segment:
                    value = self.step(piece, value)
                values[i] = value
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
)
def test_any_small_tower_equals_the_plain_one_run_in_the_same_order(
    pieces: str, skips: bool, sizes: list[int], recompute: bool, steps: int, microbatches: int, needs_input: bool
) -> None:
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
            loss = Uneven([ours], 2, square)(inputs[1])
        assert bool(caught) == (seed == 0 and norm_on_both_sides and len(sizes) > 1)
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-13)
        assert torch.equal(torch.get_rng_state(), state)
        for body, then, now in zip(("b", "B"), before, loads(ours), strict=True):
            assert now - then <= 2 * SHARDS * pieces.count(body)
        if needs_input and leaves[0].grad is not None:
            torch.testing.assert_close(leaves[1].grad, leaves[0].grad, rtol=1e-10, atol=1e-14)
    assert_same(plain, ours, 1e-11)
