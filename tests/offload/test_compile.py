"""``torch.compile`` around a model and of its layers; exporters and tracers, which are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from offload import MemoryPolicy, OffloadModel
from tests.offload.zoo import OwnForward

WIDTH = 6

pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",
    "ignore::FutureWarning",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",  # the compiler looks at it
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Backend:
    """A backend of the compiler that counts its graphs and their runs; without a name it runs them as they are."""

    def __init__(self, name: str | None = None) -> None:
        self.graphs = self.runs = 0
        self._name = name

    def __call__(self, graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        from torch._dynamo.backends.registry import lookup_backend

        self.graphs += 1
        run = graph.forward if self._name is None else lookup_backend(self._name)(graph, example)

        def counted(*inputs: Any) -> Any:
            self.runs += 1
            return run(*inputs)

        return counted


class Layer(nn.Module):
    """Of a class of its own: the compiler leaves single modules of ``torch.nn`` as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.gelu(self.linear(x))


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(4)))


def step(run: Any, parameters: list[nn.Parameter]) -> tuple[Tensor, list[Tensor | None]]:
    for parameter in parameters:
        parameter.grad = None
    loss = run(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)).square().sum()
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in parameters]


@pytest.mark.parametrize("recompute", [True, False])
def test_a_compiled_module_around_a_model_has_a_break_in_its_graph(recompute: bool) -> None:
    bare = nn.Sequential(Layer(), layers(), Layer())
    expected = step(bare, list(bare.parameters()))
    model = OffloadModel(copy.deepcopy(bare[1]), "cpu", num_slices=2, checkpoint_activation=recompute)
    around = nn.Sequential(copy.deepcopy(bare[0]), model, copy.deepcopy(bare[2]))
    backend = Backend()
    compiled = torch.compile(around, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(step(compiled, list(around.parameters())), expected)
    assert backend.graphs == 2


@pytest.mark.parametrize(("blocks", "how"), [(None, "in place"), ("layers", "in place"), ("layers", "wrapped")])
@pytest.mark.parametrize("mode", ["recompute", "graphs", "kept"])
def test_compiled_layers_stay_compiled_and_hooks_of_blocks_run_once(
    mode: str, blocks: str | None, how: str, tmp_path: Any
) -> None:
    bare, counted = OwnForward([*layers()]) if blocks else layers(), Backend("aot_eager")
    expected = step(bare, list(bare.parameters()))
    compiled: Any = copy.deepcopy(bare)
    parts = compiled.layers if blocks else compiled
    for k, layer in enumerate(parts):
        if how == "in place":
            layer.compile(backend=counted)
        else:
            parts[k] = torch.compile(layer, backend=counted)
    names = [name for name, _ in compiled.named_parameters()]
    policy = MemoryPolicy.fixed(graph_bytes="1MiB" if mode == "graphs" else None)
    model = OffloadModel(compiled, "cpu", tmp_path, 2, mode != "kept", blocks=blocks, memory=policy)
    hooked: list[nn.Module] = []
    parts[1].register_forward_hook(lambda block, args, output: hooked.append(block))
    for _ in range(3):
        torch.testing.assert_close(step(model, list(model.parameters())), expected)
    assert [name for name, _ in model.named_parameters()] == names
    assert hooked == [parts[1]] * 3 or not blocks
    assert counted.runs >= 3 * len(parts)
    assert counted.graphs <= 2 * len(parts) or not blocks  # with and without gradients


# --- what takes a model apart -----------------------------------------------------------------------------------------


def in_fake_tensors(model: nn.Module) -> None:
    with FakeTensorMode() as mode:
        model(mode.from_tensor(torch.zeros(2, WIDTH)))


REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    **{
        f"an export, strict={strict}": (
            lambda model, strict=strict: torch.export.export(model, (torch.zeros(2, WIDTH),), strict=strict),  # type: ignore[misc]
            r"inside torch\.export|OffloadModel\.forward",
        )
        for strict in (False, True)
    },
    "a trace of jit": (
        lambda model: torch.jit.trace(model, torch.zeros(2, WIDTH)),
        r"an OffloadModel cannot run inside torch.jit.trace.*the bare module",
    ),
    "vmap": (
        lambda model: torch.vmap(model)(torch.zeros(3, 2, WIDTH)),
        r"an OffloadModel cannot run inside a transform of torch.func",
    ),
    "fake tensors": (in_fake_tensors, "an OffloadModel cannot run inside fake tensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_takes_a_model_apart_is_refused(what: str) -> None:
    model = OffloadModel(layers(), "cpu", num_slices=2, checkpoint_activation=False)
    run, words = REFUSED[what]
    with pytest.raises(RuntimeError, match=words):
        run(model)
    model(torch.zeros(2, WIDTH)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
