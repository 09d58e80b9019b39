"""A model whose instance has a forward of its own: set before it is wrapped, or around the wrapper, as trainers do."""

from __future__ import annotations

import copy
import functools
import inspect
import types
from typing import Any

import torch

from offload import OffloadModel
from tests.offload.blocks.towers import assert_equal, loss_of, make, words


def wrap(bare: Any, **choices: Any) -> Any:
    return OffloadModel(bare, "cpu", checkpoint_activation=True, blocks="encoder.layer", **choices)


def step(model: Any) -> None:
    torch.manual_seed(3)
    loss_of(model(words())).backward()


def in_16_bits(model: Any) -> None:
    """Replaces the forward of an instance as accelerate's mixed precision does."""
    around = torch.autocast("cpu", torch.bfloat16)
    model._original_forward = model.forward
    model.forward = types.MethodType(around(model.forward.__func__), model)


def test_a_forward_set_on_the_wrapper_runs_around_it() -> None:
    bare = make()
    model = wrap(copy.deepcopy(bare))
    for each in (bare, model):
        in_16_bits(each)
        step(each)
    assert_equal(bare, model)
    assert model.statistics().shard_loads == 2 * 4 - 2
    again = copy.deepcopy(model)
    step(again)
    assert again.statistics().shard_loads == 2 * 4 - 2


def test_a_forward_set_on_the_wrapper_is_taken_off_again() -> None:
    bare = make()
    model = wrap(copy.deepcopy(bare))
    in_16_bits(model)
    forward = inspect.unwrap(model.forward.__func__)
    del model._original_forward
    model.forward = types.MethodType(forward, model)
    step(bare), step(model)
    assert_equal(bare, model)
    assert model.statistics().shard_loads == 2 * 4 - 2
    assert inspect.signature(type(model).forward) == inspect.signature(type(bare).forward)


def test_a_forward_that_the_instance_had_before_calls_the_blocks() -> None:
    bare = make()

    def with_own_forward(model: Any) -> Any:
        forward = type(model).forward

        @functools.wraps(forward)
        def twice_as_wide(*args: Any) -> Any:
            output = forward(model, *args)
            return {**output, "states": output["states"] * 2}

        model.forward = twice_as_wide
        return model

    model = wrap(with_own_forward(copy.deepcopy(bare)))
    step(with_own_forward(bare)), step(model)
    assert_equal(bare, model)
    assert model.statistics().shard_loads == 2 * 4 - 2
