"""What uses the memory and the time of a plan adds up, and is shown with units."""

from __future__ import annotations

from dataclasses import replace

import torch

from offload.planning.budget import shown_bytes
from offload.planning.choose import choose
from offload.planning.estimate import Estimate
from offload.planning.explain import bytes_at_peak, moves, next_bytes
from offload.planning.plan import Kind
from offload.planning.step_model import predict
from offload.telemetry.statistics import Meter
from tests.offload.planning.test_choose import MIB, least_of, model_of


def test_uses_add_up_to_the_predicted_bytes_and_lanes_to_what_the_plan_moves() -> None:
    model = replace(model_of(8, update=0.01), buffer_bytes=3 * MIB, loaded_bytes=[20 * MIB] * 8, margin_bytes=MIB)
    for limit in (least_of(model), least_of(model) + 200 * MIB, 10_000 * MIB):
        found = predict(model, choose(model, limit))
        uses = bytes_at_peak(found)
        assert sum(uses.values()) == found.memory_bytes
        assert min(uses.values()) >= 0
        assert uses["homes"] == sum(model.resting_bytes[j] for j in found.choice.in_memory)
        assert uses["update buffers"] == (3 * MIB if len(found.choice.in_memory) < 8 else 0)
        lanes = {each.what: each for each in moves(model, found)}
        loads = [a.shard for a in found.plan.actions if a.kind is Kind.LOAD and a.shard not in found.choice.in_memory]
        assert ("loads" in lanes) == bool(loads)
        if loads:
            assert (lanes["loads"].shards, lanes["loads"].nbytes) == (len({*loads}), len(loads) * 20 * MIB)
            assert lanes["loads"].seconds == sum(model.costs.load[j] for j in loads)
    assert next_bytes(40 * MIB) == 10 * MIB
    assert next_bytes(64 << 30) == 1 << 30


def test_records_are_shown_with_units() -> None:
    shown = str(Estimate(1.5, 0.25, 1.25, 3 << 20, 1 << 30, {"device": 2048}, 100, 5 << 20)).splitlines()
    cells = dict(line.rsplit("  ", 1) for line in shown)
    named = {name.strip(): number.strip() for name, number in cells.items()}
    assert named["seconds"] == "1.5 s"
    assert named["wait seconds"] == "250 ms"
    assert named["bytes loaded"] == "3.0 MiB"
    assert named["bytes stored"] == "1.0 GiB"
    assert named["peak bytes, device"] == "2.0 KiB"
    assert named["activation bytes"] == "100 bytes"
    assert "shard loads" in str(Meter(torch.device("cpu")).read())
    assert shown_bytes((1 << 30) + 1) == "1.1 GiB", "so much is enough"
