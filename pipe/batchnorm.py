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
from pipe.turn import TakesTurns

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

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

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
        #: Number, mean and squared deviations of the values so far. No buffers: they do not outlive a mini-batch.
        self._sums: tuple[int, Tensor, Tensor] | None = None

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected an input of at least 2 dimensions (N, C, ...), got shape {tuple(input.shape)}")

    def forward(self, input: Tensor) -> Tensor:
        """Normalises a micro-batch: by its own statistics in training, by the running ones in evaluation."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        output = F.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)
        # After the normalisation, which raises for inputs without statistics (one value per channel).
        if not is_recomputing():
            self._track(input)
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
        if self._sums is not None:
            before, mean_before, squares_before = self._sums
            total, delta = before + count, mean - mean_before
            mean = mean_before + delta * (count / total)
            squares = squares_before + squares + delta * delta * (before * count / total)
            count = total
        self._seen += 1
        self._sums = count, mean, squares
        if self._seen == self._expected:
            self.num_batches_tracked += 1
            share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
            self.running_var.lerp_((squares / max(count - 1, 1)).to(self.running_var.dtype), share)
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
        return cls._converted(module, chunks) or module  # type: ignore[return-value]

    @classmethod
    def _converted(
        cls, module: nn.Module, chunks: int, name: str = "", taker: nn.Module | None = None
    ) -> nn.Module | None:
        """The replacement of a module, or None if it is kept. ``taker``: one around it that takes turns."""
        if isinstance(module, cls) and (module.chunks == chunks or taker is not None):
            return None
        if isinstance(module, BatchNorm):
            if not module.track_running_stats:
                return None
            if taker is not None:
                # Its parameters are stored already, so that a layer replaced now would not run.
                raise ValueError(
                    f"expected layers to convert before they are offloaded, got {name.lstrip('.')} inside "
                    f"{type(taker).__name__}; offload the result of "
                    f"DeferredBatchNorm.convert_deferred_batch_norm(layers)"
                )
            deferred = cls(module.num_features, module.eps, module.momentum, module.affine, chunks)
            deferred._parameters = module._parameters
            deferred._buffers = module._buffers
            deferred.train(module.training)
            return deferred
        taker = module if isinstance(module, TakesTurns) else taker
        children = {
            key: (child and cls._converted(child, chunks, f"{name}.{key}", taker)) or child
            for key, child in module._modules.items()
        }
        if children == module._modules:
            return None
        copied = module.__class__.__new__(module.__class__)
        copied.__dict__.update(module.__dict__)
        copied._modules = children
        return copied
