"""Reads and writes safetensors files with checksums, one tensor at a time.

The format is a length, a header in JSON and the bytes. The ``safetensors`` package needs all tensors of a file
contiguous on the host at once, and would be a third dependency, for forty lines; the tests exchange files with it.

Guarantees
    * Writing needs memory for one tensor at most, and for one window if it is dense and on the host.
    * When :func:`write_tensors` returns, the bytes are on the disk; when it raises, there is no file.
    * A file of :func:`write_tensors` holds a checksum of each tensor with its name, type and shape. Every read of a
      whole tensor compares it. Files of other tools have none, and are read without.
    * A file whose header is inconsistent, leaves gaps between tensors, or does not match the file's length, is refused
      when it is opened: by a ValueError, whatever the file holds (see :mod:`offload.files.untrusted`).
    * What is summed is what is written, also of a tensor that another thread writes meanwhile.
    * :meth:`TensorFile.read_into` needs memory for one window, and none where types and layouts agree.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from offload.files.untrusted import MOST_BYTES, naming, open_regular, parse_object, read_at, shown
from offload.progress import progress
from offload.storage.buffer import empty_on_host, view_memory
from offload.storage.contract import bytes_of
from offload.storage.transfer import move_all
from offload.streaming.stored_values import StoredValues, stored_values

__all__ = ["SAVE", "ChecksumError", "TensorFile", "check_plain", "write_all", "write_tensors"]

_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.bool: "BOOL",
}
_TYPES = {name: dtype for dtype, name in _NAMES.items()}

#: The data begins at a multiple of this, so that mapped tensors are aligned.
_ALIGNMENT = 64

#: Bytes read, written and summed at a time.
WINDOW_BYTES = 4 << 20

#: Key of the checksums in the header's metadata: a JSON object of tensor names and eight hexadecimal digits.
SUMS = "gradstream_crc32"

#: Key of the identity of the save that wrote a file, in the header's metadata.
SAVE = "gradstream_save"

#: More dimensions than any operation of torch takes.
_MOST_DIMENSIONS = 64

#: Advice for a damaged file.
_ADVICE = "Restore the file from a copy, or load another checkpoint"


class ChecksumError(ValueError):
    """The bytes of a tensor are not those that were written."""


class _Entry(NamedTuple):
    """A tensor in a header."""

    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES[self.kind]

    def begin_sum(self, name: str) -> int:
        """A checksum of the tensor's name, type and shape, to which its bytes are added."""
        return zlib.crc32(json.dumps([name, self.kind, self.shape]).encode())


