"""Forms in which optimizer states are stored between updates: in full, in bfloat16, or in 8 bits with scales.

A stored state is one or two plain tensors under names of their own, so that files, checkpoints and moves treat it as
any other state:

::

    form       state "exp_avg" of a float32 parameter of n elements        bytes
    full       exp_avg         float32, the parameter's shape              4 n
    bfloat16   exp_avg         bfloat16, the parameter's shape             2 n
    8 bits     exp_avg:8bit    uint8, the parameter's shape                n
               exp_avg:scales  float32, one for 256 elements               n / 64

States are encoded that have the type and the shape of their parameter, if it is a contiguous floating-point matrix (or
has more dimensions) of at least :data:`LEAST_ELEMENTS`. Others (norms, biases, counts of steps) are stored in full.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from offload.forms.weight_forms import WeightForm, pieces
from offload.optim import dynamic_map
from offload.optim.dynamic_map import BLOCK
from offload.storage.buffer import thread_memory
from offload.storage.contract import in_order

__all__ = [
    "FULL",
    "LEAST_ELEMENTS",
    "EncodedWeights",
    "StateForm",
    "check_stored",
    "copied",
    "elements_per_entry",
    "fitting_form",
    "form_of",
    "in_full",
    "step_encoded",
]

#: States of smaller parameters are stored in full, as bitsandbytes and torchao do.
LEAST_ELEMENTS = 4096

_CODES, _SCALES = ":8bit", ":scales"

#: Returns memory of a name for so many elements of a type, flat: that of the thread, or another each time.
Memory = Callable[[Hashable, int, torch.dtype], Tensor]


def elements_per_entry(name: str) -> int:
    """Elements of a parameter for each entry of a stored state of this name."""
    return BLOCK if name.endswith(_SCALES) else 1


def _scales_of(count: int) -> int:
    return -(-count // BLOCK)


@dataclass(frozen=True)
class StateForm:
    """How states are stored: in one tensor each, of a type of its own.

    The states of a parameter are a dict by name, as in ``optimizer.state[parameter]``.
    """

    name: str
    #: Bytes of a stored state for each element of its parameter.
    element_bytes: float
    #: Of the stored tensor; None: that of the parameter, and pieces are views of it.
    dtype: torch.dtype | None = None
    #: Elements that are stored together: which ones these are depends on where a state begins.
    together: int = 1

    def encodes(self, parameter: Tensor) -> bool:
        """Whether states of a parameter are stored in this form."""
        large = parameter.dim() > 1 and parameter.numel() >= LEAST_ELEMENTS and parameter.is_contiguous()
        return large and parameter.is_floating_point() and parameter.element_size() > self.element_bytes

    def share(self, dtype: torch.dtype) -> float:
        """Bytes of a stored state for each byte of a parameter of this type."""
        return min(1.0, self.element_bytes / dtype.itemsize)

    def allocate(self, key: str, like: Tensor) -> dict[str, Tensor]:
        """Memory of the stored state of a parameter, or of a part of it."""
        return {key: torch.empty_like(like, dtype=self.dtype, device="cpu")}

    def keys(self, state: Mapping[str, Any], parameter: Tensor) -> list[str]:
        """The names of the states of a parameter that are stored in this form."""
        return [key for key, value in state.items() if is_full(value, parameter, self.dtype)]

    def names(self, key: str) -> list[str]:
        """The names of the tensors that store a state."""
        return [key]

    def decoded(self, key: str, state: Mapping[str, Any], part: slice, dtype: torch.dtype, memory: Memory) -> Tensor:
        """The elements ``part``, flat, where they are or in ``memory``."""
        if self.dtype is None:
            return in_order(state[key])[part]
        values = memory(("state", key), part.stop - part.start, dtype)
        self.read(key, state, part, values)
        return values

    def read(self, key: str, state: Mapping[str, Any], part: slice, values: Tensor) -> None:
        """Decodes the elements ``part`` into values (flat)."""
        values.copy_(in_order(state[key])[part])

    def write(self, key: str, state: Mapping[str, Any], part: slice, values: Tensor) -> None:
        """Encodes values (flat) into the elements ``part``, which begins at a multiple of 256."""
        place = in_order(state[key])[part]
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)

    def encode(self, state: dict[str, Any], parameter: Tensor) -> None:
        """Replaces the states in full of a parameter that this form encodes."""
        for key in [key for key, value in state.items() if is_full(value, parameter)]:
            values = state.pop(key).detach().contiguous().view(-1)
            state.update(self.allocate(key, parameter))
            self.write(key, state, slice(0, values.numel()), values)


class _EightBits(StateForm):
    """States in 8 bits with scales: see :mod:`offload.optim.dynamic_map`."""

    def allocate(self, key: str, like: Tensor) -> dict[str, Tensor]:
        codes, scales = torch.empty(like.shape, dtype=torch.uint8), torch.empty(_scales_of(like.numel()))
        return dict(zip(self.names(key), (codes, scales), strict=True))

    def keys(self, state: Mapping[str, Any], parameter: Tensor) -> list[str]:
        return [name.removesuffix(_CODES) for name in state if name.endswith(_CODES)]

    def names(self, key: str) -> list[str]:
        return [key + _CODES, key + _SCALES]

    def write(self, key: str, state: Mapping[str, Any], part: slice, values: Tensor) -> None:
        dynamic_map.encode(values, *self._stored(key, state, part))

    def read(self, key: str, state: Mapping[str, Any], part: slice, values: Tensor) -> None:
        dynamic_map.decode(*self._stored(key, state, part), values)

    def _stored(self, key: str, state: Mapping[str, Any], part: slice) -> tuple[Tensor, Tensor]:
        codes, scales = (state[name] for name in self.names(key))
        return codes.view(-1)[part], scales[part.start // BLOCK : _scales_of(part.stop)]


#: States of parameters that are updated in pieces, and not encoded.
FULL = StateForm("full", math.inf)

_FORMS: dict[Any, StateForm] = {
    "8bit": _EightBits("8bit", 1 + 4 / BLOCK, torch.uint8, BLOCK),
    torch.bfloat16: StateForm("bfloat16", 2, torch.bfloat16),
}


def form_of(states: Any) -> StateForm | None:
    """The form that a user chose; None for states in full. Raises TypeError or ValueError for anything else."""
    if states is None:
        return None
    if not isinstance(states, (str, torch.dtype)):
        raise TypeError(f"expected None, torch.bfloat16 or '8bit', got {type(states).__name__} (states={states!r})")
    if states not in _FORMS:
        raise ValueError(f"expected None (states in full), torch.bfloat16 or '8bit', got states={states!r}")
    return _FORMS[states]


def is_full(value: Any, parameter: Tensor, dtype: torch.dtype | None = None) -> bool:
    """Whether a state has the type of its parameter, or the given one, and an element for each of its elements."""
    whole = isinstance(value, Tensor) and value.layout is torch.strided and value.shape == parameter.shape
    return whole and value.dtype == (dtype or parameter.dtype)


def in_full(state: Mapping[str, Any], parameter: Tensor) -> dict[str, Any]:
    """The states of a parameter in full, whatever form they have."""
    found = dict(state)
    for form in _FORMS.values():
        for key in form.keys(state, parameter):
            stored = {name: found.pop(name).contiguous() for name in form.names(key)}
            values = found[key] = torch.empty(parameter.shape, dtype=parameter.dtype)
            form.read(key, stored, slice(0, values.numel()), values.view(-1))
    return found


def fitting_form(
    state: Mapping[str, Any], parameter: Tensor, form: StateForm | None
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The states of a parameter for ``load_state_dict`` of ``torch.optim``, in full; and those that have the given form
    already, which that would cast."""
    others, kept = _split(state, parameter, form)
    return in_full(others, parameter), {name: value.contiguous() for name, value in kept.items()}


