"""A construction that fails leaves the layers as they were: their values, gradients, memory and meta tensors."""

from __future__ import annotations

import copy
import errno
import gc
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import offload.model
from offload import OffloadModel, save_checkpoint
from offload.files.tensor_file import StoredTensor
from offload.meta_device.materialize import Materializer
from tests.offload.interrupts import first_lines, interrupted
from tests.offload.open_files import open_files
from tests.offload.test_faults import Faults

WIDTH, LAYERS = 8, 5


class Counting(nn.Linear):
    """With a buffer and a parameter that is not dense in rows."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(3))
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if hasattr(self, "scale"):
            with torch.no_grad():
                self.scale.fill_(0.5)
                self.count.fill_(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(super().forward(x) @ self.scale) + self.count.sum()


def layers(meta: tuple[int, ...] = ()) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*(Counting() for _ in range(LAYERS)))
    model[3].weight = model[0].weight  # tied over shards
    model[1].bias.requires_grad_(False)
    model[2].bias = None
    for k, layer in enumerate(model):
        layer.count.fill_(k)
        layer.scale.grad = torch.full_like(layer.scale, k)
    for k in meta:
        model[k] = Counting().to("meta")
    if len(meta) == 2:
        model[1].scale = nn.Parameter(torch.ones(WIDTH, WIDTH))  # of this one only a part is there
    return model


class StateBefore:
    """What a model consists of, to be compared with later."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.kind, self.attributes = model, type(model), vars(model).keys() - set()
        self.members = [
            (module, name, value, None if value is None or value.is_meta else value.detach().clone())
            for module in model.modules()
            for name, value in (*module._parameters.items(), *module._buffers.items())
        ]
        self.gradients = [(p, p.grad) for p in model.parameters()]

    def check(self) -> None:
        assert type(self.model) is self.kind
        assert vars(self.model).keys() == self.attributes
        for module, name, value, copied in self.members:
            now = module._parameters[name] if name in module._parameters else module._buffers[name]
            assert now is value
            if now is not None and copied is not None:
                assert now.device == copied.device
                torch.testing.assert_close(now.detach(), copied, rtol=0, atol=0)
            elif now is not None:
                assert now.is_meta
        for tensor in {value for _, _, value, copied in self.members if copied is not None and value is not None}:
            tensor.data.zero_().add_(1)  # ordinary memory, which outlives the model
        for parameter, gradient in self.gradients:
            assert parameter.grad is gradient
        assert all(type(m._parameters) is dict for m in self.model.modules())


def wrapped(model: nn.Sequential, home: str, **more: Any) -> OffloadModel:
    return OffloadModel(model, "cpu", home, num_slices=LAYERS, checkpoint_activation=True, **more)


END = offload.model, "return_freed_memory"
#: What is called, at which call it raises what, and the arguments of the model.
FAILURES: dict[str, tuple[Any, str, int, BaseException, dict[str, Any]]] = {
    **{f"no memory for shard {k}": (Materializer, "fill", k, MemoryError(), {}) for k in (1, 3, 5)},
    **{
        f"weight {k} is unreadable": (StoredTensor, "read_into", k, OSError(errno.EIO, ""), {"pretrained": "saved"})
        for k in (1, 4, 12)
    },
    "no thread": (*END, 1, RuntimeError("can't start new thread"), {}),
    "an interrupt": (*END, 1, KeyboardInterrupt(), {}),
    "split weights": (*END, 1, MemoryError(), {"store_dtype": "split"}),
    "bfloat16 weights": (*END, 1, MemoryError(), {"store_dtype": torch.bfloat16}),
}


@pytest.mark.parametrize("meta", [(), (1, 4), tuple(range(LAYERS))], ids=["cpu", "some on meta", "all on meta"])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_failure_leaves_the_layers_as_they_were(
    home: str, failure: str, meta: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, saved = layers(meta), layers()
    for k in meta:
        saved[k] = Counting()
    save_checkpoint(tmp_path / "saved", saved)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if not tensor.is_meta:
                tensor.add_(1)  # not what is in the file
    before, expected = StateBefore(model), None if meta else copy.deepcopy(model)
    owner, method, call, error, arguments = FAILURES[failure]
    Faults(monkeypatch, owner, method, error).fatal = call
    monkeypatch.chdir(tmp_path)
    with pytest.raises(type(error)):
        wrapped(model, home, **arguments)
    error.with_traceback(None)  # it holds what was made
    monkeypatch.undo()
    before.check()
    if home != "cpu":
        gc.collect()
        assert not open_files(home)
    if expected is not None:
        model.load_state_dict(expected.state_dict())
        x = torch.randn(3, WIDTH)
        assert torch.equal(model(x), expected(x))
        assert torch.equal(wrapped(model, home)(x), expected(x))


def test_an_interrupt_at_any_line_of_a_construction_leaves_the_layers_as_they_were() -> None:
    def members(model: nn.Module) -> list[object]:
        return [module._parameters for module in model.modules()]

    made, lines = 0, first_lines(lambda: OffloadModel(layers(), "cpu", num_slices=3))
    for line in lines:
        model = layers()
        before, mappings = StateBefore(model), members(model)
        if interrupted(partial(OffloadModel, model, "cpu", num_slices=3), line) == "raised":
            before.check()
            assert all(now is then for now, then in zip(members(model), mappings, strict=True)), line
        else:
            made += 1
    assert made < 0.2 * len(lines)
