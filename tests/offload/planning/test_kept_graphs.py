"""Cells that keep their graphs are not recomputed, and nothing else changes."""

from __future__ import annotations

import copy
from collections import Counter
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import SelectiveCheckpointContext

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from tests.offload.device_count import counted_and_predicted
from tests.offload.side_by_side import offloaded
from tests.offload.zoo import WIDTH, Attention


def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def layers_run_in_second_step(bare: nn.Sequential, x: torch.Tensor, graph_bytes: int) -> int:
    """A layer of a shard that keeps its graph runs once, of any other twice."""
    ran: list[nn.Module] = []
    linear = [layer for layer in bare.modules() if isinstance(layer, nn.Linear)]
    handles = [layer.register_forward_pre_hook(lambda layer, _a: ran.append(layer)) for layer in linear]
    model = offloaded(bare, slices=2, memory=MemoryPolicy.fixed(graph_bytes=graph_bytes))
    model(x).sum().backward()
    ran.clear()
    model(x).sum().backward()
    for handle in handles:
        handle.remove()
    return len(ran)


@pytest.mark.parametrize("casts", [False, True])
def test_kept_graphs_are_counted_with_what_they_hold_without_casts_of_weights(casts: bool) -> None:
    rows = 32
    if casts:
        bare, kept = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)), 2 * rows * WIDTH
    else:
        # What entered, the norm's two statistics, its result, and what entered and left the activation.
        bare, kept = nn.Sequential(perceptron(), perceptron()), 4 * rows * (WIDTH + 2 + WIDTH + 2 * WIDTH + 2 * WIDTH)
    x = torch.randn(rows, WIDTH)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=casts):
        once = layers_run_in_second_step(bare, x, 2 * kept)
        assert once == sum(isinstance(layer, nn.Linear) for layer in bare.modules())
        assert layers_run_in_second_step(bare, x, 2 * kept - 1) == once + once // 2
        assert layers_run_in_second_step(bare, x, kept - 1) == 2 * once


def test_activations_are_counted_once_each_although_their_memory_is_reused() -> None:
    """What a first run drops is freed, and its address given to the next tensor."""
    rows = 64
    bare = nn.Sequential(nn.Sequential(*(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())))
    model = OffloadModel(bare, "cpu", num_slices=1, checkpoint_activation=True)
    # The input of the first layer and the results of the others; the second linear layer's is not used.
    assert model.activation_bytes(torch.randn(rows, WIDTH)) == 3 * rows * WIDTH * 4


def test_functions_of_chunks_run_with_their_cells_and_again_in_backward_and_draw_alike(home: str) -> None:
    events: list[str] = []
    bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    bare[0].register_forward_hook(lambda *_: events.append("layer"))
    model = OffloadModel(bare, "cpu", home, num_slices=3, checkpoint_activation=True)
    seen: list[Tensor] = []

    def process(chunk: tuple[str, int]) -> Tensor:
        events.append(chunk[0])
        seen.append(torch.randn(chunk[1], WIDTH))
        return seen[-1]

    scale, scaled = nn.Parameter(torch.tensor(2.0)), []

    def finish(output: Tensor) -> Tensor:
        y = torch.dropout(output, 0.5, train=True)
        scaled.append(y.detach())
        return y * scale

    outputs = model.forward_chunks([("a", 2), ("b", 3)], input_fn=process, output_fn=finish)
    assert events == ["a", "layer", "b", "layer"]
    state = torch.get_rng_state()
    torch.autograd.backward(outputs, [y.detach().cos() for y in outputs])
    # Autograd runs the last chunk first, and a recomputation ends when what the layer saves is there.
    assert events == ["a", "layer", "b", "layer", "b", "a"]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(seen[0], seen[3])
    assert torch.equal(seen[1], seen[2])
    assert torch.equal(scaled[1], scaled[2])
    torch.testing.assert_close(scale.grad, sum((y * (2 * y).cos()).sum() for y in scaled[:2]))


def test_a_first_layer_that_writes_over_what_input_fn_hands_on_does_not_write_over_the_caller_s(home: str) -> None:
    plain = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))
    model = OffloadModel(copy.deepcopy(plain), "cpu", home, num_slices=1, checkpoint_activation=True)
    x = torch.randn(4, WIDTH)
    before = x.clone()
    outputs = model.forward_chunks([x], input_fn=lambda chunk: chunk)
    assert torch.equal(x, before)
    x.add_(1)  # the recomputation has a copy of it
    torch.autograd.backward(outputs, [torch.ones_like(y) for y in outputs])
    plain(before).sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))


# --- results of chosen operations: the same numbers, fewer operations, counted memory ---------------------------------

selective = pytest.mark.skipif(
    "op_output" not in signature(SelectiveCheckpointContext).parameters,
    reason="needs a torch that tells what selective checkpointing keeps",
)

MM = torch.ops.aten.addmm.default
KERNEL = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func] += 1
        return func(*args, **(kwargs or {}))


def stack(depth: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Attention(16, 2, 0.2) for _ in range(depth)))


def backward(model: nn.Module, x: Tensor) -> tuple[list[Tensor], Counter[Any]]:
    torch.manual_seed(1)
    model.zero_grad()
    with Counting() as counted:
        model(x).square().sum().backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return gradients, counted.calls


@selective
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize(("keep", "kept"), [("attention", KERNEL), ([MM], MM), ((), None)])
def test_what_is_kept_is_not_computed_again(keep: Any, kept: Any, microbatches: int, home: str) -> None:
    bare, x = stack(), torch.randn(4, 6, 16)
    model = offloaded(bare, home, 3, num_microbatches=microbatches, memory=MemoryPolicy.fixed(keep=keep))
    plain = OffloadModel(bare, "cpu", home, 3, False, microbatches)
    expected, _ = backward(plain, x)
    for _ in range(4):
        gradients, calls = backward(model, x)
        assert all(map(torch.equal, gradients, expected))
        for operation, cells in ((KERNEL, 3 * microbatches), (MM, 6 * microbatches)):
            assert calls[operation] == (1 if operation is kept else 2) * cells


@selective
@pytest.mark.usefixtures("own_memory")
def test_what_is_kept_counts(tmp_path: Any) -> None:
    """Five layers' results of a product take more than the least plan leaves."""
    x = torch.randn(8, 32, 16)

    def counted(keep: Any) -> tuple[int, int]:
        policy = MemoryPolicy({"device": "1GiB", "host": "1GiB"}, keep=keep, graph_bytes=0, resident_bytes=0, slots=2)
        model = OffloadModel(stack(depth=5), "cpu", tmp_path / "home", num_slices=5, memory=policy)
        ours = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
        return counted_and_predicted(model, ours, x)

    (least, least_predicted), (most, most_predicted) = counted(()), counted([MM])
    products = 5 * 4 * 8 * 32 * (48 + 16)
    assert most <= most_predicted
    assert least <= least_predicted
    assert most_predicted - least_predicted == pytest.approx(products, rel=0.25)
