"""A bare model with the plain optimizer, and the same offloaded: what optimizers are compared by."""

from __future__ import annotations

from typing import Any

import torch

from offload import MemoryPolicy, OffloadModel, OffloadOptimizer
from tests.offload.side_by_side import offloaded
from tests.offload.zoo import WIDTH, build

#: ``eps``: where a gradient is small the update magnifies its last digit by lr / eps.
CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.05}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.01}),
    "nesterov": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "eps": 1e-3}),
    "amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True, "eps": 1e-4}),
    "foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True, "eps": 1e-3}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.01, "momentum": 0.5, "centered": True, "eps": 1e-2}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
    "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
    "nadam": (torch.optim.NAdam, {"lr": 0.01, "eps": 1e-4}),
    "radam": (torch.optim.RAdam, {"lr": 0.01, "eps": 1e-4}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.5}),
    "asgd": (torch.optim.ASGD, {"lr": 0.01}),
}


class Pair:
    """A bare model with the plain optimizer, and the same offloaded; both do what they are told."""

    def __init__(
        self,
        name: str = "adamw",
        home: str = "cpu",
        *,
        max_norm: float | None = None,
        kinds: tuple[str, ...] = ("linear", "dropout", "unused", "linear"),
        slices: int = 4,
        memory: MemoryPolicy | None = None,
        **more: Any,
    ) -> None:
        kind, arguments = CLASSES[name]
        self.max_norm = max_norm
        self.bare = build(kinds)
        self.model = offloaded(self.bare, home, slices, memory=memory)
        self.plain = kind(self.bare.parameters(), **arguments)
        self.ours = OffloadOptimizer(self.model, kind, max_norm=max_norm, **arguments, **more)
        self.exact = name in ("sgd", "momentum", "nesterov") and max_norm is None
        self.count = 0

    def do(self, *actions: str) -> None:
        """Calls these methods in turn."""
        for action in actions:
            getattr(self, action)()

    def batch(self) -> torch.Tensor:
        self.count += 1
        return torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(self.count))

    def backward(self) -> None:
        x = self.batch()
        for run in (self.bare, self.model):
            torch.manual_seed(self.count)
            (run(x) - 1).pow(2).mean().backward()

    def accumulate(self) -> None:
        """A backward whose gradients wait for those of the next."""
        with self.ours.accumulate():
            self.backward()

    def step(self) -> None:
        if self.max_norm is not None:
            members = [p for group in self.plain.param_groups for p in group["params"]]
            norm = torch.nn.utils.clip_grad_norm_(members, self.max_norm)
        self.plain.step()
        self.ours.step()
        if self.max_norm is not None:
            torch.testing.assert_close(self.ours.last_norm, norm, rtol=1e-6, atol=1e-7)

    def zero(self) -> None:
        self.plain.zero_grad()
        self.ours.zero_grad()

    def zero_in_place(self) -> None:
        self.plain.zero_grad(set_to_none=False)
        self.ours.zero_grad(set_to_none=False)

    def model_zero(self) -> None:
        self.bare.zero_grad()
        self.model.zero_grad()

    def eval(self) -> None:
        x = self.batch()
        results = []
        for module in (self.bare, self.model):
            module.eval()
            with torch.no_grad():
                results.append(module(x))
            module.train()
        self.assert_close(results[1], results[0])

    def assert_close(self, actual: torch.Tensor, expected: torch.Tensor) -> None:
        """1e-6 of the largest number of a tensor; or nothing at all."""
        atol = 0.0 if self.exact else 1e-6 * max(1.0, float(expected.detach().abs().max()))
        torch.testing.assert_close(actual, expected, rtol=0, atol=atol)

    def assert_equal(self) -> None:
        for (name, b), c in zip(self.bare.named_parameters(), self.model.parameters(), strict=True):
            self.assert_close(c, b)
            assert (b.grad is None) == (c.grad is None), name
            if b.grad is not None:
                self.assert_close(c.grad, b.grad)

    def assert_equal_states(self) -> None:
        expected, actual = self.plain.state_dict(), self.ours.state_dict()
        assert actual["param_groups"] == expected["param_groups"]
        assert actual["state"].keys() == expected["state"].keys(), "states of other parameters"
        for key, state in expected["state"].items():
            found = actual["state"][key]
            assert found.keys() == state.keys()
            for name, value in state.items():
                self.assert_close(torch.as_tensor(found[name]), torch.as_tensor(value))


def pending(model: OffloadModel) -> list[int]:
    """The shards that have an update pending."""
    return [shard.index for shard in model._homes.shards if shard.pending is not None]
