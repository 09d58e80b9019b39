"""After ``KeyboardInterrupt`` at any line of the engine the model is usable, and nothing is half-done.

A step is interrupted before each line that it runs in turn: forward, backward, the optimizer's step and their ends. The
short form interrupts every other line of the sources once, in the first of the configurations that reaches it. The long
form (marked ``slow``) interrupts every line each time that it runs, in every configuration: about 15,000 interrupts
each.
"""

from __future__ import annotations

import copy
import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _python_dispatch as dispatch

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.engine.backward import Backward
from pipe.recompute.phase import is_checkpointing, is_recomputing, lent_weights
from tests.offload.blocks.towers import loss_of, make, words
from tests.offload.interrupts import Line, interrupted, lines_of
from tests.offload.zoo import WIDTH, build

#: Every other line of the sources once, and each line each time that it runs.
EXTENTS = ["every other", pytest.param("each time", marks=pytest.mark.slow)]

#: Home, arguments of the model, optimizer.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "recompute": ("host", {"checkpoint_activation": True}, "plain"),
    "disk": ("disk", {"checkpoint_activation": True, "memory": MemoryPolicy.fixed(boundary_bytes=0)}, "clipped"),
    "graphs": ("host", {"checkpoint_activation": True, "memory": MemoryPolicy.fixed(graph_bytes=1 << 20)}, "plain"),
    "keep": ("host", {"checkpoint_activation": False, "num_microbatches": 2}, "in backward"),
    "cast": ("disk", {"checkpoint_activation": True, "param_dtype": torch.bfloat16}, "clipped"),
    "resting": ("disk", {"checkpoint_activation": True}, "plain"),
    "blocks": ("host", {"checkpoint_activation": True, "blocks": "encoder.layer"}, "plain"),
    "threads": ("host", {"checkpoint_activation": True, "blocks": "encoder.layer", "num_microbatches": 2}, "clipped"),
    "graphs of blocks": ("host", {"checkpoint_activation": False, "blocks": "encoder.layer"}, "clipped"),
}
RESTING = [0, 2]  #: shards that rest in memory in the configuration of that name


class Run:
    """A model, its optimizer, and what its parameters are after 0, 1, 2 and 3 steps without an interrupt."""

    def __init__(self, configuration: str, folder: Path) -> None:
        self.home, self.arguments, self.kind = CONFIGURATIONS[configuration]
        self.resting = RESTING if configuration == "resting" else []
        self.folder = folder
        self.made = 0
        self.run_without_interrupt()

    def run_without_interrupt(self) -> None:
        """Records what is expected, and leaves a model after its first step."""
        self.make()
        self.expected = [self.values()]
        for k in range(3):
            self.step(k)
            self.expected.append(self.values())
        self.restart()

    def make(self) -> None:
        self.made += 1
        home = "cpu" if self.home == "host" else f"{self.folder}/{self.made}/"
        layers: Any = build(["inplace_dropout", "rnn"])
        if "blocks" in self.arguments:
            layers = make(3)
            for block in layers.encoder.layer:
                del block.calls  # also interrupted forwards count
        self.model = OffloadModel(layers, "cpu", home, num_slices=3, **self.arguments)
        self.model._homes.keep_in_memory(self.resting)
        self.optimizer: torch.optim.Optimizer
        if self.kind == "plain":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        else:
            more: dict[str, Any] = {"max_norm": 0.5} if self.kind == "clipped" else {"update_in_backward": True}
            self.optimizer = OffloadOptimizer(self.model, torch.optim.AdamW, lr=0.01, **more)
        self.done = 0

    def step(self, k: int) -> None:
        torch.manual_seed(k)
        self.optimizer.zero_grad()
        if "blocks" in self.arguments:
            loss_of(self.model(words(4, seed=k))).backward()
        else:
            (self.model(torch.randn(4, WIDTH)) - 1).pow(2).mean().backward()
        self.optimizer.step()
        self.done = k + 1

    def values(self) -> list[Tensor]:
        return [value.clone() for value in self.model.state_dict().values()]

    def steps_done(self) -> int:
        """Steps that the parameters have seen, all of them."""
        now = self.values()
        for k, expected in enumerate(self.expected):
            if all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(now, expected, strict=True)):
                return k
        raise AssertionError("a step is half-done")

    def reset(self) -> None:
        """As it was after the first step, also in that the next ones are observed."""
        self.model.load_state_dict(self._model_state)
        self.optimizer.load_state_dict(copy.deepcopy(self._optimizer_state))
        self.done = 1
        self.model._engine._observed = {True: 1, False: 1}
        self.model._homes.recorded.clear()

    def restart(self) -> None:
        """Makes another model, after its first step."""
        self.make()
        self.step(0)
        self._model_state = {name: value.clone() for name, value in self.model.state_dict().items()}
        self._optimizer_state = copy.deepcopy(self.optimizer.state_dict())

    def interrupt(self, line: Line, *, contexts: bool = False) -> str:
        """Interrupts the second step; then everything is at home, and the next step is right."""
        became = interrupted(lambda: self.step(1), line, contexts=contexts)
        self.check_at_rest()
        ours = self.optimizer
        if isinstance(ours, OffloadOptimizer) and ours.in_backward is not None:
            if ours.in_backward._failure is not None:
                with pytest.raises(RuntimeError, match="make model and optimizer anew"):
                    ours.step()
                self.restart()
                return became
            if ours.in_backward._updated is not None:  # the backward was complete
                ours.step()
        done = self.steps_done()
        assert done in (1, 2)
        self.step(done)
        assert self.steps_done() == done + 1
        self.reset()
        return became

    def check_at_rest(self) -> None:
        for shard in self.model._homes.shards:
            for s in shard.own:
                assert s.parameter.data_ptr() == shard.home_view(s).data_ptr(), f"{s.name} is not home"
        assert all(module.training for module in self.model.modules())
        assert not self.model._homes.busy
        assert torch.is_grad_enabled()
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert not dispatch._get_current_dispatch_mode_stack()
        assert not is_checkpointing()
        assert lent_weights.get() is None
        assert not is_recomputing()
        assert not [thread for thread in threading.enumerate() if thread.name == "offload-forward"]


