"""An ``OffloadModel`` that is the model it was made of: its class, attributes, names and calls; its blocks stream.

The object shares all attributes of the model, and its class derives from the model's. So its methods (``generate``,
``get_input_embeddings``, ...) and its own forward run on the wrapped model itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from offload.blocks.body import Body, StreamedForward
from offload.blocks.find import BlockNames, Blocks, find_blocks, modules_outside, parameters_outside
from offload.blocks.fixed_structure import methods_refused
from offload.blocks.outside import OutsideCasts, place_outside
from offload.blocks.rest import with_rest
from offload.core.chunks import run_chunks
from offload.core.engine import Engine
from offload.core.tape import ChunksTape, with_tape
from offload.engine.autograd import attach
from offload.engine.block_forwards import tensors_of_call
from offload.engine.executor import Executor
from offload.engine.inputs import refuse_transforms
from offload.engine.outside import bytes_staying
from offload.engine.raw_chunk import as_call
from offload.engine.structure import Structure
from offload.engine.tape import Tape
from offload.memory import MemoryArguments, least_bytes
from offload.module import refuse_shallow_copy
from offload.planning.budget import FIRST_GAPS_SHARE
from offload.reports import ReportingModule
from offload.storage import DiskHome, is_directory
from offload.streaming.copies import CopiesOfHomes
from offload.streaming.materialize import Values
from offload.streaming.quantised import check_storable, is_taken_apart, refresh, stored_tensors
from pipe.interception import offered
from pipe.microbatch import check_rows, gather_nested, split_nested
from pipe.nested import map_tensors
from pipe.recompute.thread_state import lasting_hooks
from pipe.torch_private.autograd import saved_tensor_hooks

__all__ = ["ModelWithBlocks", "class_for"]

#: States of an optimizer for each trained parameter that are counted before there is one: those of Adam.
STATES_EXPECTED = 2
#: Methods of a container of layers, which other models do not have.
_OF_CONTAINERS = ("__len__", "__iter__", "__getitem__")


def class_for(base: type[nn.Module], model: Any, blocks: Any) -> type[nn.Module]:
    """The class of an ``OffloadModel`` of ``model``: ``base`` for layers that are called in order."""
    if not isinstance(model, nn.Module) or issubclass(base, ModelWithBlocks):
        return base
    if blocks is None and isinstance(model, (nn.Sequential, nn.ModuleList)):
        return base
    kind = type(model)
    if issubclass(kind, base):
        raise TypeError(f"expected a model that is not offloaded yet, got an OffloadModel of {kind.__name__} (model)")

    @functools.wraps(kind.forward)
    def forward(self: ModelWithBlocks, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._run_outside_of_compiled_graphs(*inputs, **kwargs)
        return self._run(inputs, kwargs)

    # Code that takes the wrappers of a forward off follows this attribute, and would take this one off, too.
    about_forward = vars(forward)
    about_forward["__signature__"] = inspect.signature(about_forward.pop("__wrapped__"))

    members: dict[str, Any] = {name: getattr(kind, name, None) for name in _OF_CONTAINERS} | methods_refused(model)
    if members["__len__"] is None:
        members["__bool__"] = _true
    makers: Any = (kind, base)  # that of the model, whose class has it
    members["from_pretrained"] = next(each.from_pretrained for each in makers if hasattr(each, "from_pretrained"))
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    bases = (ModelWithBlocks, base, kind)
    meta: Any = type(kind)
    made: type[nn.Module] = meta(kind.__name__, bases, {**members, **names, "forward": forward, "_kind": kind})
    return made


def _true(self: Any) -> bool:
    return True


class ModelWithBlocks(ReportingModule):
    """The part of an ``OffloadModel`` that runs a model's own forward."""

    #: The class of the model.
    _kind: type[nn.Module]
    _blocks: dict[str, nn.Module]
    #: The parameters outside of the blocks in the type of ``param_dtype``, if that is given.
    _casts: OutsideCasts | None
    _blocks_argument: Blocks | BlockNames
    #: Names of the modules that are blocks because memory is too small for them to stay.
    _rest: Sequence[str] = ()
    _forwards: list[StreamedForward]
    _num_microbatches: int
    _engine: Engine | None
    #: The forward that the model's instance had, if it was not its class's.
    _forward_of_instance: Callable[..., Any] | None
    _plans_microbatches = False
    _run_outside_of_compiled_graphs: Callable[..., Any]

    @property
    def device(self) -> torch.device:
        """The compute device."""
        found: torch.device = self.__dict__["_compute_device"]
        return found

    @device.setter
    def device(self, device: torch.device) -> None:
        self.__dict__["_compute_device"] = device

    @property
    def hf_device_map(self) -> dict[str, Any]:
        """Where the model computes: trainers do not move a model that has such a map."""
        return {"": self.device}

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Whether gradients are reduced by the model itself: the Trainer does not wrap such a model."""
        return self._arguments["mesh"] is not None

    # --- construction -------------------------------------------------------------------------------------------

    def _adopt(self, model: nn.Module) -> None:
        vars(self).update(vars(model))
        self.__dict__["_of_model"] = frozenset(vars(model))
        # Run by this object's forward; one that is set later (autocast of accelerate) is around this object's.
        self.__dict__["_forward_of_instance"] = vars(self).pop("forward", None)

    def _layers_of(self, model: nn.Module, blocks: Blocks | BlockNames | None, **choices: Any) -> dict[str, nn.Module]:
        if choices["activation_bytes"] is not None:
            raise ValueError(
                f"expected activation_bytes=None with blocks, got activation_bytes={choices['activation_bytes']!r}; "
                f"use larger chunks"
            )
        found = find_blocks(model, blocks)
        outside = parameters_outside(model, found)
        quantised = [(name, p) for name, p in outside.items() if is_taken_apart(p)]
        check_storable(quantised, [model], self.device)
        self.__dict__["_blocks"], self.__dict__["_around"] = found, modules_outside(model, found)
        dtype = choices["param_dtype"]
        self.__dict__["_casts"] = None if dtype is None else OutsideCasts(self._around, dtype)
        names = list(found)
        lists = list(dict.fromkeys(name.rpartition(".")[0] for name in names))
        self.__dict__["_blocks_argument"] = lists if blocks is None else blocks
        return {name: Body(block) for name, block in found.items()}

    def _names_around(self) -> Collection[str]:
        return list(parameters_outside(self, self._blocks))

    def _with_rest(
        self,
        model: nn.Module,
        memory: MemoryArguments,
        *,
        offload_device: object,
        resident: str | Sequence[str] | None,
        staying: Collection[nn.Parameter],
        ranks: int,
        **choices: Any,
    ) -> dict[str, nn.Module] | None:
        limit, dtype = memory.limit_on(self.device), choices["param_dtype"]
        if limit is None or (isinstance(offload_device, DiskHome) and offload_device.keep):
            return None  # a kept home is laid out by the blocks, and opened with any memory
        given: dict[str, Any] = {"on_disk": is_directory(offload_device), "param_dtype": dtype, "ranks": ranks}
        given["replicas"] = choices["replicas"]

        def needed(blocks: Mapping[str, nn.Module], states: int = STATES_EXPECTED) -> int:
            around = modules_outside(model, blocks).values()
            outside = bytes_staying(around, staying, dtype, states=states)
            return least_bytes(memory, list(blocks.values()), device=self.device, outside=outside, **given)

        patterns = [resident] if isinstance(resident, str) else resident or ()
        room = limit - limit // FIRST_GAPS_SHARE
        found = with_rest(model, self._blocks, room, needed, patterns)
        rest = [name for name in found if name not in self._blocks]
        # Without states, as the limit is checked, what stays may take less.
        if not rest or needed(found, 0) > max(limit, needed(self._blocks, 0) - 1):
            return None
        self.__dict__["_rest"] = rest
        return self._layers_of(model, BlockNames(tuple(found)), **choices)

    def _owners(self, model: nn.Module, named: dict[str, nn.Module]) -> dict[str, nn.Module]:
        return {"": model}

    def _join(
        self,
        executor: Executor,
        named: dict[str, nn.Module],
        values: Mapping[Tensor, Values],
        undo: Callable[..., Any],
    ) -> None:
        """Moves what is outside of the blocks to the compute device, and lets the executor run the blocks' calls."""
        place_outside(self._around, self.device, values)
        outside = parameters_outside(self, self._blocks)
        executor.public.replicate(outside, self._around.values())
        staying = set(outside.values())
        # With a mesh, no parameter is taken apart.
        stored = [] if executor.public.sharded else stored_tensors([("", self)])
        parts = [each for each in stored if each.part_of is not None and each.part_of in staying]
        for each in parts:
            for tensor in (each.parameter, *each.aliases):
                tensor.data = tensor.data.to(self.device)
            assert each.part_of is not None
            refresh(each.part_of)
        executor.outside, executor.blocks, executor.rest = list(outside.values()), list(self._blocks), self._rest
        executor.places = list(range(len(executor.blocks)))
        executor.casts_outside = self._casts is not None
        executor.quantised.update((each.part_of, each.name) for each in parts if each.part_of is not None)
        executor.around = [weakref.ref(module) for module in modules_outside(self, self._blocks).values()]
        forwards: list[StreamedForward] = []

        def remove() -> None:
            for each in forwards:
                each.remove()

        undo(remove)
        for j, block in enumerate(self._blocks.values()):
            forwards.append(StreamedForward(executor, j, block))
        self.__dict__["_forwards"] = forwards
        executor.structure = Structure(self._modules)

    # --- running ------------------------------------------------------------------------------------------------

    def _forward_on(self, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = call
        own = self._forward_of_instance
        return own(*args, **kwargs) if own is not None else self._kind.forward(self, *args, **kwargs)

    def _run(self, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check_model()
        call = self._brought((inputs, self._without_cache(kwargs)))
        one = self._num_microbatches == 1
        chunks = [call] if one else split_nested(call, self._num_microbatches)
        # Before parameters are replaced: code around this model compares the state of its modules here.
        answered = offered(self, chunks)
        if answered is not None:
            return answered[0] if one else gather_nested(answered)
        engine = self._engine
        if engine is not None:
            refuse_transforms(tensors_of_call(call))

            def forward() -> Any:
                with self._computing():
                    if one:
                        return self._forward_on(call)
                    outputs = run_chunks(engine, self._forward_on, chunks, self._modules_around())
                check_rows(outputs, call)
                return gather_nested(outputs)

            # The engine compares the parameters before casts take their places.
            return engine.forward(forward)
        with self._computing():
            run = self._executor.run_one(self._forward_on, call) if one else None
            tape, outputs = self._executor.run_many(self._forward_on, chunks) if run is None else run
            check_rows(outputs, call)
            if tape is None or not tape.records:
                return outputs[0] if len(outputs) == 1 else gather_nested(outputs)
            with torch.enable_grad():  # a forward may have enabled gradients itself
                return attach(self._executor, tape, outputs, call)

    def _modules_around(self) -> list[nn.Module]:
        return self._executor.modules_outside()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """A context in which what is outside of the blocks is as the model's forward computes with it."""
        with self._executor.public.whole(), nullcontext() if self._casts is None else self._casts:
            yield

    def forward_chunks(
        self,
        chunks: Sequence[Any],
        *,
        output_fn: Callable[[Any], Any] | None = None,
        input_fn: Callable[[Any], Any] | None = None,
    ) -> tuple[list[Any], Tape | ChunksTape]:
        """Runs the forwards of many chunks: each block runs for all of them while it is loaded.

        Args:
            chunks: each a tensor, or (args, kwargs) for the model.
            output_fn: applied to each chunk's output: the gradients are then those of its result.
            input_fn: makes a tensor or (args, kwargs) of each chunk, which then may be any object.

        Returns:
            The outputs, detached, in the order of the chunks; and the tape, whose ``backward(output_gradients)``
            accumulates the parameters' gradients.
        """
        if isinstance(chunks, Tensor) or not isinstance(chunks, Sequence) or not chunks:
            raise ValueError(
                f"expected a sequence of at least one chunk, got {type(chunks).__name__}; cut a batch with "
                f"batch.split(rows), for example"
            )
        self._check_model()

        def forward(chunk: Any) -> Any:
            args, kwargs = as_call(0, chunk if input_fn is None else input_fn(chunk))
            output = self._forward_on(self._brought((args, self._without_cache(kwargs))))
            return output if output_fn is None else output_fn(output)

        engine = self._engine
        if engine is not None:

            def run() -> list[Any]:
                with self._computing():
                    return run_chunks(engine, forward, chunks, self._modules_around())

            return with_tape(engine.forward(run))
        with self._computing():
            tape, outputs = self._executor.run_many(forward, chunks)
        return outputs, tape

    def activation_bytes(self, chunk: Any, *, output_fn: Callable[[Any], Any] | None = None) -> int:
        """Not known for a model with blocks: raises ValueError."""
        raise ValueError(
            "the activations of a chunk are measured for layers that are called one after the other, not for a model "
            "with blocks; pass the rows of a chunk (chunk_sizes=) instead of 'auto'"
        )

    def _brought(self, value: Any) -> Any:
        """A value whose tensors are on the compute device, and in the type that the model computes in."""
        if not all(x.device == self.device for x in tensors_of_call(value)):
            value = map_tensors(lambda x: x.to(self.device), value)
        return value if self._casts is None else map_tensors(self._casts.cast, value)

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A recomputation would write into a cache of keys and values again: none is made unless it is asked for."""
        if not torch.is_grad_enabled() or "use_cache" in kwargs or not self._takes_use_cache:
            return kwargs
        return {**kwargs, "use_cache": False}

    @functools.cached_property
    def _takes_use_cache(self) -> bool:
        # A model with adapters passes keywords on.
        base_of: Any = getattr(self, "get_base_model", lambda: self)
        base = base_of()
        forwards = (self._kind.forward, type(base).forward)
        return any("use_cache" in inspect.signature(forward).parameters for forward in forwards)

    def _check_model(self) -> None:
        if self._casts is not None:
            self._casts.end()  # an interrupt may have left casts in place
        if self._engine is None:
            self._executor.check_structure()
        self._executor.public.take_settings()  # before the first block: they decide whether there will be a backward
        if torch.is_grad_enabled():
            if saved_tensor_hooks() is not None and lasting_hooks() is None:
                raise RuntimeError(
                    "a model with blocks was called with gradients inside torch.utils.checkpoint, which would run it "
                    "again in the middle of its backward; call it outside, or pass use_reentrant=True: it recomputes "
                    "its blocks with checkpoint_activation=True"
                )
            for name, block in self._blocks.items() if self._engine is None else ():
                if getattr(block, "gradient_checkpointing", False):
                    raise RuntimeError(
                        f"block {name} has gradient checkpointing of its own; an OffloadModel recomputes blocks with "
                        f"checkpoint_activation=True: call model.gradient_checkpointing_disable() before, and pass "
                        f"gradient_checkpointing=False to a trainer (those of trl turn it on by default)"
                    )

    # --- module ---------------------------------------------------------------------------------------------------

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in torch."""
        super().zero_grad(set_to_none)
        for p in self._parameters.values():
            if p is None or p.grad is None:
                continue
            if set_to_none:
                p.grad = None
            else:  # in place: other code may have kept it
                p.grad.detach_() if p.grad.grad_fn is not None else p.grad.requires_grad_(False)
                p.grad.zero_()

    def _bare(self, memo: dict[int, Any]) -> nn.Module:
        """A copy of the model, which is not offloaded."""
        self._refuse_copies()
        bare: nn.Module = self._kind.__new__(self._kind)
        memo[id(self)] = bare
        own = {key: value for key, value in vars(self).items() if key in self.__dict__["_of_model"]}
        own.pop("forward", None)  # set later, around this object's forward
        if self._forward_of_instance is not None:
            own["forward"] = self._forward_of_instance
        with CopiesOfHomes(self._executor.shards):
            vars(bare).update(copy.deepcopy(own, memo))
        for name in self._blocks:
            vars(bare.get_submodule(name)).pop("forward", None)
        return bare

    def __copy__(self) -> Any:
        """Refused: a shallow copy would share parameters, but an executor runs one model."""
        return refuse_shallow_copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Another model with homes of its own."""
        model = _rebuild(self._base, self._bare(memo), self._blocks_argument, self._arguments)
        memo[id(self)] = model
        return model

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles as the bare model, and the arguments that offload it again."""
        return _rebuild, (self._base, self._bare({}), self._blocks_argument, self._arguments)

    @property
    def _base(self) -> type[nn.Module]:
        return type(self).__mro__[2]


def _rebuild(base: Any, bare: nn.Module, blocks: Any, arguments: dict[str, Any]) -> Any:
    return base(bare, blocks=blocks, **arguments)
