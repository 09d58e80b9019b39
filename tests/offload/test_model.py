"""The face of the engine: arguments, names, errors, counts, and what holds after an exception."""

from __future__ import annotations

import copy
import gc
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload import OffloadModel, offload
from offload.calls import to_device
from tests.offload.blocks.towers import Model, loss_of, make, words
from tests.offload.side_by_side import assert_equal, drawn, offloaded
from tests.offload.zoo import WIDTH, build
from tests.programs import run_program


def batch(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(0))


def at_home(model: OffloadModel) -> bool:
    """Whether every parameter and gradient lies in its home, and no slot is taken."""
    in_storage = (
        s.parameter.data_ptr() == shard.home_view(s).data_ptr() for shard in model._homes.shards for s in shard.own
    )
    return not model._homes.streamer.loaded and all(in_storage)


# --- names and transparency of the container ------------------------------------------------------------------------


def test_moving_casting_and_copies_of_data_parallel_are_refused_and_change_nothing() -> None:
    model = OffloadModel(build(["linear"]), "cpu", num_slices=3, checkpoint_activation=False)
    for change in (model.half, model.double, lambda: model.to(torch.bfloat16), lambda: model.to("meta")):
        with pytest.raises(RuntimeError, match="convert the layers before you wrap them"):
            change()
    assert model.float() is model
    assert at_home(model)
    # A trainer moves every model to the compute device, and a loss that has the model as a child: no change.
    model._offloaded.device = torch.device("meta")  # in place of a device that this machine may lack
    around = nn.ModuleDict({"model": model})
    assert around.to("meta")["model"] is model
    assert at_home(model)
    with pytest.raises(RuntimeError, match="convert the layers before you wrap them"):
        around.to("meta", torch.bfloat16)
    # Trainers wrap a model in nn.DataParallel where they see several GPUs.
    with pytest.raises(RuntimeError, match="CUDA_VISIBLE_DEVICES"):
        model._replicate_for_data_parallel()


# --- counts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("microbatches", [1, 2, 7])
@pytest.mark.parametrize("recompute", [True, False])
def test_a_step_loads_each_shard_at_most_twice_whatever_the_number_of_microbatches(
    home: str, microbatches: int, recompute: bool
) -> None:
    layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    model = OffloadModel(layers, "cpu", home, 6, recompute, microbatches)
    planned = model.plan()
    for step in range(1, 4):
        model(batch(14)).sum().backward()
        counted = model.statistics()
        assert counted.shard_loads == step * len(planned.loads) == step * 10
        assert counted.bytes_loaded == counted.shard_loads * (WIDTH + 1) * WIDTH * 4
        assert counted.bytes_stored == step * 6 * (WIDTH + 1) * WIDTH * 4


# --- chunks ---------------------------------------------------------------------------------------------------------


def test_chunks_that_are_none_are_refused() -> None:
    model = OffloadModel(build(["linear"]), "cpu", checkpoint_activation=True, num_slices=3)
    for chunks in (batch(), [], [3]):
        with pytest.raises((ValueError, TypeError), match="chunk"):
            model.forward_chunks(chunks)  # type: ignore[arg-type]


# --- after an exception ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["optimizer", "state_dict"])
def test_a_parameter_changed_between_forward_and_backward_is_named(how: str) -> None:
    model = OffloadModel(build(["linear"]), "cpu", num_slices=3, checkpoint_activation=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = model(batch()), model(batch())
    first.sum().backward()
    optimizer.step() if how == "optimizer" else model.state_dict()["0.weight"].mul_(2)
    with pytest.raises(RuntimeError, match=r"parameter \d\.weight.* of shard \d was changed in place"):
        second.sum().backward()
    model(batch()).sum().backward()


def test_a_layer_that_starts_to_write_into_its_input_is_refused_once() -> None:
    class Moody(nn.Module):
        moody = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.mul_(2) if self.moody else x * 2

    bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), Moody(), nn.Linear(WIDTH, 1))
    model = OffloadModel(copy.deepcopy(bare), "cpu", num_slices=3, checkpoint_activation=True)
    for _ in range(2):  # in which it is seen that it does not
        model(batch())
    for run in (bare, model):
        run.get_submodule("1").moody = True  # type: ignore[assignment]
    with pytest.raises(RuntimeError, match="shard 1 wrote into its input in place"):
        model(batch())
    for run in (bare, model):
        run(batch()).sum().backward()
    assert_equal(bare, model)


