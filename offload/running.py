"""Runs layers that are called one after the other, through their shards: a whole batch, or many chunks of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from offload.arguments import names_given
from offload.engine.autograd import attach
from offload.engine.prediction import measured_activations
from offload.engine.raw_chunk import RawChunk, as_call
from offload.engine.regroup import RegroupedTape, by_chunk, join_chunks, rows_together, split_output
from offload.engine.tape import Tape
from offload.loading import LoadingModule
from pipe.interception import offered
from pipe.microbatch import check_rows, gather_nested, split_nested
from pipe.nested import map_tensors
from pipe.torch_private.tracing import outside_of_compiled_graphs

__all__ = ["RunningModule"]


class RunningModule(LoadingModule):
    """The part of a model that runs forwards."""

    #: Names of the arguments of layers after the first.
    _taken_later: set[str]

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """Calls the first layer with these arguments, each further layer with the result of the one before.

        Tensors may be nested in tuples, lists and dicts; with several micro-batches all of them are split along
        dimension 0, and outputs are concatenated again. Tensors on other devices are copied to the compute device.

        ``torch.compile`` of this model, or of a module that contains it, breaks the graph here: a compiled graph would
        take the weights of a slot for constants. Layers that were compiled themselves (``layer.compile()``) stay
        compiled.
        """
        if torch.compiler.is_compiling():
            return self._run_outside_of_compiled_graphs(*inputs, **kwargs)
        return self._run(inputs, kwargs)

    @outside_of_compiled_graphs
    def _run_outside_of_compiled_graphs(self, *inputs: Any, **kwargs: Any) -> Any:
        return self._run(inputs, kwargs)

    def _run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_arguments(inputs, kwargs)
        chunks = split_nested((inputs, kwargs), self._microbatches_of((inputs, kwargs)))
        answered = offered(self, chunks)
        if answered is not None:
            return gather_nested(answered)
        tape = self._executor.tape(chunks)
        outputs = self._executor.forward(tape, chunks)
        check_rows(outputs, (inputs, kwargs))
        return attach(self._executor, tape, outputs, (inputs, kwargs)) if tape.records else gather_nested(outputs)

    def _check_arguments(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises TypeError for an argument that later layers also have: only the first layer would get it."""
        if len(inputs) > 1 or kwargs:
            shared = names_given(next(self.children()), inputs, kwargs) & self._taken_later
            if shared:
                raise TypeError(
                    f"only the first layer gets the arguments of the call, each further one the result of the one "
                    f"before, but {', '.join(sorted(shared))} would be missing in later layers, which take it as well; "
                    f"let layers pass on a tuple or dict, or bind the argument (functools.partial) in each layer"
                )

    def forward_chunks(
        self,
        chunks: Sequence[Any],
        *,
        output_fn: Callable[[Any], Any] | None = None,
        input_fn: Callable[[Any], Any] | None = None,
    ) -> tuple[list[Any], Tape | RegroupedTape]:
        """Runs many chunks through each shard, and leaves the backward to the caller.

        Args:
            chunks: each a tensor, or (args, kwargs) for the first layer. Each chunk is one micro-batch.
            output_fn: applied to each chunk's output, as a part of the last shard: it is replayed with it, and the
                gradients are then those of its result.
            input_fn: makes a tensor or (args, kwargs) of each chunk, which then may be any object, as a part of the
                first shard: its result exists while the cell runs, and is recomputed for the backward. The result gets
                no gradient, and its chunks do not run together.

        Returns:
            The outputs, detached, in the order of the chunks; and the tape, whose ``backward(output_gradients)``
            accumulates the parameters' gradients. Whatever the number of chunks, a pass loads each shard once.
        """
        if isinstance(chunks, Tensor) or not isinstance(chunks, Sequence) or not chunks:
            raise ValueError(
                f"expected a sequence of at least one chunk, got {type(chunks).__name__}; cut a batch with "
                f"batch.split(rows), for example"
            )
        if input_fn is not None:
            calls: list[Any] = [RawChunk(i, chunk, input_fn) for i, chunk in enumerate(chunks)]
        else:
            calls = [as_call(i, chunk) for i, chunk in enumerate(chunks)]
        groups, rows = calls, [[0]] * len(calls)
        per_row, runners = self._meter.activation_bytes_per_row, self._executor.runners
        most_rows = rows_together(self._policy, self._executor.cell_bytes(), per_row, self._layers(), runners)
        if most_rows > 1 and input_fn is None:
            groups, rows = join_chunks(calls, most_rows)
        output_fns = [output_fn and by_chunk(output_fn, sizes) for sizes in rows]
        tape = self._executor.tape(groups, output_fns)
        outputs = self._executor.forward(tape, groups)
        if len(groups) == len(calls):
            return outputs, tape
        pieces = [piece for output, sizes in zip(outputs, rows, strict=True) for piece in split_output(output, sizes)]
        return pieces, RegroupedTape(tape, rows, pieces)

    def activation_bytes(self, chunk: Any, *, output_fn: Callable[[Any], Any] | None = None) -> int:
        """Bytes that autograd saves for a chunk in the shard that saves most: the activations of one cell in backward.

        Runs the chunk forward once, and leaves buffers and generators unchanged. 0 if no parameter takes a gradient.
        """
        call = map_tensors(Tensor.clone, as_call(0, chunk))  # of a view, the whole base would be counted
        return measured_activations(self._executor, call, output_fn)
