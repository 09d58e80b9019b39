"""Running layers again: a forward is recorded, so that a later one is the same function and leaves no trace of its own.

Whoever recomputes does it with these two objects: checkpointing, the two passes of GradCache, and the executor that
streams shards.

===================  =============================================================================================
what                 how it is the same in both runs
===================  =============================================================================================
generators, casts    :class:`pipe.recompute.replay.Replay`
modes, buffers,      :class:`pipe.recompute.module_state.ModuleState`: a running mean counts each micro-batch once, and
attributes           a power iteration starts again from the same vector
input, in place      :class:`pipe.input_writes.InputWrites`
operations           :mod:`pipe.recompute.elimination` leaves out those that no gradient needs
===================  =============================================================================================

::

    layers = RepeatableLayers(watched, devices, "layer 3")
    rerun = layers.rerun()
    with rerun.first():
        output, _ = layers.run(call, input, rerun=rerun)
    ...
    output = rerun.repeat(call, input)
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch

from pipe.input_writes import InputWrites, copy_of
from pipe.nested import tensors_in
from pipe.recompute.dead_code import DeadCode, Listener, listened_to
from pipe.recompute.elimination import leaving_out, stop_leaving_out
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.phase import enable_checkpointing
from pipe.recompute.replay import Replay, autocast_without_cache

__all__ = ["RepeatableLayers", "Rerun", "trial"]

Call = Callable[[Any], Any]


class Rerun:
    """One forward, and what another one needs to be the same, besides its input.

    Args:
        watched: the modules that run; None if that is not known.
        devices: where they run.
    """

    __slots__ = ("copies_input", "copy", "dead_code", "module_state", "replay")

    def __init__(self, watched: WatchedModule | None, devices: Collection[torch.device]) -> None:
        self.replay = Replay.capture(devices, () if watched is None else watched.generators)
        self.module_state = None if watched is None else ModuleState(watched, attributes=True)
        #: Whether the layers write into their input, so that each run is on a copy of it.
        self.copies_input = False
        self.copy: Callable[[Any], Any] = copy_of
        #: What the second run may leave out.
        self.dead_code: DeadCode | None = None

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        """Around the forward, which begins at once.

        Raises:
            RuntimeError: at its end, if it changed something whose value before is lost; see
            :class:`pipe.recompute.module_state.ModuleState`.
        """
        with contextlib.nullcontext() if self.module_state is None else self.module_state.running():
            yield
        self.replay.seal()
        if self.module_state is not None:
            self.module_state.seal()

    @contextlib.contextmanager
    def again(self, *, strict: bool = False, until: contextlib.ExitStack | None = None) -> Iterator[None]:
        """Inside, all is as it was when the forward began; afterwards, as it was before this.

        Args:
            strict: raise if parameters were written, or modes changed, since; see
            :meth:`pipe.recompute.module_state.ModuleState.again`.
            until: keeps modes, buffers and attributes as they were until it ends, for a backward that looks at them.
        """
        with contextlib.ExitStack() as stack:
            if self.module_state is not None:
                (stack if until is None else until).enter_context(self.module_state.again(strict=strict))
            stack.enter_context(self.replay.again())
            stack.enter_context(enable_checkpointing(False))
            yield

    def repeat(
        self,
        call: Call,
        value: Any,
        mode: contextlib.AbstractContextManager[Any] | None = None,
        *,
        until: contextlib.ExitStack | None = None,
    ) -> Any:
        """``call(value)`` again, with the graph of ``value`` if grad mode is on. ``value`` is not changed.

        Args:
            call: runs the layers.
            value: what entered the first run.
            mode: around the layers.
            until: see :meth:`again`.
        """
        mode = contextlib.nullcontext() if mode is None else mode
        with self.again(until=until):
            given = self.copy(value) if self.copies_input else value
            try:
                with mode:
                    return call(given)
            except BaseException:
                stop_leaving_out(mode)
                raise

    def repeat_for_gradients(
        self, call: Call, value: Any, *, until: contextlib.ExitStack | None = None
    ) -> tuple[Any, bool]:
        """The same with a graph, and without the operations that no gradient needs: the values may be left out.

        Returns:
            The result, and whether the operations were those of the first run, as far as that was to be known.
        """

        def run(mode: contextlib.AbstractContextManager[Any]) -> Any:
            with torch.enable_grad():
                return self.repeat(call, value, mode, until=until)

        return leaving_out(self.dead_code, run)


@contextlib.contextmanager
def trial(layers: Iterable[RepeatableLayers], devices: Collection[torch.device]) -> Iterator[None]:
    """Around a forward that is made to learn from it: it leaves no trace in modules and generators.

    Whoever counts forwards in Python can tell, by ``is_recomputing``.
    """
    watched = [each.watched for each in layers]
    with contextlib.ExitStack() as stack:
        for each in watched:
            stack.enter_context(ModuleState(each, attributes=True).trial())
        held = [generator for each in watched for generator in each.generators]
        stack.enter_context(Replay.capture(devices, held).again())
        yield


class RepeatableLayers:
    """Layers, and what their runs have taught about how to run them again.

    Args:
        watched: their modules and buffers.
        devices: where they run.
        inputs: what is known about writes into their input.
    """

    def __init__(
        self, watched: WatchedModule, devices: Collection[torch.device], inputs: InputWrites | None = None
    ) -> None:
        self.watched = watched
        self.devices = devices
        self.inputs = InputWrites("a layer") if inputs is None else inputs

    def rerun(self) -> Rerun:
        """To be called just before a first run that is to be repeated."""
        rerun = Rerun(self.watched, self.devices)
        rerun.copy = self.inputs.copy
        return rerun

    @property
    def modes(self) -> tuple[bool, ...]:
        """The ``training`` flags of all modules."""
        return tuple([module.training for _, module in self.watched.modules])

    @property
    def listened_to(self) -> bool:
        """Whether hooks see what the modules take or return, so that nothing may be left out."""
        return listened_to(module for _, module in self.watched.modules)

    def run(
        self,
        call: Call,
        value: Any,
        *around: contextlib.AbstractContextManager[Any],
        listener: Listener | None = None,
        rerun: Rerun | None = None,
    ) -> tuple[Any, Any]:
        """A first run: ``call(value)``, where ``value`` is not changed.

        Args:
            call: runs the layers.
            value: what enters them.
            around: contexts around the layers only.
            listener: within them; learns what a second run may leave out.
            rerun: notes whether it has to copy the value as well.

        Returns:
            The result, and what the layers ran on: ``value``, or a copy of it.
        """
        modes = self.modes
        with self.inputs.survived(value, modes) as given, contextlib.ExitStack() as stack:
            # The cache of casted weights would keep weights after their use, and casts whose graph is gone.
            stack.enter_context(autocast_without_cache(self.devices))
            for mode in around:
                stack.enter_context(mode)
            if listener is not None:
                listener.meets([*tensors_in(given), *self.watched.tensors()])
                stack.enter_context(listener)
            output = call(given)
        if rerun is not None:
            rerun.copies_input = self.inputs.copies(modes)
        return output, given
