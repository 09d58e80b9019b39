"""What the losses have in common: encodes columns of features in mini-batches, and trains through their gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.autograd_node import wide
from gradcache.grad_cache import GradCache
from gradcache.loss import with_known_gradients
from pipe.gradients import leaves_of

__all__ = ["CachedLoss", "Columns", "columns_of", "cos_sim", "embedding_in", "joined", "name_of", "precise_cos_sim"]

#: Representations of each column: one tensor, or a list of tensors to be concatenated.
Columns = Sequence[Tensor | Sequence[Tensor]]


class CachedLoss(nn.Module):
    """A loss of the representations of a whole batch, whose columns are encoded a mini-batch at a time.

    A subclass computes the loss in ``_loss``.

    Args:
        model: maps a dict of features to a dict with ``"sentence_embedding"``.
        mini_batch_size: rows that are encoded, and whose scores exist, at a time.
        mini_batch_num_tokens: limit mini-batches by this number of tokens instead of by rows.
        show_progress_bar: accepted for compatibility; these losses print nothing.

    Raises:
        ValueError: for invalid arguments.
    """

    #: Tells wrappers of that package that the model runs again in backward, so that they wrap calculate_loss instead.
    uses_gradient_cache = True

    def __init__(
        self, model: nn.Module, mini_batch_size: int, mini_batch_num_tokens: int | None, show_progress_bar: bool
    ) -> None:
        super().__init__()
        if mini_batch_num_tokens is not None and mini_batch_num_tokens < 1:
            raise ValueError(f"expected mini_batch_num_tokens >= 1 or None, got {mini_batch_num_tokens}")
        self.model = model
        if mini_batch_size < 1:
            raise ValueError(f"expected mini-batches of at least 1 row, got mini_batch_size={mini_batch_size!r}")
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.show_progress_bar = show_progress_bar

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch; its ``backward()`` runs the second pass.

        Args:
            sentence_features: features of the anchors, of the positives, and of any number of hard negatives.
            labels: not used.

        Raises:
            TypeError: for columns of texts, or a model that returns no ``"sentence_embedding"``.
            ValueError: if there are no positives, or features that cannot be split by rows.
        """
        columns = columns_of(sentence_features)
        if len(columns) < 2:
            raise ValueError(f"expected features of anchors and of positives at least, got {len(columns)} column")
        reps = self._encoded(self.model, columns)
        _refuse_restored_forwards(self.model, reps)
        context = self._context(columns, labels)
        if "calculate_loss" not in vars(self) or not torch.is_grad_enabled():
            return self.calculate_loss([[rep] for rep in reps], context)
        # A wrapper replaced the method by a function that computes gradients immediately.
        leaves = [rep.detach().requires_grad_() for rep in reps]
        value = self.calculate_loss([[leaf] for leaf in leaves], context, with_backward=True)
        return with_known_gradients(
            value.detach(), [(rep, leaf.grad) for rep, leaf in zip(reps, leaves, strict=True) if leaf.grad is not None]
        )

    def calculate_loss(self, reps: Columns, labels: Any = None, *, with_backward: bool = False) -> Tensor:
        """The loss of representations of anchors, positives, and hard negatives.

        Args:
            reps: one tensor for each column, or a list of tensors to be concatenated.
            labels: not used.
            with_backward: fill ``.grad`` of the representations, and return the detached value.
        """
        loss = self._loss([joined(rep) for rep in reps], labels)
        if not with_backward:
            return loss
        given = {id(rep) for column in reps for rep in ([column] if isinstance(column, Tensor) else column)}
        if any(id(leaf) not in given for leaf in leaves_of(loss)):
            raise ValueError(
                "expected a similarity_fct without trainable parameters inside a wrapper such as MatryoshkaLoss, which "
                "weights gradients of representations only; make its parameters a part of the model"
            )
        loss.backward()
        return loss.detach()

    def get_config_dict(self) -> dict[str, Any]:
        """The arguments, for a model card."""
        given = {name for kind in type(self).__mro__ for name in inspect.signature(kind).parameters}
        given -= {"model", "show_progress_bar"}
        return {name: getattr(self, name) for name in sorted(given) if hasattr(self, name)}

    def _loss(self, columns: list[Tensor], context: Any) -> Tensor:
        """The loss of the representations of each column."""
        raise NotImplementedError

    def _context(self, columns: list[dict[str, Tensor]], labels: Tensor | None) -> Any:
        """What ``calculate_loss`` gets besides the representations."""
        return labels

    def _encoded(
        self, model: nn.Module, columns: Sequence[dict[str, Tensor]], process_fn: Callable[[Any], Any] | None = None
    ) -> list[Tensor]:
        """The representations of each column. ``process_fn`` makes the model's call of that of a mini-batch."""
        # A model is called with the dict as its one argument, not with its members as keywords.
        inputs: list[tuple[list[Any], dict[str, Any]]] = [([dict(features)], {}) for features in columns]
        cache = GradCache(
            [model] * len(columns),
            self.mini_batch_size,
            self.calculate_loss,  # not called by encode()
            partial(split_features, tokens=self.mini_batch_num_tokens),
            embedding_in,
            process_fn=process_fn or _with_own_dict,
        )
        return list(cache.encode(*inputs))


