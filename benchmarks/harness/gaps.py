"""One step under ``torch.profiler``: for how long the device computes, copies and stands still, and why it does.

A gap lies between two kernels. Until the launch of the next kernel it is the host's: it waits for the device, or it
runs. From then on the kernel waits, for a copy if one is under way.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch.profiler import ProfilerActivity, profile

WAIT = "cudaDeviceSynchronize"  # the first one ends where the step begins, the last one ends it
LAUNCHES = ("cuda_runtime", "cuda_driver")

Interval: TypeAlias = tuple[float, float]
Event: TypeAlias = dict[str, Any]


def trace(step: Callable[[], object], keep: Path | None = None) -> dict[str, float]:
    """Milliseconds of one step by what the device does (:func:`gaps_of`); ``keep`` is a file for torch's trace."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:  # operations of the host would slow it down
        torch.cuda.synchronize()
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return gaps_of([event for event in events if event.get("ph") == "X"])  # the complete ones


def gaps_of(events: Sequence[Event]) -> dict[str, float]:
    """Milliseconds of the traced step, and how many kernels it launched.

    ``step`` is ``kernels`` and the four kinds of gaps; ``to_device`` and ``to_host`` count copies, hidden or not.
    """
    ends = sorted(_interval(e)[1] for e in events if e["name"] == WAIT)
    whole = ends[0], ends[-1]
    launched = {e["args"]["correlation"]: e["ts"] for e in events if e.get("cat") in LAUNCHES}
    kernels = [e for e in events if e.get("cat") in ("kernel", "gpu_memset")]
    launches = {e["ts"]: launched.get(e["args"]["correlation"], e["ts"]) for e in kernels}
    copies = [e for e in events if e.get("cat") == "gpu_memcpy"]
    under_way, computing = (_union(map(_interval, some)) for some in (copies, kernels))
    waits = _union(_interval(e) for e in events if e.get("cat") == "cuda_runtime" and "Synchronize" in e["name"])
    found = dict.fromkeys(("host_runs", "host_waits", "copies", "other"), 0.0)
    idle = whole[0]
    for begin, end in computing:
        late = min(max(launches[begin], idle), begin)
        copied, waited = _shared((late, begin), under_way), _shared((idle, late), waits)
        found["copies"] += copied
        found["other"] += begin - late - copied
        found["host_waits"] += waited
        found["host_runs"] += late - idle - waited
        idle = end
    left = _shared((idle, whole[1]), under_way)  # after the last kernel: copies, and what the host does beside them
    found["copies"] += left
    found["host_runs"] += whole[1] - idle - left
    found |= {"step": whole[1] - whole[0], "kernels": _length(computing)}
    for name, kind in (("to_device", "HtoD"), ("to_host", "DtoH")):
        found[name] = _length(_union(_interval(e) for e in copies if kind in e["name"]))
    return {name: microseconds / 1e3 for name, microseconds in found.items()} | {"launches": len(kernels)}


def _interval(event: Event) -> Interval:
    return event["ts"], event["ts"] + event["dur"]


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times in intervals that do not touch, in order."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)


def _shared(interval: Interval, others: Sequence[Interval]) -> float:
    """How long an interval overlaps any of others, which do not touch."""
    begin, end = interval
    return sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in others)
