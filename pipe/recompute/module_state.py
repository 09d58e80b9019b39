"""Saves and restores the module state that a recomputation depends on: buffers, attributes, hooks, training modes.

If a parameter is updated between the two forwards, its gradient is silently wrong; a layer switched to ``eval()``
computes another function; and buffers that the forward itself updates (running statistics, the vectors of spectral
norm) would be read in their new state and be updated twice.

Invariants
    * A recomputation uses the modules, parameters and modes of the forward, or :class:`RuntimeError` names what
      changed. It runs the hooks of the forward (:mod:`pipe.recompute.module_hooks`).
    * Buffers that the forward or a later one wrote have, during the recomputation, their values from before the
      forward. The recomputation writes to copies, so the buffers of the module are updated once per forward. The same
      holds for plain attributes, if requested.
    * A buffer larger than a few kilobytes is copied only if a forward writes it: just before the write, or before the
      forward if an earlier forward wrote it. Quantised weights and queues that are only read cost nothing.

Assumes that one module does not compute in two threads at the same time, and that a large buffer is written by torch
operations, not through memory shared with NumPy or another library.
"""

from __future__ import annotations

import contextlib
import operator
import sys
from collections.abc import Iterator
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipe.recompute.attributes import Attributes, Stateful
from pipe.recompute.buffer_values import BufferBefore, BufferHabits, BufferValue
from pipe.recompute.first_write import FirstWrites
from pipe.recompute.generators import held_generators
from pipe.recompute.module_hooks import Hooks

__all__ = ["ModuleState", "WatchedModule"]

_known: WeakKeyDictionary[nn.Module, dict[str, BufferHabits]] = WeakKeyDictionary()


