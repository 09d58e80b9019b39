"""The parameters that users see, and how passes of all ranks agree: here without a mesh, where nothing differs.

With a mesh it is :class:`offload.mesh.sharded.MeshParameters`.

Tries whether an optimizer class updates each element by itself, so that it can update parts of parameters.

A class may scale an update by the norm of a parameter (LAMB), keep means of rows and columns (Adafactor) or make a
matrix orthogonal (Muon). On the rows that one rank stores it would compute something else, without an error. What a
class does is not declared anywhere. So it updates a small matrix as a whole and in two parts, and the results are
compared.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.streaming.slices import Slice

if TYPE_CHECKING:
    from offload.mesh.ranks import Ranks
    from offload.mesh.traffic import ExchangeBytes
    from offload.streaming.optimizers import ModelOptimizer

__all__ = ["PublicParameters", "check_elementwise"]

#: Steps of the trial, and shape of the matrix.
_STEPS, _SHAPE = 3, (4, 3)
_HALVES = slice(None, _SHAPE[0] // 2), slice(_SHAPE[0] // 2, None)
#: Relative difference that vectorised kernels may make.
_TOLERANCE = 1e-4


def check_elementwise(
    kind: Callable[..., Optimizer],
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    why: str = "with mesh= each rank updates some rows of a parameter",
    instead: str = "give model.parameters(), which are DTensors, to {name} itself if it supports them",
) -> None:
    """Raises TypeError if a class needs whole parameters, or cannot be tried.

    ``options``: of a group; ``arguments``: of the constructor; ``why`` the class must be elementwise, and what else a
    user may do ``instead``, for the error.
    """
    name = getattr(kind, "__name__", kind)

    def updated(value: Tensor, gradients: list[Tensor]) -> Tensor:
        parameter = value.clone().requires_grad_()
        group = {**copy.deepcopy(dict(options)), "params": [parameter]}
        optimizer = kind([group], **copy.deepcopy(dict(arguments)))
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    generator = torch.Generator().manual_seed(0)
    value, *gradients = (torch.randn(_SHAPE, generator=generator) for _ in range(1 + _STEPS))
    try:
        whole = updated(value, gradients)
        parts = [updated(value[rows], [g[rows] for g in gradients]) for rows in _HALVES]
    except Exception as error:
        raise TypeError(f"{why}, and {name} cannot be tried on a matrix to see whether it can: {error}") from error
    if not torch.allclose(
        whole, torch.cat(parts), rtol=_TOLERANCE, atol=_TOLERANCE * float((whole - value).abs().max())
    ):
        raise TypeError(
            f"{why}, but {name} updates a matrix differently as a whole and in parts; take a class that updates each "
            f"element by itself (SGD, Adam, AdamW, ...), or {instead.format(name=name)}"
        )


class PublicParameters:
    """Without a mesh: users see the parameters of the layers themselves."""

    #: Whether each rank stores a part only; if so, the ranks that do together.
    sharded = False
    ranks: Ranks | None = None
    #: Host memory that collectives take, beside the slots.
    buffer_bytes = 0

    def of(self, s: Slice) -> nn.Parameter:
        """The parameter that users see for a stored one."""
        return s.parameter

    def for_autograd(self, parameters: Sequence[nn.Parameter]) -> Sequence[nn.Parameter]:
        """What users' graphs hold for parameters of layers."""
        return parameters

    def recount(self) -> None:
        """Counts the engine's own references to what users see anew."""

    def stored(self, parameter: nn.Parameter) -> nn.Parameter:
        """What is stored of a parameter that users see."""
        return parameter

    def replicate(self, named: Mapping[str, nn.Parameter], modules: Iterable[nn.Module]) -> None:
        """Takes the parameters of ``modules`` that do not stream, and that each process stores whole."""

    def whole(self) -> contextlib.AbstractContextManager[None]:
        """A context in which modules hold the parameters that they compute with, around passes."""
        return contextlib.nullcontext()

    def take_settings(self) -> None:
        """Takes over ``requires_grad`` before a forward. Raises RuntimeError for hooks that would never run."""

    def take_gradients(self) -> None:
        """Takes over gradients that were set, replaced or removed."""

    def exchange_bytes(self) -> ExchangeBytes | None:
        """What ranks hold on a device of its own memory to exchange what they store; None where they do not."""
        return None

    def accumulates(self) -> contextlib.AbstractContextManager[None]:
        """A context in which each rank keeps its gradients to itself."""
        return contextlib.nullcontext()

    def drop_sums(self, parameters: Iterable[nn.Parameter]) -> None:
        """Drops what is kept so of the gradients of some parameters."""

    def compare(self, what: str, number: float) -> list[float]:
        """The ``number`` of each rank, at a point that all of them reach: the begin of ``what``."""
        return [number]

    def held_elsewhere(self, known: Counter[nn.Parameter]) -> bool | None:
        """Whether other code holds what users see; None: the engine's own references tell."""
        return None

    def check_optimizer(self, optimizer: ModelOptimizer) -> None:
        """Raises TypeError for a class that needs whole parameters, where they are updated in parts."""
        factory = optimizer.factory
        for options in optimizer.options() if factory.form is not None else ():
            check_elementwise(
                factory.kind,
                options,
                factory.arguments,
                why="with states= parameters are updated in parts",
                instead="leave out states=",
            )

    def begin_step(self, optimizer: ModelOptimizer) -> None:
        """Called at the beginning of a step."""

    def note_step(self, optimizer: ModelOptimizer) -> None:
        """Called when a step can no longer fail, before its updates become pending."""

    def local(self, parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """The stored parameters that this process counts in a norm; one process counts those that are stored whole."""
        return list(parameters)

    def total_norm(self, norm: Tensor) -> Tensor:
        """The norm of all gradients, from that of what this process stores."""
        return norm

    def show_state(self, s: Slice, state: dict[str, Any]) -> dict[str, Any]:
        """The state of an optimizer for a parameter as users see it."""
        return state

    def stored_state(self, s: Slice, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this process stores of a state that users loaded."""
        return state
