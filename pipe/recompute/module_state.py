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
from enum import Enum
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from pipe.recompute.attributes import Attributes, Stateful
from pipe.recompute.first_write import FirstWrites
from pipe.recompute.generators import held_generators
from pipe.recompute.module_hooks import Hooks
from pipe.torch_private.modules import BatchOrInstanceNorm
from pipe.torch_private.tensors import memory_of

__all__ = ["ModuleState", "WatchedModule"]

# Copying up to this size costs no more than finding out whether a copy is needed.
_SMALL_BYTES = 1 << 14


class _Habit(Enum):
    """How earlier forwards used a buffer."""

    READ = "read"
    WRITTEN = "written"
    WRITTEN_UNCOUNTED = "written without counting a version"


class _Epoch:
    """The value of a buffer between two writes, shared by all forwards that read it instead of a copy each."""

    __slots__ = ("tensor", "value", "version")

    def __init__(self, tensor: Tensor, version: int | None) -> None:
        self.tensor, self.version = ref(tensor), version
        #: Set when a later forward writes the buffer.
        self.value: Tensor | None = None


class _Known:
    """Knowledge about a buffer that is kept between forwards."""

    __slots__ = ("epoch", "habits", "normalises")

    def __init__(self, owner: nn.Module) -> None:
        # Kernels of normalisation layers write running statistics in training, possibly without counting a version.
        self.normalises = isinstance(owner, BatchOrInstanceNorm)
        self.habits: list[_Habit | None] = [None, None]  # in evaluation and in training
        self.epoch: _Epoch | None = None

    def epoch_of(self, tensor: Tensor, version: int | None) -> _Epoch:
        """The epoch of the buffer at this version; made for its first reader."""
        epoch = self.epoch
        if epoch is None or epoch.version != version or epoch.tensor() is not tensor:
            epoch = self.epoch = _Epoch(tensor, version)
        return epoch

    def end_epoch(self, tensor: Tensor, version: int | None, value: Tensor) -> None:
        """Ends the epoch because the buffer, which had ``value`` at this version, was written."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None and epoch.version == version and epoch.tensor() is tensor:
            epoch.value = value  # for the recomputations of earlier forwards, which only read the buffer


_known: WeakKeyDictionary[nn.Module, dict[str, _Known]] = WeakKeyDictionary()


class WatchedModule:
    """The parameters, buffers and submodules of a module, collected once; valid until the module is rebuilt."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        self.modules = list(module.named_modules())
        self.buffers = [
            (owner, name, _known.setdefault(owner, {}).setdefault(name, _Known(owner)))
            for _, owner in self.modules
            for name, b in owner._buffers.items()
            if b is not None
        ]
        self._registers = [d for _, inner in self.modules for d in (inner._parameters, inner._modules) if d]
        # Buffers whose values were compared, with the mode: a comparison waits for the device, so it is done once.
        self.compared: set[tuple[_Known, bool]] = set()
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
            for name, member in register.items()
            if id(member) not in before and not _is_sharded(member)
        ]

    def tensors(self) -> list[Tensor]:
        """The present parameters and buffers."""
        buffers = (owner._buffers[name] for owner, name, _ in self.buffers)
        return [*(p for _, p in self.parameters), *(b for b in buffers if b is not None)]

    def changing(self) -> list[Tensor]:
        """Buffers that forwards may write before a backward: small ones, and others that an earlier forward wrote."""
        found = [
            (owner._buffers[name], known.habits[owner.training] not in (None, _Habit.READ))
            for owner, name, known in self.buffers
        ]
        return [b for b, written in found if b is not None and _memory_of(b) and (written or b.nbytes <= _SMALL_BYTES)]


