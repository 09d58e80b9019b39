"""Models with blocks whose values come from files or stay in them, and that compute in another type."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from offload import DiskHome, OffloadModel, OffloadOptimizer, init_empty_weights
from tests.offload import zoo
from tests.offload.blocks.towers import WIDTH, Model, loss_of, make, step, words
from tests.offload.persistent import everything
from tests.offload.side_by_side import assert_equal
from tests.programs import run_program


def wrap(bare: nn.Module, home: Any = "cpu", **choices: Any) -> Any:
    return OffloadModel(bare, "cpu", home, **{"checkpoint_activation": True, "blocks": "encoder.layer", **choices})


def on_meta() -> nn.Module:
    with torch.device("meta"):
        return Model()


def empty() -> nn.Module:
    with init_empty_weights():
        return Model()


def saved(model: nn.Module, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    safetensors.torch.save_model(model, str(folder / "model.safetensors"))
    return folder


# --- layers on the meta device ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [on_meta, empty, lambda: make(seed=5)], ids=["meta", "empty", "with values"])
@pytest.mark.parametrize("recompute", [True, False])
def test_weights_of_files_are_those_of_the_plain_model(
    build: Callable[[], nn.Module], recompute: bool, tmp_path: Path
) -> None:
    bare = make()
    bare.encoder.layer[1].calls.fill_(7)
    given = build()
    model = wrap(given, tmp_path / "home", pretrained=saved(bare, tmp_path / "w"), checkpoint_activation=recompute)
    assert model.head.weight is model.words.weight
    for seed in range(2):
        step(bare, seed), step(model, seed)
        assert_equal(bare, model)


class Drawn(nn.Module):
    """Initialises everything by ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layer = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.layer:
            x = block(x)
        out: Tensor = self.norm(x)
        return out


def test_modules_on_the_meta_device_initialise_themselves() -> None:
    with torch.device("meta"):
        bare = Drawn()
    torch.manual_seed(0)
    model = wrap(bare, blocks="layer")
    for linear in (model.first, *model.layer):
        assert 0 < linear.weight.abs().max() <= WIDTH**-0.5
    assert torch.equal(model.norm.weight, torch.ones(WIDTH))
    model(torch.ones(2, WIDTH)).sum().backward()


def test_a_module_that_cannot_initialise_itself_is_refused_by_name() -> None:
    bare = on_meta()
    with pytest.raises(ValueError, match=r"Block 'encoder.layer.0'|Model ''|'encoder.layer.0'.*init_empty_weights"):
        wrap(bare)
    assert all(p.is_meta for p in bare.parameters())


# --- from_pretrained --------------------------------------------------------------------------------------------------


