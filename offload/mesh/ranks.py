"""The ranks that share one model: their process groups, the lane of their collectives, how they agree on a plan.

All collectives that move parameters and gradients run on one thread, :attr:`Ranks.lane`, strictly first in, first out,
in a process group of their own: collectives of other code, in other threads, cannot come between them.

Why it cannot deadlock
    Every rank submits the same jobs in the same order: the order of loads and reductions is the plan's, which depends
    on nothing local, and :meth:`Ranks.agree` compares it before each pass. Let ``k`` be the first job that does not end
    on some rank although every rank lives. All jobs before ``k`` end everywhere.

    * A job waits for its collectives, which are the same sequence on all ranks. They end as soon as all have begun job
      ``k``; they do once it is submitted and the jobs before it have ended.
    * A job also waits for the arrivals in ``after``: updates of stored parameters that an optimizer left pending. An
      update waits for the gradients that it uses, which earlier jobs reduced, for updates before it and for files, and
      never for a rank. So it ends. Whether this rank's updates wait for the next load or ran in the step changes
      neither the jobs nor their order.
    * A reduction may wait until means of an earlier one are stored, a copy that waits for files only.
    * The thread that submits jobs blocks only for jobs that it has submitted, for what they wait for, and in
      :meth:`Ranks.agree`, between passes or blocks, for the same thread of other ranks. As long as ``k`` is not
      submitted, these jobs are before ``k``, so it goes on and submits ``k``.

    * On a GPU a job also waits for what compute had queued at its submission: for kernels, and for collectives of the
      user, which all ranks call at the same places of the sequence. Compute waits for jobs that it has submitted.

    Every wait points backwards in the one common sequence, so ``k`` ends: there is none.

Why what fails is not mistaken for something else
    * After a job that failed (a file that cannot be read, a peer that is gone) no later job of this rank communicates:
      its collective would meet another one of the peers. All further calls of the model raise.
    * A rank whose layers raise in a pass submits fewer jobs than the others. These raise at the latest after the
      ``timeout`` of the mesh's process group. :meth:`Ranks.agree` compares the numbers of jobs, so a rank that goes on
      by itself raises as well. If all ranks raised at the same place, all go on.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from offload.mesh.traffic import MESSAGE_BYTES
from offload.partition import aligned
from offload.storage.buffer import device_buffer
from offload.streaming.lane import Arrival, ThreadCopyLane
from pipe.stream import current_stream, record_stream
from pipe.torch_private.distributed import timeout_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from offload.telemetry.statistics import Meter

__all__ = ["CPU", "HOST", "Ranks", "Transport", "check_devices", "transport_for"]


CPU = torch.device("cpu")


@dataclass(frozen=True)
class Transport:
    """How ranks exchange parameters and gradients: in host memory by gloo, or in the memory of their GPUs by nccl.

    ::

        host      home --> staging area --gloo--> staging area --> slot        all in host memory
        device    home --> staging area --nccl--> staging area --> slot        the staging area is on the GPU

    On a device all of it is queued on the stream of the lane of ranks. Homes are read through the page-locked memory of
    their tier, as without a mesh. Messages about plans, and which gradients there are, are bytes of the host in both
    cases and sent by gloo, so no rank waits for its device to compare them.

    Args:
        device: of the staging area, and of what collectives move.
        backend: of the process groups of the lane: by it they exchange tensors of ``device``, and of the host.
    """

    device: torch.device
    backend: str

    def use(self, tensor: Tensor) -> None:
        """Tells the allocator that the current stream uses memory which was allocated on another one.

        Without this, memory of a gradient that is freed here is used again by compute while it is still being read.
        """
        record_stream(tensor, current_stream(self.device))


#: In host memory.
HOST = Transport(CPU, "gloo")


def transport_for(device: torch.device) -> Transport:
    """How ranks that compute on ``device`` exchange bytes."""
    return HOST if device.type == "cpu" else Transport(device, f"cpu:gloo,{device.type}:nccl")


def check_devices(device_type: str, backends: str, device: torch.device) -> str | None:
    """Why a mesh cannot serve a model that computes on ``device``; None if it can.

    ``device_type``: of the mesh; ``backends``: of its process groups, as ``torch.distributed.get_backend_config`` has
    them.
    """
    if device.type not in ("cpu", "cuda"):
        return f"mesh= computes on the CPU and on CUDA devices only, got device={str(device)!r}"
    if device_type != device.type:
        return (
            f"expected a mesh of device_type {device.type!r} for device={str(device)!r}, where ranks gather, got "
            f"{device_type!r}: init_device_mesh({device.type!r}, (ranks,))"
        )
    if device.type == "cpu":
        return None
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


class CollectiveLane(ThreadCopyLane):
    """The thread of collectives. Jobs run in the order of their submission; after one that failed no other does.

    On a CUDA ``device`` they are queued on a stream of the thread, after what compute had queued at their submission.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        super().__init__("ranks", device)
        #: Number of jobs, and the token of the first that failed.
        self.submitted = 0
        self.failed: str | None = None

    def check(self) -> None:
        """Raises RuntimeError after a failure."""
        if self.failed is not None:
            raise RuntimeError(
                f"{self.failed} failed on this rank, so the ranks of the mesh are out of step; end all processes and "
                f"resume from the last checkpoint (torchrun --max-restarts)"
            )

    def submit(self, token: str, copy: Callable[[], None], after: Sequence[Arrival] = ()) -> Arrival:
        """Queues a job."""
        self.submitted += 1

        def job() -> None:
            self.check()
            try:
                for arrival in after:
                    # Update lane -> lane of ranks. Without this, parameters from before the step are gathered.
                    arrival.synchronize()
                copy()
            except BaseException:
                self.failed = token
                raise

        return super().submit(token, job)


