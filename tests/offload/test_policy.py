"""MemoryPolicy: what it takes, what it refuses, and what a model makes of it."""

from __future__ import annotations

import copy
import dataclasses
import gc
import itertools
import pickle
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import offload.limits
import offload.memory
from offload import MemoryPolicy, OffloadModel
from offload.limits import Grant, MemoryLimits
from offload.memory import Needs, layout_of, limits_for, memory_of
from offload.telemetry.statistics import Meter
from offload.units import parse_bytes, shown_bytes
from tests.offload.zoo import build

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[torch.device, int]:
    """Free bytes of each device; no other grants."""
    found = {CPU: 1000 * MIB}
    monkeypatch.setattr(offload.limits, "free_bytes", lambda place: found[place])
    monkeypatch.setattr(offload.limits, "_living", weakref.WeakValueDictionary())
    return found


# --- the policy -----------------------------------------------------------------------------------------------------


def test_a_policy_holds_bytes_whatever_it_was_given() -> None:
    policy = MemoryPolicy({"device": "2GiB", "host": "auto"}, boundary_bytes="1KiB", graph_bytes=0, slots=3)
    assert policy == MemoryPolicy({"host": "auto", "device": 2 << 30}, boundary_bytes=1024, graph_bytes="0", slots=3)
    assert (policy.limit_of("device"), policy.limit_of("host")) == (2 << 30, None)
    assert MemoryPolicy("2GiB").limit_of("device") == 2 << 30
    assert MemoryPolicy("2GiB").limit_of("host") is None
    assert MemoryPolicy().memory == "auto"
    assert hash(policy) == hash(dataclasses.replace(policy))
    assert pickle.loads(pickle.dumps(policy)) == copy.deepcopy(policy) == policy
    assert eval(repr(policy)) == policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.slots = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"memory": None}, TypeError, "memory=None"),
        ({"memory": {}}, ValueError, "'device', 'host' or both, got an empty mapping"),
        ({"memory": {"gpu": 1}}, ValueError, "got 'gpu'"),
        ({"memory": {"device": "1GiB", "host": 1.5}}, TypeError, r"memory\['host'\]=1.5"),
        ({"slots": 1}, ValueError, "slots=1"),
        ({"slots": "3"}, TypeError, "slots='3'"),
        ({"activation_bytes": 0}, ValueError, "activation_bytes=0"),
        ({"join_chunks": 1}, TypeError, "join_chunks=1"),
        *(
            ({"keep": keep}, TypeError, "expected 'attention' or overloads such as .*, got keep=")
            for keep in ("attentions", 3, [nn.Linear])
        ),
        *(
            ({f"{name}_bytes": value}, error, f"{name}_bytes={value!r}")
            for name, (value, error) in itertools.product(
                ["boundary", "activation", "graph", "gradient", "resident"],
                [(-1, ValueError), ("much", ValueError), (1.5, TypeError), (False, TypeError)],
            )
        ),
    ],
)
def test_a_field_that_cannot_be_used_is_named(arguments: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        MemoryPolicy(**arguments)


# --- the model ------------------------------------------------------------------------------------------------------


def model_of(depth: int = 4, **arguments: Any) -> OffloadModel:
    return OffloadModel(nn.Sequential(*(nn.Linear(512, 512) for _ in range(depth))), "cpu", **arguments)


def limits(model: OffloadModel) -> MemoryLimits:
    assert model._offloaded.memory_limits is not None
    return model._offloaded.memory_limits


def cuts_of(model: OffloadModel) -> list[int]:
    return [len(shard.layers) for shard in model._homes.shards]


def test_a_memory_makes_a_shard_of_each_large_layer_recomputes_and_is_one_number_on_the_cpu() -> None:
    for memory in ("64MiB", {"host": "64MiB"}, {"host": "64MiB", "device": 64 * MIB}):
        model = model_of(memory=memory)
        assert cuts_of(model) == [1] * 4
        assert model._homes.recompute
        assert limits(model).device.nbytes == limits(model).host.nbytes == 64 * MIB
    assert cuts_of(OffloadModel(build(["linear", "linear"]), "cpu", memory="64MiB")) == [4]
    with pytest.raises(ValueError, match="one number where the compute device is the CPU"):
        model_of(memory={"host": "64MiB", "device": "32MiB"})


def test_shards_or_recomputation_without_memory_mean_what_they_do_in_fairscale() -> None:
    model = model_of(6, checkpoint_activation=False)
    assert cuts_of(model) == [2, 2, 2]
    assert not model._homes.recompute
    assert model._offloaded.memory_limits is None
    assert cuts_of(model_of(2, checkpoint_activation=True)) == [1, 1]
    assert model_of(6, num_slices=2)._offloaded.memory_limits is None


# --- limits ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
@pytest.mark.parametrize("num_slices", [None, 2])
def test_a_memory_that_is_too_small_says_the_least_that_works(
    tmp_path: Path, on_disk: bool, num_slices: int | None
) -> None:
    home = tmp_path if on_disk else "cpu"
    layer = 4 * 512 * 513
    bare = nn.Sequential(*(nn.Linear(512, 512) for _ in range(4)))
    with pytest.raises(ValueError, match=r"expected at least .* of host memory, got memory=1,000 bytes") as raised:
        OffloadModel(bare, "cpu", home, num_slices, memory=1000)
    message = str(raised.value)
    least = int(message.split("pass memory=")[1].split(",")[0])
    assert f"which is {shown_bytes(least - 1000)} short" in message
    shard = layer if num_slices is None else 2 * layer
    # Two slots, and two sets of gradients on their way to files, or all weights and gradients at home.
    assert least == (4 * shard if on_disk else 2 * shard + 8 * layer)
    assert ("num_slices=4 needs" in message) == (num_slices == 2)
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices, memory=least)
    assert model.memory_policy.boundary_bytes == 0
    model(torch.randn(2, 512)).sum().backward()
    with pytest.raises(ValueError, match="which is 1 bytes short"):
        OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices, memory=least - 1)


