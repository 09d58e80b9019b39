"""The layered walk: a plain ``nn.Sequential`` in memory, with what enters each layer kept between the two passes.

::

    pass 1    for group of chunks g:            for layer j:            value = layer_j(value), no graph; value is kept
    pass 2    for group of chunks g, reversed:  for layer j, reversed:  layer_j again with a graph, gradient through it

Two passes over a checkpointed model run every layer three times forward. Here what entered each layer in pass 1 serves
pass 2, and it is two times.

Guarantees
    * Only one layer's activations of one chunk are alive at a time, and besides them no more than ``boundary_bytes``.
    * These bytes first hold what enters layers. A chunk that finds no room keeps no more, and in pass 2 runs forward
      once more from the last thing that it kept; what enters its layers then exists beyond the budget, for one chunk
      at a time. Where room is left, chunks run together (see ``grouping``), and the
      last chunk keeps its whole graph and runs once; the two never need the room at the same time.
    * Kept values rest in host memory if the model is on an accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import grouping, representations
from gradcache.chunks import call_arguments
from pipe.guard import Guard, Watched
from pipe.microbatch import rows_of
from pipe.nested import flatten, map_tensors, tensors_in, unflatten
from pipe.replay import Replay, autocast_without_cache, devices_of

__all__ = ["LayeredModel", "LayeredTape", "is_plain_sequential"]

OutputFn = Callable[[Any], Any]


@dataclass(frozen=True)
class _Profile:
    """What the first chunk taught about all chunks of its kind."""

    together: int
    """Chunks that may run at a time: whose layers keep no more than the whole model does for one chunk."""
    layer_bytes: int
    """What the largest layer's graph of a chunk keeps."""
    graph_bytes: int
    """What the whole model's graph of a chunk keeps."""
    kept_bytes: int
    """What enters all layers but the first, of a chunk."""


@dataclass
class _Cell:
    """One layer's work on one group: how to repeat it, and what entered it (None: not kept)."""

    replay: Replay
    guard: Guard
    copies_input: bool
    kept: _Kept | None


