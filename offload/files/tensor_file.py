"""Reads and writes safetensors files, one tensor at a time.

The format is a length, a header in JSON and the bytes. The ``safetensors`` package needs all tensors at
once to write them, and maps whole files privately to read them; the tests exchange files with it.

Guarantees
    * Writing needs memory for one tensor at most, and for one window if it is dense and on the host.
    * When :func:`write_tensors` returns, the bytes are on the disk; when it raises, there is no file.
    * What is summed is what is written, also of a tensor that another thread writes meanwhile.
    * A file whose header is inconsistent, leaves gaps between tensors, or does not match the file's length, is refused
      when it is opened: by a ValueError that names it.
    * :meth:`TensorFile.read_into` needs memory for one window, and none where types and layouts agree.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.files.untrusted import MOST_BYTES, WINDOW_BYTES, new_file, open_regular, sum_of
from offload.progress import progress
from offload.storage.buffer import empty_on_host, view_memory
from offload.storage.contract import bytes_of
from offload.storage.transfer import move_all
from offload.streaming.stored_values import StoredValues, stored_values

__all__ = ["ChecksumError", "TensorFile", "check_sum", "write_tensors"]

_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}

#: The data begins at a multiple of this, so that mapped tensors are aligned.
_ALIGNMENT = 64


class ChecksumError(ValueError):
    """The bytes of a file are not those that were written."""


def check_sum(path: Path, expected: str, fd: int | None = None) -> None:
    """Raises ChecksumError unless a file (open as ``fd``) has the size and checksum noted when it was written."""
    if (found := sum_of(path, fd)) != expected:
        raise ChecksumError(
            f"{path}: the bytes are not those that were written ({found}, expected {expected}), and none of them was "
            f"loaded. Restore the file from a copy, or load another checkpoint"
        )


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | StoredValues], metadata: Mapping[str, str] | None = None
) -> str:
    """Writes a new file of ``tensors``, on any device and with any strides, and waits until it is on the disk.

    ``metadata``: further strings for the header. Returns size and checksum. Raises ValueError if the format does not
    support a type, OSError if the file exists or cannot be written.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise ValueError(f"expected a dense tensor of a type that safetensors knows, got {tensor.dtype} ({name})")
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    end = 0
    # Wide types first: the format allows no gaps, and so every tensor is aligned to its type.
    for name in sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize):
        begin, end = end, end + tensors[name].nbytes
        kind, shape = _NAMES[tensors[name].dtype], list(tensors[name].shape)
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    with new_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in progress([*header][1:], f"saving {path.name}"):
            flat = bytes_of(tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous())
            for part in flat.split(WINDOW_BYTES) if flat.numel() else ():
                # Without the copy, a thread that trains changes the bytes between the sum and the write.
                copy = part.clone()
                file.write(view_memory(copy))
    return file.sum


def _windows(tensor: Tensor, most: int) -> Iterator[Tensor]:
    """Splits a tensor into views of at most ``most`` elements, in the order of the file."""
    if tensor.numel() <= most:
        yield tensor
        return
    rows = max(1, most // tensor[0].numel())
    for part in tensor.split(rows):
        yield from _windows(part[0], most) if rows == 1 else (part,)


@torch.no_grad()
def _copy_part(destination: Any, whole: Tensor) -> None:
    """Copies to a DTensor the part of a whole tensor that this rank stores; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = destination.device_mesh, destination.placements
    destination.to_local().copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local())


class TensorFile:
    """Reads tensors of a safetensors file into memory, or maps them. Raises ValueError for another format.

    It reads the file that it was opened with, also if another one takes its name. ``expected``: its size and checksum,
    which are compared before the first tensor is read; None where they are not known.
    """

    def __init__(self, path: Path, expected: str | None = None) -> None:
        self.path, self._expected = path, expected
        self._fd = open_regular(path)
        weakref.finalize(self, os.close, self._fd)
        size = os.fstat(self._fd).st_size
        #: Shape and type of each tensor, and where it begins.
        self._entries: dict[str, tuple[Tensor, int]] = {}
        try:
            length = int.from_bytes(os.pread(self._fd, 8, 0), "little")
            if length > min(size, MOST_BYTES):
                raise ValueError(f"a header of {length:,} bytes in a file of {size:,}")
            header = json.loads(os.pread(self._fd, length, 8))
            self.metadata: dict[str, str] = header.pop("__metadata__", {})
            end = 8 + length
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                tensor = torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]], device="meta")
                places = [end - 8 - length, end - 8 - length + tensor.nbytes]
                if entry["data_offsets"] != places:
                    raise ValueError(f"{name} at {entry['data_offsets']}, expected {places}")
                self._entries[name], end = (tensor, end), end + tensor.nbytes
            if size != end:
                raise ValueError(f"{size:,} bytes, expected {end:,}")
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path}: expected a complete safetensors file, got a damaged one: {error}") from error
        self._bytes: Tensor | None = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return tuple(self._entries[name][0].shape)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._entries[name][0].dtype

    def verify(self) -> None:
        """Reads the file once and compares its checksum; later calls do nothing. Raises ChecksumError."""
        if self._expected is not None:
            check_sum(self.path, self._expected, self._fd)
            self._expected = None

    def read_into(self, name: str, destination: Tensor | StoredValues, *, window_bytes: int = WINDOW_BYTES) -> None:
        """Copies a tensor to ``destination``, of equal shape and any type, strides and device; increments its version.

        A contiguous host tensor of the same type is read without a copy, any other window by window. Raises
        ChecksumError, before anything is written, if the file is not as it was written; OSError, perhaps after a part,
        if it cannot be read. Of a DTensor the part of this rank is copied, once all is read.
        """
        self.verify()
        if hasattr(destination, "placements"):
            whole = torch.empty(self.shape(name), dtype=destination.dtype)
            self.read_into(name, whole)
            _copy_part(destination, whole)
            return
        assert tuple(destination.shape) == self.shape(name)
        stored = destination if isinstance(destination, StoredValues) else stored_values(destination)
        if stored is not None:
            stored.read_from(partial(self.read_into, name))
            return
        destination = destination.detach()
        dtype, position = self.dtype(name), self._entries[name][1]
        if destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous():
            try:
                self._read(bytes_of(destination), position)
            finally:
                # torch does not see this write. Without this, copies of the old values would count as current.
                if not destination.is_inference():
                    torch.autograd.graph.increment_version(destination)
        elif destination.numel():
            most = max(1, min(window_bytes // dtype.itemsize, destination.numel()))
            window = empty_on_host(torch.empty(most, dtype=dtype, device="meta"))
            for part in _windows(destination, most):
                piece = window[: part.numel()]
                self._read(piece.view(torch.uint8), position)
                part.copy_(piece.view(part.shape))
                position += part.numel() * dtype.itemsize

    def _read(self, flat: Tensor, position: int) -> None:
        """Reads at a position of the file; not by a private mapping, which counts as memory of the process."""
        if flat.numel():
            move_all(os.preadv, self._fd, view_memory(flat), position, self.path)

    def tensor(self, name: str) -> Tensor:
        """A tensor as a private mapping; its checksum is not compared, and writes to it do not reach the file."""
        if self._bytes is None:
            # Without the descriptor, another file could have the name by now.
            own, size = f"/proc/self/fd/{self._fd}", os.fstat(self._fd).st_size
            self._bytes = torch.from_file(own, shared=False, size=size, dtype=torch.uint8)
        like, begin = self._entries[name]
        part = self._bytes[begin : begin + like.nbytes]
        if begin % like.itemsize:
            part = part.clone()  # a file of another tool
        return part.view(like.dtype).view(like.shape)
