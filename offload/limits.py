"""Shares the memory of a machine among the models of this process, and among the ranks of one host.

A model that is given a number keeps it. Models that say ``"auto"`` get equal parts of the rest, measured when the first
of them asks after a model was made or has ended: 90 % of what is free, and what they use already, less what numbers
promise to other models that do not use it yet.
"""

from __future__ import annotations

import itertools
import os
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

from offload.machine import capacity, free_bytes
from offload.policy import MemoryPolicy, numbers_of
from offload.storage.buffer import has_own_memory
from offload.units import shown_bytes

__all__ = ["GAPS_SHARE", "HOST", "Grant", "MemoryLimits", "cell_bytes", "check_place", "limits_of"]

#: Of a limit of memory, one part in so many is left to gaps between the blocks of the allocator of a process.
GAPS_SHARE = 8
#: Part of the free memory that ``"auto"`` may use.
AUTO_SHARE = 0.9
#: Of a number, activations of one cell take at most one part in so many. Slots, gradients and buffers take the rest.
CELL_SHARE = 4

HOST = torch.device("cpu")
_serials = itertools.count()
#: The grants of living models.
_living: weakref.WeakValueDictionary[int, Grant] = weakref.WeakValueDictionary()


class Grant:
    """The bytes that one model may hold in the memory of one device, until this is released or collected.

    Args:
        place: the device whose memory it is.
        asked: the number; None for ``"auto"``, which is at least ``least``.
        held: returns the bytes that the model uses at present; must not refer to the result.
    """

    def __init__(self, place: torch.device, asked: int | None, *, least: int, held: Callable[[], int]) -> None:
        self.place, self.asked = place, asked
        self._least, self._held = least, held
        self._serial = next(_serials)
        self._shared_with: list[int] = []
        self._nbytes = 0
        _living[self._serial] = self

    @property
    def nbytes(self) -> int:
        """Bytes that the model may hold now. ``"auto"``: measured again when models were made or have ended."""
        if self.asked is not None:
            return self.asked
        here = [one for get in _living.valuerefs() if (one := get()) is not None and one.place == self.place]
        present = [one._serial for one in here]
        if present != self._shared_with:
            share = _share(self.place, here)
            for one in here:
                one._nbytes, one._shared_with = max(one._least, share), present
        return self._nbytes

    def release(self) -> None:
        """Gives the bytes back, at once instead of when this object is collected."""
        _living.pop(self._serial, None)


def _share(place: torch.device, grants: list[Grant]) -> int:
    """Bytes for each ``"auto"`` among these grants."""
    pool = AUTO_SHARE * free_bytes(place) / (_ranks() if place.type == "cpu" else 1)  # each has its own accelerator
    for one in grants:
        held = one._held()
        pool += held if one.asked is None else -max(0, one.asked - held)
    return int(max(pool, 0) / max(sum(one.asked is None for one in grants), 1))


def _ranks() -> int:
    """Processes of one distributed run on this host."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return max(int(value), 1) if value.isdigit() else 1


def check_place(place: torch.device, asked: int | None, needs: int, advice: str) -> None:
    """Raises ValueError if a number is less than a model ``needs``; warns if it is more than the machine has."""
    if asked is None:
        return
    name = "host memory" if place.type == "cpu" else f"the memory of {place}"
    if asked < needs:
        raise ValueError(
            f"expected at least {shown_bytes(needs)} of {name}, got memory={shown_bytes(asked)}, which is "
            f"{shown_bytes(needs - asked)} short: pass memory={needs}, the least that works{advice}"
        )
    there = capacity(place)
    if asked > there:
        warnings.warn(
            f"memory={shown_bytes(asked)} is more than the {shown_bytes(there)} of {name} that this machine has; pass "
            f"less, or 'auto' for what is free",
            RuntimeWarning,
            stacklevel=6,  # where offload() was called
        )


@dataclass(frozen=True)
class MemoryLimits:
    """The bytes that a model may hold on the compute device and in host memory; one grant where these are the same."""

    device: Grant
    host: Grant

    def release(self) -> None:
        """Gives the bytes back."""
        self.device.release()
        self.host.release()


def limits_of(
    policy: MemoryPolicy,
    device: torch.device,
    *,
    least: tuple[int, int],
    held: tuple[Callable[[], int], Callable[[], int]],
) -> MemoryLimits:
    """Grants a model its memory; ``least`` and ``held`` are of the compute device and of host memory."""
    on_device, on_host = numbers_of(policy, device)
    one = Grant(device if has_own_memory(device) else HOST, on_device, least=least[0], held=held[0])
    return MemoryLimits(one, Grant(HOST, on_host, least=least[1], held=held[1]) if has_own_memory(device) else one)


def cell_bytes(policy: MemoryPolicy, device: torch.device) -> int | None:
    """Most bytes for activations of a cell, of the number that was given; None for ``"auto"``, which is measured."""
    limit = numbers_of(policy, device)[0]
    return None if limit is None else max(limit // CELL_SHARE, 1)
