"""How much memory a rank takes beside what one process takes for the same model and rows, with homes in files.

Run as ``python -m tests.offload.mesh.peak_worker FOLDER``; prints for each case the bytes of a shard, the peak of one
process, and those of two ranks. Each is a process of its own, whose allocator gives freed memory back.

Copies of gradients, and collectives, run when they are waited for: so all that may be held at once is.
"""

from __future__ import annotations

import ctypes
import json
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
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3


def one_matrix() -> nn.Module:
    return nn.Linear(1536, 1536, bias=False)


def several() -> nn.Module:
    return nn.Sequential(nn.Linear(768, 1152), nn.Tanh(), nn.Linear(1152, 768), nn.Tanh(), nn.Linear(768, 768))


#: Layers of a shard; steps; whether AdamW updates them, clipped.
CASES: dict[str, tuple[Callable[[], nn.Module], int, bool]] = {
    "one matrix": (one_matrix, 2, False),
    "several": (several, 2, False),
}


def _lane(name: str, device: torch.device) -> Any:
    return LateLane() if name == "drain" else ThreadCopyLane(name, device)


def measure(folder: Path, case: str) -> None:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_THRESHOLD, 1 << 17)
    libc.mallopt(M_TRIM_THRESHOLD, 1 << 17)
    torch.manual_seed(0)
    begin = anonymous_bytes()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if dist.is_initialized() else None
    make, steps, updated = CASES[case]
    layers = [make() for _ in range(SHARDS)]
    x = torch.randn(4, next(layers[0].parameters()).shape[1])
    shard_bytes = sum(p.nbytes for p in layers[0].parameters())
    home = folder / f"{case} {mesh is not None}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.mesh.ranks.CollectiveLane", LateLane)
        patch.setattr("offload.mesh.sharding.ThreadCopyLane", _lane)
        names = ("load", "drain", "boundary")
        patch.setattr("offload.model.open_lanes", lambda device, **_: CopyLanes(*(_lane(n, device) for n in names)))
        model = OffloadModel(nn.Sequential(*layers), "cpu", home, SHARDS, checkpoint_activation=True, mesh=mesh)
    del layers
    optimizer = OffloadOptimizer(model, torch.optim.AdamW, max_norm=1.0) if updated else None
    meter, peaks = PeakMeter(torch.device("cpu")), [0]
    for _ in range(steps):
        meter.begin()
        floor = anonymous_bytes()
        model(x).square().mean().backward()
        if optimizer is not None:
            optimizer.step()
        model.zero_grad()
        if (rise := meter.rise()) is not None:
            peaks.append(floor + rise - begin)
    which = f"{dist.get_world_size()} {dist.get_rank()}" if mesh is not None else "1 0"
    (folder / f"{case} {which}").write_text(json.dumps([shard_bytes, max(peaks)]), encoding="utf-8")


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
