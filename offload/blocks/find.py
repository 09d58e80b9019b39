"""Finds the blocks of a model: the modules that stream, by the name of their list or by their class."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

__all__ = [
    "BlockNames",
    "Blocks",
    "find_blocks",
    "lists_of_blocks",
    "modules_outside",
    "parameters_outside",
]

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
