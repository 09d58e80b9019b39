"""Skip tensors reach the layer that pops them: once, straight, and with their gradient."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from pipe import Pipe
from pipe.skip import Namespace, pop, skippable, stash, verify_skippables
from pipe.skip.layout import Route, skip_routes
from pipe.skip.tracker import current_skip_tracker, use_skip_tracker
from tests.pipe.test_copy import Timeline


@skippable(stash=["a"])
class StashA(nn.Module):
    def forward(self, x: Any) -> Any:
        yield stash("a", x * 2)
        return x + 1


@skippable(pop=["a"])
class PopA(nn.Module):
    def forward(self, x: Any) -> Any:
        a = yield pop("a")
        return x if a is None else x * a


@skippable(stash=["b"], pop=["a"])
class Exchange(nn.Module):
    def __init__(self, width: Any = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        a = yield pop("a")
        yield stash("b", a + 1)
        return self.linear(x)


@skippable(pop=["b"])
class PopB(nn.Module):
    def forward(self, x: Any) -> Any:
        b = yield pop("b")
        return x - b


def test_a_plain_sequential_needs_no_pipe() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    y = nn.Sequential(StashA(), nn.Identity(), PopA())(x)
    assert torch.equal(y, (x + 1) * (x * 2))
    assert not current_skip_tracker()


def test_none_can_be_handed_on() -> None:
    @skippable(stash=["a"])
    class StashNone(nn.Module):
        def forward(self, x: Any) -> Any:
            yield stash("a", None)
            return x

    x = torch.randn(4, 3)
    model = nn.Sequential(StashNone(), nn.Identity(), PopA())
    assert torch.equal(model(x), x)
    assert torch.equal(Pipe(model, [1, 1, 1], chunks=2)(x), x)


def test_a_skip_is_copied_once_and_straight_between_waits_of_both_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline = Timeline(monkeypatch, StashA(), nn.Identity(), PopA())
    timeline.pipe(torch.ones(1, 3))
    assert timeline.take() == [
        *["wait compute0>copy0"] * 2,  # of the value and of the skip
        *["copy copy0>copy1", "wait copy1>compute1", "wait compute1>copy1", "copy copy1>copy2"],
        "copy copy0>copy2",
        *["wait copy2>compute2"] * 2,
    ]


def test_namespaces_keep_equal_names_apart() -> None:
    inner, outer = Namespace(), Namespace()
    model = nn.Sequential(
        StashA().isolate(outer), StashA().isolate(inner), PopA().isolate(inner), PopA().isolate(outer)
    )
    x = torch.randn(4, 3)
    expected = ((x + 1) + 1) * ((x + 1) * 2) * (x * 2)
    assert torch.equal(model(x), expected)
    assert torch.equal(Pipe(model, [1, 1, 1, 1], chunks=2)(x), expected)


def test_a_subset_of_names_can_be_isolated() -> None:
    namespace = Namespace()
    layer = Exchange().isolate(namespace, only=["a"])
    assert layer.poppable() == [(namespace, "a")]
    assert layer.stashable() == [(None, "b")]
    with pytest.raises(ValueError, match="expected names among"):
        layer.isolate(namespace, only=["c"])


def test_namespaces_are_ordered_hashed_and_equal_to_their_copies() -> None:
    a, b = sorted([Namespace(), Namespace()])
    assert a < b
    assert not b < a
    assert a != b
    assert copy.deepcopy(a) == a
    assert hash(pickle.loads(pickle.dumps(a))) == hash(a)
    assert a != 3
    assert str(a.id) in repr(a)


def test_routes_are_known_before_any_forward_and_nested_layers_count() -> None:
    model = [nn.Sequential(StashA()), nn.Sequential(nn.Sequential(nn.Identity(), Exchange())), nn.Sequential(PopB())]
    routes = skip_routes(model)
    assert routes == [Route((None, "a"), 0, 1), Route((None, "b"), 1, 2)]


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([StashA()], "no module declared 'a' as poppable but stashed"),
        ([PopB(), StashA()], r"(?s)\* '0' declared 'b'.*\* no module declared 'a'"),  # all at once
        ([PopA()], "'0' declared 'a' as poppable but it was not stashed"),
        ([PopA(), StashA()], "'0' declared 'a' as poppable but it was not stashed"),
        ([StashA(), PopA(), PopA()], "'2' redeclared 'a' as poppable but not isolated by namespace"),
        ([StashA(), StashA(), PopA()], "'1' redeclared 'a' as stashable but not isolated by namespace"),
        ([nn.Sequential(StashA())], "no module declared 'a'"),
        ([skippable(stash=["a"], pop=["a"])(nn.Identity)()], "both as stashable and as poppable"),
    ],
)
def test_pairs_that_do_not_match_are_named_before_any_forward(layers: Any, message: Any) -> None:
    model = nn.Sequential(*layers)
    with pytest.raises(TypeError, match=message):
        verify_skippables(model)
    with pytest.raises(TypeError, match=message):
        Pipe(model, [len(layers)])


def commands(*, declares_stash: Any = (), declares_pop: Any = (), do: Any) -> Any:
    class Layer(nn.Module):
        def forward(self, x: Any) -> Any:
            yield from (command for command in do(x))
            return x

    return skippable(stash=declares_stash, pop=declares_pop)(Layer)()


@pytest.mark.parametrize(
    ("layer", "error", "message"),
    [
        (commands(do=lambda x: [stash("q", x)]), RuntimeError, "'q' has not been declared as stashable"),
        (commands(do=lambda x: [pop("q")]), RuntimeError, "'q' has not been declared as poppable"),
        (commands(declares_stash=["q"], do=lambda x: []), RuntimeError, "'q' must be stashed but have not"),
        (commands(declares_pop=["p"], do=lambda x: []), RuntimeError, "'p' must be popped but have not"),
        (commands(declares_pop=["p"], do=lambda x: [pop("p"), pop("p")]), RuntimeError, "popped already"),
        (commands(declares_pop=["q"], do=lambda x: [pop("q")]), RuntimeError, "'q' has not been stashed"),
        (commands(do=lambda x: [3]), TypeError, "got int"),
    ],
)
def test_commands_that_break_the_declaration_are_named(layer: Any, error: Any, message: Any) -> None:
    with use_skip_tracker({(None, "p"): torch.ones(1)}), pytest.raises(error, match=message):
        layer(torch.ones(1))


def test_defect_pipe_8_skippable_layers_can_be_copied_and_pickled() -> None:
    torch.manual_seed(0)
    namespace = Namespace()
    layer = Exchange(3).isolate(namespace).eval()
    layer.register_forward_hook(_hook)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert type(other) is Exchange
        assert other.namespaces == {"a": namespace, "b": namespace}
        assert list(other.state_dict()) == ["module.linear.weight", "module.linear.bias"]
        assert torch.equal(other.module.linear.weight, layer.module.linear.weight)
        assert other.module.linear.weight is not layer.module.linear.weight
        assert not other.module.training
        assert len(other._forward_hooks) == 1


def _hook(module: Any, args: Any, output: Any) -> Any:
    return None
