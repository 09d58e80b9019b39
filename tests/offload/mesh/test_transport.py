"""What ranks exchange on GPUs, without one: which memory it is in, in what order, and which meshes are taken.

Sums and bytes are those of ``test_mesh.py``, whose ranks exchange so as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from offload.mesh import ranks as of_ranks
from offload.mesh.gradients import ReplicatedGradients, means_of_parts
from offload.mesh.parts import Part, WholePart, offsets_of
from offload.mesh.ranks import CollectiveLane, Ranks, Transport, check_devices
from offload.mesh.shard import gather_parts
from tests.late_cuda import DEVICE, LateCuda

META = torch.device("meta")


class Alone(Ranks):
    """One of two ranks, whose collectives end at once: its tensors are without values."""

    def __init__(self) -> None:
        self.transport = Transport(META, "", adds=True)
        self.count, self.rank, self.replicas, self.replica = 2, 0, 1, 0
        self.divide_factor = 2.0
        self._staging = torch.empty(0)
        self.devices: set[torch.device] = set()

    def all_gather(self, staging: Tensor) -> None:
        self.devices.add(staging.device)

    def reduce(self, received: Tensor, sent: Tensor, dtype: torch.dtype) -> None:
        assert received.shape == (1 if dtype == torch.float32 else 2, sent.shape[1])
        self.devices |= {received.device, sent.device}

    def all_reduce(self, tensors: Iterable[Tensor], nbytes: int, *, replicas: bool = False) -> None:
        self.devices.update(tensor.device for tensor in tensors)

    def any_rank_has(self, flags: Sequence[bool], *, replicas: bool = False) -> list[bool]:
        return [*flags]


def parameters() -> list[Tensor]:
    """Of two types; the second is not stored as its gradient is."""
    return [
        torch.empty(5, 3, device=META),
        torch.empty(4, 6, 2, 2, device=META).to(memory_format=torch.channels_last),
        torch.empty(7, dtype=torch.bfloat16, device=META),
    ]


def test_what_collectives_move_is_on_the_device() -> None:
    """A copy into host memory of what has no values raises, as any operation between both does."""
    ranks, whole = Alone(), parameters()
    parts = [Part.of("", each, 2) for each in whole]
    offsets, nbytes = offsets_of(parts)
    flat = [part.flat(each) for part, each in zip(parts, whole, strict=True)]
    gather_parts(parts, offsets, nbytes, flat, lambda memory, begin: None, ranks)
    means = means_of_parts(parts, [each.contiguous() for each in whole], ranks)
    assert [None if mean is None else mean.dtype for mean in means] == [each.dtype for each in whole]
    ours = [nn.Parameter(each) for each in whole]
    replicated = ReplicatedGradients({p: WholePart.of("", p, 2) for p in ours}, ranks)
    found = replicated._means(ours, {ours[0]: torch.empty_like(ours[0])})
    assert {tensor.device for tensor in (*means, found[0][1]) if tensor is not None} == {META}
    assert len(found) == 1
    assert ranks.devices == {META}


def test_gradients_that_are_freed_on_the_lane_are_known_to_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else compute would use their memory again while the stream of the lane reads it."""
    used: list[tuple[tuple[int, ...], object]] = []
    monkeypatch.setattr(of_ranks, "current_stream", lambda device: "lane")
    monkeypatch.setattr(of_ranks, "record_stream", lambda tensor, stream: used.append((tuple(tensor.shape), stream)))
    whole = parameters()
    means_of_parts([Part.of("", each, 2) for each in whole], [*whole], Alone())
    assert used == [(tuple(each.shape), "lane") for each in whole]


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
