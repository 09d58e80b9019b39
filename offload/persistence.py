"""A ``DiskHome(keep=True)`` of a model: describes its contents by names, dtypes and shapes, and stores the buffers.

Parameters are in the files of a home all the time. Buffers are on the compute device as long as the model lives, so
they are written when it is closed, and read when its home is adopted. All of them are kept, also those that are not
in a ``state_dict``: a model that adopts a home equals the one that was closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.planning.partition import aligned
from offload.storage import Block, Tier
from offload.storage.contract import bytes_of
from offload.storage.persistent import Contents, PersistentTier
from offload.streaming.materialize import Values
from offload.streaming.quantised import stored_tensors
from offload.streaming.slices import layout

__all__ = ["PersistentHome"]


@dataclass(frozen=True)
class _Stored:
    """Values of an adopted home. Those of a parameter are in place; those of a buffer are read."""

    block: Block | None = None
    offset: int = 0

    def read_into(self, destination: Tensor) -> None:
        """Reads a buffer."""
        if self.block is not None and destination.numel():
            dense = torch.empty_like(destination, device="cpu", memory_format=torch.contiguous_format)
            self.block.read_into(bytes_of(dense), self.offset)
            with torch.no_grad():
                destination.copy_(dense)


class PersistentHome:
    """Stores a model's buffers in its tier, and adopts an existing home; does nothing if the home is not kept.

    ``layers``: name and module of each. ``cuts``: number of layers of each shard. ``values``: sources of parameters and
    buffers that are not read from the home. Raises HomeError if a home cannot be used; the layers are as they were.
    """

    def __init__(
        self, tier: Tier, layers: Mapping[str, nn.Module], cuts: Sequence[int], values: Mapping[Tensor, Values]
    ) -> None:
        self._tier = tier if isinstance(tier, PersistentTier) else None
        self._layers = dict(layers)
        #: Sources of parameters and buffers.
        self.values: dict[Tensor, Values] = dict(values)
        self._block: Block | None = None
        #: Offset, name and bytes of each buffer.
        self._places: list[tuple[int, tuple[str, int]]] = []
        if self._tier is None:
            return
        stored = stored_tensors(layers.items())
        quantised = next((each.name for each in stored if each.part_of is not None), None)
        if quantised is not None:
            raise ValueError(
                f"expected a home that goes with its model, got DiskHome(keep=True) for quantised weights "
                f"({quantised}): layers on the meta device adopt a kept home, and these have no parts there; use "
                f"keep=False, and save_checkpoint and load_checkpoint"
            )
        parameters = [each.parameter for each in stored]
        lines, end = [], 0
        for name, buffer in self._buffers():
            lines.append(f"{name} {_kind(buffer)} {list(buffer.shape)} at {end}")
            self._places.append((end, (name, _nbytes(buffer))))
            end += aligned(_nbytes(buffer))
        contents = [*_shards(list(layers.items()), cuts), Contents("buffers", "buffers", end, lines)]
        adopted = self._tier.adopt(contents, blank=not values and all(p.is_meta for p in parameters))
        if end:
            self._block = self._tier.home(len(contents) - 1, end)
        if adopted:
            self.values.update(dict.fromkeys(parameters, _Stored()))
            for (_, buffer), (offset, _) in zip(self._buffers(), self._places, strict=True):
                self.values[buffer] = _Stored(self._block, offset)

    def _buffers(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._layers.items():
            for path, buffer in layer.named_buffers(remove_duplicate=False):
                yield f"{name}.{path}", buffer

    @property
    def keeps(self) -> bool:
        """Whether the home outlives the model."""
        return self._tier is not None

    def begin(self) -> None:
        """Called when the model is made."""
        if self._tier is not None:
            self._tier.mark_open()

    def close(self) -> None:
        """Writes the buffers and the manifest.

        Raises ValueError if a buffer has another size than when the model was made, OSError if the home cannot be
        written.
        """
        if self._tier is None:
            return
        current, expected = [(name, _nbytes(b)) for name, b in self._buffers()], [sizes for _, sizes in self._places]
        if current != expected:
            raise ValueError(
                f"expected the buffers that the model was made with, got others: "
                f"{sorted({*current} ^ {*expected})}. A kept home holds buffers "
                f"of a fixed size; save a checkpoint instead"
            )
        for (_, buffer), (offset, _) in zip(self._buffers(), self._places, strict=True):
            if buffer.numel():
                assert self._block is not None
                dense = buffer.detach().cpu().resolve_conj().resolve_neg().contiguous()
                self._block.write(bytes_of(dense), offset)
        self._tier.write_manifests()


def _shards(layers: Sequence[tuple[str, nn.Module]], cuts: Sequence[int]) -> Iterator[Contents]:
    """The contents of each shard's home, as :func:`offload.streaming.shard.make_shards` lays it out."""
    seen: set[nn.Parameter] = set()
    first = 0
    for j, count in enumerate(cuts):
        new = [each for each in stored_tensors(layers[first : first + count]) if each.parameter not in seen]
        seen.update(each.parameter for each in new)
        slices, nbytes = layout(new)
        lines = [
            f"{s.name} {_kind(s.parameter)} {list(s.parameter.shape)} strides {list(s.stride)} at {s.offset}"
            for s in slices
        ]
        yield Contents(f"shard-{j:05d}", f"shard {j}", nbytes, lines)
        first += count


def _nbytes(buffer: Tensor) -> int:
    return buffer.numel() * buffer.element_size()


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