@dataclass
class _Group:
    """Chunks that run together. With ``graph`` they ran once and for all: their outputs, and the leaves they are of."""

    chunks: list[int]
    rows: list[int]
    cells: list[_Cell] = field(default_factory=list)
    graph: tuple[list[Any], Any] | None = None


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


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether running the layers one after the other is all that the module does."""
    own_forward = type(model).forward is nn.Sequential.forward
    return isinstance(model, nn.Sequential) and len(model) > 0 and own_forward and not model._forward_hooks


class LayeredModel:
    """A plain ``nn.Sequential`` as a :class:`gradcache.streamed.StreamedModel`.

    Args:
        model: the layers.
        boundary_bytes: bytes that may be kept between the passes of one step.
        regroup: whether chunks may run together.

    The object remembers from step to step what it learnt about the layers.
    """

    def __init__(self, model: nn.Sequential, boundary_bytes: int, regroup: bool = True) -> None:
        self.layers: list[nn.Module] = list(model)
        self.boundary_bytes = boundary_bytes
        self.regroup = regroup
        self.parameters = list(model.parameters())
        self.watched = [Watched(layer) for layer in self.layers]
        self.writes_input: list[bool | None] = [None] * len(self.layers)
        self._profiles: dict[str, _Profile] = {}
        self._may_group: dict[tuple[bool, ...], bool] = {}

    def forward_chunks(self, chunks: Sequence[Any], output_fn: OutputFn | None = None) -> tuple[list[Any], LayeredTape]:
        """Detached outputs in chunk order, and the tape."""
        calls = [call_arguments(chunk) for chunk in chunks]
        tape = LayeredTape(self, calls, output_fn, torch.is_grad_enabled())
        with autocast_without_cache(devices_of(calls, self.parameters)):
            outputs = tape.run_forward()
        return outputs, tape

    def call(self, j: int, value: Any) -> Any:
        """Layer ``j`` on what enters it: (args, kwargs) for the first, one value for every other."""
        if j == 0:
            args, kwargs = value
            return self.layers[0](*args, **kwargs)
        return self.layers[j](value)

    def profile_of(self, chunk: Any) -> _Profile | None:
        """What is known about chunks of this kind, in the modes that the layers are in."""
        return self._profiles.get(self._key(chunk))

    def learn(self, chunk: Any, saved: list[int], kept_bytes: int, moves_buffers: bool, pair: Sequence[Any]) -> None:
        """Notes the profile of a chunk that just ran; ``pair``: two further chunks for a trial."""
        together = 1
        if self.regroup and not moves_buffers and grouping.runs_of_like_chunks(pair, 2) == [[0, 1]]:
            modes = self._modes()
            if modes not in self._may_group:
                self._may_group[modes] = grouping.can_group(self.call, self.layers, *pair)
            if self._may_group[modes]:
                together = max(sum(saved) // max(*saved, 1), 1)
        self._profiles[self._key(chunk)] = _Profile(together, max(*saved, 1), sum(saved), kept_bytes)

    def _modes(self) -> tuple[bool, ...]:
        return tuple(module.training for watched in self.watched for _, module in watched.modules)

    def _key(self, chunk: Any) -> str:
        return repr((grouping.kind_of(chunk), rows_of(chunk), self._modes()))


class LayeredTape:
    """What one forward leaves behind for its backward: groups, and for each of their cells how to repeat it."""

    def __init__(self, model: LayeredModel, calls: list[Any], output_fn: OutputFn | None, records: bool) -> None:
        self._model = model
        self._calls = calls
        self._output_fn = output_fn
        self._records = records
        self._groups: list[_Group] = []
        self._bytes_left = model.boundary_bytes
        wants = [any(p.requires_grad for p in layer.parameters()) for layer in model.layers]
        self._input_requires_grad = any(tensor.requires_grad for tensor in tensors_in(calls))
        wants[0] = wants[0] or self._input_requires_grad
        #: The first layer that a backward has to reach.
        self._first = wants.index(True) if True in wants else len(wants)

    # -- pass 1 -------------------------------------------------------------------------------------------------------

    def run_forward(self) -> list[Any]:
        """Runs all chunks. A first chunk of its kind runs alone, to learn from it."""
        outputs: list[Any] = [None] * len(self._calls)
        todo = list(range(len(self._calls)))
        if self._records and len(todo) > 1 and self._model.profile_of(self._calls[0]) is None:
            self._explore(todo.pop(0), todo[:2], outputs)
        profile = self._model.profile_of(self._calls[todo[0]])
        together = self._together(profile, len(todo)) if profile else 1
        last = todo.pop() if self._records and profile and self._graph_fits(profile, todo) else None
        for run in grouping.runs_of_like_chunks([self._calls[i] for i in todo], together):
            self._run_group(self._group([todo[k] for k in run]), outputs)
        if last is not None:
            self._run_with_graph(self._group([last]), outputs)
        return outputs

    def _together(self, profile: _Profile, chunks: int) -> int:
        """How many chunks run at a time. What more than one takes must find room beside what all of them keep."""
        if not self._records:
            return profile.together
        room = max(self._bytes_left - chunks * profile.kept_bytes, 0)
        return min(profile.together, 1 + room // profile.layer_bytes)

    def _graph_fits(self, profile: _Profile, todo: list[int]) -> bool:
        """Whether the last chunk's graph finds room beside what all others keep; known if all are of one kind."""
        alike = all(self._model.profile_of(self._calls[i]) is profile for i in todo)
        return alike and (len(todo) - 1) * profile.kept_bytes + profile.graph_bytes <= self._bytes_left

    def _explore(self, i: int, others: list[int], outputs: list[Any]) -> None:
        before, saved = self._bytes_left, [0] * len(self._model.layers)
        group = self._group([i])
        self._run_group(group, outputs, saved)
        moves_buffers = any(cell.guard.moved for cell in group.cells)
        pair = [self._calls[k] for k in others]
        self._model.learn(self._calls[i], saved, before - self._bytes_left, moves_buffers, pair)

    def _group(self, chunks: list[int]) -> _Group:
        self._groups.append(_Group(chunks, [rows_of(self._calls[i]) for i in chunks] if len(chunks) > 1 else [0]))
        return self._groups[-1]

    def _entering(self, group: _Group) -> Any:
        return map_tensors(Tensor.detach, grouping.joined([self._calls[i] for i in group.chunks]))

    def _run_group(self, group: _Group, outputs: list[Any], saved: list[int] | None = None) -> None:
        """Runs a group without a graph. ``saved``: takes the bytes that each layer's graph would keep."""
        value = self._entering(group)
        for j in range(len(self._model.layers)):
            kept = self._keep(value) if self._records and j >= max(self._first, 1) else None
            replay, guard = Replay.capture(devices_of(value, self._model.parameters)), Guard(self._model.watched[j])
            if saved is None:
                with torch.no_grad():
                    value, copies_input = self._first_run(j, value, group)
            else:
                counter = grouping.SavedBytes(self._model.parameters)
                with counter, torch.enable_grad():
                    value, copies_input = self._first_run(j, representations.as_leaves(value), group)
                    value = map_tensors(Tensor.detach, value)
                saved[j] = counter.total
                del counter  # with what it holds
            if self._records:
                group.cells.append(_Cell(replay.seal(), guard.seal(), copies_input, kept))
        self._note(group, value, outputs)

    def _run_with_graph(self, group: _Group, outputs: list[Any]) -> None:
        leaves = self._leaves(0, self._entering(group))
        value = leaves
        with torch.enable_grad():
            for j in range(len(self._model.layers)):
                value, _ = self._first_run(j, value, group)
        group.graph = value, leaves
        self._note(group, value, outputs)

    def _first_run(self, j: int, value: Any, group: _Group) -> tuple[Any, bool]:
        """The layer's result, and whether it writes over its input, which is then met on a copy only."""
        known = self._model.writes_input[j]
        given = value if known is False else map_tensors(torch.clone, value)
        versions = [tensor._version for tensor in tensors_in(given)]
        result = self._apply(j, given, group)
        writes = versions != [tensor._version for tensor in tensors_in(given)]
        if writes and known is False:
            raise RuntimeError(f"expected layer {j} to treat all chunks alike, but it wrote over its input only once")
        self._model.writes_input[j] = writes or known is True
        return result, writes

    def _apply(self, j: int, value: Any, group: _Group) -> Any:
        """One layer; the last one's result is cut into chunks, and ``output_fn`` is a part of it."""
        result = self._model.call(j, value)
        if j + 1 < len(self._model.layers):
            return result
        parts = grouping.cut(result, group.rows)
        return parts if self._output_fn is None else [self._output_fn(part) for part in parts]

    def _keep(self, value: Any) -> _Kept | None:
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(value))
        if size > self._bytes_left:
            return None
        self._bytes_left -= size
        return _Kept(value)

    def _note(self, group: _Group, parts: list[Any], outputs: list[Any]) -> None:
        for i, output in zip(group.chunks, parts, strict=True):
            outputs[i] = representations.detached(output)

    # -- pass 2 -------------------------------------------------------------------------------------------------------

    def backward(self, output_gradients: Sequence[Any]) -> None:
        """Pushes one gradient per chunk, of its output's structure or None, through the layers.

        Raises:
            RuntimeError: if the tape was used before, or its forward ran without gradients.
            ValueError: for another number of gradients.
        """
        if not self._records:
            raise RuntimeError("expected a tape of a forward with gradients, used once; run forward_chunks again")
        if len(output_gradients) != len(self._calls):
            raise ValueError(f"expected {len(self._calls)} gradients, one per chunk, got {len(output_gradients)}")
        self._records = False
        links: list[tuple[Tensor, Tensor]] = []
        while self._groups:
            group = self._groups.pop()
            gradients = [output_gradients[i] for i in group.chunks]
            if not any(representations.has_gradient(gradient) for gradient in gradients):
                continue
            entered = self._back_through_graph(group, gradients) if group.graph else self._back(group, gradients)
            for i, gradient in zip(group.chunks, grouping.cut(entered, group.rows), strict=True):
                pairs = zip(flatten(self._calls[i])[0], flatten(gradient)[0], strict=True)
                links += [(x, g) for x, g in pairs if isinstance(g, Tensor) and x.requires_grad]
        if links:
            torch.autograd.backward([tensor for tensor, _ in links], [gradient for _, gradient in links])

    def _back_through_graph(self, group: _Group, gradients: list[Any]) -> Any:
        assert group.graph is not None
        outputs, leaves = group.graph
        group.graph = None
        _backward(outputs, gradients)
        return representations.gradients(leaves)

    def _back(self, group: _Group, gradients: list[Any]) -> Any:
        """Returns the gradient of what entered the first layer, None for each leaf where it has none."""
        self._find_again(group)
        gradient: Any = gradients
        entered = self._entering(group)
        while len(group.cells) > self._first:
            cell = group.cells.pop()
            j = len(group.cells)
            leaves = self._leaves(j, cell.kept.back() if cell.kept is not None else entered)
            with cell.guard.again(strict=False), torch.enable_grad():
                with cell.replay.again():
                    result = self._apply(j, map_tensors(torch.clone, leaves) if cell.copies_input else leaves, group)
                _backward(result, gradient)
            gradient = representations.gradients(leaves)
            if not representations.has_gradient(gradient):
                break
        return gradient if not group.cells else map_tensors(lambda tensor: None, entered)

    def _leaves(self, j: int, value: Any) -> Any:
        """What enters layer ``j`` as leaves that collect gradients, where somebody wants them."""
        if j > self._first or (j == 0 and self._input_requires_grad):
            return representations.as_leaves(value)
        return map_tensors(Tensor.detach, value)

    def _find_again(self, group: _Group) -> None:
        """Computes what was not kept, from the last thing that was."""
        value = self._entering(group)
        missing = [j for j in range(max(self._first, 1), len(group.cells)) if group.cells[j].kept is None]
        if not missing:
            return
        start = max((j for j in range(missing[0]) if group.cells[j].kept is not None), default=0)
        for j in range(start, missing[-1]):
            cell = group.cells[j]
            value = cell.kept.back() if cell.kept is not None else value
            with torch.no_grad(), cell.guard.again(strict=False), cell.replay.again():
                value = self._model.call(j, map_tensors(torch.clone, value) if cell.copies_input else value)
            if group.cells[j + 1].kept is None and j + 1 >= max(self._first, 1):
                group.cells[j + 1].kept = _Kept(value)


def _backward(output: Any, gradient: Any) -> None:
    """Like ``representations.backward``; a None in the gradient stands for any structure without one."""
    if isinstance(output, list) and isinstance(gradient, list):
        pairs = [(o, g) for o, g in zip(output, gradient, strict=True) if representations.has_gradient(g)]
        output, gradient = [o for o, _ in pairs], [g for _, g in pairs]
    representations.backward(output, gradient)
