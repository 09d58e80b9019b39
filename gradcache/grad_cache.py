"""GradCache: computes the gradient of a contrastive loss over a batch of any size in the memory of one chunk.

A contrastive loss compares every row with every other, so gradient accumulation over smaller batches would change it.
But the loss needs only the *representations* of all rows, which are small::

    chunks  ->  representations of every row, no graph
            ->  loss of the whole batch, gradient of each representation (the gradient cache)
            ->  each chunk again with a graph; backward from its rows of the cache

Invariant: loss, gradients, buffers and generator states are those of the whole batch run at once.

Source: Gao et al., "Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup" (2021). Signature and
subclass hooks are those of the package ``GradCache``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gradcache import chunks as chunking
from gradcache import representations
from gradcache.chunk_size import StepMemory, kept_by_a_shard, kept_bytes
from gradcache.distributed import check_equal_chunks, unwrapped, watch
from gradcache.step import Step
from gradcache.streamed import Tower
from gradcache.two_pass import ChunkState, InputGradients, device_of, first_pass, is_trainable, repeatable
from gradcache.used_modules import CallableModel, UsedModules, as_modules
from offload import MemoryPolicy, OffloadModel
from offload.policy import policy_of
from pipe.nested import map_tensors, tensors_in
from pipe.recompute.thread_state import restores_thread_state
from pipe.torch_private.autograd import run_hooks_with_gradient_only

__all__ = ["GradCache", "StepResult"]


@dataclass(frozen=True)
class StepResult:
    """The results of a step besides gradients."""

    loss: Tensor
    """The loss, detached."""
    representations: tuple[Any, ...]
    """One per tower, all rows, detached."""
    auxiliary: tuple[Any, ...] = ()
    """Further values that the loss function returned after the loss, detached."""


class GradCache:
    """Computes the gradient of a large batch's loss chunk by chunk; the caller steps the optimizer.

    Args:
        models: the encoders ("towers"), one per input of a step; the same module may be listed more than once. A
            callable (``clip.encode_image``) trains the modules that are found in it, see ``used_modules``.
            An :class:`offload.OffloadModel` is run shard by shard, see ``streamed``, by itself or inside another
            module, see ``wrapped``; make it with ``checkpoint_activation=True``, or it keeps the activations of all
            chunks.
        chunk_sizes: rows of a chunk, for all towers or one number each; ``"auto"``: as many as fit ``memory``.
        loss_fn: ``loss_fn(*representations, **loss_kwargs)`` returns the scalar loss, or a tuple that starts with it.
        split_input_fn: ``split_input_fn(model_input, chunk_size)`` returns the chunks; default :meth:`split_inputs`.
        get_rep_fn: selects the representations (a tensor, or tensors in a tuple or dict) from a model's output: one row
            for each row of a chunk, unless ``split_input_fn`` decides what a row is.
        fp16: autocast to float16; needs a ``scaler``.
        scaler: a ``torch.amp.GradScaler`` that scales the loss; the caller unscales and steps.
        process_fn: converts a chunk to the model's input directly before the model runs, in both passes, with the same
            random numbers; its results are not kept. A list that is an input, or a member of a mapping, then holds rows
            of any type (texts, dicts, images), and a chunk gets a part of it. If it has trainable parameters it must be
            an ``nn.Module``; over a streamed model it then runs once for all chunks.
        precision: the autocast type of models and loss, such as ``torch.bfloat16``.
        broadcast: keys or positions of input members that every chunk receives whole.
        memory: what the steps over plain modules may hold: bytes, a string such as ``"2GiB"``, ``"auto"`` or an
            :class:`offload.MemoryPolicy`. It chooses the rows of a chunk with ``chunk_sizes="auto"``: the graph of a
            chunk keeps up to ``activation_bytes`` (an OffloadModel's, whose own memory decides: of one shard at a
            time); without this field, up to half of what the gradients leave of the number (on an accelerator: all of
            it). None: half of the free memory.
            Plain modules keep nothing else between the passes, and chunks of theirs never run together, so the other
            fields of a policy do not concern them.

    Raises:
        TypeError, ValueError: at construction or at the start of a step, before any gradient is written.

    An exception restores every ``.grad`` from before the step (except of a streamed model that is itself a tower, which
    documents its own behaviour, and of parameters of one inside a tower that have a gradient and a hook of
    ``register_post_accumulate_grad_hook``). Buffers and generators keep the changes of the chunks that ran, and the
    object can be used again.
    """

    def __init__(
        self,
        models: Sequence[nn.Module | Callable[..., Any]],
        chunk_sizes: int | str | Sequence[int | str],
        loss_fn: Callable[..., Any],
        split_input_fn: Callable[[Any, int], Any] | None = None,
        get_rep_fn: Callable[..., Any] | None = None,
        fp16: bool = False,
        scaler: Any = None,
        process_fn: Callable[[Any], Any] | None = None,
        *,
        precision: torch.dtype | None = None,
        broadcast: Collection[str | int] = (),
        memory: MemoryPolicy | int | str | Mapping[str, int | str] | None = None,
    ) -> None:
        if callable(models) and not isinstance(models, nn.ModuleList):
            raise TypeError(f"expected a list of models, got a {type(models).__name__}; pass models=[model]")
        if fp16 and scaler is None:
            raise ValueError("expected a gradient scaler with fp16=True, got scaler=None; pass torch.amp.GradScaler()")
        if fp16 and precision not in (None, torch.float16):
            raise ValueError(f"expected one precision, got fp16=True and precision={precision}; drop one of them")
        if isinstance(broadcast, str):
            raise TypeError(f"expected a collection of names, got broadcast={broadcast!r}; pass ({broadcast!r},)")
        self.models = models
        self.chunk_sizes: list[Any] = [chunk_sizes] * len(models)
        if isinstance(chunk_sizes, Iterable) and not isinstance(chunk_sizes, str):
            self.chunk_sizes = list(chunk_sizes)
        self.loss_fn = loss_fn
        self.split_input_fn = split_input_fn
        self.get_rep_fn = get_rep_fn
        self.fp16 = fp16
        self.scaler = scaler
        self.process_fn = process_fn
        self.precision = torch.float16 if fp16 else precision
        self.broadcast = tuple(broadcast)
        self.memory = StepMemory(policy_of(memory))
        self.step_result: StepResult | None = None
        self._inputs = InputGradients()
        self._wants_gradient: list[bool] = []
        self._auxiliary: tuple[Any, ...] = ()
        #: Checks a graph of the current step, see ``distributed.Reduction.check``.
        self._check: Callable[[Any, Any], None] | None = None
        self.towers: list[nn.Module] = []
        self._check_towers()

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        """Runs :meth:`cache_step`."""
        return self.cache_step(*args, **kwargs)

    # -- hooks: a subclass may replace any of these; the signatures are those of the package GradCache ----------------

    def split_inputs(self, model_input: Any, chunk_size: int) -> list[Any]:
        """Splits one model input into chunks; see :func:`gradcache.chunks.split_input` for accepted inputs."""
        if self.split_input_fn is None:
            return chunking.split_input(model_input, chunk_size, self.broadcast, lists_are_rows=self._processes)
        chunks = list(self.split_input_fn(model_input, chunk_size))
        chunking.check_rows_kept(model_input, chunks, lists_are_rows=self._processes)
        return chunks

    def get_input_tensors(self, model_input: Any) -> list[Tensor]:
        """Tensors of a chunk; the random states of their devices are saved, besides those of the model and of devices
        in use."""
        return tensors_in(model_input)

    def model_call(self, model: nn.Module, model_input: Any) -> Any:
        """Calls the model with a chunk as its arguments."""
        args, kwargs = chunking.call_arguments(model_input)
        with self.autocast(model):
            return model(*args, **kwargs)

    def get_reps(self, model_out: Any) -> Any:
        """Selects the representations from a model's output."""
        return model_out if self.get_rep_fn is None else self.get_rep_fn(model_out)

    def compute_loss(self, *reps: Any, **loss_kwargs: Any) -> Any:
        """Calls the loss function on the representations of all towers."""
        return self.loss_fn(*reps, **loss_kwargs)

    def forward_no_grad(self, model: nn.Module, model_inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """The first pass: representations of all chunks together, and one random state per chunk."""
        joined, encoder, layers = self.joined(model_inputs), self.encoder_of(model), repeatable(model)
        # A frozen model's first chunk runs with a graph, which saves nothing, to find out whether get_reps trains.
        with_graph = torch.is_grad_enabled() and not is_trainable(model, model_inputs)
        states: list[ChunkState] = []
        for chunk in model_inputs:
            tensors = self.get_input_tensors(chunk)
            output, state = first_pass(layers, chunk, encoder, tensors, with_graph=with_graph and not states)
            state.requires_grad = states[0].requires_grad if states else state.requires_grad
            joined.add(output)
            states.append(state)
        return joined.value(), states

    def build_cache(self, *reps: Any, **loss_kwargs: Any) -> tuple[list[Any], Tensor]:
        """The loss, and its gradient with respect to each tower's representations (None if unused)."""
        wanted = self._wants_gradient if len(self._wants_gradient) == len(reps) else [True] * len(reps)
        leaves = [
            representations.as_leaves(rep) if wants else representations.detached(rep)
            for rep, wants in zip(reps, wanted, strict=True)
        ]
        loss = self._loss(leaves, loss_kwargs)
        if not loss.requires_grad:
            raise ValueError(
                "expected a loss that depends on a representation of a trainable tower or on a parameter, got one that "
                "needs no gradient; do not detach, or call the step under torch.no_grad() to evaluate"
            )
        if self._check is not None:
            self._check(loss, (leaves, loss_kwargs))
        representations.push([loss if self.scaler is None else self.scaler.scale(loss)], [None])
        return [representations.gradients(rep) for rep in leaves], loss.detach()

    def forward_backward(
        self,
        model: nn.Module,
        model_inputs: Sequence[Any],
        cached_gradients: Sequence[Any],
        random_states: Sequence[Any],
        no_sync_except_last: bool = False,
    ) -> None:
        """The second pass: runs each chunk again with a graph, and backward from its rows of the gradient cache."""
        encoder, check = self.encoder_of(model), self._check
        for chunk, gradient, state in zip(model_inputs, cached_gradients, random_states, strict=True):
            if not representations.has_gradient(gradient):
                continue
            chunk = self._inputs.as_leaves(chunk)
            if isinstance(state, ChunkState):
                state.second_pass(chunk, encoder, gradient, check)
                check = None
            else:  # a state from a user's own forward_no_grad replays only random states
                with torch.enable_grad(), state:
                    output = encoder(chunk)
                representations.backward([output], [gradient])

    @restores_thread_state
    def cache_step(self, *model_inputs: Any, no_sync_except_last: bool = False, **loss_kwargs: Any) -> Tensor:
        """Adds the gradient of the whole batch's loss to ``.grad``. Under ``no_grad``: computes the loss only.

        Args:
            *model_inputs: one per model, in the models' order.
            no_sync_except_last: kept for callers that pass it; gradients are always reduced once per step.
            **loss_kwargs: passed to the loss function unchanged.

        Returns:
            The loss of the whole batch, detached. :attr:`step_result` holds it with the representations.
        """
        heads = self._heads("get_reps", "processed", "compute_loss", given=loss_kwargs.values())
        step = self._step(model_inputs, heads)
        self._check = step.check
        with step.gradients() as commit:
            encoded = step.encode()
            if torch.is_grad_enabled():
                self._wants_gradient = [tower.wants_gradient for tower in step.towers]
                cache, loss = self.build_cache(*encoded, **loss_kwargs)
                self._second_pass(step, cache, no_sync_except_last)
                commit()
            else:
                loss = self._loss(encoded, loss_kwargs).detach()
        self.step_result = StepResult(loss, tuple(encoded), self._auxiliary)
        return loss

    @restores_thread_state
    def encode(self, *model_inputs: Any) -> tuple[Any, ...]:
        """The representations of the whole batch, one per model, with a graph whose backward is the second pass.

        For training loops that call ``loss.backward()`` themselves: apply any loss, scale it, add others. The second
        pass runs once, inside that backward; gradients of the models are written when it is done. ``loss_fn`` and
        ``scaler`` are not used, and the loss's own parameters get their gradients from the caller's backward only.
        """
        # Each once, also where it is the input of several models.
        outer = {id(tensor): tensor for tensor in tensors_in(list(model_inputs)) if tensor.requires_grad}
        leaves = {key: tensor.detach().requires_grad_() for key, tensor in outer.items()}
        given = map_tensors(lambda tensor: leaves.get(id(tensor), tensor), list(model_inputs))
        step = self._step(given, self._heads("get_reps", "processed"))
        hooked = step.hooked()
        encoded = step.encode()
        if not torch.is_grad_enabled():
            return tuple(encoded)

        @restores_thread_state
        def second_pass(cache: list[Any]) -> list[Tensor | None]:
            with step.gradients(returned=hooked) as commit:
                self._second_pass(step, cache, False)
                gradients = commit()
            for k, parameter in enumerate(hooked):
                gradient = gradients[k]
                if gradient is None:
                    run_hooks_with_gradient_only(parameter)
                else:
                    gradients[k] = gradient.to(parameter.dtype)
            return [*(leaf.grad for leaf in leaves.values()), *gradients]

        wants = [tower.wants_gradient for tower in step.towers]
        return representations.attach(encoded, wants, [*outer.values(), *hooked], second_pass)

    # -- one step -----------------------------------------------------------------------------------------------------

    def _second_pass(self, step: Step, cache: Sequence[Any], no_sync_except_last: bool) -> None:
        self._inputs, self._check = step.inputs, step.check
        step.backward(cache, no_sync_except_last)
        step.inputs.backward()

    def _step(self, model_inputs: Sequence[Any], heads: UsedModules) -> Step:
        self._check_towers()
        if len(model_inputs) != len(self.models):
            raise ValueError(
                f"expected one input per model, got {len(model_inputs)} inputs for {len(self.models)} models; "
                f"pass what a single model needs as one list, mapping or (list, mapping)"
            )
        self._auxiliary = ()
        # A subclass that overrides model_call gets the model as it was given, including a DDP wrapper.
        models = list(self.towers if self.replaced("model_call") else map(unwrapped, self.towers))
        for model, inner in zip(self.towers, models, strict=True):
            if model is not inner and isinstance(inner, OffloadModel):
                raise ValueError(
                    f"expected a {type(inner).__name__} by itself, got one in {type(model).__name__}: its gradients "
                    f"are offloaded, so the wrapper does not reduce them; make it with mesh=, which does, or average "
                    f"them after the step"
                )
        sizes = [self._rows(*parts) for parts in zip(models, model_inputs, self.chunk_sizes, strict=True)]
        split = [self.split_inputs(x, size) for x, size in zip(model_inputs, sizes, strict=True)]
        check_equal_chunks(models, [len(chunks) for chunks in split])
        return Step(self, [Tower(model, chunks) for model, chunks in zip(models, split, strict=True)], heads)

    def _rows(self, model: nn.Module, model_input: Any, size: int | str) -> int:
        if isinstance(size, int):
            return size

        def measure(chunk: Any) -> int:
            if isinstance(model, OffloadModel) and not self.replaced("model_call"):
                with self.autocast(model):
                    return kept_by_a_shard(model, chunk, self.processed, self.representation_of)
            return kept_bytes(model, chunk, self.encoder_of(model))

        return self.memory.rows_for(model, self.towers, lambda n: self.split_inputs(model_input, n), measure)

    def _loss(self, reps: Sequence[Any], loss_kwargs: dict[str, Any]) -> Tensor:
        selected = self.get_rep_fn is not None or self.replaced("get_reps")
        kinds = [type(rep) for rep in reps if not (selected or isinstance(rep, Tensor))]
        with self.autocast(*reps), representations.naming(kinds):
            result = self.compute_loss(*reps, **loss_kwargs)
        loss, auxiliary = (result[0], tuple(result[1:])) if isinstance(result, (tuple, list)) else (result, ())
        if not isinstance(loss, Tensor):
            raise TypeError(f"expected loss_fn to return a tensor, or a tuple that starts with it, got {type(loss)}")
        if loss.numel() != 1:
            raise ValueError(
                f"expected a scalar loss, got a tensor of shape {tuple(loss.shape)}; reduce it (reduction='mean' or "
                f"'sum'), and return values per row after the loss in a tuple"
            )
        self._auxiliary = map_tensors(torch.Tensor.detach, auxiliary)
        return loss

    def _check_towers(self) -> None:
        if not self.models:
            raise ValueError("expected at least one model, got models=[]")
        if len(self.chunk_sizes) != len(self.models):
            if len(set(self.chunk_sizes)) != 1:
                raise ValueError(
                    f"expected one chunk size per model, got {len(self.chunk_sizes)} for {len(self.models)} models "
                    f"(chunk_sizes={self.chunk_sizes}); pass one number, or one for each"
                )
            self.chunk_sizes = [self.chunk_sizes[0]] * len(self.models)
        self.chunk_sizes = [chunking.chunk_size_of(size) for size in self.chunk_sizes]
        self.towers = as_modules(self.models, self.towers)
        self.memory.check(self.towers)
        watch(self.towers)

    # -- how a model is called ----------------------------------------------------------------------------------------

    def encoder_of(self, model: nn.Module) -> Callable[[Any], Any]:
        """A function from a chunk to its representations: ``process_fn``, the model, ``get_reps``."""

        # A subclass that overrides model_call gets the callable as it was given.
        given: Any = model.function if isinstance(model, CallableModel) and self.replaced("model_call") else model

        def encode(chunk: Any) -> Any:
            out = self.model_call(given, self.processed(chunk))
            with self.autocast(model):
                return self.representation_of(out)

        return encode

    def representation_of(self, model_out: Any) -> Any:
        """What :meth:`get_reps` selects; raises TypeError or ValueError if that is no representation."""
        representation = self.get_reps(model_out)
        representations.check(representation)
        return representation

    @property
    def _processes(self) -> bool:
        return self.process_fn is not None or self.replaced("processed")

    def rows_in_input(self, model_input: Any) -> int | None:
        """Rows of an input or a chunk; None if they cannot be counted."""
        return chunking.rows_in_input(model_input, self.broadcast, lists_are_rows=self._processes)

    def joined(self, chunks: Sequence[Any]) -> representations.Joined:
        """Joins the representations of these chunks."""
        given = [self.rows_in_input(chunk) for chunk in chunks] if len(chunks) > 1 else [None] * len(chunks)
        exactly = self.split_input_fn is None and not self.replaced("split_inputs")
        return representations.Joined(given, exactly=exactly)

    def processed(self, chunk: Any) -> Any:
        """The model's input: ``process_fn`` of the chunk."""
        return chunk if self.process_fn is None else self.process_fn(chunk)

    def replaced(self, *hooks: str) -> bool:
        """Whether a subclass, or an attribute of this object, replaces one of these hooks."""
        return any(getattr(getattr(self, hook), "__func__", None) is not getattr(GradCache, hook) for hook in hooks)

    def _heads(self, *hooks: str, given: Iterable[Any] = ()) -> UsedModules:
        """The modules and tensors that these hooks train, and parameters passed to them in ``given``."""
        functions = {"get_reps": self.get_rep_fn, "processed": self.process_fn, "compute_loss": self.loss_fn}
        used = [getattr(self, hook) if self.replaced(hook) else functions[hook] for hook in hooks]
        return UsedModules(*used, *(v for v in given if not isinstance(v, Tensor) or isinstance(v, nn.Parameter)))

    def autocast(self, *owners: Any) -> contextlib.AbstractContextManager[Any]:
        """The autocast context of ``precision`` for the device of these modules or tensors."""
        if self.precision is None:
            return contextlib.nullcontext()
        device = device_of(*owners)
        # Inside the user's autocast the weight cache would outlive this block, with casts made under no_grad.
        nested = torch.is_autocast_enabled(device.type)
        return torch.autocast(device.type, dtype=self.precision, cache_enabled=not nested)
