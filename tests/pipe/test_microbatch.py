"""Cutting a batch and putting it together again loses no row and no structure."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipe.microbatch import NoChunk, gather_nested, rows_of, rows_of_micro_batches, split_nested
from pipe.nested import flatten


@given(rows=st.integers(1, 12), chunks=st.integers(1, 15))
def test_gather_is_the_inverse_of_split(rows: Any, chunks: Any) -> None:
    value = {"x": torch.arange(rows), "y": [torch.arange(2 * rows).view(rows, 2), None, "name"]}
    parts = split_nested(value, chunks)
    sizes = [rows_of(part) for part in parts]
    assert len(parts) == min(rows, chunks)
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    again = gather_nested(parts)
    assert flatten(again)[1] == flatten(value)[1]
    for a, b in zip(flatten(value)[0], flatten(again)[0], strict=True):
        assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a is b


def test_scalars_objects_and_what_is_not_to_be_cut_go_to_every_micro_batch() -> None:
    marker, mask = object(), torch.ones(5, 5)
    for chunks in (1, 2):
        parts = split_nested((torch.zeros(4), torch.tensor(3.0), marker, NoChunk(mask)), chunks)
        assert [part[1].item() for part in parts] == [3.0] * chunks
        assert all(part[2] is marker and part[3] is mask for part in parts)
    with pytest.raises(TypeError, match="expected a tensor to keep whole, got list"):
        NoChunk([torch.zeros(1)])


def test_a_single_micro_batch_is_not_cut_so_its_rows_may_differ() -> None:
    edges, positions = torch.zeros(2, 9, dtype=torch.long), torch.arange(5).unsqueeze(0)
    value = (torch.zeros(8, 3), {"edges": edges, "positions": positions})
    (same,) = split_nested(value, 1)
    assert same[0] is value[0]
    assert same[1]["edges"] is edges
    assert same[1]["positions"] is positions
    assert rows_of_micro_batches(value, 1) == [8]
    with pytest.raises(ValueError, match=r"sizes of dimension 0 \[1, 2, 8\]"):
        rows_of_micro_batches(value, 2)


def test_an_empty_batch_is_one_micro_batch() -> None:
    assert [part.shape for part in split_nested(torch.zeros(0, 3), 4)] == [(0, 3)]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([(torch.zeros(1),), torch.zeros(1)], "micro-batch 1 returned another structure"),
        ([(torch.zeros(1), "a"), (torch.zeros(1), "b")], "output leaf 1 is a str that differs"),
        ([torch.zeros(()), torch.zeros(())], "0-dimensional"),
        ([torch.eye(2).to_sparse(), torch.eye(2).to_sparse()], "layout torch.sparse_coo.*return a dense tensor"),
    ],
)
def test_outputs_that_cannot_be_joined_are_named(outputs: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        gather_nested(outputs)
    assert gather_nested(outputs[:1]) is outputs[0]
