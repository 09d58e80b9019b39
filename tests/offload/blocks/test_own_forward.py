"""A model whose blocks are called by its own forward computes what it computed before it was wrapped."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer
from tests.offload.blocks.towers import WIDTH, Block, Model, assert_equal, close, loss_of, make, step, words

BLOCKS = "encoder.layer"


def wrap(bare: nn.Module, home: Any = "cpu", **choices: Any) -> Any:
    return OffloadModel(
        copy.deepcopy(bare), "cpu", home, **{"checkpoint_activation": True, "blocks": BLOCKS, **choices}
    )


@pytest.mark.parametrize("m", [2, 3])
def test_micro_batches_compute_the_same_function(m: int) -> None:
    bare = make(dropout=0.0)
    model = wrap(bare, num_microbatches=m)
    for each in (bare, model):
        output = each(words(5), hidden=True)
        (loss_of(output) + output["hidden"][1].sum()).backward()
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert close(p.grad, q.grad)


def test_chunks_of_different_lengths_pass_each_block_in_one_visit() -> None:
    bare = make(dropout=0.0)
    model = wrap(bare)
    chunks = [words(2, 5), words(2, 3, seed=4), words(1, 7, seed=5)]
    outputs = model.forward_chunks(chunks, output_fn=lambda output: output["states"].mean(1))
    expected = [bare(chunk)["states"].mean(1) for chunk in chunks]
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    torch.autograd.backward(outputs, [2 * output.detach() for output in outputs])
    torch.autograd.backward(expected, [2 * output.detach() for output in outputs])
    for p, q in zip(bare.parameters(), model.parameters(), strict=True):
        assert close(p.grad, q.grad)
    assert model.statistics().shard_loads == 2 * 4 - 2


def test_chunks_are_made_and_reduced_by_functions() -> None:
    bare = make(dropout=0.0)
    model = wrap(bare)
    head = nn.Linear(WIDTH, 2)
    mine = copy.deepcopy(head)
    outputs = model.forward_chunks(
        ["abc", "de"], input_fn=lambda text: words(len(text), seed=len(text)), output_fn=lambda o: mine(o["states"])
    )
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    for rows in (3, 2):
        head(bare(words(rows, seed=rows))["states"]).sum().backward()
    for p, q in zip([*bare.parameters(), *head.parameters()], [*model.parameters(), *mine.parameters()], strict=True):
        assert close(p.grad, q.grad)


def test_autocast_reaches_blocks_and_recomputations() -> None:
    bare = make()
    model = wrap(bare)
    for each in (bare, model):
        with torch.autocast("cpu", torch.bfloat16):
            torch.manual_seed(0)
            loss = loss_of(each(words()))
        loss.backward()
    assert_equal(bare, model)


def test_an_autocast_of_the_forward_itself_reaches_suspended_blocks() -> None:
    class Half(Model):
        def forward(self, words: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return super().forward(words)

    torch.manual_seed(0)
    bare = Half(2, 0.0)
    model = wrap(bare)
    chunks = [words(2), words(2, seed=3)]
    with torch.no_grad():
        outputs = model.forward_chunks(chunks, output_fn=lambda o: o["states"])
        assert all(torch.equal(bare(c)["states"], o) for c, o in zip(chunks, outputs, strict=True))


def test_an_error_in_a_context_of_the_forward_does_not_leave_the_context_open() -> None:
    class Half(Model):
        def forward(self, words: Tensor) -> Any:
            with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
                return super().forward(words)

    model = wrap(Half(2, 0.0))
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(words())
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()


class Counted(torch.autograd.Function):
    """Identity; counts its backwards, and saves its input."""

    count = 0
    saved: list[Any] = []  # noqa: RUF012
    alive: list[int] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        kept = x.clone()
        ctx.kept = kept
        Counted.saved.append(weakref.ref(kept))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Counted.count += 1
        Counted.alive.append(sum(saved() is not None for saved in Counted.saved))
        return gradient


class Counting(Model):
    def forward(self, words: Tensor) -> Any:
        x, bias, every = self.embed(words), None, []
        for block in self.encoder.layer:
            x, bias = block(x, bias=bias)
            x = Counted.apply(x)
            every.append(x)
        return every


def test_code_between_blocks_runs_once_and_is_freed_as_in_the_plain_model() -> None:
    alive = []
    torch.manual_seed(0)
    bare = Counting(3)
    for model in (bare, wrap(bare)):
        Counted.count = 0
        Counted.saved.clear()
        Counted.alive.clear()
        every = model(words())
        sum(x.sum() for x in every).backward()
        assert Counted.count == 3
        alive.append([*Counted.alive])
    assert alive[0] == alive[1]


def test_it_is_the_model_that_was_wrapped() -> None:
    bare = make()
    model = wrap(bare)
    assert isinstance(model, Model)
    assert isinstance(model, OffloadModel)
    assert type(model).__name__ == "Model"
    assert model.config is not None
    assert list(model.state_dict()) == list(bare.state_dict())
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in bare.named_parameters()]
    assert [n for n, _ in model.named_modules()] == [n for n, _ in bare.named_modules()]
    assert torch.equal(model.embed(words()), bare.embed(words()))
    assert model.hf_device_map == {"": torch.device("cpu")}
    assert bool(model)
    assert model.to("cpu") is model
    with pytest.raises(TypeError):
        len(model)
    with pytest.raises(RuntimeError, match="convert the layers"):
        model.half()


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_blocks_that_rest_in_memory_run_by_themselves_after_steps(home: str, tmp_path: Path) -> None:
    bare = make()
    model = wrap(bare, tmp_path if home == "disk" else "cpu", memory="1GiB")
    optimizer = OffloadOptimizer(model, torch.optim.SGD, lr=0.1)
    for seed in range(4):
        for each in (bare, model):
            step(each, seed)
        torch.optim.SGD(bare.parameters(), lr=0.1).step()
        optimizer.step()
        bare.zero_grad()
        optimizer.zero_grad()
    assert model._homes.streamer.in_place()
    x = torch.ones(1, 2, WIDTH)
    with torch.no_grad():  # an update is pending
        for block, ours in zip(bare.eval().encoder.layer, model.eval().encoder.layer, strict=True):
            assert torch.equal(block(x)[0], ours(x)[0])
        assert torch.equal(bare(words())["logits"], model(words())["logits"])


class Order(nn.Module):
    def __init__(self, order: tuple[int, ...], count: int = 3) -> None:
        super().__init__()
        self.layer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(count))
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for k in self.order:
            x = self.layer[k](x)
        return x


def test_a_block_alone_with_gradients_is_equal_to_the_plain_one() -> None:
    bare = make()
    model = wrap(bare)
    for each in (bare, model):
        torch.manual_seed(0)
        each.encoder.layer[0](torch.ones(1, 2, WIDTH))[0].square().sum().backward()
    assert_equal(bare, model)
    step(bare), step(model)
    assert_equal(bare, model)


@pytest.mark.parametrize("home", ["cpu", "disk"])
def test_a_parameter_of_a_block_that_other_code_uses_gets_both_gradients(home: str, tmp_path: Path) -> None:
    class Reads(Order):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) @ self.layer[0].weight

    bare = Reads((0, 1, 2))
    model = wrap(bare, tmp_path if home == "disk" else "cpu", blocks="layer")
    for _ in range(2):
        for each in (bare, model):
            each(torch.ones(2, WIDTH)).square().sum().backward()
        assert_equal(bare, model, exact=False)


def test_nothing_keeps_a_forward_alive() -> None:
    model = wrap(make())
    output = model(words())
    gc.disable()
    try:
        assert any(True for _ in model._engine.backward.graphs)
        del output
        assert not any(True for _ in model._engine.backward.graphs)
        loss_of(model(words())).backward()
        assert not any(True for _ in model._engine.backward.graphs)
    finally:
        gc.enable()


# --- which blocks ---------------------------------------------------------------------------------------------------


def test_blocks_by_class_and_by_names() -> None:
    for blocks in (Block, [BLOCKS], BLOCKS):
        model = wrap(make(), blocks=blocks)
        assert len(model._homes.shards) == 4


def test_blocks_inside_of_an_nn_sequential() -> None:
    class States(nn.Module):
        def forward(self, output: dict[str, Any]) -> Any:
            return output["states"]

    bare = nn.Sequential(make(), States())
    model = wrap(bare, blocks="0.encoder.layer")
    assert isinstance(model, nn.Sequential)
    assert len(model) == 2
    assert isinstance(model[0], Model)
    for each in (bare, model):
        torch.manual_seed(0)
        each(words()).square().sum().backward()
    assert_equal(bare, model)


def test_the_longest_list_is_found_with_one_warning() -> None:
    with pytest.warns(UserWarning, match=r"Model\.encoder\.layer \(4 modules\)") as caught:
        model = wrap(make(), blocks=None)
    assert sum(each.category is UserWarning for each in caught) == 1  # beside that of a home in memory
    assert len(model._homes.shards) == 4


@pytest.mark.parametrize(
    ("blocks", "error", "message"),
    [
        ("encoder.layers", ValueError, "its lists are encoder.layer"),
        ("encoder", TypeError, "got Encoder"),
        (nn.Conv2d, ValueError, "Conv2d"),
        (3, TypeError, "blocks=3"),
        ([], TypeError, r"blocks=\[\]"),
        ([BLOCKS, BLOCKS], ValueError, "each list of blocks once"),
    ],
)
def test_what_is_no_list_of_blocks_is_refused(blocks: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        wrap(make(), blocks=blocks)


def test_a_block_that_is_listed_twice_is_refused() -> None:
    bare = Order((0, 1, 2))
    bare.layer.append(bare.layer[0])
    with pytest.raises(ValueError, match=r"layer\.0 and layer\.3 are the same module"):
        wrap(bare, blocks="layer")


def test_a_model_without_lists_is_refused() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

    with pytest.raises(TypeError, match="list of blocks of one class"):
        OffloadModel(Bare(), "cpu")


def test_parameters_tied_to_a_block_are_refused() -> None:
    bare = make()
    bare.norm.weight = bare.encoder.layer[0].norm.weight
    with pytest.raises(ValueError, match=r"norm\.weight is tied to encoder\.layer\.0\.norm\.weight"):
        wrap(bare)


def test_the_activations_of_a_chunk_are_not_measured() -> None:
    with pytest.raises(ValueError, match="pass the rows of a chunk"):
        wrap(make()).activation_bytes(words())


class Leaves(nn.Module):
    """Sets an attribute before its blocks and reads it after them: zero, with the gradient of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.left = x.sum() - x.sum().detach()
        for layer in self.layers:
            x = layer(x).relu()
        return x + self.left


def test_attributes_of_equal_values_are_those_of_each_micro_batch() -> None:
    bare = Leaves()
    model = OffloadModel(copy.deepcopy(bare), "cpu", "cpu", blocks="layers", num_microbatches=2)
    inputs = [torch.linspace(-1, 1, 24).view(6, 4).requires_grad_() for _ in range(2)]
    for each, x in zip((bare, model), inputs, strict=True):
        torch.cat([each(part) for part in x.chunk(2)] if each is bare else [each(x)]).square().sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
