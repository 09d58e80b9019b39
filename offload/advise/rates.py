"""Measures in a few seconds what this machine does per second: products, and steps of a small model in files."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.benchmark import Timer

from offload.model import OffloadModel
from offload.optim import OffloadOptimizer
from offload.optim.state_forms import form_of
from offload.policy import MemoryPolicy
from offload.storage import DiskHome
from offload.storage.page_cache import CACHE_HOLDS, CACHE_PAYS_UP_TO, available_bytes
from offload.telemetry.statistics import UPDATE_IN_MEMORY, Meter
from pipe.stream import use_device

__all__ = ["Rates", "existing_folder", "measure_rates"]

#: Each rate is the median of repetitions in this time, or of so many steps.
SECONDS_EACH, STEPS = 0.4, 3
#: Sizes of what is moved or multiplied.
COPY_BYTES = 64 << 20
PRODUCT = 1024
#: Of the small model: shards, and the width of each.
SHARDS, WIDTH = 6, 1536


@dataclass(frozen=True)
class Rates:
    """Per second. A multiply-add counts two operations; bytes that are read and written count twice."""

    flops: float
    #: Of other operations of layers.
    touched_bytes: float
    #: From homes in files to slots and back, and of gradients in updates: of states in files, and in memory.
    read_bytes: float
    write_bytes: float
    update_bytes: float
    memory_update_bytes: float
    #: Whether weights bypass the page cache.
    direct: bool
    #: States of the optimizer as large as a parameter, and bytes of each for each byte of the parameter.
    states: int
    state_share: float = 1.0
    #: Between host memory and an accelerator; None on the CPU.
    to_device_bytes: float | None = None


def measure_rates(
    device: torch.device,
    dtype: torch.dtype,
    *,
    home: str,
    home_bytes: int,
    trained_bytes: int,
    optimizer: str,
    states: torch.dtype | str | None,
) -> Rates:
    """Measures ``device``, the disk of ``home``, and an optimizer.

    Args:
        dtype: in which layers compute.
        home: a directory; temporary files are written there, or in its nearest parent that exists, and removed.
        home_bytes, trained_bytes: of weights with gradients, and of what trains; with the states of the latter they
            decide as in a model whether files bypass the page cache.
        optimizer, states: a class of ``torch.optim``, and how its states are stored.

    Raises:
        OSError: if no file can be written there.
        TypeError, ValueError: for a name that is no class of ``torch.optim``, or one that cannot store its states so.
    """
    kind = getattr(torch.optim, optimizer, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer):
        raise ValueError(f"expected a class of torch.optim such as AdamW or SGD, got {optimizer!r}")
    form = form_of(states)
    share = 1.0 if form is None else form.share(torch.float32)
    memory, count = _steps("cpu", kind, states, share)
    available = available_bytes()
    direct = home_bytes > available * CACHE_PAYS_UP_TO
    states_direct = home_bytes + count * share * trained_bytes > available * CACHE_HOLDS
    meters = {}
    for way in {direct, states_direct}:
        with tempfile.TemporaryDirectory(prefix="advise-", dir=existing_folder(home)) as place:
            meters[way], _ = _steps(DiskHome(place, direct=way), kind, states, share)
    return Rates(
        flops=_flops(device, dtype),
        touched_bytes=_touched(device),
        read_bytes=1 / meters[direct].copy_seconds_per_byte("load"),
        write_bytes=1 / meters[direct].copy_seconds_per_byte("drain"),
        update_bytes=1 / meters[states_direct].copy_seconds_per_byte("update"),
        memory_update_bytes=1 / memory.copy_seconds_per_byte(UPDATE_IN_MEMORY),
        direct=direct,
        states=count,
        state_share=share,
        to_device_bytes=_to_device(device) if device.type == "cuda" else None,
    )


def existing_folder(home: str) -> Path:
    """The directory, or its nearest parent that exists."""
    path = Path(home).absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _steps(home: Any, kind: Any, states: Any, share: float) -> tuple[Meter, int]:
    """Steps of a small model: what they measured, and the number of states, of which each takes a ``share``."""
    layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(SHARDS)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # homes in memory save none
        model = OffloadModel(layers, "cpu", home, SHARDS, True, memory=MemoryPolicy.fixed())
    try:
        optimizer = OffloadOptimizer(model, kind, states=states, lr=1e-3)
        for _ in range(STEPS):
            model(torch.ones(1, WIDTH)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.synchronize()
        nbytes = sum(optimizer.state_bytes(shard) for shard in model._homes.shards)
        return model._homes.meter, round(nbytes / share / sum(p.nbytes for p in model.parameters()))
    finally:
        model.close()


def _seconds(device: torch.device, work: Callable[[], Any]) -> float:
    """The median of repetitions; waits for the device."""
    timer = Timer("work()", globals={"work": work}, num_threads=torch.get_num_threads())
    with use_device(device):  # the timer waits for the current one
        measured = timer.blocked_autorange(min_run_time=SECONDS_EACH)
    return float(measured.median)


def _flops(device: torch.device, dtype: torch.dtype) -> float:
    left, right = (torch.ones(PRODUCT, PRODUCT, device=device, dtype=dtype) for _ in range(2))
    return 2.0 * PRODUCT**3 / _seconds(device, lambda: torch.mm(left, right))


def _touched(device: torch.device) -> float:
    """Bytes that an addition reads and writes."""
    one, other, out = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(3))
    return 3.0 * COPY_BYTES / _seconds(device, lambda: torch.add(one, other, out=out))


def _to_device(device: torch.device) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
    out = torch.empty_like(source, device=device)
    return COPY_BYTES / _seconds(device, lambda: out.copy_(source, non_blocking=True))
