"""Mutation tests of offload: without any one of its waits and events, a scenario whose copies are late fails.

The table is complete by construction: :func:`test_no_wait_is_forgotten` finds the waits in the sources, and each must
be in it, or among the few exceptions with the reason why. No scenario hangs and none is timed: copies run when somebody
waits for them, and in an order that an adversary chooses.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pipe.train import InlineLane
from tests.offload.scenarios import blocks, boundaries, files, lanes, reading, rows, training
from tests.waits import Scenario, find_sites, is_value_used, take_out

#: Each scenario, and the waits without any of which it fails: by module, function and text.
NEEDS: dict[Scenario, list[str]] = {
    blocks.a_step_that_is_interrupted_while_a_thread_updates_is_whole: [
        "optim.optimizer OffloadOptimizer._step: self._thread_at_once.wait_idle()",
    ],
    blocks.parameters_outside_of_blocks_are_updated_by_the_step: [
        "optim.update StepDecision.run_at_once: future.wait()",
    ],
    blocks.suspended_forwards_have_ended_when_the_call_returns: [
        "engine.chunks run_chunks: each.cancel()",
        "engine.suspend SuspendedForward.cancel: self._thread.join(1.0)",
    ],
    boundaries.what_nobody_reads_is_freed_when_it_has_been_read_back: [
        "engine.boundaries Boundaries._unused: fetching[0].synchronize()",
    ],
    boundaries.what_leaves_memory_comes_back: [
        "engine.boundaries Boundaries._end_write: boundary.arrival.wait()",
        "engine.boundaries Boundaries._load: arrival.wait()",
    ],
    files.a_buffer_is_used_again_after_the_copy_out_of_it: [
        "storage.transfer Staging.acquire_buffer: fence()",
    ],
    files.a_discarded_prefetch_never_lands: [
        "optim.io_buffers IOBuffer.clear: job.cancel()",
    ],
    files.a_read_is_done_when_it_returns: [
        "storage.transfer Transfers.move: helpers[-1].run_or_wait()",
    ],
    files.a_transfer_that_failed_goes_on_nowhere: [
        "storage.transfer Transfers.move: helpers.pop().cancel()",
    ],
    files.a_write_comes_after_the_copy_from_the_device: [
        "storage.transfer Transfers._move_staged: fence()",
    ],
    files.an_io_buffer_holds_what_was_asked_for: [
        "optim.io_buffers IOBuffer.wait: job.run_or_wait()",
        "optim.io_buffers IOBufferPool.prepare: self._current.wait()",
    ],
    files.an_update_has_arrived_when_it_is_done: [
        "optim.update Update.flush: self.buffer_pool.wait_idle()",
    ],
    files.an_update_that_failed_goes_on_nowhere: [
        "optim.update Update._run: self.buffer_pool.wait_idle()",
    ],
    files.weights_are_there_when_they_are_updated: [
        "optim.update Update._run: filling.run_or_wait()",
    ],
    files.what_fails_to_be_written_goes_on_nowhere: [
        "optim.io_buffers IOBuffer.collect: job.run_or_wait()",
    ],
    lanes.a_clock_counts_what_has_ended: [
        "telemetry.clock Clock.span: begin.record(stream)",
        "telemetry.clock Clock.span: end.record(stream)",
        "telemetry.clock Clock._wait_idle: end.synchronize()",
        "telemetry.clock Clock.seconds: self._wait_idle(wait=True)",
        "telemetry.clock Clock.seconds_each: self._wait_idle(wait=True)",
    ],
    lanes.a_clock_hoards_no_events_and_never_waits_in_a_step: [
        "telemetry.clock Clock.span: self._wait_idle(wait=False)",
        "telemetry.clock Clock._wait_idle: end.query()",
    ],
    lanes.a_copy_comes_after_what_it_was_given_after: [
        "streaming.lane StreamCopyLane.submit: arrival.wait()",
        "streaming.lane ThreadCopyLane.submit: arrival.synchronize()",
    ],
    lanes.a_fence_is_passed_after_its_copy: [
        "storage.transfer CudaLink.copier: event.record(stream)",
        "storage.transfer CudaLink.copier: event.synchronize",
    ],
    lanes.a_home_goes_after_the_last_copy_of_it: [
        "streaming.lane StreamCopyLane.close: self._stream.synchronize()",
    ],
    lanes.a_lane_is_at_rest_after_all_its_copies: [
        "streaming.lane ThreadCopyLane.wait_idle: self._threads.wait_idle()",
        "streaming.lane StreamCopyLane.wait_idle: self._threads.wait_idle()",
        "streaming.lane StreamCopyLane.wait_idle: self._stream.synchronize()",
    ],
    lanes.a_slot_is_filled_after_its_readers: [
        "streaming.lane StreamCopyLane.submit: torch.cuda.current_stream(self._device).record_event()",
        "streaming.lane StreamCopyLane.submit: self._stream.wait_event(given)",
        "streaming.lane ThreadCopyLane.submit: torch.cuda.current_stream(device).record_event()",
        "streaming.lane ThreadCopyLane.submit: stream.wait_event(given)",
    ],
    lanes.bytes_are_there_when_a_thread_says_so: [
        "streaming.lane ThreadCopyLane.submit: stream.synchronize()",
    ],
    lanes.what_a_lane_of_ranks_frees_is_known_to_the_allocator: [
        "mesh.ranks Transport.use: record_stream(tensor, current_stream(self.device))",
    ],
    lanes.what_is_copied_after_the_close_is_there_when_its_memory_goes: [
        "streaming.lane StreamCopyLane.submit: self._stream.synchronize()",
    ],
    reading.a_closed_model_is_updated: [
        "model OffloadModel.close: self._homes.streamer.apply_pending_updates()",
    ],
    reading.a_loaded_optimizer_is_not_updated_by_an_earlier_step: [],
    reading.a_parameter_that_a_module_is_asked_for_is_updated: [
        "streaming.current_values _Parameters._finish: pending.start().synchronize()",
        "streaming.current_values _Parameters.__getitem__: self._finish(name)",
    ],
    reading.a_second_step_is_a_second_update: [],
    reading.a_step_that_others_can_see_is_finished: [
        "optim.optimizer OffloadOptimizer._end_step: self._synchronize()",
    ],
    reading.data_that_is_assigned_is_not_updated_by_an_earlier_step: [
        "engine.weight_writes AssignedData._refuse_held: shard.pending.start().synchronize()",
    ],
    reading.gradients_are_zeroed_after_their_use_by_the_optimizer: [],
    reading.parameters_are_updated: [
        "streaming.current_values _Parameters._finish_all: streamer.apply_pending_updates()",
    ],
    reading.parameters_of_groups_are_updated: [
        "optim.groups Members.__iter__: finish()",
        "optim.optimizer OffloadOptimizer._finish_updates: self._synchronize()",
    ],
    reading.synchronize_finishes_the_update: [
        "streaming.streamer Streamer.apply_pending_updates: arrival.synchronize()",
        "optim.optimizer OffloadOptimizer.synchronize: self._synchronize()",
        "optim.optimizer OffloadOptimizer._synchronize: self.homes.streamer.apply_pending_updates()",
    ],
    reading.the_state_of_the_optimizer_is_updated: [],
    reading.what_a_collected_model_left_pending_is_updated: [
        "streaming.current_values _Parameters._finish_all: self._finish('a parameter')",
    ],
    rows.a_lookup_finds_its_rows: [
        "embedding.bag OffloadEmbeddingBag.compute_and_output_dist: request.ticket.wait()",
    ],
    rows.a_read_that_failed_is_told_by_its_wait: [
        "embedding.bag RowRequest.wait: self.ticket.wait()",
    ],
    rows.indices_are_read_after_they_have_come: [
        "embedding.bag OffloadEmbeddingBag.input_dist: fence(self.device)",
        "embedding.bag OffloadEmbeddingBag._read: before.wait()",
    ],
    rows.what_crosses_streams_is_known_to_the_allocator: [
        "embedding.bag OffloadEmbeddingBag._read: record_stream(input, self.lane.stream)",
        "embedding.bag OffloadEmbeddingBag.compute_and_output_dist: "
        "record_stream([batch.values, batch.positions], torch.cuda.current_stream(self.device))",
    ],
    training.a_store_that_failed_is_told_once: [
        "streaming.streamer Streamer.reset: self.gradient_offload.cancel()",
    ],
    training.an_unused_load_never_lands: [
        "streaming.streamer Streamer.evict: self.loaded.pop(j).wait()",
    ],
    training.an_update_that_was_cut_off_from_its_load_ends_first: [
        "streaming.streamer Streamer.reset: pending.wait_idle()",
    ],
    training.an_update_whose_start_was_interrupted_runs_once: [
        "optim.update Update.wait_idle: self.lane.wait_idle()",
        "optim.update Update.wait_idle: self.io_threads.wait_idle()",
        "optim.update Update.start: self.wait_idle()",
    ],
    training.gradients_do_not_pile_up: [
        "streaming.gradient_offload GradientOffload.update: self._synchronize()",
        "streaming.gradient_offload GradientOffload._send: self._synchronize()",
    ],
    training.it_trains_like_the_bare_model: [
        "engine.homes ModelHomes._rest: self.streamer.apply_pending_updates()",
        "streaming.streamer Streamer._fill: self.lanes.load.submit(f'L{j}', fill, arrivals + others)",
        "streaming.streamer Streamer.await_load: self.loaded[j].wait()",
        "streaming.gradient_offload GradientOffload.settle: self._synchronize(on_host=True)",
        "streaming.gradient_offload GradientOffload._synchronize: arrival.synchronize()",
        "streaming.gradient_offload GradientOffload._synchronize: arrival.wait()",
    ],
    training.nothing_moves_after_an_exception: [
        "streaming.streamer Streamer.reset: self.lanes.wait_idle()",
        "engine.backward Backward.abort: self.streamer.cancel()",
        "streaming.lane CopyLanes.wait_idle: lane.wait_idle()",
    ],
    training.data_assigned_in_a_forward_is_stored_when_no_load_reads_its_home: [
        "engine.engine Engine._load_again: self.streamer.wait_for_home_reads()",
    ],
    training.the_host_waits_at_the_end_of_a_pass_and_never_before: [
        "streaming.streamer Streamer.wait_for_home_reads: arrival.synchronize()",
        "engine.engine Engine.forward: self.streamer.wait_for_home_reads()",
        "engine.backward Backward._finish: self.streamer.wait_for_home_reads()",
    ],
    training.updates_in_backward_see_complete_gradients: [
        "streaming.gradient_offload GradientOffload.update: "
        "self._updater.complete(shard, kept, slot, after=[arrival for arrival, _, _ in self._drains])",
        "streaming.optimizers InBackward.complete: update.start(slot, after=after, holds=True)",
        "optim.update Update.start: "
        "self.lane.submit(f'{self.letter}{self.shard.index}', partial(self._run, slot, filling), after)",
    ],
}
TABLE = {wait: scenario for scenario, waits in NEEDS.items() for wait in waits}

#: Waits whose value is used, and what has that value without waiting.
STAND_INS: dict[str, Callable[..., Any]] = {
    "embedding.bag OffloadEmbeddingBag.input_dist: fence(self.device)": (
        lambda device: InlineLane().submit(lambda: None)
    ),
    "embedding.bag OffloadEmbeddingBag.compute_and_output_dist: request.ticket.wait()": rows.unfilled,
    "telemetry.clock Clock._wait_idle: end.query()": lambda event: True,
    "streaming.lane ThreadCopyLane.submit: torch.cuda.current_stream(device).record_event()": (
        lambda stream: torch.cuda.Event()  # one that was never recorded
    ),
    "streaming.lane StreamCopyLane.submit: torch.cuda.current_stream(self._device).record_event()": (
        lambda stream: torch.cuda.Event()
    ),
}

#: What is found by its name and does not wait, or what a process does at its end.
EXCEPTIONS = {
    "embedding.bag OffloadEmbeddingBag.forward: "
    "self.input_dist(None, input, offsets, per_sample_weights).wait()": "returns the request at once",
    "embedding.bag OffloadEmbeddingBag.forward: "
    "self.input_dist(None, input, offsets, per_sample_weights).wait().wait()": "compute_and_output_dist waits again",
    "telemetry.statistics Meter.__init__: self.wait": "a clock",
    "telemetry.statistics _Waiting.__enter__: meter.wait": "the same clock",
    "telemetry.statistics Meter.read: self.wait": "the same clock",
    "telemetry.statistics _Waiting.__exit__: self._meter.wait": "the same clock",
    "engine.backward Backward._finish: self.streamer.gradient_offload.wait_idle()": (
        "settle() before it has waited; it ends the backward"
    ),
    "streaming.streamer Streamer.await_update_in_place: pending.start().wait()": (
        "a layer that asks its module for a parameter waits on the host"
    ),
    "construction construct: calls.join(model, homes, opened.persistent_home.values, undo.callback)": (
        "connects parts of a model"
    ),
    "engine.engine Engine._run_observed: "
    "step.record(recorder, place, (args, kwargs), keeps=keeps, hidden=hidden)": "records sizes",
    "planner.memory_planner MemoryPlanner._plan_again: self._streamer.apply_pending_updates()": (
        "sizes of states are read, not their values"
    ),
    **{
        f"optim.optimizer OffloadOptimizer.{method}: self._synchronize()": "reads that follow wait, too"
        for method in ("_step", "load_state_dict", "state_dict", "zero_grad")
    },
    "optim.groups Members.__iter__: self._finish()": "a weak reference to what is called next",
    "loading _EmptyOnHost.__torch_function__: record(func, args, kwargs, result)": "no event",
    "advise.rates _steps: optimizer.synchronize()": "times updates",
    "streaming.moves move_homes: torch.cuda.synchronize(device)": "copies from a device, which needs one",
    "mesh.gradients MeshGradientOffload.cancel: super().cancel()": "passes on what is in the table above",
    "mesh.gradients MeshGradientOffload.wait_idle: super().wait_idle()": "the same",
    "mesh.gradients MeshGradientOffload.drain: arrival.wait()": (
        "needs several processes: tests/offload/mesh takes it out, too"
    ),
    "mesh.gradients means_of_parts: arrival.synchronize()": "bounds memory, which tests/offload/mesh measures",
    "mesh.sharded MeshParameters.store_replicated: arrival.synchronize()": "the same as of a drain",
    "mesh.ranks CollectiveLane.submit: arrival.synchronize()": (
        "needs several processes: tests/offload/mesh takes it out, too"
    ),
}

SITES = {str(site).removeprefix("offload."): site for site in find_sites(["offload"])}
SCENARIOS = {scenario.__name__: scenario for scenario in NEEDS}


def test_no_wait_is_forgotten() -> None:
    assert sorted(SITES) == sorted([*TABLE, *EXCEPTIONS])


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_with_all_waits(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    SCENARIOS[name].assert_passes(monkeypatch, tmp_path)


@pytest.mark.parametrize("wait", sorted(TABLE))
def test_without_this_wait(wait: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take_out(SITES[wait], monkeypatch, STAND_INS.get(wait))
    TABLE[wait].assert_fails(monkeypatch, tmp_path)


def test_every_used_value_has_a_stand_in() -> None:
    assert set(STAND_INS) == {wait for wait in TABLE if is_value_used(SITES[wait])}
