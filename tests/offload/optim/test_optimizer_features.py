"""What torch.optim offers: scalers, states, groups, sparse gradients, refusals; and norms that come with gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import offload.optim.disk_update
from offload import OffloadModel, OffloadOptimizer
from offload.streaming.grad_norm import attach_norm, attached_norm, norm_of
from tests.offload.pair import Pair, pending
from tests.offload.zoo import WIDTH, build


@pytest.mark.parametrize("inf_at", [None, 1])
@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.2])
def test_grad_scaler(home: str, inf_at: int | None, unscale: bool, max_norm: float | None) -> None:
    """Defect: the GradScaler of a device could not be used, because gradients are on the CPU."""
    pair = Pair("adamw", home, max_norm=max_norm, kinds=("linear", "linear"))
    scalers = [torch.amp.GradScaler("cpu", init_scale=128.0) for _ in range(2)]
    for step in range(3):
        x = pair.batch()
        for run, optimizer, scaler in zip((pair.bare, pair.model), (pair.plain, pair.ours), scalers, strict=True):
            loss = run(x).pow(2).mean() * (float("inf") if step == inf_at else 1)
            scaler.scale(loss).backward()
            if optimizer is pair.plain and max_norm is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(pair.bare.parameters(), max_norm)
            elif unscale:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    assert scalers[0].get_scale() == scalers[1].get_scale()
    pair.assert_equal()
    pair.assert_equal_states()


def test_state_dicts_go_both_ways(home: str) -> None:
    first, second = Pair("amsgrad", home), Pair("amsgrad", home, slices=2)
    for action in ("backward", "step", "zero", "backward", "step", "zero"):
        first.do(action)
    for pair in (first, second):
        pair.bare.load_state_dict(first.bare.state_dict())
        pair.model.load_state_dict(first.bare.state_dict())
    second.plain.load_state_dict(copy.deepcopy(first.ours.state_dict()))
    second.ours.load_state_dict(first.plain.state_dict())
    second.assert_equal_states()
    for action in ("backward", "step", "zero", "backward", "step"):
        second.do(action)
    second.assert_equal()
    second.assert_equal_states()
    first.assert_equal_states()  # tensors were copied: what the second did is not seen in the first


def test_states_are_in_the_order_of_parameters(home: str) -> None:
    """Not in that of the pieces, in which small parameters come first."""
    pair = Pair("adamw", home, slices=2)
    for action in ("backward", "step"):
        pair.do(action)
    saved = pair.ours.state_dict()["state"]
    assert [*saved] == sorted(saved)
    assert [*saved] == [*pair.plain.state_dict()["state"]]


def test_a_state_dict_of_other_groups_is_refused_and_changes_nothing(home: str) -> None:
    pair = Pair("adamw", home)
    pair.backward()
    pair.step()
    other = Pair("adamw", "cpu", grouped=True)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        pair.ours.load_state_dict(other.plain.state_dict())
    pair.assert_equal_states()


def test_a_group_added_later_is_trained(home: str) -> None:
    bare = build(["linear"])
    model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=3, checkpoint_activation=False)
    plain = torch.optim.SGD(bare[0].parameters(), lr=0.1)
    ours = OffloadOptimizer(model, torch.optim.SGD, params=[{"params": "0.*"}], lr=0.1)
    plain.add_param_group({"params": list(bare[1].parameters()), "lr": 0.01})
    ours.add_param_group({"params": "1.*", "lr": 0.01})
    x = torch.randn(3, WIDTH)
    for run, optimizer in ((bare, plain), (model, ours)):
        for _ in range(2):
            optimizer.zero_grad()
            run(x).sum().backward()
            optimizer.step()
    for b, c in zip(bare.parameters(), model.parameters(), strict=True):
        assert torch.equal(b, c)


def test_sparse_gradients_are_updated_or_refused_in_step(home: str) -> None:
    for kind, refused in ((torch.optim.SGD, False), (torch.optim.AdamW, True)):
        bare = nn.Sequential(nn.Embedding(12, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
        model = OffloadModel(copy.deepcopy(bare), "cpu", home, num_slices=2, checkpoint_activation=True)
        optimizer = OffloadOptimizer(model, kind, lr=0.1)
        plain = kind(bare.parameters(), lr=0.1)
        before = copy.deepcopy(model.state_dict())
        for run in (bare, model):
            run(torch.tensor([[1, 5], [1, 2]])).sum().backward()
        if refused:
            with pytest.raises(RuntimeError, match="sparse gradients"):
                optimizer.step()
            assert pending(model) == []
            torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
            continue
        plain.step()
        optimizer.step()
        for b, c in zip(bare.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(c, b)


def test_only_parameters_with_gradients_are_read_and_written(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that took no gradient is clean: its file is not written."""
    bare = build(["linear", "linear"])
    for p in bare[1].parameters():
        p.requires_grad_(False)
    model = OffloadModel(bare, "cpu", f"{tmp_path}/", num_slices=4, checkpoint_activation=False)
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.1)
    model(torch.randn(2, WIDTH)).sum().backward()
    written: list[Any] = []
    write = offload.storage.disk.DiskBlock.write
    monkeypatch.setattr(
        offload.storage.disk.DiskBlock, "write", lambda self, *a: (written.append(self), write(self, *a))[1]
    )
    optimizer.step()
    optimizer.synchronize()
    weights = {shard.home: f"shard{shard.index}-weights" for shard in model._executor.shards}
    names = {weights.get(block) or block._file.name.split("-", 1)[1] for block in written}
    assert names == {f"shard{j}-{what}" for j in (0, 2, 3) for what in ("weights", "states")}