def test_a_layer_that_calls_its_own_model_is_refused() -> None:
    layers = build(["linear"])
    model = OffloadModel(layers, "cpu", num_slices=3, checkpoint_activation=False)
    handle = layers[1].register_forward_pre_hook(lambda _, args: model(args[0]))
    with pytest.raises(RuntimeError, match="in the middle of a forward"):
        model(batch())
    handle.remove()
    model(batch()).sum().backward()


def test_layers_that_are_not_deterministic_are_named() -> None:
    class Fickle(nn.Linear):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Fickle.calls += 1  # of the class: an attribute of the layer would be put back
            return super().forward(x).exp() if Fickle.calls % 2 else super().forward(x[:1]).exp()

    model = offloaded([nn.Linear(WIDTH, WIDTH), Fickle(WIDTH, WIDTH)], slices=2)
    with pytest.raises(RuntimeError, match="the recomputation of shard 1 to save what its forward saved"):
        model(batch()).sum().backward()


# --- ends -----------------------------------------------------------------------------------------------------------


def test_threads_and_files_are_released_with_the_model(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model = OffloadModel(build(["linear"]), "cpu", f"{tmp_path}/", checkpoint_activation=True, num_slices=3)
    model(batch()).sum().backward()
    lanes = set(threading.enumerate()) - before
    assert lanes
    del model
    gc.collect()
    for thread in lanes:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_a_global_lets_the_interpreter_exit(tmp_path: Path) -> None:
    code = (
        "import sys, warnings, torch; from torch import nn; from offload import MemoryPolicy, OffloadModel\n"
        "warnings.simplefilter('error')\n"
        "model = OffloadModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), 'cpu', sys.argv[1] + '/', num_slices=2,"
        " checkpoint_activation=True, memory=MemoryPolicy.fixed(boundary_bytes=0))\n"
        "loss = model(torch.randn(2, 4)).sum(); loss.backward(); kept = model(torch.randn(2, 4))"
    )
    ended = run_program(code, tmp_path)
    assert (ended.status, ended.errors) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_a_copy_of_a_page_locked_input_ends_before_the_call() -> None:
    """The copy is not asynchronous: a loader may fill that memory anew as soon as the call returns."""
    asked: list[bool] = []

    class Input(torch.Tensor):
        locked = False

        def is_pinned(self, device: object = None) -> bool:
            return type(self).locked

        def to(self, device: torch.device, dtype: torch.dtype, *, non_blocking: bool) -> torch.Tensor:
            asked.append(non_blocking)
            return self

    device = torch.device("cuda", 0)
    for Input.locked in (False, True):
        to_device(device, None, torch.zeros(3).as_subclass(Input))
    assert asked == [True, False]


def test_backward_runs_after_the_model_was_dropped(home: str) -> None:
    bare = build(["linear", "dropout"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=3, checkpoint_activation=True)
    parameters = list(model.parameters())
    torch.manual_seed(0)
    loss = model(batch()).sum()
    del model
    loss.backward()
    torch.manual_seed(0)
    bare(batch()).sum().backward()
    for p, q in zip(bare.parameters(), parameters, strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("masters", [torch.float32, torch.bfloat16])
def test_many_microbatches_are_not_summed_in_bfloat16(masters: torch.dtype) -> None:
    torch.manual_seed(0)
    rows = 512
    layer = nn.Linear(4, 1, bias=False).to(masters)
    model = OffloadModel([layer, nn.Identity()], "cpu", "cpu", 1, True, rows, param_dtype=torch.bfloat16)
    x = torch.rand(rows, 4)
    model(x).float().sum().backward()
    exact = x.bfloat16().double().sum(0, keepdim=True)
    # in bfloat16 the sum would stand still at 256; at home it is rounded once
    assert ((layer.weight.grad.double() - exact).abs() / exact).max() < (1e-5 if masters is torch.float32 else 1e-2)


@pytest.mark.parametrize("recompute", [True, False])
def test_a_backward_after_close_says_that_the_model_was_closed(home: str, recompute: bool) -> None:
    model = OffloadModel(build([]), "cpu", home, 2, recompute)
    loss = model(torch.zeros(2, WIDTH)).sum()
    model.close()
    with pytest.raises(RuntimeError, match="this OffloadModel was closed"):
        loss.backward()


def test_distributed_parameters_are_refused_before_anything_moves(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_module

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
        distribute_module(layers[1], init_device_mesh("cpu", (1,)))
        before = {name: p.data_ptr() for name, p in layers[0].named_parameters()}
        with pytest.raises(TypeError, match=r"expected dense parameters, got a DTensor \(1\.weight\).*to_local"):
            OffloadModel(layers, "cpu", num_slices=2, checkpoint_activation=False)
        assert {name: p.data_ptr() for name, p in layers[0].named_parameters()} == before
    finally:
        dist.destroy_process_group()


# --- one object, of its class and with its names ----------------------------------------------------------------------

BLOCKS = "encoder.layer"


class Layers(nn.Sequential):
    """A Sequential of a class of its own, with a method and an attribute."""

    title = "layers"

    def first_bias(self) -> Tensor:
        first: Any = self[0]
        return first.bias  # type: ignore[no-any-return]


def layers(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    torch.manual_seed(0)
    return kind(*(nn.Linear(4, 4) for _ in range(3)))


def step(model: Any) -> Tensor:
    torch.manual_seed(3)
    loss = loss_of(model(words())) if isinstance(model, Model) else model(drawn(1, 2, 4)).square().sum()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("wrap", [offload, OffloadModel])
@pytest.mark.parametrize("make_model", [layers, make], ids=["sequential", "own forward"])
def test_the_model_that_was_given_is_offloaded(make_model: Any, wrap: Any) -> None:
    model = make_model()
    bare, kind, names = copy.deepcopy(model), type(model), list(model.state_dict())
    members = list(model.modules())
    blocks = {"blocks": BLOCKS} if isinstance(model, Model) else {"num_slices": 2}
    assert wrap(model, "cpu", **blocks) is model
    assert isinstance(model, OffloadModel)
    assert isinstance(model, kind)
    assert type(model).__name__ == kind.__name__
    assert list(model.state_dict()) == names
    assert all(ours is before for ours, before in zip(model.modules(), members, strict=True))
    for _ in range(2):
        assert torch.equal(step(bare), step(model))
        assert_equal(bare, model)
    assert model.statistics().shard_loads
    assert "D0" in str(model.plan())


def test_a_sequential_keeps_its_class_methods_and_indexing() -> None:
    model: Any = layers(Layers)
    members = list(model)
    offload(model, "cpu", num_slices=2)
    assert isinstance(model, Layers)
    assert model.title == "layers"
    assert model.first_bias() is members[0].bias
    assert (len(model), list(model), model[-1]) == (3, members, members[-1])
    some = model[1:]
    assert type(some) is Layers  # an ordinary one
    assert list(some) == members[1:]


@pytest.mark.parametrize("inside", [False, True])
def test_an_offloaded_model_is_refused(inside: bool) -> None:
    model = layers()
    bare = copy.deepcopy(model)
    offload(model, "cpu", num_slices=2)
    given = nn.Sequential(nn.Identity(), model) if inside else model
    with pytest.raises(TypeError, match="expected a model that is not offloaded yet"):
        offload(given, "cpu")
    assert torch.equal(step(bare), step(model))
    assert_equal(bare, model)
