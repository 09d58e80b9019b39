"""Runs layers that are called one after the other, through their shards: a whole batch, or many chunks of one.

A caller chooses chunks so small that a whole model's activations fit. Here only one shard's activations exist at a
time, so several chunks fit at once, and larger matrix products are faster. Outputs and gradients are split again, so
the caller sees its own chunks only.

Chunks are joined only if their tensors have equal dtypes and trailing shapes and all other values are equal, and never
where a layer is known to look across rows: batch normalisation in training.

Products of more rows round differently. So which chunks run together follows from shapes and from bytes that are given
or counted, never from times or from the memory of the process: it is the same in every step and process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Any

import torch
from torch import Tensor, nn

from offload.calls import as_call, names_taken, refuse_transforms
from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.engine.sequential import measured_activations, run_layers
from offload.engine.structure import Structure
from offload.limits import cell_bytes
from offload.planner.memory_planner import TooLargeError
from pipe.interception import offered
from pipe.microbatch import check_rows, gather_nested, split_nested
from pipe.nested import flatten, map_tensors, tensors_in, unflatten
from pipe.torch_private.modules import BatchNorm

__all__ = ["LayersInOrder"]

#: Kinds of chunks of which the rows that run together are remembered.
KINDS_REMEMBERED = 256


class LayersInOrder:
    """How a model runs whose layers are called one after the other: those of a Sequential.

    It holds the layers, and not the model: a model that is dropped is freed at once.
    """

    #: Own forwards of blocks: layers have none beside their calls.
    forwards: Sequence[Callable[..., Any]] = ()
    #: The forward of the instance, which has none beside its class's.
    forward_of_instance: Callable[..., Any] | None = None

    homes: ModelHomes
    #: Runs the layers while autograd drives.
    engine: Engine
    #: Into how many parts a batch is split.
    micro_batches: int

    def __init__(self, named: Mapping[str, nn.Module]) -> None:
        #: The layers by their names in the model.
        self.named = named
        self._taken_later = {name for layer in [*self.named.values()][1:] for name in names_taken(layer)}
        #: Kind of a chunk -> the most rows of such chunks that run together; 0: none do.
        self._rows_together: dict[str, int] = {}

    def join(self, model: nn.Module, homes: ModelHomes, values: Any, undo: Any) -> None:
        """Connects the model with the homes of its layers."""
        self.homes = homes
        homes.structure = Structure(model._modules)

    def run(self, model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of a call of the model."""
        self._check_arguments(inputs, kwargs)
        chunks = split_nested((inputs, kwargs), self.micro_batches)
        answered = offered(model, chunks)
        if answered is not None:
            return gather_nested(answered)
        self.homes.check_open()
        refuse_transforms(tensors_in(chunks))
        outputs = self._run_layers(chunks)
        check_rows(outputs, (inputs, kwargs))
        return gather_nested(outputs)

    def _check_arguments(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raises TypeError for an argument that later layers also have: only the first layer would get it."""
        if len(inputs) > 1 or kwargs:
            positional = zip(names_taken(next(iter(self.named.values()))), inputs[1:], strict=False)
            given = {name for name, value in (*positional, *kwargs.items()) if value is not None}
            shared = given & self._taken_later
            if shared:
                raise TypeError(
                    f"only the first layer gets the arguments of the call, each further one the result of the one "
                    f"before, but {', '.join(sorted(shared))} would be missing in later layers, which take it as well; "
                    f"let layers pass on a tuple or dict, or bind the argument (functools.partial) in each layer"
                )

    def forward_chunks(
        self,
        model: nn.Module,
        chunks: Sequence[Any],
        output_fn: Callable[[Any], Any] | None,
        input_fn: Callable[[Any], Any] | None,
    ) -> list[Any]:
        """See :meth:`offload.OffloadModel.forward_chunks`."""
        self.homes.check_open()
        output_fns = [output_fn] * len(chunks)
        if input_fn is not None:
            return self._run_layers(chunks, output_fns, lambda chunk: as_call(0, input_fn(chunk)))
        calls = [as_call(i, chunk) for i, chunk in enumerate(chunks)]
        runs = _runs_together(calls, partial(self._most_rows_together, model)) if self._joins_chunks else []
        if any(len(run) > 1 for run in runs):
            with contextlib.suppress(TooLargeError):
                return self._forward_joined(calls, runs, output_fn)
        # What fits apart only stays apart, however much fits later.
        self._rows_together.update((self._kind_of_chunk(model, calls[run[0]]), 0) for run in runs if len(run) > 1)
        return self._run_layers(calls, output_fns)

    def _run_layers(
        self,
        chunks: Sequence[Any],
        output_fns: Sequence[Callable[[Any], Any] | None] = (),
        input_fn: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        layers = [shard.layers for shard in self.homes.shards]
        dtype = self.homes.param_dtype
        return run_layers(self.engine, layers, chunks, output_fns=output_fns, input_fn=input_fn, dtype=dtype)

    def _forward_joined(
        self, calls: Sequence[Any], runs: Sequence[Sequence[int]], output_fn: Callable[[Any], Any] | None
    ) -> list[Any]:
        """Runs the chunks of each run together. Raises TooLargeError, before anything moves, if they do not fit.

        By counted bytes, which are the same in every process: chunks that run together may have other bits.
        """
        groups = [gather_nested([calls[i] for i in run]) for run in runs]
        rows = [[_rows_in(calls[i]) or 0 for i in run] for run in runs]
        return [*chain(*self._run_layers(groups, [_by_chunk(output_fn, sizes) for sizes in rows]))]

    @property
    def _joins_chunks(self) -> bool:
        """Whether chunks may run together. Not over a mesh: ranks with other chunks would measure other ones."""
        policy = self.homes.policy
        may = policy.activation_bytes is not None and policy.join_chunks is not False
        return may and not self.homes.public.sharded and not _looks_across_rows([*self.named.values()])

    def _most_rows_together(self, model: nn.Module, call: Any) -> int:
        """The most rows of chunks like this one that run together; a trial forward measures one of each kind."""
        kind = self._kind_of_chunk(model, call)
        if kind not in self._rows_together:
            if len(self._rows_together) >= KINDS_REMEMBERED:
                self._rows_together.clear()
            nbytes, given = self.activation_bytes(call, None), self.homes.policy.activation_bytes or 0
            joins = nbytes and (self.homes.policy.join_chunks or not self.engine.draws)
            most = min(given, cell_bytes(self.homes.policy, self.homes.device) or given)
            self._rows_together[kind] = most * (_rows_in(call) or 0) // nbytes if joins else 0
        return self._rows_together[kind]

    def _kind_of_chunk(self, model: nn.Module, call: Any) -> str:
        """What decides the bytes of a chunk's cells."""
        modes = [(module.training, [p.requires_grad for p in module.parameters(False)]) for module in model.modules()]
        autocast = torch.is_autocast_enabled(self.homes.device.type) and torch.get_autocast_dtype(
            self.homes.device.type
        )
        return repr((_kind_of(call), _rows_in(call), modes, autocast))

    def activation_bytes(self, chunk: Any, output_fn: Callable[[Any], Any] | None) -> int:
        """See :meth:`offload.OffloadModel.activation_bytes`."""
        call = map_tensors(Tensor.clone, as_call(0, chunk))  # of a view, the whole base would be counted
        layers = [shard.layers for shard in self.homes.shards]
        dtype = self.homes.param_dtype
        return measured_activations(self.engine, layers, call, output_fn=output_fn, dtype=dtype)


# --- chunks that run together -----------------------------------------------------------------------------------------


def _looks_across_rows(layers: Sequence[nn.Module]) -> bool:
    """Whether a layer is known to compute a row from other rows, too."""
    return any(
        isinstance(module, BatchNorm) and (module.training or not module.track_running_stats)
        for layer in layers
        for module in layer.modules()
    )


def _rows_in(chunk: Any) -> int | None:
    """Rows of a chunk's tensors if all have the same number, and may be joined; else None."""
    sizes = {x.size(0) if x.dim() and not x.is_sparse else -1 for x in tensors_in(chunk)}
    return sizes.pop() if len(sizes) == 1 and -1 not in sizes else None


def _kind_of(chunk: Any) -> tuple[Any, ...]:
    """What chunks have in common that may be joined, or measured by one of them; its ``repr`` is a key."""
    leaves, spec = flatten(chunk)
    kinds = [
        (x.dtype, x.device, x.dim(), x.shape[1:], x.requires_grad) if isinstance(x, Tensor) else (type(x), x)
        for x in leaves
    ]
    return spec, kinds, _rows_in(chunk) is None


def _runs_together(chunks: Sequence[Any], most_rows: Callable[[Any], int]) -> list[list[int]]:
    """Adjacent chunks that may be joined and run together, as lists of their indices.

    A single chunk may have more rows than others together; one whose tensors differ in rows is not joined.
    ``most_rows``: of the first of several chunks that are alike, the most rows that may run together; 0: none do.
    """
    runs: list[list[int]] = []
    for _, alike in groupby(range(len(chunks)), key=lambda i: _kind_of(chunks[i])):
        first, *others = alike
        runs.append([first])
        rows, most = _rows_in(chunks[first]), 0
        if others and rows is not None:
            most = most_rows(chunks[first])
        for i in others:
            count = _rows_in(chunks[i])
            if rows is not None and count is not None and rows + count <= most:
                runs[-1].append(i)
                rows += count
            else:
                runs.append([i])
                rows = count
    return runs


def _by_chunk(output_fn: Callable[[Any], Any] | None, rows: Sequence[int]) -> Callable[[Any], list[Any]]:
    """A function that returns the outputs of the chunks in a group, which have so many rows, after ``output_fn``."""

    def outputs(output: Any) -> list[Any]:
        leaves, spec = flatten(output)
        columns: list[Sequence[Any]] = []
        for leaf in leaves:
            if len(rows) > 1 and isinstance(leaf, Tensor) and (leaf.dim() == 0 or leaf.size(0) != sum(rows)):
                raise ValueError(
                    f"expected outputs with one row for each of the {sum(rows)} rows of {len(rows)} chunks that ran "
                    f"together, got shape {tuple(leaf.shape)}; pass MemoryPolicy(join_chunks=False) to keep chunks "
                    f"apart"
                )
            splits = len(rows) > 1 and isinstance(leaf, Tensor)
            columns.append(leaf.split(list(rows)) if splits else [leaf] * len(rows))
        found = [unflatten(list(row), spec) for row in zip(*columns, strict=True)]
        return found if output_fn is None else [*map(output_fn, found)]

    return outputs
