"""Layers off the usual road: sparse and nested tensors, objects, unequal rows, autocast; each as in the bare model."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from offload import MemoryPolicy, OffloadModel, offload
from pipe import Pipe
from pipe.nested import tensors_in
from tests.offload.side_by_side import assert_equal, drawn

WIDTH, NODES = 24, 5
ADJACENCY = torch.tensor([[0, 0, 1, 2, 3, 4, 4], [1, 4, 2, 0, 3, 0, 2]])
pytestmark = pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks:UserWarning",
    "ignore:Sparse (CSR|CSC|BSR|BSC) tensor support:UserWarning",
    "ignore:.*nested tensors.*prototype:UserWarning",
)


class Call(nn.Module):
    """A linear layer, and a function of it and of what enters."""

    def __init__(self, function: Callable[..., Any], layer: nn.Module | None = None) -> None:
        super().__init__()
        self.layer: Any = nn.Linear(WIDTH, WIDTH) if layer is None else layer
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self.layer, *args, **kwargs)


# --- layouts ----------------------------------------------------------------------------------------------------------


def weigh(layout: str) -> Callable[..., Any]:
    """Features (NODES, WIDTH) -> (a sparse matrix of learned weights, features)."""

    def weighed(layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = layer(x).sum(0).tanh()
        if layout == "uncoalesced":
            twice = torch.cat([ADJACENCY, ADJACENCY], 1)
            return torch.sparse_coo_tensor(twice, torch.cat([weights, weights]), (NODES, NODES)), x
        if layout == "coo":
            return torch.sparse_coo_tensor(ADJACENCY, weights, (NODES, NODES), is_coalesced=False).coalesce(), x
        rows = torch.zeros(NODES + 1, dtype=torch.long)
        rows[1:] = torch.bincount(ADJACENCY[0], minlength=NODES).cumsum(0)
        return torch.sparse_csr_tensor(rows, ADJACENCY[1], weights, (NODES, NODES)), x

    return weighed


def propagate(layer: Any, value: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return value[0], value[1] + torch.sparse.mm(value[0], layer(value[1]))


def features(layer: Any, value: tuple[Tensor, Tensor]) -> Tensor:
    return layer(value[1])


def into(layout: str) -> Callable[..., Tensor]:
    def converted(layer: Any, x: Tensor) -> Tensor:
        y = layer(x)
        if layout == "jagged":
            return torch.nested.as_nested_tensor([y[:2], y[2:]], layout=torch.jagged)
        return y.to_sparse_csr() if layout == "csr" else y.to_sparse()

    return converted


def graph(layout: str) -> nn.Sequential:
    weighing = Call(weigh(layout), nn.Linear(WIDTH, ADJACENCY.size(1)))
    return nn.Sequential(weighing, Call(propagate), Call(propagate), Call(propagate), Call(features))


def ragged() -> nn.Sequential:
    residual = [Call(lambda layer, x: x + layer(x).relu()) for _ in range(3)]
    return nn.Sequential(Call(into("jagged")), *residual, Call(lambda layer, x: torch.nested.to_padded_tensor(x, 0.0)))


# --- objects and unequal rows -----------------------------------------------------------------------------------------


@dataclass
class State:
    hidden: Any
    name: str = "state"


class Holder:
    def __init__(self, hidden: Tensor) -> None:
        self.hidden = [hidden]


def out_of(layer: Any, state: Any) -> Tensor:
    return layer(state.hidden[0] if isinstance(state.hidden, list) else state.hidden)


def objects(kind: Any) -> nn.Sequential:
    return nn.Sequential(*(Call(f) for _ in range(2) for f in (lambda layer, x: kind(layer(x)), out_of)))


def to_complex(layer: Any, x: Tensor) -> Tensor:
    return torch.complex(layer(x), x.cos())


def from_complex(layer: Any, x: Tensor) -> Tensor:
    return layer(torch.view_as_real(x).sum(-1))


def messages(layer: Any, x: Any, edges: Tensor | None = None) -> Any:
    """A graph layer: nodes (n, WIDTH) and edges (2, e)."""
    x, edges = x if edges is None else (x, edges)
    return layer(x).index_add(0, edges[1], x[edges[0]]), edges


def recurrent() -> Call:
    return Call(
        lambda layer, value: layer(value if isinstance(value, PackedSequence) else value[0]), nn.LSTM(WIDTH, WIDTH)
    )


def packed() -> tuple[nn.Sequential, tuple[Any, ...]]:
    sequences = [torch.randn(n, WIDTH) for n in (2, 5, 3)]
    unpacked = Call(lambda layer, value: layer(pad_packed_sequence(value[0])[0]))
    return nn.Sequential(recurrent(), recurrent(), unpacked), (pack_sequence(sequences, enforce_sorted=False),)


def several() -> nn.Sequential:
    """Takes integers, bools, a number and a nested tensor."""

    def first(layer: Any, ids: Tensor, mask: Tensor, *, scale: float, extra: dict[str, Tensor]) -> Tensor:
        return layer(ids) * mask.unsqueeze(1) * scale + extra["offset"]

    return nn.Sequential(Call(first, nn.Embedding(10, WIDTH)), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True))


def arguments() -> tuple[tuple[Any, ...], dict[str, Any]]:
    inputs = torch.tensor([1, 2, 3, 4, 5], dtype=torch.int32), torch.tensor([True, False, True, True, True])
    return inputs, {"scale": 2.0, "extra": {"offset": torch.zeros(5, WIDTH)}}


class Casting(nn.Module):
    """Computes with casts and copies of its weight before it writes it, and with one afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(WIDTH, WIDTH) / WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        y = x.double() @ self.weight.double()
        y = y + x.double() @ self.weight.to(torch.float64, memory_format=torch.contiguous_format)
        y = y + x @ self.weight.to(self.weight.dtype, copy=True)
        with torch.no_grad():
            self.weight.mul_(0.5)
        return (y + x.double() @ self.weight.double().t()).to(x.dtype)


