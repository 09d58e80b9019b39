"""Param blocks: some parameters of one shard, and the ``torch.optim`` optimizer that updates them in their home.

Guarantees
    * The optimizer is of the user's class, with its lazy states, on tensors that have the memory of the homes in an
      update only. Its result is that of the same class on a model that is not sharded.
    * A failed update has either changed nothing of the param block, and may be repeated, or raises
      :class:`PartialUpdateError`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optim.groups import copied_options, options_of, same_option
from offload.optim.io_buffers import Blocks, UpdateBlock, Write
from offload.optim.state_forms import EncodedWeights, StateForm, fitting_form, step_encoded
from offload.storage import Block
from offload.storage.buffer import copied_to
from offload.storage.contract import in_order
from offload.streaming.shard import Shard
from offload.streaming.slices import Slice
from offload.streaming.stored_values import StoredValues
from pipe.torch_private.tensors import multiply_all

__all__ = [
    "ELEMENTWISE",
    "OptimizerFactory",
    "ParamBlock",
    "PartialUpdateError",
    "States",
    "UpdateJob",
]

#: Classes with a fused kernel for the CPU whose result agrees with the plain one to rounding. Not SGD: its plain update
#: is bound by memory already, and stays bit-equal to that of a resident model.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)
#: The same for a GPU.
FUSED_ON_DEVICE = FUSED[:2]


#: Classes whose update of one element depends on no other element, and whose states have the parameter's shape.
ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adagrad,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.RMSprop,
    torch.optim.Rprop,
)


#: Of each parameter, by name.
States = Sequence[Mapping[str, Any]]


class PartialUpdateError(RuntimeError):
    """An update failed in the middle of its arithmetic: some tensors are updated, others are not."""


@dataclass(frozen=True)
class OptimizerFactory:
    """The class of the optimizers of param blocks, and the arguments of its constructor."""

    kind: type[Optimizer]
    arguments: Mapping[str, Any]
    #: How states are stored; None: in full.
    form: StateForm | None = None

    @property
    def elementwise(self) -> bool:
        """Whether the update of an element is known to depend on no other."""
        return self.kind in ELEMENTWISE

    def options(self, options: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Hyperparameters of a group; the fused kernel is chosen where the user did not choose."""
        free = all(not options.get(key) for key in ("fused", "foreach", "capturable", "differentiable"))
        # In 16 bits the fused kernel rounds once where the plain class rounds after every operation.
        wide = all(p.dtype in (torch.float32, torch.float64) for p in parameters)
        plain = wide and not isinstance(options.get("lr"), Tensor)
        fused = FUSED if all(p.device.type == "cpu" for p in parameters) else FUSED_ON_DEVICE
        if free and plain and options.get("fused") is None and self.kind in fused:
            return {**options, "fused": True}
        return dict(options)


@dataclass(eq=False)
class UpdateJob:
    """The update of one param block by one step, and its progress."""

    param_block: ParamBlock
    #: For each parameter, its gradient, or None if it is not updated.
    gradients: list[Tensor | None]
    #: Hyperparameters of each group of the user's optimizer at the time of the step.
    options: list[dict[str, Any]]
    coefficient: Tensor | None
    #: The number of the step, from 1 on.
    step: int = 0
    #: Whether the gradients are multiplied by the coefficient already.
    scaled: bool = False
    #: In files: its blocks, empty before its first use; how many of them are computed; where each gradient is, if it is
    #: in a file; the states before the step that are not in files; and what it has to write.
    update_blocks: list[UpdateBlock] = field(default_factory=list)
    blocks_done: int = 0
    gradient_places: list[tuple[Block, int] | None] = field(default_factory=list)
    states_before: list[dict[str, Any] | None] = field(default_factory=list)
    writes: list[Write] = field(default_factory=list)
    #: What the class changed in its group, such as a count of steps.
    group_changes: dict[str, Any] = field(default_factory=dict)
    #: Bytes read from files, and written to them.
    bytes_read: int = 0
    bytes_written: int = 0
    #: Whether it is computed; its last writes may still be running.
    done: bool = False

    def coefficient_on(self, device: torch.device) -> Tensor | None:
        """The factor of the gradients, on the device where they are updated; None: 1."""
        if self.coefficient is not None and self.coefficient.device != device:
            self.coefficient = self.coefficient.to(device)
        return self.coefficient

    def clip(self, gradients: list[Tensor]) -> None:
        """Multiplies gradients on one device by the coefficient, once.

        In place, since a gradient that is not zeroed stays clipped, as after ``clip_grad_norm_``.
        """
        if gradients and not self.scaled and (coefficient := self.coefficient_on(gradients[0].device)) is not None:
            multiply_all(gradients, coefficient)
            self.scaled = True

    @property
    def nbytes(self) -> int:
        """Bytes of the parameters that are to be updated."""
        return sum(s.full_nbytes for s, g in zip(self.param_block.slices, self.gradients, strict=True) if g is not None)

    @property
    def sparse(self) -> bool:
        """Whether a gradient is sparse."""
        return any(gradient is not None and gradient.is_sparse for gradient in self.gradients)

    @property
    def unwritten(self) -> list[Write]:
        """What is computed but not known to be written."""
        self.writes = [write for write in self.writes if not write.written]
        return self.writes


