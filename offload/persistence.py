"""A ``DiskHome(keep=True)`` of a model: describes its contents by names, dtypes and shapes, and stores the buffers.

Parameters are in the files of a home all the time. Buffers, and parameters outside of blocks, are on the compute
device as long as the model lives, so they are written when it is made and closed, and read when its home is adopted.
All buffers are kept, also those that are not in a ``state_dict``: a model that adopts a home equals the one that was
closed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from offload.forms.quantised import stored_tensors
from offload.meta_device.materialize import InPlace, Values
from offload.partition import aligned
from offload.storage import Block, Tier
from offload.storage.contract import bytes_of
from offload.storage.persistent import PersistentTier
from offload.streaming.layer_homes import LayerLayout

__all__ = ["PersistentHome"]


@dataclass(frozen=True)
class _Stored:
    """Values of an adopted home that are on the compute device."""

    block: Block | None
    offset: int

    def read_into(self, destination: Tensor) -> None:
        """Reads them."""
        if self.block is not None and destination.numel():
            dense = torch.empty_like(destination, device="cpu", memory_format=torch.contiguous_format)
            self.block.read_into(bytes_of(dense), self.offset)
            with torch.no_grad():
                destination.copy_(dense)


class PersistentHome:
    """Stores a model's buffers in its tier, and adopts an existing home; does nothing if the home is not kept.

    ``layers``: name and module of each. ``values``: sources of parameters and buffers that are not read from the home.
    ``around``: modules outside of the layers, each without its children.
    Raises HomeError if a home cannot be used; the layers are as they were.
    """

    def __init__(
        self,
        tier: Tier,
        layers: Mapping[str, nn.Module],
        values: Mapping[Tensor, Values],
        around: Mapping[str, nn.Module],
    ) -> None:
        self._tier = tier if isinstance(tier, PersistentTier) else None
        self._layers = dict(layers)
        self._around = around
        #: Sources of parameters and buffers.
        self.values: dict[Tensor, Values] = dict(values)
        self._block: Block | None = None
        self._adopted = False
        #: Offset, name and bytes of each tensor that is not in a shard.
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
        lines, end = _weights(layers)
        for name, buffer in self._on_device():
            end = aligned(end)
            lines.append(f"{name} {_kind(buffer)} {list(buffer.shape)} at {end}")
            self._places.append((end, (name, buffer.nbytes)))
            end += buffer.nbytes
        outside = [p for module in around.values() for p in module._parameters.values() if p is not None]
        blank = not values and all(p.is_meta for p in (*parameters, *outside))
        self._adopted = self._tier.adopt(lines, end, blank=blank)
        if end:
            self._block = self._tier.contents()
        if self._adopted:
            self.values.update(dict.fromkeys(parameters, InPlace()))
            for (_, tensor), (offset, _) in zip(self._on_device(), self._places, strict=True):
                self.values[tensor] = _Stored(self._block, offset)

    def _on_device(self) -> Iterator[tuple[str, Tensor]]:
        for name, layer in self._layers.items():
            for path, buffer in layer.named_buffers(remove_duplicate=False):
                yield f"{name}.{path}", buffer
        for path, module in self._around.items():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield f"{path}.{key}".lstrip("."), tensor

    @property
    def keeps(self) -> bool:
        """Whether the home outlives the model."""
        return self._tier is not None

    def begin(self) -> None:
        """Called when the model is made."""
        if self._tier is not None:
            if not self._adopted:
                self._write()
            self._tier.mark_open()

    def close(self) -> None:
        """Writes the buffers and the manifest.

        Raises ValueError if a buffer has another size than when the model was made, OSError if the home cannot be
        written.
        """
        if self._tier is not None:
            self._write()
            self._tier.mark_closed()

    def _write(self) -> None:
        current, expected = [(name, b.nbytes) for name, b in self._on_device()], [sizes for _, sizes in self._places]
        if current != expected:
            raise ValueError(
                f"expected the buffers that the model was made with, got others: "
                f"{sorted({*current} ^ {*expected})}. A kept home holds buffers "
                f"of a fixed size; save a checkpoint instead"
            )
        for (_, buffer), (offset, _) in zip(self._on_device(), self._places, strict=True):
            if buffer.numel():
                assert self._block is not None
                dense = buffer.detach().cpu().resolve_conj().resolve_neg().contiguous()
                self._block.write(bytes_of(dense), offset)


def _weights(layers: Mapping[str, nn.Module]) -> tuple[list[str], int]:
    """A line for each weight, as :func:`offload.streaming.layer_homes.make_shards` lays them out, and their bytes."""
    places = LayerLayout()
    lines = [
        f"{s.name} {_kind(s.parameter)} {list(s.parameter.shape)} strides {list(s.stride)} at {s.offset}"
        for name, layer in layers.items()
        for s in places.add(name, layer)
    ]
    return lines, places.nbytes


def _kind(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
