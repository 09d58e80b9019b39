"""Lanes keep order, forward exceptions, and their threads end with them."""

from __future__ import annotations

import contextlib
import gc
import sys
import threading
import weakref
from typing import Any

import pytest
import torch

from pipe.train import InlineLane, Lanes, ThreadLane, TrainPipelineBase
from tests.pipe.train.conftest import Counting, numbers, pipeline_of
from tests.programs import run_program


@pytest.mark.parametrize("make", [InlineLane, lambda: ThreadLane("test")], ids=["inline", "thread"])
class TestEveryLane:
    def test_jobs_run_in_order_and_never_two_at_a_time(self, make: Any) -> None:
        lane, log, inside = make(), [], threading.Lock()

        def job(k: Any) -> Any:
            assert inside.acquire(blocking=False)
            log.append(k)
            inside.release()
            return k

        tickets = [lane.submit(lambda k=k: job(k)) for k in range(50)]
        assert [ticket.wait() for ticket in tickets] == list(range(50))
        assert log == list(range(50))

    def test_an_exception_is_raised_by_every_wait_and_harms_no_other_job(self, make: Any) -> None:
        lane = make()

        def fail() -> None:
            raise OSError("disk")

        failed, good = lane.submit(fail), lane.submit(lambda: 1)
        for _ in range(2):
            with pytest.raises(OSError, match="disk"):
                failed.wait()
        assert not failed.succeeded()
        assert good.wait() == 1


def test_an_interrupt_is_raised_at_once_in_the_callers_thread_and_else_by_the_wait() -> None:
    ticket = ThreadLane("test").submit(sys.exit)
    with pytest.raises(SystemExit):
        ticket.wait()
    with pytest.raises(SystemExit):
        InlineLane().submit(sys.exit)


def test_an_idle_lane_keeps_nothing_alive_and_its_thread_ends_with_it() -> None:
    class Batch:
        pass

    lane, batch = ThreadLane("resting lane"), Batch()
    alive = weakref.ref(batch)
    lane.submit(lambda batch=batch: None).wait()
    thread = lane.submit(threading.current_thread).wait()
    del batch
    gc.collect()
    assert alive() is None
    del lane
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_a_lane_in_a_forked_child_says_so() -> None:
    lane = ThreadLane("test")
    ticket = lane.submit(lambda: 1)
    assert ticket.wait() == 1
    lane._threads._made_in = -1
    with pytest.raises(RuntimeError, match="forked child"):
        lane.submit(lambda: 2)
    assert ticket.wait() == 1


def test_a_lane_whose_job_never_ends_does_not_hang_interpreter_exit() -> None:
    program = (
        "import threading, pipe.train.lane as lane\n"
        "lane.EXIT_SECONDS = 0.01\n"
        "LANE = lane.ThreadLane('stuck')\n"  # a module global, on purpose
        "LANE.submit(threading.Event().wait)\n"
        "LANE.submit(print)\n"
    )
    assert run_program(program) == (0, "", "")


def test_a_dropped_pipeline_is_freed_without_the_garbage_collector() -> None:
    def dropped() -> threading.Event:
        pipeline, batches, freed = pipeline_of(TrainPipelineBase, Counting()), numbers(0, 1, 2), threading.Event()
        for _ in range(3):
            pipeline.progress(batches)
        weakref.finalize(pipeline, freed.set)
        return freed

    dropped()  # the first optimizer of a process imports a part of torch, whose frames keep this one
    gc.collect()
    gc.disable()
    try:
        assert dropped().wait(60)  # its last read may just be ending in the thread of the loader
    finally:
        gc.enable()


def test_on_the_cpu_the_loader_and_the_copies_have_threads_and_nothing_has_a_stream() -> None:
    lanes = vars(Lanes.for_device(torch.device("cpu")))
    assert [type(lane) for lane in lanes.values()] == [ThreadLane, ThreadLane, InlineLane, InlineLane]
    assert all(lane.stream is None for lane in lanes.values())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_streams_belong_to_the_devices_of_the_pipeline() -> None:
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    lanes = Lanes.for_device(device)
    assert lanes.copy.stream.device == device
    assert lanes.distribute.stream.device == device
    ticket = lanes.copy.submit(lambda: torch.ones(1 << 20).pin_memory().to(device, non_blocking=True))
    assert float(ticket.wait().sum()) == 1 << 20


def test_a_loader_runs_under_the_grad_mode_and_the_autocast_of_the_call() -> None:
    seen = []

    def loader() -> Any:
        for batch in numbers(0, 1, 2, 3):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
            yield batch

    pipeline, batches = pipeline_of(TrainPipelineBase, Counting(), ahead={"load": 0, "copy": 0}), loader()
    for context in (contextlib.nullcontext(), torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16)):
        with context:
            pipeline.progress(batches)
    assert seen == [(True, False), (False, False), (True, True)]
