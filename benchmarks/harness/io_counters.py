"""What a step takes: seconds, and the bytes that its process reads and writes, as the kernel counts them.

``read`` and ``written`` count calls, served by the page cache or by the disk; ``from_disk`` and ``to_disk`` count what
reached the device. Asynchronous I/O, which a peer may use, is only in the latter two. Bytes that a call reads and the
device does not deliver were copied from the page cache.
"""

import contextlib
import importlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, TypeVar

import psutil

from benchmarks.harness.ranks import bytes_received

#: The counters of ``offload.Statistics`` that the line of a step holds.
COUNTED = ("bytes_loaded", "bytes_stored", "bytes_spilled", "update_bytes_read", "update_bytes_written", "wait_seconds")
COUNTED += ("bytes_gathered", "bytes_reduced", "bytes_agreed")
#: Those of bytes that a step reads from homes and writes there; boundaries, which are written and read, are not.
MOVED = ("bytes_loaded", "bytes_stored", "update_bytes_read", "update_bytes_written")

T = TypeVar("T")


def measure(step: Callable[[], T], model: object = None, device: str = "cpu") -> tuple[T, dict[str, float]]:
    """Runs ``step``; returns its result, and its seconds, processor time, bytes and counts of an OffloadModel."""
    wait = (lambda: None) if device == "cpu" else partial(importlib.import_module("torch").cuda.synchronize, device)
    before = _counts(model)
    wait()
    started, processor = time.perf_counter(), time.process_time()
    value = step()
    wait()
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    counted = {name: count - before[name] for name, count in _counts(model).items()}
    return value, {"seconds": seconds, "processor": processor, **counted}


def counts_of(model: object) -> dict[str, Any]:
    """The statistics of an OffloadModel; nothing for other models."""
    return asdict(model.statistics()) if hasattr(model, "statistics") else {}


def _counts(model: object) -> dict[str, float]:
    """Counts so far: those of the model, and bytes that this process has moved, where the kernel counts them."""
    found = {name: count for name, count in counts_of(model).items() if name in COUNTED}
    found["received"] = bytes_received()
    with contextlib.suppress(AttributeError, psutil.Error):
        io = psutil.Process().io_counters()
        found |= {"read": io.read_chars, "written": io.write_chars}
        found |= {"from_disk": io.read_bytes, "to_disk": io.write_bytes}
    return found


def counted_bytes(step: Mapping[str, Any]) -> tuple[float, float]:
    """What an OffloadModel and the kernel have counted in a step: bytes read and written by calls, boundaries included.

    So are comparisons with homes, in older records. Calls of other parts of the process are in the latter.
    """
    ours = sum(step[name] for name in MOVED) + 2 * step["bytes_spilled"] + step.get("bytes_compared", 0)
    return ours, step.get("read", 0) + step.get("written", 0)


def file_work(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The bytes that a step moves to and from files: ``read_bytes``, ``written_bytes``, and ``copied_bytes`` in memory.

    Calls count with their median, the device with its mean, because the page cache differs from step to step; of the
    two the larger counts. What is read, but not from the device, is copied from the page cache.
    """
    read, written = (statistics.median(step.get(key, 0) for step in steps) for key in ("read", "written"))
    from_disk, to_disk = (statistics.fmean(step.get(key, 0) for step in steps) for key in ("from_disk", "to_disk"))
    cached = max(0.0, read - from_disk)
    return {"read_bytes": from_disk, "written_bytes": max(written, to_disk), "copied_bytes": cached}
