"""What a step takes: seconds, and the bytes that its process reads and writes, as the kernel counts them.

``read`` and ``written`` count calls, served by the page cache or by the disk; ``from_disk`` and ``to_disk`` count what
reached the device. Asynchronous I/O, which a peer may use, is only in the latter two. Bytes that a call reads and the
device does not deliver were copied from the page cache.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import psutil

#: The counters of ``offload.Statistics`` that the line of a step holds.
COUNTED = ("bytes_loaded", "bytes_stored", "bytes_spilled", "update_bytes_read", "update_bytes_written", "wait_seconds")

Steps = Sequence[Mapping[str, Any]]
T = TypeVar("T")


def measure(step: Callable[[], T], model: object = None, device: str = "cpu") -> tuple[T, dict[str, float]]:
    """What ``step`` returns, and what it took: seconds and processor time, bytes, and what an OffloadModel counted."""
    before = _counts(model)
    _wait_for(device)
    started, processor = time.perf_counter(), time.process_time()
    value = step()
    _wait_for(device)
    seconds, processor = time.perf_counter() - started, time.process_time() - processor
    counted = {name: count - before[name] for name, count in _counts(model).items()}
    return value, {"seconds": seconds, "processor": processor, **counted}


def counts_of(model: object) -> dict[str, Any]:
    """The statistics of an OffloadModel; nothing for other models."""
    return asdict(model.statistics()) if hasattr(model, "statistics") else {}


def _wait_for(device: str) -> None:
    if device != "cpu":
        import torch

        torch.cuda.synchronize(device)


def _counts(model: object) -> dict[str, float]:
    """What the model has counted, and what this process has moved, where the kernel counts that."""
    found = {name: count for name, count in counts_of(model).items() if name in COUNTED}
    with contextlib.suppress(AttributeError, psutil.Error):
        io = psutil.Process().io_counters()
        found |= {"read": io.read_chars, "written": io.write_chars}
        found |= {"from_disk": io.read_bytes, "to_disk": io.write_bytes}
    return found


def bytes_of_step(steps: Steps) -> dict[str, float]:
    """Bytes ``read`` and ``written`` in a step, and of those read the ones ``from_disk``.

    Calls count with their median, the device with its mean, because the page cache differs from step to step; of the
    two the larger counts.
    """
    calls = {key: float(statistics.median(step.get(key, 0) for step in steps)) for key in ("read", "written")}
    device = {key: statistics.fmean(step.get(key, 0) for step in steps) for key in ("from_disk", "to_disk")}
    return {
        "read": max(calls["read"], device["from_disk"]),
        "written": max(calls["written"], device["to_disk"]),
        "from_disk": device["from_disk"],
    }


def file_work(steps: Steps) -> dict[str, float]:
    """The bytes that a step moves to and from files, as :func:`benchmarks.harness.limits.least_seconds` takes them."""
    moved = bytes_of_step(steps)
    cached = moved["read"] - moved["from_disk"]
    return {"read_bytes": moved["from_disk"], "written_bytes": moved["written"], "copied_bytes": cached}


def engine_bytes(step: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of a step that an OffloadModel loaded from its home and stored there; what is spilled passes both ways."""
    spilled = step.get("bytes_spilled", 0)
    loaded = step.get("bytes_loaded", 0) + step.get("update_bytes_read", 0) + spilled
    return loaded, step.get("bytes_stored", 0) + step.get("update_bytes_written", 0) + spilled
