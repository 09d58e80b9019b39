"""The methods: the same transformer blocks resident or streamed from files, and plain reads of these files.

The resident model has ``torch.utils.checkpoint`` around each shard. It recomputes what the streamed model recomputes,
so the ratio of the two is the price of streaming.
"""

import contextlib
import ctypes
import mmap
import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness.case import FLOOR
from benchmarks.harness.worker import Reporter
from benchmarks.models.transformer import Checkpointed, Stack
from offload import DiskHome, MemoryPolicy, OffloadModel

READ_BYTES = 16 << 20


def stack_of(shape: dict[str, Any]) -> Stack:
    """The blocks of all shards, and the batch."""
    blocks = shape["shards"] * shape["blocks"]
    return Stack(blocks, shape["dim"], shape["rows"], shape["positions"], dropout=0.1)


def _shards(shape: dict[str, Any]) -> list[nn.Module]:
    layers = list(stack_of(shape).build())
    size = shape["blocks"]
    return [nn.Sequential(*layers[k : k + size]) for k in range(0, len(layers), size)]


def _streamed(shape: dict[str, Any], home: str, slots: int | None = None) -> OffloadModel:
    return OffloadModel(
        _shards(shape),
        "cpu",
        offload_device=home,
        checkpoint_activation=True,
        memory=MemoryPolicy.fixed(slots=slots, boundary_bytes=shape["boundary_bytes"]),
    )


def _step(model: nn.Module, state: Any) -> tuple[float, Tensor]:
    """Seconds of one forward and backward, and the loss."""
    model.zero_grad()
    started = time.perf_counter()
    loss = model(state)[0].square().mean()
    loss.backward()
    return time.perf_counter() - started, loss.detach()


def time_pairs(
    report: Reporter, shape: dict[str, Any], home: str, pairs: int, warmup: int, slots: int | None = None
) -> dict[str, Any]:
    """Steps of the resident and of the streamed model in turn; which one starts alternates.

    With as many ``slots`` as shards nothing is loaded after the first step: the ratio is the price of the engine alone.
    """
    state = stack_of(shape).batch()
    model = _streamed(shape, home, slots)
    methods = {"resident": Checkpointed(nn.Sequential(*_shards(shape))), "streamed": model}
    # Without this promise that parameters do not change, each step would load them again.
    with model.frozen_weights() if slots is not None else contextlib.nullcontext():
        for k in range(-warmup, pairs):
            seconds, losses = {}, {}
            before = model.statistics()
            for method in sorted(methods, reverse=k % 2 == 1):
                seconds[method], losses[method] = _step(methods[method], state)
            after = model.statistics()
            if not torch.allclose(losses["resident"], losses["streamed"], rtol=1e-6):
                raise AssertionError(f"the two models do not compute the same loss: {losses}")
            if k >= 0:
                report.step(
                    **seconds,
                    ratio=seconds["streamed"] / seconds["resident"],
                    waited=after.wait_seconds - before.wait_seconds,
                    loads=after.shard_loads - before.shard_loads,
                )
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tokens": stack_of(shape).tokens,
        "predicted": model.estimate(shape["rows"]).seconds,
        "statistics": asdict(model.statistics()),
    }