def check_stored(state: Mapping[str, Any], parameter: Tensor) -> None:
    """Raises ValueError for states in 8 bits that cannot be those of a parameter."""
    keys = dict.fromkeys(n.removesuffix(_CODES).removesuffix(_SCALES) for n in state if n.endswith((_CODES, _SCALES)))
    for key in keys:
        codes, scales = state.get(key + _CODES), state.get(key + _SCALES)
        fits = isinstance(codes, Tensor) and codes.dtype == torch.uint8 and codes.shape == parameter.shape
        size = (_scales_of(parameter.numel()),)
        if not (fits and isinstance(scales, Tensor) and scales.dtype == torch.float32 and scales.shape == size):
            raise ValueError(
                f"expected states {key + _CODES!r} of uint8 in shape {tuple(parameter.shape)} and {key + _SCALES!r} of "
                f"float32 in shape {size}, got {_described(codes)} and {_described(scales)}; nothing was loaded"
            )


def _described(value: Any) -> str:
    return f"{value.dtype} in shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)


@dataclass(frozen=True, eq=False)
class EncodedWeights:
    """The weights of one proxy where they are stored in a form: its parameter's, or a part of it; all flat."""

    form: WeightForm
    #: Of the parameter.
    name: str
    #: bfloat16; int16 or None.
    upper: Tensor
    lower: Tensor | None
    #: Type and layout of the weights.
    like: Tensor
    #: What decides how the result is rounded, beside the parameter: the step, and the first of the elements.
    step: int
    begin: int = 0
    #: The upper values as float32, in a slot, which are read from there and stored there as well.
    wide: Tensor | None = None

    def read(self, part: slice, memory: Memory) -> Tensor:
        """The values of the elements ``part``, in ``memory``."""
        values = memory("weights", part.stop - part.start, torch.float32)
        if self.wide is not None:
            self.upper[part] = self.wide[part]
        self.form.decode(self.upper[part], None if self.lower is None else self.lower[part], values)
        return values

    def write(self, part: slice, values: Tensor) -> None:
        """Stores the updated values of the elements ``part``; overwrites ``values``."""
        lower, begin = None if self.lower is None else self.lower[part], self.begin + part.start
        self.form.store(values, self.upper[part], lower, step=self.step, name=self.name, begin=begin)
        if self.wide is not None:
            self.wide[part] = self.upper[part]