class _Buffer:
    """One buffer before a forward: a copy of it, or the buffer itself, to be copied before the first write."""

    __slots__ = (
        "copied",
        "copied_ahead",
        "counted",
        "known",
        "memory",
        "name",
        "owner",
        "tensor",
        "training",
        "value",
        "version",
    )

    def __init__(self, owner: nn.Module, name: str, known: _Known, tensor: Tensor, compiled: bool) -> None:
        self.owner, self.name, self.known, self.tensor = owner, name, known, tensor
        self.training = owner.training
        # Inference tensors have no version counter.
        self.version = None if tensor.is_inference() else tensor._version
        self.memory: int | None = None
        self.copied_ahead = True
        if tensor.numel() * tensor.element_size() > _SMALL_BYTES and self.version is not None and not tensor.is_meta:
            self.memory = _memory_of(tensor)
            habit = known.habits[self.training]
            self.copied_ahead = self.memory is None or (compiled if habit is None else habit is not _Habit.READ)
        self.copied = self.copied_ahead
        # If not copied, a tensor with the same memory, which is kept even if the buffer gets other memory.
        if self.copied:
            self.value = tensor.detach().clone() if tensor.requires_grad else tensor.clone()
        else:
            self.value = tensor.detach()

    def copy(self) -> None:
        """Copies the value before it is overwritten."""
        if not self.copied:
            self.value, self.copied = self.value.clone(), True

    def was_written(self, compared: set[tuple[_Known, bool]]) -> bool:
        """To be called after the forward: whether it changed the buffer. Raises if it could not be copied before."""
        now = self.owner._buffers.get(self.name)
        replaced = now is not self.tensor or (self.memory is not None and _memory_of(self.tensor) != self.memory)
        if replaced and not self.copied and self.value._version == self.version:
            self.copy()  # the old memory is unchanged by now, but may be written later
        #: Whether a version tells that it did. Batch normalisation increments that of ``num_batches_tracked`` only.
        self.counted = replaced or (self.version is not None and self.tensor._version != self.version)
        known, habits, mode = self.known, self.known.habits, self.training
        counted = self.counted or self.version is None or (known.normalises and self.owner.training)
        if counted and not self.copied:
            habits[mode] = _Habit.WRITTEN
            raise RuntimeError(
                f"buffer {self.name!r} of a {type(self.owner).__name__} was written without being detected in "
                f"advance, as by compiled code, so its old value is lost to the recomputation of this forward; "
                f"run the step again: from now on it is copied before the forward"
            )
        uncounted = habits[mode] is _Habit.WRITTEN_UNCOUNTED or (self.copied and not self.copied_ahead)
        if not counted and not uncounted and (known, mode) not in compared:
            # A kernel that writes without counting a version does so in every forward: one comparison is enough.
            compared.add((known, mode))
            uncounted = self.copied and not self.value.is_meta and not torch.equal(self.value, self.tensor)
        if counted:
            if habits[mode] is not _Habit.WRITTEN_UNCOUNTED:
                habits[mode] = _Habit.WRITTEN
        elif uncounted:
            habits[mode] = _Habit.WRITTEN_UNCOUNTED
        else:
            habits[mode] = habits[mode] or _Habit.READ
            return False
        known.end_epoch(self.tensor, self.version, self.value)
        return True

    def take_back(self) -> None:
        """Restores the buffer after a trial forward: its old value, in the same tensor object."""
        if self.copied_ahead:
            self.owner._buffers[self.name] = self.tensor
        elif self.was_written(set()):
            self.owner._buffers[self.name] = self.tensor
            with torch.no_grad():
                self.tensor.copy_(self.value)


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
        "_epochs",
        "_hooks",
        "_members",
        "_modes",
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
        self._epochs: list[tuple[nn.Module, str, _Epoch]] = []
        #: After :meth:`record_changes`: the buffers that the forward certainly wrote, by owner and name.
        self.written: list[tuple[nn.Module, str]] = []
        self._before = [
            _Buffer(owner, name, known, buffer, watched.compiled)
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

    def record_changes(self) -> ModuleState:
        """To be called after the forward: drops the copies of unchanged buffers. Returns itself."""
        if self._attributes is not None:
            self._attributes.record_changes()
        self._hooks.record_changes(add=self._attributes is None)
        before, self._before = self._before, []
        for buffer in before:
            if buffer.was_written(self._watched.compared):
                self._buffers.append((buffer.owner, buffer.name, buffer.value))
                if buffer.counted:
                    self.written.append((buffer.owner, buffer.name))
            else:
                epoch = buffer.known.epoch_of(buffer.tensor, buffer.version)
                self._epochs.append((buffer.owner, buffer.name, epoch))
        # Read after the forward, so that a layer may change its own parameters in place in it, or replace them.
        self._members = self._watched.members()
        self._versions = [parameter._version for _, parameter in self._watched.parameters]
        return self

    @property
    def moved(self) -> bool:
        """After :meth:`record_changes`: whether the forward wrote any buffer."""
        return bool(self._buffers)

    def take_back(self) -> None:
        """After :meth:`record_changes`: restores the values from before the forward in the buffers that it wrote."""
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
            read = [(owner, name, epoch.value) for owner, name, epoch in self._epochs if epoch.value is not None]
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


def _memory_of(tensor: Tensor) -> int | None:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return memory_of(tensor) if plain else None
