"""Renames the parameters of torchgpipe and fairscale checkpoints to those of a Pipe.

torchgpipe and fairscale name a parameter ``partitions.<partition>.<layer>.<name>``, with the layer's name in the whole
module. A :class:`~pipe.Pipe` names it as the bare module does: ``<layer>.<name>``.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container
from typing import Any

__all__ = ["without_partitions"]


def without_partitions(state_dict: dict[str, Any], prefix: str, layers: Container[str]) -> list[str]:
    """Renames, in place, the keys that torchgpipe or fairscale saved for a Pipe with these ``layers``.

    Args:
        state_dict: values by name.
        prefix: the prefix of the Pipe's names.
        layers: names of the Pipe's layers.

    Returns:
        The keys that cannot be renamed because several would get one name; nothing is renamed then.
    """
    if "partitions" in layers:
        return []
    old = re.compile(re.escape(prefix) + r"partitions\.\d+\.(?P<name>(?P<layer>[^.]+)\..+)")
    found = ((key, old.fullmatch(key)) for key in state_dict)
    names = {key: prefix + match["name"] for key, match in found if match and match["layer"] in layers}
    twice = {name for name, count in Counter([*state_dict, *names.values()]).items() if count > 1}
    if twice:
        return sorted(key for key, name in names.items() if name in twice)
    for key, name in names.items():
        state_dict[name] = state_dict.pop(key)
    return []
