"""A world: one of the two models, and all that a user's loop holds beside it."""

from __future__ import annotations

import copy
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from offload import DiskHome, MemoryPolicy, OffloadModel, OffloadOptimizer
from offload.blocks.find import find_blocks
from pipe.nested import tensors_in
from tests.offload.fuzz.blocks import LISTS
from tests.offload.fuzz.layers import ROWS, WIDTH
from tests.offload.fuzz.models import IDS, build
from tests.offload.fuzz.program import Setup
from tests.offload.pair import CLASSES


class Averaging(torch.optim.SGD):
    """Counts its steps in the group, as schedule-free optimizers do, and steps less with each."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["calls"] = group.get("calls", 0) + 1
            group["lr"] = 0.05 / group["calls"]
        super().step(closure)


class Changing(torch.optim.Optimizer):
    """A state that grows, one that gets other memory in each step, and one that changes its type."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                total = state.setdefault("total", torch.ones_like(p))
                total.data = total.data + p.grad.abs()
                state["last"] = p.grad.clone() if "last" not in state else p.grad.float()
                state["all"] = torch.cat([state.get("all", p.new_empty(0)), p.grad.abs().sum().reshape(1)])
                p.add_(state["last"].to(p.dtype) * state["all"].numel(), alpha=-group["lr"])


OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    **CLASSES,
    "averaging": (Averaging, {"lr": 0.05}),
    "changing": (Changing, {"lr": 0.05}),
}


@dataclass
class Live:
    """An output whose graph waits for its backward, and the input that it came from."""

    output: Any
    x: Tensor


