"""Checks and normalises the arguments of ``OffloadModel``, before any layer is changed."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from offload.forms.quantised import StoredTensor, stored_tensors
from offload.forms.weight_forms import WeightForm, weight_form_of
from offload.partition import aligned
from offload.storage import DiskHome
from offload.streaming.slices import layout
from pipe.refusals import beyond_layers

__all__ = [
    "check_choices",
    "check_gradient_dtype",
    "check_separate",
    "compute_device",
    "layer_bytes",
    "layers_of",
    "resident_parameters",
    "stored_form",
]


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Names and modules of the layers."""
    if isinstance(model, nn.ModuleList):
        return {str(k): module for k, module in enumerate(model)}
    if not isinstance(model, nn.Sequential):
        raise TypeError(f"expected an nn.Sequential or a list of modules, got {type(model).__name__} (model)")
    if not len(model):
        raise ValueError("expected a model with at least one layer, got an empty nn.Sequential")
    own = " and ".join(name for name in beyond_layers(model) if name != "hooks")
    if own:
        raise TypeError(
            f"expected an nn.Sequential that only calls its layers, got {type(model).__name__} with {own} of its "
            f"own (model), which would be ignored; make them layers, or pass [model] for a single shard"
        )
    return {name: layer for name, layer in model._modules.items() if layer is not None}


def check_separate(stored: Iterable[StoredTensor]) -> None:
    """Raises ValueError if different parameters share memory: their homes would not.

    Quantised parameters may: they are frozen.
    """
    ends: dict[int, list[tuple[int, int, str]]] = {}
    for parameter, name in {each.parameter: each.name for each in stored if each.part_of is None}.items():
        if parameter.layout is torch.strided and parameter.numel() and not parameter.is_meta:
            begin = parameter.data_ptr()
            span = sum((n - 1) * stride for n, stride in zip(parameter.shape, parameter.stride(), strict=True)) + 1
            storage = parameter.untyped_storage().data_ptr()
            ends.setdefault(storage, []).append((begin, begin + span * parameter.element_size(), name))
    for members in ends.values():
        members.sort()
        for (_, end, name), (begin, _, other) in itertools.pairwise(members):
            if begin < end:
                raise ValueError(
                    f"parameters {name} and {other} share memory, but are not the same nn.Parameter; their homes would "
                    f"not be shared: tie them by assigning one Parameter to both modules"
                )


def check_choices(num_slices: int | None, num_microbatches: int, param_dtype: torch.dtype | None) -> None:
    """Checks types and ranges of the arguments of the same names."""
    if param_dtype is not None and not (isinstance(param_dtype, torch.dtype) and param_dtype.is_floating_point):
        raise TypeError(f"expected a floating-point torch.dtype, got param_dtype={param_dtype!r}")
    if type(num_microbatches) is not int or num_microbatches < 1:
        raise ValueError(f"expected an integer of at least 1, got num_microbatches={num_microbatches!r}")
    if num_slices is not None and (not isinstance(num_slices, int) or isinstance(num_slices, bool)):
        raise TypeError(f"expected the number of shards, or None, got num_slices={num_slices!r}")


def check_gradient_dtype(gradient_dtype: torch.dtype | None, *, accumulates: bool) -> None:
    """Checks the type in which gradients are stored, and whether they may be added up in it."""
    if not isinstance(accumulates, bool):
        raise TypeError(f"expected True or False, got accumulate_in_gradient_dtype={accumulates!r}")
    if gradient_dtype is None:
        if accumulates:
            raise ValueError("accumulate_in_gradient_dtype=True needs gradient_dtype=torch.bfloat16, got None")
        return
    if not isinstance(gradient_dtype, torch.dtype):
        raise TypeError(f"expected torch.bfloat16 or None, got gradient_dtype={gradient_dtype!r}")
    if gradient_dtype != torch.bfloat16:
        raise ValueError(
            f"expected torch.bfloat16 or None (the parameters' own type), got gradient_dtype={gradient_dtype}: float16 "
            f"would overflow, and other types store no fewer bytes"
        )