class Frequencies(nn.Module):
    """With a buffer that is in no file, and a weight that is tied before it is registered."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inverse", 1 / 3 ** torch.arange(WIDTH).float(), persistent=False)
        shared = nn.Parameter(torch.ones(WIDTH))
        self.first, self.second = shared, shared

    def forward(self, x: Tensor) -> Tensor:
        return x * self.inverse * self.first + self.second


class Turned(Model):
    def __init__(self) -> None:
        super().__init__()
        self.turn = Frequencies()

    def embed(self, words: Tensor) -> Tensor:
        turned: Tensor = self.turn(super().embed(words))
        return turned


def test_from_pretrained_computes_what_no_file_holds(tmp_path: Path) -> None:
    torch.manual_seed(2)
    bare = Turned()
    weights = saved(bare, tmp_path / "w")
    choices = {"blocks": "encoder.layer", "checkpoint_activation": True}
    model: Any = OffloadModel.from_pretrained(weights, "cpu", tmp_path / "home", model=Turned, **choices)
    assert isinstance(model, Turned)
    assert model.turn.first is model.turn.second
    for seed in range(2):
        step(bare, seed), step(model, seed)
        assert_equal(bare, model)


class Adapted(nn.Module):
    def __init__(self, base: nn.Linear, up: Callable[[Tensor], object]) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features, bias=False)
        nn.init.ones_(self.down.weight)
        self.down.weight.data[0].mul_(2)
        up(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("resident", [None, ["*.up.*", "*.down.*"]])
def test_adapters_over_a_base_in_files_begin_as_they_were_initialised(resident: Any, tmp_path: Path) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    saved(layers, tmp_path / "w")

    def adapt(up: Callable[[Tensor], object]) -> Any:
        base = lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))  # noqa: E731
        adapters = lambda bare: nn.Sequential(*(Adapted(layer, up) for layer in bare))  # noqa: E731
        return OffloadModel.from_pretrained(
            tmp_path / "w", "cpu", tmp_path / "home", model=base, adapt=adapters, resident=resident
        )

    model, x = adapt(nn.init.zeros_), torch.randn(3, 4)
    assert torch.equal(model(x), layers(x))
    assert torch.equal(model[0].down.weight, torch.tensor([[2.0] * 4, [1.0] * 4]))
    model(x).sum().backward()
    assert all((p.grad is None) == name.startswith(("0.base", "1.base")) for name, p in model.named_parameters())
    with pytest.raises(ValueError, match=r"no file has a value of 0\.up\.weight, and its initial one was computed"):
        adapt(lambda weight: weight.data.copy_(torch.eye(4)[:, :2]))


@pytest.mark.parametrize("headed", [True, False])
def test_names_of_a_base_model_and_of_one_with_a_head_are_mapped(headed: bool, tmp_path: Path) -> None:
    class Headed(nn.Module):
        base_model_prefix = "model"

        def __init__(self) -> None:
            super().__init__()
            self.model, self.out = Drawn(), nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.out(self.model(x))
            return found

    class Base(Drawn):
        base_model_prefix = "model"

    source, target = (Headed(), Base) if headed else (Base(), Headed)
    weights, x = saved(source, tmp_path / "w"), torch.randn(2, WIDTH)
    blocks = "layer" if headed else "model.layer"
    if headed:
        model: Any = OffloadModel.from_pretrained(weights, "cpu", model=target, blocks=blocks)
        assert torch.equal(model(x), source.model(x))
    else:
        with pytest.raises(ValueError, match=r"missing: out.weight, out.bias$"):
            OffloadModel.from_pretrained(weights, "cpu", model=target, blocks=blocks)
        model = OffloadModel.from_pretrained(weights, "cpu", model=target, blocks=blocks, strict=False)
        with torch.no_grad():
            assert torch.equal(model.model(x), source(x))


MEMORY = """
import resource, sys, threading
import torch
from torch import nn
from offload import OffloadModel, save_checkpoint

threading.stack_size(1 << 20)  # a thread that is not gone yet when the next begins counts little

def held():
    return {key: int(value.split()[0]) << 10 for key, value in
            (line.split(":") for line in open("/proc/self/status") if line.startswith(("VmData", "RssAnon")))}

def layers(width):
    return lambda: nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))

save_checkpoint(sys.argv[1] + "/saved", layers(4)())
# With it comes all that the first one imports: transformers, where that is installed.
warm = OffloadModel.from_pretrained(sys.argv[1] + "/saved", "cpu", sys.argv[1] + "/small/", model=layers(4))
warm(torch.ones(2, 4)).sum().backward()
del warm
for thread in threading.enumerate():
    if thread.name.startswith("offload"):
        thread.join()
