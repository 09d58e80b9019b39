"""Groups the names of parameters into layers: numbered blocks, and what is before and after them.

``model.layers.17.mlp.up_proj.weight`` belongs to block 17 of ``model.layers``. Names without a number are grouped by
the module beside the blocks: ``model.embed_tokens``, ``model.norm``, ``lm_head``.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from offload.advise.outline import Layer, ParameterShape

__all__ = ["layers_by_name", "width_of"]

#: Names of modules that look up rows by number, and are used before the blocks.
_LOOKS_UP = re.compile(r"emb|(^|\.)w[tp]e(\.|$)|(^|\.)shared(\.|$)|position|patch", re.IGNORECASE)
_IS_HEAD = re.compile(r"head|embed_out|classifier|score|(^|\.)output(\.|$)", re.IGNORECASE)


def layers_by_name(parameters: Iterable[ParameterShape]) -> list[Layer]:
    """The layers in the order of use, as far as names tell: embeddings, blocks by number, norms, heads.

    Raises ValueError for encoders with decoders, whose layers do not follow one another.
    """
    given = list(parameters)
    numbers: dict[str, set[int]] = defaultdict(set)
    for parameter in given:
        for prefix, number in _numbered(parameter.name):
            numbers[prefix].add(number)
    # A number that occurs alone is a part of a name (conv1.0), not a block.
    repeated = {prefix for prefix, found in numbers.items() if len(found) > 1}
    containers = {""}
    blocks: dict[tuple[str, int], list[ParameterShape]] = defaultdict(list)
    rest: list[ParameterShape] = []
    for parameter in given:
        # The outermost number: an expert is a part of its block.
        found = next((pair for pair in _numbered(parameter.name) if pair[0] in repeated), None)
        if found is None:
            rest.append(parameter)
            continue
        blocks[found].append(parameter)
        parts = found[0].split(".")
        containers |= {".".join(parts[:k]) + "." for k in range(1, len(parts) - 1)}
    sides = [side for side in ("encoder", "decoder") if any(side in prefix.split(".") for prefix, _ in blocks)]
    if len(sides) > 1:
        raise ValueError(
            "expected layers that follow one another, got blocks of an encoder and of a decoder, which an OffloadModel "
            "does not run as they are; pass module:function with the layers that you wrap"
        )
    others: dict[str, list[ParameterShape]] = defaultdict(list)
    for parameter in rest:
        container = max((c for c in containers if parameter.name.startswith(c)), key=len)
        others[container + parameter.name[len(container) :].split(".")[0]].append(parameter)
    first_seen = {prefix: k for k, prefix in enumerate(dict.fromkeys(prefix for prefix, _ in blocks))}
    middle = [
        Layer(f"{prefix}{number}", tuple(blocks[prefix, number]))
        for prefix, number in sorted(blocks, key=lambda key: (first_seen[key[0]], key[1]))
    ]
    tables = {name: own for name, own in others.items() if _is_before(name)}
    before = [Layer(name, tuple(own), looks_up=True) for name, own in tables.items()]
    if len(before) > 1:  # tokens and positions are looked up in one layer
        together = tuple(p for own in tables.values() for p in own)
        before = [Layer(" + ".join(tables), together, looks_up=True, parts=tuple(tables))]
    after = [Layer(name, tuple(own)) for name, own in others.items() if not _is_before(name)]
    return [*before, *middle, *sorted(after, key=_place_after)]


def _numbered(name: str) -> list[tuple[str, int]]:
    """(what is before it, number) of each number between two dots, from the left."""
    parts = name.split(".")
    return [
        (".".join(parts[:k]) + "." if k else "", int(part)) for k, part in enumerate(parts[:-1]) if part.isdecimal()
    ]


def _is_before(name: str) -> bool:
    return bool(_LOOKS_UP.search(name)) and not _IS_HEAD.search(name)


def _place_after(layer: Layer) -> tuple[bool, bool]:
    """Norms before poolers before heads."""
    return bool(_IS_HEAD.search(layer.name)), any(len(p.shape) > 1 for p in layer.own)


def width_of(layers: Sequence[Layer]) -> int | None:
    """The width of the tensors between blocks: the size that most of their parameters have."""
    counts: dict[int, int] = defaultdict(int)
    for layer in layers:
        for parameter in layer.own:
            for size in set(parameter.shape[:2]):
                counts[size] += 1
    return max(counts, key=lambda size: (counts[size], size), default=None)
