"""Slices: where each parameter is in the flat block of bytes that stores the parameters of a shard."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from offload.forms.quantised import StoredTensor
from offload.forms.weight_forms import WeightForm
from offload.partition import aligned
from offload.storage import Block
from offload.storage.buffer import host_buffer, on_own_storage
from offload.storage.contract import in_order
from pipe.torch_private.autograd import outside_inference_mode

__all__ = ["Slice", "layout", "read_converted"]

#: Bytes of a block that are read and converted at a time.
_WINDOW_BYTES = 8 << 20


@dataclass(frozen=True)
class Slice:
    """Offset and layout of one parameter in a flat block of bytes."""

    name: str
    parameter: nn.Parameter
    offset: int
    nbytes: int
    stride: tuple[int, ...]
    dtype: torch.dtype
    #: The quantised parameter of which :attr:`parameter` is a part.
    part_of: nn.Parameter | None = None
    #: Other tensors on the same memory.
    aliases: tuple[Tensor, ...] = ()
    #: How the parameter is stored, if not as it is: :attr:`dtype` is that of what loads read.
    form: WeightForm | None = None

    @property
    def full_dtype(self) -> torch.dtype:
        """The type of the parameter itself: of its gradient, and of what updates compute in."""
        return self.dtype if self.form is None else torch.float32

    @property
    def full_nbytes(self) -> int:
        """Bytes of the parameter in its own type."""
        return self.nbytes // self.dtype.itemsize * self.full_dtype.itemsize

    def like(self) -> Tensor:
        """A tensor without memory, of the parameter's own type and layout."""
        return torch.empty_strided(self.parameter.shape, self.stride, dtype=self.full_dtype, device="meta")

    def in_full(self, offset: int) -> Slice:
        """The place of a tensor of the same layout, in the parameter's own type, at an offset of another block."""
        return replace(self, offset=offset, nbytes=self.full_nbytes, dtype=self.full_dtype, form=None)

    def point_to(self, memory: Tensor) -> None:
        """Gives the parameter this memory."""
        self.parameter.data = memory
        for alias in self.aliases:
            alias.data = memory

    def check_data(self, data: Tensor, expected: torch.Size) -> None:
        """Raises ValueError if the size or type of ``data`` is not the stored one, or its shape not ``expected``."""
        shape, dtype = data.shape, data.dtype
        if dtype != self.dtype:
            raise ValueError(
                f"expected data of {self.dtype} for parameter {self.name}, got {dtype}; the type of a parameter is "
                f"fixed when the model is made: assign data.to({self.dtype}), or convert the layers before wrapping"
            )
        if shape.numel() * dtype.itemsize != self.nbytes or shape != expected:
            raise ValueError(
                f"expected data of {self.nbytes:,} bytes for parameter {self.name}, got shape {tuple(shape)}; the "
                f"shape of a parameter is fixed when the model is made"
            )

    def view(self, block: Tensor) -> Tensor:
        """The parameter's values in ``block`` (flat, uint8); no copy."""
        return self.view_at(block, self.offset, self.dtype)

    def view_at(self, block: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
        """A tensor of the parameter's layout and of this type at an offset of ``block`` (flat, uint8); no copy."""
        # Not an autograd view, which would reference its base: references to the storage of a block are counted.
        memory = torch.empty(0, dtype=dtype, device=block.device)
        begin = (block.storage_offset() + offset) // dtype.itemsize
        return memory.set_(block.untyped_storage(), begin, self.parameter.shape, self.stride)

    def own_view(self, block: Tensor) -> Tensor:
        """The same on a storage of its own, which begins and ends with the parameter, in the memory of ``block``.

        Code that saves tensors takes those of one storage for tied, or saves all of the storage with each.
        """
        if not self.nbytes:
            return self.view(block)
        with outside_inference_mode():
            alone = on_own_storage(block[self.offset : self.offset + self.nbytes])
            memory = torch.empty(0, dtype=self.dtype, device=block.device)
            return memory.set_(alone.untyped_storage(), 0, self.parameter.shape, self.stride)


def layout(
    stored: Iterable[StoredTensor | Slice], dtype: torch.dtype | None = None, form: WeightForm | None = None
) -> tuple[list[Slice], int]:
    """Packs parameters into one block, floating-point ones as ``dtype``; returns slices and the block's bytes.

    Parts of quantised parameters keep their type. ``form``: that in which parameters are stored that it can store.
    """
    slices, end = [], 0
    for each in stored:
        parameter = each.parameter
        # Dense strides (such as channels_last) are kept, since kernels choose their algorithm by them.
        stride = torch.empty_like(parameter, device="meta").stride()
        casts = dtype is not None and each.part_of is None and parameter.is_floating_point()
        own = each.full_dtype if isinstance(each, Slice) else parameter.dtype
        kind = dtype if dtype is not None and casts else own
        used = form if form is not None and each.part_of is None and form.stores(parameter) else None
        kind = kind if used is None else torch.bfloat16
        nbytes = parameter.numel() * kind.itemsize
        slices.append(Slice(each.name, parameter, end, nbytes, stride, kind, each.part_of, each.aliases, used))
        end += aligned(nbytes)
    return slices, end


def read_converted(block: Block, places: Sequence[tuple[Slice, Slice]], to: Tensor, *, in_file: bool) -> None:
    """Copies parameters of a block to other memory (flat, uint8), where they have other types.

    Args:
        block: from which they are read.
        places: of each parameter, in the block and in ``to``.
        to: on any device.
        in_file: a part is read and converted at a time: a copy of the block would take half as much memory as ``to``.
    """
    if not in_file:
        for there, here in places:
            here.view(to).copy_(there.view(block.tensor), non_blocking=True)
        return
    window = host_buffer(min(_WINDOW_BYTES, block.nbytes))
    for begin in range(0, block.nbytes, _WINDOW_BYTES):
        part = window[: min(_WINDOW_BYTES, block.nbytes - begin)]
        block.read_into(part, begin)
        for there, here in places:
            first, end = max(there.offset, begin), min(there.offset + there.nbytes, begin + part.numel())
            if first < end:
                itemsize = there.dtype.itemsize
                elements = slice((first - there.offset) // itemsize, (end - there.offset) // itemsize)
                in_order(here.view(to))[elements] = part[first - begin : end - begin].view(there.dtype)