class Ranks:
    """The ranks of a ``mesh`` of one dimension (shard) or two (replicate, shard). Made on all of them at the same time.

    Args:
        mesh: its ranks share the model. Those of one row of two dimensions store it together, each row all of it.
        divide_factor: by which a sum of gradients over ranks is divided; None: by the number of ranks.
        meter: counts the bytes that this rank receives from others.
        transport: where collectives move them.

    Raises ValueError if the ranks of the mesh are not in ascending order.
    """

    def __init__(
        self, mesh: DeviceMesh, divide_factor: float | None, meter: Meter, transport: Transport = HOST
    ) -> None:
        last = mesh.ndim - 1
        everybody = mesh.mesh.flatten().tolist()
        if everybody != sorted(everybody):
            raise ValueError(f"expected a mesh of ranks in ascending order, got {everybody} (mesh)")
        self.transport = transport
        #: Ranks that store one model together, and the place of this one among them.
        self.count, self.rank = mesh.size(last), mesh.get_local_rank(last)
        #: Number of all ranks, and the place of this one among them.
        self.total, self.number = len(everybody), everybody.index(mesh.get_rank())
        #: How often the model is stored, and by which row of the mesh this rank is.
        self.replicas, self.replica = (mesh.size(0), mesh.get_local_rank(0)) if last else (1, 0)
        self.divide_factor = float(self.total if divide_factor is None else divide_factor)
        #: The thread of all collectives, and of what is done with their bytes.
        self.lane = CollectiveLane(transport.device)
        self._meter = meter
        self._mesh, self.dimensions = mesh, mesh.ndim
        self._pass = "the construction of a model"
        timeout = timeout_of(mesh.get_group(last), mesh.device_type)

        def new_group(members: Sequence[int], backend: str) -> Any:
            return dist.new_group([*members], backend=backend, timeout=timeout, use_local_synchronization=True)

        rows = [dist.get_process_group_ranks(mesh.get_group(k)) for k in range(mesh.ndim)]
        #: Those of the lane; and one for messages, which are exchanged while the lane may be waiting.
        self._group = new_group(rows[last], transport.backend)
        self._rows = new_group(rows[0], transport.backend) if self.replicas > 1 else None
        #: All ranks, on the thread that runs the model.
        self.everybody = new_group(everybody, "gloo")
        #: The mesh of what is at home.
        self._host_mesh = mesh
        if transport is not HOST:
            self._host_mesh = _mesh_on_host(mesh, [new_group(members, transport.backend) for members in rows])
        self._staging = torch.empty(0)

    def staging(self, nbytes: int) -> Tensor:
        """Flat bytes that all collectives of the lane use: pieces of a shard of all ranks. On the lane only."""
        if self._staging.numel() < nbytes:
            self._staging = torch.empty(0)  # freed before the larger one is made
            self._staging = device_buffer(nbytes, self.transport.device)
        return self._staging[:nbytes]

    def mesh_of(self, local: Tensor) -> DeviceMesh:
        """The mesh of a DTensor whose local part is ``local``: DTensors have theirs on the device of their mesh."""
        return self._host_mesh if local.device.type == "cpu" else self._mesh

    # --- collectives, on the lane ---------------------------------------------------------------------------------

    def all_gather(self, staging: Tensor) -> None:
        """Fills ``staging``, of one row of bytes a rank, with the rows of the others. On the lane only."""
        with self._collective(f"gathering the parameters of a shard in {self._pass}"):
            _all_gather(staging.view(-1), staging[self.rank], self._group)
        self._meter.bytes_gathered += staging[0].numel() * (self.count - 1)

    def reduce(self, received: Tensor, sent: Tensor) -> None:
        """Fills row ``r`` of ``received`` with this rank's row of what rank ``r`` has ``sent``. On the lane only."""
        with self._collective(f"reducing the gradients of a shard in {self._pass}"):
            dist.all_to_all_single(received.view(-1), sent.view(-1), group=self._group)
        self._meter.bytes_reduced += sent[0].numel() * (self.count - 1)

    def any_rank_has(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag whether any rank has set it. By messages of the host, on the lane only."""
        found = torch.zeros(aligned(len(flags)), dtype=torch.uint8)
        found[: len(flags)] = torch.tensor(flags, dtype=torch.uint8)
        with self._collective(f"reducing the gradients of a shard in {self._pass}"):
            for group, count in ((self._group, self.count), (self._rows, self.replicas)):
                if group is not None:
                    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=group)
                    self._meter.bytes_reduced += found.numel() * (count - 1)
        return [bool(flag) for flag in found[: len(flags)].tolist()]

    def add_replicas(self, tensors: Iterable[Tensor], nbytes: int) -> None:
        """Adds each tensor over the replicas of what this rank stores, in place. On the lane only.

        A ring adds each element once, so all have the same bits. ``nbytes``: of the tensors, as they are counted, the
        same on all ranks.
        """
        if self._rows is None:
            return
        with self._collective(f"adding gradients in {self._pass}"):
            for tensor in tensors:
                dist.all_reduce(tensor, group=self._rows)
        # One piece of each rank, twice.
        self._meter.bytes_reduced += 2 * -(-nbytes // self.replicas) * (self.replicas - 1)

    def copy_first_replica(self, tensor: Tensor) -> None:
        """Gives ``tensor``, the home of a shard, the values of the first row of the mesh, while the lane has no job."""
        if self._rows is not None:
            with self._collective("copying the first replica"):
                dist.broadcast(tensor, dist.get_global_rank(self._rows, 0), self._rows)

    def copied_from_first(self, tensor: Tensor) -> Tensor:
        """The values that ``tensor`` has on the first rank of the mesh, in new memory."""
        copy = tensor.detach().clone(memory_format=torch.preserve_format)
        values = copy.cpu().contiguous()
        dist.broadcast(values.view(-1).view(torch.uint8), dist.get_global_rank(self.everybody, 0), self.everybody)
        return copy if values is copy else copy.copy_(values)

    # --- agreement, on the thread that runs the model -------------------------------------------------------------

    def exchange(self, answer: Any) -> list[Any]:
        """What each rank answers, in the order of all ranks; each a small object."""
        self.lane.check()
        answers: list[Any] = [None] * self.total
        with self._collective("meeting"):
            dist.all_gather_object(answers, answer, group=self.everybody)
        return answers

    def agree(self, what: str, text: str, number: float = 0.0, *, everywhere: bool = False) -> list[float]:
        """Compares ``text``, words of which ``what`` is the title, over all ranks.

        Returns the ``number`` of each rank that stores the model together with this one; ``everywhere``: of all ranks.

        Raises RuntimeError on all ranks if the texts differ, with the first word that does.
        """
        self.lane.check()
        text = f"{self.lane.submitted}-collectives-before {text}"
        digest = hashlib.sha256(f"{what} {text}".encode()).digest()
        messages = torch.zeros(self.total, MESSAGE_BYTES, dtype=torch.uint8)
        mine = messages[self.number]
        mine[:] = torch.frombuffer(bytearray(digest + struct.pack("<d", number)), dtype=torch.uint8)
        with self._collective(f"meeting before {what}"):
            _all_gather(messages.view(-1), mine, self.everybody)
        self._meter.bytes_agreed += MESSAGE_BYTES * (self.total - 1)
        rows = [bytes(row.tolist()) for row in messages]
        if any(row[:32] != digest for row in rows):
            texts = self.exchange((what, text))
            raise RuntimeError(_difference(texts))
        self._pass = what
        first = self.replica * self.count
        asked = rows if everywhere else rows[first : first + self.count]
        return [struct.unpack("<d", row[32:])[0] for row in asked]

    @contextlib.contextmanager
    def _collective(self, what: str) -> Iterator[None]:
        """A context of a collective, after whose failure no other one runs."""
        try:
            yield
        except RuntimeError as error:
            self.lane.failed = self.lane.failed or what
            raise RuntimeError(
                f"{what} failed: another rank raised, ended, or did not come in time (torchrun names the one that "
                f"ended first). End all processes and resume from the last checkpoint (torchrun --max-restarts). This "
                f"rank saw: {next(iter(str(error).splitlines()), '')}"
            ) from error


def _all_gather(staging: Tensor, mine: Tensor, group: Any) -> None:
    """Fills flat ``staging``, of which ``mine`` is a part, from all ranks."""
    # The name that is kept since torch 2.13; before there is only the other one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(staging, mine, group=group)


def _mesh_on_host(mesh: DeviceMesh, groups: Sequence[Any]) -> DeviceMesh:
    """The same ranks as a mesh of the CPU, where homes are; ``groups``: of each dimension."""
    from torch.distributed.device_mesh import DeviceMesh

    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], "cpu", mesh_dim_names=mesh.mesh_dim_names)
    names = mesh.mesh_dim_names or ("replicate", "shard")
    return DeviceMesh.from_group([*groups], "cpu", mesh=mesh.mesh, mesh_dim_names=names)


def _difference(texts: list[tuple[str, str]]) -> str:
    """Names the first word in which a rank differs from rank 0."""
    what, words = texts[0][0], texts[0][1].split()
    for rank, (other_what, other) in enumerate(texts):
        if other_what != what:
            return f"ranks of one mesh run different calls: rank 0 begins {what}, rank {rank} begins {other_what}"
        for place, (mine, theirs) in enumerate(zip_longest(words, other.split(), fillvalue="the end")):
            if mine != theirs:
                before = " ".join(words[max(0, place - 4) : place]) or "the beginning"
                return (
                    f"ranks of one mesh differ in {what}: after {before}, rank 0 has {mine} and rank {rank} has "
                    f"{theirs} (word {place + 1}); build the same model on all ranks, and call it in the same order"
                )
    raise AssertionError