class WatchedModule:
    """The parameters, buffers and submodules of a module, collected once; valid until the module is rebuilt."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        self.modules = list(module.named_modules())
        self.buffers = [
            (owner, name, _known.setdefault(owner, {}).setdefault(name, BufferHabits(owner)))
            for _, owner in self.modules
            for name, b in owner._buffers.items()
            if b is not None
        ]
        self._registers = [d for _, inner in self.modules for d in (inner._parameters, inner._modules) if d]
        # Buffers whose values were compared, with the mode: a comparison waits for the device, so it is done once.
        self.compared: set[tuple[BufferHabits, bool]] = set()
        self.stateful = Stateful(self.modules)
        self.find_generators()
        self.devices = {p.device for _, p in self.parameters} | {b.device for b in module.buffers()}
        # Writes of compiled code cannot be detected in advance.
        self.compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for _, m in self.modules)

    def find_generators(self) -> None:
        """Finds the random generators that the modules hold themselves, which may be assigned at any time."""
        self.generators = held_generators(inner for _, inner in self.modules)

    def members(self) -> list[Any]:
        """The present parameters and children of each module."""
        return list(chain.from_iterable(map(dict.values, self._registers)))

    def replaced(self, members: list[Any]) -> list[str]:
        """Names of parameters and modules that have taken the place of one of ``members``."""
        now = self.members()
        if len(now) == len(members) and all(map(operator.is_, now, members)):
            return []
        here, before = set(map(id, now)), set(map(id, members))
        if all(id(member) in here or _is_sharded(member) for member in members):
            return []  # none was removed: a parameter was added, or registered in another order
        return [
            f"{kind} {'.'.join(filter(None, (owner, name)))!r}"
            for owner, module in self.modules
            for kind, register in (("parameter", module._parameters), ("module", module._modules))
            for name, member in dict.items(register)
            if id(member) not in before and not _is_sharded(member)
        ]

    def tensors(self) -> list[Tensor]:
        """The present parameters and buffers."""
        buffers = (owner._buffers[name] for owner, name, _ in self.buffers)
        return [*(p for _, p in self.parameters), *(b for b in buffers if b is not None)]

    def changing(self) -> list[Tensor]:
        """Buffers that forwards may write before a backward: small ones, and others that an earlier forward wrote."""
        found = [(owner._buffers[name], owner.training, habits) for owner, name, habits in self.buffers]
        return [b for b, training, habits in found if b is not None and habits.may_change(b, training=training)]


class ModuleState:
    """The state of a watched module before one forward that is to be repeated.

    Usage::

        state = ModuleState(watched)
        with state.running():
            output = module(input)
        state.record_changes()
        ...
        with state.again():
            output = module(input)
    """

    __slots__ = (
        "_attributes",
        "_before",
        "_buffers",
        "_hooks",
        "_members",
        "_modes",
        "_shared",
        "_versions",
        "_watched",
        "written",
    )

    def __init__(self, watched: WatchedModule, *, attributes: bool = False) -> None:
        self._watched = watched
        self._attributes = Attributes(watched.stateful) if attributes else None
        self._hooks = Hooks(watched.modules)
        self._modes = [module.training for _, module in watched.modules]
        self._members: list[Any] = []
        self._versions: list[int] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._shared: list[tuple[nn.Module, str, BufferValue]] = []
        #: After :meth:`record_changes`: the buffers that the forward certainly wrote, by owner and name.
        self.written: list[tuple[nn.Module, str]] = []
        self._before = [
            BufferBefore(owner, name, known, buffer, watched.compiled)
            for owner, name, known in watched.buffers
            if (buffer := owner._buffers[name]) is not None
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """A context for the forward: copies a large buffer before the first write to it."""
        uncopied = [(buffer.value, buffer.copy) for buffer in self._before if not buffer.copied]
        with FirstWrites(uncopied) if uncopied else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """A context for a trial forward, whose changes of buffers are undone. Used instead of :meth:`running`."""
        for buffer in self._before:
            if buffer.copied_ahead:
                buffer.owner._buffers[buffer.name] = buffer.value
        try:
            with self.running(), contextlib.nullcontext() if self._attributes is None else self._attributes.again():
                yield
        finally:
            for buffer in self._before:
                buffer.take_back()

    def record_changes(self, *, others: bool = False) -> ModuleState:
        """To be called after the forward: drops the copies of unchanged buffers. Returns itself.

        ``others``: a recomputation also restores attributes that other code has changed since.
        """
        if self._attributes is not None:
            self._attributes.record_changes(others=others)
        self._hooks.record_changes(add=self._attributes is None)
        before, self._before = self._before, []
        for buffer in before:
            if buffer.was_written(self._watched.compared):
                self._buffers.append((buffer.owner, buffer.name, buffer.value))
                if buffer.counted:
                    self.written.append((buffer.owner, buffer.name))
            else:
                shared = buffer.known.shared_value(buffer.tensor, buffer.version)
                self._shared.append((buffer.owner, buffer.name, shared))
        # Read after the forward, so that a layer may change its own parameters in place in it, or replace them.
        self._members = self._watched.members()
        self._versions = [parameter._version for _, parameter in self._watched.parameters]
        return self

    @property
    def moved(self) -> bool:
        """After :meth:`record_changes`: whether the forward wrote any buffer."""
        return bool(self._buffers)

    @property
    def written_since(self) -> list[str]:
        """Names of the buffers that the forward only read, and that were written in place since, with values lost."""
        return [
            repr(name)
            for _, name, shared in self._shared
            if shared.value is None and shared.version is not None and shared.tensor._version != shared.version
        ]

    def take_back(self, *, attributes: bool = False) -> None:
        """After :meth:`record_changes`: restores the values from before the forward in the buffers that it wrote.

        ``attributes``: in plain attributes as well.
        """
        if attributes and self._attributes is not None:
            self._attributes.take_back()
        for owner, name, value in self._buffers:
            now = owner._buffers[name]
            if now is not None and now.shape == value.shape and now.dtype == value.dtype:
                with torch.no_grad():
                    now.copy_(value)
            else:
                owner._buffers[name] = value.clone()

    @contextlib.contextmanager
    def again(self, *, strict: bool = True) -> Iterator[None]:
        """A context in which buffers have their values from before the forward; writes to them are discarded.

        Args:
            strict: if False, restore the training modes of the forward instead of comparing them, and do not check
                parameters and modules.

        Raises:
            RuntimeError: if a parameter was modified in place, a parameter or module was replaced, or a module changed
                its mode, since the forward.
        """
        modes = [module.training for _, module in self._watched.modules]
        if not strict:
            self._set_modes(self._modes)
        before: list[tuple[dict[str, Any], str, Tensor | None]] = []
        try:
            if strict:
                self._check()
            read = [(owner, name, shared.value) for owner, name, shared in self._shared if shared.value is not None]
            for owner, name, shared in self._shared:  # buffers that other code replaced
                now = owner._buffers.get(name)
                if shared.value is None and now is not shared.tensor and now is not None:
                    before.append((owner._buffers, name, now))
                    owner._buffers[name] = shared.tensor
            for owner, name, snapshot in [*self._buffers, *read]:
                before.append((owner._buffers, name, owner._buffers[name]))
                owner._buffers[name] = snapshot.clone()  # a retained graph may need the snapshot again
            attributes = contextlib.nullcontext() if self._attributes is None else self._attributes.again()
            with attributes, self._hooks.again():
                yield
        finally:
            for buffers, name, buffer in before:
                buffers[name] = buffer
            if not strict:
                self._set_modes(modes)

    def _set_modes(self, modes: list[bool]) -> None:
        for (_, module), training in zip(self._watched.modules, modes, strict=True):
            if module.training != training:
                module.training = training

    def _check(self) -> None:
        watched = self._watched
        # Without this, what was replaced later would run in the recomputation and get the gradient.
        replaced = watched.replaced(self._members)
        changed = [f"another object took the place of {', '.join(replaced)}"] if replaced else []
        changed += [
            f"parameter {name!r} was modified in place {p._version - version} time(s)"
            for (name, p), version in zip(watched.parameters, self._versions, strict=True)
            if p._version != version
        ]
        changed += [
            f"module {name or 'itself'!r} changed from training={mode} to training={module.training}"
            for (name, module), mode in zip(watched.modules, self._modes, strict=True)
            if module.training != mode
        ]
        if changed:
            raise RuntimeError(
                "expected the module of the checkpointed forward to be the same in backward, but "
                + "; ".join(changed)
                + "; call backward() before optimizer.step(), train(), eval() or a replacement, or compute without "
                "checkpointing"
            )


def _is_sharded(member: Any) -> bool:
    """Whether it is a DTensor: sharded modules replace sharded by whole parameters and vice versa."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(member, module.DTensor)