before, block = held(), 4 * 2048**2
resource.setrlimit(resource.RLIMIT_DATA, (before["VmData"] + 3 * block // 2, resource.RLIM_INFINITY))
model = OffloadModel.from_pretrained(sys.argv[1], "cpu", sys.argv[1] + "/home/", model=layers(2048))
assert sum(p.nbytes for p in model.parameters()) > 5 * block
assert held()["RssAnon"] - before["RssAnon"] < block, (held(), before, block)
print(float(model[5].weight.detach().sum()))
"""


def test_construction_takes_less_memory_than_one_shard(tmp_path: Path) -> None:
    tensors = {f"{k}.weight": torch.full((2048, 2048), 2.0**-k, dtype=torch.bfloat16) for k in range(6)}
    biases = {f"{k}.bias": torch.zeros(2048, dtype=torch.bfloat16) for k in range(6)}
    safetensors.torch.save_file(tensors | biases, tmp_path / "model.safetensors")
    ended = run_program(MEMORY, tmp_path)
    assert ended.status == 0, ended.errors
    assert float(ended.output) == 2.0**17  # 2 ** 22 elements


# --- a home that is kept ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [on_meta, empty])
def test_a_kept_home_holds_what_is_outside_of_the_blocks(build: Callable[[], nn.Module], tmp_path: Path) -> None:
    bare = make()
    plain = torch.optim.AdamW(bare.parameters(), lr=0.1, fused=True)
    model = wrap(copy.deepcopy(bare), DiskHome(tmp_path, keep=True))
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.1)
    for seed in range(3):
        for each, updates in ((bare, plain), (model, optimizer)):
            updates.zero_grad()
            step(each, seed)
            updates.step()
    model.close()
    again = wrap(build(), DiskHome(tmp_path, keep=True))
    assert all(torch.equal(t, everything(again)[name]) for name, t in everything(bare).items())
    bare.zero_grad()
    step(bare), step(again)
    assert_equal(bare, again)
    again.close()


@pytest.mark.filterwarnings("ignore:.*without close")
def test_a_kept_home_that_was_never_closed_has_the_first_values_outside(tmp_path: Path) -> None:
    bare = make()
    model = wrap(copy.deepcopy(bare), DiskHome(tmp_path, keep=True))
    model._homes.tier.close()
    del model
    with pytest.warns(RuntimeWarning, match="with parameters outside of blocks"):
        again = wrap(empty(), DiskHome(tmp_path, keep=True, recover=True))
    assert all(torch.equal(t, everything(again)[name]) for name, t in everything(bare).items())
    again.close()


# --- another type -----------------------------------------------------------------------------------------------------


def cast(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """With parameters in a type, and buffers as they are."""
    made = copy.deepcopy(model)
    for p in made.parameters():
        p.data = p.data.to(dtype)
    return made


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("blocks", ["encoder.layer", None])
def test_all_parameters_compute_in_param_dtype(dtype: torch.dtype, recompute: bool, blocks: str | None) -> None:
    bare = make() if blocks else zoo.build(["linear", "dropout", "rnn"])
    plain, model = cast(bare, dtype), wrap(bare, blocks=blocks, param_dtype=dtype, checkpoint_activation=recompute)
    extra = torch.randn(3, 5, WIDTH)
    inputs = [extra.clone().requires_grad_(), extra.to(dtype).requires_grad_()]
    losses = []
    for each, x in ((model, inputs[0]), (plain, inputs[1])):
        torch.manual_seed(3)
        losses.append(loss_of(each(words(), extra=x)) if blocks else each(x).square().mean())
        losses[-1].backward()
    assert losses[0].dtype is dtype
    assert torch.equal(*losses)
    assert torch.equal(inputs[0].grad, inputs[1].grad.float())
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert q.dtype is q.grad.dtype is torch.float32, name
        if name in ("words.weight", "masks.bias", "masks.weight"):  # sums of several uses, which the plain model rounds
            assert (p.grad - q.grad).abs().max() <= 0.02 * p.grad.abs().max(), name
        else:
            assert torch.equal(p.grad.float(), q.grad), name


def test_the_parameters_are_back_in_their_type_after_a_forward_and_after_a_failure() -> None:
    model = wrap(make(), param_dtype=torch.bfloat16)
    weights = list(model.parameters())
    seen: list[torch.dtype] = []
    hook = model.norm.register_forward_hook(lambda module, *_: seen.append(module.weight.dtype))
    with torch.no_grad():
        model(words())
    hook.remove()
    assert seen == [torch.bfloat16]
    model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(words())
    assert all(p is q for p, q in zip(weights, model.parameters(), strict=True))
    assert all(isinstance(p, nn.Parameter) and p.dtype is torch.float32 for p in model.parameters())