def step_encoded(
    step: Callable[[], None],
    states: dict[Tensor, Any],
    proxies: Sequence[Tensor],
    encoded: Collection[int],
    form: StateForm | None,
    *,
    elementwise: bool,
    weights: Mapping[int, EncodedWeights],
) -> None:
    """Updates ``proxies`` (dense, contiguous where ``encoded``) that have a gradient, in one or more calls of ``step``.

    States and weights are decoded before, and encoded again afterwards: :data:`.PIECE` elements at a time if the class
    is ``elementwise``, that is updates each by itself. So states in full take no memory that counts, and they are still
    in the processor's cache when the update reads them.

    ``encoded``: positions of those with states in ``form``; before their first update they have none. Their ``states``
    have the same tensors afterwards, and new ones for new states. ``weights``: the values of those that are stored in a
    form, by position; the proxy itself has only their type and shape. After an exception states and weights are the
    tensors from before, though after the first call some of their elements may be new.
    """
    chosen = [k for k, p in enumerate(proxies) if (k in encoded or k in weights) and p.grad is not None]
    rest = FULL if elementwise else None
    all_encoded = [_Encoded(states, proxies[k], form if k in encoded else rest, weights.get(k)) for k in chosen]
    try:
        if not elementwise:
            for each in all_encoded:
                each.decode(each.all, lambda name, count, dtype: torch.empty(count, dtype=dtype))
            step()
            for each in all_encoded:
                each.encode(each.all)
                each.end()
            return
        for each in all_encoded:
            each.proxy.grad = None
        others = [p for p in proxies if p.grad is not None]
        if others:
            step()
        for p in others:
            p.grad = None  # they are updated, once
        for each in all_encoded:
            for part in pieces(each.all.stop):
                each.decode(part, thread_memory)
                step()
                each.encode(part)
            each.end()
    except BaseException:
        states.update((each.proxy, each.before) for each in all_encoded)
        raise


class _Encoded:
    """One parameter of an update: parts of it, flat, or all of it are decoded into its proxy, and encoded again."""

    def __init__(
        self, states: dict[Tensor, Any], proxy: Tensor, form: StateForm | None, weights: EncodedWeights | None
    ) -> None:
        assert proxy.grad is not None
        self.states, self.proxy, self.form, self.weights = states, proxy, form, weights
        self.whole, self.before, self.all = proxy.data, states[proxy], slice(0, proxy.numel())
        self.like = self.whole if weights is None else weights.like
        self.others, self.stored = _split(self.before, self.whole, form)
        self.keys = [] if form is None else form.keys(self.stored, self.whole)
        if form is FULL:
            self.stored.update((key, _laid_out(self.stored[key], self.like)) for key in self.keys)
        self.gradient = in_order(_laid_out(proxy.grad, self.like))

    def decode(self, part: slice, memory: Memory) -> None:
        weights = in_order(self.whole)[part] if self.weights is None else self.weights.read(part, memory)
        self.proxy.data = self._shaped(weights, part)
        self.proxy.grad = self._shaped(self.gradient[part], part)
        if self.form is not None:
            state = self.states[self.proxy] = copied(self.others)
            for key in self.keys:
                values = self.form.decoded(key, self.stored, part, self.whole.dtype, memory)
                state[key] = self._shaped(values, part)

    def _shaped(self, flat: Tensor, part: slice) -> Tensor:
        return flat.as_strided(self.like.shape, self.like.stride()) if part is self.all else flat

    def encode(self, part: slice) -> None:
        state = self.states[self.proxy]
        for key in [key for key, value in state.items() if self.form is not None and is_full(value, self.proxy)]:
            assert self.form is not None
            if self.form.names(key)[0] not in self.stored:
                self.stored.update(self.form.allocate(key, self.like))
            self.form.write(key, self.stored, part, state.pop(key).detach().contiguous().view(-1))
        if self.weights is not None:
            self.weights.write(part, in_order(self.proxy.data))

    def end(self) -> None:
        self.proxy.grad = None
        self.proxy.data = self.whole
        self.states[self.proxy].update(self.stored)


def _laid_out(dense: Tensor, like: Tensor) -> Tensor:
    """A tensor in the layout of another one of its shape."""
    if dense.stride() == like.stride():
        return dense
    return torch.empty_strided(like.shape, like.stride(), dtype=dense.dtype).copy_(dense)


def _split(
    state: Mapping[str, Any], parameter: Tensor, form: StateForm | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The states that are not in the form, and those that are."""
    names = [] if form is None else [name for key in form.keys(state, parameter) for name in form.names(key)]
    return {n: v for n, v in state.items() if n not in names}, {n: state[n] for n in names}


def copied(state: Mapping[str, Any], but: Container[str] = ()) -> dict[str, Any]:
    """A copy of the states of a parameter ``but`` some."""
    kept = {key: value for key, value in state.items() if key not in but}
    return {key: value.clone() if isinstance(value, Tensor) else copy.deepcopy(value) for key, value in kept.items()}
