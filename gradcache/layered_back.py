"""The second pass of the layered walk: gradients go back through the cells that the first pass left.

::

    groups that kept all:   for layer j, reversed:    for group g, reversed:    cell (j, g)
    each other group:                                 for layer j, reversed:    cell (j, g)

Layer by layer, what was kept for a layer is gone before the gradients of the next one's parameters are made, so that
the two share their memory. A group that did not keep everything that entered its layers makes that again, beyond the
budget; such groups go one at a time. Each parameter adds up its gradients in the same order either way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gradcache import grouping, representations
from gradcache.cells import Again, Graph, Group, Kept, Work
from gradcache.tables import rows_in_place
from pipe.nested import flatten, map_tensors
from pipe.recompute.elimination import leaving_out

__all__ = ["push_back"]


def push_back(work: Work, groups: list[Group], output_gradients: Sequence[Any]) -> None:
    """Pushes one gradient per chunk, of its output's structure or None, through ``groups``, which it empties."""
    links: list[tuple[Tensor, Tensor]] = []
    while groups:
        together = [groups.pop()]
        while groups and all(group.finds_all(work.first) for group in (together[-1], groups[-1])):
            together.append(groups.pop())
        _push_together(work, together, output_gradients, links)
    if links:
        representations.push([tensor for tensor, _ in links], [gradient for _, gradient in links])


def _push_together(
    work: Work, groups: list[Group], output_gradients: Sequence[Any], links: list[tuple[Tensor, Tensor]]
) -> None:
    """Takes groups through all layers, side by side; ``links`` gets what the chunks themselves are to receive."""
    waiting: dict[int, Callable[[], Any]] = {}
    for k, group in enumerate(groups):
        _wait(waiting, k, groups, [output_gradients[i] for i in group.chunks])
        if k in waiting and not group.finds_all(work.first):
            _find_again(work, group)
    for j in reversed(range(work.first, len(work.model.layers))):
        for k in list(waiting):
            _wait(waiting, k, groups, _back_through(work, j, groups[k].cells.pop(), groups[k], waiting.pop(k)()))
    if not work.wants_input:
        return
    known = work.entering.known
    assert known is not None
    for k, gradient in waiting.items():
        for i, part in zip(groups[k].chunks, grouping.cut(gradient(), groups[k].rows), strict=True):
            pairs = zip(flatten(known[i])[0], flatten(part)[0], strict=True)
            links += [(x, g) for x, g in pairs if isinstance(g, Tensor) and x.requires_grad]


def _wait(waiting: dict[int, Callable[[], Any]], k: int, groups: list[Group], gradient: Any) -> None:
    """Notes how group ``k`` gets its gradient back, which waits where other kept values rest; no gradient ends it.

    A group that goes alone goes on at once, and its gradient stays where it is.
    """
    if representations.has_gradient(gradient):
        waiting[k] = Kept(gradient).back if len(groups) > 1 else lambda: gradient
    else:
        groups[k].cells.clear()


def _back_through(work: Work, j: int, cell: Again | Graph, group: Group, gradient: Any) -> Any:
    """The gradient of what entered a cell, None for each leaf where it has none."""
    if isinstance(cell, Graph):
        _backward(cell.output, gradient)
        return representations.gradients(cell.leaves)
    leaves = work.leaves(j, cell.kept.back() if cell.kept is not None else work.entered(group))
    with contextlib.ExitStack() as stack:
        result, as_surveyed = leaving_out(
            cell.dead_code, lambda mode: _repeated(work, j, cell, group, leaves, mode, stack)
        )
        if not as_surveyed and group.profile is not None:
            group.profile.dead_code[j] = None
        _backward(result, gradient)
    return representations.gradients(leaves)


def _repeated(
    work: Work,
    j: int,
    cell: Again,
    group: Group,
    leaves: Any,
    mode: contextlib.AbstractContextManager[Any],
    until_backward: contextlib.ExitStack,
) -> Any:
    """The cell's result once more. Buffers stay as they were until backward is done, which may read them."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(cell.module_state.again(strict=False))
        with torch.enable_grad(), cell.replay.again():
            given = cell.given(leaves)
            with mode, rows_in_place(work.model.tables[j]):
                result = work.apply(j, given, group)
        until_backward.push(stack.pop_all())
    return result


def _find_again(work: Work, group: Group) -> None:
    """Computes what was not kept, from the last thing that was."""
    cells, after = group.cells, max(work.first, 1)
    known = [isinstance(cell, Graph) or cell.kept is not None for cell in cells]
    missing = [j for j in range(after, len(cells)) if not known[j]]
    start = max((j for j in range(missing[0]) if known[j]), default=0)
    value = None
    for j in range(start, missing[-1]):
        cell, following = cells[j], cells[j + 1]
        if isinstance(cell, Graph):
            value = map_tensors(Tensor.detach, cell.output)
        else:
            value = cell.kept.back() if cell.kept is not None else work.entered(group) if j == 0 else value
            with torch.no_grad(), cell.module_state.again(strict=False), cell.replay.again():
                value = work.model.call(j, cell.given(value))
        if isinstance(following, Again) and following.kept is None and j + 1 >= after:
            following.kept = Kept(value)


def _backward(output: Any, gradient: Any) -> None:
    """Like ``representations.backward``; a None in the gradient stands for any structure without one."""
    if isinstance(output, list) and isinstance(gradient, list):
        pairs = [(o, g) for o, g in zip(output, gradient, strict=True) if representations.has_gradient(g)]
        output, gradient = [o for o, _ in pairs], [g for _, g in pairs]
    representations.backward(output, gradient)