@dataclass(eq=False)
class ParamBlock:
    """Parameters of a shard in memory: weights are updated where they rest, and states stay where torch made them."""

    shard: Shard
    slices: Sequence[Slice]
    #: Index of the user's group to which all of them belong.
    group: int
    factory: OptimizerFactory
    #: Where they are updated; None: where they are.
    device: torch.device | None = None
    optimizer: Optimizer | None = None
    #: Why it cannot be updated any more.
    stopped: PartialUpdateError | None = None

    def __post_init__(self) -> None:
        self._chosen: dict[str, Any] = {}
        #: Calls of the optimizer that the running update has completed, where it has several.
        self._parts_done = 0
        #: Values of the types and shapes of the parameters, in the memory of one element.
        self._blank = [
            torch.zeros((), dtype=s.full_dtype, device=self.device or s.parameter.device).expand(s.parameter.shape)
            for s in self.slices
        ]
        #: What the optimizer takes for the parameters; blank except in an update.
        self.proxies = [blank.detach() for blank in self._blank]
        form = self.factory.form
        #: Positions of the parameters whose states are stored in the form. They are encoded on the host.
        self.encoded = {
            k
            for k, s in enumerate(self.slices)
            if form is not None and self.proxies[k].device.type == "cpu" and form.encodes(self.shard.whole_like(s))
        }

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters themselves."""
        return [s.parameter for s in self.slices]

    def _bind(self, *, decodes: bool = False) -> None:
        """Gives proxies the memory of their parameters; and to those that are stored in a form a copy, if it
        ``decodes``."""
        for s, proxy in zip(self.slices, self.proxies, strict=True):
            if self.shard.home is None:
                proxy.data = s.parameter.data  # it stays on the device; users may replace its memory
            elif s.form is None:
                proxy.data = self.shard.memory_of(s)
            elif decodes:
                proxy.data = StoredValues(self.shard, s).in_full()

    def _unbind(self) -> None:
        """Takes gradients and memory from the proxies: users may replace what parameters have, or move it."""
        for proxy, blank in zip(self.proxies, self._blank, strict=True):
            proxy.grad = None
            proxy.data = blank

    def prepare(self, options: Sequence[Mapping[str, Any]], *, sparse: bool = False) -> Optimizer:
        """The optimizer, with its group among ``options``; without fused kernels if a gradient is ``sparse``."""
        chosen = dict(options[self.group]) if sparse else self.factory.options(options[self.group], self.proxies)
        if self.optimizer is None:
            # A class may read the values, or make states like them. Those of torch do not read them.
            self._bind(decodes=not self.factory.elementwise or self.factory.kind is torch.optim.Adagrad)
            try:
                self.optimizer = self.factory.kind([{**chosen, "params": self.proxies}], **self.factory.arguments)
            finally:
                self._unbind()
            self._store_states()
        # Copies, since param blocks share a group, and a class may write into its values.
        self.optimizer.param_groups[0].update(copied_options(chosen))
        self._chosen = chosen
        return self.optimizer

    @contextlib.contextmanager
    def _arithmetic(self) -> Iterator[None]:
        """A context of an update: after an error that left some tensors changed, this and every later one raises
        PartialUpdateError."""
        if self.stopped is not None:
            raise self.stopped
        counts = {id(tensor): tensor._version for tensor in self._tensors()}
        try:
            yield
        except BaseException as error:
            # New states are zeros, which the class would make again: they count as unchanged.
            if self._parts_done or any(tensor._version != counts.get(id(tensor), 0) for tensor in self._tensors()):
                what = "parameters outside of shards" if self.shard.index < 0 else f"shard {self.shard.index}"
                self.stopped = PartialUpdateError(
                    f"the update of {what} stopped half-way: {error}. Make model and optimizer anew, and load the last "
                    f"checkpoint"
                )
                raise self.stopped from error
            raise

    def _tensors(self) -> list[Tensor]:
        return [*self.proxies, *self.state_tensors()]

    def _store_states(self) -> None:
        """Stores states that were made or loaded in full as they are between updates."""
        for k in self.encoded:
            assert self.optimizer is not None
            assert self.factory.form is not None
            self.factory.form.encode(self.optimizer.state.get(self.proxies[k], {}), self.proxies[k])

    def _step(self, weights: Mapping[int, EncodedWeights]) -> None:
        """Updates the proxies that have a gradient; ``weights``: of those that are stored in a form, by position."""
        optimizer = self.optimizer
        assert optimizer is not None
        self._parts_done = 0

        def step() -> None:
            optimizer.step()
            self._parts_done += 1

        if not weights and not any(self.proxies[k].grad is not None for k in self.encoded):
            optimizer.step()
            return
        elementwise, form = self.factory.elementwise, self.factory.form
        step_encoded(step, optimizer.state, self.proxies, self.encoded, form, elementwise=elementwise, weights=weights)

    def check_dense(self, gradients: Sequence[Tensor | None]) -> None:
        """Raises TypeError for a sparse gradient of a parameter whose states are encoded, or that has a form itself."""
        for k, (s, gradient) in enumerate(zip(self.slices, gradients, strict=True)):
            if gradient is not None and gradient.is_sparse and (s.form is not None or k in self.encoded):
                raise TypeError(
                    f"parameter {s.name} has a sparse gradient, but its weights (store_dtype=) or its states (states=) "
                    f"are encoded as a whole: rows without a gradient would change. Make its layer with sparse=False; "
                    f"or leave out store_dtype=, and give it an optimizer without states="
                )

    def group_changes(self) -> dict[str, Any]:
        """What the class changed in its group since :meth:`prepare`.

        Raises PartialUpdateError if it keeps a state that belongs to no parameter, which ``state_dict()`` would lack.
        """
        assert self.optimizer is not None
        state, chosen = self.optimizer.state, self._chosen
        if len(state) != sum(proxy in state for proxy in self.proxies):
            raise PartialUpdateError(
                f"{self.factory.kind.__name__} keeps states that belong to no parameter, but shards are updated one "
                f"after the other: take a class that treats each parameter by itself. Load the last checkpoint"
            )
        return {
            key: value
            for key, value in options_of(self.optimizer.param_groups[0]).items()
            if key not in chosen or (value is not chosen[key] and not same_option(value, chosen[key]))
        }

    def states(self) -> list[dict[str, Any]]:
        """The optimizer's state of each parameter; an empty dict before the first update."""
        state = {} if self.optimizer is None else self.optimizer.state
        return [state.get(proxy, {}) for proxy in self.proxies]

    def state_tensors(self) -> list[Tensor]:
        """The tensors among the states of all parameters."""
        return [value for state in self.states() for value in state.values() if isinstance(value, Tensor)]

    def load_states(self, states: States, options: Sequence[Mapping[str, Any]]) -> None:
        """Replaces all states with the class's own ``load_state_dict``; the tensors are copied."""
        previous, self.optimizer = self.optimizer, None
        try:
            optimizer = self.prepare(options)
            saved = optimizer.state_dict()
            saved["state"], kept = {}, dict[int, dict[str, Tensor]]()
            for k, (state, proxy) in enumerate(zip(states, self.proxies, strict=True)):
                if state:
                    mine = {key: self._copied(value) for key, value in state.items()}
                    form = self.factory.form if k in self.encoded else None
                    saved["state"][k], kept[k] = fitting_form(mine, proxy, form)
            optimizer.load_state_dict(saved)
            for k, stored in kept.items():
                optimizer.state[self.proxies[k]].update(stored)
            self._store_states()
        except BaseException:
            self.optimizer = previous
            raise

    def adopt_states(self, states: States, options: Sequence[Mapping[str, Any]]) -> list[tuple[Tensor, Tensor]]:
        """Takes over states of other param blocks, the same tensors. Returns those that move, with their new memory."""
        optimizer = self.prepare(options)
        for proxy, state in zip(self.proxies, states, strict=True):
            optimizer.state.pop(proxy, None)  # some classes make states when they are constructed
            if state:
                optimizer.state[proxy] = dict(state)
        return []

    def states_in_memory(self) -> list[tuple[Tensor, Tensor]]:
        """The states that are stored in files, each with a copy in memory."""
        return []

    @staticmethod
    def _copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    def to_read(self, job: UpdateJob) -> Blocks:
        """The blocks that :meth:`run` will read."""
        return ()

    def run(self, job: UpdateJob, slot: Tensor | None, upcoming: Callable[[], Blocks] = tuple) -> None:
        """Updates the parameters; in files the last writes may still be running.

        ``slot`` is memory that already holds the shard's home, or None; ``upcoming`` returns what the next jobs read.
        """
        self.prepare(job.options, sparse=job.sparse)
        pairs = zip(job.gradients, self.proxies, strict=True)
        gradients = [None if g is None else copied_to(g, p.device) for g, p in pairs]
        rounded = {k for k, g in enumerate(gradients) if g is not None and g.dtype != self.proxies[k].dtype}
        job.clip([g for k, g in enumerate(gradients) if g is not None and k not in rounded])
        self._bind()
        try:
            with self._arithmetic():
                encoded = self._encoded_weights(job)
                for part in self._parts(gradients, rounded):
                    for k in part:
                        self.proxies[k].grad = self._wide(job, k) if k in rounded else gradients[k]
                    self._step({k: weights for k, weights in encoded.items() if k in part})
                    for k in part:
                        self.proxies[k].grad = None
                for k in () if job.coefficient is None else rounded:
                    if (gradient := job.gradients[k]) is not None and self.slices[k].parameter.grad is gradient:
                        gradient.copy_(self._wide(job, k))  # it stays clipped as well
                job.group_changes = self.group_changes()
        finally:
            self._unbind()

    def _parts(self, gradients: Sequence[Tensor | None], rounded: Collection[int]) -> list[list[int]]:
        """The parameters that are updated in one call each.

        Rounded gradients are widened in memory that no plan knows of, so one parameter's at a time.
        """
        chosen = [k for k, gradient in enumerate(gradients) if gradient is not None]
        if not self.factory.elementwise:
            return [chosen]
        together = [k for k in chosen if k not in rounded]
        return [part for part in (together, *([k] for k in rounded)) if part]

    def _wide(self, job: UpdateJob, k: int) -> Tensor:
        """A rounded gradient in its parameter's type, clipped there, so that it is not rounded again before its use."""
        gradient = job.gradients[k]
        assert gradient is not None
        wide = gradient.to(self.proxies[k])
        coefficient = job.coefficient_on(wide.device)
        return wide if coefficient is None else wide.mul_(coefficient)

    def _encoded_weights(self, job: UpdateJob) -> dict[int, EncodedWeights]:
        return {
            k: EncodedWeights(
                s.form, s.name, in_order(self.shard.home_view(s)), self.shard.lower_view(s), s.like(), job.step
            )
            for k, s in enumerate(self.slices)
            if s.form is not None and job.gradients[k] is not None
        }
