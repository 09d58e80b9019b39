"""Saves and restores the module state that a recomputation depends on: buffers, attributes, hooks, training modes.

If a parameter is updated between the two forwards, its gradient is silently wrong; a layer switched to ``eval()``
computes another function; and buffers that the forward itself updates (running statistics, the vectors of spectral
norm) would be read in their new state and be updated twice.

Invariants
    * A recomputation uses the modules, parameters and modes of the forward, or :class:`RuntimeError` names what
      changed. It runs the hooks of the forward, and finds the attributes that the forward found
      (:mod:`pipe.recompute.contents`).
    * Buffers that the forward or a later one wrote have, during the recomputation, their values from before the
      forward. The recomputation writes to copies, so the buffers of the module are updated once per forward.
    * A buffer larger than a few kilobytes is copied only if a forward writes it: just before the write, or before the
      forward if an earlier forward wrote it. Quantised weights and queues that are only read cost nothing.

Assumes that one module does not compute in two threads at the same time, and that a large buffer is written by torch
operations, not through memory shared with NumPy or another library.
"""

from __future__ import annotations

import contextlib
import sys
from operator import is_
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from pipe.recompute.buffer_values import BufferBefore, BufferHabits, BufferValue
from pipe.recompute.contents import Contents
from pipe.recompute.first_write import FirstWrites
from pipe.recompute.generators import held_generators
from pipe.torch_private.modules import global_module_hooks

__all__ = ["ModuleState", "WatchedModule"]

_known: WeakKeyDictionary[nn.Module, dict[str, BufferHabits]] = WeakKeyDictionary()


class WatchedModule:
    """The parameters, buffers and submodules of some modules, collected once; valid until one of them is rebuilt."""

    def __init__(self, *modules: nn.Module) -> None:
        found: dict[nn.Module, str] = {}
        waiting = [("", module) for module in modules[::-1]]
        while waiting:
            name, module = waiting.pop()
            if module not in found:
                found[module] = name
                if module._modules:
                    prefix = name and f"{name}."
                    waiting += [(prefix + n, m) for n, m in module._modules.items() if m is not None][::-1]
        self.all = [*found]
        self.modules = [(name, module) for module, name in found.items()]
        self.parameters = [
            (f"{name}.{n}" if name else n, p)
            for name, m in self.modules
            if m._parameters
            for n, p in m._parameters.items()
            if p is not None
        ]
        self.buffers = [
            (owner, name, _known.setdefault(owner, {}).setdefault(name, BufferHabits(owner)))
            for owner in self.all
            if owner._buffers
            for name, b in owner._buffers.items()
            if b is not None
        ]
        # Buffers whose values were compared, with the mode: a comparison waits for the device, so it is done once.
        self.compared: set[tuple[BufferHabits, bool]] = set()
        self.find_generators()
        self.devices = {p.device for _, p in self.parameters}
        self.devices |= {b.device for owner, name, _ in self.buffers if (b := owner._buffers[name]) is not None}

    @property
    def compiled(self) -> bool:
        """Whether writes of compiled code cannot be detected in advance."""
        return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in self.all)

    def find_generators(self) -> None:
        """Finds the random generators that the modules hold themselves, which may be assigned at any time."""
        self.generators = held_generators(self.all)

    def members(self) -> list[tuple[Any, ...]]:
        """The present parameters and children of each module."""
        # Not ``m._parameters.values()``: a subclass may record that as a read.
        return [(*dict.values(m._parameters), *dict.values(m._modules)) for m in self.all]

    def replaced(self, members: list[tuple[Any, ...]]) -> list[str]:
        """Names of parameters and modules that have taken the place of one of ``members``."""
        now = self.members()
        if all(len(a) == len(b) and all(map(is_, a, b)) for a, b in zip(now, members, strict=True)):
            return []
        here, before = ({id(member) for each in several for member in each} for several in (now, members))
        if all(id(member) in here or _is_sharded(member) for each in members for member in each):
            return []  # none was removed: a parameter was added, or registered in another order
        return [
            f"{kind} {'.'.join(filter(None, (owner, name)))!r}"
            for owner, module in self.modules
            for kind, register in (("parameter", dict[str, Any](module._parameters)), ("module", module._modules))
            for name, member in register.items()
            if id(member) not in before and not _is_sharded(member)
        ]

    def changing(self) -> list[Tensor]:
        """Buffers that forwards may write before a backward: small ones, and others that an earlier forward wrote."""
        found = [(owner._buffers[name], owner.training, habits) for owner, name, habits in self.buffers]
        return [b for b, training, habits in found if b is not None and habits.may_change(b, training=training)]


