"""Any function can be checkpointed: what it uses, it finds again as its forward found it, or backward names it."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from pipe import Pipe, is_checkpointing, is_recomputing
from pipe.checkpoint import checkpoint
from tests.programs import outputs_of_ranks

WIDTH = 6


class Gate(nn.Module):
    """Counts its forwards, and uses the count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.load = nn.Linear(WIDTH, WIDTH), 0

    def forward(self, x: Tensor) -> Tensor:
        self.load += 1
        return self.linear(x) / self.load  # type: ignore[no-any-return]


class Own(nn.Module):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * torch.rand(WIDTH, generator=self.generator)).tanh()  # type: ignore[no-any-return]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "BatchNorm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "counter": Gate,
    "generator": Own,
}


class Trainer:
    """Runs a block as a method."""

    def __init__(self, block: nn.Module) -> None:
        self.blocks = [block]

    def helper(self, x: Tensor) -> Tensor:
        return self.blocks[0](x)  # type: ignore[no-any-return]

    def run(self, x: Tensor) -> Tensor:
        return self.helper(x)


class Runner(Trainer):
    """Runs a block when it is called."""

    __call__ = Trainer.run


def through_a_helper(block: nn.Module) -> Callable[[Tensor], Tensor]:
    def helper(x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]

    return lambda x: helper(x) * 1


WAYS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "module": lambda block: block,
    "lambda": lambda block: lambda x: block(x),
    "default": lambda block: lambda x, block=block: block(x),
    "bound forward": lambda block: block.forward,
    "partial": lambda block: functools.partial(block),
    "method of an object": lambda block: Trainer(block).run,
    "object": lambda block: Runner(block),
    "closure of a closure": through_a_helper,
    "list": lambda block: lambda x, blocks=[block]: blocks[0](x),
}
BY: dict[str, Callable[[nn.Module, Tensor], Any]] = {
    **{
        way: lambda block, x, way=way: checkpoint(WAYS[way](block), x)  # type: ignore[misc]
        for way in ("module", "lambda", "method of an object", "partial")
    },
    "Pipe": lambda block, x: Pipe(nn.Sequential(block), [1], ["cpu"], chunks=2)(x),
}


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [p.grad for p in module.parameters()]


def assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_counts_once_however_the_function_reaches_it(block: str, way: str) -> None:
    torch.manual_seed(0)
    bare = BLOCKS[block]()
    ours = copy.deepcopy(bare)
    if block == "generator":
        ours.generator = torch.Generator().manual_seed(3)
    function = WAYS[way](ours)
    for _ in range(3):
        x = torch.randn(8, WIDTH)
        bare(x).square().sum().backward()
        checkpoint(function, x).square().sum().backward()
    assert_same([*gradients(ours), *ours.buffers()], [*gradients(bare), *bare.buffers()])
    assert getattr(ours, "load", 0) == getattr(bare, "load", 0)


class Graph:
    x: Tensor
    h: Tensor


