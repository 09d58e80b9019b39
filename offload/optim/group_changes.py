"""Copies values that an optimizer class writes into its parameter groups (e.g. a step count) to the user's groups.

Each param block has its own optimizer with a copy of its group. What the class writes into the copy is written to the
user's group once a step. All param blocks of a group must write the same values: a class that writes others computes
something from all parameters of the group together, which no param block has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from offload.optim.groups import copied_options, same_option

__all__ = ["GroupChanges"]


class GroupChanges:
    """Changes of groups by the step that is being applied."""

    def __init__(self, kind: type[Optimizer]) -> None:
        self._kind = kind
        #: Whether a step is expected to write into groups. Classes of torch do not; others show it in a first step.
        self.expected = not kind.__module__.startswith("torch.optim.")
        self._changes: dict[int, dict[str, Any]] = {}
        self._step_key: object = None
        self._error: str | None = None

    def has(self, index: int) -> bool:
        """Whether a param block of group ``index`` was updated in this step."""
        return index in self._changes

    def publish(
        self, groups: Sequence[dict[str, Any]], index: int, changes: dict[str, Any], step_key: object = None
    ) -> None:
        """Writes the changes that a param block made in group ``index`` to the user's group.

        ``step_key`` is one object for all updates of a step; another object means another step.
        """
        if step_key is not None and step_key is not self._step_key:
            self._step_key, self._changes = step_key, {}
        known = self._changes.setdefault(index, changes)
        if known.keys() != changes.keys() or not all(same_option(value, known[key]) for key, value in changes.items()):
            self._error = (
                f"{self._kind.__name__} computes {sorted(known.keys() | changes.keys())} of group {index} from all "
                f"parameters of the group together, but shards are updated one after the other: take a class that "
                f"treats each parameter by itself. Parameters are wrong from this step on; load the last checkpoint"
            )
        self.expected |= bool(changes)
        groups[index].update(copied_options(changes))

    def end_step(self) -> None:
        """Called when all groups are updated."""
        self.expected = any(self._changes.values())
        self._changes = {}

    def check(self) -> None:
        """Raises RuntimeError if the class couples parameters."""
        if self._error is not None:
            raise RuntimeError(self._error)
