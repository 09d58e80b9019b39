"""Runs towers that contain streamed models: chunk by chunk outside these models, all chunks per shard inside them.

::

    pass 1    for chunk i:   forward to the tower's first call of a streamed model, where it is suspended
              all chunks:    that call, loading each shard once; and so on with further calls
              for chunk i:   forward to its representation
    pass 2    for chunk i:   forward again with a graph and stored outputs; backward from the representation to these
              all chunks:    backward through the last call, loading each shard once
              for chunk i:   forward again up to that call; backward from its inputs

A call loads each shard once forward and once backward, for any number of chunks, if all chunks make the same calls in
the same order. Otherwise results are the same, but shards are loaded more often. The same holds for a call that cannot
be deferred (see ``suspended``). Both are reported once, in a RuntimeWarning.

Between the passes it keeps the inputs and outputs of each streamed model, for every chunk. Code around the models,
``process_fn`` included, runs once more in each pass for every deferred call: it should be cheap compared to the model.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from gradcache import representations
from gradcache.contract import StepOwner
from gradcache.streamed import Tower
from gradcache.two_pass import InputGradients, devices_in_use, is_trainable
from gradcache.wrapped.suspended import Call, Observer, SuspendedForward, TowerState
from offload import OffloadModel
from offload.identities import identities_only
from pipe.nested import tensors_in

__all__ = ["WrappedTowers", "streamed_inside", "warn_once"]


def streamed_inside(model: nn.Module) -> list[OffloadModel]:
    """The streamed models in a module, itself included, each once; not those inside another streamed model."""
    # Not by modules(), which makes a streamed model apply its pending updates.
    seen: dict[nn.Module, None] = {}
    stack: list[nn.Module | None] = [model]
    while stack:
        module = stack.pop()
        if module is not None and module not in seen:
            seen[module] = None
            if not isinstance(module, OffloadModel):
                stack += reversed(module._modules.values())
    return [module for module in seen if isinstance(module, OffloadModel)]


class WrappedTowers:
    """Runs the two passes of all towers of a step that contain streamed models."""

    @identities_only()
    def __init__(self, owner: StepOwner, towers: Sequence[Tower], inputs: InputGradients) -> None:
        self._towers = towers
        self._inputs = inputs
        self._owner = owner
        #: The outputs of calls that ran together, with their graph; and each forward with the number of its call.
        self._joint_calls: list[tuple[list[Any], list[tuple[SuspendedForward, int, Call]]]] = []
        self._visits = {part: 0 for tower in towers for part in streamed_inside(tower.model)}
        #: By tower and chunk.
        self._forwards: list[list[SuspendedForward]] = []
        self._tower_states: dict[nn.Module, TowerState] = {}
        observers = {part: Observer(part) for part in self._visits}
        for tower in towers:
            model, chunks = tower.model, tower.chunks
            if model not in self._tower_states:
                inside = {part: observers[part] for part in streamed_inside(model)}
                self._tower_states[model] = TowerState(model, inside)
            state = self._tower_states[model]
            given = [list(owner.get_input_tensors(chunk)) for chunk in chunks]
            state.layers.devices = {*state.layers.devices, *devices_in_use(list(model.parameters()), given)}
            self._forwards.append([SuspendedForward(chunk, owner.encoder_of(model), state) for chunk in chunks])

    # --- forward ------------------------------------------------------------------------------------------------

    def encode(self) -> None:
        """The first pass: writes the representations of each tower."""
        with self._reset_on_failure() as forwards:
            group, finished = forwards, 0
            places = {forward: place for place, forward in enumerate(forwards)}
            #: The last of the forwards that wrote each buffer.
            writers: dict[tuple[nn.Module, str], int] = {}
            while group:
                for forward in group:
                    while forwards[finished].finished:
                        finished += 1
                    for buffer in forward.advance(in_turn=places[forward] == finished):
                        if writers.setdefault(buffer, places[forward]) > places[forward]:
                            _warn_of_order(*buffer, forward.tower.name)
                        writers[buffer] = max(writers[buffer], places[forward])
                if any(forward.call is not None for forward in forwards):
                    group = self._next(forwards)
                    self._run_calls(group)
                else:  # those whose turn to finish had not come
                    group = [forward for forward in forwards if not forward.finished]
        self._warn()
        for tower, chunks in zip(self._towers, self._forwards, strict=True):
            tower.join(self._owner.joined(tower.chunks), [forward.representation for forward in chunks])
            requires_grad = any(forward.requires_grad for forward in chunks)
            tower.wants_gradient = requires_grad or is_trainable(tower.model, tower.chunks)
            for forward in chunks:
                forward.representation = None

    @staticmethod
    def _next(forwards: Sequence[SuspendedForward]) -> list[SuspendedForward]:
        """The forwards whose calls run together next: preferably a group that no other forward can still join."""
        waiting = [(forward, forward.call) for forward in forwards if forward.call is not None]
        groups: dict[Any, list[SuspendedForward]] = {}
        for forward, call in waiting:
            groups.setdefault(call.key, []).append(forward)
        for (model, *_), group in groups.items():
            if sum(model in forward.tower.observers for forward, _ in waiting) == len(group):
                return group
        return max(groups.values(), key=len)

    def _run_calls(self, group: Sequence[SuspendedForward]) -> None:
        """Runs the calls of a group, which are calls of one model, except those that run inside their forwards."""
        together: list[tuple[SuspendedForward, Call]] = []
        for forward in group:
            call = forward.call
            assert call is not None
            if reason := call.lost:
                forward.tower.not_deferred[call.model] = reason
                forward.calls.append(None)
            else:
                together.append((forward, call))
        if not together:
            return
        first = together[0][1]
        with first.settings():
            entering = [call.enter() for _, call in together]
            outputs = first.model.forward_chunks(list(chain(*entering)))
        self._visits[first.model] += 1
        remaining = iter(outputs)
        for (forward, call), micro_batches in zip(together, entering, strict=True):
            call.fill(list(islice(remaining, len(micro_batches))))
            forward.calls.append(call)
        if any(tensor.requires_grad for tensor in tensors_in(outputs)):
            self._joint_calls.append((outputs, [(f, len(f.calls) - 1, call) for f, call in together]))

    # --- backward -----------------------------------------------------------------------------------------------

    def backward(self) -> None:
        """The second pass."""
        with self._reset_on_failure():
            for tower, chunks in zip(self._towers, self._forwards, strict=True):
                for forward, part in zip(chunks, tower.split_gradient(), strict=True):
                    forward.begin_backward(self._inputs)
                    if part is not None:
                        forward.backward(part)
            while self._joint_calls:
                outputs, members = self._joint_calls.pop()
                representations.backward(outputs, [part for *_, call in members for part in call.take_gradients()])
                del outputs
                for forward, k, _ in members:
                    forward.backward_from(k)

    @contextlib.contextmanager
    def _reset_on_failure(self) -> Iterator[list[SuspendedForward]]:
        """Yields the forwards; cleans up all of them on failure, as an interrupt may have stopped their own cleanup."""
        forwards = [forward for chunks in self._forwards for forward in chunks]
        try:
            yield forwards
        except BaseException:
            for forward in forwards:
                forward.reset()
            raise

    # --- warnings -----------------------------------------------------------------------------------------------

    def _warn(self) -> None:
        """Warns if shards were loaded more often than once per call, with the reason."""
        for tower_state in self._tower_states.values():
            for model, reason in tower_state.not_deferred.items():
                warn_once(model, tower_state.name, reason)
        for model, visits in self._visits.items():
            calls = [sum(a is not None and a.model is model for a in f.calls) for t in self._forwards for f in t]
            if visits > max(calls, default=0):
                names = " and ".join(dict.fromkeys(n.name for n in self._tower_states.values() if model in n.observers))
                differs = "chunks call it in another order, another mode or another number of times"
                warn_once(model, names, f"{differs}, so that their calls took {visits} visits")


#: The warnings about each module.
_warned: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()


def warn_once(model: nn.Module, tower: str, reason: str) -> None:
    """Warns that the calls of a streamed model inside a tower do not run together, once for each reason."""
    _warn(model, f"the {type(model).__name__} in {tower} loads its shards more than twice per GradCache step: {reason}")


def _warn_of_order(owner: nn.Module, name: str, tower: str) -> None:
    _warn(
        owner,
        f"{tower} writes buffers of a {type(owner).__name__} ({name}) in another order than chunk by chunk: all chunks "
        f"run the code before a call of a streamed model, then all run the code behind it; use a module for each side, "
        f"or override GradCache.model_call, with which chunks run one by one",
    )


def _warn(module: nn.Module, text: str) -> None:
    """Warns once of the same."""
    warned = _warned.setdefault(module, set())
    if text not in warned:
        warned.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=3)
