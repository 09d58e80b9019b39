"""Runs the two passes of one GradCache step over all towers, each in the way that suits its model.

==================================  =================================================================================
model                               module that runs it
==================================  =================================================================================
has ``forward_chunks``              ``streamed``: each shard is loaded once for all chunks of all towers of this model
contains such a model               ``wrapped``: the same for the model inside, chunk by chunk around it
plain ``nn.Sequential``, and        ``sequential``: the same engine over layers in memory
``boundary_bytes`` is set
any other; or a subclass replaces   ``two_pass``: chunk by chunk, through the hooks ``forward_no_grad`` and
``model_call`` or such a hook       ``forward_backward``
==================================  =================================================================================
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from gradcache import representations
from gradcache.accumulation import Accumulation
from gradcache.callables import CallableModel
from gradcache.chunk_inputs import has_graph
from gradcache.distributed.reduction import Reduction, after_backward
from gradcache.nested import tensors_in
from gradcache.sequential import SequentialModel, is_plain_sequential
from gradcache.streamed import StreamedModel, StreamedTowers
from gradcache.two_pass import InputGradients, is_trainable
from gradcache.used_modules import UsedModules
from gradcache.wrapped.towers import WrappedTowers, streamed_inside, warn_once
from pipe.microbatch import rows_of

if TYPE_CHECKING:
    from gradcache.grad_cache import GradCache

__all__ = ["Step", "Tower"]

#: If a subclass replaces one of these hooks, its models run chunk by chunk.
_CHUNK_HOOKS = ("model_call", "forward_no_grad", "forward_backward")


@dataclass(eq=False)
class Tower:
    """One model with its chunks and results in a step."""

    model: nn.Module
    chunks: list[Any]
    encoded: Any = None
    states: list[Any] = field(default_factory=list)
    wants_gradient: bool = True


class Step:
    """Both passes over all towers."""

    def __init__(self, owner: GradCache, towers: list[Tower]) -> None:
        self._owner = owner
        self._towers = towers
        self.inputs = InputGradients()
        self.reduction = Reduction((), UsedModules())
        self._shared: list[tuple[StreamedTowers | WrappedTowers, list[Tower]]] = []
        #: Greatest difference between the two passes of streamed towers, with ``audit``.
        self.greatest_difference = 0.0

    @contextlib.contextmanager
    def gradients(self, heads: UsedModules, in_backward: bool = False) -> Iterator[Callable[[], None]]:
        """A context that collects this step's gradients.

        Yields a function that adds them to ``.grad``, averaged over processes; if it is not called, no ``.grad``
        changes.

        Args:
            heads: trainable modules and tensors besides towers.
            in_backward: whether the step runs inside a backward of the caller.
        """
        # A streamed model offloads its gradients itself.
        own = [tower.model for tower in self._towers] + heads.modules
        at_home = [parameter for model in own for part in streamed_inside(model) for parameter in part.parameters()]
        parameters: list[Tensor] = [
            p for module in own if not isinstance(module, StreamedModel) for p in module.parameters()
        ]
        parameters += [tensor for module in own if isinstance(module, CallableModel) for tensor in module.tensors]
        self.reduction = reduction = Reduction(self._owner.towers, heads)
        with reduction.silenced(), Accumulation([*parameters, *heads.tensors], at_home) as accumulation:
            average = partial(reduction.average, accumulation.parameters) if reduction else None
            if in_backward and reduction.awaited:
                # The wrappers reduce .grad in the same backward and write the results at its end, so wait for that.
                yield lambda: after_backward(accumulation.postponed(average))
            else:
                yield partial(accumulation.commit, average)

    @property
    def wants_gradient(self) -> list[bool]:
        """After :meth:`encode`: for each tower, whether its representations need a gradient."""
        return [tower.wants_gradient for tower in self._towers]

    def encode(self) -> list[Any]:
        """The first pass. Returns the representations of each tower."""
        if torch.is_grad_enabled():
            Reduction(self._owner.towers, UsedModules()).broadcast_buffers()
        groups: dict[int, list[Tower]] = {}
        wrapped = self._wrapped()
        for tower in self._towers:
            if tower in wrapped:
                if tower is wrapped[0]:
                    self._encode_wrapped(wrapped)
            elif self._is_streamed(tower.model):
                groups.setdefault(id(tower.model), []).append(tower)
            else:
                tower.encoded, tower.states = self._owner.forward_no_grad(tower.model, tower.chunks)
                tower.wants_gradient = any(getattr(state, "requires_grad", True) for state in tower.states)
        for group in groups.values():
            self._encode_together(group)
        return [tower.encoded for tower in self._towers]

    def _wrapped(self) -> list[Tower]:
        """The towers with a streamed model inside, and towers that are such a streamed model themselves."""
        inside = {id(tower): streamed_inside(tower.model) for tower in self._towers}
        around = [tower for tower in self._towers if inside[id(tower)] not in ([], [tower.model])]
        own_hooks = [hook for hook in _CHUNK_HOOKS if self._owner.replaced(hook)]
        if own_hooks:
            for tower in around:
                reason = f"{type(self._owner).__name__} replaces {' and '.join(own_hooks)}"
                warn_once(inside[id(tower)][0], type(tower.model).__name__, reason)
            return []
        shared = {id(model) for tower in around for model in inside[id(tower)]}
        return [tower for tower in self._towers if any(id(model) in shared for model in inside[id(tower)])]

    def _encode_wrapped(self, towers: list[Tower]) -> None:
        owner = self._owner
        chunks = [(tower.model, tower.chunks) for tower in towers]
        shared = WrappedTowers(chunks, owner.encoder_of, owner.get_input_tensors, self.inputs, audit=owner.audit)
        for tower, encoded in zip(towers, shared.encode(), strict=True):
            tower.encoded = encoded
        for tower, requires_grad in zip(towers, shared.requires_grad, strict=True):
            tower.wants_gradient = requires_grad or is_trainable(tower.model, tower.chunks)
        self._shared.append((shared, towers))

    def _encode_together(self, group: list[Tower]) -> None:
        model, owner = group[0].model, self._owner
        raw = [tower.chunks for tower in group]
        lazy = (owner.process_fn is not None or owner.replaced("processed")) and not has_graph(owner.process_fn, raw)
        if lazy:
            chunks, trainable = raw, is_trainable(model, ())
        else:
            chunks = [[self.inputs.detach(owner.processed(chunk)) for chunk in tower] for tower in raw]
            trainable = is_trainable(model, chunks)
        process_fn = owner.processed if lazy else None
        audit = list(model.children()) if owner.audit else None
        shared = StreamedTowers(self._streamed(model), chunks, owner.get_reps, process_fn, audit)
        with self._owner.autocast(model):
            encoded = shared.encode(trainable)
        for tower, value in zip(group, encoded, strict=True):
            tower.encoded, tower.wants_gradient = value, trainable
        self._shared.append((shared, group))

    def backward(self, cache: Sequence[Any], no_sync_except_last: bool) -> None:
        """The second pass; ``cache``: the gradient of each tower's representations."""
        gradient_of = {id(tower): gradient for tower, gradient in zip(self._towers, cache, strict=True)}
        shared = {id(tower) for _, group in self._shared for tower in group}
        for tower in self._towers:
            gradient = gradient_of[id(tower)]
            if id(tower) in shared or not representations.has_gradient(gradient):
                continue
            per_chunk = representations.split_gradients(gradient, self._rows_per_chunk(tower))
            self._owner.forward_backward(
                tower.model, tower.chunks, per_chunk, tower.states, no_sync_except_last=no_sync_except_last
            )
        for shared, group in self._shared:
            shared.backward([gradient_of[id(tower)] for tower in group])
            self.greatest_difference = max(self.greatest_difference, shared.greatest_difference)

    def _rows_per_chunk(self, tower: Tower) -> list[int]:
        known = [getattr(state, "rows", None) for state in tower.states]
        if all(isinstance(rows, int) for rows in known):
            return cast(list[int], known)
        # A subclass replaced forward_no_grad: assume one row of representation per row of input.
        rows, total = [rows_of(tensors_in(chunk)) for chunk in tower.chunks], representations.rows_in(tower.encoded)
        if sum(rows) != total:
            raise ValueError(
                f"expected one representation per row, got {total} for chunks of {rows} rows; let forward_no_grad "
                f"return states with an attribute rows"
            )
        return rows

    def _is_streamed(self, model: nn.Module) -> bool:
        """Whether the model runs all chunks together; not if a subclass replaces a hook for single chunks."""
        layered = self._owner.boundary_bytes is not None and is_plain_sequential(model)
        return (isinstance(model, StreamedModel) or layered) and not self._owner.replaced(*_CHUNK_HOOKS)

    def _streamed(self, model: nn.Module) -> StreamedModel:
        """The model itself; or an adapter of a plain one, with the measurements of earlier steps."""
        if isinstance(model, StreamedModel):
            return model
        budget = self._owner.boundary_bytes
        assert isinstance(model, nn.Sequential)
        assert budget is not None
        known = self._owner.layered.get(model)
        if known is None or known.layers != list(model) or known.boundary_bytes != budget:
            # Members that every chunk receives whole cannot be concatenated.
            regroup = self._owner.regroup and not self._owner.broadcast
            self._owner.layered[model] = known = SequentialModel(model, budget, regroup)
        return known
