"""Tries whether an optimizer class updates each parameter by itself, and each element, so that it can update parts.

A class may scale an update by the norm of a parameter (LAMB), keep means of rows and columns (Adafactor) or make a
matrix orthogonal (Muon). On the rows that one rank stores it would compute something else, without an error. What a
class does is not declared anywhere. So it updates a small matrix as a whole and in two parts, and the results are
compared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.streaming.optimizers import ModelOptimizer

__all__ = ["check_each_alone", "check_elementwise", "check_updates_parts"]

#: Steps of the trial, and shape of the matrix.
_STEPS, _SHAPE = 3, (4, 3)
_HALVES = slice(None, _SHAPE[0] // 2), slice(_SHAPE[0] // 2, None)
#: Relative difference that vectorised kernels may make.
_TOLERANCE = 1e-4


#: Of the gradients of steps: a norm is above and below what a class may clip by.
_SCALES = (1.0, 1e3, 1e-3)


def _updated(
    kind: Callable[..., Optimizer],
    options: Mapping[str, Any],
    arguments: Mapping[str, Any],
    values: Sequence[Tensor],
    gradients: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """The values of parameters of one group after steps; ``gradients``: in each step, one for each parameter."""
    parameters = [value.clone().requires_grad_() for value in values]
    optimizer = kind([{**copy.deepcopy(dict(options)), "params": parameters}], **copy.deepcopy(dict(arguments)))
    for of_step in gradients:
        for parameter, gradient in zip(parameters, of_step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def check_each_alone(kind: Callable[..., Optimizer], options: Mapping[str, Any], arguments: Mapping[str, Any]) -> None:
    """Raises TypeError if a class updates two parameters otherwise together than apart.

    A class that cannot be tried, since it needs a closure or other gradients, is accepted.
    """
    update, generator = partial(_updated, kind, options, arguments), torch.Generator().manual_seed(0)
    values = [torch.randn(_SHAPE, generator=generator) for _ in range(2)]
    gradients = [[scale * torch.randn(_SHAPE, generator=generator) for _ in values] for scale in _SCALES]
    try:
        with torch.random.fork_rng(devices=[]):
            together = update(values, gradients)
            apart = [update([value], [[step[k]] for step in gradients])[0] for k, value in enumerate(values)]
    except Exception:
        return
    if not all(torch.allclose(a, b, rtol=0, atol=0, equal_nan=True) for a, b in zip(together, apart, strict=True)):
        name = getattr(kind, "__name__", kind)
        raise TypeError(
            f"{name} updates two parameters otherwise together than apart: it joins them, as by a global norm, or "
            f"draws random numbers; but shards are updated one after the other. Clip with max_norm=, take a class that "
            f"treats each parameter by itself, or give model.parameters() to {name} itself"
        )


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
        return _updated(kind, options, arguments, [value], [[gradient] for gradient in gradients])[0]

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


def check_updates_parts(optimizer: ModelOptimizer, *, sharded: bool) -> None:
    """Raises TypeError for a class that needs whole parameters, where it updates parts: as ranks, or states of a form.

    ValueError for states that ranks cannot store.
    """
    factory = optimizer.factory
    if sharded and factory.form is not None and factory.form.together > 1:
        raise ValueError(
            f"states={factory.form.name!r} does not support mesh=: {factory.form.together} elements share a scale, "
            f"and another number of ranks, which may load a checkpoint, cuts elsewhere; pass states=torch.bfloat16"
        )
    for options in optimizer.options():
        if sharded:
            check_elementwise(factory.kind, options, factory.arguments)
        elif factory.form is not None:
            why, instead = "with states= parameters are updated in parts", "leave out states="
            check_elementwise(factory.kind, options, factory.arguments, why, instead)
