"""Runs the two passes of one GradCache step over all towers, each in the way that suits its model.

==================================  =================================================================================
model                               module that runs it
==================================  =================================================================================
is an ``OffloadModel``              ``streamed``: each shard is loaded once for all chunks of all towers of this model
contains such a model               ``wrapped``: the same for the model inside, chunk by chunk around it
any other; or a subclass replaces   ``two_pass``: chunk by chunk, through the hooks ``forward_no_grad`` and
``model_call`` or such a hook       ``forward_backward``
==================================  =================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from gradcache import representations
from gradcache.accumulation import Accumulation
from gradcache.contract import StepOwner
from gradcache.distributed import Reduction, after_backward, broadcast_buffers
from gradcache.streamed import StreamedTowers, Tower
from gradcache.two_pass import InputGradients
from gradcache.used_modules import CallableModel, UsedModules
from gradcache.wrapped.towers import WrappedTowers, streamed_inside, warn_once
from offload import OffloadModel
from offload.identities import identities_only
from pipe.microbatch import rows_of
from pipe.nested import tensors_in
from pipe.torch_private.autograd import has_hooks

__all__ = ["Step"]

#: If a subclass replaces one of these hooks, its models run chunk by chunk.
_CHUNK_HOOKS = ("model_call", "forward_no_grad", "forward_backward")


class Step:
    """Both passes over all towers. ``heads``: what is trained besides them."""

    def __init__(self, owner: StepOwner, towers: list[Tower], heads: UsedModules) -> None:
        self._owner = owner
        self.towers = towers
        own = [tower.model for tower in towers] + heads.modules
        # Before the first pass, after which FSDP may leave gathered parameters in place of its own.
        with identities_only():
            # A streamed model offloads its gradients itself.
            self._at_home = [p for model in own for part in streamed_inside(model) for p in part.parameters()]
            parameters = [p for module in own if not isinstance(module, OffloadModel) for p in module.parameters()]
        tensors = [tensor for module in own if isinstance(module, CallableModel) for tensor in module.tensors]
        self._parameters = [*parameters, *tensors, *heads.tensors]
        self._reduction = Reduction(owner.towers, heads)
        self.check = self._reduction.check
        self.inputs = InputGradients()
        self._shared: list[StreamedTowers | WrappedTowers] = []

    @contextlib.contextmanager
    def gradients(self, returned: Sequence[Tensor] | None = None) -> Iterator[Callable[[], list[Tensor | None]]]:
        """A context that collects the gradients of this step's towers and heads.

        Yields a function that adds them to ``.grad``, averaged over processes. If it is not called, no ``.grad``
        changes.

        Args:
            returned: within the caller's backward: :meth:`hooked`. The function returns the gradients of these
                parameters and does not add them.
        """
        reduction = self._reduction
        with reduction.no_sync(), Accumulation(self._parameters, self._at_home) as accumulation:
            average = partial(reduction.average, accumulation.parameters) if reduction else None

            def commit() -> list[Tensor | None]:
                taken = [accumulation.take(parameter) for parameter in returned or ()]
                if returned is not None and reduction.has_pending_forwards:
                    # The wrappers reduce .grad in the same backward and write the results at its end, so wait for that.
                    after_backward(accumulation.postponed(average))
                else:
                    accumulation.commit(average)
                return taken

            yield commit

    def hooked(self) -> list[Tensor]:
        """The parameters with hooks whose gradients the caller's backward adds to those of its own graph.

        Their hooks then run once, on the sum of both. None over several processes, where gradients are averaged.
        """
        at_home = {id(parameter) for parameter in self._at_home}
        hooked = (p for p in self._parameters if p.requires_grad and has_hooks(p) and id(p) not in at_home)
        return [] if self._reduction else list(dict.fromkeys(hooked))

    def encode(self) -> list[Any]:
        """The first pass. Returns the representations of each tower."""
        if torch.is_grad_enabled():
            broadcast_buffers(self._owner.towers)
        together: dict[OffloadModel, list[Tower]] = {}
        wrapped, one_by_one = self._wrapped(), self._owner.replaced(*_CHUNK_HOOKS)
        for tower in self.towers:
            if tower in wrapped:
                if tower is wrapped[0]:
                    self._shared.append(WrappedTowers(self._owner, wrapped, self.inputs))
                    self._shared[0].encode()
            elif isinstance(tower.model, OffloadModel) and not one_by_one:
                together.setdefault(tower.model, []).append(tower)
            else:
                tower.encoded, tower.states = self._owner.forward_no_grad(tower.model, tower.chunks)
                tower.wants_gradient = any(getattr(state, "requires_grad", True) for state in tower.states)
        for model, group in together.items():
            self._shared.append(StreamedTowers(self._owner, model, group, self.inputs))
            self._shared[-1].encode()
        return [tower.encoded for tower in self.towers]

    def _wrapped(self) -> list[Tower]:
        """The towers with a streamed model inside, and towers that are such a streamed model themselves."""
        inside = {tower: streamed_inside(tower.model) for tower in self.towers}
        around = [tower for tower in self.towers if inside[tower] not in ([], [tower.model])]
        own_hooks = [hook for hook in _CHUNK_HOOKS if self._owner.replaced(hook)]
        if own_hooks:
            for tower in around:
                reason = f"{type(self._owner).__name__} replaces {' and '.join(own_hooks)}"
                warn_once(inside[tower][0], type(tower.model).__name__, reason)
            return []
        shared = {model for tower in around for model in inside[tower]}
        return [tower for tower in self.towers if not shared.isdisjoint(inside[tower])]

    def backward(self, cache: Sequence[Any], no_sync_except_last: bool) -> None:
        """The second pass; ``cache``: the gradient of each tower's representations."""
        for tower, gradient in zip(self.towers, cache, strict=True):
            tower.gradient = gradient
        for tower in self.towers:
            if tower.states is not None and representations.has_gradient(tower.gradient):
                tower.rows = self._rows_per_chunk(tower, tower.states)
                per_chunk = tower.split_gradient()
                self._owner.forward_backward(
                    tower.model, tower.chunks, per_chunk, tower.states, no_sync_except_last=no_sync_except_last
                )
        for shared in self._shared:
            shared.backward()

    def _rows_per_chunk(self, tower: Tower, states: Sequence[Any]) -> list[int]:
        known = [getattr(state, "rows", None) for state in states]
        if all(isinstance(rows, int) for rows in known):
            return cast(list[int], known)
        # A subclass replaced forward_no_grad: assume one row of representation per row of input.
        counted = [self._owner.rows_in_input(chunk) for chunk in tower.chunks]
        rows = [rows_of(tensors_in(c)) if n is None else n for c, n in zip(tower.chunks, counted, strict=True)]
        total = representations.rows_in(tower.encoded)
        if sum(rows) != total:
            raise ValueError(
                f"expected one representation per row, got {total} for chunks of {rows} rows; let forward_no_grad "
                f"return states with an attribute rows"
            )
        return rows
