"""``CachedMultipleNegativesRankingLoss`` with the interface of sentence-transformers, on this package's GradCache.

It replaces the class of that name, of release 6: the constructor, ``forward``, ``calculate_loss`` and
``get_config_dict`` are called the same way, a trainer calls it as it calls any loss, and ``MatryoshkaLoss`` can wrap
it. Differences inside: every generator and buffer is replayed, the second pass runs in the caller's ``backward()`` and
adds all gradients at once, processes may have different numbers of rows.

Nothing is imported from that package: a model is any module that maps a dict of features to a dict with
``"sentence_embedding"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradcache.features import FeatureSplitter
from gradcache.grad_cache import GradCache
from gradcache.ranking import Ranking
from gradcache.tiled_loss import with_known_gradients
from gradcache.used_modules import leaves_of

__all__ = ["CachedMultipleNegativesRankingLoss", "cos_sim"]

_CONFIG = (
    *("scale", "similarity_fct", "mini_batch_size", "mini_batch_num_tokens", "gather_across_devices"),
    *("directions", "partition_mode", "hardness_mode", "hardness_strength"),
)


def cos_sim(a: Tensor, b: Tensor) -> Tensor:
    """Cosine of every pair of rows, (rows of a, rows of b)."""
    return F.normalize(a, dim=1) @ F.normalize(b, dim=1).T


class CachedMultipleNegativesRankingLoss(nn.Module):
    """Ranks each anchor's positive among the documents of the whole batch, encoding ``mini_batch_size`` rows at a time.

    Args:
        model: maps a dict of features to a dict with ``"sentence_embedding"``; any module, streamed ones included.
        scale: similarities are multiplied by it.
        similarity_fct: ``similarity_fct(a, b)`` returns (rows of a, rows of b).
        mini_batch_size: rows that are encoded, and whose scores exist, at a time.
        mini_batch_num_tokens: limit mini-batches by this number of tokens instead of by rows.
        gather_across_devices: use the candidates of all processes; no effect in a single process.
        directions: what each anchor and each positive is compared with, see ``ranking``.
        partition_mode: ``"joint"``: one softmax over all directions; ``"per_direction"``: the mean of one for each.
        show_progress_bar: accepted for compatibility; this loss prints nothing.
        hardness_mode: the negatives whose weight grows with their similarity: ``"in_batch_negatives"``,
            ``"hard_negatives"``, ``"all_negatives"`` or None.
        hardness_strength: factor of this weight.

    Raises:
        ValueError: for invalid arguments.

    Source: Henderson et al., "Efficient Natural Language Response Suggestion" (2017); Gao et al. (2021) for the cache.
    """

    #: Tells wrappers of that package that the model runs again in backward, so that they wrap calculate_loss instead.
    uses_gradient_cache = True

    def __init__(
        self,
        model: nn.Module,
        scale: float = 20.0,
        similarity_fct: Callable[[Tensor, Tensor], Tensor] = cos_sim,
        mini_batch_size: int = 32,
        mini_batch_num_tokens: int | None = None,
        gather_across_devices: bool = False,
        directions: Sequence[str] = ("query_to_doc",),
        partition_mode: str = "joint",
        show_progress_bar: bool = False,
        hardness_mode: str | None = None,
        hardness_strength: float = 0.0,
    ) -> None:
        super().__init__()
        if mini_batch_num_tokens is not None and mini_batch_num_tokens < 1:
            raise ValueError(f"expected mini_batch_num_tokens >= 1 or None, got {mini_batch_num_tokens}")
        self.model = model
        self.scale = scale
        self.similarity_fct = similarity_fct
        self.mini_batch_size = mini_batch_size
        self.mini_batch_num_tokens = mini_batch_num_tokens
        self.gather_across_devices = gather_across_devices
        self.directions = tuple(directions)
        self.partition_mode = partition_mode
        self.show_progress_bar = show_progress_bar
        self.hardness_mode = hardness_mode
        self.hardness_strength = hardness_strength
        self._ranking()

    def _ranking(self) -> Ranking:
        return Ranking(
            self.similarity_fct,
            self.scale,
            self.directions,
            self.partition_mode,
            self.hardness_mode,
            self.hardness_strength,
            self.mini_batch_size,
            self.gather_across_devices,
        )

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None = None) -> Tensor:
        """The loss of a batch; its ``backward()`` runs the second pass.

        Args:
            sentence_features: features of the anchors, of the positives, and of any number of hard negatives.
            labels: not used.

        Raises:
            ValueError: if there are no positives, or features that cannot be split by rows.
        """
        columns = list(sentence_features)
        if len(columns) < 2:
            raise ValueError(f"expected features of anchors and of positives at least, got {len(columns)} column")
        # A model is called with the dict as its one argument, not with its members as keywords.
        inputs: list[tuple[list[Any], dict[str, Any]]] = [([dict(features)], {}) for features in columns]
        cache = GradCache(
            [self.model] * len(columns),
            self.mini_batch_size,
            _no_loss,
            FeatureSplitter(self.mini_batch_num_tokens),
            _embedding,
            process_fn=_with_own_dict,
        )
        reps = list(cache.encode(*inputs))
        _refuse_restored_forwards(self.model, reps)
        if "calculate_loss" not in vars(self) or not torch.is_grad_enabled():
            return self.calculate_loss([[rep] for rep in reps], labels)
        # A wrapper replaced the method by a function that computes gradients immediately.
        leaves = [rep.detach().requires_grad_() for rep in reps]
        value = self.calculate_loss([[leaf] for leaf in leaves], labels, with_backward=True)
        return with_known_gradients(
            value.detach(), [(rep, leaf.grad) for rep, leaf in zip(reps, leaves, strict=True) if leaf.grad is not None]
        )

    def calculate_loss(
        self, reps: Sequence[Tensor | Sequence[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """The loss of representations of anchors, positives, and hard negatives.

        Args:
            reps: one tensor for each column, or a list of tensors to be concatenated.
            labels: not used.
            with_backward: fill ``.grad`` of the representations, and return the detached value.
        """
        columns = [rep if isinstance(rep, Tensor) else torch.cat(list(rep)) for rep in reps]
        loss = self._ranking()(columns[0], columns[1:])
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
        return {name: getattr(self, name) for name in _CONFIG} | {"similarity_fct": _name_of(self.similarity_fct)}

    @property
    def temperature(self) -> float:
        """The divisor of similarities."""
        return 1.0 / self.scale

    @property
    def citation(self) -> str:
        """The source in BibTeX, for a model card."""
        return (
            "\n@inproceedings{gao2021scaling,\n"
            "    title = {Scaling Deep Contrastive Learning Batch Size under Memory Limited Setup},\n"
            "    author = {Gao, Luyu and Zhang, Yunyi and Han, Jiawei and Callan, Jamie},\n"
            "    booktitle = {Proceedings of the 6th Workshop on Representation Learning for NLP},\n"
            "    year = {2021},\n"
            "    url = {https://arxiv.org/abs/2101.06983}\n"
            "}\n"
        )


def _embedding(output: Any) -> Tensor:
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


def _name_of(function: Any) -> str:
    if isinstance(function, partial):
        given = ", ".join(f"{name}={value!r}" for name, value in function.keywords.items())
        return f"{_name_of(function.func)}({given})" if given else _name_of(function.func)
    return str(getattr(function, "__name__", type(function).__name__))


def _with_own_dict(chunk: Any) -> Any:
    """Copies the dict of features: modules write their results into it, which must not outlive the call."""
    return [dict(chunk[0][0])], {}


def _no_loss(*_: Any) -> Tensor:
    raise AssertionError("the loss is computed on the encoded batch")
