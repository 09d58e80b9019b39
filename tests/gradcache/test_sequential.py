"""Layers in memory, run by the engine: the results of chunk by chunk, with one forward less than with checkpoints."""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from gradcache import GradCache
from gradcache.loss import SimpleContrastiveLoss
from gradcache.sequential import SequentialModel, is_plain_sequential
from offload import MemoryPolicy, OffloadModel
from offload.engine.regroup import runs_alike
from pipe import is_recomputing
from tests.gradcache.allocated import Allocated

PLENTY = 1 << 30


class AcrossRows(nn.Module):
    """Looks across the rows of a chunk, without a buffer that would betray it."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


class InPlace(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def layers(*kinds: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    make = {
        "linear": lambda: nn.Linear(8, 8),
        "tanh": nn.Tanh,
        "dropout": lambda: nn.Dropout(0.5),
        "norm": lambda: nn.BatchNorm1d(8),
        "across": AcrossRows,
        "inplace": InPlace,
        "relu": lambda: nn.ReLU(inplace=True),
        "frozen": lambda: nn.Linear(8, 8).requires_grad_(False),
        "block": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
        "dropping": lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.Dropout(0.5)),
    }
    return nn.Sequential(*(make[kind]() for kind in kinds))


def energy(*reps: Tensor) -> Tensor:
    return torch.stack([(rep * rep.detach().exp()).sum() for rep in reps]).sum()


class Watch:
    """Counts the rows that each layer is run on, with the sizes of each run."""

    def __init__(self, model: nn.Sequential) -> None:
        self.runs: list[list[int]] = [[] for _ in model]
        for j, layer in enumerate(model):
            layer.register_forward_hook(lambda _m, args, _o, j=j: self.runs[j].append(args[0].size(0)))

    def rows(self) -> list[int]:
        return [sum(runs) for runs in self.runs]

    def clear(self) -> None:
        for runs in self.runs:
            runs.clear()


@settings(max_examples=60)
@given(
    kinds=st.lists(
        st.sampled_from(["linear", "tanh", "norm", "across", "inplace", "relu", "frozen", "block"]),
        min_size=1,
        max_size=6,
    ),
    rows=st.integers(2, 12),
    size=st.integers(2, 5),
    budget=st.sampled_from([0, 300, 1000, PLENTY]),
    regroup=st.booleans(),
    input_gradient=st.booleans(),
    tied=st.booleans(),
    steps=st.integers(1, 2),
)
def test_layer_by_layer_equals_chunk_by_chunk_for_every_combination_of_layers(
    assert_same_gradients: Any,
    kinds: list[str],
    rows: int,
    size: int,
    budget: int,
    regroup: bool,
    input_gradient: bool,
    tied: bool,
    steps: int,
) -> None:
    # Plain torch refuses to write over what the layer before has saved for its backward.
    pairs = itertools.pairwise(kinds)
    assume(not any(before in ("tanh", "relu") and after in ("inplace", "relu") for before, after in pairs))
    if rows % size == 1:
        rows += 1  # BatchNorm needs two rows in a chunk
    bare, ours = layers(*kinds, "linear"), layers(*kinds, "linear")
    x = torch.randn(rows, 8)
    inputs = [x.clone().requires_grad_(input_gradient) for _ in range(2)]
    first = GradCache([bare, bare] if tied else [bare], size, energy)
    second = GradCache(
        [ours, ours] if tied else [ours], size, energy, memory=MemoryPolicy(boundary_bytes=budget, join_chunks=regroup)
    )
    for _ in range(steps):
        losses = [s(*[given] * len(s.models)) for s, given in zip((first, second), inputs, strict=True)]
        torch.testing.assert_close(losses[0], losses[1])
    assert_same_gradients([bare], [ours], tolerance=1e-5)
    for mine, theirs in zip(ours.buffers(), bare.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs)
    if input_gradient:
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)


def test_layers_run_forward_once_where_graphs_fit_and_the_first_chunk_twice_in_the_first_step() -> None:
    model = layers("linear", "tanh", "linear")
    watch = Watch(model)
    step = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=PLENTY, join_chunks=False))
    step(torch.randn(8, 8))
    assert watch.rows() == [10, 10, 10]
    watch.clear()
    step(torch.randn(8, 8))
    assert watch.rows() == [8, 8, 8]


@pytest.mark.parametrize(
    ("extra", "runs"),
    [
        (0, [16, 16, 16, 16]),
        (63, [16, 16, 16, 16]),
        (64, [16, 16, 16, 14]),
        (127, [16, 16, 16, 14]),
        (128, [16, 16, 16, 12]),
        (256, [8, 8, 8, 8]),
    ],
)
def test_the_cells_that_backward_begins_with_keep_their_graphs_as_far_as_the_budget_holds(
    extra: int, runs: list[int]
) -> None:
    """A chunk of 2 rows: 64 bytes enter each layer, and are counted before.

    The graph of the last layer keeps 64 bytes more, its own result. What the others keep enters a layer, so that they
    cost nothing once the last layer's graphs of all chunks are kept.
    """

    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).tanh()

    model = nn.Sequential(*layers("linear", "linear", "tanh"), Head())
    step = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=4 * 3 * 64 + extra, join_chunks=False))
    step(torch.randn(8, 8))
    watch = Watch(model)
    step(torch.randn(8, 8))
    assert watch.rows() == runs


def on_each_gradient(model: nn.Sequential, function: Callable[[int], None]) -> list[Any]:
    """Calls a function with the number of a layer whenever the gradient of its weight grows, while the result lives."""
    nodes = []
    for j, layer in enumerate(model):
        # Of the node: hooks of the parameter run once a step.
        nodes.append(layer.weight.view_as(layer.weight).grad_fn.next_functions[0][0])
        nodes[-1].register_hook(lambda *_, j=j: function(j))
    return nodes


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        # Of three chunks in three layers. 64 bytes enter a layer for each, and rest before all but the first.
        (PLENTY, [2, 2, 2, 1, 1, 1, 0, 0, 0]),
        (6 * 64, [2, 2, 2, 1, 1, 1, 0, 0, 0]),
        (4 * 64, [2, 2, 1, 1, 0, 0, 2, 1, 0]),
        (0, [2, 1, 0] * 3),
    ],
)
def test_backward_of_chunks_with_kept_graphs_runs_together_and_of_others_one_at_a_time(
    budget: int, expected: list[int]
) -> None:
    model = layers("linear", "linear", "linear")
    order: list[int] = []
    nodes = on_each_gradient(model, order.append)
    GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=budget, join_chunks=False))(torch.randn(6, 8))
    assert order == expected
    assert len(nodes) == 3


@pytest.mark.parametrize("budget", [9 * 64, PLENTY])
def test_kept_activations_are_freed_as_gradients_are_computed(budget: int) -> None:
    """So that the two share their memory. What enters a layer is also the result that the graph before it holds."""
    model = layers("linear", "linear", "linear", "linear")
    step = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=budget, join_chunks=False))
    step(torch.randn(6, 8))  # graphs are kept from the second step on
    entered: list[list[weakref.ref[Any]]] = [[] for _ in model]
    alive: list[tuple[int, int]] = []

    def look(j: int) -> None:
        alive.append((j, sum(storage() is not None for later in entered[j + 2 :] for storage in later)))

    for j, layer in enumerate(model):
        layer.register_forward_hook(
            lambda _m, args, _o, j=j: entered[j].append(weakref.ref(args[0].untyped_storage())), prepend=True
        )
    nodes = on_each_gradient(model, look)
    step(torch.randn(6, 8))
    assert len(nodes) == 4
    assert alive == [(j, 0) for j in (3, 3, 3, 2, 2, 2, 1, 1, 1, 0, 0, 0)]


def test_a_layer_that_is_thawed_after_a_step_gets_its_gradient(assert_same_gradients: Any) -> None:
    bare, ours = layers("block", "block", "linear"), layers("block", "block", "linear")
    steps = [GradCache([bare], 2, energy), GradCache([ours], 2, energy, memory=MemoryPolicy(boundary_bytes=512))]
    for frozen in (True, False):
        x = torch.randn(8, 8)
        for model, step in zip((bare, ours), steps, strict=True):
            model[1].requires_grad_(not frozen)
            step(x)
    assert_same_gradients([bare], [ours], tolerance=1e-5)


def test_a_layer_whose_operations_differ_from_the_measured_ones_is_recomputed(assert_same_gradients: Any) -> None:
    class Fickle(nn.Sequential):
        further = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            return self[2](torch.tanh(y)) if self.further else y

    bare, ours = [nn.Sequential(Fickle(*layers("block")[0]), nn.Linear(8, 8)) for _ in range(2)]
    ours.load_state_dict(bare.state_dict())
    steps = [
        GradCache([bare], 4, energy),
        GradCache([ours], 4, energy, memory=MemoryPolicy(boundary_bytes=1, join_chunks=False)),
    ]
    x = torch.randn(8, 8)
    for further in (False, True, True):
        for model, step in zip((bare, ours), steps, strict=True):
            model[0].further = further
            step(x)
    assert_same_gradients([bare], [ours], tolerance=1e-5)


def test_without_a_budget_a_layer_runs_forward_a_third_time_and_never_a_fourth() -> None:
    model = layers("linear", "tanh", "linear")
    step = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=0, join_chunks=False))
    step(torch.randn(8, 8))
    watch = Watch(model)
    step(torch.randn(8, 8))
    assert watch.rows() == [24, 24, 16]


def test_chunks_larger_than_the_first_keep_graphs_that_fit_and_recompute_the_rest() -> None:
    """What is planned for them is too small, so that graphs may find room before and behind one that did not."""

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(8, 64), nn.Linear(64, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden: Tensor = self.outer(self.inner(x).tanh())
            return hidden

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Wide(), nn.Tanh(), nn.Linear(8, 8))
    chunks = [torch.randn(rows, 8) for rows in (2, 6, 4)]
    model(torch.cat(chunks)).square().sum().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    for budget in range(0, 6000, 50):
        layered = SequentialModel(model, budget, join_chunks=False)
        for _ in range(2):
            model.zero_grad()
            outputs, tape = layered.forward_chunks(chunks)
            tape.backward([2 * output for output in outputs])
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient)


class Counts(nn.Module):
    """Counts its calls in Python, as ``is_recomputing`` asks it to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(8, 8), 0

    def forward(self, x: Tensor) -> Tensor:
        if not is_recomputing():
            self.calls += 1
        hidden: Tensor = self.linear(x).tanh()
        return hidden