class Doubling(Tensor):
    """Whose sines are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = super().__torch_function__(func, types, args, kwargs or {})
        return output * 2 if func is torch.sin else output


def linears(count: int) -> nn.ModuleList:
    return nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])


Chain = tuple[nn.Module, Tensor]


def functions_of_a_loop_that_refer_to_its_variable(run: Any) -> Chain:
    layers, h = linears(3), torch.randn(4, WIDTH)
    for i in range(3):
        h = run(lambda t: layers[i](t).tanh() * (i + 1), h)  # noqa: B023
    return layers, h


def a_captured_tensor_with_a_graph(run: Any) -> Chain:
    layers, h = linears(3), torch.randn(8, WIDTH)
    condition = layers[2](torch.randn(8, WIDTH)).tanh()
    for k in range(2):
        h = run(lambda h, block=layers[k]: block(h) * condition, h)
    return layers, h


def an_object_that_each_checkpoint_updates(run: Any) -> Chain:
    layers, graph = linears(3), Graph()
    graph.x = torch.randn(8, WIDTH)
    for layer in layers:
        graph.x = run(lambda graph, layer=layer: layer(graph.x).tanh(), graph)
    return layers, graph.x


def a_block_that_is_an_argument(run: Any) -> Chain:
    layers = nn.ModuleList([Gate()])
    return layers, run(lambda block, x: block(x), layers[0], torch.randn(4, WIDTH))


def a_tensor_subclass_whose_backward_disables_subclasses(run: Any) -> Chain:
    layers = linears(1)
    return layers, run(lambda x: torch.sin(torch.sin(layers[0](x))), torch.ones(4, WIDTH).as_subclass(Doubling))


CHAINS = [
    functions_of_a_loop_that_refer_to_its_variable,
    a_captured_tensor_with_a_graph,
    an_object_that_each_checkpoint_updates,
    a_block_that_is_an_argument,
    a_tensor_subclass_whose_backward_disables_subclasses,
]


@pytest.mark.parametrize("chain", CHAINS)
def test_checkpoints_have_the_gradients_of_the_functions(chain: Callable[[Any], Chain]) -> None:
    found = []
    for run in (lambda function, *args: function(*args), checkpoint):
        torch.manual_seed(0)
        layers, output = chain(run)
        output.square().sum().backward()
        found.append([*gradients(layers), *(torch.tensor(m.load) for m in layers.modules() if isinstance(m, Gate))])
    assert_same(*found)


# --- what was changed between forward and backward --------------------------------------------------------------------

FLAG = 1.0


def scaled_by_a_global(x: Tensor) -> Tensor:
    return (x * FLAG).exp()


@pytest.mark.parametrize("by", BY)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda block: block.weight.requires_grad_(True), r"weight' changed from requires_grad=False"),
        (lambda block: block.bias.add_(1), r"bias' was modified"),
        (
            lambda block: setattr(block, "weight", nn.Parameter(torch.ones(WIDTH, WIDTH))),
            r"place of parameter '(0\.)?weight'",
        ),
    ],
    ids=["thawed", "stepped", "replaced"],
)
def test_a_changed_module_is_named_however_the_function_reaches_it(by: str, change: Any, message: str) -> None:
    block = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    y = BY[by](block, torch.randn(4, WIDTH, requires_grad=True))
    with torch.no_grad():
        change(block)
    with pytest.raises(RuntimeError, match=message):
        y.exp().sum().backward()


@pytest.mark.parametrize("in_place", [False, True])
def test_an_object_that_got_the_next_batch_has_the_one_of_its_forward_again_or_is_named(in_place: bool) -> None:
    class Block(nn.Linear):
        def forward(self, graph: Any) -> Tensor:
            return super().forward(graph.x).tanh()

    block, graph, following = Block(WIDTH, WIDTH), SimpleNamespace(x=torch.randn(4, WIDTH)), torch.randn(4, WIDTH)
    expected = torch.autograd.grad(block(graph).sum(), block.weight)
    y = checkpoint(block, graph)
    if in_place:
        graph.x.copy_(following)
        with pytest.raises(RuntimeError, match="changed in place"):
            y.sum().backward()
    else:
        graph.x = following
        y.sum().backward()
        assert_same([block.weight.grad], expected)
        assert graph.x is following


def test_outputs_that_are_stored_in_what_the_function_holds_are_freed() -> None:
    freed = []
    layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    gc.disable()
    try:
        for _ in range(4):
            g = Graph()
            g.x = torch.randn(4, WIDTH)
            g.h = checkpoint(lambda graph=g: layer(graph.x))
            g.h.sum().backward()
            freed.append(weakref.ref(g.h))
            del g
    finally:
        gc.enable()
    gc.collect()
    assert [ref() for ref in freed] == [None] * 4


class Holder:
    factor = 1.0


@pytest.mark.parametrize(
    ("function", "change", "message"),
    [
        ("list", lambda held: held["list"].append(2.0), None),
        ("empty", lambda held: held["empty"].append(2.0), None),
        ("dict", lambda held: held["dict"].update(a=2.0), None),
        ("set", lambda held: held["set"].add(2.0), None),
        ("tensor", lambda held: held["tensor"].add_(1), r"a tensor of shape \(6,\)"),
        ("object", lambda held: setattr(held["object"], "factor", 2.0), None),
        ("module", lambda held: setattr(held["module"], "factor", 2.0), None),
        ("global", lambda held: globals().update(FLAG=2.0), None),
    ],
)
def test_a_changed_value_is_as_in_the_forward_or_named(function: str, change: Any, message: str | None) -> None:
    held: dict[str, Any] = {"list": [1.0], "empty": [], "dict": {"a": 1.0}, "set": set(), "object": Holder()}
    held |= {"tensor": torch.ones(WIDTH), "module": nn.Identity()}
    held["module"].factor = 1.0
    numbers, none, names, several, holder, tensor, module = held.values()
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "list": lambda x: (x * sum(numbers)).exp(),
        "empty": lambda x: (x * (1 + sum(none))).exp(),
        "dict": lambda x: (x * names["a"]).exp(),
        "set": lambda x: (x * (1 + sum(several))).exp(),
        "tensor": lambda x: (x * tensor).exp(),
        "object": lambda x: (x * holder.factor).exp(),
        "module": lambda x: (module(x) * module.factor).exp(),
        "global": scaled_by_a_global,
    }
    x = torch.randn(4, WIDTH, requires_grad=True)
    try:
        y = checkpoint(functions[function], x)
        change(held)
        if message is None:
            y.sum().backward()
            assert x.grad is not None
            torch.testing.assert_close(x.grad, x.detach().exp())
            others = {"dict": names.values(), "object": [holder.factor], "module": [module.factor], "global": [FLAG]}
            now = others.get(function, held.get(function))
            assert 2.0 in now  # type: ignore[operator]
        else:
            with pytest.raises(RuntimeError, match=message):
                y.sum().backward()
    finally:
        globals()["FLAG"] = 1.0


@pytest.mark.parametrize("first", [[], [0.0]])
def test_a_list_that_the_function_reads_and_adds_to_is_as_in_the_forward(first: list[float]) -> None:
    """It is a record, of further runs, too."""
    seen = first.copy()

    def function(x: Tensor) -> Tensor:
        seen.append(float(x.detach().sum()))
        return (x * len(seen)).exp()

    x = torch.randn(4, WIDTH, requires_grad=True)
    outputs = [function(x) if first else checkpoint(function, x), checkpoint(function, x)]
    sum(y.sum() for y in outputs).backward()  # type: ignore[union-attr]
    assert len(seen) == 4
    assert x.grad is not None
    expected = sum(k * (x.detach() * k).exp() for k in range(1 + len(first), 3 + len(first)))
    torch.testing.assert_close(x.grad, expected)


def test_a_captured_tensor_that_the_function_itself_changes_in_place_is_refused() -> None:
    total = torch.zeros(WIDTH)
    with pytest.raises(RuntimeError, match="changed in place by the first run"):
        checkpoint(lambda x: x * total.add_(1), torch.randn(4, WIDTH, requires_grad=True))


@pytest.mark.parametrize("container", ["list", "dict", "list of an object"])
def test_a_container_that_the_function_adds_to_gets_each_value_once(container: str) -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH)
    held: Any = {"x": x} if container == "dict" else [x]
    given = SimpleNamespace(held=held) if container == "list of an object" else held

    def block(state: Any) -> Tensor:
        state = getattr(state, "held", state)
        h = layer(state["x" if container == "dict" else 0]).tanh() * len(state)
        state.update(norm=h.detach().norm()) if container == "dict" else state.append(h.detach().norm())
        return h  # type: ignore[no-any-return]

    checkpoint(block, given).sum().backward()
    assert len(held) == 2
    assert_same([layer.weight.grad], torch.autograd.grad(layer(x).tanh().sum(), layer.weight))


# --- phases -----------------------------------------------------------------------------------------------------------


def test_phases_are_true_in_nested_runs() -> None:
    seen: list[tuple[str, bool, bool]] = []

    def note(name: str) -> None:
        seen.append((name, is_checkpointing(), is_recomputing()))

    def inner(x: Tensor) -> Tensor:
        note("inner")
        return x.exp()

    def outer(x: Tensor) -> Tensor:
        note("outer")
        y = checkpoint(inner, x.sin())
        note("outer again")
        return y.sin()

    checkpoint(outer, torch.ones(1, requires_grad=True)).backward()
    forward = [("outer", True, False), ("inner", True, False), ("outer again", True, False)]
    again = [("outer", False, True), ("inner", True, True), ("outer again", False, True)]
    assert seen == [*forward, *again, ("inner", False, True)]


# --- as with torch's --------------------------------------------------------------------------------------------------


class Force(nn.Module):
    """Differentiates inside its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.3), nn.Linear(WIDTH, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)[0]


