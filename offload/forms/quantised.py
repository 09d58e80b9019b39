"""Takes quantised parameters apart into plain tensors, which shards store and load as bytes, like any parameter.

A quantised weight is not one plain tensor:

==================================================  ==============================================================
parameter                                           plain tensors
==================================================  ==============================================================
a tensor subclass with ``__tensor_flatten__``       those that it names, and those inside of these
(torchao)
a subclass of ``nn.Parameter`` (bitsandbytes)       its own bytes; tensors in its attributes; tensors in objects of
                                                    the same library that it or its module refers to
any other                                           itself
==================================================  ==============================================================

Home and slot give their memory to these tensors (``tensor.data = memory``), as they do to a parameter. So the parameter
stays the same object, and code that refers to its parts sees them where they are. Parts are frozen, and never cast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from pipe.torch_private.autograd import outside_inference_mode
from pipe.torch_private.dispatch import is_traceable_wrapper_subclass, no_subclasses

__all__ = [
    "StoredTensor",
    "check_frozen",
    "check_storable",
    "is_taken_apart",
    "is_wrapped",
    "part_names",
    "refresh",
    "separate",
    "state_in_parts",
    "stored_tensors",
    "with_parts",
]


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A plain tensor that a home stores: a parameter, or a part of a quantised one."""

    name: str
    #: The parameter, or the part: a plain tensor without a gradient.
    parameter: nn.Parameter
    #: The quantised parameter that this is a part of.
    part_of: nn.Parameter | None = None
    #: Other tensors on the same memory.
    aliases: tuple[Tensor, ...] = ()


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a part of a quantised parameter is: an attribute of ``holder``, or the parameter itself."""

    name: str
    tensor: Tensor
    holder: Any = None
    attribute: str = ""


def stored_tensors(layers: Iterable[tuple[str, nn.Module]]) -> list[StoredTensor]:
    """What homes store of some layers, in the order of a block: each parameter once, by its first name."""
    layers = list(layers)
    owners, names = _owners(layer for _, layer in layers), dict[nn.Parameter, str]()
    for prefix, layer in layers:
        names.update((p, name) for name, p in layer.named_parameters(prefix))
    found = []
    for p in names:
        groups = _grouped(_places(p, owners[p]))
        for first, *others in groups:
            name = ".".join(filter(None, (names[p], first.name)))
            aliases = tuple(place.tensor for place in others)
            found.append(StoredTensor(name, cast(nn.Parameter, first.tensor), p, aliases))
        if not groups:
            found.append(StoredTensor(names[p], p))
    return found


def is_taken_apart(parameter: nn.Parameter, owners: Sequence[nn.Module] = ()) -> bool:
    """Whether a parameter of the modules ``owners`` is not one plain tensor."""
    return bool(_places(parameter, owners))


def part_names(module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The parts of each quantised parameter of a module, by its name; an empty name is the parameter's own bytes."""
    owners, named = _owners([module]), module.named_parameters(remove_duplicate=False)
    found = ((name, _grouped(_places(p, owners[p]))) for name, p in named)
    return {name: {first.name: first.tensor for first, *_ in groups} for name, groups in found if groups}


def check_storable(
    parameters: Iterable[tuple[str, nn.Parameter]], modules: Iterable[nn.Module], device: torch.device
) -> None:
    """Raises TypeError for parameters of ``modules`` that are no dense tensors, and cannot be taken apart into such."""
    owners = _owners(modules)
    for name, p in parameters:
        _check(name, p, owners[p], device)


def check_frozen(names: Mapping[nn.Parameter, str]) -> None:
    """Raises RuntimeError if one of these quantised parameters takes a gradient."""
    trained = [name for p, name in names.items() if p.requires_grad]
    if trained:
        raise RuntimeError(
            f"quantised parameters ({', '.join(trained[:3])}) require gradients, which are not supported: their parts "
            f"are stored as bytes; call requires_grad_(False), and train adapters"
        )


