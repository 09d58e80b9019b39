"""What ranks take of the memory of a GPU to exchange parameters and gradients, counted before and while they do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.limits
from offload.memory import Needs, layout_of, memory_of
from offload.mesh.gradients import ReplicatedGradients, exchange_bytes, means_of_parts
from offload.mesh.parts import Part, WholePart, offsets_of
from offload.mesh.ranks import Ranks, Transport
from offload.mesh.shard import gather_parts
from offload.mesh.traffic import ExchangeBytes, least_exchange_bytes
from offload.planning.budget import shown_bytes
from offload.planning.memory_profile import MemoryProfile, SavedTensor
from offload.planning.peak_memory import OutsideBytes, StepBytes
from offload.planning.simulate import Costs
from offload.planning.step_model import Choice, StepModel, predict
from tests.offload.planning.test_peak_memory import Living

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIB = 1 << 20


class Alone(Ranks):
    """One of several ranks, whose collectives of a device do nothing."""

    def __init__(self, ranks: int = 2, replicas: int = 1) -> None:
        self.transport = Transport(CPU, "", adds=True)
        self.count, self.rank, self.replicas, self.replica = ranks, 0, replicas, 0
        self.divide_factor = 2.0
        self._staging = torch.empty(0)

    def all_gather(self, staging: Tensor) -> None: ...

    def reduce(self, received: Tensor, sent: Tensor, dtype: torch.dtype) -> None: ...

    def all_reduce(self, tensors: Iterable[Tensor], nbytes: int, *, replicas: bool = False) -> None:
        for _ in tensors:
            pass

    def any_rank_has(self, flags: Sequence[bool], *, replicas: bool = False) -> list[bool]:
        return [*flags]


def shard_of(parts: Sequence[Part], *, trains: bool = True) -> Any:
    return SimpleNamespace(
        parts=parts, slices=[SimpleNamespace(parameter=SimpleNamespace(requires_grad=trains)) for _ in parts]
    )


FULL, HALF = torch.float32, torch.bfloat16
CASES = [
    ([FULL] * 3, 2, 1),
    ([HALF] * 3, 2, 1),
    ([FULL, HALF, FULL], 2, 1),
    ([FULL] * 3, 8, 1),
    ([HALF, FULL], 4, 3),
    ([FULL] * 3, 2, 16),
]


@pytest.mark.parametrize(("dtypes", "count", "replicas"), CASES)
def test_what_an_exchange_holds_is_what_was_counted(dtypes: list[torch.dtype], count: int, replicas: int) -> None:
    ranks, shapes = Alone(count, replicas), [(512, 384), (1024, 256), (640, 128)]
    whole = [torch.zeros(shape, dtype=dtype) for shape, dtype in zip(shapes, dtypes, strict=False)]
    parts = [Part.of("", each, count) for each in whole]
    counted = exchange_bytes([shard_of(parts)], [], ranks)
    nbytes = sum(each.nbytes for each in whole)
    assert counted.gradients == [nbytes]
    with Living() as living:
        gather_parts(parts, *offsets_of(parts), [each.view(-1) for each in whole], lambda memory, begin: None, ranks)
        means = means_of_parts(parts, [torch.zeros_like(each) for each in whole], ranks)
    assert all(mean is not None for mean in means)
    assert ranks._staging.numel() == counted.staging
    # A part of the means, which two shards have, is not there in the exchange of one.
    assert 0.8 * living.peak_bytes < counted.staging + counted.draining[0]
    assert living.peak_bytes <= counted.staging + counted.draining[0]
    least = least_exchange_bytes(nbytes, count, narrow=HALF in dtypes)
    two = exchange_bytes([shard_of(parts)] * 2, [], ranks)
    assert counted.staging + two.draining[0] - nbytes <= least
    assert two.draining[0] - counted.draining[0] == nbytes // count


def test_a_shard_that_does_not_train_is_gathered_only_and_adapters_are_not_reduced_with_it() -> None:
    matrix = Part.of("", torch.empty(512, 256), 2)
    adapter = WholePart.of("", torch.empty(16, 256), 2)
    found = exchange_bytes([shard_of([matrix], trains=False), shard_of([adapter])], [], Alone())
    piece = 512 * 256 * 4 // 2 // 16
    assert found == ExchangeBytes(max(2 * piece, 2 << 16), [0, 16 * 256 * 4], [0, 0], 0)


def test_what_each_rank_stores_whole_is_counted_at_the_end_of_a_backward() -> None:
    ranks, ours = Alone(), [nn.Parameter(torch.zeros(600, 512)), nn.Parameter(torch.zeros(512))]
    replicated = ReplicatedGradients({p: WholePart.of("", p, 2) for p in ours}, ranks)
    counted = exchange_bytes([], replicated.trained_parts(), ranks)
    nbytes = sum(p.nbytes for p in ours)
    assert counted.outside == nbytes
    gradients = {p: torch.zeros_like(p) for p in ours}
    with Living() as living, torch.no_grad():
        assert len(replicated._means(ours, gradients)) == len(ours)
    assert 0.9 * (counted.staging + counted.outside) < living.peak_bytes <= counted.staging + counted.outside


def test_gradients_that_ranks_reduce_are_there_until_the_next_drain() -> None:
    """Whenever a simulation says that they are stored; and then those are reduced that belong to no shard."""
    costs = Costs([1.0] * 2, [9.0] * 2, [9.0] * 2, [0.1] * 2)
    sizes: dict[str, Any] = {"slot_bytes": 100, "gradient_bytes": [40, 40]}
    profiles = {j: MemoryProfile(1, [SavedTensor(0, 8, 8)]) for j in range(2)}

    def step(reducing: int = 0, **more: Any) -> tuple[int, int]:
        outside = OutsideBytes(values=5, reducing=reducing)
        step_bytes = StepBytes(**sizes, **more, outside=outside, memory_profiles=profiles)
        found = predict(StepModel(shards=2, first=0, costs=costs, sizes=step_bytes), Choice(2)).peak
        return found.begin_bytes, found.memory_bytes

    assert step() == (205, 205 + 48)
    assert step(draining_bytes=[70, 60]) == (205, 205 + 60 + 48)
    assert step(draining_bytes=[120, 60]) == (205, 205 + 120)
    assert step(draining_bytes=[120, 60], reducing=9) == (205, 205 + 120 + 9)


def test_a_limit_too_small_for_two_ranks_is_refused_with_what_they_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device; host memory then holds a half of the homes and their gradients."""
    monkeypatch.setattr(offload.limits, "capacity", lambda place: 1 << 40)
    layers, layer = [nn.Linear(512, 512) for _ in range(4)], 4 * 512 * 513

    def layout(memory: Any) -> None:
        arguments = memory_of(memory, plans=False)
        needs = Needs(layers, None, device=GPU, on_disk=False, param_dtype=None, ranks=2)
        layout_of(arguments, needs, None, None)

    part = layer // 2
    piece = -(-part // 16 // 64) * 64  # at least 64 KiB
    needs = 4 * layer + 8 + 3 * max(piece, 1 << 16) + 2 * part
    layout({"device": needs, "host": 4 * layer})
    with pytest.raises(ValueError, match=f"at least {shown_bytes(needs)} of the memory of cuda:0"):
        layout(needs - 1)
    with pytest.raises(ValueError, match=f"at least {shown_bytes(4 * layer)} of host memory"):
        layout({"device": needs, "host": 4 * layer - 1})
