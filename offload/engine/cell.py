"""Runs one shard on one micro-batch (a cell), without a graph, with one, or again exactly as before.

The forward of a recomputed cell keeps only its input; backward computes it again (:mod:`pipe.recompute.rerun`). The
first run has grad mode on, too, but drops every tensor that its graph would save: layers take the same path twice, and
the outputs that need a gradient are known.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.cell_input import CellInput, used_outside
from offload.engine.container_writes import ContainerWrites
from offload.engine.layouts import refuse_hidden, refuse_strided_nested
from offload.engine.saved_tensors import MemoryProfileRecorder, storages_of, weights_by_reference
from offload.planning.memory_profile import SavedTensor
from offload.streaming.casts import Casts, CastsSeen
from offload.streaming.shard import Shard
from pipe.checkpoint import enable_checkpointing, enable_recomputing
from pipe.nested import flatten, map_distinct, parts_of, tensors_in
from pipe.recompute.cheap_ops import CheapRecompute
from pipe.recompute.input_writes import InputWrites
from pipe.recompute.module_state import ModuleState, WatchedModule
from pipe.recompute.replay import Replay
from pipe.recompute.rerun import RepeatableLayers, Rerun
from pipe.torch_private.autograd import hidden_hooks
from pipe.torch_private.tensors import storage_uses
from pipe.torch_private.tracing import uncompiled_hooks

__all__ = ["Cell", "OutputFn", "ShardRunner"]

OutputFn = Callable[[Any], Any]

FORWARDS_COMPARED = 2
#: Forwards in which the bytes of a graph are measured, of the same settings and shapes: it looks at each operation.
GRAPHS_MEASURED = 3


class Cell(NamedTuple):
    """Index of a cell: shard ``j``, micro-batch ``i``. A pair."""

    j: int
    i: int

    def __str__(self) -> str:
        return f"{self.j}.{self.i}"


@dataclass(eq=False)
class ShardRunner:
    """Runs the cells of one shard, or of one of its layers where the model's own code runs between layers.

    Their input is (args, kwargs) for blocks, and where they begin with the model's first layer; else one value. A block
    gets that pair as one argument.
    """

    shard: Shard
    names: list[str]
    device: torch.device
    #: The place in the shard of the only layer to run; None: all of them.
    only: int | None = None
    watched: WatchedModule = field(init=False)
    layers: RepeatableLayers = field(init=False)
    #: Bytes that autograd would have saved in the last recorded forward.
    activation_bytes: int = 0
    #: Tensors saved for its backward, in order: see :mod:`offload.planning.memory_profile`.
    saved_tensors: Sequence[SavedTensor] = ()
    #: The same of a graph with cheap recomputation, with the cell's input if it is not the first; needs
    #: ``measures_graphs``. None where that was not measured again, after :data:`GRAPHS_MEASURED` times.
    graph_bytes: int | None = None
    measures_graphs: bool = False
    #: Whether recorded forwards measure these.
    measures: bool = True
    #: Whether the input of the first shard is memory of the caller, and so not counted in graphs.
    callers_input: bool = False
    #: Of the last recorded forward; None before.
    graph_bytes_per_row: float | None = None
    #: Whether the layers have written their own parameters; if so, whether a recomputation writes the same.
    writes_weights: bool = False
    repeats_writes: bool | None = None
    #: Whether a graph was kept that would hold casts of weights, if they were not recomputed.
    casts_weights: bool = False
    #: The settings in which a graph was kept that refers to no cast; and in which the bytes of one were measured: how
    #: often, and the shapes of its last input.
    _without_casts: set[tuple[Any, ...]] = field(default_factory=set)
    _graphs_measured: dict[tuple[Any, ...], tuple[int, list[torch.Size]]] = field(default_factory=dict)
    #: Whether lists and dicts in the input of a block are copies: what it changes there, its caller does not see.
    gets_copies: bool = False
    #: Whether a layer raised an error.
    failed: bool = False
    #: Whether another engine runs the layers, which copies no shard.
    native: bool = False
    #: The settings in which the graph of a block is known to end at its arguments and its own parameters.
    checked_graphs: set[tuple[bool, ...]] = field(default_factory=set)
    #: By identity: parameters that a block uses, which are neither its own nor among its arguments.
    others: dict[int, weakref.ref[nn.Parameter]] = field(default_factory=dict)
    _forwards: Counter[tuple[int, ...]] = field(default_factory=Counter)
    #: ``training`` flags -> whether the layers drew random numbers in a forward with these.
    _draws: dict[tuple[bool, ...], bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._inputs = InputWrites(f"shard {self.shard.index}")
        self.watch()

    def watch(self) -> None:
        """Records the present modules and buffers of the layers."""
        group = nn.Module()
        group._modules.update(zip(self.names, self.modules, strict=True))
        self.watched = WatchedModule(group)
        self.layers = RepeatableLayers(self.watched, [self.device], self._inputs)

    @property
    def modules(self) -> Sequence[nn.Module]:
        """The layers that it runs."""
        return self.shard.layers if self.only is None else [self.shard.layers[self.only]]

    @property
    def needs_copy(self) -> bool:
        """Whether the next forward must not use a home in place: layers may write it, see :meth:`compares_weights`."""
        if self.native:
            return False
        return self.writes_weights or self._forwards[self._modes()] < FORWARDS_COMPARED

    @property
    def draws(self) -> bool | None:
        """Whether the layers draw random numbers in their present modes; None if they did not run in these yet."""
        return self._draws.get(self._training())

    def check_graph(self, source: CellInput, outputs: Sequence[Any], flags: tuple[bool, ...]) -> bool:
        """Whether the graph of a block reaches other graphs by no argument; notes other parameters in :attr:`others`.

        Looked up in the first forward of each mode. ``flags``: whether parameters of other code take gradients.
        """
        settings = (*self._training(), *flags)
        if settings in self.checked_graphs:
            return False
        others, reaches = source.reaches(outputs, (*self.shard.parameters, *self.shard.quantised))
        self.others.update((id(p), weakref.ref(p)) for p in others)
        if not reaches:
            self.checked_graphs.add(settings)
        return reaches

    @property
    def other_parameters(self) -> list[nn.Parameter]:
        """Parameters that take a gradient in a block, which are neither its own nor among its arguments."""
        return [p for each in self.others.values() if (p := each()) is not None and p.requires_grad]

    def _training(self) -> tuple[bool, ...]:
        return tuple([module.training for _, module in self.watched.modules])

    def compares_weights(self) -> bool:
        """Whether parameters are compared with their homes after the forward of this visit.

        A write through ``.data`` increments no version. Layers write so in their first forward (an initialisation from
        data) or in each one, so the first forwards of each combination of ``training`` flags and hooks are compared.
        """
        compares = self.needs_copy
        self._forwards[self._modes()] += 1
        return compares

    def _modes(self) -> tuple[int, ...]:
        modules = [module for _, module in self.watched.modules]
        return *(m.training for m in modules), *(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules)

    def _settings(self) -> tuple[Any, ...]:
        """On which it depends, besides shapes, what autograd saves."""
        autocast = torch.get_autocast_dtype(self.device.type) if _autocasts(self.device) else None
        return autocast, *self._modes()

    def forward(self, boundary: Any, output_fn: OutputFn | None = None) -> Any:
        """Runs the cell for its output only."""
        with torch.no_grad():
            return self._first_run(boundary, output_fn)[0]

    def forward_recorded(self, boundary: Any, output_fn: OutputFn | None = None) -> tuple[Any, Rerun]:
        """Runs the cell without saving activations; ``requires_grad`` of its outputs is right.

        ``boundary`` holds new leaves. The output must be detached, which frees its graph.
        """
        if not self.measures:
            output, _, rerun = self._recorded(boundary, output_fn, None)
            return output, rerun
        recomputed: set[StorageWeakRef] = set()
        recorder = MemoryProfileRecorder(self.shard)
        settings = self._settings()
        times, shapes = self._graphs_measured.get(settings, (0, []))
        measures_graph = self.measures_graphs and times < GRAPHS_MEASURED
        cheap_recompute = CheapRecompute(hold=lambda tensor: None) if measures_graph else None
        casts = CastsSeen(Casts(), self.shard.slot) if measures_graph else None

        def drop(tensor: Tensor) -> None:
            # The graph of a first run only shows which outputs need a gradient, and how much it would have saved.
            recorder.add(tensor)
            strided = tensor.layout is torch.strided
            if strided and ((cheap_recompute and cheap_recompute.knows(tensor)) or (casts and casts.find(tensor))):
                recomputed.update(storages_of([tensor]))

        others = [mode for mode in (casts, cheap_recompute) if mode is not None]
        uses = storage_uses(self.shard.slot)
        output, given, rerun = self._recorded(boundary, output_fn, drop, *others)
        weights = self.shard.memory
        saved = {storage: nbytes for storage, nbytes in recorder.nbytes.items() if storage not in weights}
        self.activation_bytes = sum(saved.values())
        # A copy of the input that turned out to be unneeded counts as the boundary itself.
        own = tensors_in(boundary if rerun.copies_input else given)
        now = [tensor.shape for tensor in own]
        self._graphs_measured[settings] = (times + measures_graph if now == shapes else int(measures_graph)), now
        self.saved_tensors = recorder.saved_tensors(elsewhere=own)
        self.graph_bytes = None
        if not measures_graph:
            return output, rerun
        entered = storages_of(own) if self.shard.index else {}
        # The output is counted by the next shard, or belongs to the user; but ``output_fn`` may save its argument.
        recomputed.update(storages_of(tensors_in(output)) if output_fn is None else ())
        if self.callers_input and not rerun.copies_input:
            recomputed.update(storages_of(own))
        saved |= entered
        self.graph_bytes = sum(saved[storage] for storage in saved if storage in entered or storage not in recomputed)
        if storage_uses(self.shard.slot) > uses and not self.shard.bound_in_place:
            # A function refers to weights where no hook sees them. A graph that is kept would keep the slot.
            self.graph_bytes += self.shard.slot.numel()
        return output, rerun

    def _recorded(
        self,
        boundary: Any,
        output_fn: OutputFn | None,
        saved: Callable[[Tensor], None] | None,
        *around: contextlib.AbstractContextManager[Any],
    ) -> tuple[Any, Any, Rerun]:
        """A first run whose graph saves nothing, but calls ``saved``: output, input of the layers, its state."""

        def never(_: None) -> Tensor:
            raise used_outside(self.shard.index)

        rerun = self.layers.rerun(None if callable(boundary) else boundary)
        pack, unpack = uncompiled_hooks(saved or id, never)
        # Unused tensors are replaced by their id: by a function without a frame, so that none is compiled.
        hooks = torch.autograd.graph.saved_tensors_hooks(pack if saved else id, unpack)
        with rerun.first(), enable_checkpointing(), torch.enable_grad(), hooks:
            output, given = self._first_run(boundary, output_fn, *around, rerun=rerun)
        if rerun.replay.drawn:
            self._draws[self._training()] = True  # also if it did not in its first forward
        return output, given, rerun

    def until_backward(self) -> contextlib.AbstractContextManager[contextlib.ExitStack | None]:
        """A context for a recomputation and its backward; its exit stack, if any, keeps modules in the forward's state.

        Without, a layer that runs again within that backward (a checkpoint of its own) changes the present state.
        """
        return contextlib.nullcontext()

    def recompute(
        self,
        boundary: Any,
        rerun: Rerun,
        output_fn: OutputFn | None = None,
        until: contextlib.ExitStack | None = None,
    ) -> Any:
        """Runs the cell again with a graph. ``until``: see :meth:`until_backward`."""
        with torch.enable_grad():
            return rerun.repeat(self.call(output_fn), boundary, until=until)

    def push_back(self, roots: Sequence[Tensor], gradients: Sequence[Tensor], *, retain_graph: bool) -> None:
        """Backward through a cell's graph: adds to the parameters' gradients on the device."""
        # Hooks of parameters run once, on the whole gradient; this is only that of one micro-batch.
        with hidden_hooks(self.shard.parameters):
            torch.autograd.backward(roots, gradients, retain_graph=retain_graph)
        self.shard.widen_gradients()

    def repeat(self, boundary: Any, rerun: Rerun, output_fn: OutputFn | None = None) -> Any:
        """Runs the cell again with a graph, and ``is_recomputing()`` False."""
        with torch.enable_grad():
            output = rerun.repeat(self.call(output_fn), boundary, enable_recomputing(False))
            return self._out_of_slot(output)

    def forward_with_graph(
        self, boundary: Any, output_fn: OutputFn | None = None, *, cheap_recompute: bool = False
    ) -> tuple[Any, Sequence[SavedTensor] | None]:
        """Output with its graph, and the saved tensors; with ``cheap_recompute`` backward repeats cheap operations.

        Layers that use a home in place save weights as in the bare model, without being observed: None.
        """
        if self.shard.bound_in_place and not (cheap_recompute or self.casts_weights or _autocasts(self.device)):
            with torch.enable_grad():
                return self._first_run(boundary, output_fn)[0], None
        settings = self._settings()
        recorder = MemoryProfileRecorder(self.shard)
        saving = weights_by_reference(
            self.shard,
            recorder,
            cheap_recompute=cheap_recompute,
            changing=self.watched.changing() if cheap_recompute else (),
            finds_casts=settings not in self._without_casts,
        )
        # Recomputations of other cells must not see the writes of this one into buffers.
        module_state = ModuleState(self.watched) if cheap_recompute else None
        with contextlib.nullcontext() if module_state is None else module_state.running(), saving, torch.enable_grad():
            output = self._first_run(boundary, output_fn)[0]
        if module_state is not None:
            module_state.record_changes()
        self.casts_weights |= self.shard.weight_casts.found
        if not self.shard.weight_casts.found:
            self._without_casts.add(settings)
        return output, recorder.saved_tensors()

    def _first_run(
        self,
        boundary: Any,
        output_fn: OutputFn | None,
        *around: contextlib.AbstractContextManager[Any],
        rerun: Rerun | None = None,
    ) -> tuple[Any, Any]:
        """Output, and input of the layers. The contexts ``around`` enclose only the layers."""
        modes = self._training()
        first = None if modes in self._draws else Replay.capture([self.device], self.watched.generators)
        # What the model's own code passes on without a backward is its own: it sees what a block writes there.
        keeps_input = self.only is None or self.gets_copies
        output, given = self.layers.run(self.call(output_fn), boundary, *around, rerun=rerun, keeps_input=keeps_input)
        if first is not None:
            self._draws[modes] = bool(first.record_changes().drawn)
        # Without this, an output that is a parameter or a view of one would change with the next load of the slot.
        output = self._out_of_slot(output)
        if not isinstance(output, Tensor):
            refuse_hidden(flatten(output)[0], f"the output of shard {self.shard.index}")
        return output, given

    def call(self, output_fn: OutputFn | None) -> Callable[[Any], Any]:
        """The layers, then ``output_fn``, as a function of the boundary."""
        return partial(self._call, output_fn=output_fn)

    def _call(self, boundary: Any, output_fn: OutputFn | None) -> Any:
        try:
            first, *rest = self.modules
            watched = ContainerWrites(boundary) if self.gets_copies else None
            if self.shard.index == 0 and self.only is None:
                args, kwargs = boundary() if callable(boundary) else boundary
                value = first(*args, **kwargs)
            else:
                value = first(boundary)
            if watched is not None:
                watched.refuse(self.names[0])
            for layer in rest:
                value = layer(value)
            return value if output_fn is None else output_fn(value)
        except BaseException:
            self.failed = True
            raise

    def _out_of_slot(self, output: Any) -> Any:
        """``output``, with copies of tensors that are views of the slot."""
        slot = self.shard.slot.untyped_storage().data_ptr()

        def own(tensor: Tensor) -> Tensor:
            refuse_strided_nested(tensor, f"an output of shard {self.shard.index}")
            in_slot = any(part.untyped_storage().data_ptr() == slot for part in parts_of(tensor))
            return tensor.clone() if in_slot else tensor

        return map_distinct(own, output)


def _autocasts(device: torch.device) -> bool:
    return torch.is_autocast_enabled(device.type)