def state_in_parts(module: nn.Module) -> dict[str, Any]:
    """The ``state_dict()`` of a module, with the parts of quantised parameters in place of what their library saves.

    A library may pack numbers into an entry that is made anew by each call, so that nothing could be loaded into it.
    """
    state = dict(module.state_dict())
    for name, parts in part_names(module).items():
        for key in [key for key in state if key == name or key.startswith(f"{name}.")]:
            del state[key]
        state.update((f"{name}.{part}" if part else name, tensor.detach()) for part, tensor in parts.items())
    return state


def _check(name: str, p: nn.Parameter, owners: Sequence[nn.Module], device: torch.device) -> None:
    kind = type(p).__name__
    if kind == "DTensor":
        raise TypeError(
            f"expected dense parameters, got a DTensor ({name}); wrap the module before it is distributed, or the "
            f"local parts (p.to_local())"
        )
    if p.layout is not torch.strided:
        raise TypeError(f"expected dense parameters, got one of layout {p.layout} ({name}); densify it")
    if _waits_for_quantisation(p):
        raise TypeError(
            f"expected quantised weights with values, got a {kind} that is quantised when it is moved to a device "
            f"({name}); move the model first: model.to({str(device)!r})"
        )
    try:
        places = _places(p, owners)
        reason = next((reason for place in places if (reason := _trouble(place)) is not None), None)
    except Exception as error:
        places, reason = [_Place("", p)], f"taking it apart raised {type(error).__name__}: {error}"
    if reason is not None:
        raise TypeError(
            f"expected dense parameters, or quantised ones that can be taken apart into dense tensors, got a {kind} "
            f"({name}): {reason}; wrap the module before its parameters are converted"
        )
    if places and p.requires_grad:
        raise TypeError(
            f"expected quantised parameters that are frozen, got a trainable {kind} ({name}): its parts are stored as "
            f"bytes, and have no gradients; call requires_grad_(False), and train adapters"
        )
    if places and device.type == "cpu" and any(getattr(m, "support_avx512bf16_for_cpu", False) for m in owners):
        raise TypeError(
            f"{name} would be packed anew by its layer in evaluation on this CPU (AVX512-BF16), into other memory than "
            f"its home; turn that off for all Linear4bit modules: module.support_avx512bf16_for_cpu = False"
        )


def _trouble(place: _Place) -> str | None:
    """Why a part cannot be stored, or None."""
    x = place.tensor
    if x.layout is not torch.strided or x.is_nested:
        return f"its {place.name} is a {type(x).__name__} of layout {x.layout}"
    if x.is_meta:
        return f"its {place.name} is on the meta device"
    if x.requires_grad and place.holder is not None:
        return f"its {place.name} requires a gradient"
    if place.holder is not None:
        if getattr(place.holder, place.attribute) is not x:
            return f"its attribute {place.name} is another tensor at each access"
        setattr(place.holder, place.attribute, x)
        if getattr(place.holder, place.attribute) is not x:
            return f"its attribute {place.name} cannot be set"
    return None


def _waits_for_quantisation(p: nn.Parameter) -> bool:
    """Whether bitsandbytes has not quantised this parameter yet."""
    packed, whole = getattr(p, "bnb_quantized", None), getattr(p, "has_fp16_weights", None)
    return packed is False or (whole is False and p.is_floating_point())


def separate(modules: Iterable[nn.Module]) -> None:
    """Gives each quantised parameter tensors of its own on the same memory: a library may share tables among many."""
    for p, owners in _owners(modules).items():
        own: dict[int, Tensor] = {}
        for place in _places(p, owners):
            if place.holder is not None:
                if id(place.tensor) not in own:
                    own[id(place.tensor)] = _on_same_memory(place.tensor)
                setattr(place.holder, place.attribute, own[id(place.tensor)])


def _on_same_memory(tensor: Tensor) -> Tensor:
    with outside_inference_mode():
        new = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return new.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def is_wrapped(tensor: Tensor) -> bool:
    """Whether a tensor is of a subclass that consists of other tensors."""
    return is_traceable_wrapper_subclass(tensor) and not tensor.is_nested


