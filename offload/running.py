"""Runs layers that are called one after the other, through their shards: a whole batch, or many chunks of one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from offload.arguments import names_given
from offload.core.engine import Engine
from offload.core.sequential import measured_activations, run_layers
from offload.core.tape import ChunksTape, with_tape
from offload.engine.inputs import check_inputs
from offload.engine.raw_chunk import as_call
from offload.engine.regroup import (
    by_chunk,
    joined,
    kind_of,
    looks_across_rows,
    rows_in,
    runs_together,
    split_output,
)
from offload.limits import cell_bytes
from offload.loading import LoadingModule
from offload.planning.residency import TooLargeError
from pipe.interception import offered
from pipe.microbatch import check_rows, gather_nested, split_nested
from pipe.nested import flatten, map_tensors
from pipe.torch_private.tracing import outside_of_compiled_graphs

__all__ = ["RunningModule"]

#: Kinds of chunks of which the rows that run together are remembered.
KINDS_REMEMBERED = 256


class RunningModule(LoadingModule):
    """The part of a model that runs forwards."""

    #: Runs the layers while autograd drives.
    _engine: Engine
    #: Names of the arguments of layers after the first.
    _taken_later: set[str]
    #: Kind of a chunk -> the most rows of such chunks that run together; 0: none do.
    _rows_together: dict[str, int]

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
        self._executor.check_open()
        check_inputs([flatten(chunk)[0] for chunk in chunks])
        outputs = self._run_layers(chunks)
        check_rows(outputs, (inputs, kwargs))
        return gather_nested(outputs)

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
    ) -> tuple[list[Any], ChunksTape]:
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
        self._executor.check_open()
        output_fns = [output_fn] * len(chunks)
        if input_fn is not None:
            return with_tape(self._run_layers(chunks, output_fns, partial(_made, input_fn)))
        calls = [as_call(i, chunk) for i, chunk in enumerate(chunks)]
        runs = runs_together(calls, self._most_rows_together) if self._joins_chunks else []
        if any(len(run) > 1 for run in runs):
            with contextlib.suppress(TooLargeError):
                return self._forward_joined(calls, runs, output_fn)
        # What fits apart only stays apart, however much fits later.
        self._rows_together.update((self._kind_of_chunk(calls[run[0]]), 0) for run in runs if len(run) > 1)
        return with_tape(self._run_layers(calls, output_fns))

    def _run_layers(
        self,
        chunks: Sequence[Any],
        output_fns: Sequence[Callable[[Any], Any] | None] = (),
        input_fn: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        layers = [shard.layers for shard in self._executor.shards]
        dtype = self._executor.layer_homes.dtype
        return run_layers(self._engine, layers, chunks, output_fns=output_fns, input_fn=input_fn, dtype=dtype)

    def _forward_joined(
        self, calls: Sequence[Any], runs: Sequence[Sequence[int]], output_fn: Callable[[Any], Any] | None
    ) -> tuple[list[Any], ChunksTape]:
        """Runs the chunks of each run together. Raises TooLargeError, before anything moves, if they do not fit.

        By counted bytes, which are the same in every process: chunks that run together may have other bits.
        """
        groups = [joined([calls[i] for i in run]) for run in runs]
        rows = [[rows_in(calls[i]) or 0 for i in run] for run in runs]
        output_fns = [output_fn and by_chunk(output_fn, sizes) for sizes in rows]

        def apart(outputs: Sequence[Any]) -> list[Any]:
            return [piece for output, sizes in zip(outputs, rows, strict=True) for piece in split_output(output, sizes)]

        planner = self._executor.steps.planner
        with contextlib.nullcontext() if planner is None else planner.by_count():
            return with_tape(apart(self._run_layers(groups, output_fns)))

    @property
    def _joins_chunks(self) -> bool:
        """Whether chunks may run together. Not over a mesh: ranks with other chunks would measure other ones."""
        policy = self._policy
        may = policy.activation_bytes is not None and policy.join_chunks is not False
        return may and self._arguments["mesh"] is None and not looks_across_rows(self._layers())

    def _most_rows_together(self, call: Any) -> int:
        """The most rows of chunks like this one that run together; a trial forward measures one of each kind."""
        kind = self._kind_of_chunk(call)
        if kind not in self._rows_together:
            if len(self._rows_together) >= KINDS_REMEMBERED:
                self._rows_together.clear()
            nbytes, given = self.activation_bytes(call), self._policy.activation_bytes or 0
            joins = nbytes and (self._policy.join_chunks or not self._engine.draws)
            most = min(given, cell_bytes(self._policy, self.device) or given)
            self._rows_together[kind] = most * (rows_in(call) or 0) // nbytes if joins else 0
        return self._rows_together[kind]

    def _kind_of_chunk(self, call: Any) -> str:
        """What decides the bytes of a chunk's cells."""
        modes = [(module.training, [p.requires_grad for p in module.parameters(False)]) for module in self.modules()]
        autocast = torch.is_autocast_enabled(self.device.type) and torch.get_autocast_dtype(self.device.type)
        return repr((kind_of(call), rows_in(call), modes, autocast))

    def activation_bytes(self, chunk: Any, *, output_fn: Callable[[Any], Any] | None = None) -> int:
        """Bytes that autograd saves for a chunk in the shard that saves most: the activations of one cell in backward.

        Runs the chunk forward once, and leaves buffers and generators unchanged. 0 if no parameter takes a gradient.
        """
        call = map_tensors(Tensor.clone, as_call(0, chunk))  # of a view, the whole base would be counted
        layers = [shard.layers for shard in self._executor.shards]
        dtype = self._executor.layer_homes.dtype
        return measured_activations(self._engine, layers, call, output_fn=output_fn, dtype=dtype)


def _made(input_fn: Callable[[Any], Any], chunk: Any) -> Any:
    return as_call(0, input_fn(chunk))
