"""What the ``nn.Module`` methods of an offloaded model do: ``state_dict``, loading, ``.to()``, copies.

Parameters never leave their homes: methods that would move or cast them raise, those that change nothing and a move to
the compute device pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from offload.engine.homes import ModelHomes
from offload.storage import Tier
from offload.streaming.stored_values import StoredValues, defers_values, stored_values, values_in_full

__all__ = ["refuse_copies", "refuse_moves", "show_values", "store_values"]


def show_values(homes: ModelHomes, state_dict: dict[str, Any]) -> None:
    """Replaces what homes store in a form by the values: copies, which later steps do not change."""
    formed = [(shard, s) for shard in homes.shards for s in shard.formed]
    if not formed:
        return
    if defers_values():
        by_address: dict[int, Any] = {s.parameter.data_ptr(): StoredValues(shard, s) for shard, s in formed}
    else:
        exact = [shard for shard in homes.shards if any(s.form and s.form.exact for s in shard.formed)]
        by_address = dict(values_in_full(exact, homes.tier))
    for name, view in state_dict.items():
        if isinstance(view, Tensor) and not isinstance(view, nn.Parameter) and view.dtype == torch.bfloat16:
            values = by_address.get(view.data_ptr())
            if values is not None and values.shape == view.shape:
                state_dict[name] = values


def store_values(homes: ModelHomes, model: nn.Module, state_dict: Any, prefix: str) -> None:
    """Stores values of a ``state_dict()``, as far as homes store them in a form.

    The entries are replaced by what is stored then, so the modules that load them next change no bit.
    """
    if not any(shard.formed for shard in homes.shards):
        return
    written: Counter[nn.Parameter] = Counter()
    for name, p in model.named_parameters(remove_duplicate=False):
        stored, value = stored_values(p), state_dict.get(prefix + name)
        if stored is None or not isinstance(value, Tensor) or value.shape != p.shape:
            continue
        stored.write(value.detach())
        state_dict[prefix + name] = p.detach()
        written[p] += 1
    for shard in homes.shards:
        if shard.form_versions is not None:  # the modules increment each version once
            shard.form_versions = tuple(
                v + written[s.parameter] for s, v in zip(shard.formed, shard.form_versions, strict=True)
            )


def refuse_moves(model: nn.Module, fn: Callable[[Tensor], Tensor], device: torch.device, tier: Tier) -> None:
    """Raises RuntimeError if ``fn`` would move or cast parameters away from their homes.

    A move to the compute device changes nothing: this is where the model computes. Trainers ask for it.
    """
    for dtype in {parameter.dtype for parameter in model.parameters()}:
        probe = torch.empty(0, dtype=dtype)
        result = fn(probe)
        if result.is_shared() and result.device == probe.device:
            raise RuntimeError(
                "the parameters of an OffloadModel have their homes, and cannot move to shared memory "
                "(share_memory()); give other processes copies: {k: v.clone() for k, v in state_dict().items()}"
            )
        if result.dtype != dtype or result.device not in (probe.device, device):
            raise RuntimeError(
                f"an OffloadModel's parameters are stored in {tier.name} and cannot become {result.dtype} on "
                f"{result.device}; convert the layers before you wrap them"
            )


def refuse_copies(*, formed: bool, sharded: bool) -> None:
    """Raises TypeError for a deep copy or pickle of a model with homes in a form, or on several ranks."""
    if formed:
        raise TypeError(
            "cannot copy or pickle an OffloadModel with store_dtype=: layers of their own would have rounded "
            "parameters. Save a checkpoint, and load it into another model"
        )
    if sharded:
        raise TypeError(
            "cannot copy or pickle an OffloadModel with mesh=: each rank stores a part of it. Save it by "
            "torch.distributed.checkpoint, or make another one on all ranks"
        )
