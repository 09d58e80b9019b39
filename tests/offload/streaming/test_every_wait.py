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
from tests.waits import Scenario, Site, find_sites, is_value_used, take_out

#: module -> function -> [(text of the wait, the scenario that fails without it)]
WAITS: dict[str, dict[str, list[tuple[str, Scenario]]]] = {
    "offload.streaming.streamer": {
        "Streamer._fill": [
            (
                "self._lanes.load.submit(f'L{j}', fill, arrivals + others)",
                training.loads_see_the_updates_of_their_homes,
            ),
        ],
        "Streamer.apply_pending_updates": [("arrival.synchronize()", reading.synchronize_finishes_the_update)],
        "Streamer.evict": [("self._loads.pop(j).wait()", training.an_unused_load_never_lands)],
        "Streamer.await_load": [("self._loads[j].wait()", training.it_trains_like_the_bare_model)],
        "Streamer.wait_for_home_reads": [
            ("arrival.synchronize()", training.the_host_waits_at_the_end_of_a_pass_and_never_before)
        ],
        "Streamer.reset": [
            ("self._lanes.wait_idle()", training.nothing_moves_after_an_exception),
            ("pending.wait_idle()", training.an_update_that_was_cut_off_from_its_load_ends_first),
            ("self.gradient_offload.cancel()", training.a_store_that_failed_is_told_once),
        ],
    },
    "offload.streaming.current_values": {
        "_Parameters._finish": [
            ("pending.start().synchronize()", reading.a_parameter_that_a_module_is_asked_for_is_updated)
        ],
        "_Parameters.__getitem__": [("self._finish(name)", reading.a_parameter_that_a_module_is_asked_for_is_updated)],
        "_Parameters._finish_all": [
            ("streamer.apply_pending_updates()", reading.parameters_are_updated),
            ("self._finish('a parameter')", reading.what_a_collected_model_left_pending_is_updated),
        ],
    },
    "offload.streaming.gradient_offload": {
        "GradientOffload.update": [
            (
                "self._updater.complete(shard, kept, slot, after=[arrival for arrival, _, _ in self._drains])",
                training.updates_in_backward_see_complete_gradients,
            ),
            ("self._synchronize()", training.gradients_do_not_pile_up),
        ],
        "GradientOffload.settle": [("self._synchronize(on_host=True)", training.it_trains_like_the_bare_model)],
        "GradientOffload._synchronize": [
            ("arrival.synchronize()", training.it_trains_like_the_bare_model),
            ("arrival.wait()", training.it_trains_like_the_bare_model),
        ],
        "GradientOffload._send": [("self._synchronize()", training.gradients_do_not_pile_up)],
    },
    "offload.engine.weight_writes": {
        "AssignedData._refuse_held": [
            ("shard.pending.start().synchronize()", reading.data_that_is_assigned_is_not_updated_by_an_earlier_step),
        ],
    },
    "offload.engine.engine": {
        "Engine.forward": [
            ("self.streamer.wait_for_home_reads()", training.the_host_waits_at_the_end_of_a_pass_and_never_before),
        ],
    },
    "offload.engine.backward": {
        "Backward._finish": [
            ("self.streamer.wait_for_home_reads()", training.the_host_waits_at_the_end_of_a_pass_and_never_before),
        ],
        "Backward.abort": [("self.streamer.cancel()", training.nothing_moves_after_an_exception)],
    },
    "offload.engine.chunks": {
        "run_chunks": [("each.cancel()", blocks.suspended_forwards_end_when_one_fails)],
    },
    "offload.engine.boundaries": {
        "Boundaries._end_write": [("boundary.arrival.wait()", boundaries.what_leaves_memory_comes_back)],
        "Boundaries._load": [
            ("arrival.wait()", boundaries.what_leaves_memory_comes_back),
            (
                "part.record_stream(torch.cuda.current_stream(part.device))",
                boundaries.memory_read_back_is_known_to_be_used_by_compute,
            ),
        ],
    },
    "offload.engine.homes": {
        "ModelHomes._rest": [
            ("self.streamer.apply_pending_updates()", training.shards_move_after_their_updates),
        ],
    },
    "offload.streaming.lane": {
        "ThreadCopyLane.submit": [
            ("torch.cuda.current_stream(device).record_event()", lanes.a_thread_fills_a_slot_after_its_readers),
            ("arrival.synchronize()", lanes.a_copy_on_a_thread_comes_after_what_it_was_given_after),
            ("stream.wait_event(given)", lanes.a_thread_fills_a_slot_after_its_readers),
            ("stream.synchronize()", lanes.bytes_are_there_when_a_thread_says_so),
        ],
        "StreamCopyLane.submit": [
            ("torch.cuda.current_stream(self._device).record_event()", lanes.a_stream_fills_a_slot_after_its_readers),
            ("self._stream.wait_event(given)", lanes.a_stream_fills_a_slot_after_its_readers),
            ("arrival.wait()", lanes.a_copy_on_a_stream_comes_after_what_it_was_given_after),
            ("self._stream.synchronize()", lanes.what_is_copied_after_the_close_is_there_when_its_memory_goes),
        ],
        "ThreadCopyLane.wait_idle": [("self._threads.wait_idle()", lanes.a_lane_is_at_rest_after_all_its_copies)],
        "StreamCopyLane.wait_idle": [
            ("self._threads.wait_idle()", lanes.a_lane_is_at_rest_after_all_its_copies),
            ("self._stream.synchronize()", lanes.a_lane_is_at_rest_after_all_its_copies),
        ],
        "CopyLanes.wait_idle": [("lane.wait_idle()", training.nothing_moves_after_an_exception)],
        "StreamCopyLane.close": [("self._stream.synchronize()", lanes.a_home_goes_after_the_last_copy_of_it)],
    },
    "offload.telemetry.clock": {
        "Clock.span": [
            ("begin.record(stream)", lanes.a_clock_counts_what_has_ended),
            ("end.record(stream)", lanes.a_clock_counts_what_has_ended),
            ("self._wait_idle(wait=False)", lanes.a_clock_hoards_no_events_and_never_waits_in_a_step),
        ],
        "Clock._wait_idle": [
            ("end.query()", lanes.a_clock_hoards_no_events_and_never_waits_in_a_step),
            ("end.synchronize()", lanes.a_clock_counts_what_has_ended),
        ],
        "Clock.seconds": [("self._wait_idle(wait=True)", lanes.a_clock_counts_what_has_ended)],
        "Clock.seconds_each": [("self._wait_idle(wait=True)", lanes.a_forecast_counts_what_has_ended)],
    },
    "offload.model": {
        "OffloadModel.close": [("self._homes.streamer.apply_pending_updates()", reading.a_closed_model_is_updated)],
    },
    "offload.optim.optimizer": {
        "OffloadOptimizer._step": [
            ("self._synchronize()", reading.a_second_step_is_a_second_update),
            ("self._resident.wait_idle()", blocks.a_step_that_is_interrupted_while_a_thread_updates_is_whole),
        ],
        "OffloadOptimizer._end_step": [("self._synchronize()", reading.a_step_that_others_can_see_is_finished)],
        "OffloadOptimizer.zero_grad": [
            ("self._synchronize()", reading.gradients_are_zeroed_after_their_use_by_the_optimizer),
        ],
        "OffloadOptimizer.synchronize": [("self._synchronize()", reading.synchronize_finishes_the_update)],
        "OffloadOptimizer._synchronize": [
            ("self.homes.streamer.apply_pending_updates()", reading.synchronize_finishes_the_update)
        ],
        "OffloadOptimizer.state_dict": [("self._synchronize()", reading.the_state_of_the_optimizer_is_updated)],
        "OffloadOptimizer.load_state_dict": [
            ("self._synchronize()", reading.a_loaded_optimizer_is_not_updated_by_an_earlier_step),
        ],
    },
    "offload.optim.update": {
        "InBackward.complete": [
            ("update.start(slot, after=after, holds=True)", training.updates_in_backward_see_complete_gradients)
        ],
        "Update.wait_idle": [
            ("self._lane.wait_idle()", training.an_update_whose_start_was_interrupted_runs_once),
            ("self._io_threads.wait_idle()", training.an_update_whose_start_was_interrupted_runs_once),
        ],
        "Update.start": [
            ("self.wait_idle()", training.an_update_whose_start_was_interrupted_runs_once),
            (
                "self._lane.submit(f'{self.letter}{self._shard.index}', partial(self._run, slot, filling), after)",
                training.updates_in_backward_see_complete_gradients,
            ),
        ],
        "Update._run": [("job.param_block.cancel_prefetch()", files.an_update_that_failed_goes_on_nowhere)],
        "Update._prepare": [
            ("filling.run_or_wait()", files.weights_are_there_when_they_are_updated),
        ],
    },
    "offload.optim.disk_update": {
        "DiskParamBlock.flush": [
            ("self._buffer_pool.wait_idle()", files.an_update_has_arrived_when_it_is_done),
        ],
        "DiskParamBlock.cancel_prefetch": [
            ("self._buffer_pool.wait_idle()", files.an_update_that_failed_goes_on_nowhere)
        ],
    },
    "offload.optim.io_buffers": {
        "IOBuffer.wait": [("job.run_or_wait()", files.an_io_buffer_holds_what_was_asked_for)],
        "IOBuffer._cancel": [("job.cancel()", files.a_discarded_prefetch_never_lands)],
        "IOBufferPool.prepare": [("self._current.wait()", files.an_io_buffer_holds_what_was_asked_for)],
        "IOBuffer.collect": [("job.run_or_wait()", files.what_fails_to_be_written_goes_on_nowhere)],
    },
    "offload.storage.transfer": {
        "Transfers._move": [
            ("pending.popleft().complete()", files.where_buffers_are_few_pieces_wait_for_them),
            ("pending.popleft().complete() #2", files.few_pieces_are_on_their_way),
            ("pending.popleft().complete() #3", files.a_read_is_done_when_it_returns),
            ("transfer.cancel()", files.a_transfer_that_failed_goes_on_nowhere),
        ],
        "_PieceTransfer.start": [("self._fence()", files.a_write_comes_after_the_copy_from_the_device)],
        "_PieceTransfer.complete": [
            ("self._job.run_or_wait()", files.a_read_is_done_when_it_returns),
            ("self.cancel()", files.buffers_are_given_back),
        ],
        "_PieceTransfer.cancel": [("job.cancel()", files.a_transfer_that_failed_goes_on_nowhere)],
        "CudaLink.copy": [
            (
                "event.record(torch.cuda.current_stream((destination if destination.is_cuda else source).device))",
                lanes.a_fence_is_passed_after_its_copy,
            ),
            ("event.synchronize", lanes.a_fence_is_passed_after_its_copy),
        ],
        "Staging.nbytes": [("with self._changed", files.a_lane_waits_for_a_buffer_of_another)],
        "Staging.acquire_buffer": [
            ("with self._changed", files.a_lane_waits_for_a_buffer_of_another),
            ("with self._changed #2", files.a_buffer_that_could_not_be_made_is_made_by_another),
            ("self._changed.wait()", files.a_lane_waits_for_a_buffer_of_another),
            ("self._changed.notify()", files.a_buffer_that_could_not_be_made_is_made_by_another),
            ("fence()", files.a_buffer_is_used_again_after_the_copy_out_of_it),
        ],
        "Staging.release": [
            ("with self._changed", files.a_lane_waits_for_a_buffer_of_another),
            ("self._changed.notify()", files.a_lane_waits_for_a_buffer_of_another),
        ],
    },
    "offload.storage.page_cache": {
        "PageCache.direct": [("with self._lock", files.one_thread_finds_out_what_the_file_system_can)],
    },
    "offload.mesh.ranks": {
        "Transport.use": [
            (
                "record_stream(tensor, current_stream(self.device))",
                lanes.what_a_lane_of_ranks_frees_is_known_to_the_allocator,
            )
        ],
    },
    "offload.telemetry.trace": {
        "Tracer.span": [("with self._lock", files.one_thread_at_a_time_writes_a_trace)],
        "Tracer.sample": [("with self._lock", files.one_thread_at_a_time_writes_a_trace)],
    },
    "offload.engine.suspend": {
        "SuspendedForward.cancel": [
            ("self._thread.join(1.0)", blocks.suspended_forwards_have_ended_when_the_call_returns)
        ],
    },
    "offload.optim.resident": {
        "ResidentParameters.run": [
            ("future.wait()", blocks.parameters_outside_of_blocks_are_updated_by_the_step),
        ],
        "ResidentParameters.wait_idle": [
            ("self._thread.wait_idle()", blocks.a_step_that_is_interrupted_while_a_thread_updates_is_whole)
        ],
    },
    "offload.embedding.bag": {
        "RowRequest.wait": [("self.ticket.wait()", rows.a_read_that_failed_is_told_by_its_wait)],
        "RowReader.begin": [("fence(self._device)", rows.indices_are_read_after_they_have_come)],
        "RowReader._read": [
            ("before.wait()", rows.indices_are_read_after_they_have_come),
            ("record_stream(input, self.lane.stream)", rows.what_crosses_streams_is_known_to_the_allocator),
        ],
        "RowReader.collect": [
            ("request.ticket.wait()", rows.a_lookup_finds_its_rows),
            (
                "record_stream([batch.values, batch.positions], torch.cuda.current_stream(self._device))",
                rows.what_crosses_streams_is_known_to_the_allocator,
            ),
        ],
    },
}

