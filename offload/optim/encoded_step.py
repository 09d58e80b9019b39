"""Runs ``optimizer.step()`` on parameters whose states are encoded: decoded before, and encoded again afterwards.

Only some 10,000 elements at a time are decoded, where the class is known to update each element by itself. So states in
full take no memory that counts, and they are still in the processor's cache when the update reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from offload.optim.state_forms import StateForm, in_full, is_full, pieces

__all__ = ["step_encoded"]


def step_encoded(
    optimizer: Optimizer, proxies: Sequence[Tensor], encoded: Collection[int], form: StateForm, *, elementwise: bool
) -> Iterator[None]:
    """Updates ``proxies`` (dense, contiguous where ``encoded``) that have a gradient; yields when a part has changed.

    ``encoded``: positions of those with states in ``form``; before their first update they have none. Their
    ``optimizer.state`` has the same tensors afterwards, and new ones for new states. After an exception it has the
    tensors from before, though after the first part some of their elements may be new.
    """
    chosen = [p for k, p in enumerate(proxies) if k in encoded and p.grad is not None]
    if not elementwise:
        yield from _step_whole(optimizer, proxies, chosen, form)
        return
    gradients = [(p, p.grad) for p in proxies]
    try:
        for p in chosen:
            p.grad = None
        others = [p for p in proxies if p.grad is not None]
        if others:
            yield from _call(optimizer, others)
        for p in others:
            p.grad = None  # they are updated, once
        for p, gradient in gradients:
            if any(p is each for each in chosen):
                assert gradient is not None
                yield from _step_in_pieces(optimizer, p, gradient, form)
    finally:
        for p, gradient in gradients:
            p.grad = gradient


def _step_in_pieces(optimizer: Optimizer, proxy: Tensor, gradient: Tensor, form: StateForm) -> Iterator[None]:
    whole, before = proxy.data, optimizer.state[proxy]
    others, stored = _split(before, whole, form)
    keys = form.keys(stored, whole)
    weights, flat = whole.view(-1), gradient.contiguous().view(-1)
    after = before
    try:
        for part in pieces(weights.numel()):
            proxy.data, proxy.grad = weights[part], flat[part]
            state = optimizer.state[proxy] = _copied(others)
            for key in keys:
                state[key] = torch.empty_like(proxy.data)
                form.read(key, stored, part, state[key])
            yield from _call(optimizer, [proxy])
            for key in [key for key, value in state.items() if is_full(value, proxy)]:
                if form.names(key)[0] not in stored:
                    stored.update(form.allocate(key, whole))
                form.write(key, stored, part, state.pop(key))
        after = {**state, **stored}
    finally:
        proxy.grad = None
        proxy.data = whole
        optimizer.state[proxy] = after


def _step_whole(
    optimizer: Optimizer, proxies: Sequence[Tensor], chosen: Sequence[Tensor], form: StateForm
) -> Iterator[None]:
    before = [optimizer.state[p] for p in chosen]
    split = [_split(state, p, form) for p, state in zip(chosen, before, strict=True)]
    try:
        for p, (others, stored) in zip(chosen, split, strict=True):
            optimizer.state[p] = in_full({**_copied(others), **stored}, p)
        yield from _call(optimizer, [p for p in proxies if p.grad is not None])
        for p, (_, stored) in zip(chosen, split, strict=True):
            state = optimizer.state[p]
            for key in [key for key, value in state.items() if is_full(value, p)]:
                if form.names(key)[0] not in stored:
                    stored.update(form.allocate(key, p))
                values = state.pop(key).contiguous().view(-1)
                for part in pieces(values.numel()):
                    form.write(key, stored, part, values[part])
            state.update(stored)
    except BaseException:
        for p, state in zip(chosen, before, strict=True):
            optimizer.state[p] = state
        raise


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
