"""A Pipe is the bare module on the same micro-batches: same outputs, gradients, buffers, generator states and names."""

import collections
import copy
import itertools
import pickle
import random
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pipe import Pipe, is_checkpointing, is_recomputing
from pipe.microbatch import gather_nested, split_nested
from pipe.schedule import fill_drain, one_forward_one_backward
from pipe.skip import Namespace, pop, skippable, stash
from pipe.skip.tracker import use_skip_tracker
from tests.gradients import gradients
from tests.pipe.test_checkpoint import Log
from tests.pipe.turns import Turner
from tests.programs import run_program

WIDTH = 4
MODES = ["always", "except_last", "never"]


class Noise(nn.Module):
    """Draws from Python's generator."""

    def forward(self, x: Any) -> Any:
        return x * (1 + random.random())


class Counter(nn.Module):
    """Reads and writes a buffer, so that a second count would show in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * (1 + self.calls / 10)


class Fan(nn.Module):
    """One tensor into a nested value with an integer first, and None."""

    def forward(self, x: Any) -> Any:
        return {"index": x.argmax(1), "none": None, "parts": [x, x.detach() * 2, torch.complex(x, x)]}


class Gather(nn.Module):
    def forward(self, value: Any) -> Any:
        x, constant, z = value["parts"]
        return x + constant + z.abs() + value["index"].unsqueeze(1)


@skippable(stash=["skip"])
class Stash(nn.Module):
    def forward(self, x: Any) -> Any:
        yield stash("skip", x * 2)
        return x.sin()


@skippable(pop=["skip"])
class Pop(nn.Module):
    def forward(self, x: Any) -> Any:
        skip = yield pop("skip")
        return x + skip


def build(kinds: Any) -> Any:
    """Layers of these kinds; ``skip`` puts a Stash there and its Pop at the end."""
    layers, ends = [], []
    for kind in kinds:
        if kind == "skip":
            namespace = Namespace()
            layers.append(Stash().isolate(namespace))
            ends.append(Pop().isolate(namespace))
        elif kind == "fan":
            layers += [Fan(), Gather()]
        elif kind in ("in-place", "nested"):
            # After a layer that does not need its output again; another would fail in the bare module, too.
            layers += [nn.Linear(WIDTH, WIDTH), KINDS[kind]()]
        else:
            layers.append(KINDS[kind]())
    return nn.Sequential(*layers, *ends).double()


KINDS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "frozen": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),
    "dropout": lambda: nn.Dropout(0.4),
    "in-place": lambda: nn.ReLU(inplace=True),
    "noise": Noise,
    "counter": Counter,
    "norm": lambda: nn.BatchNorm1d(WIDTH),
    "nested": lambda: nn.Sequential(nn.LeakyReLU(inplace=True), nn.Linear(WIDTH, WIDTH)),
}


@st.composite
def problems(draw: Any) -> Any:
    chunks = draw(st.integers(1, 5))
    kinds = draw(st.lists(st.sampled_from([*KINDS, "fan", "skip"]), min_size=1, max_size=5))
    rows = draw(st.integers(1, 7)) if "norm" not in kinds else draw(st.integers(2 * chunks, 12))
    torch.manual_seed(draw(st.integers(0, 9)))
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH).double(), *build(kinds))
    cuts = draw(st.sets(st.integers(1, len(model) - 1), max_size=3))
    edges = [0, *sorted(cuts), len(model)]
    balance = [b - a for a, b in itertools.pairwise(edges)]
    return model, balance, chunks, rows


def reference(model: Any, balance: Any, x: Any, chunks: Any, order: Any) -> Any:
    """The bare layers on the micro-batches, in the order of the cells."""
    values, begin, stages = split_nested(x, chunks), 0, []
    for size in balance:
        stages.append(model[begin : begin + size])
        begin += size
    skips = [{} for _ in values]
    for i, j in order:
        with use_skip_tracker(skips[i]):
            # As in a Pipe, an in-place layer does not write into another micro-batch.
            values[i] = stages[j](torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, values[i]))
    return gather_nested(values)


def seed() -> None:
    torch.manual_seed(5)
    random.seed(5)


def states() -> Any:
    return torch.get_rng_state().tolist(), random.getstate()


def assert_same(a: Any, b: Any, x: Any, y: Any) -> None:
    """Two models after a step, and their inputs."""
    found, expected = ([each.grad for each in (*model.parameters(), given)] for model, given in ((a, x), (b, y)))
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(list(a.buffers()), list(b.buffers()), rtol=0, atol=0)


@settings(max_examples=190)
@given(
    problem=problems(),
    mode=st.sampled_from(MODES),
    needs=st.booleans(),
    schedule=st.sampled_from([None, "fill_drain", "1f1b"]),
    devices=st.sampled_from([None, 1, 2]),
    reduction=st.sampled_from(["mean", "sum"]),
)
def test_a_pipe_is_the_bare_module(
    problem: Any, mode: Any, needs: Any, schedule: Any, devices: Any, reduction: Any
) -> None:
    """By forward and backward, or by a step of a schedule; on so many devices its stages take turns."""
    model, balance, chunks, rows = problem
    bare, stages = copy.deepcopy(model), len(balance)
    in_turns = devices is not None and stages > devices
    x = torch.randn(rows, WIDTH, dtype=torch.float64, requires_grad=needs)
    y = x.detach().clone().requires_grad_(needs)
    target = torch.randn(rows, WIDTH, dtype=torch.float64)
    loss_fn = nn.MSELoss(reduction=reduction)
    make = one_forward_one_backward if schedule == "1f1b" else fill_drain
    clocks = make(min(chunks, rows), stages, in_turns)
    actions = [action for clock in clocks for action in clock]
    if devices is not None:
        edges = [0, *itertools.accumulate(balance)]
        model = nn.Sequential(*(Turner(*model[a:b]) for a, b in itertools.pairwise(edges)))
    cut = balance if devices is None else [1] * stages
    pipe = Pipe(model, cut, ["cpu"] * (devices or stages), chunks=chunks, checkpoint=mode)
    seed()
    with pipe.recording() as trace:
        if schedule is None:
            output = pipe(x)
            loss = loss_fn(output, target)
            loss.backward()
        else:
            loss = pipe.train_step(x, target, loss_fn, schedule=schedule)
    after = states()
    seed()
    expected = reference(bare, balance, y, chunks, [(a.micro_batch, a.stage) for a in actions if a.kind == "F"])
    expected_loss = loss_fn(expected, target)
    expected_loss.backward()
    if schedule is None:
        assert torch.equal(output, expected)
    torch.testing.assert_close(loss.detach(), expected_loss.detach(), rtol=1e-10, atol=1e-12)
    assert after == states()
    assert_same(pipe, bare, x, y)
    if schedule is not None or in_turns:
        assert trace == actions
    else:  # clock by clock; within one, autograd may take any stage first
        remaining = iter(trace)
        assert all({next(remaining) for _ in clock} == set(clock) for clock in clocks)


def linears(n: Any = 3) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(n)))


@pytest.mark.parametrize(
    ("mode", "rows", "expected"),
    [
        ("always", 4, [True, True, True, True]),
        ("except_last", 4, [True, True, True, False]),
        ("never", 4, [False] * 4),
        # Fewer rows than chunks: the last micro-batch that there is.
        ("except_last", 2, [True, False]),
        ("except_last", 1, [False]),
    ],
)
def test_defect_pipe_9_except_last_keeps_exactly_the_last(mode: Any, rows: Any, expected: Any) -> None:
    seen, again = [], []
    probe = Returns(lambda _, x: (again if is_recomputing() else seen).append(is_checkpointing()) or x)
    pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), probe), [2], ["cpu"], chunks=4, checkpoint=mode)
    pipe(torch.randn(rows, WIDTH)).sum().backward()
    assert seen == expected
    assert len(again) == sum(expected)
    seen.clear()
    with torch.no_grad():
        assert not pipe(torch.randn(2, WIDTH)).requires_grad
    pipe.eval()
    pipe(torch.randn(2, WIDTH))
    assert seen == [False] * 4, "nothing to recompute is kept"


def test_a_cell_whose_backward_follows_its_forward_is_not_recomputed() -> None:
    runs = []
    a, b = (Returns(lambda _, x, name=name: runs.append(name) or x) for name in "ab")
    pipe = Pipe(nn.Sequential(*linears(1), a, b), [2, 1], chunks=3, checkpoint="always")
    pipe.train_step(torch.randn(3, WIDTH), torch.randn(3, WIDTH), nn.MSELoss())
    assert runs.count("b") == 3
    assert runs.count("a") == 6


@pytest.mark.parametrize("mode", MODES)
def test_backward_of_a_micro_batch_runs_before_the_previous_one_is_recomputed(mode: Any) -> None:
    timeline = []

    def probe(own: Any, x: Any) -> Any:
        event = (own.stage, int(x.detach()[0, 0]))
        if is_recomputing():
            timeline.append((*event, "recomputed"))
        return Log.apply(timeline, (*event, "back"), x + 0 * own.own[:1])

    stages = Returns(probe), Returns(probe)
    stages[0].stage, stages[1].stage = 0, 1
    pipe = Pipe(nn.Sequential(*stages), [1, 1], chunks=4, checkpoint=mode)
    pipe(torch.arange(4.0).view(4, 1)).sum().backward()
    checkpointed = {"always": 4, "except_last": 3, "never": 0}[mode]
    for stage in (0, 1):
        expected = []
        for i in reversed(range(4)):
            expected += [(stage, i, "recomputed")] * (i < checkpointed) + [(stage, i, "back")]
        assert [event for event in timeline if event[0] == stage] == expected


def test_defect_pipe_9_unequal_rows_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"sizes of dimension 0 \[6, 8\]"):
        Pipe(linears(), [3], chunks=2)((torch.ones(8, WIDTH), torch.ones(6, WIDTH)))


def test_an_empty_module_returns_its_input() -> None:
    x = torch.ones(1)
    assert Pipe(nn.Sequential(), [])(x) is x


class TestSettings:
    """What the user wrote around the call holds in the layers."""

    @pytest.mark.parametrize(
        ("context", "reads"),
        [
            (torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.is_autocast_enabled("cpu")),
            (torch.device("meta"), lambda: torch.empty(1).device.type == "meta"),
        ],
    )
    def test_defect_pipe_4_autocast_and_default_device(self, context: Any, reads: Any) -> None:
        seen = []
        probe = Returns(lambda _, x: seen.append(reads()) or x * 1)
        pipe = Pipe(nn.Sequential(nn.Linear(WIDTH, WIDTH), probe), [1, 1], chunks=2, checkpoint="always")
        x = torch.randn(2, WIDTH)
        with context:
            y = pipe(x)
        y.sum().backward()
        assert seen == [True] * 4

    @pytest.mark.parametrize("mode", MODES)
    def test_defect_pipe_4_saved_tensor_hooks_reach_the_stages(self, mode: Any) -> None:
        packed = []
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.shape) or t, lambda t: t)
        pipe = Pipe(nn.Sequential(nn.Tanh(), nn.Sigmoid()), [1, 1], chunks=2, checkpoint=mode)
        x = torch.randn(2, 3, requires_grad=True)
        with hooks:
            y = pipe(x)
        forward = len(packed)
        y.sum().backward()
        # A cell saves one tensor: its boundary, or its one activation. What is recomputed is used at once.
        assert forward == len(packed) == 4

    @pytest.mark.parametrize("mode", ["except_last", "never"])
    def test_inside_torch_checkpoint_gradients_are_the_same_and_phases_reach_the_stages(self, mode: Any) -> None:
        seen = []
        probe = Returns(lambda _, x: seen.append(is_recomputing()) or x.exp())
        model = nn.Sequential(*linears(2), nn.Dropout(0.5), probe)
        x, grads = torch.randn(4, WIDTH), []
        for wrap in (False, True):
            pipe = Pipe(copy.deepcopy(model), [2, 2], chunks=2, checkpoint=mode)
            torch.manual_seed(0)
            y = torch.utils.checkpoint.checkpoint(pipe, x, use_reentrant=False) if wrap else pipe(x)
            y.sum().backward()
            grads.append([p.grad for p in pipe.parameters() if p.grad is not None])
        assert all(map(torch.equal, *grads))
        again = [True] * (mode == "except_last")
        assert seen == [False, False, *again, False, False, True, True, *again]


class Fails(nn.Module):
    def __init__(self, error: Any) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Any) -> Any:
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError("a"), SystemExit(3), KeyboardInterrupt()])
@pytest.mark.parametrize("stage", [0, 2])
def test_defect_pipe_8_whatever_a_layer_raises_reaches_the_caller_and_the_pipe_works_afterwards(
    error: Any, stage: Any
) -> None:
    layers = list(linears(2))
    layers.insert(stage, Fails(error))
    pipe = Pipe(nn.Sequential(*layers), [1, 1, 1], chunks=3)
    with pytest.raises(type(error)) as caught:
        pipe(torch.randn(3, WIDTH))
    assert caught.value is error
    pipe[stage].error = None
    x = torch.randn(3, WIDTH)
    torch.testing.assert_close(pipe(x), linears(2)(x))


@pytest.mark.parametrize(
    ("when", "chunks"),
    [
        *itertools.product(("forward", "recomputation", "backward", "loss"), [3]),
        *itertools.product(("forward", "backward", "loss"), [1]),  # of one cell, which takes a way of its own
    ],
)
def test_after_a_failed_step_gradients_are_those_of_before_and_hooks_run_again(when: str, chunks: int) -> None:
    seen, calls = collections.Counter[str](), list[int]()

    def reach(place: str) -> None:
        seen[place] += 1
        if place == when and seen[place] == chunks:
            raise ValueError("no")

    def layer(_: Any, x: Any) -> Any:
        reach("recomputation" if is_recomputing() else "forward")
        y = x * 1
        y.register_hook(lambda _: reach("backward"))
        return y

    def loss_fn(output: Any, target: Any) -> Any:
        reach("loss")
        return nn.functional.mse_loss(output, target)

    layers = nn.Sequential(*linears(1), Returns(layer), nn.Linear(WIDTH, WIDTH))
    pipe = Pipe(layers, [2, 1] if chunks > 1 else [3], chunks=chunks, checkpoint="always")
    pipe[0].weight.grad = before = torch.ones(WIDTH, WIDTH)
    handle = pipe[0].weight.register_hook(lambda _: calls.append(1))
    pipe[2].weight.register_post_accumulate_grad_hook(lambda _: calls.append(2))
    step = partial(pipe.train_step, torch.randn(3, WIDTH), torch.zeros(3, WIDTH), loss_fn, reduction="mean")
    with pytest.raises(ValueError, match="no"):
        step()
    assert pipe[0].weight.grad is before
    assert torch.equal(before, torch.ones(WIDTH, WIDTH))
    assert pipe[0].bias.grad is None
    assert not calls
    step()
    handle.remove()
    step()
    assert sorted(calls) == [1, 2, 2]
    assert pipe[0].weight.grad is before
    assert not torch.equal(before, torch.ones(WIDTH, WIDTH))


def test_a_mode_changed_before_backward_does_not_reach_the_recomputation() -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(), nn.Tanh())
    x, found = torch.randn(2, WIDTH), []
    for model in (layers, Pipe(layers, [1, 2], checkpoint="always")):
        torch.manual_seed(0)
        y = model.train()(x)
        model.eval()
        found.append(torch.autograd.grad(y.sum(), layers[0].weight)[0])
    assert torch.equal(*found)
    assert not any(layer.training for layer in layers)


class TestTheFace:
    def test_defect_pipe_14_names_are_those_of_the_bare_module(self) -> None:
        model = nn.Sequential()
        model.add_module("chunks", nn.Linear(2, 2))
        model.add_module("norm", nn.BatchNorm1d(2))
        bare = copy.deepcopy(model)
        pipe = Pipe(model, [1, 1])
        assert list(pipe.state_dict()) == list(bare.state_dict())
        assert [name for name, _ in pipe.named_modules()] == [name for name, _ in bare.named_modules()]
        pipe.load_state_dict(bare.state_dict())
        bare.load_state_dict(pipe.state_dict())
        assert pipe.chunks == 1

    def test_it_is_a_sequence_of_its_layers_with_the_fields_of_torchgpipe(self) -> None:
        model = linears()
        mode = type("Mode", (), {"__str__": lambda self: "never"})()  # anything that reads as one
        pipe = Pipe(model, [1, 2], devices=["cpu", "cpu:1", "cpu"], chunks=4.0, checkpoint=mode)
        assert list(pipe) == list(model)
        assert (len(pipe), pipe[-1]) == (3, model[2])
        assert [list(partition) for partition in pipe.partitions] == [[model[0]], [model[1], model[2]]]
        assert (pipe.balance, pipe.devices) == ([1, 2], [torch.device("cpu")] * 2)
        assert (pipe.chunks, pipe.checkpoint) == (4, "never")
        assert (type(pipe.chunks), type(pipe.checkpoint)) == (int, str)

    def test_without_a_balance_parameters_are_spread_evenly(self) -> None:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(64, 64))
        assert Pipe(model, devices=["cpu", "cpu"]).balance == [2, 2]
        assert Pipe(model, devices=["cpu"] * 9).balance == [1, 1, 1, 1]
        if not torch.cuda.is_available():
            assert Pipe(model).balance == [4]

    @pytest.mark.parametrize("mode", MODES)
    def test_defect_pipe_8_deepcopy_and_pickle_give_a_pipe_of_its_own(self, mode: Any) -> None:
        pipe = Pipe(nn.Sequential(Stash(), *linears(1), Pop()), [1, 1, 1], chunks=2, checkpoint=mode)
        x = torch.randn(4, WIDTH)
        expected = pipe(x)
        with pipe.recording() as trace:
            others = copy.deepcopy(pipe), pickle.loads(pickle.dumps(pipe))
            assert all(torch.equal(other(x), expected) for other in others)
        assert trace == []
        for other in others:
            assert other.partitions[1][0] is other[1]
            assert other[1] is not pipe[1]
            other(x).sum().backward()
            assert pipe[1].weight.grad is None

    def test_defect_pipe_8_a_pipe_that_is_a_module_global_lets_the_interpreter_exit(self) -> None:
        program = (
            "import torch\nfrom torch import nn\nfrom pipe import Pipe\n"
            "model = Pipe(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), [1, 1], ['cpu', 'cpu'], chunks=2)\n"
            "output = model(torch.randn(4, 2))\noutput.sum().backward()\nprint('done')\n"
        )
        assert run_program(program) == (0, "done\n", "")

    @pytest.mark.parametrize(
        "move",
        [
            lambda p: p.cuda(),
            lambda p: p.cpu(),
            lambda p: p.to("cpu"),
            lambda p: p.to(device="cpu"),
            lambda p: p.to(torch.ones(1)),
            lambda p: p.to("cpu", torch.float64),
            # Devices that this machine may not have are refused for being devices.
            lambda p: p.to(0),
            lambda p: p.to("cuda"),
            lambda p: p.to(device=0),
            lambda p: p.to(torch.device("cuda", 7)),
            lambda p: p.to(tensor=torch.ones(1)),
        ],
    )
    def test_moving_is_refused_and_types_can_be_changed(self, move: Any) -> None:
        pipe = Pipe(linears(), [3])
        with pytest.raises(TypeError, match="denied to move parameters and buffers"):
            move(pipe)
        assert pipe.to(torch.float64)[0].weight.dtype is torch.float64
        assert pipe.half()[0].weight.dtype is torch.float16

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"module": nn.Linear(1, 1)}, TypeError, "expected nn.Sequential"),
            ({"module": type("Own", (nn.Sequential,), {"forward": None})()}, TypeError, "with a forward of its own"),
            ({"chunks": 0}, ValueError, "positive integer"),
            ({"checkpoint": "sometimes"}, ValueError, "not one of 'always'"),
            ({"balance": [1, 1]}, ValueError, "module: 3, sum of balance: 2"),
            ({"balance": [0, 3]}, ValueError, "positive integer"),
            ({"balance": [1, 1, 1], "devices": ["cpu"]}, IndexError, "devices: 1, partitions: 3"),
        ],
    )
    def test_bad_arguments_are_named(self, arguments: Any, error: Any, message: Any) -> None:
        with pytest.raises(error, match=message):
            Pipe(**{"module": linears(), "balance": [1, 2], "devices": ["cpu", "cpu"], **arguments})

    def test_tied_layers_work_on_one_device_and_are_refused_on_two(self) -> None:
        layer = nn.Linear(WIDTH, WIDTH)
        tied = nn.Sequential(layer, nn.Tanh(), layer)
        x = torch.randn(3, WIDTH)
        pipe = Pipe(tied, [1, 2], ["cpu", "cpu"], chunks=3)
        pipe(x).sum().backward()
        got, layer.weight.grad = layer.weight.grad, None
        tied(x).sum().backward()
        torch.testing.assert_close(got, layer.weight.grad)
        with pytest.raises(ValueError, match=r"duplicate parameters on distinct devices.*'0.weight'.*'2.weight'"):
            Pipe(tied, [1, 2], ["cpu", "meta"])

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({"schedule": "zigzag"}, "expected a schedule among"),
            ({"target": torch.zeros(3, WIDTH)}, "target of 4 rows"),
            ({"loss_fn": lambda a, b: 3.0}, "got float"),
            ({"loss_fn": lambda a, b: a.sum().detach()}, "is anything trainable"),
        ],
    )
    def test_bad_arguments_of_a_step_are_named(self, arguments: Any, message: Any) -> None:
        pipe = Pipe(linears(), [1, 2], chunks=2)
        given = {"target": torch.zeros(4, WIDTH), "loss_fn": nn.MSELoss(), **arguments}
        with pytest.raises(ValueError, match=message):
            pipe.train_step(torch.zeros(4, WIDTH), given.pop("target"), given.pop("loss_fn"), **given)
        assert pipe[0].weight.grad is None


def test_two_forwards_before_one_backward() -> None:
    bare = nn.Sequential(*linears(), nn.Dropout(0.5))
    pipe = Pipe(copy.deepcopy(bare), [2, 2], chunks=1)
    x, y = torch.randn(4, WIDTH), torch.randn(4, WIDTH)
    for model in (pipe, bare):
        torch.manual_seed(0)
        (model(x) * model(y)).sum().backward()
    assert_same(pipe, bare, x, y)


class Returns(nn.Module):
    """A layer that returns what a function makes of itself and its input."""

    def __init__(self, function: Any, *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.ModuleList(layers)
        self.own = nn.Parameter(torch.randn(3, WIDTH))

    def forward(self, x: Any) -> Any:
        return self.function(self, x)


def time_first(_: Any, x: Tensor) -> Tensor:
    return x.transpose(0, 1)


def state(own: Any, x: Tensor) -> Tensor:
    return own.layers[0](x)[1]  # type: ignore[no-any-return]


JOINED = {
    "LSTM": lambda: [nn.LSTM(WIDTH, 3, 4, batch_first=True)],
    "bidirectional": lambda: [nn.GRU(WIDTH, 3, 2, batch_first=True, bidirectional=True)],
    "time first": lambda: [Returns(time_first), nn.RNN(WIDTH, 3, 4)],
    "transposed state": lambda: [
        Returns(lambda own, x: state(own, x).transpose(0, 1), nn.GRU(WIDTH, 3, 2, batch_first=True))
    ],
    "tokens": lambda: [nn.Linear(WIDTH, 3), nn.Flatten(0, 1)],
    "as many classes as rows": lambda: [nn.Linear(WIDTH, 4), nn.Flatten(0, 1)],
    "selected": lambda: [Returns(lambda _, x: x[x[..., 0] > 0])],
    "shared": lambda: [Returns(lambda own, x: (x, own.own, own.own[0, 0]))],
    "expanded": lambda: [Returns(lambda own, x: own.own[:1].expand(len(x), -1))],
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize("last", JOINED)
def test_outputs_are_joined_to_those_of_the_bare_module(last: str, rows: int, mode: str) -> None:
    module = nn.Sequential(nn.Tanh(), *JOINED[last]())
    x = torch.linspace(-1, 2, rows * 5 * WIDTH).view(rows, 5, WIDTH)
    output = Pipe(module, [len(module)], ["cpu"], chunks=2, checkpoint=mode)(x)
    torch.testing.assert_close(output, module(x))


@pytest.mark.parametrize("rows", [8, 7])
@pytest.mark.parametrize(
    ("last", "message"),
    [
        (
            Returns(state, nn.GRU(WIDTH, 3, 4, batch_first=True)),
            r"rows can be told.*\(4, 4, 3\).*choose chunks|leaf 0 of shape \(4, \d, 3\).*rows first",
        ),
        (Returns(state, nn.GRU(WIDTH, 3, 2, batch_first=True)), r"leaf 0 of shape \(2, 4, 3\).*4 rows.*rows first"),
        (Returns(state, nn.GRU(WIDTH, 3, 8, batch_first=True)), r"leaf 0 of shape \(8, 4, 3\).*rows first"),
        (Returns(time_first), r"leaf 0 of shape \(5, 4, 4\).*rows first"),
        (Returns(lambda _, x: x[..., [0] * 8].argmax(1).T), r"leaf 0 of shape \(8, 4\).*rows first"),
        (Returns(lambda _, x: (x, x.sum((0, 1))[:3])), r"leaf 1 of shape \(3,\).*return one entry for each row"),
    ],
    ids=["as many layers as rows", "state", "deep state", "time first", "tokens by time", "sum"],
)
def test_an_output_without_rows_in_dimension_0_is_refused(last: Any, message: str, rows: int) -> None:
    pipe = Pipe(nn.Sequential(last), [1], ["cpu"], chunks=2)
    with pytest.raises(ValueError, match=message):
        pipe(torch.randn(rows, 5, WIDTH))
    pipe.chunks = 1
    pipe(torch.randn(rows, 5, WIDTH))


def test_a_number_of_selected_rows_that_is_equal_by_chance_is_joined_once_it_has_differed() -> None:
    pipe = Pipe(nn.Sequential(Returns(lambda _, x: x[x > 0])), [1], ["cpu"], chunks=2)
    for value in ([1.0, 1, -1, 1, -1, -1], [1.0, -1, 1, -1, 1, 1]):
        x = torch.tensor(value)
        assert torch.equal(pipe(x), x[x > 0])


@pytest.mark.parametrize("call", ["forward", "train_step"])
@pytest.mark.parametrize(("batch_first", "shape"), [(False, (8, 5, WIDTH)), (True, (8, WIDTH))])
def test_a_recurrent_first_layer_over_time_in_dimension_0_is_refused(call: str, batch_first: bool, shape: Any) -> None:
    layers = nn.Sequential(nn.LSTM(WIDTH, 3, batch_first=batch_first), Returns(lambda _, x: x[0]))
    pipe, x = Pipe(layers, [2], ["cpu"], chunks=2), torch.randn(shape)
    with pytest.raises(ValueError, match=r"rows in dimension 0, got LSTM\(batch_first=.*batch_first=True"):
        pipe(x) if call == "forward" else pipe.train_step(x, torch.zeros(len(x)), nn.MSELoss())


@dataclass
class Result:
    logits: Tensor


def unpacked(_: Any, x: Any) -> Tensor:
    return x.logits  # type: ignore[no-any-return]


def packed(own: Any, x: Tensor) -> Result:
    return Result(x @ own.own.T)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("call", ["forward", "train_step"])
def test_an_object_whose_tensors_cannot_be_seen_is_refused_by_name(call: str, last: bool) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Returns(packed), *([] if last else [Returns(unpacked)]))
    pipe = Pipe(layers, [2] if last else [2, 1], ["cpu"] * (1 if last else 2), chunks=2, checkpoint="always")
    x = torch.randn(4, WIDTH)
    step = partial(
        pipe.train_step, loss_fn=lambda result, _: (result.logits if last else result).sum(), reduction="sum"
    )
    with pytest.raises(TypeError, match=r"a Result, whose tensors cannot be seen.*a tuple or a dict.*register"):
        pipe(x) if call == "forward" else step(x, x, schedule="fill_drain")


@pytest.mark.parametrize("checkpoint", ["never", "always"])
def test_objects_pass_where_their_tensors_need_not_be_seen(checkpoint: str) -> None:
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Returns(packed), Returns(unpacked))
    pipe, x = Pipe(layers, [2, 1], ["cpu"] * 2, chunks=2, checkpoint=checkpoint), torch.randn(4, WIDTH)
    with torch.set_grad_enabled(checkpoint == "never"):
        torch.testing.assert_close(pipe(x), layers(x))
    with pytest.raises(TypeError, match="of 2 micro-batches, got a Result"):  # that cannot be joined
        Pipe(layers[:2], [2], ["cpu"], chunks=2, checkpoint="never")(x)


@pytest.mark.parametrize("mode", MODES)
def test_a_registered_dataclass_passes_between_stages_and_is_the_result(mode: str) -> None:
    @dataclass
    class Registered(Result):
        pass

    torch.export.register_dataclass(Registered)
    pack, unpack = Returns(lambda own, x: Registered(x @ own.own.T @ own.own)), Returns(unpacked)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), pack, unpack, pack)
    x = torch.randn(5, WIDTH)
    output = Pipe(layers, [2, 2], ["cpu"] * 2, chunks=2, checkpoint=mode)(x)
    assert isinstance(output, Registered)
    torch.testing.assert_close(output.logits, layers(x).logits)
    output.logits.sum().backward()
    assert layers[0].weight.grad is not None


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda pipe, x: pipe(x, x), r"expected one input.*pipe\(\(a, b\)\)"),
        (lambda pipe, x: pipe(input_ids=x), r"expected one input"),
        (lambda pipe, x: pipe(), "expected a tensor or a nested value"),
        (lambda pipe, x: Pipe(nn.Sequential(nn.Bilinear(1, 1, 1)), [1]), r"layer '0' \(Bilinear\).*take a tuple"),
        (lambda pipe, x: Pipe(nn.Sequential(nn.Tanh()), 8), r"balance=8; pass chunks=8"),
    ],
)
def test_calls_of_other_pipes_are_explained(call: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(Pipe(nn.Sequential(nn.Tanh()), [1], ["cpu"], chunks=2), torch.randn(4, WIDTH))


@pytest.mark.cuda
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_cuda_devices_give_the_gradients_of_the_bare_module() -> None:
    x = torch.randn(8, WIDTH)
    pipe = Pipe(linears(), [1, 2], [0, 1], chunks=4)
    pipe(x).sum().backward()
    bare = linears()
    bare(x).sum().backward()
    torch.testing.assert_close(gradients(pipe), gradients(bare), check_device=False)
