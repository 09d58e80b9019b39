"""After ``KeyboardInterrupt`` at any line of the code for blocks the model is usable, and nothing is half-done."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from offload import OffloadModel, OffloadOptimizer
from tests.offload.blocks.towers import loss_of, make, words
from tests.offload.engine.test_interrupts import Run, interrupt_each
from tests.offload.interrupts import Line, lines_of

#: Those that a model with blocks runs, and :mod:`tests.offload.engine.test_interrupts` does not reach in full.
FILES = (
    "body.py",
    "own_forward.py",
    "own_attributes.py",
    "suspend.py",
    "engine/engine.py",
    "engine/chunks.py",
)

#: Arguments of the model, optimizer.
CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "one chunk": ({}, "plain"),
    "threads": ({"num_microbatches": 2}, "clipped"),
    "graphs": ({"checkpoint_activation": False}, "clipped"),
}


#: Lines that an earlier configuration has interrupted.
_seen: set[tuple[str, int]] = set()


class BlocksRun(Run):
    def __init__(self, name: str) -> None:
        self.arguments, self.kind = CHOICES[name]
        self.run_without_interrupt()

    def make(self) -> None:
        arguments = {"checkpoint_activation": True, **self.arguments}
        model = make(3)
        for block in model.encoder.layer:
            del block.calls  # also interrupted forwards count
        self.model = OffloadModel(model, "cpu", blocks="encoder.layer", **arguments)
        self.optimizer: Any
        if self.kind == "plain":
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        else:
            self.optimizer = OffloadOptimizer(self.model, torch.optim.SGD, max_norm=0.5, lr=0.1, momentum=0.9)
        self.done = 0

    def step(self, k: int) -> None:
        torch.manual_seed(k)
        self.optimizer.zero_grad()
        loss_of(self.model(words(4, seed=k))).backward()
        self.optimizer.step()
        self.done = k + 1

    def interrupt(self, line: Line) -> str:
        became = super().interrupt(line)
        assert not [thread for thread in threading.enumerate() if thread.name == "offload-forward"]
        return became


@pytest.mark.parametrize("name", CHOICES)
def test_after_an_interrupt_at_any_line_the_model_is_usable(name: str, tmp_path: Path) -> None:
    run = BlocksRun(name)
    found = {line[:2]: line for line in lines_of(lambda: run.step(1)) if line.file.endswith(FILES)}
    lines = [line for place, line in found.items() if place not in _seen][::2]
    _seen.update(found)
    wrong, raised = interrupt_each(run, lines)
    assert not wrong, "\n".join(wrong)
    assert raised > 0.9 * len(lines) - 20
