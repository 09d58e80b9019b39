"""Gradients of two sets of modules, compared by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn


@pytest.fixture(scope="session")
def assert_same_gradients() -> Callable[..., None]:
    def check(expected: Sequence[nn.Module], actual: Sequence[nn.Module], tolerance: float = 1e-6) -> None:
        theirs, mine = (dict(nn.ModuleList(modules).named_parameters()) for modules in (expected, actual))
        assert mine.keys() == theirs.keys()
        for name, parameter in theirs.items():
            found = mine[name].grad
            assert (found is None) == (parameter.grad is None), name
            if found is not None:
                words = f"gradient of {name} differs"
                narrow = parameter.dtype == torch.bfloat16
                how = {} if narrow else {"rtol": 1e-5, "atol": tolerance}
                torch.testing.assert_close(found.to_dense(), parameter.grad.to_dense(), msg=words, **how)

    return check
