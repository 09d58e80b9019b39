"""Runs ``optimizer.step()`` where states or weights are encoded: decoded before, and encoded again afterwards.

Only 131,072 elements at a time are decoded, where the class is known to update each element by itself. So states in
full take no memory that counts, and they are still in the processor's cache when the update reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.state_forms import FULL, StateForm, in_full, is_full, pieces
from offload.storage.contract import in_order
from offload.storage.thread_memory import thread_memory
from offload.streaming.weight_forms import WeightForm

__all__ = ["EncodedWeights", "step_encoded"]


@dataclass(frozen=True, eq=False)
class EncodedWeights:
    """The weights of one proxy where they are stored in a form: its parameter's, or a part of it; all flat."""

    form: WeightForm
    #: bfloat16; int16 or None.
    upper: Tensor
    lower: Tensor | None
    #: The upper values as float32, in a slot, which are read from there and stored there as well.
    wide: Tensor | None
    #: Type and layout of the weights.
    like: Tensor
    #: What decides how the result is rounded: the step, the parameter, and the first of its elements.
    step: int
    name: str
    begin: int

    def read(self, part: slice) -> Tensor:
        """The values of the elements ``part``; valid until the thread reads others."""
        values = thread_memory("weights", part.stop - part.start, torch.float32)
        if self.wide is not None:
            self.upper[part] = self.wide[part]
        self.form.decode(self.upper[part], None if self.lower is None else self.lower[part], values)
        return values

    def write(self, part: slice, values: Tensor) -> None:
        """Stores the updated values of the elements ``part``; overwrites ``values``."""
        lower, begin = None if self.lower is None else self.lower[part], self.begin + part.start
        self.form.store(values, self.upper[part], lower, step=self.step, name=self.name, begin=begin)
        if self.wide is not None:
            self.wide[part] = self.upper[part]


#: Of none of the proxies.
_NONE: Mapping[int, EncodedWeights] = MappingProxyType({})


def step_encoded(
    optimizer: Optimizer,
    proxies: Sequence[Tensor],
    encoded: Collection[int],
    form: StateForm | None,
    *,
    elementwise: bool,
    weights: Mapping[int, EncodedWeights] = _NONE,
) -> Iterator[None]:
    """Updates ``proxies`` (dense, contiguous where ``encoded``) that have a gradient; yields when a part has changed.

    ``encoded``: positions of those with states in ``form``; before their first update they have none. Their
    ``optimizer.state`` has the same tensors afterwards, and new ones for new states. ``weights``: the values of those
    that are stored in a form, by position; the proxy itself has only their type and shape. After an exception states
    and weights are the tensors from before, though after the first part some of their elements may be new.
    """
    chosen = [k for k, p in enumerate(proxies) if (k in encoded or k in weights) and p.grad is not None]
    if not elementwise:
        yield from _step_whole(optimizer, proxies, [k for k in chosen if k in encoded], form, weights)
        return
    gradients = [p.grad for p in proxies]
    try:
        for k in chosen:
            proxies[k].grad = None
        others = [p for p in proxies if p.grad is not None]
        if others:
            yield from _call(optimizer, others)
        for p in others:
            p.grad = None  # they are updated, once
        for k in chosen:
            gradient, used = gradients[k], form if k in encoded else FULL
            assert gradient is not None
            assert used is not None
            yield from _step_in_pieces(optimizer, proxies[k], gradient, used, weights.get(k))
    finally:
        for p, gradient in zip(proxies, gradients, strict=True):
            p.grad = gradient


