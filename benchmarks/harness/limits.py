"""Rates of the machine (arithmetic, copies, disk), the least work of a step, and the least time that they allow for it.

The least work is counted from shapes: a forward and a backward with nothing recomputed, every parameter touched once.
A step cannot be shorter than its arithmetic at the rate of a large matrix product, nor than its bytes at the bandwidth
of the medium that they pass. A rate is the best of several tries, measured in the same run as the steps. The disk is
measured through ``O_DIRECT`` where the file system takes it, and through a page cache without the file's pages.
"""

import mmap
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.io_counters import measure

BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class Limits:
    """Rates of one machine at one time, per second; those of an accelerator are None without one."""

    threads: int
    device: str
    dtype: str
    matmul_flops: float  #: multiply-adds count two
    copy_bytes: float  #: copied from host memory to host memory
    disk_read_bytes: float  #: the better of O_DIRECT and buffered
    disk_read_buffered_bytes: float  #: through the page cache, with nothing of the file in it
    disk_write_bytes: float  #: including the flush at the end
    direct: bool  #: the file system takes O_DIRECT
    host_to_device_bytes: float | None = None  #: from page-locked memory
    device_to_host_bytes: float | None = None
    device_copy_bytes: float | None = None  #: copied within the accelerator's memory

    def step_seconds(
        self,
        *,
        flops: float = 0.0,
        copied_bytes: float = 0.0,
        read_bytes: float = 0.0,
        written_bytes: float = 0.0,
        loaded_bytes: float = 0.0,
        drained_bytes: float = 0.0,
        on_device_bytes: float = 0.0,
    ) -> float:
        """The least seconds that a step of so much work takes on this machine: the longest of its parts.

        ``flops`` are those of matrix products. Bytes are copied in host memory (``copied_bytes``) or in the memory that
        layers compute in (``on_device_bytes``: the host's without an accelerator). The disk has one queue: bytes read
        and written add up. The bus to an accelerator has two directions: bytes loaded and drained overlap.

        Raises:
            ValueError: if bytes pass to an accelerator and there is none.
        """
        if (loaded_bytes or drained_bytes) and self.host_to_device_bytes is None:
            raise ValueError(
                f"expected no bytes between host and accelerator on {self.device!r}, got loaded_bytes={loaded_bytes}, "
                f"drained_bytes={drained_bytes}; on the CPU they are copied_bytes or read_bytes"
            )
        if self.device_copy_bytes is None:  # one memory for both
            copied_bytes, on_device_bytes = copied_bytes + on_device_bytes, 0.0
        return max(
            flops / self.matmul_flops,
            copied_bytes / self.copy_bytes,
            on_device_bytes / (self.device_copy_bytes or 1.0),
            read_bytes / self.disk_read_bytes + written_bytes / self.disk_write_bytes,
            loaded_bytes / (self.host_to_device_bytes or 1.0),
            drained_bytes / (self.device_to_host_bytes or 1.0),
        )

    def line(self) -> str:
        """The rates in a line for the header."""
        access = "O_DIRECT" if self.direct else "buffered, O_DIRECT is refused"
        cold = _rate("buffered cold", self.disk_read_buffered_bytes)
        parts = [
            f"matmul {self.matmul_flops / 1e9:,.0f} GFLOP/s ({self.dtype}, {self.device})",
            _rate("memory copy", self.copy_bytes),
            f"{_rate('disk read', self.disk_read_bytes)} ({cold})",
            f"{_rate('disk write', self.disk_write_bytes)} ({access})",
        ]
        on_device = (self.host_to_device_bytes, self.device_to_host_bytes, self.device_copy_bytes)
        names = ("to the device", "back", "copy on the device")
        parts += [_rate(name, rate) for name, rate in zip(names, on_device, strict=True) if rate is not None]
        return ", ".join(parts)


def _rate(name: str, bytes_per_second: float) -> str:
    return f"{name} {bytes_per_second / 1e9:.2f} GB/s"