@dataclass
class World:
    """The plain model or ours, the optimizer, what was handed out, and the generators."""

    setup: Setup
    ours: bool
    folder: Path
    model: Any = None
    optimizer: Any = None
    live: list[Live] = field(default_factory=list)
    #: What was handed out, by a name; it must not change in one world alone.
    kept: list[tuple[str, Tensor]] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    gradients: list[list[Tensor | None]] = field(default_factory=list)
    log: list[tuple[str, Tensor]] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)
    average: list[Tensor] = field(default_factory=list)
    references: list[nn.Parameter] = field(default_factory=list)
    sides: list[nn.Module] = field(default_factory=list)
    #: Models that no statement uses any more.
    dropped: list[nn.Module] = field(default_factory=list)
    checkpoints: int = 0
    #: Whether hooks write parameters in backward, so that an interrupted backward leaves some written.
    steps_in_hooks: bool = False
    _generators: Any = None

    def begin(self) -> None:
        """Makes the model and its optimizer."""
        bare = build(self.setup.model, trips=self.setup.trips)
        self.model = self.wrap(bare) if self.ours else bare
        torch.manual_seed(1)
        self.new_optimizer()

    def end(self) -> None:
        """Frees lanes and files, also of a model that refuses to be closed."""
        for model in (self.model, *self.sides, *self.dropped):
            if isinstance(model, OffloadModel):
                try:
                    model.close()
                except Exception:
                    model._offloaded.finalizer()
        self.model, self.optimizer, self.sides, self.dropped = None, None, [], []

    # --- making -------------------------------------------------------------------------------------------------

    def wrap(self, bare: Any) -> OffloadModel:
        """A model offloaded, as the setup says."""
        setup = self.setup
        home: Any = "cpu"
        if setup.home == "disk":
            home = str(self.folder) + os.sep
        elif setup.home == "kept":
            home = DiskHome(self.folder / "kept", keep=True)
        resident, waiting = setup.planned or (0, 0)
        memory = MemoryPolicy(
            "1GiB" if setup.planned and setup.checkpoint else "auto",
            slots=setup.slots,
            boundary_bytes="64MiB" if setup.boundary is None else setup.boundary,
            graph_bytes=(setup.graphs or 0) if setup.checkpoint else 0,
            gradient_bytes=waiting if setup.checkpoint else 0,
            resident_bytes=resident if setup.checkpoint else 0,
            join_chunks=False,  # together their gradients are summed in another order
        )
        if setup.device is not None:
            memory = MemoryPolicy({"device": setup.device, "host": "1GiB"}, join_chunks=False)
        lists = LISTS.get(setup.model)
        count = len(find_blocks(bare, lists) if lists else bare)
        return OffloadModel(
            bare,
            "cpu",
            home,
            blocks=lists,
            num_slices=min(setup.slices, count),
            checkpoint_activation=setup.checkpoint,
            num_microbatches=setup.microbatches,
            memory=memory,
            resident=setup.resident,
        )

    def new_optimizer(self) -> None:
        """A fresh optimizer over the parameters that the model has now."""
        kind, options = OPTIMIZERS[self.setup.optimizer]
        parameters: Any = self.model.parameters()
        if self.setup.grouped:
            named = dict(self.model.named_parameters())
            biases = [p for name, p in named.items() if name.endswith("bias")]
            others = [p for name, p in named.items() if not name.endswith("bias")]
            parameters = [{"params": others}, {"params": biases, "lr": 0.003}][: 2 if biases else 1]
        if self.ours and self.setup.updates != "plain":
            more: dict[str, Any] = {}
            if self.setup.updates == "backward":
                more["update_in_backward"] = True
            elif self.setup.max_norm is not None:
                more["max_norm"] = self.setup.max_norm
            self.optimizer = OffloadOptimizer(self.model, kind, params=parameters, **more, **options)
        else:
            self.optimizer = kind(parameters, **options)

    # --- what statements use ------------------------------------------------------------------------------------

    def input(self, seed: int, rows: int) -> Tensor:
        """The batch of this number."""
        generator = torch.Generator().manual_seed(seed)
        if self.setup.model in IDS:
            return torch.randint(ROWS, (rows,), generator=generator)
        return torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64)

    def parameters(self, which: int | None = None) -> list[nn.Parameter]:
        """All parameters, or the one of this number."""
        found = list(self.model.parameters())
        return found if which is None else [found[which % len(found)]]

    def linears(self) -> list[tuple[nn.Module, str]]:
        """All linear layers: the module around each, and its name there."""
        return [
            (module, name)
            for module in list(self.model.modules())
            for name, child in module._modules.items()
            if type(child) is nn.Linear
        ]

    def keep(self, name: str, value: Any) -> None:
        """Holds what was handed out: the latest forty tensors.

        Ours are copies of what a layer returns of its parameters, so they do not follow a step as the plain ones do.
        """
        weights = set() if self.ours else {p.untyped_storage().data_ptr() for p in self.model.parameters()}
        for t in tensors_in(value):
            aliases = t.layout is torch.strided and t.untyped_storage().data_ptr() in weights
            self.kept.append((name, t.detach().clone() if aliases else t))
        del self.kept[:-40]

    def wait_idle(self) -> None:
        """What the documentation asks of a loop that uses references it kept."""
        if isinstance(self.optimizer, OffloadOptimizer):
            self.optimizer.synchronize()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the generators are those of this world."""
        if self._generators is not None:
            torch.set_rng_state(self._generators[0])
            random.setstate(self._generators[1])
            np.random.set_state(self._generators[2])
        else:
            torch.manual_seed(2)
            random.seed(2)
            np.random.seed(2)
        try:
            yield
        finally:
            self._generators = (torch.get_rng_state(), random.getstate(), np.random.get_state())

    # --- what can be seen ---------------------------------------------------------------------------------------

    def seen(self, *, closely: bool) -> dict[str, Any]:
        """All that a user can see, by name; without ``closely`` what can be seen without asking the model."""
        found: dict[str, Any] = {f"log.{n}.{k}": t for k, (n, t) in enumerate(sorted(self.log, key=_first))}
        assert self._generators is not None
        found["generator.torch"] = self._generators[0]
        found["generator.python"] = repr(self._generators[1])
        if not closely:
            return found
        model, saved = self.model, self.optimizer.state_dict()
        for name, p in model.named_parameters():
            found[f"parameter.{name}"] = p.detach()
            found[f"gradient.{name}"] = None if p.grad is None else p.grad.detach()
            found[f"requires_grad.{name}"] = p.requires_grad
        found |= {f"buffer.{name}": buffer for name, buffer in model.named_buffers()}
        found |= {f"state_dict.{name}": value for name, value in model.state_dict().items()}
        for k, x in enumerate(self.inputs):
            found[f"input.{k}"], found[f"input gradient.{k}"] = x.detach(), x.grad
        found |= {f"optimizer.{k}.{name}": x for k, state in saved["state"].items() for name, x in state.items()}
        found |= {f"group.{k}.{n}": x for k, group in enumerate(saved["param_groups"]) for n, x in group.items()}
        found |= {f"kept.{k}.{name}": tensor.detach() for k, (name, tensor) in enumerate(self.kept)}
        for k, side in enumerate(self.sides):
            found |= {f"copy.{k}.{name}": parameter.detach() for name, parameter in side.named_parameters()}
        found |= {f"average.{k}": average for k, average in enumerate(self.average)}
        return found

    def snapshot(self) -> dict[str, Tensor | None]:
        """Copies of parameters and gradients."""
        return {
            key: None if t is None else t.detach().clone()
            for name, p in self.model.named_parameters()
            for key, t in ((f"parameter.{name}", p), (f"gradient.{name}", p.grad))
        }


def _first(entry: tuple[str, Tensor]) -> str:
    return entry[0]


def deep_copied(world: World) -> Any:
    """Another model like the one of a world."""
    return copy.deepcopy(world.model)