def piped(module: nn.Sequential, **options: Any) -> Pipe:
    return Pipe(module, [1, len(module) - 1], ["cpu"] * 2, **options)


@pytest.mark.parametrize("by", ["checkpoint", "always", "never"])
def test_a_layer_that_differentiates_inside_its_forward(by: str) -> None:
    found = []
    for plain in (True, False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(WIDTH, WIDTH), Force())
        if plain:
            run: Any = net
        elif by == "checkpoint":
            run = lambda x, net=net: checkpoint(net[1], net[0](x))  # noqa: E731
        else:
            run = piped(net, checkpoint=by)
        torch.manual_seed(1)
        run(torch.randn(8, WIDTH)).square().sum().backward()
        # The bias of the last layer has none.
        found.append([p.grad for p in net.parameters() if p.grad is not None])
    assert len(found[0]) == len([*net.parameters()]) - 1
    assert_same(*found)


@pytest.mark.parametrize("by", ["checkpoint", "always", "except_last", "never"])
def test_lazy_layers_find_their_shapes_in_their_first_forward(by: str) -> None:
    net = nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh(), nn.Dropout(0.5), nn.LazyLinear(2))
    run: Any = (lambda x: checkpoint(net, x)) if by == "checkpoint" else piped(net, chunks=2, checkpoint=by)
    x = torch.randn(8, 5)
    for step in range(2):
        run(x).sum().backward()
        assert all(gradient is not None for gradient in gradients(net))
        if step == 0:
            bare = copy.deepcopy(net)
            net.zero_grad()
            bare.zero_grad()
            torch.manual_seed(1)
            sum(bare(part).sum() for part in (x.chunk(2) if by != "checkpoint" else [x])).backward()  # type: ignore[union-attr]
            torch.manual_seed(1)
    assert_same(gradients(net), gradients(bare))


