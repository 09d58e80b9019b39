"""Weights in safetensors files with an index, as Hugging Face models have them."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from offload.files.tensor_file import write_tensors


def write_checkpoint(folder: Path, parts: Iterable[Mapping[str, Tensor]], count: int) -> int:
    """Writes ``count`` parts, a file for each, one at a time, and their index; returns the bytes of tensors."""
    weight_map: dict[str, str] = {}
    total = 0
    for k, tensors in enumerate(parts):
        file = f"model-{k + 1:05d}-of-{count:05d}.safetensors"
        write_tensors(folder / file, tensors, {})
        weight_map.update(dict.fromkeys(tensors, file))
        total += sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return total
