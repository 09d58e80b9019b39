"""Nested values keep their structure whatever is done to their leaves."""

from collections import OrderedDict, UserDict, namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipe.nested import flatten, map_tensors, map_together, tensors_in, unflatten
from pipe.torch_private.data import pytree

Point = namedtuple("Point", "x y")

leaves = st.one_of(
    st.none(), st.integers(), st.text(max_size=3), st.builds(lambda n: torch.arange(n), st.integers(0, 3))
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
        st.tuples(inner, inner).map(lambda pair: OrderedDict(b=pair[0], a=pair[1])),
    ),
    max_leaves=8,
)


#: Also those that torch takes for leaves.
all_values = st.one_of(values, st.lists(st.dictionaries(st.text(max_size=2), values, max_size=3).map(UserDict)))


@given(all_values)
def test_flatten_is_inverted_and_map_tensors_leaves_everything_else_as_it_is(value: Any) -> None:
    parts, spec = flatten(value)
    again = unflatten(parts, spec)
    assert type(again) is type(value)
    assert flatten(again)[1] == spec
    assert all(a is b for a, b in zip(flatten(again)[0], parts, strict=True))
    mapped = map_tensors(lambda t: t + 1, value)
    assert all(map(torch.equal, tensors_in(mapped), [t + 1 for t in tensors_in(value)]))
    assert flatten(mapped)[1] == spec
    for before, after in zip(parts, flatten(mapped)[0], strict=True):
        assert after is before or isinstance(before, torch.Tensor)


def test_a_mapping_of_another_class_keeps_its_attributes() -> None:
    class Encoding(dict[str, Any]):
        pass

    value = Encoding(a=torch.ones(2))
    value.side = "left"  # type: ignore[attr-defined]
    mapped = map_tensors(lambda t: t + 1, value)
    assert (type(mapped), mapped.side) == (Encoding, "left")
    assert torch.equal(mapped["a"], torch.full((2,), 2.0))
    assert torch.equal(value["a"], torch.ones(2))


arguments = st.one_of(leaves, st.lists(leaves, max_size=3).map(tuple), values)


@given(st.lists(arguments, max_size=3), st.dictionaries(st.one_of(st.text(max_size=2), st.booleans()), arguments))
def test_a_call_and_a_list_of_it_have_the_leaves_that_torch_gives_them(args: list[Any], kwargs: dict[Any, Any]) -> None:
    call = (tuple(args), kwargs)
    for value in (call, call, [call], [call]):
        parts, spec = flatten(value)
        expected, general = pytree.tree_flatten(value)
        assert all(a is b for a, b in zip(parts, expected, strict=True))
        again = unflatten(parts, spec)
        (_, names) = again[0] if value is not call else again
        assert [*map(type, names)] == [*map(type, kwargs)]
        assert pytree.tree_flatten(again)[1] == general
        assert all(a is b for a, b in zip(pytree.tree_leaves(again), expected, strict=True))
        assert flatten(map_tensors(lambda t: t, value))[1] == spec


def test_tensors_that_are_replaced_together_keep_their_places() -> None:
    x, y = torch.ones(2, requires_grad=True), torch.zeros(2)
    value = {"a": x, "b": (None, y)}
    assert map_together(lambda *tensors: [3 * t for t in tensors], value)["b"][0] is None
    swapped = map_together(lambda a, b: (b, a), value)
    assert (swapped["a"], swapped["b"][1]) == (y, x)
    only = map_together(lambda *tensors: [None for _ in tensors], value, only=lambda x: x.requires_grad)
    assert only["a"] is None
    assert only["b"][1] is y
    with pytest.raises(ValueError, match="zip"):
        map_together(lambda *tensors: tensors[:1], value)
    assert map_together(lambda *tensors: tensors, (3, "text")) == (3, "text")
