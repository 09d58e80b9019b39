"""A loss on what did not leave the model as an output is refused: its graph ends within a shard."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel
from pipe import Pipe

WIDTH = 6


class Auxiliary(nn.Module):
    """Keeps an auxiliary loss of its input and its own result as an attribute."""

    def __init__(self, of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.of = nn.Linear(WIDTH, WIDTH), of

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        self.loss = self.of(x, y)
        return y.relu()


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "saves nothing": lambda x, y: x.mean(),
    "goes through weights": lambda x, y: y.mean(),
    "saves activations": lambda x, y: y.square().mean(),
}


def model_with(of: Callable[[Tensor, Tensor], Tensor], recompute: bool) -> OffloadModel:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Auxiliary(of), nn.Linear(WIDTH, WIDTH))
    return OffloadModel(layers, "cpu", num_slices=3, checkpoint_activation=recompute)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_auxiliary_loss_that_a_layer_keeps_is_refused_by_its_backward(kind: str, recompute: bool) -> None:
    model = model_with(KINDS[kind], recompute)
    model(torch.randn(4, WIDTH))
    loss: Any = model[1].loss
    with pytest.raises(RuntimeError, match=r"an activation inside shard 1 of an OffloadModel.*Return it as an output"):
        loss.backward()
    model.zero_grad()
    model(torch.randn(4, WIDTH)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_auxiliary_loss_beside_the_output_is_refused(kind: str, recompute: bool) -> None:
    model = model_with(KINDS[kind], recompute)
    output = model(torch.randn(4, WIDTH)).sum()
    loss: Any = model[1].loss
    with pytest.raises(RuntimeError, match=r"an activation inside shard 1|backward through the graph a second time"):
        (output + loss).backward()


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", list(KINDS))
def test_an_auxiliary_loss_is_refused_while_the_graph_of_the_output_lives(kind: str, recompute: bool) -> None:
    model = model_with(KINDS[kind], recompute)
    output = model(torch.randn(4, WIDTH)).sum()
    loss: Any = model[1].loss
    with pytest.raises(RuntimeError, match="an activation inside shard 1"):
        loss.backward()
    del output


@pytest.mark.parametrize("recompute", [True, False])
def test_features_that_a_hook_took_are_refused_unless_detached(recompute: bool) -> None:
    model = model_with(KINDS["saves nothing"], recompute)
    features: list[Tensor] = []
    model[1].register_forward_hook(lambda module, args, output: features.append(output))
    model(torch.randn(4, WIDTH))
    assert torch.isfinite(features[0].detach()).all()
    with pytest.raises(RuntimeError, match="an activation inside shard 1"):
        features[0].square().sum().backward()


class WithLoss(nn.Module):
    """Passes its auxiliary loss on: what the error advises."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, loss = value
        y = self.linear(x)
        return y.relu(), loss + y.square().mean()


@pytest.mark.parametrize("recompute", [True, False])
def test_an_auxiliary_loss_that_is_an_output_is_right(recompute: bool) -> None:
    torch.manual_seed(0)
    bare = nn.Sequential(WithLoss(), WithLoss(), WithLoss())
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=3, checkpoint_activation=recompute)
    x = torch.randn(4, WIDTH)
    for run in (bare, model):
        output, loss = run((x, torch.zeros(())))
        (output.sum() + loss).backward()
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, rtol=0, atol=0)


def test_an_auxiliary_loss_in_a_checkpointed_pipe_is_refused() -> None:
    layer = Auxiliary(KINDS["saves activations"])
    pipe = Pipe(
        nn.Sequential(layer, nn.Linear(WIDTH, WIDTH)), balance=[1, 1], devices=["cpu", "cpu"], checkpoint="always"
    )
    pipe(torch.randn(4, WIDTH))
    with pytest.raises(RuntimeError, match=r"an activation inside a checkpointed function.*return it as an output"):
        layer.loss.backward()


# --- containers that nothing knows ------------------------------------------------------------------------------------


@dataclass
class State:
    hidden: Tensor
    name: str = "state"


class Holder:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = [hidden]


class Into(nn.Module):
    def __init__(self, kind: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(WIDTH, WIDTH), kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(self.linear(x))


class OutOf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any) -> Tensor:
        hidden = state.hidden
        return self.linear(hidden[0] if isinstance(hidden, list) else hidden)


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("kind", [State, Holder])
def test_an_object_that_holds_tensors_is_refused_between_shards_and_fine_within(kind: Any, recompute: bool) -> None:
    torch.manual_seed(0)
    layers = [Into(kind), OutOf(), Into(kind), OutOf()]
    bare = copy.deepcopy(nn.Sequential(*layers))
    model = OffloadModel(bare, "cpu", num_slices=4, checkpoint_activation=recompute)
    x = torch.randn(4, WIDTH)
    with pytest.raises(TypeError, match=rf"the output of shard 0.*got a {kind.__name__} that holds tensors"):
        model(x)
    with torch.no_grad():  # nothing to cut
        expected = nn.Sequential(*layers)(x)
        torch.testing.assert_close(model(x), expected, rtol=0, atol=0)
    within = OffloadModel(nn.Sequential(*layers), "cpu", num_slices=2, checkpoint_activation=recompute)
    within(x).sum().backward()
    assert all(p.grad is not None for p in within.parameters())


def test_an_input_that_hides_a_tensor_with_a_gradient_is_refused() -> None:
    model = OffloadModel(nn.Sequential(OutOf()), "cpu", num_slices=1, checkpoint_activation=False)
    with pytest.raises(TypeError, match=r"an input of the model.*got a State"):
        model(State(torch.randn(4, WIDTH, requires_grad=True)))
    model(State(torch.randn(4, WIDTH))).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