def test_lazy_layers_without_a_balance_are_refused_with_advice() -> None:
    with pytest.raises(ValueError, match=r"expected layers of known shapes.*pass balance"):
        Pipe(nn.Sequential(nn.LazyLinear(2), nn.LazyLinear(2)), devices=["cpu"] * 2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.block, x))  # type: ignore[no-any-return]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("by", ["checkpoint", "always", "never"])
def test_a_compiled_model_gives_the_gradients_of_the_model(by: str, backend: str) -> None:
    torch.manual_seed(0)
    model: nn.Module = Net()
    if by != "checkpoint":
        model = piped(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)), chunks=2, checkpoint=by)
    x = torch.randn(8, WIDTH)
    model(x).square().sum().backward()
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=by == "checkpoint")(x).square().sum().backward()
    assert_same(gradients(model), expected)


DDP = """
from torch.nn.parallel import DistributedDataParallel
from pipe import Pipe
from pipe.checkpoint import checkpoint

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.unused = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4), nn.Linear(1, 1)
    def forward(self, x):
        return self.c(checkpoint(self.b, self.a(x)).tanh())


def ranks_reduce_the_gradients_of_checkpoints_and_pipes():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    always, last = (
        Pipe(copy.deepcopy(layers), [2, 1], ["cpu"] * 2, 2, mode) for mode in ("always", "except_last")
    )
    for model in (Net(), always, last):
        for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
            if isinstance(model, Net) and not options:
                continue
            x = torch.randn(8, 6)
            plain = copy.deepcopy(model)
            plain.zero_grad()
            plain(x).square().mean().backward()
            ddp = DistributedDataParallel(copy.deepcopy(model), **options)
            for _ in range(2):
                ddp.zero_grad()
                ddp(x.chunk(2)[rank]).square().mean().backward()
            for p, q in zip(plain.parameters(), ddp.parameters()):
                assert p.grad is None or torch.allclose(p.grad, q.grad, atol=1e-6), (type(model), options)
"""


def test_data_parallel_ranks_reduce_the_gradients_of_checkpoints_and_pipes(tmp_path: Any) -> None:
    assert ["held: " in output for output in outputs_of_ranks(DDP, 2, tmp_path)] == [True, True]


def test_several_arguments_by_position_and_name_in_nested_values() -> None:
    layer, a, b = nn.Linear(WIDTH, WIDTH), torch.randn(4, WIDTH, requires_grad=True), torch.randn(4, WIDTH)

    def function(pair: Any, *more: Any, scale: float, last: Any = None) -> Any:
        return {"y": layer(pair[0]) * pair[1], "z": [last["b"].exp() * scale + more[0], "text"]}

    results = []
    for run in (
        lambda f, *args, **kw: f(*args, **kw),
        checkpoint,
        functools.partial(checkpoint, use_reentrant=True, preserve_rng_state=True),
        functools.partial(torch_checkpoint, use_reentrant=False),
    ):
        a.grad = layer.weight.grad = None
        y = run(function, (a, b), a, scale=2.0, last={"b": a})
        (y["y"].sum() + y["z"][0].square().sum()).backward()
        assert y["z"][1] == "text"
        results.append([a.grad, layer.weight.grad])
    assert_same(results, results[:1] * 4)