def _step_in_pieces(
    optimizer: Optimizer, proxy: Tensor, gradient: Tensor, form: StateForm, stored_weights: EncodedWeights | None
) -> Iterator[None]:
    whole, before = proxy.data, optimizer.state[proxy]
    like = whole if stored_weights is None else stored_weights.like
    others, stored = _split(before, whole, form)
    keys = form.keys(stored, whole)
    if form is FULL:
        stored.update((key, _laid_out(stored[key], like)) for key in keys)
    flat = in_order(_laid_out(gradient, like))
    after = before
    try:
        for part in pieces(whole.numel()):
            proxy.data = in_order(whole)[part] if stored_weights is None else stored_weights.read(part)
            proxy.grad = flat[part]
            state = optimizer.state[proxy] = _copied(others)
            for key in keys:
                state[key] = form.decoded(key, stored, part, whole.dtype)
            yield from _call(optimizer, [proxy])
            for key in [key for key, value in state.items() if is_full(value, proxy)]:
                if form.names(key)[0] not in stored:
                    stored.update(form.allocate(key, like))
                form.write(key, stored, part, state.pop(key))
            if stored_weights is not None:
                stored_weights.write(part, proxy.data)
        after = {**state, **stored}
    finally:
        proxy.grad = None
        proxy.data = whole
        optimizer.state[proxy] = after


def _laid_out(dense: Tensor, like: Tensor) -> Tensor:
    """A tensor in the layout of another one of its shape."""
    if dense.stride() == like.stride():
        return dense
    return torch.empty_strided(like.shape, like.stride(), dtype=dense.dtype).copy_(dense)


def _step_whole(
    optimizer: Optimizer,
    proxies: Sequence[Tensor],
    encoded: Sequence[int],
    form: StateForm | None,
    weights: Mapping[int, EncodedWeights],
) -> Iterator[None]:
    chosen = [proxies[k] for k in encoded]
    before = [optimizer.state[p] for p in chosen]
    split = [_split(state, p, form) for p, state in zip(chosen, before, strict=True)] if form is not None else []
    stand_ins = {k: proxies[k].data for k in weights}
    try:
        for k, stored_weights in weights.items():
            values = torch.empty_strided(stored_weights.like.shape, stored_weights.like.stride())
            for part in pieces(values.numel()):
                in_order(values)[part] = stored_weights.read(part)
            gradient, proxies[k].grad = proxies[k].grad, None
            proxies[k].data, proxies[k].grad = values, gradient
        for p, (others, stored) in zip(chosen, split, strict=True):
            optimizer.state[p] = in_full({**_copied(others), **stored}, p)
        yield from _call(optimizer, [p for p in proxies if p.grad is not None])
        for p, (_, stored) in zip(chosen, split, strict=True):
            assert form is not None
            state = optimizer.state[p]
            for key in [key for key, value in state.items() if is_full(value, p)]:
                if form.names(key)[0] not in stored:
                    stored.update(form.allocate(key, p))
                values = state.pop(key).contiguous().view(-1)
                for part in pieces(values.numel()):
                    form.write(key, stored, part, values[part])
            state.update(stored)
        for k, stored_weights in weights.items():
            values = in_order(proxies[k].data)
            for part in pieces(values.numel()):
                stored_weights.write(part, values[part])
    except BaseException:
        for p, state in zip(chosen, before, strict=True):
            optimizer.state[p] = state
        raise
    finally:
        for k, data in stand_ins.items():
            proxies[k].data = data


def _call(optimizer: Optimizer, proxies: Sequence[Tensor]) -> Iterator[None]:
    """Calls ``optimizer.step()``; yields if it changed anything, also if it failed afterwards."""
    counts = {id(tensor): tensor._version for tensor in _tensors(optimizer, proxies)}
    try:
        optimizer.step()
    except BaseException:
        if any(tensor._version != counts.get(id(tensor), 0) for tensor in _tensors(optimizer, proxies)):
            yield
        raise
    yield


def _tensors(optimizer: Optimizer, proxies: Sequence[Tensor]) -> list[Tensor]:
    values = [value for p in proxies for value in optimizer.state[p].values()]
    return [*proxies, *(value for value in values if isinstance(value, Tensor))]


def _split(state: Mapping[str, Any], parameter: Tensor, form: StateForm) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states that are not in the form, and those that are."""
    names = [name for key in form.keys(state, parameter) for name in form.names(key)]
    return {n: v for n, v in state.items() if n not in names}, {n: state[n] for n in names}


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in state.items()}