def with_parts(tensor: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """A tensor of a subclass, rebuilt from the results of ``function`` for its plain parts."""
    names, context = tensor.__tensor_flatten__()
    parts = {name: getattr(tensor, name) for name in names}
    made = {name: with_parts(x, function) if is_wrapped(x) else function(x) for name, x in parts.items()}
    return type(tensor).__tensor_unflatten__(made, context, tensor.size(), tensor.stride())


def refresh(parameter: Any) -> None:
    """Makes a quantised parameter report the device where its parts are now."""
    if not is_wrapped(parameter):
        return
    with no_subclasses():
        names, context = parameter.__tensor_flatten__()
        parts = {name: getattr(parameter, name) for name in names}
        for part in parts.values():
            refresh(part)
        places = [part.device for part in parts.values()]
        if places and parameter.device != places[0]:
            # The shape, type and device of a subclass are in its own tensor, which has no memory.
            unflattened = type(parameter).__tensor_unflatten__(parts, context, parameter.size(), parameter.stride())
            parameter.data = unflattened


# --- taking apart -----------------------------------------------------------------------------------------------------


def _owners(modules: Iterable[nn.Module]) -> dict[nn.Parameter, list[nn.Module]]:
    """The modules that have each parameter."""
    found: dict[nn.Parameter, list[nn.Module]] = {}
    for module in dict.fromkeys(m for each in modules for m in each.modules()):
        for p in module._parameters.values():
            if p is not None:
                found.setdefault(p, []).append(module)
    return found


def _places(p: nn.Parameter, owners: Iterable[nn.Module]) -> list[_Place]:
    """The parts of a quantised parameter; none for one that is a plain tensor."""
    if type(p) is nn.Parameter or hasattr(p, "placements"):  # a DTensor consists of another tensor as well
        return []
    if is_wrapped(p):
        return list(_inner(p, ""))
    library = _library(p)
    if library == "torch":
        return []
    found: list[_Place] = []
    seen: set[int] = set()
    _search(p, "", library, found, seen)
    if p.requires_grad:  # Other code may attach tensors to a trainable parameter. They are not parts of its value.
        found = [place for place in found if place.holder is not p]
    memory = {place.tensor.data_ptr() for place in (_Place("", p), *found)}
    for module in owners:
        for value in vars(module).values():
            if _is_of(value, library):
                more: list[_Place] = []
                _search(value, "", library, more, seen)
                # A layer may have taken over what the parameter had.
                found += more if any(place.tensor.data_ptr() in memory for place in more) else ()
    return [_Place("", p), *found] if found else []


def _inner(tensor: Any, prefix: str) -> Iterator[_Place]:
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        part = getattr(tensor, name)
        if is_wrapped(part):
            yield from _inner(part, f"{prefix}{name}.")
        else:
            yield _Place(prefix + name, part, tensor, name)


def _search(holder: Any, prefix: str, library: str, found: list[_Place], seen: set[int]) -> None:
    """Finds the tensors in attributes of an object, and of objects of the same library that it refers to."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    for name, value in vars(holder).items():
        if isinstance(value, Tensor):
            found.append(_Place(prefix + name, value, holder, name))
        elif _is_of(value, library):
            _search(value, f"{prefix}{name}.", library, found, seen)


def _library(value: Any) -> str:
    return type(value).__module__.partition(".")[0]


def _is_of(value: Any, library: str) -> bool:
    """Whether a value is a plain object of a library: no module, tensor, function or class."""
    return (
        _library(value) == library
        and hasattr(value, "__dict__")
        and not isinstance(value, (nn.Module, Tensor, type))
        and not callable(value)
    )


def _grouped(places: Iterable[_Place]) -> list[list[_Place]]:
    """Parts by their memory: tensors on the same memory are stored once."""
    groups: dict[object, list[_Place]] = {}
    for place in places:
        x = place.tensor
        shared = (x.data_ptr(), x.dtype, tuple(x.shape), x.stride(), x.device)
        group = groups.setdefault(shared if x.numel() and not x.is_meta else id(x), [])
        if all(other.tensor is not x for other in group):
            group.append(place)
    return list(groups.values())
