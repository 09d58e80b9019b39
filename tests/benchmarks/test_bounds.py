"""The bounds of each benchmark: each is told when it does not hold, and limits count what they say."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.build_huge import benchmark as build_huge
from benchmarks.frontier import benchmark as frontier
from benchmarks.gpu_train import benchmark as gpu_train
from benchmarks.gradcache_batch import benchmark as gradcache_batch
from benchmarks.harness.benchmark import Benchmark, Run, broken_bounds
from benchmarks.harness.case import Outcome
from benchmarks.harness.plot import pareto_front
from benchmarks.harness.table import limit_columns
from benchmarks.memory_latency import benchmark as memory_latency
from benchmarks.models.transformer import Stack
from benchmarks.offload_step import benchmark as offload_step
from benchmarks.optimizer import benchmark as optimizer
from benchmarks.optimizer.methods import DISK, FROM_META, NAMES, REFERENCE
from benchmarks.pipe_ladder import benchmark as pipe_ladder
from benchmarks.plan_grid import benchmark as plan_grid
from benchmarks.retrieval import benchmark as retrieval
from benchmarks.train_overlap import benchmark as train_overlap
from tests.benchmarks.here import RATES, outcome

TORCH = "interpreter and torch"
OURS = retrieval.NAMES[retrieval.OURS]
NO_MEMORY = (
    "exit status 1: RuntimeError: [enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 25165824 bytes. Error code 12 (Cannot allocate memory)"
)


def check_bounds(benchmark: Benchmark, groups: dict[str, list[Outcome]], *complaints: str, **settings: Any) -> None:
    broken = broken_bounds(benchmark, Run(benchmark.settings(**settings), groups=groups))
    assert len(broken) == len(complaints), broken
    for line, complaint in zip(broken, complaints, strict=True):
        assert complaint in line


# --- offload-step ----------------------------------------------------------------------------------------------------


def offload_groups(
    ratio: float = 1.05, waited: float = 0.01, peak: int = 42, held: int = 20, engine: float = 1.0, share: float = 0.95
) -> dict[str, list[Outcome]]:
    def model(name: str, above: int, held: int) -> Outcome:
        result = {"parameters": 1, "statistics": {"peak_device_bytes": held << 20}}
        return outcome(name, result, moments={TORCH: 1}, peaks={"steps": 1 + (above << 20)})

    step = {"resident": 1.0, "streamed": ratio, "ratio": ratio, "waited": waited}
    return {
        "time": [outcome("time", {}, steps=[step] * 3)],
        "finer": [model("4 shards", 90, 20), model("8 shards", 50, 20)],
        "deeper": [model("1 each", 40, 20), model("2 each", peak, held)],
        "engine": [outcome("all in slots", {}, steps=[{"ratio": engine, "loads": int(engine > 1.02)}])],
        "disk": [outcome("disk", {}, steps=[{"share": share}]), outcome("written", {}, steps=[{"share": 0.3}])],
    }


@pytest.mark.parametrize(
    ("groups", "complaints"),
    [
        (offload_groups(), []),
        (offload_groups(ratio=1.2), ["streamed / resident must be at most 1.050, is 1.200"]),
        (offload_groups(ratio=math.nan), ["is nan", "is nan"]),
        (offload_groups(waited=0.06), ["waits must be at most 5.0%, is 5.7%"]),
        (offload_groups(peak=43), ["peak above torch, from 1 each to 2 each: must be at most 42 MiB, is 43 MiB"]),
        (offload_groups(held=22), ["held by the engine"]),
        (offload_groups(engine=1.03), ["all in slots / resident", "shard loads"]),
        (offload_groups(share=0.8), ["loaded / plain read must be at least 90.0%, is 80.0%"]),
        (offload_groups() | {"disk": [outcome("disk", failure="killed")]}, ["disk: killed"]),
    ],
)
def test_offload_step(groups: dict[str, list[Outcome]], complaints: list[str]) -> None:
    check_bounds(offload_step.BENCHMARK, groups, *complaints)


# --- optimizer -------------------------------------------------------------------------------------------------------


def trained(
    method: str, seconds: float = 1.0, peak: int = 100, difference: float | None = None, loss: float = 1.0
) -> Outcome:
    steps = [{"seconds": seconds, "loss": loss}]
    result = {"difference": difference, "first": {"loss": 2.0}}
    peer = "deepspeed" if method == "deepspeed" else ""
    return outcome(NAMES[method], result, steps=steps, reference=[{"seconds": 1.0}], peaks={"steps": peak}, peer=peer)


@pytest.mark.parametrize(
    ("large", "outcomes", "complaints"),
    [
        (False, [trained(DISK, 1.05, 100, 1e-7), trained("deepspeed", 1.6, 400)], []),
        (False, [trained(DISK, 1.06)], ["at most 1.050, is 1.060"]),
        (False, [trained(DISK, difference=2e-6)], ["at most 1e-06, is 2e-06"]),
        (False, [trained(DISK, difference=math.nan)], ["is nan"]),
        (False, [trained(DISK), trained("deepspeed", 1.4, 300)], ["speed-up over DeepSpeed", "memory of DeepSpeed"]),
        (False, [outcome(NAMES[DISK], failure="killed"), trained("deepspeed")], ["on disk: killed"]),
        (True, [trained(FROM_META, 1.0, 2 << 30), trained("deepspeed", 1.6, 8 << 30)], []),
        (True, [trained(FROM_META, 1.0, 3 << 30)], ["at most 2,048 MiB, is 3,072 MiB"]),
        (True, [trained(FROM_META, loss=math.nan)], ["losses must be numbers"]),
    ],
)
def test_optimizer(large: bool, outcomes: list[Outcome], complaints: list[str]) -> None:
    groups = {"all": [*([] if large else [trained(REFERENCE)]), *outcomes]}
    check_bounds(optimizer.BENCHMARK, groups, *complaints, parameters=1e9 if large else None)


# --- frontier, plan-grid ---------------------------------------------------------------------------------------------


def test_a_prediction_is_compared_with_resident_steps_of_its_own_time() -> None:
    """The host became twice as slow after the plan was chosen."""
    steps, reference = [{"seconds": 4.0}] * 3, [{"seconds": 2.0}] * 3
    found = outcome("ours", {"plan": {"planned_seconds": 2.2}}, steps=steps, reference=reference)
    assert frontier.planned_off(found) == pytest.approx(2.2 / 4.0 - 1)
    found.before = [{"seconds": 1.0}] * 3
    assert frontier.planned_off(found) == pytest.approx(0.1)


def at_memory(
    name: str,
    ratio: float = 1.0,
    peak: int = 100,
    memory: int | None = None,
    predicted: float = 1.0,
    seconds: float = 1.0,
    planning: int = 0,
    loss: float = 1.0,
) -> Outcome:
    """Peaks and memory in MiB; ``predicted`` and ``seconds`` to what is measured."""
    steps = [{"seconds": ratio, "loss": loss}] * 3
    plan = {"bytes": predicted * (peak << 20), "planned_seconds": seconds * ratio} if memory else None
    held = {frontier.WARMED: 0}
    peaks = {"planning": (planning or peak) << 20, "steps": peak << 20}
    arguments = {"how": {"memory": memory << 20} if memory else {}}
    more = {"steps": steps, "reference": [{"seconds": 1.0}] * 3, "moments": held, "peaks": peaks}
    return outcome(name, {"plan": plan, "warnings": []}, arguments=arguments, **more)


WHOLE, HALF = at_memory("ours: all of it", 1.0, 100, 100), at_memory("ours: 1/2", 1.05, 50, 50)


@pytest.mark.parametrize(
    ("outcomes", "complaints"),
    [
        ([WHOLE, HALF, at_memory("ours: the least", 9.0, 10, 10)], []),
        ([at_memory("ours: 1/2", 1.06, 50, 50)], ["ours: 1/2: the ratio of times must be at most 1.050, is 1.060"]),
        ([at_memory("ours: 1/2", 1.0, 60, 50)], ["ours: 1/2: the peak must be at most 60 MiB, is 60 MiB"]),
        ([at_memory("ours: 1/2", 1.0, 50, 50, planning=70)], ["the peak must be at most 60 MiB, is 70 MiB"]),
        ([at_memory("ours: 1/2", 1.0, 50, 50, predicted=0.96)], ["the prediction of memory is off"]),
        ([at_memory("ours: 1/2", 1.0, 50, 50, seconds=1.08)], ["the prediction of time is off"]),
        ([at_memory("ours: 1/2", 1.0, 50, 50, loss=1.01)], ["the difference of its last loss"]),
        ([at_memory("peer", 1.0, 50, loss=math.nan)], ["is nan"]),
        ([WHOLE, HALF, at_memory("peer", 1.02, 50)], []),
        ([WHOLE, HALF, at_memory("peer", 1.01, 50)], ["ours in the memory of peer: the ratio must be at most 1.040"]),
        ([WHOLE, HALF, at_memory("peer", 0.9, 20)], []),  # less memory than ours was given
        ([outcome("ours: 1/2", failure="killed")], ["ours: 1/2: killed"]),
    ],
)
def test_frontier(outcomes: list[Outcome], complaints: list[str]) -> None:
    check_bounds(frontier.BENCHMARK, {frontier.IN_TURN: [at_memory(frontier.REFERENCE), *outcomes]}, *complaints)
    reference = {"alone": [outcome(frontier.REFERENCE, failure="killed")], frontier.IN_TURN: []}
    check_bounds(frontier.BENCHMARK, reference, f"{frontier.REFERENCE}: killed")


@pytest.mark.parametrize(
    ("peak", "ratios", "complaints"),
    [
        (58, [0.96, 1.2], []),
        (58, [1.2, 0.95], ["ours to the best of the grid must be at most 1.050, is 1.053"]),
        (60, [1.0], ["the peak of ours must be at most 60 MiB, is 60 MiB"]),
        (58, [], ["is nan"]),
    ],
)
def test_plan_grid(peak: int, ratios: list[float], complaints: list[str]) -> None:
    points = [at_memory(f"{ratio}", ratio, 50) for ratio in ratios]
    check_bounds(plan_grid.BENCHMARK, {"deep": [at_memory(plan_grid.CHOSEN, 1.0, peak, 50), *points]}, *complaints)
    check_bounds(plan_grid.BENCHMARK, {}, "nothing was timed")


def test_a_grid_divides_what_the_least_leaves_and_times_one_point_of_each_plan() -> None:
    points = plan_grid.grid(900, 100, 2)
    shares = {(point["resident_bytes"], point["graph_bytes"]) for point in points}
    assert shares == {(0, 800), (400, 400), (800, 0), (0, 0)}
    assert len(points) == 16
    assert len(plan_grid.grid(900, 100, plan_grid.Settings().splits)) == 40
    assert plan_grid.budgets(1000, 10, 3) == [1000, 122, 15]
    walked = [(3.0, 1), (None, 2), (2.0, 1), (1.0, 3), (4.0, 4)]
    steps = [{"seconds": seconds, "plan": {"slots": slots}} for seconds, slots in walked]
    best = plan_grid.best_of(outcome("grid", {}, steps=steps), 2)
    assert [step["seconds"] for step in best] == [1.0, 2.0]


# --- gradcache-batch -------------------------------------------------------------------------------------------------


def test_gradcache_batch() -> None:
    reference, ours, apart = "upstream GradCache", "ours", "ours over OffloadModel, chunks apart"
    fused, by_chunk = gradcache_batch.FUSED, gradcache_batch.CHUNK_BY_CHUNK

    def timed(name: str, sketch: list[float], seconds: float) -> Outcome:
        return outcome(name, {"sketch": sketch}, steps=[{"seconds": seconds}], reference=[{"seconds": 1.0}])

    def held(name: str, peak: int, **result: Any) -> Outcome:
        return outcome(name, result, peaks={"steps": peak}, moments={TORCH: 50})

    def chunked(name: str, seconds: float, loads: dict[str, int]) -> Outcome:
        return outcome(name, {"bytes_loaded": loads}, steps=[{"chunks": 4, "seconds": seconds}])

    groups = {
        "time": [timed(reference, [3.0, 4.0], 1.0), timed(ours, [3.0, 4.0], 0.5), timed(apart, [3.0, 4.1], 0.9)],
        "peaks": [held(reference, 100), held(ours, 100), held(apart, 200)],
        "growing": [
            outcome("plain torch", {"pairs": 8, "sketches": {"4": [1.0]}}),
            outcome(fused, {"pairs": 4, "sketches": {"4": [1.1]}}),
        ],
        "chunks": [chunked(by_chunk, 4.0, {"1": 1}), chunked(fused, 1.0, {"1": 1, "4": 2})],
        "loss": [held("loss", 100, given=1 << 30)],
    }
    check_bounds(
        gradcache_batch.BENCHMARK,
        groups,
        "loss: memory of the loss",
        f"{apart}: the ratio of times must be at most 0.850, is 0.900",
        f"{apart}: the ratio of peaks",
        f"{apart}: the difference of gradients",
        "4 pairs: the difference of gradients",
        "must hold the largest batch",
        "4 chunks: the speed-up over chunk by chunk must be at least 5, is 4",
        "bytes loaded must not depend on the chunks",
    )
    check_bounds(gradcache_batch.BENCHMARK, groups | {"peaks": [outcome(ours, failure="killed")]}, "ours: killed")
    check_bounds(gradcache_batch.BENCHMARK, {"loss": groups["loss"]}, "loss: memory of the loss", part="loss")


# --- memory-latency --------------------------------------------------------------------------------------------------


STACK = Stack(blocks=1, dim=64, rows=8, positions=8)


def measured(settings: dict[str, Any], result: dict[str, Any], **step: float) -> Outcome:
    arguments = {"method": "ours", "settings": settings, "device": "cpu"}
    work = {"on_device_bytes": 4 * STACK.parameters}
    steps = [{"seconds": 1.0, **step}]
    return outcome("a", {"difference": 0.0, **result}, arguments=arguments, steps=steps, work=work)


def test_memory_latency() -> None:
    def broken(of: Outcome, *complaints: str) -> None:
        check_bounds(memory_latency.BENCHMARK, {"training": [of], "forward": []}, *complaints)

    broken(measured({"memory": 10}, {"statistics": {"peak_device_bytes": 10}}))
    over = measured({"memory": 10}, {"statistics": {"peak_device_bytes": 11}})
    broken(over, "must be at most 10 bytes, is 11 bytes")
    broken(measured({}, {"difference": math.nan}), "the difference from plain PyTorch")
    broken(outcome("dead", failure="killed"), "dead: killed")


def test_the_limit_of_memory_latency_counts_the_bytes_that_a_method_moves() -> None:
    counted = {"bytes_loaded": 2e6, "bytes_stored": 1e6, "bytes_spilled": 2e6}
    at_disk = {"read": 4e6, "from_disk": 4e6, "written": 3e6, "to_disk": 3e6}

    def limit(of: Outcome) -> str:
        return limit_columns(RATES, memory_latency.moved, files=True)["limit"](of)

    assert limit(measured({}, {}, **counted, **at_disk)) == f"{4.0 + 3.0:.3g} s"  # one queue
    copied = (7e6 + 4 * STACK.parameters) / RATES["copied_bytes"]
    assert limit(measured({"disk": False}, {}, **counted)) == f"{1e3 * copied:.3g} ms"


def test_the_front_holds_what_no_other_beats_in_both() -> None:
    assert pareto_front([(1, 5), (2, 3), (3, 4), (4, 1), (2, 6)]) == [(1, 5), (2, 3), (4, 1)]


def test_differences_are_relative_to_each_tensor_and_a_missing_one_is_infinite() -> None:
    from benchmarks.memory_latency.methods import greatest_difference

    expected = {"a": torch.tensor([100.0, 1.0]), "b": torch.tensor([0.01])}
    found = {"a": torch.tensor([101.0, 1.0]), "b": torch.tensor([0.01])}
    assert greatest_difference(found, expected) == pytest.approx(0.01)
    assert greatest_difference({"a": found["a"]}, expected) == math.inf


# --- build-huge ------------------------------------------------------------------------------------------------------


def built(name: str, *losses: float, peak: int = 10, **result: Any) -> Outcome:
    return outcome(name, {"load_seconds": 1.0, **result}, steps=[{"loss": loss} for loss in losses], peaks={"a": peak})


def slower(name: str, ratio: float) -> Outcome:
    found = built(name, 2.0, 1.0)
    found.steps = [{**step, "seconds": ratio} for step in found.steps]
    found.reference = [{"seconds": 1.0}] * 2
    return found


TRAINED = [built("offloaded, capped", 2.0, 1.0), built("resident, no cap", 2.0, 1.0)]


@pytest.mark.parametrize(
    ("outcomes", "complaints"),
    [
        (TRAINED, []),
        ([built("offloaded, capped", out_of_memory="x"), TRAINED[1]], ["offloaded, capped: out of memory: x"]),
        ([built("offloaded, capped", 2.0, 1.0, peak=769 << 20), TRAINED[1]], ["the peak under the cap"]),
        ([built("offloaded, capped", 2.0, 2.0), built("resident, no cap", 2.0, 2.0)], ["the loss must fall"]),
        ([TRAINED[0], built("resident, no cap", 2.0, 1.1)], ["the difference of losses"]),
        ([outcome("offloaded, capped", failure="killed"), TRAINED[1]], ["killed"]),
        ([slower("offloaded, capped", 2.0), slower("offloaded, fewer bytes, capped", 1.1), TRAINED[1]], []),
        (
            [slower("offloaded, capped", 2.1), TRAINED[1]],
            ["the time of a step to the resident one's must be at most 2.00"],
        ),
        ([TRAINED[0], slower("offloaded, fewer bytes, capped", 1.2), TRAINED[1]], ["must be at most 1.10, is 1.20"]),
        ([*TRAINED, built("offloaded, fewer bytes, capped", 2.0, 2.0)], ["fewer bytes, capped: the loss must fall"]),
        (
            [*TRAINED, built("offloaded, fewer bytes, capped", out_of_memory="x")],
            ["fewer bytes, capped: out of memory"],
        ),
    ],
)
def test_build_huge(outcomes: list[Outcome], complaints: list[str]) -> None:
    dead = built("resident, capped", out_of_memory="you tried to allocate 1 byte")
    check_bounds(build_huge.BENCHMARK, {"training": [dead, *outcomes]}, *complaints)
    counted = dict.fromkeys(("bytes_loaded", "bytes_stored", "update_bytes_read", "update_bytes_written"), 100)
    for kernel, complaints in ((396, []), (380, ["kernel's count of bytes"])):
        offloaded = built("offloaded, capped", 2.0, 1.0)
        offloaded.steps = [
            {**step, **counted, "bytes_spilled": 0, "read": kernel, "written": 0} for step in offloaded.steps
        ]
        check_bounds(build_huge.BENCHMARK, {"training": [dead, offloaded, TRAINED[1]]}, *complaints)
    alive = built("resident, capped", 1.0)
    check_bounds(build_huge.BENCHMARK, {"training": [alive, *TRAINED]}, "must not fit under the cap")


# --- pipe-ladder -----------------------------------------------------------------------------------------------------


def pipes(names: Sequence[str], slower: float = 1.0, larger: int = 1) -> dict[str, list[Outcome]]:
    step = {f"{name}: {kind}": 1.0 for name in names for kind in ("clock", "processor")} | {"ours: processor": slower}
    peaks = [
        outcome(name, {"above_model": 100 + larger * (name == "ours")}, peer="" if name == "ours" else name)
        for name in names
    ]
    return {"time": [outcome("time", {"chunks": 2}, steps=[step] * 3)], "peaks": peaks}


def test_pipe_ladder() -> None:
    benchmark, names = pipe_ladder.BENCHMARK, pipe_ladder.PIPES
    check_bounds(benchmark, pipes(names))
    check_bounds(benchmark, pipes(names, slower=1.1), *["processor time, ours / "] * 2)
    check_bounds(benchmark, pipes(names, larger=5), *["peak, ours / "] * 2)
    check_bounds(benchmark, pipes(["ours"], slower=9.0))  # an ancestor that is not installed breaks nothing
    check_bounds(benchmark, {"time": [outcome("time", failure="killed")], "peaks": []}, "time: killed")


# --- retrieval -------------------------------------------------------------------------------------------------------


def searched(name: str, losses: Sequence[float], needs: int = 0, failure: str | None = None) -> Outcome:
    is_ours = name.startswith(OURS)
    steps = [{"loss": loss} for loss in losses]
    result = None if failure else {"held_out": 10}
    more = {"failure": failure, "steps": steps, "data_peak_bytes": needs, "may_lack_memory": not is_ours}
    return outcome(name, result, arguments={"method": "gradcache-offload" if is_ours else "whole"}, **more)


def test_retrieval_needs_equal_losses_and_a_method_in_memory_may_find_none() -> None:
    def broken(*free: Outcome, complaints: Sequence[str] = ()) -> None:
        check_bounds(retrieval.BENCHMARK, {"free": list(free)}, *complaints)

    ours = searched(OURS, [1.0, 2.0])
    broken(ours, searched("b", [1.0, 2.0]))
    broken(ours, searched("b", [1.0, 2.001]), complaints=["the difference of losses"])
    broken(ours, searched("b", [1.0, math.nan]), complaints=["is nan"])
    broken(ours, searched("b", [], failure="killed"), complaints=["b: killed"])
    broken(ours, searched("b", [], failure=NO_MEMORY))
    broken(searched(OURS, [], failure=NO_MEMORY), complaints=[f"{OURS}: exit status 1"])


def test_under_the_cap_only_ours_trains_and_to_its_losses() -> None:
    def broken(ours: Outcome, other: Outcome, *complaints: str) -> None:
        check_bounds(retrieval.BENCHMARK, {"free": [searched(OURS, [1.0, 2.0])], "capped": [ours, other]}, *complaints)

    name = f"{OURS}, capped"
    ours, dead = searched(name, [1.0]), searched("w", [], failure=NO_MEMORY)
    broken(ours, dead)
    broken(searched(name, [1.001]), dead, "losses must agree")
    broken(searched(name, [math.nan]), dead, "losses must agree")
    broken(ours, searched("w", [1.0]), "but it trained")
    broken(ours, searched("w", [], failure="killed"), "w: killed")
    broken(searched(name, [], failure=NO_MEMORY), dead, f"{name}: exit status 1")


def test_the_cap_is_midway_between_ours_and_the_least_of_the_others() -> None:
    ours, others = searched(OURS, [1.0], 100), [searched("whole", [1.0], 500), searched("cached", [1.0], 200)]
    assert retrieval.midway([ours, *others]) == 150
    assert retrieval.midway([ours, *others, searched("dead", [], 50, NO_MEMORY)]) == 150
    assert retrieval.midway([searched(OURS, [1.0], 200), *others]) is None
    assert retrieval.midway([searched(OURS, [], 100, "killed"), *others]) is None
    assert retrieval.midway([ours]) is None


# --- train-overlap, gpu-train ----------------------------------------------------------------------------------------


def overlapped(ratio: float, undistributed: dict[str, str] | None = None, peer: str = "") -> Outcome:
    settings = {"table_rows": 300, "table_dim": 4, "bags": 16, "indices": 2, "width": 8}
    result = {"undistributed": undistributed or {}, "latencies": [0.001, 0.005], "bytes_of_rows": 8.0}
    return outcome("even", result, arguments={"settings": settings}, steps=[{"ratio": ratio}] * 3, peer=peer)


def test_train_overlap() -> None:
    def broken(*outcomes: Outcome, complaints: Sequence[str] = ()) -> None:
        check_bounds(train_overlap.BENCHMARK, {"balances": list(outcomes)}, *complaints)

    broken(overlapped(train_overlap.MAXIMUM_RATIO), overlapped(2.0, peer="torchrec"))
    broken(overlapped(1.11), complaints=["is 1.110"])
    broken(overlapped(1.0, {"bag": "no call"}), complaints=["rows did not run ahead"])
    assert train_overlap.more_work(overlapped(1.0))["seconds"] == 0.005  # no machine shortens a latency


def test_gpu_train() -> None:
    def broken(*losses: float, complaints: Sequence[str] = ()) -> None:
        outcomes = [outcome(f"{loss}", {}, steps=[{"loss": loss}]) for loss in losses]
        check_bounds(gpu_train.BENCHMARK, {"training": outcomes}, *complaints)

    broken(1.0, 1.01)
    broken(1.0, 1.2, complaints=["1.2: the difference of its first loss from that of 1.0"])
    broken(math.nan, complaints=["losses are [nan]"])


def test_the_limit_of_gpu_train_counts_adamw_where_its_states_are_and_what_must_move_then() -> None:
    asked: list[Any] = []
    run = Run(gpu_train.Settings())
    run.group = lambda name, cases, **how: asked.extend(cases)  # type: ignore[method-assign]
    gpu_train.measure(run)
    work = {case.arguments["method"]: case.work.keys() - {"flops"} for case in asked}
    assert work["checkpointed"] == {"on_device_bytes"}
    assert work["checkpointed torchao"] == {"copied_bytes", "loaded_bytes", "drained_bytes"}
    assert work["ours"] == {"copied_bytes"}  # and what it counts itself
    step = {"seconds": 1.0, "bytes_loaded": 3, "bytes_stored": 2}
    assert gpu_train._moved(outcome("ours", steps=[step])) == {"loaded_bytes": 3, "drained_bytes": 2}
