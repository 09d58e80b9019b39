"""BatchNorm for micro-batches that updates its running statistics once per mini-batch.

Each micro-batch is normalised by its own statistics, as in every pipeline. The running mean and variance, which are
used in evaluation, should not depend on the number of micro-batches. So the statistics of micro-batches are merged, and
the running statistics are updated once for each mini-batch.

Invariants
    * After a mini-batch, running statistics and ``num_batches_tracked`` equal those of BatchNorm over the whole
      mini-batch, within rounding; until then they are those of the previous mini-batch. In a Pipe a layer may run
      several times in each micro-batch; each of its calls is one over the mini-batch.
    * A mini-batch that raised, or in which a layer did not run equally often in all micro-batches, updates nothing.
    * A recomputation does not update statistics.

Source: torchgpipe, "Deferred Batch Normalization". The merge is that of Chan, Golub and LeVeque (1979), which has no
cancellation where the mean is large; the running variance is the unbiased one, as in BatchNorm.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812, RUF100

from pipe.recompute.phase import is_recomputing
from pipe.torch_private.modules import BatchNorm
from pipe.turn import TakesTurns

__all__ = ["DeferredBatchNorm", "mini_batch"]

#: Number, mean and variance of the values of one call.
Statistics = tuple[int, Tensor, Tensor]

#: The current mini-batch of this context.
_under_way: ContextVar[mini_batch | None] = ContextVar("_under_way", default=None)


class mini_batch:  # a context manager of a class, which costs less than a generator  # noqa: N801, RUF100
    """A context in which every DeferredBatchNorm that runs counts one mini-batch of ``chunks`` micro-batches."""

    __slots__ = ("_chunks", "_token", "seen")

    def __init__(self, chunks: int) -> None:
        self._chunks = chunks
        #: Of the calls of each layer so far.
        self.seen: dict[DeferredBatchNorm, list[Statistics]] = {}

    def __enter__(self) -> None:
        self._token = _under_way.set(self)

    def __exit__(self, kind: Any, *raised: Any) -> None:
        _under_way.reset(self._token)
        for layer, seen in self.seen.items() if kind is None else ():
            calls, left = divmod(len(seen), self._chunks)  # in each micro-batch
            for k in range(0 if left else calls):
                layer.update(seen[k::calls])


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
        #: Outside of a Pipe, of each micro-batch so far. No buffers: they do not outlive a mini-batch.
        self._seen: list[Statistics] = []

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
        rows = input.detach().transpose(0, 1).flatten(1)
        # Sums in half precision would lose the statistics to rounding.
        rows = rows.float() if rows.dtype in (torch.float16, torch.bfloat16) else rows
        variance, mean = torch.var_mean(rows, dim=1, correction=0)
        under_way = _under_way.get()
        seen = self._seen if under_way is None else under_way.seen.setdefault(self, [])
        seen.append((rows.size(1), mean, variance))
        if under_way is None and len(seen) == self.chunks:
            self._seen = []
            self.update(seen)

    @torch.no_grad()
    def update(self, seen: Sequence[Statistics]) -> None:
        """Updates the running statistics by those of all micro-batches."""
        self.num_batches_tracked += 1
        share = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        count = sum(n for n, _, _ in seen)
        mean = torch.stack([m * (n / count) for n, m, _ in seen]).sum(0)
        squares = torch.stack([(v + (m - mean).square()) * n for n, m, v in seen]).sum(0)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_((squares / max(count - 1, 1)).to(self.running_var.dtype), share)

    def extra_repr(self) -> str:
        """The arguments."""
        return f"{super().extra_repr()}, chunks={self.chunks}"  # type: ignore[no-untyped-call]

    @classmethod
    def convert_deferred_batch_norm(cls, module: nn.Module, chunks: int = 1) -> Any:
        """The module with each BatchNorm in it replaced by a DeferredBatchNorm that shares its attributes and hooks.

        Layers without running statistics, and layers converted already for the same ``chunks``, are kept. The given
        module is not changed, but containers without a BatchNorm are shared with the result. A BatchNorm with a forward
        of its own (SyncBatchNorm, one with an activation) raises ValueError.

        Modules that take turns at a device (:class:`pipe.TakesTurns`) are kept whole, since they store the parameters
        of their layers: one with a BatchNorm that is not converted raises ValueError. Those converted already count the
        micro-batches that a pipe announces, whatever their ``chunks``.
        """
        if isinstance(module, TakesTurns):
            for name, layer in module.named_modules():
                if isinstance(layer, BatchNorm) and layer.track_running_stats and not isinstance(layer, cls):
                    # Its parameters are stored already, so that a layer replaced now would not run.
                    raise ValueError(
                        f"expected layers to convert before they are offloaded, got {name} inside "
                        f"{type(module).__name__}; offload the result of "
                        f"DeferredBatchNorm.convert_deferred_batch_norm(layers)"
                    )
            return module
        if isinstance(module, BatchNorm):
            if not module.track_running_stats or (isinstance(module, cls) and module.chunks == chunks):
                return module
            if getattr(module.forward, "__func__", None) not in (BatchNorm.forward, cls.forward):
                raise ValueError(
                    f"expected a BatchNorm with torch's forward, got a {type(module).__name__} with one of its own, "
                    f"which would not run; put what it adds into a layer after a BatchNorm, or leave out "
                    f"deferred_batch_norm"
                )
            deferred = cls.__new__(cls)
            deferred.__dict__.update(module.__dict__, chunks=chunks, _seen=[])
            return deferred
        children = {
            key: child and cls.convert_deferred_batch_norm(child, chunks) for key, child in module._modules.items()
        }
        if children == module._modules:
            return module
        copied = module.__class__.__new__(module.__class__)
        copied.__dict__.update(module.__dict__)
        copied._modules = children
        return copied
