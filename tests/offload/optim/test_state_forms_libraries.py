"""8-bit states beside those of bitsandbytes and torchao, on the same gradients.

In an environment of their own (``pip install torchao bitsandbytes``), where these are not installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.optim.dynamic_map import levels

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("signed", [False, True])
def test_levels_are_those_of_the_libraries(signed: bool) -> None:
    functional: Any = pytest.importorskip("bitsandbytes.functional", reason="needs bitsandbytes")
    utils: Any = pytest.importorskip("torchao.optim.quant_utils", reason="needs torchao: pip install torchao")
    assert torch.equal(levels(signed), functional.create_dynamic_map(signed=signed))
    torch.testing.assert_close(levels(signed), torch.tensor(utils.create_dynamic_map(signed=signed)), rtol=1e-6, atol=0)