def write_tensors(
    path: Path, tensors: Mapping[str, Tensor | StoredValues], metadata: Mapping[str, str] | None = None
) -> None:
    """Writes a new file of ``tensors``, on any device and with any strides, and waits until it is on the disk.

    ``metadata``: further strings for the header. Raises ValueError if the format does not support a type, OSError if
    the file exists or cannot be written.
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
            raise ValueError(f"expected a dense tensor of a type that safetensors knows, got {tensor.dtype} ({name})")
    # Wide types first: the format allows no gaps, and so every tensor is aligned to its type.
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    sums = dict.fromkeys(order, "0" * 8)
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {}), SUMS: json.dumps(sums)}}
    entries: dict[str, _Entry] = {}
    end = 0
    for name in order:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entry = entries[name] = _Entry(_NAMES[tensor.dtype], tuple(tensor.shape), begin, end)
        header[name] = {"dtype": entry.kind, "shape": entry.shape, "data_offsets": [begin, end]}
    text = _text_of(header)
    with naming(path):
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                write_all(fd, len(text).to_bytes(8, "little") + text)
                for name in progress(order, f"saving {path.name}"):
                    tensor = tensors[name].detach()
                    flat = bytes_of(tensor.resolve_conj().resolve_neg().cpu().contiguous())
                    sums[name] = _write_summed(fd, flat, entries[name].begin_sum(name))
                # Overwrites the zeros that reserved the space of the checksums.
                header["__metadata__"][SUMS] = json.dumps(sums)
                move_all(os.pwritev, fd, memoryview(_text_of(header)), 8, path)
                os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(path)
            raise


def _text_of(header: Mapping[str, Any]) -> bytes:
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-(len(text) + 8) % _ALIGNMENT)


def _write_summed(fd: int, flat: Tensor, total: int) -> str:
    """Writes a flat uint8 tensor; returns the digits of its checksum."""
    for part in flat.split(WINDOW_BYTES) if flat.numel() else ():
        # Without the copy, a thread that trains changes the bytes between the sum and the write.
        memory = view_memory(copy := part.clone())
        total = zlib.crc32(memory, total)
        write_all(fd, memory)
        del copy
    return f"{total:08x}"


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Writes all of ``data``; one system call may write less."""
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


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
    """Reads tensors of a safetensors file into memory, or maps them. Raises ValueError for another format."""

    def __init__(self, path: Path) -> None:
        self.path = path
        fd = open_regular(path)
        try:
            status = os.fstat(fd)
            nbytes = status.st_size
            length = int.from_bytes(read_at(fd, 8, 0, path), "little") if nbytes >= 8 else 0
            if nbytes < 8 or length > nbytes - 8:
                raise ValueError(f"{path}: expected a safetensors file, got {nbytes:,} bytes without a header")
            if length > MOST_BYTES:
                raise ValueError(f"{path}: expected a header of at most {MOST_BYTES:,} bytes, got {length:,}")
            header = parse_object(read_at(fd, length, 8, path), path, "header")
        finally:
            os.close(fd)
        #: What a later open must find again.
        self._identity, self._nbytes = (status.st_dev, status.st_ino), nbytes
        self.metadata: dict[str, str] = _metadata_in(header.pop("__metadata__", {}), path)
        self._entries = {name: _entry_of(name, entry, path) for name, entry in header.items()}
        self._begin = 8 + length
        self._check_places(nbytes)
        self._sums = self._sums_in(self.metadata.pop(SUMS, None))
        #: Whether all checksums were compared, so later reads skip it.
        self._verified = False
        self._bytes: Tensor | None = None
        self._fd: int | None = None

    def _check_places(self, nbytes: int) -> None:
        """Raises ValueError unless the tensors cover the bytes after the header, each byte once."""
        end = 0
        for name, entry in sorted(self._entries.items(), key=lambda item: item[1][2:]):
            if entry.begin != end:
                raise ValueError(
                    f"{self.path}: the header cannot be understood: {name} begins at {entry.begin:,}, expected "
                    f"{end:,}, where the tensor before it ends"
                )
            end = entry.end
        if nbytes != self._begin + end:
            expected = self._begin + end
            raise ValueError(f"{self.path}: expected {expected:,} bytes, got {nbytes:,}; the file is not complete")

    def _sums_in(self, text: str | None) -> dict[str, str]:
        """Checksums by name; empty for a file without. Raises ChecksumError unless each tensor has one."""
        if text is None:
            return {}
        try:
            sums = parse_object(text.encode(errors="replace"), self.path, f"checksums ({SUMS})")
            wrong = [name for name, digits in sums.items() if not isinstance(digits, str)]
        except ValueError as error:
            raise ChecksumError(f"{error}. {_ADVICE}") from error
        if without := [name for name in self._entries if name not in sums or name in wrong]:
            raise ChecksumError(f"{self.path}: no checksum for {', '.join(without)}, the header is damaged. {_ADVICE}")
        if lost := [name for name in sums if name not in self._entries]:
            raise ChecksumError(
                f"{self.path}: a checksum but no tensor for {', '.join(lost)}, the header is damaged. {_ADVICE}"
            )
        return sums

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    @property
    def data_bytes(self) -> int:
        """Bytes of all tensors."""
        return max((entry.end for entry in self._entries.values()), default=0)

    @property
    def save(self) -> str | None:
        """The identity of the save that wrote the file."""
        return self.metadata.get(SAVE)

    def check_save(self, expected: str | None) -> None:
        """Raises ValueError if another save wrote the file."""
        if self.save != expected:
            raise ValueError(
                f"{self.path}: the file is of another save than the index ({SAVE}: {shown(self.save)}, expected "
                f"{expected}), as after a copy that was interrupted, and nothing was loaded. Copy the whole checkpoint "
                f"again"
            )

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor."""
        return self._entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor."""
        return self._entries[name].dtype

    def read_into(self, name: str, destination: Tensor | StoredValues, *, window_bytes: int = WINDOW_BYTES) -> None:
        """Copies a tensor to ``destination``, of equal shape and any type, strides and device; increments its version.

        A contiguous host tensor of the same type is read without a copy, any other window by window. Raises
        ChecksumError if the bytes, which ``destination`` then holds, are not those that were written; OSError, perhaps
        after a part, if they cannot be read. Of a DTensor the part of this rank is copied, once all is read.
        """
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
        dtype, position = self.dtype(name), self._begin + self._entries[name].begin
        compared, total = not self._verified and name in self._sums, self._entries[name].begin_sum(name)
        if destination.device.type == "cpu" and destination.dtype == dtype and destination.is_contiguous():
            flat = bytes_of(destination)
            try:
                for part in flat.split(WINDOW_BYTES if compared else flat.numel()) if flat.numel() else ():
                    self._read(part, position)
                    position += part.numel()
                    if compared:
                        total = zlib.crc32(view_memory(part), total)
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
                if compared:
                    total = zlib.crc32(view_memory(piece.view(torch.uint8)), total)
                part.copy_(piece.view(part.shape))
                position += part.numel() * dtype.itemsize
        if compared:
            self._compare(name, total)

    def verify(self) -> None:
        """Reads all tensors once and compares their checksums, as later reads do not; raises as :meth:`read_into`."""
        if self._verified or not self._sums:
            return
        window = torch.empty(WINDOW_BYTES, dtype=torch.uint8)
        for name, entry in self._entries.items():
            total = entry.begin_sum(name)
            for position in range(entry.begin, entry.end, WINDOW_BYTES):
                part = window[: min(WINDOW_BYTES, entry.end - position)]
                self._read(part, self._begin + position)
                total = zlib.crc32(view_memory(part), total)
            self._compare(name, total)
        self._verified = True

    def _compare(self, name: str, total: int) -> None:
        if (found := f"{total:08x}") != self._sums[name]:
            raise ChecksumError(
                f"{self.path}: the bytes of tensor {name} are not those that were written (checksum "
                f"{found}, expected {self._sums[name]}). {_ADVICE}"
            )

    def _read(self, flat: Tensor, position: int) -> None:
        """Reads at a position of the file; not by a private mapping, which counts as memory of the process."""
        if self._fd is None:
            self._fd = open_regular(self.path)
            weakref.finalize(self, os.close, self._fd)
            status = os.fstat(self._fd)
            if (status.st_dev, status.st_ino) != self._identity:
                raise ValueError(f"{self.path}: the file was replaced after its header was read; load it again")
        move_all(os.preadv, self._fd, view_memory(flat), position, self.path)

    def tensor(self, name: str) -> Tensor:
        """A tensor as a private mapping; its checksum is not compared, and writes to it do not reach the file."""
        if self._bytes is None:
            self._bytes = torch.from_file(str(self.path), shared=False, size=self._nbytes, dtype=torch.uint8)
        begin, end = (self._begin + offset for offset in self._entries[name][2:])
        dtype = self.dtype(name)
        part = self._bytes[begin:end]
        if begin % dtype.itemsize:
            part = part.clone()  # a file of another tool
        return part.view(dtype).view(self.shape(name))


