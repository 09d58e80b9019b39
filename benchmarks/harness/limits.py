"""Rates of the machine (arithmetic, copies, disk), the least work of a step, and the least time that they allow for it.

The least work is counted from shapes: a forward and a backward with nothing recomputed, every parameter touched once.
A step cannot be shorter than its arithmetic at the rate of a large matrix product, nor than its bytes at the bandwidth
of the medium that they pass. A rate is the best of several tries, measured in the same run as the steps. The disk is
measured with no page of the file in the page cache, through ``O_DIRECT`` and without.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from benchmarks.harness.io_counters import measure

BLOCK_BYTES = 4 << 20
KINDS = {  #: kinds of work, counted a step; rates have the same names, a second; those of an accelerator only with one
    "flops": "matmul",  # of matrix products; a multiply-add counts two
    "copied_bytes": "memory copy",  # from host memory to host memory; a copied byte is one read and one written
    "read_bytes": "disk read",
    "written_bytes": "disk write",  # including the flush at the end
    "loaded_bytes": "to the device",  # from page-locked memory
    "drained_bytes": "back",
    "on_device_bytes": "copy on the device",
}


def least_seconds(rates: Mapping[str, float], work: Mapping[str, float]) -> float:
    """The least seconds that a step of so much ``work`` takes on this machine: the longest of its parts.

    The disk has one queue: bytes read and written add up. The bus to an accelerator has two directions: bytes loaded
    and drained overlap. Without an accelerator there is one memory, and all of these bytes are copies in it.
    """
    seconds: dict[str, float] = {}
    for kind, amount in work.items():
        rate = kind if kind in rates else "copied_bytes"
        part = "disk" if kind in ("read_bytes", "written_bytes") else rate
        seconds[part] = seconds.get(part, 0.0) + amount / rates[rate]
    return max(seconds.values(), default=0.0)


def measure_rates(
    directory: Path,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    file_bytes: int = 256 << 20,
    side: int = 2048,
    tries: int = 3,
) -> tuple[dict[str, float], str]:
    """Measures for some seconds, in this process; returns the rates by :data:`KINDS`, and a line that shows them.

    ``directory`` is on the disk to be measured and holds a file of ``file_bytes`` (whole blocks of 4 MiB) meanwhile, as
    many as are copied in memory; ``side`` is that of the square matrices. The number of torch's threads is restored.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        source = torch.ones(file_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        left, right = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
        product = torch.empty_like(left)
        on_gpu = torch.device(device).type == "cuda"
        repeats = 20 if on_gpu else 1

        def multiply() -> None:
            for _ in range(repeats):
                torch.mm(left, right, out=product)

        multiply()
        rates = {
            "flops": 2 * side**3 * repeats / _best(multiply, device, tries),
            "copied_bytes": file_bytes / _best(lambda: target.copy_(source), "cpu", tries),
        }
        with tempfile.NamedTemporaryFile(prefix="rates-", dir=directory) as file:
            rates |= _disk_rates(file.name, file_bytes, tries)
        if on_gpu:
            locked, held = source.pin_memory(), source.to(device)
            beside = torch.empty_like(held)
            for kind, work in (
                ("loaded_bytes", lambda: held.copy_(locked, non_blocking=True)),
                ("drained_bytes", lambda: locked.copy_(held, non_blocking=True)),
                ("on_device_bytes", lambda: beside.copy_(held)),
            ):
                rates[kind] = file_bytes / _best(work, device, tries)
    finally:
        torch.set_num_threads(before)
    shown = [f"{KINDS[kind]} {rate / 1e9:.2f} GB/s" for kind, rate in rates.items() if kind != "flops"]
    return rates, ", ".join([f"matmul {rates['flops'] / 1e9:,.0f} GFLOP/s ({dtype}, {device})", *shown])


def _best(work: Callable[[], object], device: str, tries: int) -> float:
    """The least seconds of ``tries``, after one that is not counted."""
    return min([measure(work, device=device)[1]["seconds"] for _ in range(tries + 1)][1:])


def _disk_rates(name: str, nbytes: int, tries: int) -> dict[str, float]:
    """The best bytes per second of writing and of reading the whole file, directly or through a cold page cache."""
    best = {"read_bytes": 0.0, "written_bytes": 0.0}
    # An anonymous mapping begins on a page boundary, as O_DIRECT asks; random bytes, as a disk may compress.
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        block[:] = os.urandom(BLOCK_BYTES)
        for flag in {0, getattr(os, "O_DIRECT", 0)}:
            try:
                descriptor = os.open(name, os.O_RDWR | flag)
            except OSError:  # a file system that refuses O_DIRECT
                continue
            try:
                for _ in range(tries + 1):  # the first write allocates
                    for kind, move in (("written_bytes", os.writev), ("read_bytes", os.readv)):
                        if hasattr(os, "posix_fadvise"):
                            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # drops what is written
                        os.lseek(descriptor, 0, os.SEEK_SET)
                        started = time.perf_counter()
                        for _ in range(nbytes // BLOCK_BYTES):
                            move(descriptor, [block])
                        if move is os.writev:
                            os.fsync(descriptor)
                        best[kind] = max(best[kind], nbytes / (time.perf_counter() - started))
            finally:
                os.close(descriptor)
    return best