class OwnForward(nn.Module):
    """The blocks in a module that calls them itself."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layer = nn.ModuleList(blocks)

    def forward(self, *state: Tensor) -> Any:
        """What the last block returns."""
        value: Any = state
        for block in self.layer:
            value = block(value)
        return value


def time_blocks(report: Reporter, shape: dict[str, Any], pairs: int, warmup: int, chunks: int) -> dict[str, Any]:
    """Steps of two OffloadModels in turn: of an ``nn.Sequential``, and of a module that calls the same blocks itself.

    Both are stored in host memory, with two slots, and cut a batch into ``chunks`` micro-batches.
    """
    state = stack_of(shape).batch()
    how: dict[str, Any] = {"checkpoint_activation": True, "num_microbatches": chunks}
    how["memory"] = MemoryPolicy.fixed(boundary_bytes=shape["boundary_bytes"])
    models: dict[str, Any] = {
        "sequential": OffloadModel(nn.Sequential(*_shards(shape)), "cpu", num_slices=shape["shards"], **how),
        "blocks": OffloadModel(OwnForward(_shards(shape)), "cpu", blocks="layer", **how),
    }
    # A Sequential passes its arguments to the first layer, which takes one.
    inputs = {"sequential": (state,), "blocks": state}
    for k in range(-warmup, pairs):
        seconds, processor, losses = {}, {}, {}
        for method in sorted(models, reverse=k % 2 == 1):
            model = models[method]
            model.zero_grad()
            started, cpu = time.perf_counter(), time.process_time()
            loss = model(*inputs[method])[0].square().mean()
            loss.backward()
            seconds[method], processor[method] = time.perf_counter() - started, time.process_time() - cpu
            losses[method] = loss.detach()
        if not torch.equal(losses["sequential"], losses["blocks"]):
            raise AssertionError(f"the two models do not compute the same loss: {losses}")
        if k >= 0:
            ratio = seconds["blocks"] / seconds["sequential"]
            report.step(**seconds, ratio=ratio, processor=processor["blocks"] / processor["sequential"])
    loads = {method: model.statistics().shard_loads for method, model in models.items()}
    return {"parameters": stack_of(shape).parameters, "tokens": stack_of(shape).tokens, "loads": loads}


def peak(report: Reporter, shape: dict[str, Any], home: str, steps: int) -> dict[str, Any]:
    """Steps of the streamed model alone, for the peak of the phase "steps", which starts with an evicted model."""
    report.phase(FLOOR)
    model = _streamed(shape, home)
    state = stack_of(shape).batch()
    report.phase("steps")
    for _ in range(steps):
        seconds, _ = _step(model, state)
        report.step(seconds=seconds)
    report.phase("end")
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "statistics": asdict(model.statistics()),
    }


def stream(
    report: Reporter, home: str, width: int, layers: int, shards: int, rows: int, pairs: int, train: bool
) -> dict[str, Any]:
    """Passes of wide linear layers over few rows, in turn with plain reads of the model's files.

    With ``train`` the weights take gradients, which are written to files; without, only the input does. A virtual disk
    may save up credit while it is idle: the disk is read for a while before anything counts, and a plain direct read
    precedes and follows each pass without a pause. Their mean counts. The slow read through the page cache comes last.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        bare = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    bare.requires_grad_(train)
    model = OffloadModel(bare, "cpu", DiskHome(home, direct=True), num_slices=shards, checkpoint_activation=True)
    files = sorted(path for path in Path(home).rglob("*weights*") if path.is_file())
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    batch = torch.randn(rows, width).requires_grad_()
    for k in range(-1, pairs):  # the first one touches slots and makes gradient files
        model.zero_grad()
        _drop_pages(files, model)
        _read(files[: len(files) // 2], direct=True)
        plain_before = _read(files, direct=True)
        before = model.statistics()
        started = time.perf_counter()
        model(batch).square().mean().backward()
        seconds = time.perf_counter() - started
        plain_direct = 2 * nbytes / (plain_before + _read(files, direct=True)) / 1e9
        _drop_pages(files, model)
        plain_cached = nbytes / _read(files, direct=False) / 1e9
        after = model.statistics()
        loaded = (after.bytes_loaded - before.bytes_loaded) / seconds / 1e9
        if k >= 0:
            report.step(
                seconds=seconds,
                streamed=loaded,
                stored=(after.bytes_stored - before.bytes_stored) / seconds / 1e9,
                waited=after.wait_seconds - before.wait_seconds,
                plain_direct=plain_direct,
                plain_cached=plain_cached,
                share=loaded / max(plain_direct, plain_cached),
            )
    predicted = model.estimate(rows).seconds if train else None
    return {"bytes": nbytes, "predicted": predicted, "statistics": asdict(model.statistics())}


def _drop_pages(files: Sequence[Path], model: nn.Module) -> None:
    """Drops files from the page cache: first from the mappings behind the parameters, which hold pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    for parameter in model.parameters():
        start = parameter.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
        end = parameter.data_ptr() + parameter.numel() * parameter.element_size()
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), mmap.MADV_DONTNEED):
            raise OSError(ctypes.get_errno(), "madvise")
    for path in files:
        fd = os.open(path, os.O_RDWR)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def _read(files: Sequence[Path], *, direct: bool) -> float:
    """Seconds in which a plain loop reads files one after the other, block by block."""
    with mmap.mmap(-1, READ_BYTES) as block:  # page-aligned, as O_DIRECT asks
        block[:] = bytes(READ_BYTES)  # touched before the clock starts
        started = time.perf_counter()
        for path in files:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
            try:
                size, offset = os.fstat(fd).st_size, 0
                while offset < size:
                    offset += os.preadv(fd, [block], offset)
            finally:
                os.close(fd)
        return time.perf_counter() - started