@pytest.mark.parametrize("execution", ["two passes", "layers", "shards"])
def test_a_layer_that_counts_its_calls_counts_every_chunk_once(execution: str) -> None:
    model = nn.Sequential(Counts(), Counts())
    counted = list(model)
    if execution == "shards":
        model = OffloadModel(model, "cpu", num_slices=2, checkpoint_activation=True)
    memory = MemoryPolicy(boundary_bytes=64, join_chunks=False) if execution == "layers" else None
    GradCache([model], 2, energy, memory=memory)(torch.randn(6, 8))
    assert [layer.calls for layer in counted] == [3, 3]


def test_learning_from_a_first_chunk_leaves_no_trace() -> None:
    """Neither in buffers nor in generators; code that counts in Python can ask ``is_recomputing``."""
    model = layers("linear", "norm", "dropout", "linear")
    calls: list[tuple[bool, int]] = []
    model[0].register_forward_pre_hook(lambda _m, args: calls.append((is_recomputing(), args[0].size(0))))
    chunks = list(torch.randn(8, 8).split(2))
    bare = copy.deepcopy(model)
    torch.manual_seed(1)
    expected = [bare(chunk).detach() for chunk in chunks]
    state = torch.get_rng_state()
    calls.clear()
    torch.manual_seed(1)
    found, _ = SequentialModel(model, 0).forward_chunks(chunks)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), bare.buffers(), strict=True))
    assert calls == [(True, 2)] + [(False, 2)] * 4


