"""The rung that is bound by the disk: how much of its bandwidth a streamed forward and backward uses.

Wide linear layers see a handful of rows, so that a pass is done with a shard long before the next one can have come.
In turn with the streamed passes the very same files are read from the first byte to the last by a plain loop: directly,
and through a page cache that was emptied of them. The streamed passes are measured against the faster of the two.

A virtual disk may save up credit while it is idle, and whoever reads first spends it. So the disk is read for a while
before anything counts, and a plain direct read precedes each streamed pass and another one follows it, without a pause;
what counts is the mean of both. The slow read through the page cache comes last.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.frame.child import Report

__all__ = ["stream"]

BLOCK_BYTES = 16 << 20


def stream(
    report: Report, home: str, width: int, layers: int, shards: int, rows: int, pairs: int, direct: bool, train: bool
) -> dict[str, Any]:
    """Passes of a model of ``layers`` layers of ``width`` channels in turn with plain reads of its files.

    With ``train`` the weights take gradients, which go to files as well; without, only the input does.
    """
    from offload import DiskHome, OffloadModel

    torch.manual_seed(0)
    with torch.device("meta"):
        bare = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))
    bare.requires_grad_(train)
    model = OffloadModel(bare, "cpu", DiskHome(home, direct=direct), num_slices=shards, checkpoint_activation=True)
    files = sorted(Path(home).glob("gradstream-*/*-weights"))
    nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    batch = torch.randn(rows, width).requires_grad_()
    report.total(pairs)
    for k in range(-1, pairs):  # one to warm up: slots are touched, gradient files are made
        for parameter in model.parameters():
            parameter.grad = None
        forget(files, model)
        read(files[: len(files) // 2], direct=True)
        plain_before = read(files, direct=True)
        before = model.statistics()
        started = time.perf_counter()
        model(batch).square().mean().backward()
        seconds = time.perf_counter() - started
        plain = {"direct": 2 * nbytes / (plain_before + read(files, direct=True)) / 1e9}
        forget(files, model)
        plain["page cache"] = nbytes / read(files, direct=False) / 1e9
        after = model.statistics()
        loaded = after.bytes_loaded - before.bytes_loaded
        if k >= 0:
            report.step(
                seconds=seconds,
                streamed=loaded / seconds / 1e9,
                stored=(after.bytes_stored - before.bytes_stored) / seconds / 1e9,
                waited=after.wait_seconds - before.wait_seconds,
                plain_direct=plain["direct"],
                plain_cached=plain["page cache"],
                share=loaded / seconds / 1e9 / max(plain.values()),
            )
    predicted = model.estimate(rows).seconds if train else None
    return {"bytes": nbytes, "predicted": predicted, "statistics": asdict(model.statistics())}


def forget(files: list[Path], model: nn.Module) -> None:
    """Takes files out of the page cache: first out of the mappings in which parameters see them, which keep pages."""
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


def read(files: list[Path], *, direct: bool) -> float:
    """Seconds in which a plain loop reads files one after the other, block by block."""
    from offload.storage.buffer import host_buffer, view_memory

    buffer = host_buffer(BLOCK_BYTES)
    buffer.fill_(1)
    memory = view_memory(buffer)
    started = time.perf_counter()
    for path in files:
        fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
        try:
            size, offset = os.fstat(fd).st_size, 0
            while offset < size:
                offset += os.preadv(fd, [memory], offset)
        finally:
            os.close(fd)
    return time.perf_counter() - started
