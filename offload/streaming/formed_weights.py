"""The weights of a shard that its home stores in a form (``store_dtype``): their values, and who may write them.

Guarantees: what other code than an optimizer of this package writes to such a parameter is found before the next pass
(:func:`check_seal`), since it is not a value of the form.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.storage.contract import in_order
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice

__all__ = ["check_seal", "formed_values", "lower_part", "seal", "store_formed"]


def lower_part(shard: Shard, s: Slice) -> Tensor | None:
    """The lower halves of an own parameter, int16, in the order of its memory; None if they are not stored."""
    return None if shard.lower is None else shard.lower.tensor[s.offset : s.offset + s.nbytes].view(torch.int16)


def formed_values(shard: Shard, s: Slice) -> Tensor:
    """A copy of the values of an own parameter that is stored in a form, in the parameter's own type."""
    assert s.form is not None
    found = torch.empty_strided(s.parameter.shape, s.stride, dtype=s.full_dtype)
    s.form.decode(in_order(shard.home_view(s)), lower_part(shard, s), in_order(found))
    return found


def store_formed(shard: Shard, s: Slice, values: Tensor) -> None:
    """Stores values of an own parameter in its form."""
    assert s.form is not None
    dense = torch.empty_strided(s.parameter.shape, s.stride, dtype=s.full_dtype).copy_(values)
    s.form.encode(in_order(dense), in_order(shard.home_view(s)), lower_part(shard, s))


def seal(shard: Shard) -> None:
    """Notes that the parameters have the values that are stored."""
    shard.sealed = tuple(s.parameter._version for s in shard.formed)


def check_seal(shard: Shard) -> None:
    """Raises RuntimeError if other code has written to parameters that are stored in a form."""
    if shard.sealed is None:
        return
    for s, version in zip(shard.formed, shard.sealed, strict=True):
        assert shard.home is not None
        if s.parameter.data_ptr() != shard.home.tensor.data_ptr() + s.offset:
            shard.point_home(s)
            raise RuntimeError(
                f"other data was assigned to parameter {s.name}, but with store_dtype= only an OffloadOptimizer "
                f"writes parameters; the assignment was dropped. Load values by load_state_dict()"
            )
        if s.parameter._version != version:
            raise RuntimeError(
                f"parameter {s.name} was written in place, but with store_dtype= only an OffloadOptimizer writes "
                f"parameters: what was written is not a value of its form. Load values by load_state_dict() or "
                f"load_checkpoint()"
            )
