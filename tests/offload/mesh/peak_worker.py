"""How much memory a rank takes beside what one process takes for the same model and rows, with homes in files.

Run as ``python -m tests.offload.mesh.peak_worker FOLDER``; prints for each case the bytes of a shard, the peak of one
process, and those of two ranks. Each is a process of its own, whose allocator gives freed memory back.

Copies of gradients, and collectives, run when they are waited for: so all that may be held at once is.
"""

from __future__ import annotations

import ctypes
import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from offload import OffloadModel, OffloadOptimizer
from offload.streaming.lane import CopyLanes, ThreadCopyLane
from offload.telemetry.peak import PeakMeter, anonymous_bytes
from tests.offload.mesh.forked import check_claims
from tests.offload.mesh.mesh_worker import LateLane

SHARDS = 3
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8
#: Steps that are measured, after those in which code is loaded, files are made, and the heap grows to what it needs.
#: All hold the same; what threads have not freed yet when others allocate comes on top, so the least one counts.
MEASURED = 3
#: Bytes of code by which a step may differ: pages that are read or dropped count in the peak as memory does.
CODE_BYTES = 1 << 17


def one_matrix() -> nn.Module:
    return nn.Linear(1536, 1536, bias=False)


def several() -> nn.Module:
    return nn.Sequential(nn.Linear(1024, 1536), nn.Tanh(), nn.Linear(1536, 1024), nn.Tanh(), nn.Linear(1024, 1024))


#: Layers of a shard; steps before; whether AdamW updates them, clipped, through one I/O buffer: how many of several are
#: in use is a matter of time.
CASES: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "one matrix": (one_matrix, 1, False),
    "several, updated": (several, 2, True),
}


def _lane(name: str, device: torch.device) -> Any:
    return LateLane() if name == "drain" else ThreadCopyLane(name, device)


def file_bytes() -> int:
    """Bytes of resident pages that files back."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[2]) * resource.getpagesize()


def measure(folder: Path, case: str) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 17)
    libc.mallopt(M_ARENA_MAX, 1)  # else what is left free depends on the threads that took it
    torch.manual_seed(0)
    begin = anonymous_bytes()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    make, before, updated = CASES[case]
    layers = [make() for _ in range(SHARDS)]
    x = torch.randn(4, next(layers[0].parameters()).shape[1])
    shard_bytes = sum(p.nbytes for p in layers[0].parameters())
    home = folder / f"{case} {mesh is not None}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.mesh.ranks.CollectiveLane", LateLane)
        patch.setattr("offload.mesh.sharding.ThreadCopyLane", _lane)
        names = ("load", "drain", "boundary")
        patch.setattr(
            "offload.construction.open_lanes", lambda device, **_: CopyLanes(*(_lane(n, device) for n in names))
        )
        model = OffloadModel(nn.Sequential(*layers), "cpu", home, SHARDS, checkpoint_activation=True, mesh=mesh)
        patch.setattr("offload.optim.io_buffers.IO_BUFFERS", 1)
        optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=1.0) if updated else None
    del layers
    meter, peaks = PeakMeter(torch.device("cpu")), []
    for step in range(before + MEASURED):
        meter.begin()
        floor, code = anonymous_bytes(), file_bytes()
        model(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        rise, same = meter.rise(), abs(file_bytes() - code) <= CODE_BYTES
        if step >= before and rise is not None and same:
            peaks.append(floor + rise - begin)
    which = f"{dist.get_world_size()} {dist.get_rank()}" if mesh is not None else "1 0"
    (folder / f"{case} {which}").write_text(json.dumps([shard_bytes, min(peaks, default=0)]), encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    stages = [(ranks, {case: partial(measure, folder, case)}) for case in CASES for ranks in (1, 2)]
    broken = check_claims(stages, folder)
    assert not any(broken.values()), broken
    found = {}
    for case in CASES:
        paths = [folder / f"{case} {which}" for which in ("1 0", "2 0", "2 1")]
        numbers = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        found[case] = {"shard": numbers[0][0], "alone": numbers[0][1], "ranks": [peak for _, peak in numbers[1:]]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