class ModuleState:
    """The state of watched modules before one forward that is to be repeated.

    Args:
        watched: the modules.
        attributes: whether these are saved, too.
        compares: whether :meth:`check` finds parameters and modes that were changed.

    Usage::

        state = ModuleState(watched)
        with state.running():
            output = module(input)
        state.record_changes()
        ...
        present = state.present()
        state.put()
        output = module(input)
        present.put()
    """

    __slots__ = (
        "_attributes", "_before", "_buffers", "_compares", "_contents", "_global", "_members", "_modes", "_shared",
        "_wanted", "_watched", "changed", "written",
    )  # fmt: skip

    def __init__(self, watched: WatchedModule, *, attributes: bool = True, compares: bool = True) -> None:
        self._watched, self._attributes, self._compares = watched, attributes, compares
        self._contents = Contents.of_modules(watched.all, attributes)
        self._modes = [module.training for module in watched.all]
        self._members: list[tuple[Any, ...]] = []
        self._wanted: list[tuple[int, bool]] = []
        self._global: list[Any] | None = None
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._shared: list[tuple[nn.Module, str, BufferValue]] = []
        #: After :meth:`record_changes`: the buffers that the forward certainly wrote, by owner and name.
        self.written: list[tuple[nn.Module, str]] = []
        #: Whether it changed attributes.
        self.changed = False
        compiled = watched.buffers and watched.compiled
        self._before = [
            BufferBefore(owner, name, known, buffer, bool(compiled))
            for owner, name, known in watched.buffers
            if (buffer := owner._buffers[name]) is not None
        ]

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """A context for the forward: copies a large buffer before the first write to it."""
        uncopied = [(buffer.value, buffer.copy) for buffer in self._before if not buffer.copied]
        return FirstWrites(uncopied) if uncopied else contextlib.nullcontext()

    def record_changes(self) -> ModuleState:
        """To be called after the forward: drops the copies of unchanged buffers. Returns itself."""
        self.changed = self._contents.record_changes()
        self._global = _global_hooks()
        before, self._before = self._before, []
        for buffer in before:
            if buffer.was_written(self._watched.compared):
                self._buffers.append((buffer.owner, buffer.name, buffer.value))
                if buffer.counted:
                    self.written.append((buffer.owner, buffer.name))
            else:
                shared = buffer.known.shared_value(buffer.tensor, buffer.version)
                self._shared.append((buffer.owner, buffer.name, shared))
        if self._compares:
            # Read after the forward, so that a layer may change its own parameters in place in it, or replace them.
            self._members = self._watched.members()
            self._wanted = [(p._version, p.requires_grad) for _, p in self._watched.parameters]
        return self

    def check(self, of: str = "the module") -> None:
        """Raises RuntimeError if a further run would read other values; ``of``: for the error.

        That is if a buffer that the forward only read was written in place since, and its value is lost; and, if that
        is compared, if a parameter was modified in place or replaced, or a module changed its mode.
        """
        for _, name, shared in self._shared:
            if shared.is_lost:
                raise RuntimeError(
                    f"buffer {name!r} of {of} was written in place between the forward and its backward, which runs "
                    f"the layers again: they would read the new value. Write it after the backward, assign a new "
                    f"tensor instead, or compute without recomputation"
                )
        if self._compares:
            self._check_modules()

    def take_back(self) -> None:
        """After the forward: restores attributes, and the values from before it in the buffers that it wrote."""
        for buffer in self._before:
            buffer.take_back()
        self._contents.put()
        for owner, name, value in self._buffers:
            now = owner._buffers[name]
            if now is not None and now.shape == value.shape and now.dtype == value.dtype:
                with torch.no_grad():
                    now.copy_(value)
            else:
                owner._buffers[name] = value.clone()

    def present(self) -> Contents:
        """What the modules hold now."""
        return Contents.of_modules(self._watched.all, self._attributes)

    def put(self) -> bool:
        """Gives the modules their state from before the forward; returns whether attributes or hooks had another."""
        if self._global is not None and self._global != _global_hooks():
            raise RuntimeError(
                "hooks for all modules (register_module_forward_hook and its like) were registered or removed between "
                "a forward and its backward, which runs layers again: it would compute something else; register them "
                "before the forward and remove them after the backward, or compute without checkpointing"
            )
        self._contents.check("before its backward")
        changed = self._contents.put()
        for owner, name, shared in self._shared:
            owner._buffers[name] = shared.tensor if shared.value is None else shared.value.clone()
        for owner, name, value in self._buffers:
            owner._buffers[name] = value.clone()  # a retained graph may need the value again
        for buffer in self._before:  # a part of the forward runs again before it has ended
            if buffer.copied:
                buffer.owner._buffers[buffer.name] = buffer.value.clone()
        return changed

    def _check_modules(self) -> None:
        watched = self._watched
        # Without this, what was replaced later would run in the recomputation and get the gradient.
        replaced = watched.replaced(self._members)
        changed = [f"another object took the place of {', '.join(replaced)}"] if replaced else []
        if self._wanted != [(p._version, p.requires_grad) for _, p in watched.parameters]:
            for (name, p), (version, wanted) in zip(watched.parameters, self._wanted, strict=True):
                if p._version != version:
                    changed.append(f"parameter {name!r} was modified in place {p._version - version} time(s)")
                if p.requires_grad is not wanted:
                    changed.append(f"parameter {name!r} changed from requires_grad={wanted} to {p.requires_grad}")
        if self._modes != [module.training for module in watched.all]:
            changed += [
                f"module {name or 'itself'!r} changed from training={mode} to training={module.training}"
                for (name, module), mode in zip(watched.modules, self._modes, strict=True)
                if module.training != mode
            ]
        if changed:
            raise RuntimeError(
                "expected the module of the checkpointed forward to be the same in backward, but "
                + "; ".join(changed)
                + "; call backward() before optimizer.step(), train(), eval(), requires_grad_() or a replacement, or "
                "compute without checkpointing"
            )


def _is_sharded(member: Any) -> bool:
    """Whether it is a DTensor: sharded modules replace sharded by whole parameters and vice versa."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(member, module.DTensor)


def _global_hooks() -> list[Any]:
    """Hooks for all modules, without those of torch itself, which change no result."""
    return [
        (key, hook)
        for hooks in global_module_hooks()
        for key, hook in hooks.items()
        if not str(getattr(hook, "__module__", None)).startswith("torch.")
    ]
