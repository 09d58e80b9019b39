"""What it means that two worlds look the same, and the first place where they do not.

Equal bit by bit where both do the same arithmetic in the same order. Elsewhere (micro-batches and tied weights add
gradients in another order, an optimizer over pieces divides its work otherwise) within 1e-9 of the largest number: all
is float64, whose last digit is 1e-16, and what a fault does is seen from 1e-6 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from pipe.nested import flatten

TOLERANCE = 1e-9
#: Where a layer computes in float32, whose last digit is 1e-7.
SINGLE_TOLERANCE = 1e-4
#: Beyond this a loop has diverged, and says nothing.
LARGEST = 1e8


class Diverged(Exception):
    """The plain loop left the numbers that can be compared."""


def first_difference(expected: Mapping[str, Any], actual: Mapping[str, Any], *, tolerance: float) -> str | None:
    """What differs first, in words; None if nothing does."""
    for name, value in expected.items():
        if name not in actual:
            return f"{name}: missing"
        found = difference(value, actual[name], tolerance=tolerance)
        if found is not None:
            return f"{name}: {found}"
    more = [name for name in actual if name not in expected]
    return f"{more[0]}: only in ours" if more else None


def difference(expected: Any, actual: Any, *, tolerance: float) -> str | None:
    """How a value differs from what it should be; None if it does not."""
    wanted, spec = flatten(expected)
    got, other = flatten(actual)
    if spec != other or len(wanted) != len(got):
        return f"expected {expected!r}, got {actual!r}"[:300]
    for x, y in zip(wanted, got, strict=True):
        found = _difference(x, y, tolerance=tolerance)
        if found is not None:
            return found
    return None


def _difference(x: Any, y: Any, *, tolerance: float) -> str | None:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return None if type(x) is type(y) and x == y else f"expected {_short(x)}, got {_short(y)}"
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"expected {x.dtype} {tuple(x.shape)}, got {y.dtype} {tuple(y.shape)}"
    if x.is_sparse or y.is_sparse:
        x, y = x.to_dense(), y.to_dense()
    if torch.equal(x, y):
        return None
    if not x.is_floating_point():
        return "other numbers"
    if not bool(x.isfinite().all()) or float(x.abs().max()) > LARGEST:
        raise Diverged
    if not bool(y.isfinite().all()):
        return "NaN or infinite where the plain one is not"
    off = float((x - y).abs().max())
    allowed = tolerance * max(1.0, float(x.abs().max()))
    return None if off <= allowed else f"off by {off:.2g}"


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]
