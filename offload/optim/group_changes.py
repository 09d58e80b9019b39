"""What an optimizer's class writes into its parameter groups, such as a count of steps.

Each piece of a model has an optimizer of its own, with a copy of the group that it belongs to. What the class writes
there is written to the user's group, once a step. All pieces of a group must write the same: a class for which they do
not computes something from all parameters of the group together, which no piece has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from offload.optim.groups import copied_options, same_option

__all__ = ["GroupChanges"]


class GroupChanges:
    """The changes of the step that is being applied."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        #: Whether a step is expected to write into groups. Classes of torch do not; of others the first step tells.
        self.expected = not kind.__module__.startswith("torch.optim.")
        self._changes: dict[int, dict[str, Any]] = {}
        self._decided: object = None
        self._refused: str | None = None

    def has(self, index: int) -> bool:
        """Whether a piece of a group was updated in this step."""
        return index in self._changes

    def publish(
        self, groups: Sequence[dict[str, Any]], index: int, changes: dict[str, Any], decided: object = None
    ) -> None:
        """Writes what a piece of group ``index`` changed to the user's group.

        ``decided`` is one object for all updates of a step, and another one for those of the next.
        """
        if decided is not None and decided is not self._decided:
            self._decided, self._changes = decided, {}
        known = self._changes.setdefault(index, changes)
        if known.keys() != changes.keys() or not all(same_option(value, known[key]) for key, value in changes.items()):
            self._refused = (
                f"{self._kind.__name__} computes {sorted(known.keys() | changes.keys())} of group {index} from all "
                f"parameters of the group together, but shards are updated one after the other: take a class that "
                f"treats each parameter by itself. Parameters are wrong from this step on; load the last checkpoint"
            )
        self.expected |= bool(changes)
        groups[index].update(copied_options(changes))

    def end_step(self) -> None:
        """All groups have had their part in the step."""
        self.expected = any(self._changes.values())
        self._changes = {}

    def check(self) -> None:
        """Raises RuntimeError if the class couples parameters."""
        if self._refused is not None:
            raise RuntimeError(self._refused)
