"""Where ranks exchange parameters and gradients: in host memory by gloo, or in the memory of their GPUs by nccl.

::

    host      home --> staging area --gloo--> staging area --> slot               all in host memory
    device    home --> staging area --nccl--> staging area --> slot               the staging area is on the GPU
              gradients --> staging area --nccl--> sum of this rank's part --> home

On a device all of it is queued on the stream of the lane of ranks. Homes are read through the page-locked memory of
their tier, as without a mesh. Messages about plans, and which gradients there are, are bytes of the host in both cases
and sent by gloo, so no rank waits for its device to compare them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from offload.mesh.parts import Part
from offload.storage.buffer import device_buffer
from pipe.stream import current_stream, record_stream

__all__ = ["CPU", "HOST", "Transport", "check_devices", "transport_for"]

CPU = torch.device("cpu")
#: Bytes of an element from which sums in its own type are as exact as those in the type of homes.
_WIDE_BYTES = 4


@dataclass(frozen=True)
class Transport:
    """How the lane of ranks moves bytes.

    Args:
        device: of the staging area, and of what collectives move.
        backend: of the process groups of the lane: by it they exchange tensors of ``device``, and of the host.
        adds: whether collectives add gradients (``reduce_scatter_tensor``); else each rank adds what it receives.
    """

    device: torch.device
    backend: str
    adds: bool

    def memory(self, nbytes: int) -> Tensor:
        """Flat bytes of the staging area."""
        return device_buffer(nbytes, self.device)

    def adds_in(self, dtype: torch.dtype) -> bool:
        """Whether gradients of a type are added by the collective, in this type.

        Others are sent to the rank that stores them, which adds them in float32: after each addition in 16 bits the
        sum would be rounded.
        """
        return self.adds and dtype.to_real().itemsize >= _WIDE_BYTES

    def together(self, parts: Sequence[Part]) -> list[list[int]]:
        """The positions of parts whose gradients may be sent by one collective: of one type, if it adds them."""
        if not self.adds:
            return [[*range(len(parts))]]
        types = dict.fromkeys(part.dtype for part in parts)
        return [[k for k, part in enumerate(parts) if part.dtype == dtype] for dtype in types]

    def use(self, tensor: Tensor) -> None:
        """Tells the allocator that the current stream uses memory which was allocated on another one.

        Without this, memory of a gradient that is freed here is used again by compute while it is still being read.
        """
        record_stream(tensor, current_stream(self.device))


#: In host memory.
HOST = Transport(CPU, "gloo", adds=False)


def transport_for(device: torch.device) -> Transport:
    """How ranks that compute on ``device`` exchange bytes."""
    return HOST if device.type == "cpu" else Transport(device, f"cpu:gloo,{device.type}:nccl", adds=True)


def check_devices(device_type: str, backends: str, device: torch.device) -> str | None:
    """Why a mesh cannot serve a model that computes on ``device``; None if it can.

    ``device_type``: of the mesh; ``backends``: of its process groups, as ``torch.distributed.get_backend_config`` has
    them.
    """
    if device.type == "cpu":
        if device_type == "cpu":
            return None
        return (
            f"expected a mesh of device_type 'cpu' for device='cpu', got {device_type!r}: "
            f"init_device_mesh('cpu', (ranks,))"
        )
    if device.type != "cuda":
        return f"mesh= computes on the CPU and on CUDA devices only, got device={str(device)!r}"
    if device_type != "cuda":
        return (
            f"expected a mesh of device_type 'cuda' for device={str(device)!r}, where ranks gather, got "
            f"{device_type!r}: init_device_mesh('cuda', (ranks,))"
        )
    if "cuda:nccl" not in backends.split(","):
        return (
            f"expected a mesh with the backend nccl for device={str(device)!r}, got {backends}: "
            f"init_process_group('nccl')"
        )
    if torch.cuda.current_device() != device.index:
        return (
            f"expected the current CUDA device to be that of the model, where nccl and DTensors put what has no index, "
            f"got cuda:{torch.cuda.current_device()} and device={str(device)!r}: call "
            f"torch.cuda.set_device({device.index}) before the mesh is made"
        )
    if not dist.is_gloo_available():
        return "mesh= on a GPU needs a torch built with gloo as well, by which ranks compare their plans"
    return None
