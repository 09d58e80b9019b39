"""``OffloadModel.from_pretrained``: a model larger than memory, from its configuration and safetensors files."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from offload.files.pretrained import KeyMap, Pretrained, tensors_of
from offload.meta_device.recipes import give_values, record, watch
from offload.storage.buffer import empty_on_host

__all__ = ["adapted", "build_model", "init_empty_weights", "names_of_transformers"]

#: Buffers that older releases stored. transformers skips them for models that have one of the same name.
_BUFFERS = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


def names_of_transformers(model: nn.Module, stored: Collection[str]) -> KeyMap:
    """Maps ``stored`` names to those of ``model``, or to None for tensors that transformers skips.

    Checkpoints have the names of the release that first wrote them (``LayerNorm.gamma``), and ``save_pretrained``
    writes those again. transformers renames tensors while it reads them. For some families it also merges, splits or
    transposes tensors, which is refused here, since each is read straight into its home. Names of models that are not
    of transformers stay as they are.

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


class _EmptyOnHost(TorchFunctionMode):
    """Layers make their weights by ``torch.empty`` and drop them once the parameters are on the meta device.

    What initialises those is recorded.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        on_host = func is torch.empty and kwargs.keys() <= {"dtype", "device", "requires_grad"}
        if on_host and torch.device(kwargs.get("device") or torch.get_default_device()).type == "cpu":
            meta: Tensor = func(*args, **kwargs | {"device": "meta"})
            return empty_on_host(meta).requires_grad_(meta.requires_grad)
        result = func(*args, **kwargs)
        record(func, args, kwargs, result)
        return result


@contextlib.contextmanager
def init_empty_weights() -> Iterator[None]:
    """A context in which modules are built with parameters on the meta device, and buffers with their values.

    Under ``torch.device("meta")`` buffers have no values either, and those that no checkpoint holds (rotary
    frequencies, position numbers) could not be computed again.

    Such a model takes no memory until ``OffloadModel(model, ..., pretrained=path)`` gives it a home. A parameter of
    which no file has the value is initialised there, by the calls that the code has made here. Concerns modules
    that this thread builds. Parameters of a subclass of ``nn.Parameter`` keep their memory.

    Source: accelerate's ``init_empty_weights(include_buffers=False)``.
    """
    thread, made = threading.get_ident(), WeakTensorKeyDictionary()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> Any:
        if type(parameter) is not nn.Parameter or parameter.is_meta or threading.get_ident() != thread:
            return None
        if parameter not in made:  # else it is tied
            made[parameter] = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            vars(made[parameter]).update(vars(parameter))
            watch(made[parameter])
        found: nn.Parameter = made[parameter]
        return found

    handle = register_module_parameter_registration_hook(to_meta)
    try:
        with _EmptyOnHost():
            yield
    finally:
        handle.remove()


def build_model(folder: Path, model: Callable[[], nn.Module] | None, dtype: torch.dtype | None) -> nn.Module:
    """The model that ``model`` makes, or a class of transformers for the configuration in ``folder``, without weights.

    See :meth:`offload.OffloadModel.from_pretrained`.
    """
    from_config: Any = getattr(model, "from_config", None) or getattr(model, "_from_config", None)
    if model is not None and from_config is None:
        if dtype is not None:
            raise ValueError(f"expected dtype=None beside a function, got dtype={dtype}; let model() choose the type")
        with init_empty_weights():
            return model()
    try:
        transformers: Any = importlib.import_module("transformers")
    except ImportError as error:
        raise ImportError(
            "the class of the model is one of transformers, which is not installed: pip install transformers, or pass "
            "model=, a function that builds the model"
        ) from error
    # Without this, transformers asks on the terminal whether to run code that comes with the weights.
    config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False)
    if from_config is None:
        names = config.architectures or []
        if len(names) != 1 or not hasattr(getattr(transformers, str(names[0]), None), "_from_config"):
            raise ValueError(
                f"expected one class of transformers as architectures in {folder / 'config.json'}, got {names}; pass "
                f"model=, a class such as transformers.AutoModel or a function that builds the model"
            )
        from_config = getattr(transformers, names[0])._from_config
    with init_empty_weights():
        built: Any = from_config(config) if dtype is None else from_config(config, dtype=dtype)
    if (folder / "generation_config.json").exists() and built.can_generate():
        built.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    keep_wide(built, built.dtype)
    made: nn.Module = built.eval()
    return made


def adapted(
    bare: nn.Module, weights: Pretrained, path: str | os.PathLike[str], adapt: Callable[[nn.Module], nn.Module]
) -> tuple[nn.Module, Pretrained]:
    """The model ``adapt(bare)``, and the ``weights`` by its names; what is in no file is initialised."""
    found = {tensor: stored.name for tensor, stored in weights.match({"": bare})[0].items()}
    with init_empty_weights():
        bare = adapt(bare)
    give_values(bare, other_than=found)
    names = {found[p]: name for name, p in tensors_of({"": bare}).items() if p in found}
    return bare, Pretrained(path, key_map=names.get, strict=False)  # what adapt() adds is in no file
