"""Layers that run again, and the one rule for those that write into their input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pipe.nested import map_distinct
from pipe.recompute.input_writes import InputWrites
from pipe.recompute.module_state import WatchedModule
from pipe.recompute.rerun import RepeatableLayers


def halved(x: Tensor) -> Tensor:
    return x.mul_(0.5)


def doubled(x: Tensor) -> Tensor:
    return x * 2


class Counting(nn.Module):
    """Draws, writes a buffer, and counts its calls in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()))
        self.linear, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.total += 1
        drawn: Tensor = nn.functional.dropout(self.linear(x), 0.5) * self.calls * self.total
        return drawn


def repeatable(module: nn.Module) -> RepeatableLayers:
    return RepeatableLayers(WatchedModule(module), [torch.device("cpu")], InputWrites("layer 0"))


def test_a_second_run_gives_the_same_and_leaves_no_trace() -> None:
    module = Counting()
    layers, x = repeatable(module), torch.randn(3, 4)
    replay = layers.begin()
    with replay.first(), torch.no_grad():
        output = layers.run(module, x, replay)
    module(x)  # another forward in between
    state = torch.get_rng_state()
    again = layers.repeat(module, x, replay)
    assert torch.equal(again, output)
    assert (module.calls, float(module.total)) == (2, 2.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_first_run_tells_whether_later_ones_need_a_copy() -> None:
    writes = InputWrites("layer 3")
    x = torch.ones(2)
    for k in range(2):
        with writes.survived(x, "training") as given:
            halved(given)
        assert given is not x, k
    assert torch.equal(x, torch.ones(2))
    assert writes.copies("training")
    for k in range(2):  # another kind has a first run of its own
        with writes.survived(x, "evaluation") as given:
            doubled(given)
        assert (given is x) == (k > 0)


def test_layers_that_begin_to_write_later_are_told_of_once() -> None:
    writes = InputWrites("layer 3")
    with writes.survived(torch.ones(2), None) as given:
        doubled(given)
    x = torch.ones(2)
    with pytest.raises(RuntimeError, match="layer 3 wrote into its input in place"), writes.survived(x, None) as given:
        halved(given)
    x = torch.ones(2)
    with writes.survived(x, None) as given:
        halved(given)
    assert torch.equal(x, torch.ones(2))


@pytest.mark.parametrize("shared", [True, False])
def test_a_write_that_another_tensor_would_see_is_refused_and_no_other(shared: bool) -> None:
    storage = torch.ones(6)
    pair = (storage[:4], storage[3:] if shared else storage[4:])
    writes = InputWrites("layer 3")

    def run() -> None:
        with writes.survived(pair, None) as given:
            halved(given[0])

    if shared:
        with pytest.raises(RuntimeError, match="shares memory"):
            run()
    else:
        run()
    assert torch.equal(storage, torch.ones(6))


def test_a_tensor_that_stands_at_two_places_is_one_in_the_copy() -> None:
    x = torch.ones(2)
    copied: Any = map_distinct(Tensor.clone, {"a": x, "b": [x]})
    assert copied["a"] is copied["b"][0]
    assert copied["a"] is not x


def test_what_cannot_be_learnt_is_copied() -> None:
    writes = InputWrites("layer 3")
    with torch.inference_mode():
        x = torch.ones(2)
        for _ in range(2):
            with writes.survived(x, None) as given:
                halved(given)
    assert torch.equal(x, torch.ones(2))
