"""Reads and writes safetensors files, one tensor at a time.

The format is a length, a header in JSON and the bytes. The ``safetensors`` package needs all tensors at once to write
them; to read them it maps whole files privately, which the system refuses for a file that is larger than memory, or
reads whole tensors. The tests exchange files with it.

Guarantees
    * Writing needs memory for one tensor at most, and for one window if it is dense and on the host.
    * When :func:`write_tensors` returns, the bytes are on the disk.
    * What is summed is what is written, also of a tensor that another thread writes meanwhile.
    * A file whose header is inconsistent, leaves gaps between tensors, or does not match the file's length, is refused
      when it is opened: by a ValueError that names it.
    * Files are mapped to be read, shared and read-only, which counts as no memory of the process. As with any mapping,
      a disk that fails meanwhile ends the process.
"""

from __future__ import annotations

import json
import mmap
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from offload.progress import progress
from offload.storage.buffer import view_memory
from offload.storage.contract import bytes_of
from offload.streaming.stored_values import StoredValues, stored_values
from offload.untrusted import MOST_BYTES, WINDOW_BYTES, naming, open_regular, write_new

__all__ = ["StoredTensor", "open_tensors", "write_tensors"]

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

    def parts() -> Iterator[bytes | memoryview]:
        yield len(text).to_bytes(8, "little") + text
        for name in progress([*header][1:], f"saving {path.name}"):
            flat = bytes_of(tensors[name].detach().resolve_conj().resolve_neg().cpu().contiguous())
            for part in flat.split(WINDOW_BYTES) if flat.numel() else ():
                # Without the copy, a thread that trains changes the bytes between the sum and the write.
                copy = part.clone()
                yield view_memory(copy)

    return write_new(path, parts())


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a safetensors file."""

    name: str
    #: A read-only mapping: a write to it ends the process.
    mapped: Tensor

    @torch.no_grad()
    def read_into(self, destination: Any) -> None:
        """Copies it to a tensor or StoredValues of equal shape, and of any type, strides and device.

        Of a DTensor the part of this rank is copied.
        """
        stored = destination if isinstance(destination, StoredValues) else stored_values(destination)
        if stored is not None:
            stored.write(self.mapped.to(stored.dtype))
        elif hasattr(destination, "placements"):
            _copy_part(destination, self.mapped)
        else:
            destination.copy_(self.mapped)


def open_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file, also if another file takes its name. Raises ValueError for another format."""
    found: dict[str, StoredTensor] = {}
    with naming(path), open_regular(path) as file, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that such tensors must not be written to
        try:
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(mapped[:8], "little")
            if length > min(len(mapped), MOST_BYTES):
                raise ValueError(f"a header of {length:,} bytes in a file of {len(mapped):,}")
            header, end = json.loads(mapped[8 : 8 + length]), 0
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
                tensor = torch.empty(entry["shape"], dtype=_TYPES[entry["dtype"]], device="meta")
                begin, end = end, end + tensor.nbytes
                if entry["data_offsets"] != [begin, end]:
                    raise ValueError(f"{name} at {entry['data_offsets']}, expected {[begin, end]}")
                found[name] = StoredTensor(name, _mapped(mapped, 8 + length + begin, tensor))
            if len(mapped) != 8 + length + end:
                raise ValueError(f"{len(mapped):,} bytes, expected {8 + length + end:,}")
        except (ValueError, TypeError, LookupError, AttributeError, RuntimeError) as error:
            raise ValueError(f"{path}: expected a complete safetensors file, got a damaged one: {error}") from error
    return found


def _mapped(file: mmap.mmap, begin: int, like: Tensor) -> Tensor:
    if not like.numel():
        return torch.empty_like(like, device="cpu")
    return torch.frombuffer(file, dtype=like.dtype, count=like.numel(), offset=begin).view(like.shape)


def _copy_part(destination: Any, whole: Tensor) -> None:
    """Copies to a DTensor the part of a whole tensor that this rank stores; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = destination.device_mesh, destination.placements
    destination.to_local().copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local())
