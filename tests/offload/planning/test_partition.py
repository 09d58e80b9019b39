"""Shards are consecutive, never empty, and as even as can be."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from offload.planning.partition import cut_layers


@given(sizes=st.lists(st.integers(0, 50), min_size=1, max_size=9), data=st.data())
def test_no_cut_has_a_smaller_largest_shard(sizes: list[int], data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, len(sizes)))
    cuts = cut_layers(sizes, shards)
    assert len(cuts) == shards
    assert sum(cuts) == len(sizes)
    assert min(cuts) >= 1

    def largest(bounds: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in pairwise((0, *bounds, len(sizes))))

    best = min(largest(bounds) for bounds in combinations(range(1, len(sizes)), shards - 1))
    ends = [sum(cuts[: k + 1]) for k in range(shards - 1)]
    assert largest(tuple(ends)) == best