#: Waits whose value is used, and what has that value without waiting.
STAND_INS: dict[str, Callable[..., Any]] = {
    "offload.embedding.bag RowReader.begin: fence(self._device)": (lambda device: InlineLane().submit(lambda: None)),
    "offload.embedding.bag RowReader.collect: request.ticket.wait()": rows.unfilled,
    "offload.telemetry.clock Clock._wait_idle: end.query()": lambda event: True,
    "offload.streaming.lane ThreadCopyLane.submit: torch.cuda.current_stream(device).record_event()": (
        lambda stream: torch.cuda.Event()  # one that was never recorded
    ),
    "offload.streaming.lane StreamCopyLane.submit: torch.cuda.current_stream(self._device).record_event()": (
        lambda stream: torch.cuda.Event()
    ),
}

#: What is found by its name and does not wait, or what a process does at its end.
EXCEPTIONS = {
    "offload.embedding.bag OffloadEmbeddingBag.forward: "
    "self.input_dist(None, input, offsets, per_sample_weights).wait()": "returns the request at once",
    "offload.embedding.bag OffloadEmbeddingBag.forward: "
    "self.input_dist(None, input, offsets, per_sample_weights).wait().wait()": "compute_and_output_dist waits again",
    "offload.telemetry.statistics Meter.__init__: self.wait": "a clock",
    "offload.telemetry.statistics _Waiting.__enter__: meter.wait": "the same clock",
    "offload.telemetry.statistics Meter.read: self.wait": "the same clock",
    "offload.telemetry.statistics _Waiting.__exit__: self._meter.wait": "the same clock",
    "offload.engine.backward Backward._finish: self.streamer.gradient_offload.wait_idle()": (
        "settle() before it has waited; it ends the backward"
    ),
    "offload.streaming.streamer Streamer.await_update_in_place: pending.start().wait()": (
        "a layer that asks its module for a parameter waits on the host"
    ),
    "offload.construction construct: calls.join(model, homes, home.values, undo.callback)": "connects parts of a model",
    "offload.engine.engine Engine._run_observed: "
    "step.record(recorder, place, (args, kwargs), keeps=keeps, hidden=hidden)": "records sizes",
    "offload.engine.boundaries Boundaries._load: boundary.join(parts)": "puts a tensor together of its parts",
    "offload.engine.plans.memory_planner MemoryPlanner._plan_again: self._streamer.apply_pending_updates()": (
        "sizes of states are read, not their values"
    ),
    "offload.identities identities_only: _IDENTITIES_ONLY.set(id(sys._getframe(2)))": "a setting of this thread",
    "offload.identities values_may_be_read: _IDENTITIES_ONLY.set(None)": "the same setting",
    "offload.loading _EmptyOnHost.__torch_function__: record(func, args, kwargs, result)": "no event",
    "offload.advise.rates _steps: optimizer.synchronize()": "times updates",
    "offload.streaming.moves move_homes: torch.cuda.synchronize(device)": "copies from a device, which needs one",
    "offload.mesh.gradients MeshGradientOffload.cancel: super().cancel()": "passes on what is in the table above",
    "offload.mesh.gradients MeshGradientOffload.wait_idle: super().wait_idle()": "the same",
    "offload.mesh.gradients MeshGradientOffload.drain: arrival.wait()": (
        "needs several processes: tests/offload/mesh takes it out, too"
    ),
    "offload.mesh.gradients means_of_parts: arrival.synchronize()": "bounds memory, which tests/offload/mesh measures",
    "offload.mesh.sharded MeshParameters.store_replicated: arrival.synchronize()": "the same as of a drain",
    "offload.mesh.ranks CollectiveLane.submit: arrival.synchronize()": (
        "needs several processes: tests/offload/mesh takes it out, too"
    ),
}
#: What ranks tell each other of failures: no values of a model.
NOTICES = "offload.mesh.notices "

