"""Parameters of shards that stay on the compute device, such as adapters over a base that streams.

They belong to a shard without layers, which is never loaded or evicted. The shards whose layers use them borrow them,
as they borrow tied parameters: a copy is in the slot while a shard computes, and gradients are added to the owner's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from offload.forms.quantised import StoredTensor, stored_tensors
from offload.forms.weight_forms import WeightForm, weight_form_of
from offload.storage import DiskHome
from offload.storage.buffer import device_buffer
from offload.storage.host import DeviceTier, MemoryBlock
from offload.streaming.shard import Shard
from offload.streaming.slices import layout

__all__ = ["chosen", "resident_shard"]


def chosen(
    layers: Mapping[str, nn.Module],
    patterns: str | Sequence[str] | None,
    offload_device: object = None,
    around: Collection[str] = (),
) -> set[nn.Parameter]:
    """The parameters whose names match one of the shell ``patterns``. Those named ``around`` layers stay anyway.

    Raises TypeError or ValueError for something else than patterns, one that matches nothing, or parameters that
    cannot stay: quantised ones, those on the meta device, and all if ``offload_device`` is a home that is kept.
    """
    if patterns is None:
        return set()
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(each, str) for each in patterns):
        raise TypeError(f"expected patterns of parameter names such as '*.lora_*', got resident={patterns!r}")
    found: set[nn.Parameter] = set()
    stored = stored_tensors(layers.items())
    for pattern in patterns:
        matched = [each for each in stored if fnmatchcase(each.name, pattern)]
        if not matched and not any(fnmatchcase(name, pattern) for name in around):
            raise ValueError(
                f"expected patterns of parameter names, such as {stored[0].name if stored else '0.weight'!r}, got "
                f"resident={pattern!r}, which matches none of them"
            )
        for each in matched:
            if each.part_of is not None or each.parameter.is_meta:
                what = "on the meta device" if each.part_of is None else "quantised"
                raise ValueError(f"parameter {each.name} is {what}, and cannot stay on the compute device (resident)")
            found.add(each.parameter)
    if isinstance(offload_device, DiskHome) and offload_device.keep:
        raise ValueError(
            f"expected DiskHome(keep=False) with resident={patterns!r}, got keep=True: a kept home would not hold "
            f"these parameters; use save_checkpoint and load_checkpoint"
        )
    return found


def chosen_form(
    store_dtype: object,
    stored: Sequence[StoredTensor],
    staying: set[nn.Parameter],
    layers: Iterable[nn.Module],
    offload_device: object,
) -> WeightForm | None:
    """The form in which homes store weights, besides those ``staying`` on the device; None: as they are.

    Raises TypeError or ValueError for a form that is none, that no parameter of ``layers`` could have, or that cannot
    be combined with them or with the home.
    """
    form = weight_form_of(store_dtype)
    if form is None:
        return None
    if isinstance(offload_device, DiskHome) and offload_device.keep:
        raise ValueError(
            f"expected DiskHome(keep=False) with store_dtype={store_dtype!r}, got keep=True: a kept home describes one "
            f"file of weights as they are; use save_checkpoint and load_checkpoint"
        )
    streamed = [each.parameter for each in stored if each.part_of is None and each.parameter not in staying]
    if not any(map(form.stores, streamed)):
        raise ValueError(
            f"expected float32 parameters with store_dtype={store_dtype!r}, got none that stream; leave it out, or "
            f"convert the layers first: model.float()"
        )
    sparse = next((m for layer in layers for m in layer.modules() if getattr(m, "sparse", None) is True), None)
    if sparse is not None:
        raise ValueError(
            f"expected dense gradients with store_dtype={store_dtype!r}, got {type(sparse).__name__} with sparse=True: "
            f"weights are decoded and stored as a whole; make it with sparse=False"
        )
    return form


def resident_shard(
    layers: Mapping[str, nn.Module], parameters: set[nn.Parameter], index: int, device: torch.device
) -> Shard | None:
    """Moves ``parameters`` of some layers to the compute device: the shard that owns them; None if there are none."""
    if not parameters:
        return None
    shard = Shard(index, 0, [], tier=DeviceTier(device))
    shard.own, nbytes = layout(each for each in stored_tensors(layers.items()) if each.parameter in parameters)
    shard.home = MemoryBlock(device_buffer(nbytes, device))
    for s in shard.own:
        shard.home_view(s).copy_(s.parameter.detach())
        shard.move_home(s)
    return shard
