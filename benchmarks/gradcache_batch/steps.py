"""The rungs: steps in turn with others, steps with growing batches under a memory limit, steps with finer chunks."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # torch imports it in the middle of a first checkpoint, and keeps that moment's frames for a while
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.frame.cap import cap_memory
from benchmarks.frame.child import Report
from benchmarks.frame.memory import data_bytes
from benchmarks.gradcache_batch.shape import MEBIBYTE, TEMPERATURE, Shape
from benchmarks.gradcache_batch.ways import TILE_ROWS, Step, make
from gradcache.loss import SimpleContrastiveLoss
from offload import OffloadModel

__all__ = ["FLOOR", "growing", "in_turn", "ladder", "loss_alone", "sketch"]

FLOOR = "interpreter and torch"
SKETCH_PIECE = 4096


def in_turn(report: Report, way: str, shape: dict[str, Any], home: str) -> dict[str, Any]:
    """One step for each turn, in the phase "steps". The result holds a sketch of the last gradient: :func:`sketch`."""
    report.memory(FLOOR)
    chosen = Shape(**shape)
    model, step = make(way, chosen, Path(home))
    rows = chosen.batch()
    report.phase("steps")
    for _ in report.turns():
        processor = time.process_time()
        seconds, loss = _timed(model, step, rows)
        report.step(seconds=seconds, processor=time.process_time() - processor, loss=loss)
    report.phase("end")
    return {"parameters": sum(parameter.numel() for parameter in model.parameters()), "sketch": sketch(model)}


def growing(
    report: Report, way: str, shape: dict[str, Any], home: str, limit_mebibytes: int, most_pairs: int
) -> dict[str, Any]:
    """Steps with batches that double until memory does not hold them, or ``most_pairs`` is reached.

    Writable private memory of the process may grow by ``limit_mebibytes`` over what interpreter, torch and one small
    step of the same way took; the kernel refuses more, as a smaller machine would. Files are not limited.
    """
    chosen = Shape(**shape)
    small = replace(chosen, pairs=2, chunk=1)
    _timed(*make(way, small, Path(home)), small.batch())
    report.memory(FLOOR)
    held = data_bytes(os.getpid())
    if not held or not cap_memory(held + limit_mebibytes * MEBIBYTE):
        raise OSError("expected a system that tells and limits a process's private memory, as Linux does")
    pairs, fitted, ended = chosen.chunk, 0, ""
    sketches: dict[int, list[float]] = {}
    try:
        model, step = make(way, chosen, Path(home))
        while pairs <= most_pairs:
            seconds, loss = _timed(model, step, chosen.batch(pairs))
            if pairs <= 4 * chosen.chunk:
                sketches[pairs] = sketch(model)
            fitted = pairs
            report.step(pairs=pairs, seconds=seconds, loss=loss)
            pairs *= 2
    except (MemoryError, RuntimeError, OSError) as error:
        ended = str(error).splitlines()[0][:200] or type(error).__name__
        # A thread needs a stack, and says nothing of memory when there is none.
        if not any(word in ended.lower() for word in ("memory", "allocate", "memoryerror", "start new thread")):
            raise
    return {"pairs": fitted, "ended": ended, "sketches": {str(k): v for k, v in sketches.items()}}


def ladder(report: Report, way: str, shape: dict[str, Any], home: str, chunks: list[int], steps: int) -> dict[str, Any]:
    """Steps with the batch in more and more chunks, a fresh model for each number of them."""
    chosen = Shape(**shape)
    report.total(len(chunks) * steps)
    loads: dict[str, int | None] = {}
    for count in chunks:
        finer = replace(chosen, chunk=max(2 * chosen.pairs // count, 1))
        model, step = make(way, finer, Path(home))
        rows = finer.batch()
        _timed(model, step, rows)
        before = _loaded(model)
        for _ in range(steps):
            seconds, loss = _timed(model, step, rows)
            report.step(chunks=count, seconds=seconds, loss=loss)
        after = _loaded(model)
        loads[str(count)] = None if after is None or before is None else (after - before) // steps
        del model, step
    return {"bytes_loaded": loads}


def loss_alone(report: Report, rows: int, width: int) -> dict[str, Any]:
    """The loss of so many representations in each tower, by tiles, and its gradient, in the phase "steps"."""
    generator = torch.Generator().manual_seed(0)
    towers = [torch.randn(rows, width, generator=generator) for _ in range(2)]
    towers = [functional.normalize(tower).requires_grad_() for tower in towers]
    report.memory(FLOOR)
    report.phase("steps")
    started = time.perf_counter()
    loss = SimpleContrastiveLoss(temperature=TEMPERATURE, tile_rows=TILE_ROWS)(*towers)
    loss.backward()
    seconds = time.perf_counter() - started
    report.phase("end")
    return {"rows": rows, "width": width, "seconds": seconds, "loss": loss.item(), "given": 8 * rows * width}


def sketch(model: nn.Module) -> list[float]:
    """Random projections of the gradient: a relative difference of two sketches tells that of the gradients.

    Each parameter's gradient is cut into up to 64 pieces, and the beginning of each piece is projected on one vector of
    random signs, the same in every process.
    """
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (SKETCH_PIECE,), generator=generator).double() * 2 - 1
    found: list[float] = []
    for _, parameter in sorted(model.named_parameters(), key=lambda item: item[0]):
        assert parameter.grad is not None
        flat = parameter.grad.detach().flatten()
        pieces = flat.chunk(min(64, max(1, flat.numel() // SKETCH_PIECE)))
        found += [float(piece[:SKETCH_PIECE].double() @ signs[: len(piece[:SKETCH_PIECE])]) for piece in pieces]
    return found


def _timed(model: nn.Module, step: Step, rows: tuple[Tensor, Tensor]) -> tuple[float, float]:
    model.zero_grad()
    started = time.perf_counter()
    loss = step(*rows)
    return time.perf_counter() - started, loss.item()


def _loaded(model: nn.Module) -> int | None:
    return model.statistics().bytes_loaded if isinstance(model, OffloadModel) else None
