"""``OffloadModel.from_pretrained``: a model larger than memory, from its configuration and safetensors files."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offload.files.empty_weights import build_model
from offload.files.pretrained import KeyMap, Pretrained
from offload.files.transformers_names import names_of_transformers
from offload.reports import ReportingModule

__all__ = ["LoadingModule"]

M = TypeVar("M", bound="LoadingModule")


class LoadingModule(ReportingModule):
    """The part of a model that makes it of files."""

    @classmethod
    def from_pretrained(
        cls: type[M],
        path: str | os.PathLike[str],
        device: torch.device | str | int,
        offload_device: torch.device | str | os.PathLike[str] = "cpu",
        *,
        model: Callable[[], nn.Module] | None = None,
        dtype: torch.dtype | None = None,
        key_map: KeyMap | None = None,
        strict: bool = True,
        **options: Any,
    ) -> M:
        """A model whose weights are read from safetensors files straight into their homes.

        The model is built without memory for its parameters; then each block is read into its home, and what is outside
        of the blocks onto the compute device. So construction needs memory for what is outside of the blocks, homes in
        host memory, and one shard. Buffers that no file holds have the values that the model gives them.

        Args:
            path: a directory with ``config.json`` and safetensors files, as ``save_pretrained`` of transformers writes
                it (``huggingface_hub.snapshot_download`` returns one); or, with a function ``model``, whatever
                :class:`~offload.Pretrained` takes.
            device, offload_device: of the :class:`~offload.OffloadModel`.
            model: a class of transformers, such as ``AutoModelForCausalLM``; or a function or class that builds any
                model without arguments. None: the class that ``config.json`` names (``architectures``).
            dtype: type of the parameters of a class of transformers; None: that of its configuration. Values are
                converted as they are read.
            key_map, strict: see :class:`~offload.Pretrained`. Without ``key_map``, names are mapped as transformers
                maps them: those of older releases, and where only the model or only the files have a head around a
                base model (``model.layers.0`` and ``layers.0``); the files' head is skipped then.
            options: further arguments of the :class:`~offload.OffloadModel`, such as ``blocks``.

        Returns:
            The model. One of a class of transformers is in evaluation mode, as that library's ``from_pretrained``
            leaves it: call ``train()``.

        Raises:
            FileNotFoundError, ValueError: see :class:`~offload.Pretrained`: every missing and unexpected name and every
                other shape is listed. Or if transformers would convert values as it loads (experts that it merges).
                Nothing was stored then.
            ImportError: if a class of transformers is needed and transformers is not installed.
        """
        bare = build_model(Path(path), model, dtype)
        if key_map is None:
            key_map = names_of_transformers(bare, [name for name, _, _ in Pretrained(path).headers()])
        pretrained = Pretrained(path, key_map=key_map, strict=strict)
        make: Callable[..., M] = cls
        return make(bare, device, offload_device, pretrained=pretrained, **options)
