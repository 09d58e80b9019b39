"""Reads the layers of a model from safetensors headers, from a configuration, or from a function that builds them."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.advise.blocks import layers_by_name
from offload.advise.config import outline_of_config, read_config, with_tied_head
from offload.advise.outline import Layer, Outline, ParameterShape
from offload.arguments import layers_of
from offload.files.pretrained import Pretrained

__all__ = ["blocks_of", "names_of_layers", "outline_of"]

_KINDS = "a safetensors file or index, a config.json, a directory of one of these, or module:function"


def outline_of(what: str, stored_dtype: torch.dtype) -> Outline:
    """The layers of the model that the argument ``WHAT`` of the command line names.

    Args:
        what: a path, or ``module:function``.
        stored_dtype: type of floating-point parameters at home; a function decides for itself.

    Raises:
        ValueError: in one line, which names ``WHAT`` and says what to do.
    """
    path = Path(what)
    if path.exists():
        return _outline_of_path(path, stored_dtype)
    module, colon, function = what.partition(":")
    if colon and re.fullmatch(r"[\w.]+", module) and re.fullmatch(r"[\w.]+", function):
        return _outline_of_function(module, function)
    raise ValueError(f"WHAT: expected {_KINDS}, got {what!r}, which does not exist")


def _outline_of_path(path: Path, dtype: torch.dtype) -> Outline:
    folder = path if path.is_dir() else path.parent
    is_config = path.is_file() and path.suffix == ".json" and not path.name.endswith(".index.json")
    holds_files = path.is_dir() and (any(path.glob("*.safetensors.index.json")) or any(path.glob("*.safetensors")))
    if path.is_dir() and not holds_files:
        path, is_config = path / "config.json", True
        if not path.is_file():
            raise ValueError(f"WHAT: expected {_KINDS}, got {str(folder)!r}, which holds no such file")
    try:
        outline = outline_of_config(path, dtype) if is_config else _outline_of_files(path, folder, dtype)
    except (OSError, ValueError) as error:
        raise ValueError(f"WHAT: {error}") from error
    return outline


def _outline_of_files(path: Path, folder: Path, dtype: torch.dtype) -> Outline:
    """The layers of the tensors in safetensors files, from their headers."""
    shapes = [
        ParameterShape(name, shape, dtype if kind.is_floating_point else kind, kind.is_floating_point)
        for name, shape, kind in Pretrained(path).headers()
    ]
    layers = layers_by_name(p for p in shapes if p.trainable)
    if not layers:
        raise ValueError(f"expected floating-point tensors, got none in {path}")
    name = str(dtype).removeprefix("torch.")
    outline = Outline(layers, [f"all tensors are parameters that train, stored as {name} (--stored-dtype)"])
    outline.path = str(path)
    config = folder / "config.json"
    if config.is_file():
        fields = read_config(config)
        outline.has_class = path.is_dir() and bool(fields.get("architectures"))
        width = fields.get("hidden_size", fields.get("n_embd"))
        outline.width = width if isinstance(width, int) else None
        if not any("head" in layer.name for layer in layers):
            with_tied_head(outline, fields)
    return outline


def _runs(layers: Sequence[Layer]) -> Iterator[tuple[int, str, int, int]]:
    """Consecutive layers whose names end with consecutive numbers: (index, name before the number, number, count).

    A layer alone has its whole name, and count 1.
    """
    k = 0
    while k < len(layers):
        match, count = re.fullmatch(r"([\w.-]*?)(\d+)", layers[k].name), 1
        while match and k + count < len(layers) and layers[k + count].name == f"{match[1]}{int(match[2]) + count}":
            count += 1
        yield (k, layers[k].name, 0, 1) if match is None or count == 1 else (k, match[1], int(match[2]), count)
        k += count


def blocks_of(outline: Outline) -> list[str]:
    """The names of all layers as ``blocks`` takes them: numbered ones by their list."""
    names: list[str] = []
    for k, name, _, count in _runs(outline.layers):
        names += [name.rstrip(".")] if count > 1 else outline.layers[k].parts or [name]
    return names


def _outline_of_function(module_name: str, function_name: str) -> Outline:
    what = f"{module_name}:{function_name}"
    if (here := os.getcwd()) not in sys.path:  # as with python -m
        sys.path.insert(0, here)
    try:
        function: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"WHAT: cannot import {what!r}: {error}; run where {module_name} can be imported") from error
    if not callable(function):
        raise ValueError(
            f"WHAT: expected a function that returns the layers, got {what!r}, a {type(function).__name__}"
        )
    needed = [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if needed:
        raise ValueError(f"WHAT: expected a function without arguments, got {what!r}, which needs {', '.join(needed)}")
    try:
        with torch.device("meta"):
            made = function()
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"WHAT: {what!r} fails on the meta device: {reason}; it must not read values") from error
    preparation = [
        "import torch",
        f"from {module_name} import {function_name.partition('.')[0]}",
        "from offload import OffloadModel, OffloadOptimizer",
        'with torch.device("meta"):',
        f"    layers = {function_name}()",
    ]
    if isinstance(made, nn.Module) and not isinstance(made, (nn.Sequential, nn.ModuleList)):
        return _outline_of_module(made, what)
    listed = isinstance(made, (list, tuple)) and made and all(isinstance(each, nn.Module) for each in made)
    try:
        named = layers_of(nn.ModuleList(made) if listed else made)
    except (TypeError, ValueError) as error:
        raise ValueError(f"WHAT: {what!r} returned no layers: {error}") from error
    if not any(True for layer in named.values() for _ in layer.parameters()):
        raise ValueError(f"WHAT: expected layers with parameters, got none from {what!r}")
    return Outline(
        _layers_of_modules(named),
        modules=list(named.values()),
        sequential=isinstance(made, nn.Sequential),
        preparation=preparation,
    )


def _layers_of_modules(named: dict[str, nn.Module]) -> list[Layer]:
    seen: set[int] = set()
    layers = []
    for name, module in named.items():
        own, borrowed = list[ParameterShape](), list[ParameterShape]()
        for path, p in module.named_parameters():
            shape = ParameterShape(f"{name}.{path}", tuple(p.shape), p.dtype, p.requires_grad)
            (borrowed if id(p) in seen else own).append(shape)
            seen.add(id(p))
        layers.append(Layer(name, tuple(own), tuple(borrowed)))
    return layers


def _outline_of_module(module: nn.Module, what: str) -> Outline:
    shapes = [ParameterShape(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in module.named_parameters()]
    if not shapes:
        raise ValueError(f"WHAT: expected layers with parameters, got none from {what!r}")
    kind = type(module).__name__
    try:
        layers = layers_by_name(shapes)
    except ValueError as error:
        raise ValueError(f"WHAT: {what!r}: {error}") from error
    return Outline(
        layers,
        [f"{what} returned a {kind}, not an nn.Sequential or a list of layers, so its blocks are taken as layers"],
    )


def names_of_layers(outline: Outline) -> str:
    """The layers that a constructor expects, in order, in a few words."""
    words = []
    for _, name, number, count in _runs(outline.layers):
        if count > 1:
            words.append(f"{name}{number} to {number + count - 1}")
        else:
            words.append(name if re.fullmatch(r"[\w. +-]+", name) else repr(name))
    return ", ".join(words)