def measure_limits(
    directory: Path,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    threads: int | None = None,
    file_bytes: int = 256 << 20,
    side: int = 2048,
    tries: int = 3,
) -> Limits:
    """Measures for some seconds, in this process; restores the number of torch's threads.

    ``directory`` is on the disk to be measured and holds a file of ``file_bytes`` meanwhile, as many as are copied in
    memory; ``side`` is that of the square matrices. Of several ``tries`` the best counts.
    """
    if file_bytes < BLOCK_BYTES or file_bytes % BLOCK_BYTES:
        raise ValueError(f"expected a positive multiple of {BLOCK_BYTES} bytes, got file_bytes={file_bytes}")
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        there, host = torch.device(device), torch.device("cpu")
        source = torch.ones(file_bytes, dtype=torch.uint8)
        target = torch.ones_like(source)
        left, right = (torch.randn(side, side, device=there).to(dtype) for _ in range(2))
        product = torch.empty_like(left)
        repeats = 20 if there.type == "cuda" else 1

        def multiply() -> None:
            for _ in range(repeats):
                torch.mm(left, right, out=product)

        multiply()
        matmul = 2 * side**3 * repeats / _best(multiply, there, tries)
        copy = file_bytes / _best(lambda: target.copy_(source), host, tries)
        on_device: dict[str, float] = {}
        if there.type == "cuda":
            locked, held = source.pin_memory(), source.to(there)
            beside = torch.empty_like(held)
            for name, work in (
                ("host_to_device_bytes", lambda: held.copy_(locked, non_blocking=True)),
                ("device_to_host_bytes", lambda: locked.copy_(held, non_blocking=True)),
                ("device_copy_bytes", lambda: beside.copy_(held)),
            ):
                on_device[name] = file_bytes / _best(work, there, tries)
        used = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix="limits-", dir=directory) as file:
        read, cold, write, direct = _measure_disk(file.name, file_bytes, tries)
    kind = str(dtype).removeprefix("torch.")
    return Limits(used, str(there), kind, matmul, copy, max(read, cold), cold, write, direct, **on_device)


def _best(work: Callable[[], object], device: torch.device, tries: int) -> float:
    """The least seconds of ``tries``, after one that is not counted."""
    return min([measure(work, device=device.type)[1]["seconds"] for _ in range(tries + 1)][1:])


def _measure_disk(name: str, nbytes: int, tries: int) -> tuple[float, float, float, bool]:
    """Bytes per second: read without the cache, read through it when cold, written; and whether O_DIRECT was taken."""
    # An anonymous mapping begins on a page boundary, as O_DIRECT asks; random bytes, as a disk may compress.
    with mmap.mmap(-1, BLOCK_BYTES) as block:
        block[:] = os.urandom(BLOCK_BYTES)
        try:
            descriptor, direct = os.open(name, os.O_RDWR | os.O_DIRECT), True
        except (OSError, AttributeError):  # refused by the file system; unknown to the platform
            descriptor, direct = os.open(name, os.O_RDWR), False
        buffered = os.open(name, os.O_RDWR)
        try:
            passes = range(tries + 1)
            write = max([_pass(descriptor, block, nbytes, write=True) for _ in passes][1:])  # the first one allocates
            cold = max(_pass(buffered, block, nbytes, write=False) for _ in passes)
            read = max(_pass(descriptor, block, nbytes, write=False) for _ in passes) if direct else cold
        finally:
            os.close(descriptor)
            os.close(buffered)
    return read, cold, write, direct


def _pass(descriptor: int, block: mmap.mmap, nbytes: int, *, write: bool) -> float:
    """Reads or writes the whole file once, with none of its pages in the cache; bytes per second."""
    if hasattr(os, "posix_fadvise"):
        os.fsync(descriptor)  # pages that are not yet written are not dropped
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.lseek(descriptor, 0, os.SEEK_SET)
    move = os.writev if write else os.readv
    started = time.perf_counter()
    for _ in range(nbytes // BLOCK_BYTES):
        move(descriptor, [block])
    if write:
        os.fsync(descriptor)
    return nbytes / (time.perf_counter() - started)


def block_flops(dim: int, tokens: int, positions: int) -> float:
    """Floating point operations of one transformer block's forward; a backward takes twice as many.

    Four square matrices of attention and eight of the perceptron see every token; scores and what they select are two
    products over the ``positions`` tokens of its row. A multiply-add counts two.
    """
    return float(tokens) * (24 * dim**2 + 4 * positions * dim)


def gradient_bytes(parameters: float) -> float:
    """Bytes copied at the least by a forward and a backward: each fp32 parameter is read, its gradient is written."""
    return 4.0 * parameters


def adamw_bytes(parameters: float) -> float:
    """Bytes copied at the least by AdamW in float32, where a copied byte is one read and one written.

    A parameter, its gradient and both moments are read: 16 bytes. All but the gradient are written: 12.
    """
    return 14.0 * parameters
