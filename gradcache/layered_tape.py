"""The first pass of the layered walk over one step's chunks, and what it leaves to the second; see ``layered``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcache import grouping, representations
from gradcache.cells import Again, Graph, Group, Kept, Work, nbytes_of
from gradcache.entering import Entering
from gradcache.layered_back import push_back
from gradcache.layers import Layers, Profile
from gradcache.tables import rows_in_place
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.cheap_ops import CheapRecompute
from pipe.recompute.dead_code import DeadCode, Listener, listened_to
from pipe.recompute.module_state import ModuleState
from pipe.recompute.replay import Replay, devices_of

__all__ = ["LayeredTape"]


@dataclass
class _Survey:
    """What one chunk teaches, layer by layer; see :class:`gradcache.layers.Profile`."""

    saved: list[tuple[int, int]] = field(default_factory=list)
    entering: list[int] = field(default_factory=list)
    dead_code: list[DeadCode | None] = field(default_factory=list)
    moves_buffers: bool = False


class LayeredTape:
    """What one forward leaves behind for its backward: groups, and for each of their cells how to go back through it.

    Args:
        model: the layers, and what is known about them.
        entering: the chunks.
        output_fn: a part of the last layer, applied to each chunk's output.
        records: whether there will be a backward.
        wants_input: whether the chunks take gradients.
    """

    def __init__(
        self,
        model: Layers,
        entering: Entering,
        output_fn: Callable[[Any], Any] | None,
        records: bool,
        wants_input: bool,
    ) -> None:
        self._model = model
        self._entering = entering
        self._records = records
        self._groups: list[Group] = []
        self._bytes_left = model.boundary_bytes
        wants = [any(p.requires_grad for p in layer.parameters()) for layer in model.layers]
        wants[0] = wants[0] or wants_input
        first = wants.index(True) if True in wants else len(wants)
        self._work = Work(model, entering, output_fn, first, wants_input)

    # -- pass 1 -------------------------------------------------------------------------------------------------------

    def run_forward(self) -> list[Any]:
        """Runs all chunks. A first chunk of its kind runs once before, to learn from it."""
        outputs: list[Any] = [None] * len(self._entering)
        todo = list(range(len(self._entering)))
        if self._records and len(todo) > 1 and self._model.profile_of(self._entering.look(0)) is None:
            self._explore()
        profile = self._model.profile_of(self._entering.look(todo[0]))
        together = self._together(profile, len(todo)) if profile else 1
        runs = self._planned_runs(todo, together)
        for run, graphs_from in zip(runs, self._planned_graphs(profile, runs), strict=True):
            values = [self._entering.take(i) for i in run]
            for part in grouping.runs_of_like_chunks(values, together):
                value = grouping.joined([values[k] for k in part])
                group = self._group([run[k] for k in part], [values[k] for k in part], graphs_from)
                if part[-1] + 1 == len(run):
                    values.clear()  # what was joined is not kept a second time
                self._run_group(group, value, outputs)
        return outputs

    def _planned_runs(self, todo: list[int], together: int) -> list[list[int]]:
        """Neighbours that may run together, as far as one can tell before they are processed."""
        known = self._entering.known
        if known is None:
            return [todo[k : k + together] for k in range(0, len(todo), together)]
        return [[todo[k] for k in run] for run in grouping.runs_of_like_chunks([known[i] for i in todo], together)]

    def _together(self, profile: Profile, chunks: int) -> int:
        """How many chunks run at a time. What more than one takes must find room beside what all of them keep."""
        if not self._records:
            return profile.together
        room = max(self._bytes_left - chunks * sum(profile.entering_bytes), 0)
        return min(profile.together, 1 + room // profile.layer_bytes)

    def _planned_graphs(self, profile: Profile | None, runs: list[list[int]]) -> list[int]:
        """For each run the layer from which on graphs are kept: the cells that a backward begins with, as they fit."""
        layers = len(self._model.layers)
        plan = [layers] * len(runs)
        if profile is None or not self._records:
            return plan
        left = self._bytes_left - sum(map(len, runs)) * sum(profile.entering_bytes)
        for j in reversed(range(self._work.first, layers)):
            for k in reversed(range(len(runs))):
                left -= len(runs[k]) * (profile.graph_bytes[j] - profile.entering_bytes[j])
                if left < 0:
                    return plan
                plan[k] = j
        return plan

    def _explore(self) -> None:
        """Runs the first chunk and leaves no trace.

        It runs again with the others: kept apart from them, it would have gradients of its own beside their sum.
        """
        chunk, survey, layers = self._entering.look(0), _Survey(), len(self._model.layers)
        group, value = Group([0], [grouping.rows_in(chunk)], layers, None), chunk
        with contextlib.ExitStack() as stack:
            for watched in self._model.watched:
                stack.enter_context(ModuleState(watched).trial())
            held = [generator for watched in self._model.watched for generator in watched.generators]
            stack.enter_context(Replay.capture(devices_of(chunk, self._model.parameters), held).again())
            for j in range(layers):
                survey.entering.append(nbytes_of(value) if j >= max(self._work.first, 1) else 0)
                module_state = ModuleState(self._model.watched[j])
                with module_state.running():
                    value = self._surveyed(j, value, group, survey)
                survey.moves_buffers |= module_state.seal().moved
        others = range(1, min(3, len(self._entering)))
        pair = [self._entering.look(k) for k in others] if self._model.regroup and not survey.moves_buffers else []
        self._model.learn(chunk, survey.saved, survey.entering, survey.dead_code, pair)

    def _group(self, chunks: list[int], values: list[Any], graphs_from: int) -> Group:
        rows = [grouping.rows_in(value) for value in values]
        self._groups.append(Group(chunks, rows, graphs_from, self._model.profile_of(values[0])))
        return self._groups[-1]

    def _run_group(self, group: Group, value: Any, outputs: list[Any]) -> None:
        for j in range(len(self._model.layers)):
            keeps = self._records and j >= max(self._work.first, 1)
            if j >= group.graphs_from and self._has_room(group, j):
                watched = self._model.watched[j]
                leaves, cheap_recompute = self._work.leaves(j, value), CheapRecompute(changing=watched.changing())
                module_state = ModuleState(
                    watched
                )  # of no use to this cell, but recomputations of others must not meet its writes
                hooks = torch.autograd.graph.saved_tensors_hooks(cheap_recompute.pack, cheap_recompute.unpack)
                with module_state.running(), torch.enable_grad(), hooks:
                    output, _, _ = self._first_run(
                        j, leaves, group, rows_in_place(self._model.tables[j]), cheap_recompute
                    )
                module_state.seal()
                group.cells.append(Graph(output, leaves))
                value = map_tensors(Tensor.detach, output)
                continue
            kept = self._keep(value) if keeps else None
            watched = self._model.watched[j]
            replay = Replay.capture(devices_of(value, self._model.parameters), watched.generators)
            module_state = ModuleState(watched)
            with torch.no_grad(), module_state.running():
                value, copies_input, _ = self._first_run(j, value, group)
            if self._records:
                group.cells.append(
                    Again(replay.seal(), module_state.seal(), copies_input, kept, self._dead_code(j, group))
                )
        for i, output in zip(group.chunks, value, strict=True):
            outputs[i] = representations.detached(output)

    def _dead_code(self, j: int, group: Group) -> DeadCode | None:
        # The last layer's result is looked at in the second pass too, by whoever compares the two.
        if group.profile is None or j + 1 == len(self._model.layers):
            return None
        listened = listened_to(module for _, module in self._model.watched[j].modules)
        return None if listened else group.profile.dead_code[j]

    def _surveyed(self, j: int, value: Any, group: Group, survey: _Survey) -> Any:
        """A first run that counts what a graph would keep, but keeps none."""
        listener, cheap_recompute = Listener(), CheapRecompute()
        graph = grouping.SavedBytes(self._model.parameters)

        def saved(tensor: Tensor) -> None:
            listener.saved(tensor)
            if not cheap_recompute.knows(tensor):
                graph.count(tensor)

        counter = grouping.SavedBytes(self._model.parameters, saved)
        leaves = representations.as_leaves(value)
        with counter, torch.enable_grad():
            output, copies_input, given = self._first_run(j, leaves, group, cheap_recompute, listener=listener)
        # What entered is kept as well, except that the first layer's input may be the caller's. A result enters the
        # next layer, and is counted there.
        for tensor in tensors_in((given, leaves if copies_input else ())):
            graph.count(tensor)
        for tensor in tensors_in(given) if j == 0 and self._entering.known is not None and not copies_input else ():
            graph.forget(tensor)
        for tensor in tensors_in(output) if j + 1 < len(self._model.layers) else ():
            graph.forget(tensor)
        survey.saved.append((counter.total, graph.total))
        survey.dead_code.append(listener.dead_code())
        return map_tensors(Tensor.detach, output)

    def _first_run(
        self,
        j: int,
        value: Any,
        group: Group,
        *modes: contextlib.AbstractContextManager[Any],
        listener: Listener | None = None,
    ) -> tuple[Any, bool, Any]:
        """The layer's result, whether it writes over its input, which is then met on a copy only, and what it met."""
        known = self._model.writes_input[j]
        given = value if known is False else map_tensors(torch.clone, value)
        # Tensors of inference mode do not count their changes, so that nothing can be learnt from them.
        counted = not any(tensor.is_inference() for tensor in tensors_in(given))
        versions = [tensor._version for tensor in tensors_in(given)] if counted else []
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            if listener is not None:
                listener.meets([*tensors_in(given), *self._model.watched[j].tensors()])
                stack.enter_context(listener)
            result = self._work.apply(j, given, group)
        if not counted:
            return result, True, given
        writes = versions != [tensor._version for tensor in tensors_in(given)]
        if writes and known is False:
            raise RuntimeError(f"expected layer {j} to treat all chunks alike, but it wrote over its input only once")
        self._model.writes_input[j] = writes or known is True
        return result, writes, given

    def _has_room(self, group: Group, j: int) -> bool:
        """Takes the bytes that a cell's graph keeps out of the budget, if they are left."""
        if group.profile is None:
            return False
        size = group.profile.scaled(group.profile.graph_bytes[j], sum(group.rows))
        fits = size <= self._bytes_left
        self._bytes_left -= size if fits else 0
        return fits

    def _keep(self, value: Any) -> Kept | None:
        size = nbytes_of(value)
        if size > self._bytes_left:
            return None
        self._bytes_left -= size
        return Kept(value)

    # -- pass 2 -------------------------------------------------------------------------------------------------------

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Pushes one gradient per chunk, of its output's structure or None, through the layers.

        Raises:
            RuntimeError: if the tape was used before, or its forward ran without gradients.
            ValueError: for another number of gradients.
        """
        if not self._records:
            raise RuntimeError("expected a tape of a forward with gradients, used once; run forward_chunks again")
        if len(output_gradients) != len(self._entering):
            raise ValueError(f"expected {len(self._entering)} gradients, one per chunk, got {len(output_gradients)}")
        self._records = False
        push_back(self._work, self._groups, output_gradients)
