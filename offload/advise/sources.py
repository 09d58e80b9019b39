"""Finds the blocks of a model on the meta device: from a function, from a configuration, or from names in files."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.arguments import layers_of
from offload.blocks.find import lists_of_blocks
from offload.loading import build_model

__all__ = ["Source", "failing", "source_of"]

_KINDS = "the config.json of a transformers model, the directory of one, or module:function"
_OFFLOAD = "from offload import OffloadModel, OffloadOptimizer"


@dataclass
class Source:
    """A model on the meta device, and the Python that makes it."""

    #: Called with one input. Blocks are modules inside it, by name; each is a shard; small ones join if it ``merges``.
    model: nn.Module
    blocks: Mapping[str, nn.Module]
    merges: bool = False
    #: Lines before the one that makes the OffloadModel, what that calls and with which arguments first and last.
    lines: Sequence[str] = ("import torch", _OFFLOAD)
    made_by: str = "OffloadModel"
    given: str = "layers"
    named: str = ""
    #: What was assumed, each in a sentence.
    assumptions: list[str] = field(default_factory=list)

    @property
    def elements(self) -> int:
        """Parameters of the model; a tied one counts once."""
        return sum(p.numel() for p in self.model.parameters())


def source_of(what: str, dtype: torch.dtype) -> Source:
    """The model that the argument ``WHAT`` of the command line names: a path, or ``module:function``.

    ``dtype``: of floating-point parameters at home; a function decides for itself. Raises ValueError in one line, which
    names ``WHAT`` and says what to do.
    """
    path, (module, colon, function) = Path(what), what.partition(":")
    with failing(f"WHAT: {what!r}"):
        if path.exists():
            return _of_files(path, dtype)
        if colon and re.fullmatch(r"[\w.]+", module) and re.fullmatch(r"[\w.]+", function):
            return _of_function(module, function)
        raise ValueError(f"expected {_KINDS}, got what does not exist")


def _of_files(path: Path, dtype: torch.dtype) -> Source:
    """A model of transformers, on the meta device with its buffers."""
    folder = path if path.is_dir() else path.parent
    if not (folder / "config.json").is_file():
        raise ValueError(f"expected {_KINDS}, got one without a config.json; pass module:function")
    with failing("cannot be built by transformers on the meta device"), torch.device("meta"):
        model = build_model(folder, None, dtype)
    source, shown = _of_module(model), str(dtype)
    source.assumptions.append(f"parameters are stored as {shown.removeprefix('torch.')} (--stored-dtype)")
    kind, where = type(model).__name__, repr(os.fspath(folder))
    if path.name != "config.json" and any(folder.glob("*.safetensors")):
        source.made_by, source.given = "OffloadModel.from_pretrained", where
        source.named += f", dtype={shown}"
    else:
        call = f"{kind}._from_config(AutoConfig.from_pretrained({where}), dtype={shown})"
        source.lines = _lines(f"from transformers import AutoConfig, {kind}", call)
    return source


def _blocks(module: nn.Module) -> dict[str, str]:
    """The blocks of a model, and what ``blocks=`` calls them: members of its lists, and what is beside these."""
    lists = {name for name, _ in lists_of_blocks(module)}
    if not lists:
        raise ValueError(
            f"expected layers, or a model with a list of blocks, got a {type(module).__name__} without one"
        )
    around = {name[:end] for name in lists for end in range(len(name)) if name[end] == "."}
    found = {}
    for name, block in module.named_modules(remove_duplicate=False):
        parent = name.rpartition(".")[0]
        inside = parent in {"", *lists, *around} and name not in {"", *lists, *around}
        if inside and any(True for _ in block.parameters()):
            found[name] = parent if parent in lists else name
    return found


def _of_function(module_name: str, function_name: str) -> Source:
    if (here := os.getcwd()) not in sys.path:  # as with python -m
        sys.path.insert(0, here)
    with failing("cannot be imported"):
        function: Any = importlib.import_module(module_name)
        for part in function_name.split("."):
            function = getattr(function, part)
    with failing("cannot be called without arguments on the meta device, where nothing has values"):
        with torch.device("meta"):
            made = function()
    if isinstance(made, nn.Module) and not isinstance(made, (nn.Sequential, nn.ModuleList)):
        source = _of_module(made)
    else:
        listed = isinstance(made, (list, tuple)) and made and all(isinstance(each, nn.Module) for each in made)
        named = layers_of(nn.ModuleList(made) if listed else made)
        source = Source(nn.Sequential(*named.values()), named, merges=isinstance(made, nn.Sequential))
    if not any(True for _ in source.model.parameters()):
        raise ValueError("expected layers with parameters, got none")
    source.lines = _lines(f"from {module_name} import {function_name.partition('.')[0]}", f"{function_name}()")
    return source


def _lines(imported: str, call: str) -> Sequence[str]:
    """Lines that make the layers without memory for them."""
    return [
        "import torch",
        imported,
        f"{_OFFLOAD}, init_empty_weights",
        "with init_empty_weights():",
        f"    layers = {call}",
    ]


def _of_module(model: nn.Module) -> Source:
    """A model with a forward of its own."""
    blocks = _blocks(model)
    named = f", blocks={list(dict.fromkeys(blocks.values()))!r}"
    return Source(model, {name: model.get_submodule(name) for name in blocks}, named=named)


@contextlib.contextmanager
def failing(what: str) -> Iterator[None]:
    """A context in which any error becomes a ValueError of one line that begins with ``what``."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{what}: {next(iter(str(error).splitlines()), type(error).__name__)}") from error