def test_closures_are_refused_with_the_reason() -> None:
    pair = Pair("sgd")
    with pytest.raises(ValueError, match="call the closure yourself"):
        pair.ours.step(lambda: torch.zeros(()))


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"optimizer_class": torch.optim.LBFGS}, TypeError, "needs a closure"),
        ({"optimizer_class": 3}, TypeError, "expected a class such as"),
        ({"optimizer_class": OffloadOptimizer}, TypeError, "expected a class such as"),
        ({"model": nn.Linear(1, 1)}, TypeError, "expected an OffloadModel"),
        ({"max_norm": 0.0}, ValueError, "expected a positive norm"),
        ({"max_norm": "1"}, TypeError, "expected a number"),
        ({"max_norm": 1.0, "update_in_backward": True}, ValueError, "exclude each other"),
        ({"lr": -1.0}, ValueError, "Invalid learning rate"),
        ({"params": "*.bias"}, TypeError, "iterable of parameters or groups"),
        ({"params": [{"params": "*.biases"}]}, ValueError, "no parameter is left that matches"),
        ({"params": [{"weight_decay": 0.1}]}, ValueError, "a group with the key 'params'"),
        ({"params": []}, ValueError, "at least one parameter"),
        ({"params": [nn.Parameter(torch.ones(1))]}, ValueError, "not among them"),
    ],
)
def test_arguments_that_cannot_be_used_are_named(arguments: Any, error: type[Exception], match: str) -> None:
    model = OffloadModel(build(["linear"]), "cpu", num_slices=2, checkpoint_activation=False)
    given = {"model": model, "optimizer_class": torch.optim.AdamW, **arguments}
    with pytest.raises(error, match=match):
        OffloadOptimizer(given.pop("model"), given.pop("optimizer_class"), **given)


def test_a_norm_is_read_again_when_a_gradient_was_written_to(home: str) -> None:
    pair = Pair("sgd", home, max_norm=0.1)
    pair.backward()
    for model in (pair.bare, pair.model):
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_(3)
    pair.step()
    pair.assert_equal()


def test_norms_are_computed_as_gradients_are_offloaded(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Defect: clipping by global norm turns the overlap off, or is refused. Here step() reads no gradient: norms were
    noted while gradients went home, over two backwards and tied layers."""
    pair = Pair("sgd", home, max_norm=0.1, tied=True, kinds=("linear",), slices=2)
    pair.backward()
    pair.backward()

    def never(gradient: torch.Tensor) -> torch.Tensor:
        raise AssertionError("a gradient was read in step()")

    monkeypatch.setattr("offload.optim.clipping.norm_of", never)
    pair.step()
    pair.assert_equal()


def test_an_optimizer_is_not_copied_away_from_its_model() -> None:
    with pytest.raises(TypeError, match="use state_dict"):
        copy.deepcopy(Pair().ours)


def test_a_clipped_gradient_that_is_not_zeroed_has_the_norm_of_the_clipped_one(home: str) -> None:
    pair = Pair("momentum", home, max_norm=0.1)
    for action in ("backward", "step", "step", "look", "backward", "step"):
        pair.do(action)
    pair.assert_equal()


def test_a_note_is_not_inherited_by_a_copy_of_the_gradient() -> None:
    gradient = torch.ones(4)
    for _ in range(5):
        gradient.mul_(1)
    attach_norm(gradient, norm_of(gradient))
    assert attached_norm(gradient) == 2
    other = copy.deepcopy(gradient)
    while other._version < gradient._version:
        other.mul_(2)
    assert other._version == gradient._version
    assert attached_norm(other) is None
