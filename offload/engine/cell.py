"""A cell: one shard applied to one micro-batch, in a way that can be repeated exactly.

The forward of a cell keeps nothing but what entered it; its backward computes it again (see
:mod:`pipe.recompute.rerun`). The first run has grad mode on too, with every tensor that its graph would save dropped:
layers take the same path twice, and it is known exactly which outputs need a gradient.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.layouts import refuse_hidden, refuse_strided_nested
from offload.engine.memory_recorder import MemoryProfileRecorder
from offload.engine.saved_tensors import weights_by_reference
from offload.engine.source import used_outside
from offload.planning.memory_profile import SavedTensor
from offload.streaming.casts import Casts, CastsSeen
from offload.streaming.shard import Shard
from pipe.checkpoint import enable_checkpointing, enable_recomputing
from pipe.nested import flatten, map_distinct, parts_of, tensors_in
from pipe.recompute.cheap_ops import CheapRecompute
from pipe.recompute.dead_code import Listener
from pipe.recompute.input_writes import InputWrites
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.rerun import RepeatableLayers, Rerun
from pipe.torch_private import hidden_hooks, uncompiled_hooks

__all__ = ["Cell", "OutputFn", "ReplayableShard"]

OutputFn = Callable[[Any], Any]

FORWARDS_COMPARED = 2


class Cell(NamedTuple):
    """Which cell: shard ``j``, micro-batch ``i``. Equal to the pair."""

    j: int
    i: int

    def __str__(self) -> str:
        return f"{self.j}.{self.i}"


@dataclass(eq=False)
class ReplayableShard:
    """Runs the cells of one shard. Their input is (args, kwargs) in the first shard, one value in every other."""

    shard: Shard
    names: list[str]
    device: torch.device
    watched: WatchedModule = field(init=False)
    layers: RepeatableLayers = field(init=False)
    #: Bytes that autograd would have kept of the last recorded forward.
    activation_bytes: int = 0
    #: The course that its backward takes.
    saved_tensors: Sequence[SavedTensor] = ()
    #: The same of a lean graph, with what entered the cell if it is not the first; where ``measures_graphs``.
    graph_bytes: int = 0
    measures_graphs: bool = False
    #: Whether recorded forwards measure these, and find out what recomputations may leave out.
    measures: bool = True
    #: Whether what enters the first shard is memory of the caller's, so that no graph adds to it.
    callers_input: bool = False
    #: As the last recorded forward had it; None before.
    graph_bytes_per_row: float | None = None
    #: Whether the layers were seen to write their own parameters; if so, whether they write the same once more.
    writes_weights: bool = False
    repeats_writes: bool | None = None
    #: Whether a layer raised an error.
    failed: bool = False
    #: Compare parameters with their homes after each forward, not only after the first ones.
    compares_always: bool = False
    _forwards: Counter[tuple[int, ...]] = field(default_factory=Counter)
    #: Whether its recomputations turned out to need what no gradient does, or to differ from their first runs.
    reads_values: bool = False

    def __post_init__(self) -> None:
        self._inputs = InputWrites(f"shard {self.shard.index}")
        self.watch()

    def watch(self) -> None:
        """Finds the modules and buffers of the layers, as they are now."""
        group = nn.Module()
        group._modules.update(zip(self.names, self.shard.layers, strict=True))
        self.watched = WatchedModule(group)
        self.layers = RepeatableLayers(self.watched, [self.device], self._inputs)

    @property
    def leaves_out(self) -> bool:
        """Whether a recomputation may leave out what no gradient needs."""
        return not (self.reads_values or self.layers.listened_to)

    def compares_weights(self) -> bool:
        """Whether the forward of this visit is one after which parameters are compared with their homes.

        A write through ``.data`` counts no version. What layers do so, they do in their first forward (an
        initialisation from data) or in each, so the first ones of each combination of ``training`` flags tell; and
        the first ones with other hooks, which may write as well.
        """
        modules = [module for _, module in self.watched.modules]
        modes = *(m.training for m in modules), *(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)
        self._forwards[modes] += 1
        return self.compares_always or self.writes_weights or self._forwards[modes] <= FORWARDS_COMPARED

    def forward(self, boundary: Any, output_fn: OutputFn | None = None) -> Any:
        """Runs the cell for its output only."""
        with torch.no_grad():
            return self._first_run(boundary, output_fn)[0]

    def forward_recorded(self, boundary: Any, output_fn: OutputFn | None = None) -> tuple[Any, Rerun]:
        """Runs the cell without keeping activations; its output tells what needs a gradient.

        ``boundary`` holds fresh leaves. The output must be detached, which frees its graph.
        """
        if not self.measures:
            output, _, rerun = self._recorded(boundary, output_fn, None)
            return output, rerun
        sizes: dict[StorageWeakRef, int] = {}
        made_again: set[StorageWeakRef] = set()
        notes = MemoryProfileRecorder(self.shard)
        listener, cheap_recompute = (
            Listener(),
            CheapRecompute(hold=lambda tensor: None) if self.measures_graphs else None,
        )
        casts = CastsSeen(Casts(), self.shard.slot) if self.measures_graphs else None

        def count(tensor: Tensor) -> StorageWeakRef:
            # What is dropped is freed at once. Without the weak references, its address would soon be another one's.
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            sizes[reference] = storage.nbytes()
            return reference

        def drop(tensor: Tensor) -> None:
            listener.saved(tensor)
            notes.saw(tensor)
            # The graph of a first run only tells which outputs need a gradient, and how much it would have kept.
            if tensor.layout is torch.strided:
                reference = count(tensor)
                if (cheap_recompute and cheap_recompute.knows(tensor)) or (casts and casts.find(tensor)):
                    made_again.add(reference)

        others = [mode for mode in (casts, cheap_recompute) if mode is not None]
        output, given, rerun = self._recorded(boundary, output_fn, drop, *others, listener=listener)
        for reference in self.shard.memory:
            sizes.pop(reference, None)
        self.activation_bytes = sum(sizes.values())
        # A copy that only showed that none is needed stands for the boundary itself.
        own = tensors_in(boundary if rerun.copies_input else given)
        self.saved_tensors = notes.saved_tensors(elsewhere=own)
        entered = {count(part) for t in own for part in parts_of(t)} if self.shard.index else set()
        # A result enters the next shard and is counted there, or is the user's; but what follows it keeps its argument.
        for t in tensors_in(output) if output_fn is None else ():
            made_again.update(map(count, parts_of(t)))
        if self.callers_input and not rerun.copies_input:
            made_again.update(count(part) for t in own for part in parts_of(t))
        self.graph_bytes = sum(nbytes for reference, nbytes in sizes.items() if reference not in made_again - entered)
        if self.leaves_out:
            rerun.dead_code = listener.dead_code()
        return output, rerun

    def _recorded(
        self,
        boundary: Any,
        output_fn: OutputFn | None,
        saved: Callable[[Tensor], None] | None,
        *around: contextlib.AbstractContextManager[Any],
        listener: Listener | None = None,
    ) -> tuple[Any, Any, Rerun]:
        """A first run whose graph keeps nothing: output, what was run on, and what a second run needs.

        ``saved`` is called with each tensor that the graph would keep: it only tells which outputs need a gradient.
        """

        def never(_: None) -> Tensor:
            raise used_outside(self.shard.index)

        rerun = self.layers.rerun()
        pack, unpack = uncompiled_hooks(saved or id, never)
        # Of no interest, a tensor is replaced by its number: by a function without a frame, so that none is compiled.
        hooks = torch.autograd.graph.saved_tensors_hooks(pack if saved else id, unpack)
        with rerun.first(), enable_checkpointing(), torch.enable_grad(), hooks:
            output, given = self._first_run(boundary, output_fn, *around, listener=listener, rerun=rerun)
        return output, given, rerun

    def until_backward(self) -> contextlib.AbstractContextManager[contextlib.ExitStack | None]:
        """Around a recomputation and its backward; what it gives keeps the module's state of the forward meanwhile.

        None: a layer that is run again within that backward (a checkpoint of its own) meets the state of now, and
        changes it, as in plain torch.
        """
        return contextlib.nullcontext()

    def recompute(
        self,
        boundary: Any,
        rerun: Rerun,
        output_fn: OutputFn | None = None,
        until: contextlib.ExitStack | None = None,
    ) -> Any:
        """Runs the cell once more, with a graph from ``boundary`` and the parameters to its output.

        The output is of the right shape, but its values may be left out. For ``until`` see :meth:`until_backward`.
        """
        output, as_before = rerun.repeat_for_gradients(self.call(output_fn), boundary, until=until)
        self.reads_values |= not as_before
        return output

    def push_back(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool) -> None:
        """Backward through a cell's graph: adds to the parameters' gradients on the device."""
        # Hooks of parameters run once, on the whole gradient; this is the part of one micro-batch.
        with hidden_hooks(self.shard.parameters):
            torch.autograd.backward(roots, gradients, retain_graph=retain_graph)
        self.shard.widen_gradients()

    def repeat(self, boundary: Any, rerun: Rerun, output_fn: OutputFn | None = None) -> Any:
        """Runs the cell once more with a graph, as if for the first time."""
        with torch.enable_grad():
            output = rerun.repeat(self.call(output_fn), boundary, enable_recomputing(False))
            return self._out_of_slot(output)

    def forward_with_graph(
        self, boundary: Any, output_fn: OutputFn | None = None, *, cheap_recompute: bool = False
    ) -> tuple[Any, Sequence[SavedTensor]]:
        """Runs the cell once, and keeps its graph; cheap operations are recomputed if ``cheap_recompute``.

        Returns:
            Its output, and the course that its backward takes.
        """
        notes = MemoryProfileRecorder(self.shard)
        saving = weights_by_reference(
            self.shard,
            notes,
            cheap_recompute=cheap_recompute,
            changing=self.watched.changing() if cheap_recompute else (),
        )
        # Recomputations of other cells must not meet what this one writes into buffers.
        module_state = ModuleState(self.watched) if cheap_recompute else None
        with contextlib.nullcontext() if module_state is None else module_state.running(), saving, torch.enable_grad():
            output = self._first_run(boundary, output_fn)[0]
        if module_state is not None:
            module_state.seal()
        return output, notes.saved_tensors()

    def _first_run(
        self,
        boundary: Any,
        output_fn: OutputFn | None,
        *around: contextlib.AbstractContextManager[Any],
        listener: Listener | None = None,
        rerun: Rerun | None = None,
    ) -> tuple[Any, Any]:
        """Output, and what was run on. ``around`` are around the layers only, and ``listener`` within them."""
        output, given = self.layers.run(self.call(output_fn), boundary, *around, listener=listener, rerun=rerun)
        # Without this, an output that is a parameter or a view of one would show what the slot holds next.
        output = self._out_of_slot(output)
        if not isinstance(output, Tensor):
            refuse_hidden(flatten(output)[0], f"the output of shard {self.shard.index}")
        return output, given

    def call(self, output_fn: OutputFn | None) -> Callable[[Any], Any]:
        """The layers, and ``output_fn`` behind them, as a function of the boundary."""
        return partial(self._call, output_fn=output_fn)

    def _call(self, boundary: Any, output_fn: OutputFn | None) -> Any:
        try:
            first, *rest = self.shard.layers
            if self.shard.index == 0:
                args, kwargs = boundary() if callable(boundary) else boundary
                value = first(*args, **kwargs)
            else:
                value = first(boundary)
            for layer in rest:
                value = layer(value)
            return value if output_fn is None else output_fn(value)
        except BaseException:
            self.failed = True
            raise

    def _out_of_slot(self, output: Any) -> Any:
        """``output``, or copies of what in it is in the slot."""
        return map_distinct(self._own_memory, output)

    def _own_memory(self, tensor: Tensor) -> Tensor:
        """``tensor``, or a copy of it if it lies in the slot."""
        refuse_strided_nested(tensor, f"an output of shard {self.shard.index}")
        slot = self.shard.slot.untyped_storage().data_ptr()
        return tensor.clone() if any(part.untyped_storage().data_ptr() == slot for part in parts_of(tensor)) else tensor
