"""Takes one mechanism out of the engine, so that it can be seen that programs find what it is there for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from offload.engine.cell import Cell
from offload.engine.structure import Structure
from offload.engine.weight_writes import AssignedData
from offload.streaming.shard import Shard
from offload.streaming.slot_pool import SlotPool

__all__ = ["MECHANISMS", "without"]


def _lent_slots(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SlotPool, "is_referenced", lambda self, slot: False)


def _kept_gradients(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Shard, "detach_gradients", lambda self: None)


def _weight_writes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Cell, "_store_writes", lambda self, *arguments: None)


def _accumulated_hooks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("offload.engine.backward.has_hooks", lambda parameter: False)
    patch.setattr("offload.engine.weights.Weights.gradients_stay", lambda self: [False] * len(self.owners))


def _structure(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Structure, "check", lambda self: False)


def _assigned_data(patch: pytest.MonkeyPatch) -> None:
    store = AssignedData.store

    def only_in_a_forward(self: Any) -> None:
        if sys._getframe(1).f_code.co_name == "forward":
            store(self)

    patch.setattr(AssignedData, "store", only_in_a_forward)


def _own_forward(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("offload.arguments.beyond_layers", lambda module: [])


def _requested_parameters(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("offload.engine.backward.is_requested", lambda node: False)


#: Name -> what takes the mechanism out, and the claims of the corpus that then fail.
MECHANISMS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], tuple[str, ...]]] = {
    "lent slots": (_lent_slots, ("a_view_kept_by_a_function_is_there_in_backward",)),
    "kept gradients": (_kept_gradients, ("gradients_that_are_kept_outlive_a_backward_on_disk",)),
    "weight writes": (_weight_writes, ("a_layer_initialises_itself_from_its_first_batch",)),
    "accumulated hooks": (_accumulated_hooks, ("a_step_in_a_hook_moves_the_weights",)),
    "structure": (_structure, ("a_replaced_layer_is_followed_or_refused", "adapters_are_followed_or_refused")),
    "assigned data": (
        _assigned_data,
        ("other_data_of_a_parameter_is_kept_on_disk", "other_data_between_backward_and_step_is_stepped"),
    ),
    "own forward": (_own_forward, ("an_own_forward_of_a_sequential_is_run_or_refused",)),
    "requested parameters": (
        _requested_parameters,
        ("backward_of_given_inputs_reaches_parameters", "gradients_of_parameters_are_returned"),
    ),
}


@contextlib.contextmanager
def without(name: str | None) -> Iterator[None]:
    """Inside, the engine lacks the mechanism of this name; None: nothing."""
    with pytest.MonkeyPatch.context() as patch:
        if name is not None:
            MECHANISMS[name][0](patch)
        yield