TABLE = {
    f"{module} {function}: {text}": scenario
    for module, functions in WAITS.items()
    for function, waits in functions.items()
    for text, scenario in waits
}
SITES = {str(site): site for site in find_sites(["offload"])}
SCENARIOS = {scenario.__name__: scenario for scenario in TABLE.values()}


def test_no_wait_is_forgotten() -> None:
    found = [site for site in SITES if not site.startswith(NOTICES)]
    assert sorted(found) == sorted([*TABLE, *EXCEPTIONS])


@pytest.mark.parametrize("name", sorted(SCENARIOS))
def test_with_all_waits(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    SCENARIOS[name].assert_passes(monkeypatch, tmp_path)


@pytest.mark.parametrize("wait", sorted(TABLE))
def test_without_this_wait(wait: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    take_out(SITES[wait], monkeypatch, STAND_INS.get(wait))
    TABLE[wait].assert_fails(monkeypatch, tmp_path)


def test_every_used_value_has_a_stand_in() -> None:
    assert set(STAND_INS) == {wait for wait in TABLE if is_value_used(SITES[wait])}


def test_a_wait_that_is_new_is_found(tmp_path: Path) -> None:
    """Of each kind there is one in an unknown module."""
    (tmp_path / "new.py").write_text(
        "class A:\n"
        "    def f(self):\n"
        "        self.arrival.wait()\n"
        "        lane.submit('L0', copy, [first])\n"
        "        with self._lock:\n"
        "            return event.synchronize\n"
        "        ', '.join(set())\n",
        encoding="utf-8",
    )
    found = [(site.kind, site.text) for site in find_sites([tmp_path])]
    assert found == [
        ("call", "self.arrival.wait()"),
        ("order", "lane.submit('L0', copy, [first])"),
        ("lock", "with self._lock"),
        ("reference", "event.synchronize"),
    ]
    assert all(isinstance(site, Site) for site in find_sites([tmp_path]))
