"""Batches keep their kind when they move, and everything inside them is found."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from pipe.train.batch import follow, move, walk
from tests.pipe.train.conftest import FrozenRecord, Pair, Record

META = torch.device("meta")  # moving there is a real move on every machine


@dataclass
class Slotted:
    __slots__ = ("late", "x")
    x: Tensor
    late: Any


def ones() -> Tensor:
    return torch.ones(2)


@pytest.mark.parametrize(
    "batch",
    [
        ones(),
        {"a": ones(), "b": [ones(), (ones(), "text")]},
        OrderedDict(a=ones()),
        Pair(ones(), {"x": ones()}),
        FrozenRecord(ones(), "n"),
        Slotted(ones(), [ones()]),
        Record(ones(), ones()),
        [FrozenRecord(ones(), "n"), None, 3],
        torch.nn.utils.rnn.pack_sequence([torch.ones(3), torch.ones(2)]),
        torch.Size([2, 3]),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_a_moved_batch_has_its_type_and_all_its_tensors_moved(batch: Any) -> None:
    moved = move(batch, META)
    assert type(moved) is type(batch)
    for path, old in walk(batch):
        new = follow(moved, path)
        assert type(new) is type(old)
        if isinstance(new, Tensor):
            assert new.device == META or type(batch).__name__ == "PackedSequence"
            assert old.device.type == "cpu"


def test_default_factories_and_read_only_mappings_survive_and_a_class_is_not_moved() -> None:
    moved = move(defaultdict(list, a=ones()), META)
    assert moved["missing"] == []
    assert move(MappingProxyType({"a": ones()}), META)["a"].device == META
    assert move([Tensor], META) == [Tensor]


def test_a_batch_without_tensors_is_returned_unchanged() -> None:
    for batch in ({"a": 1}, [ones()], (ones(), {"k": ones()}), "text", None, object(), FrozenRecord(ones(), "n")):
        assert move(batch, torch.device("cpu")) is batch


def test_every_object_of_a_batch_is_found_once_and_its_path_leads_to_it() -> None:
    features = SimpleNamespace(values=ones())
    features.me = features
    shared = ones()
    batch = {"f": features, "list": [shared, FrozenRecord(shared, "n")], 3: Slotted(ones(), None)}
    found = list(walk(batch))
    assert sum(value is shared for _, value in found) == 1
    assert all(follow(batch, path) is value for path, value in found)
    tensors = [value for _, value in found if isinstance(value, Tensor)]
    assert len(tensors) == 3
