"""Ranks of a case: their environment, their gloo process group, and what their sockets receive."""

import contextlib
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=5)  # of a collective: less than a step may take, more than a case may lack its peers
_BYTES_RECEIVED = 128  # the offset of tcpi_bytes_received in struct tcp_info of Linux


def torchrun_environments(ranks: int) -> list[dict[str, str]]:
    """What torchrun sets for each of so many ranks on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]


class Ranks:
    """This process among those of its case, whose environment is that of torchrun; else it is the only one."""

    def __init__(self, device: str = "cpu") -> None:
        from torch.distributed.device_mesh import init_device_mesh

        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        if not dist.is_initialized():
            dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=TIMEOUT, **alone)
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        self.mesh: Any = init_device_mesh(torch.device(device).type, (self.count,))

    def mean(self, value: float) -> float:
        """The mean over ranks."""
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return float(total) / self.count


def bytes_received() -> int:
    """Bytes that the open TCP connections of this process have received, as the kernel counts them; 0 elsewhere.

    These are the collectives of gloo, whichever library asks for them, and some messages at the store of the group.
    """
    if not hasattr(socket, "TCP_INFO") or not os.path.isdir("/proc/self/fd"):
        return 0
    total = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    total += _received(connection)
    return total


def _received(connection: socket.socket) -> int:
    if connection.type != socket.SOCK_STREAM or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return 0
    told = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED + 8)
    return int(struct.unpack_from("<Q", told, _BYTES_RECEIVED)[0]) if len(told) >= _BYTES_RECEIVED + 8 else 0
