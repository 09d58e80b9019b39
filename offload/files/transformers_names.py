"""Maps the names of tensors in a checkpoint of transformers to those of the model, as that library's loading does.

Checkpoints have the names of the release that first wrote them (``LayerNorm.gamma``), and ``save_pretrained`` writes
those again. transformers renames tensors while it reads them. For some families it also merges, splits or transposes
tensors, which is refused here, since each is read straight into its home.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from offload.files.pretrained import KeyMap

__all__ = ["keep_wide", "names_of_transformers"]

#: Buffers that older releases stored. transformers skips them for models that have one of the same name.
_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def names_of_transformers(model: nn.Module, stored: Collection[str]) -> KeyMap:
    """Maps ``stored`` names to those of ``model``, or to None for tensors that transformers skips.

    Names of models that are not of transformers stay as they are.

    Raises ValueError if transformers would convert the values of some tensors.
    """
    names = {*model.state_dict(keep_vars=True)}
    prefix = getattr(model, "base_model_prefix", None)
    begin = f"{prefix}." if isinstance(prefix, str) and prefix else ""
    renamed = _renamed(model, stored, names, begin)
    found = dict(zip(renamed, _with_prefix(list(renamed.values()), names, begin), strict=True))
    ignored = [*(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())]
    ignored += [pattern for pattern in _BUFFERS if any(re.search(pattern, name) for name, _ in model.named_buffers())]

    def key_map(name: str) -> str | None:
        new = found.get(name, name)
        skipped = ignored and new is not None and new not in names and any(re.search(p, new) for p in ignored)
        return None if skipped else new

    return key_map


def _renamed(model: nn.Module, stored: Collection[str], names: set[str], begin: str) -> Mapping[str, str]:
    """The name of each stored tensor in the present release, which may lack the prefix of the base model."""
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping: Any = importlib.import_module("transformers.conversion_mapping")
        transforms = mapping.get_model_conversion_mapping(model) if hasattr(model, "base_model_prefix") else []
    except ImportError:  # not installed, or of a release that does not rename
        transforms = []
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]

    def fits(name: str) -> bool:
        return not names.isdisjoint((name, begin + name, name.removeprefix(begin)))

    found, converted = {}, []
    for name in sorted(stored):  # some renamings begin at the name that is the first of several
        new, pattern = loading.rename_source_key(name, renamings, converters) if transforms else (name, None)
        if not fits(new) and fits(name):
            new, pattern = name, None
        found[name] = new
        converted += [name] if pattern is not None and fits(new) else []
    if converted:
        more = f" and {len(converted) - 3} more" if len(converted) > 3 else ""
        raise ValueError(
            f"transformers converts the values of {', '.join(converted[:3])}{more} while it reads them (it merges "
            f"experts, for example), and nothing was loaded: each tensor is read straight into its home. Convert the "
            f"files once: {type(model).__name__}.from_pretrained(path).save_pretrained(other, "
            f"save_original_format=False); or pass key_map= for names that need no conversion"
        )
    return found


def _with_prefix(stored: Collection[str], names: set[str], begin: str) -> list[str | None]:
    """The names in the model, where only one of the two has a head around the base model.

    Models of transformers name the base model inside of one with a head: ``base_model_prefix``. From a checkpoint with
    a head a base model takes what is below the prefix, and the head is skipped.
    """
    headed = begin and any(name.startswith(begin) for name in names)
    if not begin or headed == any(name.startswith(begin) for name in stored):
        return [*stored]
    if headed:
        return [name if name in names else begin + name for name in stored]
    return [name.removeprefix(begin) if name.startswith(begin) or name in names else None for name in stored]


def keep_wide(model: nn.Module, dtype: torch.dtype) -> None:
    """Gives parameters and buffers float32 that transformers keeps in it where a model is loaded as ``dtype``."""
    plan_of: Any = getattr(model, "_get_dtype_plan", lambda dtype: {})
    plan: Mapping[str, torch.dtype] = plan_of(dtype)
    patterns = [(re.compile(pattern.replace("*", ".*")), wide) for pattern, wide in plan.items()]
    for path, module in model.named_modules():
        for members in (module._parameters, module._buffers) if patterns else ():
            for key, tensor in members.items():
                wide = next((w for pattern, w in patterns if pattern.search(f"{path}.{key}".lstrip("."))), None)
                if tensor is not None and wide is not None and tensor.is_floating_point():
                    tensor.data = tensor.data.to(wide)