# --- autocast ---------------------------------------------------------------------------------------------------------


def by_hand(layer: nn.Linear, x: Tensor) -> Tensor:
    """Casts by itself, a part of its weight only."""
    return (x.double() @ layer.weight[:, ::2].double().t()).to(x.dtype)


def conjugate(layer: nn.Linear, x: Tensor) -> Tensor:
    """Computes with the conjugate of its weight, which is a view of it."""
    return (x.to(torch.complex64) * layer.weight.conj().sum(0) * layer.weight.conj()[0]).abs().to(x.dtype)


def convolution(layer: Any, x: Tensor) -> Tensor:
    return x + layer(x.view(-1, 6, 2, 2)).flatten(1)


def between(make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), make(), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())


AUTOCAST: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "conv": lambda: Call(convolution, nn.Conv2d(6, 6, 3, padding=1).to(memory_format=torch.channels_last)),
    "by hand": lambda: Call(by_hand, nn.Linear(2 * WIDTH, WIDTH, bias=False)),
    "conjugate": lambda: Call(conjugate, nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.complex64)),
    "lstm": lambda: Call(lambda layer, x: layer(x.unsqueeze(1))[0].squeeze(1), nn.LSTM(WIDTH, WIDTH, batch_first=True)),
}


def one(rows: int = NODES) -> tuple[Any, ...]:
    return (torch.randn(rows, WIDTH),)


def edges() -> tuple[Any, ...]:
    return torch.randn(5, WIDTH), torch.randint(0, 5, (2, 9))


#: The layers and their arguments, which may have named ones behind them.
CASES: dict[str, Callable[[], tuple[nn.Sequential, Any]]] = {
    **{f"graph {k}": lambda k=k: (graph(k), one()) for k in ("coo", "uncoalesced", "csr")},  # type: ignore[misc]
    "jagged": lambda: (ragged(), one()),
    **{
        f"returned {k}": lambda k=k: (nn.Sequential(nn.Linear(WIDTH, WIDTH), Call(into(k))), one())  # type: ignore[misc]
        for k in ("coo", "csr", "jagged")
    },
    "complex": lambda: (nn.Sequential(Call(to_complex), Call(from_complex)), one()),
    "a dataclass": lambda: (objects(State), one()),
    "an object": lambda: (objects(Holder), one()),
    "a hidden input": lambda: (nn.Sequential(Call(out_of), nn.Linear(WIDTH, WIDTH)), (State(*one()),)),
    "unequal rows": lambda: (nn.Sequential(Call(messages), Call(messages), Call(messages)), edges()),
    "packed": packed,
    "several arguments": lambda: (several(), arguments()),
    "casts": lambda: (between(Casting), one()),
    **{f"autocast {k}": lambda k=k: (between(AUTOCAST[k]), one()) for k in AUTOCAST},  # type: ignore[misc]
}
#: Home, and what is kept.
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "recomputed": (True, {"checkpoint_activation": True, "memory": MemoryPolicy.fixed(boundary_bytes=0)}),
    "graphs": (False, {"checkpoint_activation": True, "memory": MemoryPolicy.fixed(graph_bytes="1MiB")}),
    "kept": (True, {"checkpoint_activation": False}),
    "two shards": (True, {"checkpoint_activation": True, "num_slices": 2}),
}


