"""A piece: some parameters of one shard, and the real optimizer that updates them where they rest.

Guarantees
    * A piece is updated by the very class of ``torch.optim`` that the user named, with its lazy states, on tensors that
      lie where the parameters rest. What it computes is what it would compute on a model that was never cut.
    * An update that fails has either changed nothing of the piece, and may be tried again, or raises
      :class:`PartialUpdateError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from offload.optim.groups import copied_options, options_of, same_option
from offload.optim.io_requests import Copy, Write
from offload.streaming.shard import Shard, Slice
from pipe.torch_private import multiply_all

__all__ = ["HostParamBlock", "OptimizerFactory", "ParamBlock", "PartialUpdateError", "UpdateJob"]

#: Classes with a fused kernel for the CPU whose result agrees with the plain one to rounding. SGD is left out: its
#: plain update is as fast as memory, and is then bit-equal to that of a resident model.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad)


class PartialUpdateError(RuntimeError):
    """An update failed in the middle of its arithmetic: some tensors are updated, others are not."""


@dataclass(frozen=True)
class OptimizerFactory:
    """How to make the optimizer of a piece."""

    kind: type[Optimizer]
    arguments: Mapping[str, Any]

    def options(self, options: Mapping[str, Any], parameters: Sequence[Tensor]) -> dict[str, Any]:
        """Hyperparameters of a group, with the fused kernel chosen where the user left the choice open."""
        free = all(not options.get(key) for key in ("fused", "foreach", "capturable", "differentiable"))
        # In 16 bits the fused kernel rounds once where the plain class rounds after every operation.
        wide = all(p.dtype in (torch.float32, torch.float64) for p in parameters)
        plain = wide and not isinstance(options.get("lr"), Tensor)
        if free and plain and options.get("fused") is None and self.kind in FUSED:
            return {**options, "fused": True}
        return dict(options)

    def make(self, group: dict[str, Any]) -> Optimizer:
        """An optimizer of one group."""
        return self.kind([group], **self.arguments)


@dataclass(eq=False)
class UpdateJob:
    """What one step asks of one piece, and how far it has come."""

    param_block: ParamBlock
    #: For each parameter, its gradient, or None if it takes no part.
    gradients: list[Tensor | None]
    #: Hyperparameters of each group of the user's optimizer, as they were at the step.
    options: list[dict[str, Any]]
    coefficient: Tensor | None
    #: Whether the gradients were multiplied by the coefficient already.
    scaled: bool = False
    #: Bites of the piece that are computed, states that are not at rest as they were before, and what is computed but
    #: not known to be written.
    blocks_done: int = 0
    before: list[dict[str, Any] | None] | None = None
    unwritten: list[Write | Copy] = field(default_factory=list)
    #: What the class changed in its group, such as a count of steps; None as long as it has not run.
    group_changes: dict[str, Any] | None = None
    #: Bytes that went from files to the I/O buffers, and back.
    bytes_read: int = 0
    bytes_written: int = 0
    done: bool = False
    #: Bytes of the parameters that are updated.
    nbytes: int = field(init=False)

    @property
    def sparse(self) -> bool:
        """Whether a gradient is sparse."""
        return any(gradient is not None and gradient.is_sparse for gradient in self.gradients)

    def arrived(self, moves: Sequence[Write | Copy]) -> None:
        """Takes note of what has come to rest."""
        self.bytes_written += sum(move.source.numel() for move in moves)
        self.unwritten = [move for move in self.unwritten if move not in moves]

    def __post_init__(self) -> None:
        taking_part = zip(self.param_block.slices, self.gradients, strict=True)
        self.nbytes = sum(s.nbytes for s, gradient in taking_part if gradient is not None)


class ParamBlock(ABC):
    """Parameters ``slices`` of ``shard``, all in one of the user's groups: the one at the position ``group``."""

    def __init__(self, shard: Shard, slices: Sequence[Slice], group: int, factory: OptimizerFactory) -> None:
        self.shard = shard
        self.slices = list(slices)
        self.group = group
        self.factory = factory
        self.optimizer: Optimizer | None = None
        self._chosen: dict[str, Any] = {}
        #: Leaves that share memory with the parameters' homes, but not their gradients, nor their counts of changes.
        self.proxies = [shard.home_view(s).detach() for s in self.slices]

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters themselves."""
        return [s.parameter for s in self.slices]

    def prepare(self, options: Sequence[Mapping[str, Any]], *, sparse: bool = False) -> Optimizer:
        """The optimizer, with the hyperparameters of its group among ``options``.

        ``sparse`` says that a gradient is, which no fused kernel takes.
        """
        chosen = dict(options[self.group]) if sparse else self.factory.options(options[self.group], self.proxies)
        if self.optimizer is None:
            self.optimizer = self.factory.make({**chosen, "params": self.proxies})
        # Copies, since several pieces have one group, and a class may write into what it finds there.
        self.optimizer.param_groups[0].update(copied_options(chosen))
        self._chosen = chosen
        return self.optimizer

    def group_changes(self) -> dict[str, Any]:
        """What the class changed in its group since :meth:`prepare`.

        Raises:
            PartialUpdateError: if it keeps a state that belongs to no parameter, which no ``state_dict()`` would hold.
        """
        state = {} if self.optimizer is None else self.optimizer.state
        if len(state) != sum(proxy in state for proxy in self.proxies):
            raise PartialUpdateError(
                f"{self.factory.kind.__name__} keeps states that belong to no parameter, but shards are updated one "
                f"after the other: take a class that treats each parameter by itself. Load the last checkpoint"
            )
        group = {} if self.optimizer is None else self.optimizer.param_groups[0]
        return {
            key: value
            for key, value in options_of(group).items()
            if key not in self._chosen or not same_option(value, self._chosen[key])
        }

    def states(self) -> list[dict[str, Any]]:
        """The optimizer's state of each parameter; empty where there is none yet."""
        state = {} if self.optimizer is None else self.optimizer.state
        return [state.get(proxy, {}) for proxy in self.proxies]

    def adopt(self, states: Sequence[Mapping[str, Any]], options: Sequence[Mapping[str, Any]]) -> None:
        """Replaces all states, in the manner of the class's own ``load_state_dict``; the tensors are copied."""
        kept, self.optimizer = self.optimizer, None
        try:
            optimizer = self.prepare(options)
            saved = optimizer.state_dict()
            saved["state"] = {
                k: {key: self._taken(value) for key, value in state.items()} for k, state in enumerate(states) if state
            }
            optimizer.load_state_dict(saved)
        except BaseException:
            self.optimizer = kept
            raise

    @staticmethod
    def _taken(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, Tensor) else value

    @abstractmethod
    def flush(self, job: UpdateJob) -> None:
        """Returns when all that is computed is where it rests; what could not be written is written again."""

    @abstractmethod
    def cancel_prefetch(self) -> None:
        """Returns when nothing is on its way any more, whatever became of it."""

    @abstractmethod
    def run(self, job: UpdateJob, slot: Tensor | None, coming: Callable[[], Iterable[UpdateJob]] = tuple) -> None:
        """Updates the parameters; the end of it may still be on its way to where it rests: see :meth:`flush`.

        ``slot`` is memory that holds the shard's home already, if there is any; ``coming`` tells what runs next, as far
        as that is known.
        """

    @abstractmethod
    def prefetch(self, job: UpdateJob) -> bool:
        """Begins to bring what :meth:`run` will need, as far as that takes time; whether there is room for more."""


