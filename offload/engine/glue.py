"""The code of a model between its blocks (glue): its graph is cut where blocks begin and end, and run in pieces.

A model's own forward calls blocks, which make shards. What enters a block and what a block returns are cut from the
graph, so what remains are small pieces of graph for each chunk::

    prefix  ->  [block 0]  ->  glue  ->  [block 1]  ->  ...  ->  [block n-1]  ->  suffix

Backward visits the blocks in reverse order, and after each block runs the piece before it.

Guarantees
    * Memory that enters several blocks (a mask, a rotary table, a position bias) is stored once for each chunk; its
      gradients are summed, the last block's first as in plain autograd, and run through its piece once.
    * No piece keeps an activation alive that autograd does not need: only edges of the graph are stored.
    * The gradient of a leaf (a parameter outside of the blocks) is summed over pieces and returned as a whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.multiprocessing.reductions import StorageWeakRef

from offload.engine.cell_input import CellInput
from offload.engine.glue_pieces import ChunkPieces, Entered, PassedCall, Shared, place_of
from offload.engine.inputs import refuse_transforms
from offload.engine.layouts import refuse_hidden
from offload.engine.leaf_gradients import LeafBytes, LeafGradients
from offload.engine.own_attributes import ArgumentsThen, AttributesThen
from pipe.nested import TreeSpec, flatten, map_distinct, unflatten
from pipe.torch_private.autograd import hidden_hooks

__all__ = ["Glue"]

#: The number of the block that returned the inputs of a chunk.
_INPUTS = -1

K = TypeVar("K")

Call = tuple[tuple[Any, ...], Mapping[str, Any]]


class Glue:
    """The pieces of graph of one forward, for all chunks.

    Args:
        chunks: the number of chunks.
        last: the number of blocks.
        within: names of the parameters of blocks, by ``id``; code outside of their block must not use them.
        made: see :class:`.LeafGradients`.
        before: called with the number of a piece before its backward runs.
        around: the parameters outside of blocks.
        follows_outside: whether their gradients are followed where a block uses them by no argument.
    """

    def __init__(
        self,
        chunks: int,
        last: int,
        within: Mapping[int, str],
        made: LeafBytes,
        before: Callable[[int], None],
        around: Sequence[Tensor] = (),
        *,
        follows_outside: bool = True,
    ) -> None:
        self._before = before
        #: Whether parameters outside of blocks take gradients; whether blocks may use them otherwise than as arguments.
        self.flags = tuple(p.requires_grad for p in around)
        self.follows_outside = follows_outside
        self._chunks = [ChunkPieces() for _ in range(chunks)]
        self._last = last
        self._within = within
        #: Whether there will be a backward. Known when all chunks are at their first block.
        self.records = torch.is_grad_enabled()
        #: Contexts in which the next block of a chunk runs, where that is not the present one.
        self.contexts: dict[int, contextlib.AbstractContextManager[object]] = {}
        #: The attributes of each block in the forward of each chunk.
        self.attributes: dict[tuple[int, int], AttributesThen] = {}
        #: The objects among its arguments.
        self._arguments: dict[tuple[int, int], ArgumentsThen] = {}
        self._leaf_gradients = LeafGradients(made)
        #: The leaves that several pieces reach.
        self._in_several: set[Tensor] = set()
        self._to_inputs = True

    # --- forward ------------------------------------------------------------------------------------------------

    def context(self, i: int) -> contextlib.AbstractContextManager[object]:
        """The context in which the next block of a chunk runs."""
        return self.contexts.pop(i, contextlib.nullcontext())

    @contextlib.contextmanager
    def as_then(self, cell: tuple[int, int], *, consume: bool) -> Iterator[None]:
        """The context of a recomputation of block ``j`` for chunk ``i``: attributes are those of the forward."""
        with contextlib.ExitStack() as stack:
            for known in (self.attributes, self._arguments):
                then = known.pop(cell, None) if consume else known.get(cell)
                if then is not None:
                    stack.enter_context(then.again())
            yield

    def begin(self, i: int, inputs: Any) -> Any:
        """The inputs of a chunk as the begin of its graph."""
        leaves, spec = flatten(inputs)
        refuse_transforms(x for x in leaves if isinstance(x, Tensor))
        chunk = self._chunks[i]
        chunk.inputs = leaves
        requires = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        return self._cut(i, _INPUTS, leaves, spec, requires) if self.records and any(requires) else inputs

    @property
    def begun(self) -> bool:
        """Whether an input of a chunk requires a gradient."""
        return any(_INPUTS in chunk.begins for chunk in self._chunks)

    def enter(self, i: int, j: int, call: Call, *, grad: bool) -> tuple[Any, list[bool]]:
        """What enters block ``j``, stored until it runs; which leaves need a gradient. ``grad``: called with any."""
        if not self.records:
            return PassedCall(*call), [False]
        chunk = self._chunks[i]
        leaves, spec = flatten(call)
        refuse_hidden(leaves, f"an argument of block {j}")
        then = ArgumentsThen.of(leaves)
        if then is not None:
            self._arguments[j, i] = then
        requires = [grad and isinstance(x, Tensor) and x.requires_grad for x in leaves]
        self._find_leaves(chunk, j, (x for x in leaves if grad and isinstance(x, Tensor)))
        uses = chunk.uses[j] = []
        for k, x in enumerate(leaves):
            if requires[k]:
                place = x.grad_fn, x.output_nr
                if place not in chunk.first:
                    begun = chunk.begun.get(place)
                    edge = get_gradient_edge(x) if begun is None else chunk.begins[begun[0]][begun[1]]
                    place = place_of(edge)
                    chunk.first.setdefault(place, (j, edge))
                uses.append((k, place))
        return unflatten([self._stored(chunk, x) if isinstance(x, Tensor) else x for x in leaves], spec), requires

    @staticmethod
    def _stored(chunk: ChunkPieces, x: Tensor) -> Tensor | Shared:
        """A tensor without its graph, or its number if its memory entered an earlier block."""
        detached = x.detach()
        if x.layout is not torch.strided or type(detached) is not Tensor or not x.numel():
            return detached
        version = None if x.is_inference() else x._version
        view = x.storage_offset(), tuple(x.shape), x.stride(), x.dtype, x.is_conj(), x.is_neg()
        place = x.untyped_storage().data_ptr(), view
        known = chunk.entered.get(place)
        if known is None or known.storage.expired() or known.version != version:
            chunk.entered[place] = Entered(len(chunk.shared), StorageWeakRef(x.untyped_storage()), version)
            chunk.shared.append(None)
            return detached
        if chunk.shared[known.number] is None:
            chunk.shared[known.number] = detached, version
        return Shared(known.number)

    def entered(self, i: int, stored: Any) -> Any:
        """The (args, kwargs) of a block, from what :meth:`enter` returned."""
        if isinstance(stored, PassedCall):
            return stored.args, stored.kwargs
        leaves, spec = flatten(stored)
        return unflatten([self._restored(i, x) if isinstance(x, Shared) else x for x in leaves], spec)

    def _restored(self, i: int, place: Shared) -> Tensor:
        shared = self._chunks[i].shared[place.number]
        assert shared is not None
        tensor, version = shared
        if version is not None and tensor._version != version:
            raise RuntimeError(
                f"a tensor that enters several blocks of the model (chunk {i}, shape {tuple(tensor.shape)}) was "
                f"changed in place after a block had used it; clone it before changing it"
            )
        return tensor

    def leave(self, i: int, j: int, output: Any, requires: Sequence[bool]) -> Any:
        """The detached output of block ``j`` as the begin of the graph of the code that follows."""
        return self._cut(i, j, *flatten(output), requires) if self.records else output

    def _cut(self, i: int, j: int, leaves: Sequence[Any], spec: TreeSpec, requires: Sequence[bool]) -> Any:
        chunk = self._chunks[i]
        begin = CellInput(leaves, requires, j + 1)
        edges = {k: get_gradient_edge(x) for k, x in zip(begin.positions, begin.wanted, strict=True)}
        chunk.begins[j], chunk.outputs[j] = edges, len(leaves)
        for k, edge in edges.items():
            chunk.begun[place_of(edge)] = j, k
            chunk.seen[edge.node] = self._last  # no piece has it: gradients end here
        return unflatten(list(begin.leaves), spec)

    def finish(self, i: int, result: Any) -> tuple[Any, list[bool]]:
        """The detached result of a chunk, and which of its leaves require a gradient."""
        leaves, _ = flatten(result)
        refuse_hidden(leaves, "an output of the model")
        chunk = self._chunks[i]
        self._find_leaves(chunk, self._last, (x for x in leaves if isinstance(x, Tensor)))
        requires = [isinstance(x, Tensor) and x.requires_grad for x in leaves]
        chunk.result = [get_gradient_edge(x) if needs else None for x, needs in zip(leaves, requires, strict=True)]
        chunk.entered.clear()
        chunk.seen.clear()
        return map_distinct(Tensor.detach, result), requires

    def _find_leaves(self, chunk: ChunkPieces, j: int, tensors: Iterable[Tensor]) -> None:
        """Records the leaves of the graph of some tensors, which lead to block ``j``, up to earlier pieces."""
        stack: list[Node] = []
        for x in tensors:
            if x.grad_fn is not None:
                if (x.grad_fn, x.output_nr) not in chunk.first:  # the gradients of one that entered a block are summed
                    stack.append(x.grad_fn)
            elif x.requires_grad:
                self._add_leaf(chunk, x, get_gradient_edge(x).node, j)
        while stack:
            node = stack.pop()
            if node in chunk.seen:
                if chunk.seen[node] < j:
                    if isinstance(variable := _leaf_of(node), Tensor):
                        self._in_several.add(variable)
                    self._refuse_hooks(chunk, node)
                continue
            chunk.seen[node] = j
            variable = _leaf_of(node)
            if isinstance(variable, Tensor):
                self._add_leaf(chunk, variable, node, j)
            stack.extend(following for following, _ in node.next_functions if following is not None)

    def _refuse_hooks(self, chunk: ChunkPieces, node: Node) -> None:
        """Raises if hooks of a module are in an earlier piece, from ``node`` on: each piece would run them."""
        stack = [node]
        while stack:
            node = stack.pop()
            if chunk.seen[node] == self._last:
                continue
            chunk.seen[node] = self._last  # later pieces need not search it
            if type(node).__name__ == "BackwardHookFunctionBackward":
                raise RuntimeError(
                    "a module has backward hooks, and a result of it is used both before a block and after it: the "
                    "hooks would run once for each, on a part of the gradient; register them on a module whose result "
                    "is used in one place, or run the bare module"
                )
            stack.extend(following for following, _ in node.next_functions if following is not None)

    def _add_leaf(self, chunk: ChunkPieces, leaf: Tensor, node: Node, j: int) -> None:
        if id(leaf) in self._within:
            raise RuntimeError(
                f"parameter {self._within[id(leaf)]} of a block is used by code outside of that block, where "
                f"it is not on the compute device and its gradient would be lost; leave its block out of ``blocks``. "
                f"If that code uses a result that the block keeps (an attribute, a tensor that a hook took), let the "
                f"block return it, or detach it"
            )
        chunk.leaves.setdefault(leaf, j)
        chunk.nodes.setdefault(leaf, node)

    def note_outside_use(self, i: int, j: int, others: Sequence[nn.Parameter], *, reaches: bool) -> None:
        """Notes that block ``j`` uses parameters that are none of its arguments; ``reaches``: other graphs, too.

        Raises RuntimeError where their gradients cannot be followed.
        """
        what = "a tensor with a graph, which code around it has computed," if reaches else ""
        for p in others:
            if id(p) in self._within:
                what = f"parameter {self._within[id(p)]} of another block"
            elif not self.follows_outside:
                what = f"a parameter of the shape {tuple(p.shape)}, which is not its own,"
            else:
                self._chunks[i].leaves.setdefault(p, j)
        if what:
            raise RuntimeError(
                f"block {j} (in the order of calls) uses {what} that is none of its arguments (an attribute, a "
                f"closure, a module that it got): its gradient would be wrong, or would be lost. Pass the tensor as an "
                f"argument, such as block(x, self.table.weight)"
            )

    @property
    def inputs(self) -> list[list[Any]]:
        """The inputs of each chunk, flat."""
        return [chunk.inputs for chunk in self._chunks]

    @property
    def leaves(self) -> list[Any]:
        """The leaves that backward reaches."""
        return list(dict.fromkeys(leaf for chunk in self._chunks for leaf in chunk.leaves))

    # --- backward -----------------------------------------------------------------------------------------------

    def begin_backward(self, wanted: Collection[Tensor] | None, to_inputs: bool) -> int:
        """Begins a backward to the ``wanted`` leaves (None: all), and perhaps to the inputs.

        Returns the first block whose backward the leaves need, of which pieces lead to it; or the number of blocks.
        """
        self._to_inputs = to_inputs
        asked = None if wanted is None else set(wanted)
        wanted = [leaf for leaf in self.leaves if asked is None or leaf in asked]
        self._leaf_gradients.begin(wanted, wanted if len(self._chunks) > 1 else self._in_several)
        for chunk in self._chunks:
            chunk.entering, chunk.returned = {}, {}
        found = (chunk.leaves.get(leaf, self._last) for chunk in self._chunks for leaf in wanted)
        return min(found, default=self._last)

    def several_enter(self, j: int) -> bool:
        """Whether more than one tensor that needs a gradient enters block ``j``."""
        return any(len(chunk.uses.get(j, ())) > 1 for chunk in self._chunks)

    def from_result(self, i: int, gradients: Sequence[Any], *, consume: bool) -> list[Any]:
        """The gradients of the last block's outputs, from those of the result of a chunk."""
        chunk = self._chunks[i]
        pairs: list[tuple[GradientEdge, Tensor]] = []
        for edge, gradient in zip(chunk.result, gradients, strict=True):
            if edge is not None and gradient is not None:
                if place_of(edge) in chunk.first:  # it entered a block as well: its piece runs once
                    _add(chunk.entering, place_of(edge), gradient)
                else:
                    pairs.append((edge, gradient))
        self._propagate(chunk, self._last, pairs)
        if consume:
            chunk.result = []
        return self._returned(chunk, self._last - 1)

    def before(self, i: int, j: int, gradients: Sequence[Any], *, consume: bool) -> list[Any]:
        """The gradients of the outputs of block ``j - 1``, or of the inputs, from those of what entered block ``j``."""
        chunk = self._chunks[i]
        for k, place in chunk.uses[j]:
            if gradients[k] is not None:
                _add(chunk.entering, place, gradients[k])
        complete = [place for place in chunk.entering if chunk.first[place][0] == j]
        self._propagate(chunk, j, [(chunk.first[place][1], chunk.entering.pop(place)) for place in complete])
        if consume:
            for _, place in chunk.uses.pop(j):
                if place in chunk.first and chunk.first[place][0] == j:
                    del chunk.first[place]
        return self._returned(chunk, j - 1)

    def of_inputs(self, i: int) -> list[Any]:
        """The gradients of the inputs of a chunk, where backward does not reach the first block."""
        return self._returned(self._chunks[i], _INPUTS)

    def _returned(self, chunk: ChunkPieces, j: int) -> list[Any]:
        gradients = chunk.returned.pop(j, {})
        return [gradients.get(k) for k in range(chunk.outputs.get(j, len(chunk.inputs) if j == _INPUTS else 0))]

    def _propagate(self, chunk: ChunkPieces, j: int, pairs: Sequence[tuple[GradientEdge, Tensor]]) -> None:
        """Runs backward from some edges of a piece to the begins of pieces and to leaves."""
        through: list[tuple[GradientEdge, Tensor]] = []
        for edge, gradient in pairs:
            place = chunk.begun.get(place_of(edge))
            if place is None:
                through.append((edge, gradient))
            else:
                _add(chunk.returned.setdefault(place[0], {}), place[1], gradient)
        if not through:
            return
        begins = (b for b in chunk.begins if b < j and (self._to_inputs or b != _INPUTS))
        places = [(b, k) for b in begins for k in chunk.begins[b]]
        leaves = [leaf for leaf in self._leaf_gradients.wanted if leaf in chunk.leaves]
        ends = (GradientEdge(chunk.nodes[leaf], 0) if leaf in chunk.nodes else leaf for leaf in leaves)
        inputs: list[Any] = [*(chunk.begins[b][k] for b, k in places), *ends]
        if not inputs:
            return
        self._before(j)
        with hidden_hooks(leaves):
            # The graph is freed with the last reference to its edges: other pieces may share a part of it.
            found = torch.autograd.grad(
                [edge for edge, _ in through],
                inputs,
                [gradient for _, gradient in through],
                retain_graph=True,
                allow_unused=True,
            )
        for (b, k), gradient in zip(places, found, strict=False):
            if gradient is not None:
                _add(chunk.returned.setdefault(b, {}), k, gradient)
        for leaf, gradient in zip(leaves, found[len(places) :], strict=True):
            if gradient is not None:
                self._leaf_gradients.add(leaf, gradient, j)

    def take(self) -> dict[Any, Tensor]:
        """The gradients of the wanted leaves, at the end of a backward."""
        return self._leaf_gradients.take()

    def close(self) -> None:
        """Frees the graphs."""
        self._chunks = [ChunkPieces(inputs=leaves) for leaves in self.inputs]
        self._leaf_gradients.clear()
        self.attributes.clear()
        self._arguments.clear()


def _leaf_of(node: Node) -> Any:
    return getattr(node, "variable", None) if not node.next_functions else None


def _add(gradients: dict[K, Tensor], key: K, gradient: Tensor) -> None:
    known = gradients.get(key)
    gradients[key] = gradient if known is None else known + gradient