def bare_call(layers: nn.Sequential, *args: Any, **kwargs: Any) -> Any:
    """What a Sequential cannot do: passes several arguments to its first layer."""
    value = layers[0](*args, **kwargs)
    return layers[1:](value)


def loss_of(output: Any) -> Tensor:
    leaves = [t.values() if t.is_nested else t.to_dense() for t in tensors_in(output) if t.is_floating_point()]
    return torch.stack([t.float().square().sum() for t in leaves]).sum()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CASES)
def test_each_computes_as_the_bare_model(name: str, way: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    bare, given = CASES[name]()
    args, kwargs = given if isinstance(given[-1], dict) else (given, {})
    on_disk, how = WAYS[way]
    how = {"num_slices": len(bare), **how}
    model: Any = OffloadModel(copy.deepcopy(bare), "cpu", tmp_path if on_disk else "cpu", **how)
    inputs = [t for t in tensors_in((args, kwargs)) if t.is_floating_point()]
    for state in args:
        inputs += [state.hidden] if isinstance(state, State) else []
    asks = name != "packed"  # its leaves are inside
    if (name, way) == ("jagged", "two shards"):  # torch numbers the lengths of a new nested tensor anew
        with pytest.raises(RuntimeError, match="compute it without recomputation"):
            loss_of(model(*args)).backward()
        return
    for seed in range(2):
        results = []
        for run in (lambda *a, **k: bare_call(bare, *a, **k), model):
            for leaf in inputs:
                leaf.grad = None
                leaf.requires_grad_(asks)
            torch.manual_seed(seed)
            with torch.autocast("cpu", torch.bfloat16, enabled=name.startswith("autocast"), cache_enabled=run is model):
                with torch.no_grad():
                    run(*args, **kwargs)
                loss = loss_of(run(*args, **kwargs))
            loss.backward()
            module = model if run is model else bare
            results.append([loss.detach(), *(leaf.grad for leaf in inputs), *(p.grad for p in module.parameters())])
            results[-1] += [p.detach().clone() for p in module.parameters()]
        torch.testing.assert_close(results[1], results[0], rtol=1e-6, atol=1e-6)
    if way == "recomputed" and name.startswith("unequal"):
        assert model.statistics().bytes_spilled > 0


class Casts(TorchDispatchMode):
    """The storages of all casts to bfloat16 of tensors as large as a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: list[StorageWeakRef] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16
        if is_cast and result.numel() == WIDTH * WIDTH:
            self.storages.append(StorageWeakRef(result.untyped_storage()))
        return result

    def alive(self) -> int:
        gc.collect()
        return sum(not storage.expired() for storage in self.storages)


@pytest.mark.parametrize("microbatches", [1, 3])
def test_between_forward_and_backward_no_cast_of_a_trained_weight_is_alive(microbatches: int) -> None:
    layers = between(AUTOCAST["linear"])
    model = OffloadModel(layers, "cpu", "cpu", 3, checkpoint_activation=False, num_microbatches=microbatches)
    casts = Casts()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with casts:
            output = model(torch.randn(8, WIDTH).requires_grad_())
        assert len(casts.storages) == 3 * microbatches
        assert casts.alive() == 0, "also as long as the user's autocast context lasts"
    output.float().sum().backward()
    assert casts.alive() == 0


def test_a_cast_of_one_chunk_is_the_one_before_the_write_of_the_next() -> None:
    bare = between(Casting)
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=6, checkpoint_activation=False)
    chunks = list(torch.randn(6, WIDTH).split(2))
    for outputs in ([bare(chunk) for chunk in chunks], model.forward_chunks(chunks)):
        torch.cat(outputs).square().sum().backward()
    torch.testing.assert_close([p.grad for p in model.parameters()], [p.grad for p in bare.parameters()])


def test_an_object_that_is_the_input_holds_in_the_recomputation_what_it_held() -> None:
    bare = nn.Sequential(Call(out_of), nn.Linear(WIDTH, WIDTH))
    model = OffloadModel(copy.deepcopy(bare), "cpu", checkpoint_activation=True)
    for each in (model, bare):
        given = State(torch.ones(4, WIDTH))
        loss = each(given).sum()
        given.hidden = later = torch.zeros(4, WIDTH)
        loss.backward()
        assert given.hidden is later
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), bare.parameters(), strict=True))


# --- refused ----------------------------------------------------------------------------------------------------------


def test_a_strided_nested_tensor_is_refused_by_name_where_it_would_be_stored() -> None:
    bare = nn.Sequential(
        Call(lambda layer, x: torch.nested.as_nested_tensor([layer(x)], layout=torch.strided)),
        Call(lambda layer, x: torch.cat(layer(x).unbind())),
    )
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=2, checkpoint_activation=True)
    with pytest.raises(TypeError, match=r"nested tensor of the strided layout that enters shard 1.*torch.jagged"):
        model(torch.randn(2, WIDTH))


CUT = (partial(OffloadModel, device="cpu", num_microbatches=2), partial(Pipe, balance=[2], devices=["cpu"], chunks=2))


@pytest.mark.parametrize("wrap", CUT)
def test_sparse_inputs_are_not_cut_into_micro_batches(wrap: Any) -> None:
    run = wrap(nn.Sequential(Call(propagate), Call(features)))
    with pytest.raises(TypeError, match=r"layout torch.sparse_coo; pass NoChunk"):
        run((torch.eye(NODES).to_sparse(), torch.randn(NODES, WIDTH)))


class States(nn.Module):
    """Returns the hidden state (layers, B, WIDTH), or the output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        self.gru, self.states = nn.GRU(WIDTH, WIDTH, 2, batch_first=True), True

    def forward(self, x: Tensor) -> Tensor:
        output, states = self.gru(self.layers[0](x))
        return states if self.states else output  # type: ignore[no-any-return]


@pytest.mark.parametrize("blocks", [False, True])
def test_outputs_of_micro_batches_whose_rows_are_in_dimension_1_are_refused(blocks: bool) -> None:
    bare = States()
    options: dict[str, Any] = {"blocks": "layers"} if blocks else {"num_slices": 1}
    model = OffloadModel(bare if blocks else nn.Sequential(bare), "cpu", num_microbatches=2, **options)
    x = torch.randn(8, 3, WIDTH)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients), pytest.raises(ValueError, match=rf"\(2, 4, {WIDTH}\).*with rows first"):
            model(x)
    bare.states = False
    model(x).sum().backward()