def test_the_budget_is_never_exceeded_and_graphs_that_fit_are_kept() -> None:
    """Each chunk of 2 rows keeps 64 bytes before each layer but the first: 128 for three layers."""
    x = torch.randn(8, 8)
    for budget, kept in [(0, 0), (63, 0), (64, 64), (200, 192)]:
        model = SequentialModel(layers("linear", "tanh", "linear"), budget, join_chunks=False)
        with Allocated() as allocated:
            outputs, tape = model.forward_chunks(list(x.split(2)))
        assert allocated.alive(x, *outputs, *model.parameters) == kept
        del tape


def test_chunks_run_together_from_the_second_step_on_as_many_as_one_chunk_s_activations_take() -> None:
    kinds = ["linear", "tanh"] * 4
    model = layers(*kinds)
    step = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=PLENTY))
    step(torch.randn(32, 8))
    watch = Watch(model)
    step(torch.randn(32, 8))
    # Each layer keeps its input or its output: a model of 8 layers keeps what 8 chunks of one layer do (shared
    # storages are counted once, which makes it one less). All graphs find room.
    assert all(max(runs) > 2 for runs in watch.runs)
    assert watch.rows() == [32] * 8
    assert len({tuple(runs) for runs in watch.runs}) == 1


def test_chunks_run_together_only_within_the_remaining_budget() -> None:
    """A chunk of 2 rows keeps 64 bytes before each of 3 layers; the largest layer's graph keeps 64 more."""
    kinds = ["linear", "tanh"] * 2
    for extra, most in [(0, 1), (63, 1), (64, 2), (128, 3)]:
        model = layers(*kinds)
        step = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=8 * 3 * 64 + extra))
        step(torch.randn(16, 8))
        watch = Watch(model)
        step(torch.randn(16, 8))
        assert {max(runs) for runs in watch.runs} == {2 * most}


