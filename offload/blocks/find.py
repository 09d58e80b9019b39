"""Finds the blocks of a model: the modules that stream, by the name of their list or by their class."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch
from torch import nn

from offload.forms.quantised import is_taken_apart

__all__ = [
    "BlockNames",
    "Blocks",
    "find_blocks",
    "lists_of_blocks",
    "modules_outside",
    "parameters_outside",
    "with_rest",
]

# --- Chooses embeddings and heads outside of blocks to be shards of their own, where memory is too small for them ----
#
# They are chosen when the model is made, by bytes and by class, before anything has moved. That each is called once is
# what a forward shows: it raises where that is not so. Other layers (a projection that is shared, for example) are
# often called several times, so a head is what has a row for each word.

#: A name of a list of blocks; names of lists and modules; or a class of blocks.
Blocks = str | Sequence[str] | type[nn.Module]


@dataclass(frozen=True)
class BlockNames:
    """The ``blocks`` argument of a copied model: the name of each block, in order."""

    names: tuple[str, ...]


#: Modules that are no block themselves: those inside of them are, or they have no forward.
_CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def find_blocks(model: nn.Module, blocks: Blocks | BlockNames | None) -> dict[str, nn.Module]:
    """The blocks of a model by their names, in the order in which they are stored, and expected to be called.

    Args:
        model: any module.
        blocks: the name of an ``nn.ModuleList`` or ``nn.Sequential`` inside it; several names, of lists and of other
            modules, each of which is one block; or a class of blocks. None: the longest list of modules of one class,
            with a warning that names it.

    Raises:
        TypeError, ValueError: if there are no such blocks, or a block is inside another one or listed twice.
    """
    if blocks is None:
        name = _longest_list(model)
        warnings.warn(
            f"OffloadModel streams the blocks of {type(model).__name__}.{name} ({len(_list_at(model, name))} modules); "
            f"pass blocks={name!r} to choose them",
            UserWarning,
            stacklevel=5,  # where offload() was called
        )
        blocks = name
    if isinstance(blocks, BlockNames):
        found = {name: model.get_submodule(name) for name in blocks.names}
    elif isinstance(blocks, type):
        found = _of_class(model, blocks)
    elif isinstance(blocks, str):
        found = _in_lists(model, [blocks])
    elif isinstance(blocks, Sequence) and blocks and all(isinstance(name, str) for name in blocks):
        found = _in_lists(model, blocks)
    else:
        raise TypeError(
            f"expected the name of a list of blocks, names, or a class of modules, got blocks={blocks!r}; for example "
            f"blocks='encoder.layer'"
        )
    _check_apart(found)
    return found


def _in_lists(model: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    if len(set(names)) < len(names):
        raise ValueError(f"expected each list of blocks once, got blocks={list(names)!r}")
    found: dict[str, nn.Module] = {}
    for name in names:
        module = _module_at(model, name)
        if len(names) > 1 and not isinstance(module, _CONTAINERS):
            found[name] = module
        else:
            found.update((f"{name}.{key}", block) for key, block in _list_at(model, name).items())
    return found


def _module_at(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError as error:
        lists = [path for path, _ in lists_of_blocks(model)]
        raise ValueError(
            f"expected the name of a list of blocks in {type(model).__name__}, got blocks={name!r}; its lists are "
            f"{', '.join(lists) if lists else 'none'}"
        ) from error


def _list_at(model: nn.Module, name: str) -> Mapping[str, nn.Module]:
    found = _module_at(model, name)
    if not isinstance(found, (nn.ModuleList, nn.Sequential)) or not len(found):
        raise TypeError(
            f"expected an nn.ModuleList or nn.Sequential with modules, got {type(found).__name__} (blocks={name!r})"
        )
    return {key: block for key, block in found._modules.items() if block is not None}


def _of_class(model: nn.Module, kind: type[nn.Module]) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}

    def search(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            if isinstance(child, kind):
                found[path + name] = child
            else:
                search(child, f"{path}{name}.")

    search(model, "")
    if not found:
        raise ValueError(f"expected a class of modules inside {type(model).__name__}, got blocks={kind.__name__}")
    return found


def lists_of_blocks(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Names and modules of the lists whose members are of one class, without those inside of a member of another."""
    for name, child in module.named_children():
        is_list = isinstance(child, (nn.ModuleList, nn.Sequential))
        if is_list and len(child._modules) > 1 and len({type(m) for m in child._modules.values()}) == 1:
            yield path + name, child
        else:
            yield from lists_of_blocks(child, f"{path}{name}.")


