"""``MemoryPolicy``: how much memory a model may use for training, and what of it is fixed instead of planned."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from inspect import signature
from typing import Any

import torch
from torch.utils.checkpoint import SelectiveCheckpointContext

from offload.storage.buffer import has_own_memory
from offload.units import parse_bytes

__all__ = ["DEFAULT_MEMORY", "PLACES", "MemoryPolicy", "numbers_of", "policy_of"]

#: What ``memory=None`` means where neither shards nor recomputation are given.
DEFAULT_MEMORY: str | None = "auto"

#: The two places of a mapping: where layers compute, and the host's memory.
PLACES = ("device", "host")

Bytes = int | str
_LEAST = {"activation_bytes": 1}


@dataclass(frozen=True, init=False)
class MemoryPolicy:
    """The memory that training may use. One number bounds all of it; a field fixes one use, and None lets the plan.

    Everything counts that the model, its :class:`~offload.OffloadOptimizer` and its GradCache steps hold on the compute
    device and, where that is the CPU, in host memory: slots, gradients, boundaries, activations and gradients inside a
    cell, graphs that are kept, parameters that are in no shard (with gradients and states), buffers of optimizers and
    of copies, and homes in host memory. All sizes are bytes or strings such as ``"2GiB"``; once made, the policy holds
    them in bytes.

    Args:
        memory: bytes, or a string such as ``"2GiB"``; or a mapping ``{"device": ..., "host": ...}`` where the compute
            device has memory of its own, with ``"auto"`` for a place that is left out; or ``"auto"``: 90 % of what the
            machine has free when the model is made (see below). One number is for the compute device.
        slots: shards that the compute device holds at once, at least 2. Slots beyond that are a cache.
        boundary_bytes: activations between shards on the compute device; the others are stored with the shards and
            read back ahead of use. Only with recomputation.
        activation_bytes: activations of one cell. The chunks of :meth:`OffloadModel.forward_chunks` run together as far
            as they fit, and as a fourth of the number for the device holds; a trial forward measures one chunk of each
            kind. None: each chunk is a cell, whatever the plan. ``GradCache(chunk_sizes="auto")`` chooses as many rows
            as fit; None: in a fourth of the number for the device, or in half of what is free.
        graph_bytes: graphs between forward and backward: the cells that backward begins with keep theirs as far as
            they fit, and are not recomputed, from the second step on (the first one measures). Only with recomputation.
        gradient_bytes: gradients that wait in host memory for the update of an ``OffloadOptimizer``, where homes are
            on disk. Those that fit are neither written nor read: 4 bytes less of each.
        resident_bytes: shards that rest in host memory although their home is a file. Beside a GPU, as many as the
            number for the host allows, in page-locked memory; gradients of the others wait in what is left.
        join_chunks: which chunks may run together, where ``activation_bytes`` says how many. None: where layers draw
            no random numbers and do not look across rows; True: also where they draw; False: none. Batch normalisation
            that trains keeps chunks apart in any case, and so does a mesh.
        update_on: ``"host"``: an ``OffloadOptimizer`` updates all shards on the host. None: those that rest on a GPU
            are updated there, where the same update may round otherwise.
        keep: operations whose results recomputed cells keep, so that they are not computed again (the selective
            checkpointing of torch): ``"attention"`` for its fused kernels, or overloads such as
            ``[torch.ops.aten.mm.default]``. Not those of calls that draw random numbers. Each graph takes one backward.
            Nothing inside of compiled blocks is kept.

    Raises:
        TypeError, ValueError: with a line for each field that cannot be used.

    ``"auto"`` is measured: on the host the least of ``MemAvailable`` and of what each control group above the process
    leaves (``memory.max - (memory.current - inactive_file)``); on a GPU what torch's allocator can still get. Models of
    one process that say ``"auto"`` share it equally, after what others were given by number and do not use yet; ranks
    on one host (``LOCAL_WORLD_SIZE``) share it, too. It is never less than the leanest plan needs.
    """

    memory: int | str | Mapping[str, int | str] = field(hash=False)
    slots: int | None
    boundary_bytes: int | None
    activation_bytes: int | None
    graph_bytes: int | None
    gradient_bytes: int | None
    resident_bytes: int | None
    join_chunks: bool | None
    update_on: str | None
    keep: str | tuple[Any, ...]

    def __init__(
        self,
        memory: Bytes | Mapping[str, Bytes] = "auto",
        *,
        slots: int | None = None,
        boundary_bytes: Bytes | None = None,
        activation_bytes: Bytes | None = None,
        graph_bytes: Bytes | None = None,
        gradient_bytes: Bytes | None = None,
        resident_bytes: Bytes | None = None,
        join_chunks: bool | None = None,
        update_on: str | None = None,
        keep: str | Collection[Any] = (),
    ) -> None:
        given = {name: value for name, value in locals().items() if name != "self"}
        wrong: list[Exception] = []
        for name, value in given.items():
            try:
                check: Callable[[Any, str], Any] = _CHECKS.get(name, _size)
                object.__setattr__(self, name, check(value, name))
            except (TypeError, ValueError) as error:
                wrong.append(error)
        if wrong:
            kind = TypeError if all(isinstance(error, TypeError) for error in wrong) else ValueError
            raise kind("\n".join(map(str, wrong)))

    @classmethod
    def fixed(cls, **given: Any) -> MemoryPolicy:
        """A policy that leaves nothing to plan and has no limit, for use of memory that is tuned by hand.

        ``given``: its fields. What is left out or None: 2 slots, 64 MiB of boundaries, and no bytes of graphs,
        gradients or resident shards.
        """
        found: dict[str, Any] = {"slots": 2, "boundary_bytes": "64MiB"}
        found |= {"graph_bytes": 0, "gradient_bytes": 0, "resident_bytes": 0}
        return cls(**(found | {name: value for name, value in given.items() if value is not None}))

    @property
    def plans(self) -> bool:
        """Whether anything is left to plan (also which shards are resident), or there is a limit to keep."""
        fields = (self.slots, self.boundary_bytes, self.graph_bytes, self.gradient_bytes)
        return self.memory != "auto" or None in fields or self.resident_bytes != 0

    def __repr__(self) -> str:
        given = [repr(self.memory)] if self.memory != "auto" else []
        given += [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)
            if one.name != "memory" and getattr(self, one.name) not in (None, ())
        ]
        return f"{type(self).__name__}({', '.join(given)})"

    def limit_of(self, place: str) -> int | None:
        """Bytes for ``"device"`` or ``"host"``; None for ``"auto"``. One number is for the device."""
        if isinstance(self.memory, Mapping):
            value = self.memory.get(place, "auto")
        else:
            value = self.memory if place == "device" else "auto"
        return value if isinstance(value, int) else None


def numbers_of(policy: MemoryPolicy, device: torch.device) -> tuple[int | None, int | None]:
    """Bytes for the compute device and for host memory, None for ``"auto"``; equal on the CPU.

    Raises ValueError if a policy has two different numbers for the CPU.
    """
    on_device, on_host = policy.limit_of("device"), policy.limit_of("host")
    if has_own_memory(device):
        return on_device, on_host
    if on_device is not None and on_host is not None and on_device != on_host:
        raise ValueError(
            f"expected one number where the compute device is the CPU, whose memory is the host's, got "
            f"memory={policy.memory!r}; pass memory={on_host}"
        )
    one = on_device if on_device is not None else on_host
    return one, one


def _memory(value: Any, name: str) -> int | str | dict[str, int | str]:
    if not isinstance(value, Mapping):
        return "auto" if isinstance(value, str) and value == "auto" else parse_bytes(value, name)
    unknown = [key for key in value if key not in PLACES]
    if unknown or not value:
        named = ", ".join(map(repr, unknown)) or "an empty mapping"
        raise ValueError(f"expected 'device', 'host' or both, got {named} ({name})")
    return {k: "auto" if nbytes == "auto" else parse_bytes(nbytes, f"{name}[{k!r}]") for k, nbytes in value.items()}


def _slots(value: Any, name: str) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected an integer of at least 2, got {name}={value!r}")
    if value < 2:
        raise ValueError(f"expected an integer of at least 2, got {name}={value!r}: one computes, one is loaded ahead")
    return value


def _flag(value: Any, name: str) -> bool | None:
    if value is not None and not isinstance(value, bool):
        raise TypeError(f"expected True, False or None, got {name}={value!r}")
    return value


def _place(value: Any, name: str) -> str | None:
    if value not in (None, "host"):
        raise ValueError(f"expected 'host' or None, got {name}={value!r}")
    return None if value is None else "host"


def _operations(value: Any, name: str) -> str | tuple[Any, ...]:
    attention = isinstance(value, str) and value == "attention"
    listed = not isinstance(value, str) and isinstance(value, Collection)
    if not (attention or (listed and all(hasattr(operation, "_schema") for operation in value))):
        raise TypeError(f"expected 'attention' or overloads such as torch.ops.aten.mm.default, got {name}={value!r}")
    if value and "op_output" not in signature(SelectiveCheckpointContext).parameters:
        raise ValueError(f"{name}= needs a later torch than {torch.__version__}, which does not tell what is kept")
    return "attention" if attention else (*value,)


def _size(value: Any, name: str) -> int | None:
    return None if value is None else parse_bytes(value, name, least=_LEAST.get(name, 0))


_CHECKS: Mapping[str, Callable[[Any, str], Any]] = {
    "memory": _memory,
    "slots": _slots,
    "join_chunks": _flag,
    "update_on": _place,
    "keep": _operations,
}


def policy_of(memory: Any) -> MemoryPolicy | None:
    """The policy that an argument ``memory`` stands for; None for None."""
    return memory if memory is None or isinstance(memory, MemoryPolicy) else MemoryPolicy(memory)