def resident_parameters(
    layers: Mapping[str, nn.Module],
    patterns: str | Sequence[str] | None,
    offload_device: object,
    outside: Collection[str],
) -> set[nn.Parameter]:
    """The parameters whose names match one of the shell ``patterns``. Those named ``outside`` of layers stay anyway.

    Raises TypeError or ValueError for something else than patterns, one that matches nothing, or parameters that
    cannot stay: quantised ones, those on the meta device, and all if ``offload_device`` is a home that is kept.
    """
    if patterns is None:
        return set()
    patterns = [patterns] if isinstance(patterns, str) else patterns
    if not isinstance(patterns, Sequence) or not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"expected patterns of parameter names such as '*.lora_*', got resident={patterns!r}")
    found: set[nn.Parameter] = set()
    stored = stored_tensors(layers.items())
    for pattern in patterns:
        matched = [each for each in stored if fnmatchcase(each.name, pattern)]
        if not matched and not any(fnmatchcase(name, pattern) for name in outside):
            raise ValueError(
                f"expected patterns of parameter names, such as {stored[0].name if stored else '0.weight'!r}, got "
                f"resident={pattern!r}, which matches none of them"
            )
        for each in matched:
            if each.part_of is not None or each.parameter.is_meta:
                what = "on the meta device" if each.part_of is None else "quantised"
                raise ValueError(f"parameter {each.name} is {what}, and cannot stay on the compute device (resident)")
            found.add(each.parameter)
    if isinstance(offload_device, DiskHome) and offload_device.keep:
        raise ValueError(
            f"expected DiskHome(keep=False) with resident={patterns!r}, got keep=True: a kept home would not hold "
            f"these parameters; use save_checkpoint and load_checkpoint"
        )
    return found


def stored_form(
    store_dtype: object,
    stored: Sequence[StoredTensor],
    resident: set[nn.Parameter],
    layers: Iterable[nn.Module],
    offload_device: object,
) -> WeightForm | None:
    """The form in which homes store weights, without ``resident`` ones; None: as they are.

    Raises TypeError or ValueError for a form that is none, that no parameter of ``layers`` could have, or that cannot
    be combined with them or with the home.
    """
    form = weight_form_of(store_dtype)
    if form is None:
        return None
    if isinstance(offload_device, DiskHome) and offload_device.keep:
        raise ValueError(
            f"expected DiskHome(keep=False) with store_dtype={store_dtype!r}, got keep=True: a kept home describes one "
            f"file of weights as they are; use save_checkpoint and load_checkpoint"
        )
    streamed = [each.parameter for each in stored if each.part_of is None and each.parameter not in resident]
    if not any(map(form.stores, streamed)):
        raise ValueError(
            f"expected float32 parameters with store_dtype={store_dtype!r}, got none that stream; leave it out, or "
            f"convert the layers first: model.float()"
        )
    sparse = next((m for layer in layers for m in layer.modules() if getattr(m, "sparse", None) is True), None)
    if sparse is not None:
        raise ValueError(
            f"expected dense gradients with store_dtype={store_dtype!r}, got {type(sparse).__name__} with sparse=True: "
            f"weights are decoded and stored as a whole; make it with sparse=False"
        )
    return form


def layer_bytes(
    layers: Sequence[nn.Module],
    dtype: torch.dtype | None = None,
    *,
    trainable: bool = False,
    form: WeightForm | None = None,
) -> list[int]:
    """Bytes of each layer, floating-point parameters as ``dtype``; a tied one counts in every layer that uses it.

    ``trainable``: only parameters that take a gradient. ``form``: in which homes store them.
    """
    found = []
    for layer in layers:
        stored = (each for each in stored_tensors([("", layer)]) if each.parameter.requires_grad or not trainable)
        slices, nbytes = layout(stored, dtype, form)
        lower = (aligned(s.nbytes) for s in slices if s.form is not None and s.form.exact)
        found.append(nbytes + sum(lower))
    return found


def compute_device(device: Any) -> torch.device:
    """The device to compute on, with its index."""
    if isinstance(device, int) and not isinstance(device, bool):
        device = f"cuda:{device}"  # torch.device(0) raises without an accelerator
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise TypeError(f"expected a device such as 'cpu', 'cuda:0' or 0, got device={device!r}") from error
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device={str(chosen)!r}, but this machine has no CUDA device; pass device='cpu'")
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    elif chosen.type != "cpu":
        raise ValueError(f"expected a CPU or CUDA device to compute on, got device={str(chosen)!r}")
    return chosen
