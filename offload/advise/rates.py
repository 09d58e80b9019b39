"""Measures in a few seconds what this machine does per second: products, copies, files, and updates of an optimizer."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch

from offload.mesh.public import check_elementwise
from offload.optim.param_block import ELEMENTWISE
from offload.optim.state_forms import EncodedWeights, StateForm, form_of, step_encoded
from offload.optim.update_blocks import StoredStates
from offload.storage.buffer import host_buffer
from offload.storage.page_cache import CACHE_HOLDS, CACHE_PAYS_UP_TO, PageCache, available_bytes
from offload.storage.transfer import Link, Transfers
from offload.streaming.weight_forms import WeightForm, weight_form_of

__all__ = ["OptimizerRate", "Rates", "measure_optimizer", "measure_rates"]

#: Each rate is the median of repetitions in this time, at least :data:`LEAST_REPETITIONS`.
SECONDS_EACH = 0.4
LEAST_REPETITIONS = 3
#: Sizes of what is moved or multiplied.
FILE_BYTES = 64 << 20
COPY_BYTES = 64 << 20
MOST_TOKENS, MOST_WIDTH = 1024, 4096
#: Elements of weights in one update: a block of the optimizer on disk in float32.
UPDATE_ELEMENTS = 2 << 20


@dataclass(frozen=True)
class OptimizerRate:
    """The measured speed of one ``torch.optim`` class, and the size of its states."""

    name: str
    #: Elements of states for each element of a parameter.
    count: int
    #: Bytes of gradients per second, float32, in memory.
    bytes_per_second: float
    #: How states are stored; None: in full.
    form: StateForm | None = None

    @property
    def states(self) -> float:
        """Bytes of states for each byte of a parameter in float32."""
        return self.count * self.stored.share

    @property
    def stored_as(self) -> str:
        """The form of states, as an argument of the command line: full, bfloat16 or 8bit."""
        return "full" if self.form is None else self.form.name

    @property
    def described(self) -> str:
        """The states in words."""
        return f"{self.count} states of {self.name}" + ("" if self.form is None else f" in {self.form.name}")

    @property
    def stored(self) -> StoredStates:
        """What buffers of updates hold of states; those of small parameters do not count."""
        share = 1.0 if self.form is None else self.form.share(torch.float32)
        return StoredStates(share, count=self.count, rounded=False)


@dataclass(frozen=True)
class Rates:
    """Per second. A multiply-add counts two operations; bytes that are read and written count twice."""

    flops: float
    flops_float32: float
    #: Of other operations of layers.
    touched_bytes: float
    #: From files to memory and back: weights and gradients, then optimizer states. Whether with direct I/O.
    read_bytes: float
    write_bytes: float
    states_read_bytes: float
    states_write_bytes: float
    direct: bool
    states_direct: bool
    #: Between host memory and an accelerator; None on the CPU.
    to_device_bytes: float | None = None

    def fields(self) -> dict[str, float | bool | None]:
        """All rates by their names."""
        return asdict(self)


def measure_optimizer(
    name: str, states: torch.dtype | str | None = None, weights: torch.dtype | str | None = None
) -> OptimizerRate:
    """Makes and runs a class of ``torch.optim`` on one block, stored as ``states=`` and ``store_dtype=`` say.

    Raises ValueError if the name is none, or the class cannot store its states so.
    """
    kind = getattr(torch.optim, name, None)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer):
        raise ValueError(f"--optimizer: expected a class of torch.optim such as AdamW or SGD, got {name!r}")
    weight = torch.nn.Parameter(torch.zeros(UPDATE_ELEMENTS // 1024, 1024))
    weight.grad = torch.ones_like(weight)
    try:
        optimizer = cast(Any, kind)([weight], lr=1e-3)
        optimizer.step()
    except (TypeError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"--optimizer: {name} cannot update a matrix by its gradient: {reason}") from error
    state = optimizer.state[weight].values()
    elements = sum(t.numel() for t in state if isinstance(t, torch.Tensor) and t.numel() > 1)
    form, elementwise = form_of(states), kind in ELEMENTWISE
    if form is not None:
        try:
            check_elementwise(kind, {}, {"lr": 1e-3}, f"with states={states!r} matrices are updated in parts")
        except TypeError as error:
            raise ValueError(f"--states: {error}") from error
    encoded = {} if (stored := weight_form_of(weights)) is None else {0: _encoded(stored, weight)}

    def step() -> None:
        if form is None and not encoded:
            optimizer.step()
        else:
            states_in_form = [] if form is None else [0]
            for _ in step_encoded(optimizer, [weight], states_in_form, form, elementwise=elementwise, weights=encoded):
                pass

    if form is not None:
        form.encode(optimizer.state[weight], weight)
    each = _seconds(step, None)
    return OptimizerRate(name, -(-elements // weight.numel()), weight.nbytes / each, form)


def _encoded(form: WeightForm, weight: torch.Tensor) -> EncodedWeights:
    upper = torch.empty(weight.numel(), dtype=torch.bfloat16)
    lower = torch.empty(weight.numel(), dtype=torch.int16) if form.exact else None
    form.encode(weight.detach().view(-1), upper, lower)
    return EncodedWeights(form, upper, lower, None, weight.detach(), step=1, name="weight", begin=0)


def measure_rates(
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int,
    tokens: int,
    home: Path,
    home_bytes: int,
    state_bytes: int,
) -> Rates:
    """Measures the rates of ``device`` and of the disk of ``home``.

    Args:
        dtype: in which layers compute.
        width, tokens: of the matrix product.
        home: a directory; a temporary file is written there, or in its nearest parent that exists, and removed.
        home_bytes, state_bytes: of weights with gradients and of optimizer states, which decide as in a model whether
            files bypass the page cache.

    Raises:
        OSError: if no file can be written there.
    """
    available = available_bytes()
    direct = home_bytes > available * CACHE_PAYS_UP_TO
    states_direct = home_bytes + state_bytes > available * CACHE_HOLDS
    folder = existing_folder(home)
    read, write = _file_rates(folder, direct)
    states_read, states_write = (read, write) if direct == states_direct else _file_rates(folder, states_direct)
    flops = _flops(device, dtype, width, tokens)
    return Rates(
        flops=flops,
        flops_float32=flops if dtype is torch.float32 else _flops(device, torch.float32, width, tokens),
        touched_bytes=_touched(device),
        read_bytes=read,
        write_bytes=write,
        states_read_bytes=states_read,
        states_write_bytes=states_write,
        direct=direct,
        states_direct=states_direct,
        to_device_bytes=_to_device(device) if device.type == "cuda" else None,
    )


def existing_folder(home: Path) -> Path:
    """The directory, or its nearest parent that exists."""
    return next(folder for folder in (home.absolute(), *home.absolute().parents) if folder.is_dir())


def _ignore(_: object) -> None:
    return None


def _seconds(work: Callable[[], None], device: torch.device | None) -> float:
    """The median of repetitions, after a first one."""

    def once() -> float:
        began = time.perf_counter()
        work()
        if device is not None and device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began

    once()
    found = [once() for _ in range(LEAST_REPETITIONS)]
    while sum(found) < SECONDS_EACH:
        found.append(once())
    return max(sorted(found)[len(found) // 2], 1e-9)


def _flops(device: torch.device, dtype: torch.dtype, width: int, tokens: int) -> float:
    width, rows = max(1, min(width, MOST_WIDTH)), max(1, min(tokens, MOST_TOKENS))
    left = torch.ones(rows, width, device=device, dtype=dtype)
    right = torch.ones(width, width, device=device, dtype=dtype)
    out = torch.empty(rows, width, device=device, dtype=dtype)
    with torch.no_grad():
        return 2.0 * rows * width * width / _seconds(lambda: _ignore(torch.mm(left, right, out=out)), device)


def _touched(device: torch.device) -> float:
    """Bytes that an addition reads and writes."""
    one, other = (torch.ones(COPY_BYTES // 4, device=device) for _ in range(2))
    out = torch.empty_like(one)
    return 3.0 * COPY_BYTES / _seconds(lambda: _ignore(torch.add(one, other, out=out)), device)


def _to_device(device: torch.device) -> float:
    source = torch.ones(COPY_BYTES, dtype=torch.uint8).pin_memory()
    out = torch.empty_like(source, device=device)
    return COPY_BYTES / _seconds(lambda: _ignore(out.copy_(source, non_blocking=True)), device)


def _file_rates(folder: Path, direct: bool) -> tuple[float, float]:
    """(bytes read, bytes written) per second, moved as shards are."""
    transfers = Transfers(PageCache(folder, direct), Link())
    buffer = host_buffer(FILE_BYTES)
    fd, name = tempfile.mkstemp(prefix="advise-", dir=folder)
    path = Path(name)
    try:
        os.posix_fallocate(fd, 0, FILE_BYTES)
        write = _seconds(lambda: transfers.write(path, buffer, 0), None)
        read = _seconds(lambda: transfers.read(path, buffer, 0), None)
    finally:
        os.close(fd)
        with contextlib.suppress(OSError):
            path.unlink()
    return FILE_BYTES / read, FILE_BYTES / write
