"""The layered walk: a plain ``nn.Sequential`` in memory, with what enters each layer kept between the two passes.

::

    pass 1    for group of chunks g:            for layer j:            value = layer_j(value), no graph; value is kept
    pass 2    for layer j, reversed:  for group of chunks g, reversed:  layer_j again with a graph, gradient through it

Two passes over a checkpointed model run every layer three times forward. Here what entered each layer in pass 1 serves
pass 2, and it is two times; or one, for the cells (layer j, group g) at the end of pass 1 whose graphs are kept.

Guarantees
    * Only one layer's activations of one chunk are alive at a time, and besides them no more than ``boundary_bytes``.
    * These bytes first hold what enters layers. A chunk that finds no room keeps no more, and in pass 2 runs forward
      once more from the last thing that it kept; what enters its layers then exists beyond the budget, for one chunk
      at a time. Where room is left, chunks run together (see ``grouping``), and the cells that pass 2 begins with keep
      their graphs (see ``pipe.recompute.cheap_ops``). The two never need the room at the same time: kept graphs are
      gone when pass 2 recomputes.
    * What was kept for a layer goes as the gradients of its parameters come: the two share their memory.
    * On the CPU the gradient of an ``nn.Embedding`` exists once, whatever the number of chunks; ``tables`` says where
      that is not so.
    * Kept values rest in host memory if the model is on an accelerator.
    * Of a chunk that ``input_fn`` makes, no more is kept than of any other; see ``entering``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from gradcache.distributed.sharded import is_sharded
from gradcache.entering import Entering, InputFn
from gradcache.layered_tape import LayeredTape
from gradcache.layers import Layers
from pipe.nested import tensors_in
from pipe.recompute.replay import autocast_without_cache, devices_of

__all__ = ["LayeredModel", "is_plain_sequential"]

OutputFn = Callable[[Any], Any]


def is_plain_sequential(model: nn.Module) -> bool:
    """Whether running the layers one after the other is all that the module does."""
    own_forward = type(model).forward is nn.Sequential.forward
    plain = isinstance(model, nn.Sequential) and len(model) > 0 and own_forward and not model._forward_hooks
    return plain and not is_sharded(model)


class LayeredModel(Layers):
    """A plain ``nn.Sequential`` as a :class:`gradcache.streamed.StreamedModel`.

    The object remembers from step to step what it learnt about the layers.
    """

    def forward_chunks(
        self, chunks: Sequence[Any], output_fn: OutputFn | None = None, input_fn: InputFn | None = None
    ) -> tuple[list[Any], LayeredTape]:
        """Detached outputs in chunk order, and the tape."""
        entering = Entering(chunks, input_fn, self.parameters)
        wants_input = input_fn is None and any(tensor.requires_grad for tensor in tensors_in(entering.known))
        tape = LayeredTape(self, entering, output_fn, torch.is_grad_enabled(), wants_input)
        with autocast_without_cache(devices_of(list(chunks), self.parameters)):
            outputs = tape.run_forward()
        return outputs, tape
