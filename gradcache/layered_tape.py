"""The two passes of the layered walk over one step's chunks; see ``layered`` for the picture and the guarantees."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradcache import grouping, representations
from gradcache.entering import Entering
from gradcache.layers import Layers, Profile
from pipe.guard import Guard
from pipe.lean import Lean
from pipe.nested import flatten, map_tensors, tensors_in, unflatten
from pipe.replay import Replay, devices_of
from pipe.tail import Listener, OtherOperations, Skipper, Tail, listened_to

__all__ = ["LayeredTape"]


class _Kept:
    """A value at rest: in host memory, whatever device it came from."""

    def __init__(self, value: Any) -> None:
        leaves, self._spec = flatten(value)
        self._devices = [leaf.device if isinstance(leaf, Tensor) else None for leaf in leaves]
        self._leaves = [leaf.cpu() if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def back(self) -> Any:
        """The value where it came from."""
        pairs = zip(self._leaves, self._devices, strict=True)
        return unflatten([x if device is None else x.to(device) for x, device in pairs], self._spec)


@dataclass
class _Again:
    """How to repeat one layer's work on one group, and what entered it (None: not kept)."""

    replay: Replay
    guard: Guard
    copies_input: bool
    kept: _Kept | None
    tail: Tail | None


@dataclass
class _Graph:
    """One layer's work on one group that ran once and for all."""

    output: Any
    leaves: Any


@dataclass
class _Group:
    """Chunks that run together, with the rows of each; cells from layer ``graphs_from`` on keep their graphs."""

    chunks: list[int]
    rows: list[int]
    graphs_from: int
    profile: Profile | None
    cells: list[_Again | _Graph] = field(default_factory=list)
    entered: Any = None


