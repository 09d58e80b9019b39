"""Which optimizer classes may update parts of parameters: found by trying."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.optim.elementwise import check_elementwise


class Lamb(torch.optim.SGD):
    """Scales its step by the norm of the parameter."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p -= 0.1 * p.norm() / p.grad.norm() * p.grad


@pytest.mark.parametrize(
    "kind",
    [
        *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
        *(torch.optim.Adamax, torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop),
        torch.optim.ASGD,
    ],
)
@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"weight_decay": 0.1}])
def test_elementwise_classes_are_accepted(kind: Any, options: dict[str, Any]) -> None:
    if kind is torch.optim.Rprop and "weight_decay" in options:
        options = {}
    check_elementwise(kind, {"lr": 0.1, **options}, {})


@pytest.mark.parametrize("kind", [torch.optim.Adafactor, getattr(torch.optim, "Muon", Lamb), Lamb])
def test_class_that_needs_whole_parameters_is_refused(kind: Any) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} updates a matrix differently as a whole and in parts"):
        check_elementwise(kind, {"lr": 0.1}, {})


def test_class_that_cannot_be_tried_is_refused() -> None:
    with pytest.raises(TypeError, match="SparseAdam cannot be tried"):
        check_elementwise(torch.optim.SparseAdam, {"lr": 0.1}, {})


def test_arguments_of_the_constructor_are_used() -> None:
    with pytest.raises(TypeError, match="cannot be tried"):
        check_elementwise(torch.optim.SGD, {}, {"lr": -1.0})
