"""Chooses a layout for a memory budget: the number of shards and slots, and the bytes left for boundaries.

Slots and gradients take what :func:`~offload.planning.peak_memory.peak_memory` computes from the plan of a step; the
rest is for boundaries. Memory that the layers of one cell allocate while they run is not included.

This module knows nothing of tensors or torch.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from offload.planning.partition import cut_layers
from offload.planning.peak_memory import StepBytes, peak_memory
from offload.planning.planner import plan_step
from offload.planning.residency import MOVING
from offload.planning.slot_sizes import slot_sizes

__all__ = ["FIRST_GAPS_SHARE", "GAPS_SHARE", "WHOLE_GAPS_SHARE", "Layout", "fit", "parse_bytes", "requirement"]

_UNITS = {"": 1, "b": 1} | {
    prefix + suffix: base**power
    for base, suffix in ((1000, "b"), (1024, "ib"))
    for power, prefix in enumerate("kmgt", start=1)
}
#: Of a limit of memory, one part in so many is left to gaps between the blocks that the allocator has given out; and
#: before a step of a plan was measured. Less where all shards rest in memory and nothing is recomputed: each step then
#: takes and frees the same blocks as the one before it, and they fit again.
GAPS_SHARE, FIRST_GAPS_SHARE, WHOLE_GAPS_SHARE = 8, 6, 16
#: Part of a budget that goes to boundaries before slots beyond the second are added.
BOUNDARY_SHARE = 0.5
#: Minimum for boundaries and their gradients, with the output's: each has at least one byte.
SMALLEST_BOUNDARIES = 2 * MOVING


def parse_bytes(value: int | str, name: str = "memory_budget", *, least: int = 1) -> int:
    """Bytes from an integer of at least ``least``, or a string such as ``"2GiB"``, ``"1.5 GB"`` or ``"300MiB"``."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"expected bytes such as 2147483648 or '2GiB', got {name}={value!r}")
        number = int(Decimal(match[1]) * _UNITS[match[2].lower()])
    elif not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected bytes such as 2147483648 or '2GiB', got {name}={value!r}")
    else:
        number = value
    if number < least:
        raise ValueError(
            f"expected {'a positive number of' if least else 'no fewer than 0'} bytes, got {name}={value!r}"
        )
    return number


@dataclass(frozen=True)
class Layout:
    """Layers in each shard, number of slots, bytes for boundaries, and the memory budget, if there is one."""

    cuts: tuple[int, ...]
    slots: int
    boundary_bytes: int
    budget_bytes: int | None = None


def requirement(
    slot_bytes: Sequence[int], gradient_bytes: Sequence[int], cuts: Sequence[int], slots: int, *, apart: bool = False
) -> tuple[int, int]:
    """Bytes of slots, gradients and the smallest boundaries for shards of so many layers; and of the largest shard.

    ``apart``: see :func:`.slot_sizes`.
    """
    ends = [0, *itertools.accumulate(cuts)]
    parts = [slice(*ends_of_shard) for ends_of_shard in itertools.pairwise(ends)]
    shards, count = [sum(slot_bytes[part]) for part in parts], min(slots, len(cuts))
    slot, own = slot_sizes(shards, count, apart=apart)
    gradients = [sum(gradient_bytes[part]) for part in parts]
    sizes = StepBytes(slot_bytes=slot, own_slots=own, gradient_bytes=gradients)
    return peak_memory(plan_step(len(cuts), slots=count), sizes).device_bytes + SMALLEST_BOUNDARIES, max(shards)


def fit(
    slot_bytes: Sequence[int],
    gradient_bytes: Sequence[int],
    budget_bytes: int,
    *,
    shards: int | None,
    slots: int | None = None,
) -> Layout:
    """The layout with the fewest shards whose slots and gradients leave half of the budget to boundaries.

    If no number of shards does, boundaries get less. Slots beyond the second are added as long as boundaries have half.
    If nothing fits, a ValueError has the number of missing bytes and a configuration that would fit.

    Args:
        slot_bytes, gradient_bytes: of each layer, in a slot and on the device.
        budget_bytes: for slots, gradients and boundaries together.
        shards, slots: their numbers, or None to choose.
    """
    layers = len(slot_bytes)

    def needs(count: int) -> tuple[int, int, list[int]]:
        """(slots, gradients and the smallest boundaries; largest shard; cuts)"""
        cuts = cut_layers(slot_bytes, count)
        return *requirement(slot_bytes, gradient_bytes, cuts, slots or 2), cuts

    # One shard needs one slot, and no gradients are on their way while others are summed.
    finest = min((layers, 1), key=lambda count: needs(count)[0])
    if shards is None:
        roomy = budget_bytes * (1 - BOUNDARY_SHARE)
        # The largest shard shrinks with their number, so the first that fits is found by bisection.
        low, high = 1, layers
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if needs(middle)[0] <= roomy else (middle + 1, high)
        shards = low if needs(low)[0] <= roomy else finest
    required, largest, cuts = needs(shards)
    if required > budget_bytes:
        widest = max(range(layers), key=lambda k: slot_bytes[k] + gradient_bytes[k])
        least = needs(finest)[0]
        advice = (
            f"num_slices={finest} needs {least:,} bytes"
            if least <= budget_bytes
            else f"the least that fits is memory_budget={least} with num_slices={finest}; or split layer {widest}, "
            f"whose parameters take {slot_bytes[widest]:,} bytes"
        )
        raise ValueError(
            f"memory_budget={budget_bytes:,} bytes is {required - budget_bytes:,} bytes short of slots, gradients "
            f"and boundaries for num_slices={shards}: {advice}"
        )
    gradients = required - SMALLEST_BOUNDARIES - min(slots or 2, shards) * largest
    if slots is None:
        spare = budget_bytes * (1 - BOUNDARY_SHARE) - gradients
        slots = min(shards, max(2, int(spare // largest) if largest else shards))
    slots = min(slots, shards)
    return Layout(tuple(cuts), slots, budget_bytes - slots * largest - gradients, budget_bytes)