@dataclass
class _Survey:
    """What one chunk teaches, layer by layer; see :class:`gradcache.layers.Profile`."""

    saved: list[tuple[int, int]] = field(default_factory=list)
    entering: list[int] = field(default_factory=list)
    tails: list[Tail | None] = field(default_factory=list)
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
        self._output_fn = output_fn
        self._records = records
        self._wants_input = wants_input
        self._groups: list[_Group] = []
        self._bytes_left = model.boundary_bytes
        wants = [any(p.requires_grad for p in layer.parameters()) for layer in model.layers]
        wants[0] = wants[0] or wants_input
        #: The first layer that a backward has to reach.
        self._first = wants.index(True) if True in wants else len(wants)

    # -- pass 1 -------------------------------------------------------------------------------------------------------

    def run_forward(self) -> list[Any]:
        """Runs all chunks. A first chunk of its kind runs alone, to learn from it."""
        outputs: list[Any] = [None] * len(self._entering)
        todo = list(range(len(self._entering)))
        if self._records and len(todo) > 1 and self._model.profile_of(self._entering.look(0)) is None:
            self._explore(todo.pop(0), outputs)
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
        for k in reversed(range(len(runs))):
            for j in reversed(range(self._first, layers)):
                left -= len(runs[k]) * (profile.graph_bytes[j] - profile.entering_bytes[j])
                if left < 0:
                    return plan
                plan[k] = j
        return plan

    def _explore(self, i: int, outputs: list[Any]) -> None:
        chunk, survey = self._entering.take(i), _Survey()
        self._run_group(self._group([i], [chunk], len(self._model.layers)), chunk, outputs, survey)
        others = range(i + 1, min(i + 3, len(self._entering)))
        pair = [self._entering.look(k) for k in others] if self._model.regroup and not survey.moves_buffers else []
        self._model.learn(chunk, survey.saved, survey.entering, survey.tails, pair)

    def _group(self, chunks: list[int], values: list[Any], graphs_from: int) -> _Group:
        rows = [grouping.rows_in(value) for value in values]
        self._groups.append(_Group(chunks, rows, graphs_from, self._model.profile_of(values[0])))
        return self._groups[-1]

    def _run_group(self, group: _Group, value: Any, outputs: list[Any], survey: _Survey | None = None) -> None:
        for j in range(len(self._model.layers)):
            keeps = self._records and j >= max(self._first, 1)
            if survey is not None:
                survey.entering.append(_nbytes(value) if keeps else 0)
            if j >= group.graphs_from and self._has_room(group, j):
                leaves, lean = self._leaves(j, value), Lean()
                with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(lean.pack, lean.unpack):
                    output, _, _ = self._first_run(j, leaves, group, lean)
                group.cells.append(_Graph(output, leaves))
                value = map_tensors(Tensor.detach, output)
                continue
            kept = self._keep(value) if keeps else None
            replay, guard = Replay.capture(devices_of(value, self._model.parameters)), Guard(self._model.watched[j])
            if survey is None:
                with torch.no_grad():
                    value, copies_input, _ = self._first_run(j, value, group)
            else:
                value, copies_input = self._surveyed(j, value, group, survey)
            if self._records:
                # The last layer's result is looked at in the second pass too, by whoever compares the two.
                tail = group.profile.tails[j] if group.profile and j + 1 < len(self._model.layers) else None
                tail = None if listened_to(module for _, module in self._model.watched[j].modules) else tail
                group.cells.append(_Again(replay.seal(), guard.seal(), copies_input, kept, tail))
                if survey is not None:
                    survey.moves_buffers |= guard.moved
        for i, output in zip(group.chunks, value, strict=True):
            outputs[i] = representations.detached(output)

    def _surveyed(self, j: int, value: Any, group: _Group, survey: _Survey) -> tuple[Any, bool]:
        """A first run that counts what a graph would keep, but keeps none."""
        listener, lean = Listener(), Lean()
        graph = grouping.SavedBytes(self._model.parameters)

        def saved(tensor: Tensor) -> None:
            listener.saved()
            if not lean.knows(tensor):
                graph.count(tensor)

        counter = grouping.SavedBytes(self._model.parameters, saved)
        leaves = representations.as_leaves(value)
        with counter, torch.enable_grad():
            output, copies_input, given = self._first_run(j, leaves, group, lean, listener)
        # What entered is kept as well, except that the first layer's input may be the caller's. A result enters the
        # next layer, and is counted there.
        for tensor in tensors_in((given, leaves if copies_input else ())):
            graph.count(tensor)
        for tensor in tensors_in(given) if j == 0 and self._entering.known is not None and not copies_input else ():
            graph.forget(tensor)
        for tensor in tensors_in(output) if j + 1 < len(self._model.layers) else ():
            graph.forget(tensor)
        survey.saved.append((counter.total, graph.total))
        survey.tails.append(listener.tail())
        return map_tensors(Tensor.detach, output), copies_input

    def _first_run(
        self, j: int, value: Any, group: _Group, *modes: contextlib.AbstractContextManager[Any]
    ) -> tuple[Any, bool, Any]:
        """The layer's result, whether it writes over its input, which is then met on a copy only, and what it met."""
        known = self._model.writes_input[j]
        given = value if known is False else map_tensors(torch.clone, value)
        versions = [tensor._version for tensor in tensors_in(given)]
        with contextlib.ExitStack() as stack:
            for mode in modes:
                stack.enter_context(mode)
            result = self._apply(j, given, group)
        writes = versions != [tensor._version for tensor in tensors_in(given)]
        if writes and known is False:
            raise RuntimeError(f"expected layer {j} to treat all chunks alike, but it wrote over its input only once")
        self._model.writes_input[j] = writes or known is True
        return result, writes, given

    def _apply(self, j: int, value: Any, group: _Group) -> Any:
        """One layer; the last one's result is cut into chunks, and ``output_fn`` is a part of it."""
        result = self._model.call(j, value)
        if j + 1 < len(self._model.layers):
            return result
        parts = grouping.cut(result, group.rows)
        return parts if self._output_fn is None else [self._output_fn(part) for part in parts]

    def _has_room(self, group: _Group, j: int) -> bool:
        """Takes the bytes that a cell's graph keeps out of the budget, if they are left."""
        if group.profile is None:
            return False
        size = group.profile.scaled(group.profile.graph_bytes[j], sum(group.rows))
        fits = size <= self._bytes_left
        self._bytes_left -= size if fits else 0
        return fits

    def _keep(self, value: Any) -> _Kept | None:
        size = _nbytes(value)
        if size > self._bytes_left:
            return None
        self._bytes_left -= size
        return _Kept(value)

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
        links: list[tuple[Tensor, Tensor]] = []
        while self._groups:
            group = self._groups.pop()
            gradients = [output_gradients[i] for i in group.chunks]
            if not any(representations.has_gradient(gradient) for gradient in gradients):
                continue
            entered = self._back(group, gradients)
            if not self._wants_input:
                continue
            assert self._entering.known is not None
            for i, gradient in zip(group.chunks, grouping.cut(entered, group.rows), strict=True):
                pairs = zip(flatten(self._entering.known[i])[0], flatten(gradient)[0], strict=True)
                links += [(x, g) for x, g in pairs if isinstance(g, Tensor) and x.requires_grad]
        if links:
            torch.autograd.backward([tensor for tensor, _ in links], [gradient for _, gradient in links])

    def _back(self, group: _Group, gradients: list[Any]) -> Any:
        """Returns the gradient of what entered the first layer, None for each leaf where it has none."""
        gradient: Any = gradients
        found = False
        while len(group.cells) > self._first:
            j, cell = len(group.cells) - 1, group.cells[-1]
            if isinstance(cell, _Again) and not found:
                self._find_again(group)
                found = True
            group.cells.pop()
            gradient = self._back_through(j, cell, group, gradient)
            del cell  # or its graph would outlive the next one's making
            if not representations.has_gradient(gradient):
                break
        if group.cells and self._wants_input:
            return map_tensors(lambda tensor: None, self._entered(group))
        return gradient

    def _back_through(self, j: int, cell: _Again | _Graph, group: _Group, gradient: Any) -> Any:
        """The gradient of what entered a cell."""
        if isinstance(cell, _Graph):
            _backward(cell.output, gradient)
            return representations.gradients(cell.leaves)
        leaves = self._leaves(j, cell.kept.back() if cell.kept is not None else self._entered(group))
        # Where the layer turns out to do other operations than it did when it was surveyed, nothing is left out.
        for skipper in (None,) if cell.tail is None else (Skipper(cell.tail), None):
            # Buffers stay as they were until backward is done, which may read them.
            with contextlib.suppress(OtherOperations), cell.guard.again(strict=False), torch.enable_grad():
                with cell.replay.again():
                    given = _given(cell, leaves)
                    with skipper or contextlib.nullcontext():
                        result = self._apply(j, given, group)
                if skipper is not None:
                    skipper.check()
                _backward(result, gradient)
                break
        return representations.gradients(leaves)

    def _entered(self, group: _Group) -> Any:
        """What entered the first layer, made once for a backward."""
        if group.entered is None:
            group.entered = grouping.joined([self._entering.take(i) for i in group.chunks])
        return group.entered

    def _leaves(self, j: int, value: Any) -> Any:
        """What enters layer ``j`` as leaves that collect gradients, where somebody wants them."""
        if j > self._first or (j == 0 and self._wants_input):
            return representations.as_leaves(value)
        return map_tensors(Tensor.detach, value)

    def _find_again(self, group: _Group) -> None:
        """Computes what was not kept, from the last thing that was."""
        cells = [cell for cell in group.cells if isinstance(cell, _Again)]
        missing = [j for j in range(max(self._first, 1), len(cells)) if cells[j].kept is None]
        if not missing:
            return
        start = max((j for j in range(missing[0]) if cells[j].kept is not None), default=0)
        value = None
        for j in range(start, missing[-1]):
            cell = cells[j]
            value = cell.kept.back() if cell.kept is not None else self._entered(group) if j == 0 else value
            with torch.no_grad(), cell.guard.again(strict=False), cell.replay.again():
                value = self._model.call(j, _given(cell, value))
            if cells[j + 1].kept is None and j + 1 >= max(self._first, 1):
                cells[j + 1].kept = _Kept(value)


def _given(cell: _Again, value: Any) -> Any:
    return map_tensors(torch.clone, value) if cell.copies_input else value


def _nbytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))


def _backward(output: Any, gradient: Any) -> None:
    """Like ``representations.backward``; a None in the gradient stands for any structure without one."""
    if isinstance(output, list) and isinstance(gradient, list):
        pairs = [(o, g) for o, g in zip(output, gradient, strict=True) if representations.has_gradient(g)]
        output, gradient = [o for o, _ in pairs], [g for _, g in pairs]
    representations.backward(output, gradient)
