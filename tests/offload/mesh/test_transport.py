"""What ranks exchange on GPUs, without one: which memory it is in, in what order, and which meshes are taken.

Sums and bytes are those of ``test_mesh.py``, whose ranks exchange so as well.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from offload.mesh.ranks import CollectiveLane, check_devices
from tests.late_cuda import DEVICE, LateCuda


def test_collectives_follow_compute_and_are_done_when_they_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute reads a slot, late, which a later load overwrites."""
    cuda, slot, read = LateCuda(monkeypatch), torch.zeros(4), torch.ones(4)
    lane = CollectiveLane(DEVICE)
    cuda.launch(lambda: read.copy_(slot))
    first = lane.submit("L0", lambda: cuda.launch(lambda: slot.fill_(7)))
    lane.submit("R0", lambda: cuda.launch(lambda: slot.mul_(2)), [first]).wait()
    assert (slot == 14).all()
    assert not read.any()
    lane.close()


NCCL, GLOO = "cuda:nccl", "cpu:gloo,cuda:gloo"


@pytest.mark.parametrize(
    ("mesh", "backends", "device", "words"),
    [
        ("cpu", GLOO, "cpu", None),
        ("cpu", "cpu:gloo", "cuda:1", "init_device_mesh('cuda', (ranks,))"),
        ("cuda", NCCL, "cpu", "init_device_mesh('cpu', (ranks,))"),
        ("cuda", NCCL, "cuda:1", None),
        ("cuda", f"cpu:gloo,{NCCL}", "cuda:1", None),
        ("cuda", GLOO, "cuda:1", "init_process_group('nccl')"),
        ("cuda", NCCL, "cuda:0", "torch.cuda.set_device(0)"),
        ("xpu", "xpu:xccl", "xpu:0", "CUDA devices only"),
    ],
)
def test_a_mesh_that_cannot_serve_the_device_is_refused(
    mesh: str, backends: str, device: str, words: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(dist, "is_gloo_available", lambda: True, raising=False)
    found = check_devices(mesh, backends, torch.device(device))
    assert found is None if words is None else found is not None and words in found
