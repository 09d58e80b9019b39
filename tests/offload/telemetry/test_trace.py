"""The trace of a step shows the plan, lane by lane."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import MemoryPolicy, OffloadModel
from offload.planner.measured import next_plan
from offload.planning.plan import CELLS, Kind
from tests.offload.planning.proof import validate


def test_compute_follows_the_plan_and_lanes_copy_what_it_says(tmp_path: Path) -> None:
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    memory = MemoryPolicy.fixed(boundary_bytes=0)
    model = OffloadModel(layers, "cpu", tmp_path / "home", 4, True, num_microbatches=2, memory=memory)
    with model.trace(tmp_path / "step.json") as events:
        model(torch.randn(6, 8)).sum().backward()
    plan = model.plan()
    lanes = {"compute": CELLS, "load lane": {Kind.LOAD}, "drain lane": {Kind.DRAIN}}
    lanes["boundary lane"] = {Kind.SPILL, Kind.PREFETCH}
    for lane, kinds in lanes.items():
        ran = [e.token for e in events if e.track == lane and not e.token.startswith("wait")]
        assert ran == [str(a) for a in plan.actions if a.kind in kinds]
        assert {token[0] for token in ran} >= {kind.value for kind in kinds if kind not in CELLS}
    assert all(e.begin <= e.end for e in events)
    first_use = {}
    for event in events:
        if event.track == "compute" and event.token[0] == "F":
            first_use.setdefault(event.token[1], event.begin)
    loads = {e.token[1:]: e.end for e in reversed(events) if e.track == "load lane"}
    assert all(loads[j] <= begin for j, begin in first_use.items())
    # The file is what Perfetto reads.
    entries = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    names = {entry["args"]["name"] for entry in entries if entry["ph"] == "M"}
    assert names == {"compute", "load lane", "drain lane", "boundary lane"}
    assert all(entry["dur"] >= 0 for entry in entries if entry["ph"] == "X")


@pytest.mark.parametrize(
    "settings",
    [
        {"num_microbatches": 3, "memory": MemoryPolicy.fixed(boundary_bytes=0)},
        {"num_microbatches": 3, "memory": MemoryPolicy.fixed(boundary_bytes=1600)},
        {"num_microbatches": 2, "memory": MemoryPolicy.fixed(boundary_bytes=0, graph_bytes=500)},
        {"num_microbatches": 2, "memory": MemoryPolicy.fixed(boundary_bytes=0), "checkpoint_activation": False},
        {"num_microbatches": 1, "memory": MemoryPolicy.fixed(slots=4)},
    ],
    ids=str,
)
def test_a_step_does_what_its_plan_said_before_as_soon_as_sizes_are_known(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    bare = nn.Sequential(*(nn.Linear(8, 8) for _ in range(5)))
    for parameter in bare[0].parameters():
        parameter.requires_grad_(False)
    model = OffloadModel(bare, "cpu", tmp_path / "home", num_slices=5, **{"checkpoint_activation": True, **settings})
    for training in (True, False):
        x = torch.randn(7, 8)
        pieces = model._rows(7)
        assert model.plan(7, training=training).actions
        for _ in range(2):
            planned = next_plan(model._homes, pieces, training=training)
            model._homes.streamer.release()
            with torch.set_grad_enabled(training):
                output = model(x)
            if training:
                output.sum().backward()
            ran = model.plan(7, training=training)
            validate(ran)
        assert str(ran) == str(planned)
    kinds, policy = {action.kind for action in model.plan(7).actions}, settings["memory"]
    assert (Kind.FORWARD_KEPT in kinds) == (bool(policy.graph_bytes) or "checkpoint_activation" in settings)
    assert (Kind.SPILL in kinds) == (policy.boundary_bytes < 10_000 and "checkpoint_activation" not in settings)