def _metadata_in(found: Any, path: Path) -> dict[str, str]:
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise ValueError(f"{path}: the header cannot be understood: __metadata__: expected strings, got {shown(found)}")
    return found


def _entry_of(name: str, entry: Any, path: Path) -> _Entry:
    """A tensor of a header. Raises ValueError that names the field that is wrong."""

    def wrong(field: str, expected: str, found: Any) -> ValueError:
        where = f"{path}: the header cannot be understood: {shown(name)}{field}"
        return ValueError(f"{where}: expected {expected}, got {shown(found)}")

    if not isinstance(entry, dict):
        raise wrong("", "an object of dtype, shape and data_offsets", entry)
    kind, shape, places = (entry.get(field) for field in ("dtype", "shape", "data_offsets"))
    if not isinstance(kind, str) or kind not in _TYPES:
        raise wrong(".dtype", f"one of {', '.join(_TYPES)}", kind)
    if not _are_sizes(shape) or len(shape) > _MOST_DIMENSIONS or math.prod(max(1, n) for n in shape) >= 1 << 62:
        raise wrong(".shape", f"at most {_MOST_DIMENSIONS} sizes", shape)
    if not _are_sizes(places) or len(places) != 2:
        raise wrong(".data_offsets", "two offsets", places)
    nbytes = math.prod(shape) * _TYPES[kind].itemsize
    if places[1] - places[0] != nbytes:
        raise wrong(".data_offsets", f"{nbytes:,} bytes, since {kind} of shape {shape} does not fit", places)
    return _Entry(kind, tuple(shape), *places)


def _are_sizes(found: Any) -> TypeGuard[list[int]]:
    return isinstance(found, list) and all(type(n) is int and 0 <= n < 1 << 62 for n in found)


def check_plain(tensors: Mapping[str, Tensor], instead: str) -> None:
    """Raises TypeError for a DTensor, of which each rank has a part."""
    found = next((name for name, tensor in tensors.items() if hasattr(tensor, "placements")), None)
    if found is not None:
        kind = type(tensors[found]).__name__
        raise TypeError(f"expected plain tensors, got a {kind} ({found}), of which each rank has a part; use {instead}")
