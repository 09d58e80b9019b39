"""Trains and saves, and dies at a given action of the system: ``python -m tests.offload.checkpoint_worker --help``.

Everything is done in children of this process, which has torch imported already: a child costs milliseconds.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from offload import OffloadModel, OffloadOptimizer, load_checkpoint, save_checkpoint
from tests.offload.zoo import WIDTH, build


class Killer:
    """Counts the actions of the system by which a save becomes durable, and kills the process at one of them."""

    def __init__(self, fatal: int | None) -> None:
        self.count = 0
        self.fatal = fatal
        for name in ("open", "write", "fsync", "replace", "unlink", "mkdir", "rmdir"):
            setattr(os, name, self.counting(name, getattr(os, name)))

    def counting(self, name: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.count == self.fatal:
                if name == "write":
                    action(args[0], args[1][: len(args[1]) // 2])  # torn
                os.kill(os.getpid(), signal.SIGKILL)
            return action(*args, **kwargs)

        return counted


def train(folder: Path, home: str, slices: int, steps: int, fatal: int | None) -> tuple[int, str]:
    """Trains to ``steps``, from the last checkpoint if there is one; counts actions, and hashes the result."""
    torch.manual_seed(0)
    model = OffloadModel(
        build(["linear", "dropout", "batchnorm", "linear"]), "cpu", home, num_slices=slices, checkpoint_activation=True
    )
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, lr=0.01, max_norm=0.5)
    begin = load_checkpoint(folder, model, optimizer).step if (folder / "model.safetensors.index.json").exists() else 0
    killer = Killer(fatal)
    for step in range(begin, steps):
        x = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        save_checkpoint(folder, model, optimizer, file_bytes=600)
    digest = hashlib.sha256()
    for value in [
        *model.state_dict().values(),
        *(v for s in optimizer.state_dict()["state"].values() for v in s.values()),
    ]:
        digest.update(value.contiguous().numpy().tobytes())
    digest.update(torch.get_rng_state().numpy().tobytes())
    return killer.count, digest.hexdigest()


def in_child(function: Callable[[], tuple[int, str]]) -> tuple[int, str] | None:
    """The result of a function in a child; None if the child was killed."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            count, digest = function()
            os.write(writing, f"{count} {digest}".encode())
            status = 0
        finally:
            os._exit(status)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGKILL:
        return None
    assert status == 0, f"the child failed with {status}"
    count, digest = text.split()
    return int(count), digest


def main() -> None:
    """Prints how many children were killed, and whether the last came to what an undisturbed one comes to."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw = random.Random(options.seed)
    undisturbed = in_child(partial(train, options.folder / "undisturbed", "cpu", 4, options.steps, None))
    assert undisturbed is not None
    actions, expected = undisturbed
    killed = agreed = rounds = 0
    while killed < options.kills:
        rounds += 1
        folder = options.folder / f"round{rounds}"
        while True:
            home = draw.choice(["cpu", f"{options.folder}/home/"])
            slices, fatal = draw.randint(1, 6), draw.randint(1, actions)
            fatal_or_not = fatal if killed < options.kills else None
            result = in_child(partial(train, folder, home, slices, options.steps, fatal_or_not))
            if result is not None:
                break
            killed += 1
        agreed += result[1] == expected
        # One that was killed after its last save had replaced the index had no time to remove the one before.
        numbers = {
            entry.name.split("-")[1] for entry in folder.iterdir() if entry.name.startswith(("model-", "state-"))
        }
        assert len(numbers) <= 2, numbers
    print(f"killed {killed}, agreed {agreed} of {rounds}")


if __name__ == "__main__":
    main()