class HostParamBlock(ParamBlock):
    """In host memory the update works on the homes themselves, and states stay where torch made them."""

    def flush(self, job: UpdateJob) -> None:
        """There is nothing to write."""

    def cancel_prefetch(self) -> None:
        """Nothing ever is."""

    def prefetch(self, job: UpdateJob) -> bool:
        """Everything is there."""
        return True

    def run(self, job: UpdateJob, slot: Tensor | None, coming: Callable[[], Iterable[UpdateJob]] = tuple) -> None:
        """Updates the parameters where they are."""
        optimizer = self.prepare(job.options, sparse=job.sparse)
        gradients = [g if g is None else g.to(p.device) for g, p in zip(job.gradients, self.proxies, strict=True)]
        if job.coefficient is not None and not job.scaled:
            # In place, since a gradient that is not zeroed after a clipped step goes on clipped.
            multiply_all([g for g in gradients if g is not None], job.coefficient)
            job.scaled = True
        counts = {id(tensor): tensor._version for tensor in self._tensors()}
        try:
            for proxy, gradient in zip(self.proxies, gradients, strict=True):
                proxy.grad = gradient
            optimizer.step()
            job.group_changes = self.group_changes()
        except BaseException as error:
            # A state that was only just made holds zeros; to have made it changes nothing.
            if any(tensor._version != counts.get(id(tensor), 0) for tensor in self._tensors()):
                raise PartialUpdateError(f"the update of shard {self.shard.index} stopped half-way: {error}") from error
            raise
        finally:
            for proxy in self.proxies:
                proxy.grad = None

    def _tensors(self) -> list[Tensor]:
        values = [value for state in self.states() for value in state.values()]
        return [*self.proxies, *(value for value in values if isinstance(value, Tensor))]