def joined(column: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor of a column's representations."""
    return column if isinstance(column, Tensor) else torch.cat(list(column))


def columns_of(sentence_features: Iterable[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """The columns; raises TypeError unless they are features of a tokenizer."""
    columns = list(sentence_features)
    for k, column in enumerate(columns):
        if not isinstance(column, Mapping):
            raise TypeError(
                f"expected columns of features (dicts of tensors) for a model that returns 'sentence_embedding', got "
                f"{type(column).__name__} (column {k}); the losses of a CrossEncoder, which get texts, are in "
                f"sentence_transformers.cross_encoder.losses"
            )
    return columns


def embedding_in(output: Any) -> Tensor:
    """The embeddings in a model's output; raises TypeError if it has none."""
    if not isinstance(output, Mapping) or not isinstance(output.get("sentence_embedding"), Tensor):
        names = list(output) if isinstance(output, Mapping) else type(output).__name__
        raise TypeError(
            f"expected a model that returns a dict with 'sentence_embedding' (a SentenceTransformer that ends with a "
            f"pooling), got {names}; the losses of a MultiVectorEncoder, which returns an embedding for each token, "
            f"are in sentence_transformers.multi_vector_encoder.losses"
        )
    embedding: Tensor = output["sentence_embedding"]
    return embedding


def _refuse_restored_forwards(model: nn.Module, reps: Iterable[Tensor]) -> None:
    """Has the backward of ``reps`` raise if a wrapper has restored a forward method by then.

    The second pass would run the replaced method, but with the state that the wrapper has left in it.
    """
    replaced = [(module, vars(module)["forward"]) for module in model.modules() if "forward" in vars(module)]

    def check(_: Tensor) -> None:
        if any(vars(module).get("forward") is not forward for module, forward in replaced):
            raise RuntimeError(
                "expected the model that ran forward to run again in backward, but a wrapper had replaced a forward "
                "method and restored it; AdaptiveLayerLoss and Matryoshka2dLoss need a loss without a cache"
            )

    for rep in reps if replaced else ():
        if rep.requires_grad:
            rep.register_hook(check)


def _with_own_dict(chunk: Any) -> Any:
    """Copies the dict of features: modules write their results into it, which must not outlive the call."""
    return [dict(chunk[0][0])], {}


def split_features(model_input: Any, rows: int, tokens: int | None = None) -> list[Any]:
    """Cuts the input of models that take a dict of features as their one argument, ``([features], {})``.

    A batch is padded to its longest row, so a mini-batch of short rows would be encoded with needless padding. Columns
    at the end that are padding in every row of a mini-batch are dropped; padding on the left is kept, since positions
    are counted from there.

    Args:
        model_input: ``([features], {})``.
        rows: of a mini-batch.
        tokens: instead, the maximum number of tokens of a mini-batch, by its attention mask; a longer row is a
            mini-batch of its own.

    Raises:
        ValueError: without a number of rows, or without a mask to count tokens by.
    """
    features: Mapping[str, Any] = model_input[0][0]
    total = max(_texts_in(features), 1)
    starts, held = [0], 0
    if tokens is None:
        starts = [*range(0, total, rows)]
    elif isinstance(mask := features.get("attention_mask"), Tensor):
        for i, more in enumerate(mask.sum(dim=1).tolist()):
            if i > starts[-1] and held + more > tokens:
                starts.append(i)
                held = 0
            held += int(more)
    else:
        raise ValueError("expected an attention_mask to count tokens by, got none; pass mini_batch_size instead")
    return [([_cut(features, *place)], {}) for place in zip(starts, [*starts[1:], total], strict=True)]


def _texts_in(features: Mapping[str, Any]) -> int:
    """Number of rows of all members; raises ValueError if they differ in it, or rows are flattened without padding."""
    rows = {name: value.size(0) for name, value in features.items() if isinstance(value, Tensor) and value.dim()}
    flat = {"cu_seq_lens_q", "offsets"} & rows.keys()
    if len(set(rows.values())) > 1 or flat:
        raise ValueError(
            f"expected features with one row for each text, got rows {rows}; pad instead of flattening, and encode "
            f"images as (texts, ...), or use the loss without a cache"
        )
    return next(iter(rows.values()), 0)


def _cut(features: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
    mask = features.get("attention_mask")
    width = used = None
    if isinstance(mask, Tensor) and mask.dim() == 2:
        width = mask.size(1)
        columns = mask[start:stop].any(dim=0).nonzero()
        used = int(columns[-1]) + 1 if len(columns) else width
    cut: dict[str, Any] = {}
    for name, value in features.items():
        if isinstance(value, Tensor) and value.dim():
            value = value[start:stop]
            if used is not None and value.dim() > 1 and value.size(1) == width:
                value = value[:, :used]
        cut[name] = value
    return cut


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of every pair of rows, (rows of a, rows of b)."""
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


def precise_cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """:func:`cos_sim` in at least 32 bits, under autocast as well: for losses that compare cosines."""
    with torch.autocast(a.device.type, enabled=False):
        return cos_sim(a.to(wide(a.dtype)), b.to(wide(b.dtype)))


def name_of(function: Any) -> str:
    """The name of a similarity, with the arguments that are bound to it."""
    if isinstance(function, partial):
        given = ", ".join(f"{name}={value!r}" for name, value in function.keywords.items())
        return f"{name_of(function.func)}({given})" if given else name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))
