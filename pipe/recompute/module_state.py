"""What a recomputation must find unchanged in a module, and what it must find as it was.

Random numbers are not all that makes a second forward differ from the first. A parameter updated in between makes its
gradient wrong without a word; a layer switched to ``eval()`` becomes another function; and buffers that the forward
itself updates (running statistics, the vectors of spectral norm) would be read in their new state and be updated twice.

Invariants
    * A recomputation meets parameters and modes of the forward, or :class:`RuntimeError` names what changed. It runs
      the hooks of the forward (:mod:`pipe.module_hooks`).
    * Buffers that the forward or a later one wrote hold, during the recomputation, what they held before it; writes go
      to copies, so the buffers of the module count every forward once. The same holds for plain attributes, where it is
      asked for.
    * A buffer that is more than a few kilobytes is copied only where a forward writes it: when it is about to, or ahead
      where an earlier one did. Quantised weights and queues that are only read cost nothing.

Assumes that one module does not compute in two threads at the same moment, and that a large buffer is written by
operations of torch, not through memory that it shares with NumPy or a library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from pipe.module_hooks import Hooks
from pipe.recompute.attributes import Attributes, Stateful
from pipe.recompute.first_write import FirstWrites
from pipe.recompute.generators import held_generators
from pipe.torch_private import BatchOrInstanceNorm, memory_of

__all__ = ["ModuleState", "WatchedModule"]

# A copy of so much costs no more than to find out whether it is needed.
_SMALL_BYTES = 1 << 14


class _Habit(Enum):
    """What forwards were seen to do to a buffer."""

    READ = "read"
    WRITTEN = "written"
    WRITTEN_UNCOUNTED = "written without counting a version"


class _Epoch:
    """A value that a buffer has, from one write to the next. Forwards that read it hold it, not a copy each."""

    __slots__ = ("tensor", "value", "version")

    def __init__(self, tensor: Tensor, version: int | None) -> None:
        self.tensor, self.version = ref(tensor), version
        #: Known as soon as a forward writes the buffer.
        self.value: Tensor | None = None


class _Known:
    """What is known about a buffer, from one forward to the next."""

    __slots__ = ("epoch", "habits", "normalises")

    def __init__(self, owner: nn.Module) -> None:
        # Kernels of normalisation layers may write running statistics without counting a version; in training they do.
        self.normalises = isinstance(owner, BatchOrInstanceNorm)
        self.habits: list[_Habit | None] = [None, None]  # in evaluation and in training
        self.epoch: _Epoch | None = None

    def epoch_of(self, tensor: Tensor, version: int | None) -> _Epoch:
        """The epoch that the buffer was in with this version, from its first reader on."""
        epoch = self.epoch
        if epoch is None or epoch.version != version or epoch.tensor() is not tensor:
            epoch = self.epoch = _Epoch(tensor, version)
        return epoch

    def end_epoch(self, tensor: Tensor, version: int | None, value: Tensor) -> None:
        """The buffer, which held ``value`` with this version, was written."""
        epoch, self.epoch = self.epoch, None
        if epoch is not None and epoch.version == version and epoch.tensor() is tensor:
            epoch.value = value  # forwards before, which only read it, meet it in their recomputations as well


_known: WeakKeyDictionary[nn.Module, dict[str, _Known]] = WeakKeyDictionary()


class WatchedModule:
    """What is to be watched in a module. Walks the module once; serves every forward until the module is rebuilt."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        self.modules = list(module.named_modules())
        self.buffers = [
            (owner, name, _known.setdefault(owner, {}).setdefault(name, _Known(owner)))
            for _, owner in self.modules
            for name, b in owner._buffers.items()
            if b is not None
        ]
        # Buffers whose values were compared, with the mode: it waits for the device, so it is done once.
        self.compared: set[tuple[_Known, bool]] = set()
        self.stateful = Stateful(self.modules)
        #: Generators of random numbers that the modules hold themselves.
        self.generators = held_generators(inner for _, inner in self.modules)
        self.devices = {p.device for _, p in self.parameters} | {b.device for b in module.buffers()}
        # What compiled code writes is not seen before it is written.
        self.compiled = any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for _, m in self.modules)

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, as they are now."""
        buffers = (owner._buffers[name] for owner, name, _ in self.buffers)
        return [*(p for _, p in self.parameters), *(b for b in buffers if b is not None)]

    def changing(self) -> list[Tensor]:
        """Buffers that forwards may write before a backward: small ones, and others that some forward did write."""
        found = [
            (owner._buffers[name], known.habits[owner.training] not in (None, _Habit.READ))
            for owner, name, known in self.buffers
        ]
        return [b for b, written in found if b is not None and _memory_of(b) and (written or b.nbytes <= _SMALL_BYTES)]


class _Buffer:
    """One buffer before a forward: a copy of it, or what it was, to be copied when it is about to be written."""

    __slots__ = (
        "copied",
        "copied_ahead",
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
        # Tensors of inference mode do not count versions.
        self.version = None if tensor.is_inference() else tensor._version
        self.memory: int | None = None
        self.copied_ahead = True
        if tensor.numel() * tensor.element_size() > _SMALL_BYTES and self.version is not None and not tensor.is_meta:
            self.memory = _memory_of(tensor)
            habit = known.habits[self.training]
            self.copied_ahead = self.memory is None or (compiled if habit is None else habit is not _Habit.READ)
        self.copied = self.copied_ahead
        # Not copied, it is the same memory, under a name that stays even if the buffer gets other memory.
        if self.copied:
            self.value = tensor.detach().clone() if tensor.requires_grad else tensor.clone()
        else:
            self.value = tensor.detach()

    def copy(self) -> None:
        """Keeps the value: it is about to be overwritten."""
        if not self.copied:
            self.value, self.copied = self.value.clone(), True

    def was_written(self, compared: set[tuple[_Known, bool]]) -> bool:
        """After the forward, whether it changed the buffer.

        Raises:
            RuntimeError: if it did without being seen in time.
        """
        now = self.owner._buffers.get(self.name)
        replaced = now is not self.tensor or (self.memory is not None and _memory_of(self.tensor) != self.memory)
        if replaced and not self.copied and self.value._version == self.version:
            self.copy()  # the memory of before is as it was, unless something writes to it later
        counted = replaced or self.version is None or self.tensor._version != self.version
        known, habits, mode = self.known, self.known.habits, self.training
        counted = counted or (known.normalises and self.owner.training)
        if counted and not self.copied:
            habits[mode] = _Habit.WRITTEN
            raise RuntimeError(
                f"buffer {self.name!r} of a {type(self.owner).__name__} was written where it could not be seen in "
                f"advance, as by compiled code, so what it held before is lost to the recomputation of this forward; "
                f"run the step again: from now on it is copied ahead"
            )
        uncounted = habits[mode] is _Habit.WRITTEN_UNCOUNTED or (self.copied and not self.copied_ahead)
        if not counted and not uncounted and (known, mode) not in compared:
            # What a kernel writes without counting, it writes every time.
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
        """After a forward that shall leave no trace: the buffer is what it was, and the same tensor.

        Raises:
            RuntimeError: see :meth:`was_written`.
        """
        if self.copied_ahead:
            self.owner._buffers[self.name] = self.tensor
        elif self.was_written(set()):
            self.owner._buffers[self.name] = self.tensor
            with torch.no_grad():
                self.tensor.copy_(self.value)


class ModuleState:
    """One forward of a watched module, to be repeated.

    Usage::

        guard = Guard(watched)
        with guard.running():
            output = module(input)
        guard.seal()
        ...
        with guard.again():
            output = module(input)
    """

    __slots__ = ("_attributes", "_buffers", "_epochs", "_hooks", "_modes", "_noted", "_versions", "_watched")

    def __init__(self, watched: WatchedModule, *, attributes: bool = False) -> None:
        self._watched = watched
        self._attributes = Attributes(watched.stateful) if attributes else None
        self._hooks = Hooks(watched.modules)
        self._modes = [module.training for _, module in watched.modules]
        self._versions: list[int] = []
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._epochs: list[tuple[nn.Module, str, _Epoch]] = []
        self._noted = [
            _Buffer(owner, name, known, buffer, watched.compiled)
            for owner, name, known in watched.buffers
            if (buffer := owner._buffers[name]) is not None
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around the forward: a large buffer that it is about to write is copied."""
        uncopied = [buffer for buffer in self._noted if not buffer.copied]
        with FirstWrites([(b.value, b.copy) for b in uncopied]) if uncopied else contextlib.nullcontext():
            yield

    @contextlib.contextmanager
    def trial(self) -> Iterator[None]:
        """Around a forward that is made to learn from it: it leaves no trace in buffers. Instead of :meth:`running`."""
        noted, self._noted = self._noted, []
        ahead = [buffer for buffer in noted if buffer.copied_ahead]
        uncopied = [buffer for buffer in noted if not buffer.copied_ahead]
        for buffer in ahead:
            buffer.owner._buffers[buffer.name] = buffer.value
        try:
            with (
                FirstWrites([(b.value, b.copy) for b in uncopied]) if uncopied else contextlib.nullcontext(),
                contextlib.nullcontext() if self._attributes is None else self._attributes.again(),
            ):
                yield
        finally:
            for buffer in noted:
                buffer.take_back()

    def seal(self) -> ModuleState:
        """To be called after the forward: forgets the buffers that it left alone. Returns itself.

        Raises:
            RuntimeError: if a buffer was written that was not copied, see :meth:`running`.
        """
        if self._attributes is not None:
            self._attributes.seal()
        self._hooks.seal(add=self._attributes is None)
        noted, self._noted = self._noted, []
        for buffer in noted:
            if buffer.was_written(self._watched.compared):
                self._buffers.append((buffer.owner, buffer.name, buffer.value))
            else:
                epoch = buffer.known.epoch_of(buffer.tensor, buffer.version)
                self._epochs.append((buffer.owner, buffer.name, epoch))
        # Noted after the forward, so that a layer may prepare its parameters in place while it runs.
        self._versions = [parameter._version for _, parameter in self._watched.parameters]
        return self

    @property
    def moved(self) -> bool:
        """After :meth:`seal`: whether the forward wrote any buffer."""
        return bool(self._buffers)

    @contextlib.contextmanager
    def again(self, *, strict: bool = True) -> Iterator[None]:
        """Inside, buffers are as before the forward, and writes to them are lost.

        Args:
            strict: if False, run in the modes of the forward, whatever they are now, and leave it to the caller to know
                what became of the parameters.

        Raises:
            RuntimeError: if a parameter was modified in place, or a module changed its mode, since :meth:`seal`.
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
                owner._buffers[name] = snapshot.clone()  # a retained graph may ask for the snapshot again
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
        changed = [
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
                + "; call backward() before optimizer.step(), train() or eval(), or compute without checkpointing"
            )


def _memory_of(tensor: Tensor) -> int | None:
    plain = type(tensor) is Tensor and tensor.layout is torch.strided
    return memory_of(tensor) if plain else None