_seen: set[tuple[str, int]] = set()


def lines_to_interrupt(run: Run, extent: str) -> Iterator[Line]:
    for line in lines_of(lambda: run.step(1)):
        if extent == "each time" or line[:2] not in _seen:
            _seen.add(line[:2])
            yield line


@pytest.mark.parametrize("extent", EXTENTS)
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_after_an_interrupt_at_any_line_the_model_is_usable(configuration: str, extent: str, tmp_path: Path) -> None:
    run = Run(configuration, tmp_path)
    lines = list(lines_to_interrupt(run, extent))[:: 1 if extent == "each time" else 2]
    run.restart()
    wrong: list[str] = []
    raised = 0
    for line in lines:
        try:
            raised += run.interrupt(line) == "raised"
        except Exception as error:
            wrong.append(f"{line}: {type(error).__name__}: {error}")
            run.restart()
    gc.collect()
    assert not wrong, "\n".join(wrong)
    assert raised > 0.7 * len(lines) - 20  # some are reached in the first steps only


@pytest.mark.parametrize(
    "configuration", [pytest.param(c, marks=[pytest.mark.slow] * (c != "recompute")) for c in CONFIGURATIONS]
)
def test_after_an_interrupt_in_a_context_of_torch_or_python_the_model_is_usable(
    configuration: str, tmp_path: Path
) -> None:
    run = Run(configuration, tmp_path)
    lines = [line for line in lines_of(lambda: run.step(1), contexts=True) if " in " in line.file]
    lines = list({line[:2]: line for line in lines}.values())
    assert len(lines) > 30
    run.restart()
    for line in lines:
        run.interrupt(line, contexts=True)


def test_parameters_read_after_an_interrupted_clean_up_hold_their_stored_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = OffloadModel(build(["linear"]), "cpu", num_slices=3, checkpoint_activation=False)

    def interrupt(_: Backward) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Backward, "abort", interrupt)
        next(iter(model.children())).register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(KeyboardInterrupt):
            model(torch.zeros(1, WIDTH))
    assert model._homes.streamer.loaded
    list(model.parameters())
    assert not model._homes.streamer.loaded