def granted(asked: int | None = None, *, least: int = 0, holds: int = 0) -> Grant:
    return Grant(CPU, asked, least=least, held=lambda: holds)


def test_auto_is_a_part_of_what_is_free_shared_by_those_that_say_so(free: dict[torch.device, int]) -> None:
    first = granted()
    assert first.nbytes == 900 * MIB
    second = granted(holds=100 * MIB)
    assert first.nbytes == second.nbytes == 500 * MIB  # what the second uses is its own
    free[CPU] = 0
    assert first.nbytes == 500 * MIB  # measured only when models are made or end
    free[CPU] = 1000 * MIB
    del second
    assert first.nbytes == 900 * MIB


@pytest.mark.parametrize("end", ["collected", "closed", "never made"])
def test_the_memory_of_a_model_that_ended_is_free_for_others(
    free: dict[torch.device, int], end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if end == "never made":
        monkeypatch.setattr("offload.construction.open_lanes", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError) as raised:
            model_of(memory="auto")
        assert raised.value is not None
    else:
        model = model_of(memory="auto")
        if end == "closed":
            model.close()
        else:
            del model
            gc.collect()
    assert granted().nbytes == 900 * MIB


def test_an_accelerator_and_the_host_have_limits_of_their_own(
    free: dict[torch.device, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload.limits, "capacity", lambda place: 1 << 40)
    free[GPU] = 2000 * MIB
    layers, layer = [nn.Linear(512, 512) for _ in range(4)], 4 * 512 * 513

    def limits_of(memory: Any, *, on_disk: bool = False) -> tuple[int, int]:
        policy = memory_of(memory, plans=False)
        assert policy is not None
        needs = Needs(layers, None, device=GPU, on_disk=on_disk, param_dtype=None)
        made = limits_for(policy, layout_of(policy, needs, None, None)[0], needs, Meter(CPU))
        return made.device.nbytes, made.host.nbytes

    # One number is for the compute device. Homes in host memory are the model's own.
    assert limits_of("64MiB") == (64 * MIB, 900 * MIB + 8 * layer)
    assert limits_of({"device": "auto", "host": "64MiB"}) == (1800 * MIB, 64 * MIB)
    assert limits_of({"host": 1000}, on_disk=True)[1] == 1000
    for memory, words in (
        (1000, f"{shown_bytes(4 * layer)} of the memory of cuda:0"),
        ({"host": 1000}, f"{shown_bytes(8 * layer)} of host memory.* pass a directory"),
    ):
        with pytest.raises(ValueError, match=f"at least {words}"):
            limits_of(memory)


def test_the_log_has_the_plan_that_was_chosen(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    model = OffloadModel(layers, "cpu", tmp_path / "home", memory="64MiB")
    with caplog.at_level("INFO", "offload"):
        for _ in range(2):
            model(torch.randn(8, 64)).sum().backward()
    (plan,) = caplog.messages
    assert re.fullmatch(r"memory=64\.0 MiB: \d slots, \d shards in memory, .*", plan)


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (5, 5), ("5", 5), ("2GiB", 2 << 30), ("1.5 KiB", 1536), ("3MB", 3_000_000), ("1tib", 1 << 40), ("7b", 7),
        ("2 gallons", ValueError), ("", ValueError), ("-1GiB", ValueError), (0, ValueError), (1.5, TypeError),
        (True, TypeError),
    ],
)  # fmt: skip
def test_bytes_are_read_as_people_write_them_and_what_is_none_is_named(value: Any, found: Any) -> None:
    if isinstance(found, int):
        assert parse_bytes(value) == found
    else:
        with pytest.raises(found, match="memory="):
            parse_bytes(value)
