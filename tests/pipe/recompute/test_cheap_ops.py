"""A lean graph keeps less, and gives the same gradient bit by bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from pipe.recompute.cheap_ops import CheapRecompute, Kept


def run(block: nn.Module, x: Tensor) -> tuple[Tensor, list[int]]:
    """The result, and the elements of each tensor that the graph keeps besides parameters."""
    cheap_recompute = CheapRecompute()
    kept: list[int] = []
    parameters = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}

    def pack(tensor: Tensor) -> object:
        packed = cheap_recompute.pack(tensor)
        if isinstance(packed, (Tensor, Kept)) and tensor.untyped_storage().data_ptr() not in parameters:
            kept.append(tensor.numel())
        return packed

    with torch.autograd.graph.saved_tensors_hooks(pack, cheap_recompute.unpack), cheap_recompute:
        return block(x), kept


@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU()])
@pytest.mark.parametrize("shape", [(6, 8), (2, 3, 8)])
def test_gradients_are_the_same_bit_by_bit_and_results_of_norm_and_activation_are_not_kept(
    activation: nn.Module, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), activation, nn.Linear(32, 8))
    x = torch.randn(shape, requires_grad=True)
    expected = torch.autograd.grad(block(x).sin().sum(), [x, *block.parameters()])
    result, kept = run(block, x)
    found = torch.autograd.grad(result.sin().sum(), [x, *block.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    # What entered the norm and the activation, and the two statistics of each row.
    assert sorted(kept) == [6, 6, 6 * 8, 6 * 32]


def test_a_result_that_is_written_over_is_kept_as_it_is() -> None:
    torch.manual_seed(0)
    first, last = nn.Linear(8, 8), nn.Linear(8, 8)

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            wide = nn.functional.gelu(first(x))
            wide[:, :4].mul_(2)
            return last(wide)

    x = torch.randn(3, 8)
    expected = torch.autograd.grad(Block()(x).sum(), list(last.parameters()))
    found = torch.autograd.grad(run(Block(), x)[0].sum(), list(last.parameters()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))


def test_an_argument_that_is_changed_before_backward_raises() -> None:
    x = torch.randn(3, 8)
    result, _ = run(nn.Sequential(nn.GELU(), nn.Linear(8, 8)), x)
    x.add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        result.sum().backward()


@pytest.mark.parametrize("goes_back", [True, False])
def test_a_used_or_dropped_graph_frees_all_saved_tensors(goes_back: bool) -> None:
    made: list[StorageWeakRef] = []
    layers: list[nn.Module] = [nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.GELU(), nn.Softmax(1), nn.Linear(8, 8)]
    for layer in layers:
        layer.register_forward_hook(lambda _m, _a, out: made.append(StorageWeakRef(out.untyped_storage())))
    result, _ = run(nn.Sequential(*layers), torch.randn(3, 8, requires_grad=True))
    if goes_back:
        result.sum().backward()
    del result
    assert [storage.expired() for storage in made] == [True] * len(layers)


def test_argument_placeholders_are_resolved_at_recomputation() -> None:
    torch.manual_seed(0)
    norm, last, x = nn.LayerNorm(8), nn.Linear(8, 8), torch.randn(3, 8)
    expected = torch.autograd.grad(last(norm(x)).sin().sum(), [norm.weight, last.weight])
    resolved: list[str] = []

    class Elsewhere:
        def resolve(self) -> Tensor:
            resolved.append("weight")
            return norm.weight.detach()

    weight = norm.weight.untyped_storage().data_ptr()
    cheap_recompute = CheapRecompute(
        lambda tensor: Elsewhere() if tensor.untyped_storage().data_ptr() == weight else tensor
    )
    with torch.autograd.graph.saved_tensors_hooks(cheap_recompute.pack, cheap_recompute.unpack), cheap_recompute:
        result = last(norm(x)).sin().sum()
    found = torch.autograd.grad(result, [norm.weight, last.weight])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    assert resolved == ["weight"]


def test_a_kept_tensor_that_was_changed_in_place_raises_as_in_any_graph() -> None:
    scale = torch.ones(8)

    class Scaling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * scale

    x = torch.randn(3, 8, requires_grad=True)
    result, _ = run(Scaling(), x)
    scale.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after it was saved"):
        result.sum().backward()


def test_saved_tensors_that_are_known_to_be_written_in_place_are_copied() -> None:
    scale, x = torch.ones(2, 8), torch.randn(3, 8, requires_grad=True)
    cheap_recompute = CheapRecompute(changing=[scale])
    with torch.autograd.graph.saved_tensors_hooks(cheap_recompute.pack, cheap_recompute.unpack), cheap_recompute:
        result = x * scale[1]
    scale.add_(1)
    result.sum().backward()
    assert torch.equal(x.grad, torch.ones(3, 8))
