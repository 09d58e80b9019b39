"""What a step takes: seconds, and the bytes that its process reads and writes, as the kernel counts them.

``rchar`` and ``wchar`` of ``/proc/self/io`` count calls, served by the page cache or by the disk; ``read_bytes`` and
``write_bytes`` count what reached the device. Asynchronous I/O, which a peer may use, is only in the latter two. Bytes
that a call reads and the device does not deliver were copied from the page cache.
"""

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

COUNTERS = {"read": "rchar", "written": "wchar", "from_disk": "read_bytes", "to_disk": "write_bytes"}
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
    with contextlib.suppress(OSError), open("/proc/self/io", encoding="ascii") as lines:
        fields = dict(line.split(":", 1) for line in lines)
        found |= {name: int(fields[field]) for name, field in COUNTERS.items()}
    return found


def bytes_of_step(steps: Steps) -> tuple[float, float]:
    """Bytes read and written in a step: the median of calls, or the mean of the device where it is more."""
    read, written = (float(statistics.median(step.get(key, 0.0) for step in steps)) for key in ("read", "written"))
    return max(read, from_disk(steps)), max(written, from_disk(steps, "to_disk"))


def from_disk(steps: Steps, key: str = "from_disk") -> float:
    """Bytes of a step that the device delivered. The page cache differs from step to step, so the mean of all."""
    return float(statistics.fmean(step.get(key, 0.0) for step in steps))


def medium_bytes(steps: Steps, *, copied_bytes: float = 0.0) -> dict[str, float]:
    """Bytes of a step by medium, as ``Limits.step_seconds`` takes them; ``copied_bytes`` are those of other copies."""
    read, written = bytes_of_step(steps)
    on_disk = from_disk(steps)
    return {"read_bytes": on_disk, "written_bytes": written, "copied_bytes": copied_bytes + read - on_disk}


def engine_bytes(step: Mapping[str, Any]) -> tuple[float, float]:
    """Bytes of a step that an OffloadModel loaded from its home and stored there; what is spilled passes both ways."""
    spilled = step.get("bytes_spilled", 0)
    loaded = step.get("bytes_loaded", 0) + step.get("update_bytes_read", 0) + spilled
    return loaded, step.get("bytes_stored", 0) + step.get("update_bytes_written", 0) + spilled
