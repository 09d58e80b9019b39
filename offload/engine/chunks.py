"""Runs a model's own forward for many chunks, each block for all of them while its shard is in a slot.

Each chunk's forward has a thread, of which one runs at a time: it runs until it calls a block, and waits for the output
(:mod:`offload.engine.suspend`). The caller's thread runs the block for all chunks that wait for it. Chunks may call
blocks in any order, and leave some out.

Invariant: backward comes back block by block. Autograd runs ready nodes by their sequence numbers, which each thread
counts for itself; so the nodes between two blocks get the number of the caller's thread when they are handed over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from offload.engine.block import RUNS_NOTED
from offload.engine.engine import Engine
from offload.engine.own_attributes import OwnAttributes
from offload.engine.suspend import SuspendedForward
from pipe.nested import tensors_in
from pipe.torch_private.autograd import set_sequence_numbers

__all__ = ["run_chunks"]


def run_chunks(
    engine: Engine, forward: Callable[[Any], Any], chunks: Sequence[Any], outside: Sequence[Any]
) -> list[Any]:
    """The outputs of ``forward`` for each chunk, with one graph, within :meth:`Engine.forward`.

    ``outside``: the modules outside of the blocks.
    """
    own = OwnAttributes(len(chunks))
    inside = [*itertools.chain(*(block.region.modules for block in engine.numbered))]
    everywhere = [*outside, *inside]
    # Few models set attributes of their blocks between these; copies of the attributes of all of them take time.
    watches = engine.sets_between or engine.chunked < RUNS_NOTED
    engine.chunked += 1
    attributes = {id(vars(module)) for module in inside} if watches else set()
    known: list[set[Any]] = [set() for _ in chunks]
    forwards: list[SuspendedForward] = []

    def run(chunk: Any, call: Callable[..., Any]) -> Any:
        with engine.calling(call):
            return forward(chunk)

    try:
        for i, chunk in enumerate(chunks):
            forwards.append(SuspendedForward(partial(run, chunk), engine.device))
            with own.running(i, everywhere):
                forwards[i].start()
        if first := [tensors_in((each.call.args, each.call.kwargs)) for each in forwards if each.call is not None]:
            engine.expect(first)
        del first
        while waiting := {each.call.j for each in forwards if each.call is not None}:
            number = min((engine.order_of(j), j) for j in waiting)[1]
            outputs = {}
            for i, each in enumerate(forwards):
                call = each.call
                if call is None or call.j != number:
                    continue
                set_sequence_numbers(tensors_in((call.args, call.kwargs)), known[i])
                with own.running(i, engine.numbered[number].region.modules):
                    outputs[i] = call.settings.run(engine.run_numbered, number, call.args, call.kwargs, i)
                known[i].update(x.grad_fn for x in tensors_in(outputs[i]) if x.grad_fn is not None)
                call = each.call = None  # frees the arguments
            for i in list(outputs):
                with own.running(i, everywhere if watches else outside):
                    forwards[i].resume(outputs.pop(i))
                engine.sets_between = engine.sets_between or not attributes.isdisjoint(own.set_last)
        results = [each.output for each in forwards]
        for result, nodes in zip(results, known, strict=True):
            set_sequence_numbers(tensors_in(result), nodes)
        return results
    finally:
        for each in forwards:
            each.cancel()