def test_an_argument_that_later_layers_would_miss_is_refused() -> None:
    class Masked(nn.Linear):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(x) if mask is None else super().forward(x) * mask

    x, mask = torch.randn(6, WIDTH), torch.ones(6, 1)
    model = OffloadModel([Masked(WIDTH, WIDTH), Masked(WIDTH, WIDTH)], "cpu", checkpoint_activation=False)
    for call in (lambda: model(x, mask=mask), lambda: model(x, mask)):
        with pytest.raises(TypeError, match="mask would be missing in later layers"):
            call()
    model(x, None)
    first = Call(lambda layer, x, mask: layer(x) * mask)
    OffloadModel([first, nn.Linear(WIDTH, WIDTH)], "cpu", checkpoint_activation=False)(x, mask=mask)


# --- weights that users write -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [True, False])
@pytest.mark.parametrize("backup", ["data", "state_dict", "clone"])
def test_data_that_is_assigned_over_a_backup_that_shares_memory_is_refused(
    home: str, backup: str, recompute: bool
) -> None:
    """As average weights are often exchanged for an evaluation."""
    bare = between(AUTOCAST["linear"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, 3, recompute)
    x = torch.randn(6, WIDTH)
    for run in (bare, model):
        if backup == "state_dict":
            held = list(run.state_dict().values())
        else:
            held = [p.data.clone() if backup == "clone" else p.data for p in run.parameters()]
        for p in run.parameters():
            p.data = torch.zeros_like(p)
        if run is bare or backup == "clone":
            run(x)
        else:
            with pytest.raises(RuntimeError, match=r"keep a copy instead, such as p\.data\.clone\(\)"):
                run(x)
        for p, value in zip(run.parameters(), held, strict=True):
            p.data = value
        del held
    assert torch.equal(model(x), bare(x))


def normalise(weight: Tensor, way: str) -> None:
    if way == "assigned":
        weight.data = weight.detach() / weight.detach().norm()
        return
    with torch.no_grad():
        weight.div_(weight.norm())


class Normalising(nn.Module):
    """Writes the weight of each block just before its call: in its own forward, or by a hook."""

    def __init__(self, way: str, hooked: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.way, self.hooked = way, hooked
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))
        for block in self.blocks if hooked else ():
            block.register_forward_pre_hook(lambda module, _: normalise(module[0].weight, way))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if not self.hooked:
                normalise(block[0].weight, self.way)
            x = block(x)
        return x


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("hooked", [True, False])
@pytest.mark.parametrize("way", ["in place", "assigned"])
def test_what_is_written_to_weights_during_a_forward_is_what_their_block_computes_with(
    way: str, hooked: bool, trains: bool, home: str
) -> None:
    """Also where the block was loaded ahead of the write."""
    outputs: list[list[Tensor]] = [[], []]
    plain, ours = Normalising(way, hooked), Normalising(way, hooked)
    offload(ours, "cpu", home, blocks="blocks")
    for model, found in zip((plain, ours), outputs, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(3):
            with torch.set_grad_enabled(trains):
                found.append(model(drawn(k, 3, WIDTH)))
            if trains:
                found[-1].square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
    assert all(map(torch.equal, *outputs))
    assert_equal(plain, ours)


def test_a_backward_hook_that_writes_to_weights_whose_backward_is_to_come_is_refused(home: str) -> None:
    """As autograd does."""
    plain, ours = (Normalising("in place", False) for _ in range(2))
    offload(ours, "cpu", home, blocks="blocks", checkpoint_activation=True)
    for model, words in (
        (plain, "modified by an inplace"),
        (ours, r"blocks.1.0.weight of shard 1 was changed in place"),
    ):

        def write(*_: Any, model: Normalising = model) -> None:
            normalise(model.blocks[1][0].weight, "in place")  # type: ignore[index]

        model.blocks[3].register_full_backward_hook(write)
        with pytest.raises(RuntimeError, match=words):
            model(drawn(0, 3, WIDTH)).sum().backward()


def test_data_of_another_type_is_refused_until_it_is_of_the_old_one(home: str) -> None:
    bare = between(AUTOCAST["linear"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, 3, True)
    x, weight = torch.randn(6, WIDTH), next(model.parameters())
    weight.data = weight.data.double() * 2
    for _ in range(2):
        with pytest.raises(ValueError, match=r"expected data of torch\.float32 for parameter 0\.weight"):
            model(x)
    weight.data = weight.data.float()
    next(bare.parameters()).data.mul_(2)
    assert torch.equal(model(x), bare(x))


def test_parameters_that_share_memory_without_being_tied_are_refused() -> None:
    bare = between(AUTOCAST["linear"])
    bare[4].weight.data = bare[0].weight.data
    with pytest.raises(ValueError, match=r"0\.weight and 4\.weight share memory"):
        OffloadModel(bare, "cpu", num_slices=2, checkpoint_activation=False)
    flat = torch.randn(2, WIDTH)
    apart = [nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)]
    for layer, row in zip(apart, flat, strict=True):
        layer.weight.data = row
    OffloadModel(apart, "cpu", num_slices=2, checkpoint_activation=False)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_cache_of_parametrizations_around_a_forward_with_gradients_is_refused(recompute: bool) -> None:
    """A recomputation would run a power iteration of its own, and a later forward meet weights of an ended visit."""
    bare = between(lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)))
    model = OffloadModel(copy.deepcopy(bare), "cpu", "cpu", 3, recompute)
    x = torch.randn(6, WIDTH)
    with nn.utils.parametrize.cached():
        with pytest.raises(RuntimeError, match=r"expected no torch\.nn\.utils\.parametrize\.cached\(\)"):
            model(x)
        with torch.no_grad():
            assert torch.equal(model.eval()(x), bare.eval()(x))
