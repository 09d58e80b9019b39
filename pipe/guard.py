"""What a recomputation must find unchanged in a module, and what it must find as it was.

Random numbers are not all that makes a second forward differ from the first. A parameter updated in between makes its
gradient wrong without a word; a layer switched to ``eval()`` becomes another function; and buffers that the forward
itself updates (running statistics, the vectors of spectral norm) would be read in their new state and be updated twice.

Invariants
    * A recomputation meets parameters and modes of the forward, or :class:`RuntimeError` names what changed.
    * Buffers that the forward wrote hold, during the recomputation, what they held before it; writes go to copies, so
      the buffers of the module count every forward once. The same holds for plain attributes, where it is asked for.

Assumes that one module does not compute in two threads at the same moment.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from pipe.attributes import Attributes, Stateful

__all__ = ["Guard", "Watched"]


class Watched:
    """What is to be watched in a module. Walks the module once; serves every forward until the module is rebuilt."""

    def __init__(self, module: nn.Module) -> None:
        self.parameters = list(module.named_parameters())
        self.modules = list(module.named_modules())
        self.buffers = [
            (owner, name) for _, owner in self.modules for name, b in owner._buffers.items() if b is not None
        ]
        # Buffers that a forward writes without counting a version, by (id of owner, name); None until one was seen.
        self.unversioned: set[tuple[int, str]] | None = None
        self.stateful = Stateful(self.modules)
        self.devices = {p.device for _, p in self.parameters} | {b.device for b in module.buffers()}

    def tensors(self) -> list[Tensor]:
        """Parameters and buffers, as they are now."""
        buffers = (owner._buffers[name] for owner, name in self.buffers)
        return [*(p for _, p in self.parameters), *(b for b in buffers if b is not None)]


class Guard:
    """One forward of a watched module, to be repeated.

    Usage::

        guard = Guard(watched)
        output = module(input)
        guard.seal()
        ...
        with guard.again():
            output = module(input)
    """

    __slots__ = ("_attributes", "_buffers", "_modes", "_originals", "_versions", "_watched")

    def __init__(self, watched: Watched, *, attributes: bool = False) -> None:
        self._watched = watched
        self._attributes = Attributes(watched.stateful) if attributes else None
        self._modes = [module.training for _, module in watched.modules]
        self._versions: list[int] = []
        # A buffer's value before the forward is gone after it, so all are copied and seal() drops what did not change.
        self._buffers: list[tuple[nn.Module, str, Tensor]] = []
        self._originals: list[tuple[Tensor, int]] = []
        for owner, name in watched.buffers:
            buffer = owner._buffers[name]
            if buffer is not None:
                self._buffers.append((owner, name, buffer.detach().clone()))
                self._originals.append((buffer, buffer._version))

    def seal(self) -> Guard:
        """To be called after the forward: forgets the buffers that it left alone. Returns itself."""
        if self._attributes is not None:
            self._attributes.seal()
        entries = list(zip(self._buffers, self._originals, strict=True))
        unversioned = self._watched.unversioned
        if unversioned is None:
            # Reading values waits for the device, so it is done once: what a kernel writes, it writes every time.
            unversioned = {
                (id(owner), name)
                for (owner, name, snapshot), original in entries
                if not snapshot.is_meta
                and not _written(owner, name, snapshot, *original)
                and not torch.equal(snapshot, original[0])
            }
            self._watched.unversioned = unversioned
        self._buffers = [
            entry
            for entry, original in entries
            if (id(entry[0]), entry[1]) in unversioned or _written(*entry, *original)
        ]
        self._originals = []
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
            for owner, name, snapshot in self._buffers:
                before.append((owner._buffers, name, owner._buffers[name]))
                owner._buffers[name] = snapshot.clone()  # a retained graph may ask for the snapshot again
            with self._attributes.again() if self._attributes is not None else contextlib.nullcontext():
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


def _written(owner: nn.Module, name: str, snapshot: Tensor, original: Tensor, version: int) -> bool:
    buffer = owner._buffers.get(name)
    if buffer is not original or buffer._version != version:
        return True
    # Kernels of normalisation layers may write running statistics without counting a version; while training they do.
    return isinstance(owner, _NormBase) and owner.training
