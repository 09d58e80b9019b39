"""Rates of the machine (arithmetic, copies, disk), and the least time that they allow for the work of a step.

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

    def best(work: Callable[[], object], place: str) -> float:
        """The least seconds of some tries, after one that is not counted."""
        return min([measure(work, device=place)[1]["seconds"] for _ in range(tries + 1)][1:])

    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        left, right = (torch.randn(side, side, device=device).to(getattr(torch, dtype)) for _ in range(2))
        source = torch.ones(file_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        product = torch.empty_like(left)
        repeats = 1 if device == "cpu" else 20  # a launch takes as long as a small product
        products = best(lambda: [torch.mm(left, right, out=product) for _ in range(repeats)], device)
        rates = {"flops": 2 * side**3 * repeats / products}
        rates["copied_bytes"] = file_bytes / best(lambda: target.copy_(source), "cpu")
        with tempfile.NamedTemporaryFile(prefix="rates-", dir=directory) as file:
            rates |= _disk_rates(file.name, file_bytes, tries)
        if device != "cpu":
            locked, held = source.pin_memory(), source.to(device)
            rates["loaded_bytes"] = file_bytes / best(lambda: held.copy_(locked, non_blocking=True), device)
            rates["drained_bytes"] = file_bytes / best(lambda: locked.copy_(held, non_blocking=True), device)
            rates["on_device_bytes"] = file_bytes / best(held.clone, device)
    finally:
        torch.set_num_threads(before)
    shown = [f"{KINDS[kind]} {rate / 1e9:.2f} GB/s" for kind, rate in rates.items() if kind != "flops"]
    return rates, ", ".join([f"matmul {rates['flops'] / 1e9:,.0f} GFLOP/s ({dtype}, {device})", *shown])


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
            for move, kind in ((os.writev, "written_bytes"), (os.readv, "read_bytes")) * (tries + 1):
                if hasattr(os, "posix_fadvise"):
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # drops what is on disk
                os.lseek(descriptor, 0, os.SEEK_SET)
                started = time.perf_counter()
                for _ in range(nbytes // BLOCK_BYTES):
                    move(descriptor, [block])
                os.fsync(descriptor)
                best[kind] = max(best[kind], nbytes / (time.perf_counter() - started))
            os.close(descriptor)
    return best
