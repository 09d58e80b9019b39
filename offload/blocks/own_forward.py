"""How a model runs that is called by its own forward: its blocks stream, and what is around them stays."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from offload.blocks.find import parameters_outside
from offload.blocks.streamed_forward import StreamedForward, own_forward
from offload.calls import as_call, refuse_transforms, to_device
from offload.engine.chunks import run_chunks
from offload.engine.engine import Engine
from offload.engine.homes import ModelHomes
from offload.engine.structure import Structure
from offload.forms.quantised import is_taken_apart, refresh, stored_tensors
from offload.meta_device.materialize import Materializer, Values
from pipe.interception import offered
from pipe.microbatch import check_rows, gather_nested, split_nested
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.thread_state import lasting_hooks
from pipe.torch_private.autograd import saved_tensor_hooks

__all__ = ["OwnForward"]


@torch.no_grad()
def place_outside(modules: Mapping[str, nn.Module], device: torch.device, values: Mapping[Tensor, Values]) -> None:
    """Moves the parameters and buffers of ``modules``, without their children, to ``device``.

    Those on the meta device are materialized. ``values`` are sources of parameters and buffers, if not the modules
    themselves. One module after the other, so that no second copy of all of them is made. The old memory of a parameter
    is not written. Quantised parameters stay as they are.
    """
    materializer = Materializer(values)
    read: set[nn.Parameter] = set()
    for path, module in modules.items():
        gradients = [(p, p.grad) for p in module._parameters.values() if p is not None and not p.is_meta]
        for p, _ in gradients:
            p.grad = None  # must be where the parameter is
            if p in values and p not in read:
                read.add(p)
                p.data = torch.empty_like(p, device="cpu")
        materializer.allocate_module(path, module)
        materializer.fill()
        for parameter in module._parameters.values():
            if parameter is not None and not is_taken_apart(parameter, [module]):
                parameter.data = parameter.data.to(device)
        for p, gradient in gradients:
            p.grad = None if gradient is None else gradient.to(device)
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = buffer.to(device)


class OwnForward:
    """How a model runs whose own forward calls its blocks.

    It holds the blocks, and not the model: a model that is dropped is freed at once.

    Args:
        model: the model, which is not changed before :meth:`join`.
        blocks: its blocks by name.
        around: the modules that do not stream, by name, each without its children; the model is one of them.
        device: the compute device.
        param_dtype: type in which the model computes; None: as its parameters are.
    """

    homes: ModelHomes
    #: Runs the blocks while autograd drives.
    engine: Engine
    #: Into how many parts a batch is split.
    micro_batches: int

    def __init__(
        self,
        model: nn.Module,
        blocks: Mapping[str, nn.Module],
        around: Mapping[str, nn.Module],
        device: torch.device,
        param_dtype: torch.dtype | None,
    ) -> None:
        self.device, self.named, self.around, self._dtype = device, blocks, around, param_dtype
        #: The own forwards of the blocks.
        self.forwards = [own_forward(block) for block in blocks.values()]
        #: The parameters in whose places there are casts while a forward runs.
        self._replaced: list[tuple[dict[str, Any], str, nn.Parameter]] = []
        self._kind = type(model)
        #: That of the instance, if it is not its class's. One that is set later is around the offloaded model's.
        self.forward_of_instance: Callable[..., Any] | None = vars(model).get("forward")
        self._takes_use_cache = _takes_use_cache(model)

    def join(
        self, model: nn.Module, homes: ModelHomes, values: Mapping[Tensor, Values], undo: Callable[..., Any]
    ) -> None:
        """Moves what is outside of the blocks to the compute device, and lets the engine run the blocks' calls.

        ``values``: sources of parameters and buffers; ``undo`` gets what is to be called after a failure.
        """
        self.homes = homes
        place_outside(self.around, self.device, values)
        outside = parameters_outside(model, self.named)
        homes.public.replicate(outside, self.around.values())
        around = set(outside.values())
        # With a mesh, no parameter is taken apart.
        stored = [] if homes.public.sharded else stored_tensors([("", model)])
        parts = [each for each in stored if each.part_of is not None and each.part_of in around]
        for each in parts:
            for tensor in (each.parameter, *each.aliases):
                tensor.data = tensor.data.to(self.device)
            assert each.part_of is not None
            refresh(each.part_of)
        homes.outside, homes.blocks, homes.around = list(outside.values()), list(self.named), self.around
        homes.quantised.update((each.part_of, each.name) for each in parts if each.part_of is not None)
        for j, block in enumerate(self.named.values()):
            forward = StreamedForward(j, block, self)
            undo(forward.remove)
            forward.put(block)
        homes.structure = Structure(model._modules)

    def _forward(self, model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = call
        own = self.forward_of_instance
        return own(*args, **kwargs) if own is not None else self._kind.forward(model, *args, **kwargs)

    def run(self, model: nn.Module, inputs: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The outputs of a call of the model."""
        self._check_model()
        call = self._on_device((inputs, self._without_cache(kwargs)))
        forward_on, count = partial(self._forward, model), self.micro_batches
        one = count == 1
        chunks = [call] if one else split_nested(call, count)
        # Before parameters are replaced: code around this model compares the state of its modules here.
        answered = offered(model, chunks)
        if answered is not None:
            return answered[0] if one else gather_nested(answered)
        engine = self.engine
        refuse_transforms(tensors_of_call(call))

        def forward() -> Any:
            with self._computing():
                if one:
                    return forward_on(call)
                outputs = run_chunks(engine, forward_on, chunks, [*self.around.values()])
            check_rows(outputs, call)
            return gather_nested(outputs)

        # The engine compares the parameters before casts take their places.
        return engine.forward(forward)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """A context in which what is outside of the blocks is as the model's forward computes with it."""
        with self.engine.computing():
            try:
                if self._dtype is not None:
                    self._cast(self._dtype)
                yield
            finally:
                self._uncast()

    def _cast(self, dtype: torch.dtype) -> None:
        """Puts casts in place of the parameters outside of the blocks: one of each, also where they are tied.

        A cast is a part of the graph, so gradients are added to the parameter in its own type.
        """
        casts: dict[nn.Parameter, Tensor] = {}
        for module in self.around.values():
            members: dict[str, Any] = module._parameters
            for key, p in members.items():
                if p is not None and p.is_floating_point() and p.dtype != dtype:
                    if p not in casts:
                        casts[p] = p.to(dtype)
                    self._replaced.append((members, key, p))
                    members[key] = casts[p]

    def _uncast(self) -> None:
        """Puts the parameters back. May be called again after an interrupt."""
        while self._replaced:
            members, key, p = self._replaced[-1]
            members[key] = p
            self._replaced.pop()

    def forward_chunks(
        self,
        model: nn.Module,
        chunks: Sequence[Any],
        output_fn: Callable[[Any], Any] | None,
        input_fn: Callable[[Any], Any] | None,
    ) -> list[Any]:
        """See :meth:`offload.OffloadModel.forward_chunks`."""
        self._check_model()

        def forward(chunk: Any) -> Any:
            args, kwargs = as_call(0, chunk if input_fn is None else input_fn(chunk))
            output = self._forward(model, self._on_device((args, self._without_cache(kwargs))))
            return output if output_fn is None else output_fn(output)

        engine = self.engine

        def run() -> list[Any]:
            with self._computing():
                return run_chunks(engine, forward, chunks, [*self.around.values()])

        return engine.forward(run)

    def activation_bytes(self, chunk: Any, output_fn: Callable[[Any], Any] | None) -> int:
        """Not known for a model with blocks: raises ValueError."""
        raise ValueError(
            "the activations of a chunk are measured for layers that are called one after the other, not for a model "
            "with blocks; pass the rows of a chunk (chunk_sizes=) instead of 'auto'"
        )

    def _on_device(self, value: Any) -> Any:
        """A value whose tensors are on the compute device, and in the type that the model computes in."""
        if self._dtype is None and all(x.device == self.device for x in tensors_of_call(value)):
            return value
        return map_tensors(partial(to_device, self.device, self._dtype), value)

    def _without_cache(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        """A recomputation would write into a cache of keys and values again: none is made unless it is asked for."""
        if not torch.is_grad_enabled() or "use_cache" in kwargs or not self._takes_use_cache:
            return kwargs
        return {**kwargs, "use_cache": False}

    def _check_model(self) -> None:
        self._uncast()  # an interrupt may have left casts in place
        self.homes.public.take_settings()  # before the first block: they decide whether there will be a backward
        if torch.is_grad_enabled() and saved_tensor_hooks() is not None and lasting_hooks() is None:
            raise RuntimeError(
                "a model with blocks was called with gradients inside torch.utils.checkpoint, which would run it "
                "again in the middle of its backward; call it outside, or pass use_reentrant=True: it recomputes "
                "its blocks with checkpoint_activation=True"
            )


def tensors_of_call(call: tuple[tuple[Any, ...], Mapping[str, Any]]) -> list[Tensor]:
    """The tensors among the arguments of a call, but not those inside of caches and other objects."""
    args, kwargs = call
    plain = [x for x in (*args, *kwargs.values()) if isinstance(x, (Tensor, tuple, list, dict))]
    return tensors_in(plain)


def _takes_use_cache(model: Any) -> bool:
    # A model with adapters passes keywords on.
    base = getattr(model, "get_base_model", lambda: model)()
    forwards = (type(model).forward, type(base).forward)
    return any("use_cache" in inspect.signature(forward).parameters for forward in forwards)
