"""BatchNorm for micro-batches that updates its running statistics once per mini-batch.

Each micro-batch is normalised by its own statistics, as in every pipeline. The running mean and variance, which are
used in evaluation, should not depend on the number of micro-batches. So the statistics of micro-batches are merged, and
the running statistics are updated once for each mini-batch.

Invariants
    * After the last micro-batch of a mini-batch, running statistics and ``num_batches_tracked`` equal those of
      BatchNorm over the whole mini-batch, within rounding; until then they are those of the previous mini-batch.
    * An unfinished mini-batch (an exception, fewer micro-batches than expected) does not affect the next one.
    * A recomputation does not update statistics.

Source: torchgpipe, "Deferred Batch Normalization". The merge is that of Chan, Golub and LeVeque (1979), which has no
cancellation where the mean is large; the running variance is the unbiased one, as in BatchNorm.
"""

from __future__ import annotations

import itertools
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, RUF100

from pipe.recompute.phase import is_recomputing
from pipe.torch_private.modules import BatchNorm
from pipe.turn import TakesTurns, takers_in

__all__ = ["DeferredBatchNorm", "mini_batch"]

Module = TypeVar("Module", bound=nn.Module)

_numbers = itertools.count()
# The current mini-batch of this context: its number, and its number of micro-batches.
_under_way: ContextVar[tuple[int, int] | None] = ContextVar("_under_way", default=None)


class mini_batch:  # a context manager of a class, which costs less than a generator  # noqa: N801, RUF100
    """A context in which every DeferredBatchNorm that runs counts one mini-batch of ``chunks`` micro-batches."""

    __slots__ = ("_chunks", "_token")

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks

    def __enter__(self) -> None:
        self._token = _under_way.set((next(_numbers), self._chunks))

    def __exit__(self, *raised: Any) -> None:
        _under_way.reset(self._token)


class DeferredBatchNorm(BatchNorm):
    """BatchNorm for micro-batches. Input of shape ``(N, C, ...)``, at least 2-dimensional.

    Args:
        num_features: ``C``.
        eps: added to the variance.
        momentum: weight of the new statistics; None for the mean over all mini-batches.
        affine: whether there are a weight and a bias.
        chunks: micro-batches of a mini-batch; a Pipe sets the number with :func:`mini_batch` instead.
    """

    # Partial sums of the current mini-batch. Not buffers: they are no state of the model and do not outlive a batch.
    _count: int
    _mean: Tensor | None
    _squares: Tensor | None

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, chunks: int = 1
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats=True)
        self.chunks = chunks
        self._number = -1
        self.begin(chunks)

    def begin(self, chunks: int) -> None:
        """Starts a mini-batch of ``chunks`` micro-batches. Partial sums of an unfinished one are discarded."""
        self._expected = chunks
        self._seen = 0
        self._count = 0
        self._mean = self._squares = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions (N, C, ...), got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalises a micro-batch: by its own statistics in training, by the running ones in evaluation."""
        self._check_input_dim(input)
        if not self.training:
            return F.batch_norm(
                input, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        output = F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        # After the normalisation, which raises for inputs without statistics (one value per channel).
        if not is_recomputing():
            self._track(input)
            if self._seen == self._expected:
                self._commit()
        return output

    @torch.no_grad()
    def _track(self, input: Tensor) -> None:
        announced = _under_way.get()
        if announced is not None and announced[0] != self._number:
            self._number = announced[0]
            self.begin(announced[1])
        rows = input.detach().transpose(0, 1).flatten(1)
        # Sums in half precision would lose the statistics to rounding.
        rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        count = rows.size(1)
        variance, mean = torch.var_mean(rows, dim=1, correction=0)
        squares = variance * count
        if self._mean is None or self._squares is None:
            self._mean, self._squares, self._count = mean, squares, count
        else:
            total = self._count + count
            delta = mean - self._mean
            self._mean = self._mean + delta * (count / total)
            self._squares = self._squares + squares + delta * delta * (self._count * count / total)
            self._count = total
        self._seen += 1

    @torch.no_grad()
    def _commit(self) -> None:
        assert self._mean is not None
        assert self._squares is not None
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = self._squares / max(self._count - 1, 1)
        self.running_mean.lerp_(self._mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), share)
        self.begin(self._expected)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{super().extra_repr()}, chunks={self.chunks}"  # type: ignore[no-untyped-call]

    @classmethod
    def convert_deferred_batch_norm(cls, module: Module, chunks: int = 1) -> Module:
        """The module with each BatchNorm in it replaced by a DeferredBatchNorm that shares its parameters and buffers.

        Layers without running statistics, and layers converted already for the same ``chunks``, are kept. The given
        module is not changed, but containers without a BatchNorm are shared with the result.

        Modules that take turns at a device (:class:`pipe.TakesTurns`) are kept whole, since they store the parameters
        of their layers: one with a BatchNorm that is not converted raises ValueError. Those converted already count the
        micro-batches that a pipe announces, whatever their ``chunks``.
        """
        _check_convertible(module)
        converted = cls._converted(module, chunks)
        return module if converted is None else converted  # type: ignore[return-value]

    @classmethod
    def _converted(cls, module: nn.Module, chunks: int) -> nn.Module | None:
        """The replacement of a module, or None if it is kept."""
        if (isinstance(module, cls) and module.chunks == chunks) or isinstance(module, TakesTurns):
            return None
        if isinstance(module, BatchNorm):
            if not module.track_running_stats:
                return None
            deferred = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
            deferred._parameters = module._parameters
            deferred._buffers = module._buffers
            deferred.train(module.training)
            return deferred
        children = {name: cls._converted(child, chunks) for name, child in module._modules.items() if child is not None}
        if not any(children.values()):
            return None
        copied = module.__class__.__new__(module.__class__)
        copied.__dict__.update(module.__dict__)
        copied._modules = {name: children.get(name) or child for name, child in module._modules.items()}
        return copied


def _check_convertible(module: nn.Module) -> None:
    """Refuses BatchNorm layers inside modules that take turns: their parameters are stored already, so that a layer
    replaced now would not run.
    """
    for name, taker in module.named_modules():
        if not takers_in([taker]) or takers_in(taker.children()):
            continue
        for inner, layer in taker.named_modules():
            if isinstance(layer, BatchNorm) and not isinstance(layer, DeferredBatchNorm) and layer.track_running_stats:
                raise ValueError(
                    f"expected layers to convert before they are offloaded, got {f'{name}.{inner}'.lstrip('.')} inside "
                    f"{type(taker).__name__}; offload the result of "
                    f"DeferredBatchNorm.convert_deferred_batch_norm(layers)"
                )