@pytest.mark.parametrize("kind", ["norm", "across"])
def test_chunks_never_run_together_across_a_layer_that_could_tell_them_apart(kind: str) -> None:
    model = layers("linear", kind, "linear", "tanh")
    step = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=PLENTY))
    step(torch.randn(12, 8))
    watch = Watch(model)
    step(torch.randn(12, 8))
    assert all(runs == [2] * len(runs) for runs in watch.runs)


def test_chunks_of_unlike_shapes_run_apart() -> None:
    chunks = [
        torch.zeros(2, 3),
        torch.zeros(1, 3),
        torch.zeros(2, 4),
        torch.zeros(2, 4),
        torch.zeros(()),
        torch.zeros(()),
    ]
    assert runs_alike(chunks, 4) == [[0, 1], [2, 3], [4], [5]]
    assert runs_alike(chunks, 1) == [[i] for i in range(6)]


@pytest.mark.parametrize("budget", [0, PLENTY])
@pytest.mark.parametrize("regroup", [False, True])
def test_dropout_in_layers_and_in_get_rep_fn_draws_the_same_masks_in_both_passes(budget: int, regroup: bool) -> None:
    model = layers("linear", "dropout", "linear", "dropout")
    step = GradCache(
        [model],
        2,
        energy,
        get_rep_fn=lambda out: nn.functional.dropout(out, 0.5),
        memory=MemoryPolicy(boundary_bytes=budget, join_chunks=regroup),
        audit=True,
    )
    for _ in range(2):
        step(torch.randn(10, 8))
        assert step.step_result is not None
        assert step.step_result.greatest_difference is not None
        assert step.step_result.greatest_difference < 1e-5


