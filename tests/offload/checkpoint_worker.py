"""Trains and saves, and dies at a given event.

Everything is done in children of this process, which has torch imported already: a child costs milliseconds. A moment
is the n-th event of a kind, counted over all threads, so it needs no clock; where the other threads are at that moment
is up to the system, as it is for a real kill.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import itertools
import json
import os
import random
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload import DiskHome, OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from offload.optim import state_forms
from offload.storage.disk import DiskBlock
from offload.telemetry.statistics import Meter
from tests.offload.mesh.forked import fork
from tests.offload.zoo import WIDTH, build

#: Kinds of events: begins and ends of cells, of jobs of each lane, and of the arithmetic of an update; reads and writes
#: of homes; and actions of the system by which a save becomes durable.
KINDS = ("forward", "backward", "load", "drain", "update", "arithmetic", "read", "write", "save")

#: How an optimizer stores its states, and how homes store weights and gradients.
STATES: dict[str, tuple[Any, Any, Any]] = {
    "full": (None, None, None),
    "bfloat16": (torch.bfloat16, None, None),
    "8bit": ("8bit", None, None),
    "split weights": (None, "split", None),
    "bfloat16 gradients": (None, None, torch.bfloat16),
    "everything": ("8bit", torch.bfloat16, torch.bfloat16),
}

Outcome = tuple[dict[str, int], str]


class Killer:
    """Counts events, and kills the process at one of them."""

    def __init__(self, fatal: tuple[str, int] | None) -> None:
        self.counts = collections.Counter[str]()
        self.fatal = fatal
        self._lock = threading.Lock()

    def event(self, kind: str, last_deed: Callable[[], object] = lambda: None) -> None:
        """Counts; at the fatal one does ``last_deed`` and dies."""
        with self._lock:
            self.counts[kind] += 1
            fatal = self.fatal == (kind, self.counts[kind])
        if fatal:
            last_deed()
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Listens to everything that happens in this process from here on."""
        for name in ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir"):
            setattr(os, name, self._saving(getattr(os, name)))
        read, write, step = DiskBlock.read_into, DiskBlock.write, torch.optim.AdamW.step

        def watched(span: Callable[..., Any]) -> Any:
            @contextlib.contextmanager
            def around(meter: Meter, of: str, *args: Any, **kwargs: Any) -> Iterator[None]:
                event = {"F": "forward", "B": "backward"}.get(of, of)
                with self._around(event), span(meter, of, *args, **kwargs):
                    yield

            return around

        def watched_read(block: DiskBlock, destination: torch.Tensor, offset: int = 0) -> None:
            self.event("read")
            read(block, destination, offset)

        def watched_write(block: DiskBlock, source: torch.Tensor, offset: int) -> None:
            self.event("write", lambda: write(block, source[: source.numel() // 2], offset))  # torn
            write(block, source, offset)

        def watched_step(optimizer: torch.optim.AdamW) -> None:
            with self._around("arithmetic"):
                step(optimizer)

        Meter.cell, Meter.on_lane = watched(Meter.cell), watched(Meter.on_lane)  # type: ignore[method-assign]
        DiskBlock.read_into, DiskBlock.write = watched_read, watched_write  # type: ignore[method-assign]
        torch.optim.AdamW.step = watched_step  # type: ignore[method-assign, assignment]

    @contextlib.contextmanager
    def _around(self, kind: str) -> Iterator[None]:
        self.event(kind)
        yield
        self.event(kind)

    def _saving(self, action: Callable[..., Any]) -> Callable[..., Any]:
        main = threading.current_thread()

        def counted(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread() is main:  # lanes open files too
                half = args[1][: len(args[1]) // 2] if action.__name__ == "write" else None
                self.event("save", lambda: half and action(args[0], half))
            return action(*args, **kwargs)

        return counted


def make(home: str, slices: int, *, keep: bool, saved: bool, **how: Any) -> OffloadModel:
    """The model; one whose home is kept and whose run has ``saved`` goes on in it, as the process before left it."""
    torch.manual_seed(0)
    with torch.device("meta" if keep and saved else "cpu"):
        layers = build(["linear", "dropout", "batchnorm", "linear"])
    place = DiskHome(home, keep=True, recover=saved, overwrite=not saved) if keep else home
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "recovering the home", RuntimeWarning)
        return OffloadModel(layers, "cpu", place, slices, checkpoint_activation=True, **how)


def train(
    folder: Path, home: str, slices: int, steps: int, states: str, fatal: tuple[str, int] | None, *, keep: bool = False
) -> Outcome:
    """Trains to ``steps`` from the last checkpoint, if there is one, and saves every other step.

    ``keep``: the home outlives each process, too; the last one closes it, and it is read as one that was closed.
    Returns the number of events of each kind, and a hash of all that training has changed.
    """
    states_form, store_dtype, gradient_dtype = STATES[states]
    saved = (folder / "model.safetensors.index.json").exists()
    home = str(folder / "home") if keep else home
    model = make(home, slices, keep=keep, saved=saved, store_dtype=store_dtype, gradient_dtype=gradient_dtype)
    state_forms.LEAST_ELEMENTS = WIDTH * WIDTH
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.5, states=states_form)
    begin = load_checkpoint(folder, model, optimizer).step if saved else 0
    killer = Killer(fatal)
    killer.watch()
    for step in range(begin, steps):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 or step == steps - 1:
            save_checkpoint(folder, model, optimizer, file_bytes=600)
    digest = hashlib.sha256()
    stored = (v for s in optimizer.state_dict()["state"].values() for v in s.values())
    for value in (*model.state_dict().values(), *stored):
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    if keep:
        trained = {name: value.clone() for name, value in model.state_dict().items()}
        model.close()
        again = make(home, slices, keep=True, saved=True)
        assert all(torch.equal(value, trained[name]) for name, value in again.state_dict().items())
        again.close()
        assert {path.name for path in Path(home).iterdir()} == {"home.json", "home.lock", "model.home"}
    return dict(killer.counts), digest.hexdigest()


def in_child(function: Callable[[], Outcome]) -> Outcome | None:
    """The result of a function in a child; None if the child was killed."""
    status, found = fork(function).result()
    if status == -signal.SIGKILL:
        return None
    assert status == 0, f"the child failed with {status}"
    counts, digest = found
    return counts, digest


def main(name: str, kills: int | str, how: str) -> None:
    """Prints how many children were killed at which kinds of events, and how many rounds came to the same as a run
    without a kill. ``how``: one of :data:`STATES`, or "keep", whose homes outlive the processes."""
    torch.set_num_threads(1)
    torch.optim.AdamW([torch.zeros(1)])  # imports what every child would otherwise import for itself
    draw, path, kills = random.Random(0), Path(name), int(kills)
    home = f"{path}/home/"
    # With the most slices, so that a moment that is drawn may lie beyond the end of a run with fewer.
    run = partial(train, steps=5, states="full" if how == "keep" else how, keep=how == "keep")
    undisturbed = in_child(partial(run, path / "undisturbed", home, 6, fatal=None))
    assert undisturbed is not None
    counts, expected = undisturbed
    assert set(counts) == set(KINDS), counts
    kinds = itertools.cycle(KINDS)
    kind, killed = next(kinds), collections.Counter[str]()
    agreed = rounds = 0
    while killed.total() < kills:
        rounds += 1
        folder = path / f"round{rounds}"
        while True:
            place = home if kind in ("read", "write") else draw.choice(["cpu", home])
            fatal = (kind, draw.randint(1, counts[kind])) if killed.total() < kills else None
            result = in_child(partial(run, folder, place, draw.randint(1, 6), fatal=fatal))
            if result is not None:
                break
            killed[kind] += 1
            kind = next(kinds)
        agreed += result[1] == expected
        # One that was killed after its last save had replaced the index had no time to remove the one before.
        names = [entry.name for entry in folder.iterdir()]
        numbers = {name.split("-")[1] for name in names if name.startswith(("model-", "state-"))}
        assert len(numbers) <= 2, numbers
    print(json.dumps({"killed": killed, "agreed": agreed, "rounds": rounds}))