def _longest_list(model: nn.Module) -> str:
    lists = list(lists_of_blocks(model))
    if not lists:
        raise TypeError(
            f"expected a model with a list of blocks of one class, got {type(model).__name__}, which has none; name "
            f"them by blocks=, or pass an nn.Sequential or a list of modules"
        )
    return max(lists, key=lambda item: (len(item[1]._modules), sum(p.nbytes for p in item[1].parameters())))[0]


def _check_apart(blocks: Mapping[str, nn.Module]) -> None:
    names: dict[nn.Module, str] = {}
    for name, block in blocks.items():
        if block in names:
            raise ValueError(
                f"blocks {names[block]} and {name} are the same module, which would be called twice in a forward; a "
                f"block is called once: leave it out of ``blocks``"
            )
        names[block] = name
    for name, block in blocks.items():
        if isinstance(block, torch.jit.ScriptModule):
            raise ValueError(f"block {name} is scripted by torch.jit, which fixes its weights; pass the plain module")
        for path, module in block.named_modules():
            if path and module in names:
                raise ValueError(f"block {names[module]} is inside block {name}; name lists that are apart")


def parameters_outside(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters of a model outside of its blocks, each once, by name.

    Raises ValueError if one of them is a parameter of a block as well: it would have two homes.
    """
    within = {p: f"{name}.{path}" for name, block in blocks.items() for path, p in block.named_parameters()}
    outside: dict[nn.Parameter, str] = {}
    for path, module in modules_outside(model, blocks).items():
        for key, p in module._parameters.items():
            if p is None:
                continue
            name = f"{path}.{key}".lstrip(".")
            if p in within:
                raise ValueError(
                    f"parameter {name} is tied to {within[p]}, which streams with its block, while {name} stays on the "
                    f"compute device; untie them, or name lists and modules that contain both or none"
                )
            outside.setdefault(p, name)
    return {name: p for p, name in outside.items()}


def modules_outside(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """The modules of a model outside of its blocks by their names, the model itself first."""
    inside = {id(m) for block in blocks.values() for m in block.modules()}
    return {path: module for path, module in nn.Module.named_modules(model) if id(module) not in inside}


_TABLES = (nn.Embedding, nn.EmbeddingBag)
#: What takes less than one part in so many of the parameters outside of blocks is not worth a shard: positions.
LEAST_SHARE = 8

#: Named by name, in the order of calls.
Named = Mapping[str, nn.Module]


def with_rest(
    model: nn.Module, blocks: Named, limit: int, needed: Callable[[Named], int], staying: Collection[str]
) -> Named:
    """``blocks``, and the largest modules around them that have to stream, so that the model fits in ``limit`` bytes.

    Each module is added where the model registers it, and only if less is needed with it. Modules that are tied are
    added together, or not at all.

    Args:
        model, blocks: the blocks by name, in the order of calls.
        limit: bytes on the compute device.
        needed: the least bytes that a step takes there with some blocks.
        staying: patterns of names of parameters that stay.
    """
    least = needed(blocks)
    for group in _groups(model, blocks, staying) if least > limit else ():
        more = _in_order(model, blocks, group)
        nbytes = needed(more)
        if nbytes < least:
            blocks, least = more, nbytes
        if least <= limit:
            break
    return blocks


def _groups(model: nn.Module, blocks: Named, staying: Collection[str]) -> list[list[str]]:
    """Modules that may stream, together with those that they are tied to; those with most bytes first."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in nn.Module.named_modules(model, remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for module in modules_outside(model, blocks).values():
        for p in module._parameters.values():
            if p is not None:
                users.setdefault(p, []).append(module)

    words = {module.num_embeddings for module in paths if isinstance(module, _TABLES)}

    def may_stream(module: nn.Module) -> bool:
        kept = (f"{path}.{key}" for path in paths[module] for key in module._parameters)
        return (
            (isinstance(module, _TABLES) or (isinstance(module, nn.Linear) and module.out_features in words))
            # Found at several places, it may be called at each.
            and len(paths[module]) == 1
            and not module._modules
            and "forward" not in vars(module)
            and not (module._forward_pre_hooks or getattr(module, "sparse", False) or getattr(module, "max_norm", None))
            and all(p is None or _is_plain(p) for p in module._parameters.values())
            and not any(fnmatchcase(name, pattern) for name, pattern in itertools.product(kept, staying))
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