def test_the_trial_of_grouping_leaves_the_generator_as_it_was() -> None:
    class Noisy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.rand(()) * 0

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Noisy(), nn.Linear(8, 8))
    chunks = 4
    torch.manual_seed(1)
    for _ in range(chunks):
        torch.rand(())
    expected = torch.get_rng_state()
    torch.manual_seed(1)
    step = GradCache([model], 2, energy, memory=MemoryPolicy(boundary_bytes=0, join_chunks=True))
    step(torch.randn(2 * chunks, 8, generator=torch.Generator().manual_seed(0)))
    # Groups draw once for several chunks; so no more than chunk by chunk, and the trial draws nothing that lasts.
    torch.manual_seed(1)
    states = []
    for _ in range(chunks + 1):
        states.append(torch.get_rng_state())
        torch.rand(())
    torch.manual_seed(1)
    step(torch.randn(2 * chunks, 8, generator=torch.Generator().manual_seed(0)))
    assert any(torch.equal(torch.get_rng_state(), state) for state in states)
    assert any(torch.equal(expected, state) for state in states)


def test_autocast_reaches_both_passes_and_no_stale_cast_is_used(assert_same_gradients: Any) -> None:
    bare, ours = layers("linear", "tanh", "linear"), layers("linear", "tanh", "linear")
    x, y = torch.randn(6, 8), torch.randn(6, 8)
    loss = SimpleContrastiveLoss()
    expected = GradCache([bare, bare], 2, loss, precision=torch.bfloat16)(x, y)
    actual = GradCache(
        [ours, ours], 2, loss, precision=torch.bfloat16, memory=MemoryPolicy(boundary_bytes=PLENTY, join_chunks=False)
    )(x, y)
    torch.testing.assert_close(actual, expected)
    assert_same_gradients([bare], [ours], tolerance=1e-3)


def test_tape_is_used_once_and_only_after_a_forward_with_gradients() -> None:
    model = SequentialModel(layers("linear", "tanh"), PLENTY)
    chunks = list(torch.randn(4, 8).split(2))
    outputs, tape = model.forward_chunks(chunks)
    with pytest.raises(ValueError, match="expected 2 gradients"):
        tape.backward(outputs[:1])
    tape.backward([outputs[0], None])
    with pytest.raises(RuntimeError, match="used once"):
        tape.backward(outputs)
    with torch.no_grad():
        _, tape = model.forward_chunks(chunks)
    with pytest.raises(RuntimeError, match="used once"):
        tape.backward(outputs)


def test_only_sequentials_that_do_nothing_else_run_layer_by_layer() -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x) + 1

    hooked = layers("linear")
    hooked.register_forward_hook(lambda *_: None)
    assert is_plain_sequential(layers("linear"))
    assert not any(is_plain_sequential(m) for m in (Own(nn.Linear(8, 8)), hooked, nn.Linear(8, 8), nn.Sequential()))


def test_layers_that_are_exchanged_between_steps_are_seen(assert_same_gradients: Any) -> None:
    bare, ours = layers("linear", "tanh", "linear"), layers("linear", "tanh", "linear")
    x = torch.randn(6, 8)
    step = GradCache([ours], 2, energy, memory=MemoryPolicy(boundary_bytes=PLENTY))
    step(x)
    for model in (bare, ours):
        model[1] = nn.ReLU()
        model.zero_grad()
    step(x)
    energy(bare(x)).backward()
    assert_same_gradients([bare], [ours])


