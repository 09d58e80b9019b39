"""Chooses embeddings and heads outside of blocks to be shards of their own, where memory is too small for them.

They are chosen when the model is made, by bytes and by class, before anything has moved. That each is called once is
what a forward shows: it raises where that is not so. Other layers (a projection that is shared, for example) are
often called several times, so a head is what has a row for each word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from offload.blocks.find import modules_outside
from offload.forms.quantised import is_taken_apart

__all__ = ["with_embeddings_and_heads"]

_TABLES = (nn.Embedding, nn.EmbeddingBag)
#: What takes less than one part in so many of the parameters outside of blocks is not worth a shard: positions.
LEAST_SHARE = 8

#: Blocks by name, in the order of calls.
Named = Mapping[str, nn.Module]


def with_embeddings_and_heads(
    model: nn.Module, blocks: Named, limit: int, needed: Callable[[Named], int], resident: Collection[str]
) -> Named:
    """``blocks``, and the largest modules around them that have to stream, so that the model fits in ``limit`` bytes.

    Each module is added where the model registers it, and only if less is needed with it. Modules that are tied are
    added together, or not at all.

    Args:
        model, blocks: the model and its blocks.
        limit: bytes on the compute device.
        needed: the least bytes that a step takes there with some blocks.
        resident: patterns of names of parameters that stay.
    """
    least = needed(blocks)
    for group in _tied_groups(model, blocks, resident) if least > limit else ():
        more = _in_order(model, blocks, group)
        nbytes = needed(more)
        if nbytes < least:
            blocks, least = more, nbytes
        if least <= limit:
            break
    return blocks


def _tied_groups(model: nn.Module, blocks: Named, resident: Collection[str]) -> list[list[str]]:
    """Modules that may stream, together with those that they are tied to; those with most bytes first."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in nn.Module.named_modules(model, remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules_outside(model, blocks).values():
        for p in module._parameters.values():
            if p is not None:
                users.setdefault(p, []).append(module)

    vocabularies = {module.num_embeddings for module in paths if isinstance(module, _TABLES)}

    def may_stream(module: nn.Module) -> bool:
        kept = (f"{path}.{key}" for path in paths[module] for key in module._parameters)
        return (
            (isinstance(module, _TABLES) or (isinstance(module, nn.Linear) and module.out_features in vocabularies))
            # Found at several places, it may be called at each.
            and len(paths[module]) == 1
            and not module._modules
            and "forward" not in vars(module)
            and not (module._forward_pre_hooks or getattr(module, "sparse", False) or getattr(module, "max_norm", None))
            and all(p is None or _is_plain(p) for p in module._parameters.values())
            and not any(fnmatchcase(name, pattern) for name, pattern in itertools.product(kept, resident))
        )

    def nbytes(tied: Sequence[nn.Module]) -> int:
        return sum(p.nbytes for p in {p for module in tied for p in module.parameters()})

    least = sum(p.nbytes for p in users) / LEAST_SHARE
    groups = [
        tied
        for tied in dict.fromkeys(map(tuple, users.values()))
        # One of several modules of the same table is often a name for it that nothing calls.
        if all(map(may_stream, tied))
        and sum(isinstance(module, _TABLES) for module in tied) < 2
        # Without those of which another parameter is tied to a module that is none of these.
        and all(set(users[p]) <= set(tied) for module in tied for p in module.parameters())
        and nbytes(tied) >= least
    ]
    return [[paths[module][0] for module in tied] for tied in sorted(groups, key=nbytes, reverse=True)]


def _is_plain(p: nn.Parameter) -> bool:
    return type(p) is nn.Parameter and p.layout is torch.strided and not is_taken_apart(p)


def _in_order(model: nn.Module, blocks: Named, names: Collection[str]) -> Named:
    """``blocks`` and modules of these names: each after the blocks that the model registers before it."""
    places = {path: k for k, (path, _) in enumerate(nn.Module.named_modules(model, remove_duplicate=False))}
    order = list(blocks)
    for name in sorted(names, key=places.__getitem__):
        before = [k for k, other in enumerate(order) if places[other] < places[name]]
        order.insert(max(before, default=-1) + 1, name)
    return {name: blocks[name] if name in blocks else model.get_submodule(name) for name in order}
