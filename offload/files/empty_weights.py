"""Builds a model whose parameters take no memory, for a checkpoint that is read into their homes.

Under ``torch.device("meta")`` buffers have no values either, and those that no checkpoint holds (rotary frequencies,
position numbers) could not be computed again. Here only parameters are on the meta device.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from offload.files.transformers_names import keep_wide
from offload.storage.buffer import empty_on_host
from offload.streaming.recipes import record, watch

__all__ = ["build_model", "init_empty_weights"]


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