def test_nested_values_and_keyword_arguments_pass_between_layers(assert_same_gradients: Any) -> None:
    class Start(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
            return {"h": self.inner(x), "mask": mask, "name": "kept", "pair": (x, None)}

    class End(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, value: dict[str, Any]) -> Tensor:
            assert value["name"] == "kept"
            return self.inner(value["h"] * value["mask"][:, None] + value["pair"][0])

    torch.manual_seed(0)
    bare = nn.Sequential(Start(), End())
    ours = copy.deepcopy(bare)
    x, mask = torch.randn(9, 8), torch.rand(9) > 0.5
    energy(bare[1](bare[0](x, mask=mask))).backward()
    step = GradCache([ours], 2, energy, memory=MemoryPolicy(boundary_bytes=PLENTY))
    for _ in range(2):
        ours.zero_grad()
        step({"x": x, "mask": mask})
    assert_same_gradients([bare], [ours])


class Exchanging(nn.Module):
    """Which of two branches is gated, and so saved, depends on a draw: the same operations, another flow of data."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        u, v = self.a(x), self.b(x)
        if torch.rand(()) < 0.5:
            u, v = v, u
        return nn.functional.gelu(u) + v


@pytest.mark.parametrize("boundary_bytes", [0, 1 << 20])
def test_chunks_with_other_data_flow_than_the_first_are_recomputed_as_they_ran(boundary_bytes: int) -> None:
    """What one chunk's recomputation may leave out, another one's needs: its gradients were not-a-number."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Exchanging(), nn.Linear(8, 8), Exchanging(), nn.Linear(8, 4)).double()
    plain = copy.deepcopy(model)
    cache = GradCache(
        [model, model],
        4,
        SimpleContrastiveLoss(),
        memory=MemoryPolicy(boundary_bytes=boundary_bytes, join_chunks=False),
    )
    expected = GradCache([plain, plain], 4, SimpleContrastiveLoss())
    for step in range(6):
        x, y = torch.randn(2, 32, 8, dtype=torch.float64)
        for each in (cache, expected):
            torch.manual_seed(step)
            each(x, y)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_what_entered_a_layer_and_was_changed_before_backward_raises_and_is_not_used() -> None:
    """A hook that keeps it may change it between the passes."""
    model = layers("linear", "linear")
    seen: list[Tensor] = []
    model[1].register_forward_pre_hook(lambda _m, args: seen.append(args[0]) if not is_recomputing() else None)
    model_of_layers = SequentialModel(model, PLENTY, join_chunks=False)
    for _ in range(2):  # a first run of a layer is on a copy
        outputs, tape = model_of_layers.forward_chunks([torch.randn(2, 8)])
    with torch.no_grad():
        seen[-1].add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        tape.backward(outputs)


def test_chunks_that_must_not_run_together_do_not_however_short_they_are() -> None:
    """Batch normalisation forbids it; the later chunks would fit into the rows of the first."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)).double()
    bare = copy.deepcopy(ours)

    def loss(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return ((a - b) ** 2).mean() + (a * b).mean()

    x, y = torch.randn(2, 8, 4).double()
    for regroup in (False, True):
        for model in (ours, bare):
            model.zero_grad()
        actual = GradCache([ours, ours], [4, 2], loss, memory=MemoryPolicy(boundary_bytes=PLENTY, join_chunks=regroup))(
            x, y
        )
        expected = loss(torch.cat([bare(part) for part in x.split(4)]), torch.cat([bare(part) for part in y.split(2)]))
        expected.backward()
        torch.testing.assert_close(actual, expected.detach())
        for p, q in zip(bare.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad)
        for p, q in zip(bare.buffers(), ours.buffers(), strict=True):
            torch.testing.assert_close(p, q)


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.generator)


def test_a_trial_leaves_generators_of_layers_as_they_were() -> None:
    x, model = torch.randn(4, 4), nn.Sequential(Noise(), nn.Linear(4, 4))
    ours = GradCache([model], 1, lambda reps: reps.square().mean(), memory=MemoryPolicy(boundary_bytes=PLENTY))(x)
    after = model[0].generator.get_state()
    model[0].generator.manual_seed(3)
    torch.testing.assert_close(ours, torch.cat([model(part) for part in x.split(1)]).square().mean().detach())
    assert torch.equal(after, model[0].generator.get_state())
