"""Checkpoints that one kind of model writes and others read, in forked children of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from offload import OffloadModel, OffloadOptimizer
from tests.offload.mesh.world import batches, build, loss_of, whole
from tests.offload.side_by_side import advance

Pair = tuple[nn.Module, Any]


def ours(seed: int, slices: int, home: Path | str = "cpu") -> Pair:
    """An ``OffloadModel`` and its optimizer, on all ranks if there are several."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    model = OffloadModel(build(seed), "cpu", home, slices, checkpoint_activation=True, mesh=mesh)
    return model, OffloadOptimizer(model, torch.optim.AdamW, lr=0.01)


def with_torch(seed: int) -> Pair:
    """An ``OffloadModel`` whose parameters an optimizer of torch updates."""
    model, _ = ours(seed, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def fsdp(seed: int) -> Pair:
    """The same layers by FSDP2."""
    model, mesh = build(seed), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(pair: Pair, step: int) -> None:
    model, optimizer = pair
    loss_of(model(batches()[step])).backward()
    advance(optimizer)


def states_of(pair: Pair) -> dict[str, Any]:
    states: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(*pair), strict=True))
    #: What a data loader remembers: the same on all ranks, whatever their number.
    states["loader"] = {"batches": 0}
    return states


def values_of(states: dict[str, Any]) -> dict[str, Tensor]:
    """Whole parameters and states, by name. A collective."""
    values = {name: whole(value).clone() for name, value in states["model"].items()}
    for name, state in states["optimizer"]["state"].items():
        values |= {f"{name} {key}": whole(value).clone() for key, value in state.items()}
    return values


def write(folder: Path, name: str, make: Callable[[], Pair], *, hurried: bool = False) -> None:
    """Trains one step and saves; ``hurried``: in the background, while two more steps run."""
    pair = make()
    train(pair, 0)
    states = states_of(pair)
    states["loader"] = {"batches": 1}
    expected = values_of(states)
    if hurried:
        saving: Any = state_dict_saver.async_save(states, checkpoint_id=folder / name)
        train(pair, 1)
        train(pair, 2)
        saving.result()
    else:
        state_dict_saver.save(states, checkpoint_id=folder / name)
    if not dist.is_initialized() or dist.get_rank() == 0:
        torch.save(expected, folder / f"{name}.pt")


def read(folder: Path, name: str, make: Callable[[], Pair]) -> None:
    """Loads, and compares with what was written; then the next step must be possible."""
    pair = make()
    states = states_of(pair)
    state_dict_loader.load(states, checkpoint_id=folder / name)
    set_state_dict(*pair, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    assert states["loader"] == {"batches": 1}
    found, expected = values_of(states_of(pair)), torch.load(folder / f"{name}.pt")
    assert sorted(found) == sorted(expected)
    wrong = [key for key, value in expected.items() if not torch.equal(found[key], value)]
    assert not wrong, wrong
    assert float(max(value.abs().max() for key, value in found.items() if "exp_avg" in key)) > 0
    train(pair, 1)


def written_as_safetensors(folder: Path) -> None:
    """By torch's writer, each rank its rows, consolidated into files that one process reads."""
    pair = ours(3, 4)
    train(pair, 0)
    states = states_of(pair)["model"]
    writer = HuggingFaceStorageWriter(str(folder / "hf"), save_distributed=True, enable_consolidation=True)
    state_dict_saver.save(states, storage_writer=writer)
    values = {name: whole(value) for name, value in states.items()}
    dist.barrier()
    bare = OffloadModel(build(4), "cpu", num_slices=2, checkpoint_activation=True, pretrained=folder / "hf")
    assert all(torch.equal(p, values[name]) for name, p in bare.named_parameters())


def stages(folder: Path) -> list[tuple[int, dict[str, Callable[[], None]]]]:
    """By the number of ranks, in their order."""
    by_one: dict[str, Callable[[], None]] = {"one process": partial(write, folder, "one", partial(ours, 1, 3))}
    by_two: dict[str, Callable[[], None]] = {
        "two ranks": partial(write, folder, "two", partial(ours, 1, 4)),
        "two ranks, with an optimizer of torch": partial(write, folder, "torch", partial(with_torch, 1)),
        "two ranks, in the background": partial(write, folder, "hurried", partial(ours, 1, 2, folder), hurried=True),
        "FSDP2": partial(write, folder, "fsdp", partial(fsdp, 1)),
        "safetensors": partial(written_as_safetensors, folder),
    }
    names = ("one", "two", "torch", "hurried", "fsdp")

    def reading(title: str, makers: Mapping[str, Callable[[], Pair]]) -> dict[str, Callable[[], None]]:
        return {f"{name}, read by {title}": partial(read, folder, name, make) for name, make in makers.items()}

    by_three = reading("three", dict.fromkeys(names, partial(ours, 7, 2, folder)))
    by_three |= reading("FSDP2", dict.fromkeys(names, partial(fsdp, 7)))
    alone = reading("one process", dict.fromkeys(names, partial(ours, 7, 5)))
    return [(1, by_one), (2, by_two), (3, by_three), (1, alone)]
