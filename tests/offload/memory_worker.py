"""Trains a model with a limit of memory in a process of its own; prints the peak of its memory, and what it computed.

The argument is the loop as JSON: see ``Loop`` in ``test_memory_limit.py``.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload import OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from offload.heap import return_freed_memory
from offload.telemetry.peak import anonymous_bytes
from tests.offload.checkpoint_worker import STATES as FORMS
from tests.offload.zoo import FeedForward

WIDTH, DEPTH = 384, 6
STEPS, GROWS_AT, SAVES_AT = 6, 4, 3


class Around(nn.Module):
    """Blocks with parameters before and after them: tokens in, a state of each token out.

    ``tied``: whether the last matrix is the first one.
    """

    def __init__(self, width: int, words: int, *, tied: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(FeedForward(width) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.words((x[:, :2] * 1000).long().abs() % self.words.num_embeddings)
        for block in self.blocks:
            y = block(y)
        y = self.norm(y).mean(1)[:8]
        scores: Tensor = self.head(y)
        return scores


class Peak(threading.Thread):
    """The most anonymous memory of this process, above what it was when this began."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        gc.collect()
        return_freed_memory()
        self.began = self.most = anonymous_bytes()
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.0005):
            self.most = max(self.most, anonymous_bytes())

    def end(self) -> int:
        self._ended.set()
        self.join()
        return self.most - self.began


def bare(loop: dict[str, Any], width: int) -> nn.Module:
    """The model: blocks that are called in order, or with as many ``words`` around them."""
    if loop.get("words"):
        return Around(width, loop["words"] if width == WIDTH else 64, tied=loop.get("tied", False))
    return nn.Sequential(*(FeedForward(width) for _ in range(DEPTH)))


def initialise(model: nn.Module) -> None:
    """The same values whatever order the model's parameters are made in, one after the other."""
    for k, (name, p) in enumerate(model.named_parameters()):
        values = torch.empty(p.shape).uniform_(-0.05, 0.05, generator=torch.Generator().manual_seed(k))
        model.load_state_dict({name: values}, strict=False)


def train(
    model: nn.Module, optimizer: Any, loop: dict[str, Any], width: int = WIDTH, folder: Path | None = None
) -> list[float]:
    """The losses of a training loop."""
    losses = []
    for step in range(STEPS):
        rows = loop["rows"] * (loop["growth"] if step >= GROWS_AT else 1)
        for k in range(loop["accumulation"]):
            torch.manual_seed(100 * step + k)
            last = k + 1 == loop["accumulation"]
            context = contextlib.nullcontext() if last else getattr(optimizer, "accumulate", contextlib.nullcontext)()
            with context:
                # ``longer``: a batch that grows has longer rows, not more of them.
                shape = (16, rows // 16, width) if loop.get("longer") else (rows, width)
                loss = model(torch.randn(shape)).square().mean()
                loss.backward()
            losses.append(loss.item())
            del loss
        optimizer.step()
        optimizer.zero_grad(set_to_none=loop["set_to_none"])
        if loop["saves"] and step == SAVES_AT and folder is not None:
            assert isinstance(model, OffloadModel)
            save_checkpoint(folder / "saved", model, optimizer)
            load_checkpoint(folder / "saved", model, optimizer)
    return losses


def run(loop: dict[str, Any], folder: Path, width: int = WIDTH) -> list[float]:
    """The losses with a limit of memory."""
    kind, options = options_of(loop)
    with torch.device("cpu" if loop.get("resident") else "meta"):
        layers = bare(loop, width)
    home = str(folder / "home") if loop["home"] == "disk" else "cpu"
    blocks = {"blocks": "blocks"} if loop.get("words") else {}
    resident = {"resident": loop["resident"]} if loop.get("resident") else {}
    common: dict[str, Any] = {"num_microbatches": loop["microbatches"], "memory": loop["memory"]}
    states, common["store_dtype"], common["gradient_dtype"] = FORMS[loop.get("form", "full")]
    model = OffloadModel(layers, "cpu", home, **common, **blocks, **resident)
    initialise(model)
    optimizer = OffloadOptimizer(model, kind, update_in_backward=loop["in_backward"], states=states, **options)
    losses = train(model, optimizer, loop, width, folder)
    optimizer.synchronize()
    model.close()
    return losses


def options_of(loop: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The class of the optimizer, and its hyperparameters."""
    if loop["optimizer"] == "momentum":
        return torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}
    return torch.optim.AdamW, {"lr": 1e-3}


def main() -> None:
    """Prints a line of JSON."""
    torch.set_num_threads(1)
    loop, folder = json.loads(sys.argv[1]), Path(sys.argv[2])
    (folder / "small").mkdir()
    run({**loop, "rows": 8}, folder / "small", width=16)  # loads all that a step needs
    peak = Peak()
    peak.start()
    ours = run(loop, folder)
    nbytes = peak.end()
    kind, options = options_of(loop)
    plain = bare(loop, WIDTH)
    initialise(plain)
    fused = {"fused": True} if kind is torch.optim.AdamW else {}
    theirs = train(plain, kind(plain.parameters(), **options, **fused), loop)
    print(json.dumps({"bytes": nbytes, "ours": ours, "theirs": theirs}))
