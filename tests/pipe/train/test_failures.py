"""What holds after an exception: the batch that it struck is not run again, everything else goes on."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipe.train import (
    EvalPipelineSparseDist,
    InlineLane,
    Lanes,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineSparseDist,
)
from tests.pipe.train.conftest import BOTH, Counting, FakeCached, numbers, pipeline_of


class Fragile(Counting):
    """Fails in the forward or backward of chosen batches."""

    def __init__(self, forward: Any = None, backward: Any = None) -> None:
        super().__init__()
        self.forward_errors, self.backward_errors = forward or {}, backward or {}

    def forward(self, batch: Any) -> Any:
        losses, k = super().forward(batch)
        self.fail(self.forward_errors, k)
        losses.register_hook(lambda grad: self.fail(self.backward_errors, k))
        return losses, k

    def fail(self, errors: Any, k: Any) -> None:
        if k in errors:
            raise errors.pop(k)


class Unreliable:
    """A loader that fails at some of its reads and goes on."""

    def __init__(self, numbers: Any, broken: Any) -> None:
        self.numbers, self.broken, self.reads = list(numbers), dict(broken), 0

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        self.reads += 1
        if self.reads in self.broken:
            raise self.broken[self.reads]
        if not self.numbers:
            raise StopIteration
        return torch.tensor(self.numbers.pop(0))


def test_a_stop_iteration_inside_the_model_does_not_pass_for_the_end_of_the_loader(lab: Any) -> None:
    pipeline, batches = pipeline_of(TrainPipelineBase, Fragile(forward={1: StopIteration()})), numbers(*range(4))
    pipeline.progress(batches)
    with pytest.raises(RuntimeError, match="a batch raised StopIteration"):
        pipeline.progress(batches)
    assert lab.run(pipeline, batches) == [2, 3]


@pytest.mark.parametrize("stage", ["copy", "input_dist", "prefetch"])
def test_a_stage_that_fails_fails_in_its_turn(lab: Any, stage: Any) -> None:
    model, batches = lab.sparse_model(FakeCached), lab.batches(6)
    bad = batches[3]["x"]

    def fails_once(plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if stage == "copy" or (args and args[-1] is bad) or kwargs.get("dist_input", (None,))[0] is bad:
                raise OSError("link down")
            return plain(*args, **kwargs)

        return call

    if stage == "copy":
        batches[3] = SimpleNamespace(to=fails_once(None))
    else:
        sparse = model.inner["sparse"]
        setattr(sparse, stage, fails_once(getattr(sparse, stage)))
    pipeline, iterator = PrefetchTrainPipelineSparseDist(model, lab.optimizer(model), "cpu"), iter(batches)
    for _ in range(3):
        pipeline.progress(iterator)
    with pytest.raises(OSError, match="link down"):
        pipeline.progress(iterator)
    assert len(lab.run(pipeline, iterator)) == 2


@pytest.mark.parametrize("after_forward", [False, True])
def test_an_interrupt_loses_no_batch_but_one_whose_forward_has_run(lab: Any, after_forward: Any) -> None:
    class Interrupted(InlineLane):
        """The lane of a caller who presses a key while the third copy is under way."""

        jobs = 0

        def submit(self, job: Any) -> Any:
            self.jobs += 1
            if self.jobs == 3:
                raise KeyboardInterrupt
            return super().submit(job)

    lanes = Lanes(load=InlineLane(), copy=Interrupted(), distribute=InlineLane())
    model, batches = Counting(), numbers(*range(5))
    pipeline = pipeline_of(TrainPipelineBase, model, lanes=lanes, enqueue_batch_after_forward=after_forward)
    with pytest.raises(KeyboardInterrupt):
        pipeline.progress(batches)
    assert lab.run(pipeline, batches) == [0, 1, 2, 3, 4][after_forward:]
    assert model.weight.item() == after_forward - 11111


def test_an_interrupt_inside_the_loader_in_the_callers_thread_loses_no_batch(lab: Any) -> None:
    loader = Unreliable([1, 2, 4, 5, 6], {3: KeyboardInterrupt()})
    pipeline = pipeline_of(TrainPipelineBase, Counting(), lanes=Lanes.serial())
    with pytest.raises(KeyboardInterrupt):
        pipeline.progress(loader)
    assert len(pipeline.state_dict()["in_flight"]) == 2
    assert lab.run(pipeline, loader) == [1, 2, 4, 5, 6]


def test_another_mode_with_batches_in_flight_is_refused_and_nothing_is_lost(lab: Any) -> None:
    model, batches = Counting(), numbers(*range(4))
    pipeline = pipeline_of(TrainPipelineBase, model)
    pipeline.progress(batches)
    model.eval()
    with pytest.raises(ValueError, match=r"train mode for the batches in flight.*use a second pipeline"):
        pipeline.progress(numbers(0, 1))
    model.train()
    assert lab.run(pipeline, batches) == [1, 2, 3]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"grad_accum": 0}, ValueError, "grad_accum=0"),
        ({"grad_accum": 2.0}, TypeError, "grad_accum=2.0"),
        ({"grad_accum": True}, TypeError, "bool"),
        ({"ahead": {"loda": 3}}, ValueError, "loda"),
        ({"ahead": {"load": -1}}, ValueError, "ahead >= 0"),
        ({"uneven": "drop"}, ValueError, "uneven='drop'"),
        ({"amp_dtype": torch.float64}, ValueError, "float64"),
        ({"apply_jit": True}, ValueError, "apply_jit=False"),
        ({"context_type": dict}, ValueError, "context_type=None"),
        ({"custom_model_fwd": 3}, TypeError, "custom_model_fwd"),
        ({"dmp_collection_sync_interval_batches": 0}, ValueError, "dmp_collection_sync_interval_batches >= 1"),
        ({"dmp_collection_sync_interval_batches": 1.5}, TypeError, "dmp_collection_sync_interval_batches"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_bad_arguments_are_refused_by_name(options: Any, error: Any, message: Any) -> None:
    with pytest.raises(error, match=message):
        pipeline_of(TrainPipelineSparseDist, Counting(), **options)


@pytest.mark.parametrize("unwanted", ["grad_accum", "enable_grad_scaling", "execute_all_batches"])
def test_arguments_of_training_are_refused_for_evaluation(unwanted: Any) -> None:
    with pytest.raises(TypeError, match=unwanted):
        pipeline_of(EvalPipelineSparseDist, Counting(), **{unwanted: 2})


@pytest.mark.parametrize("optimizers", [[], [torch.zeros(1)], None, object()])
def test_what_is_no_optimizer_is_refused(lab: Any, optimizers: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a torch.optim.Optimizer, or several"):
        TrainPipelineBase(lab.model(), optimizers, "cpu")


class Wrapped(torch.optim.Optimizer):
    """An optimizer around another, as accelerate's."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> None:
        self.optimizer.step(closure)


@pytest.mark.parametrize("wrap", [lambda one: one, Wrapped, lambda one: [torch.optim.SGD([torch.zeros(1)]), one]])
@BOTH
def test_an_optimizer_that_needs_a_closure_is_refused_at_construction(lab: Any, make: Any, wrap: Any) -> None:
    model = lab.model()
    with pytest.raises(TypeError, match=r"without a closure, got LBFGS, whose step has a missing .*'closure': a train"):
        make(model, wrap(torch.optim.LBFGS(model.parameters())), "cpu")


def test_an_optimizer_whose_step_a_scheduler_has_wrapped_is_taken(lab: Any) -> None:
    model = lab.model()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert len(lab.run(TrainPipelineBase(model, optimizer, "cpu"), iter(lab.batches(3)))) == 3
    scheduler.step()


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(1), r"expected the model to return a tuple \(losses, output\)"),
        ((torch.zeros(1),), r"expected the model to return a tuple \(losses, output\)"),
        (None, r"expected the model to return a tuple \(losses, output\)"),
        ((1.0, None), "losses of type float"),
    ],
)
def test_a_model_that_does_not_return_losses_and_output_is_told_so(returned: Any, message: Any) -> None:
    pipeline = pipeline_of(TrainPipelineBase, Counting(), custom_model_fwd=lambda batch: returned)
    with pytest.raises(TypeError, match=message):
        pipeline.progress(numbers(1))


def events_of(progress: Any, steps: Any, loader: Any) -> Any:
    """What a caller sees, call by call, until the loader ends: outputs, errors, gradients stepped, and reads."""
    events = []
    while True:
        try:
            events.append(progress())
        except StopIteration:
            return [*events, "end", list(steps), loader.reads]
        except (OSError, SystemExit) as error:  # of the loader, which is not read again before this is told
            events.append((repr(error), loader.reads))
        except (ArithmeticError, KeyboardInterrupt) as error:
            events.append(repr(error))


def plain_events(model: Any, optimizer: Any, steps: Any, loader: Any, size: Any, window: Any) -> Any:
    """The same from a plain loop. A failing batch abandons its window; a loader's last batch closes it, or its end.

    ``window`` holds the number of batches in the open window: where a failing read stands between a loader's last
    batch and its end, it is the end that closes it.
    """
    waiting = []

    def peek() -> Any:
        if not waiting:
            try:
                waiting.append(next(loader))
            except (StopIteration, OSError, SystemExit) as error:
                waiting.append(error)
        return waiting[0]

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad.mul_(size / window[0])
        optimizer.step()
        window[0] = 0

    def progress() -> Any:
        batch = peek()
        waiting.clear()
        if isinstance(batch, StopIteration) and window[0]:
            step()
        if isinstance(batch, BaseException):
            raise batch
        if window[0] == 0:
            optimizer.zero_grad()
        try:
            losses, output = model(batch)
            last = window[0] + 1 == size or isinstance(peek(), StopIteration)
            (losses / size).backward()
        except (ArithmeticError, KeyboardInterrupt):
            window[0] = 0
            raise
        window[0] += 1
        if last:
            step()
        return output

    return events_of(progress, steps, loader)


@settings(max_examples=150)
@given(
    counts=st.lists(st.integers(0, 8), min_size=1, max_size=3),
    data=st.data(),
    size=st.integers(1, 4),
    load=st.integers(0, 4),
    copy=st.integers(0, 4),
    kind=st.sampled_from(["threads", "serial", "sparse"]),
)
def test_failures_look_as_in_a_plain_loop(counts: Any, data: Any, size: Any, load: Any, copy: Any, kind: Any) -> None:
    def errors(first: Any, last: Any, *kinds: Any) -> Any:
        """Which errors the batches or reads of these numbers shall raise."""
        return data.draw(st.dictionaries(st.integers(first, max(last, 0)), st.sampled_from(kinds), max_size=2))

    of_reads = [OSError] if kind == "serial" else [OSError, SystemExit]
    broken_reads = [errors(1, count + 1, *of_reads) for count in counts]
    failing = {name: errors(0, sum(counts) - 1, ArithmeticError, KeyboardInterrupt) for name in ("forward", "backward")}
    seen = []
    for way in ("plain", "pipeline"):
        model = Fragile(**{name: {k: error(k) for k, error in chosen.items()} for name, chosen in failing.items()})
        optimizer, steps = torch.optim.SGD(model.parameters(), lr=0.0), []
        optimizer.register_step_pre_hook(lambda *_, m=model, s=steps: s.append(f"{m.weight.grad.item():.9g}"))
        make = TrainPipelineSparseDist if kind == "sparse" else TrainPipelineBase
        lanes = Lanes.serial() if kind == "serial" else None
        pipeline = make(model, optimizer, "cpu", grad_accum=size, ahead={"load": load, "copy": copy}, lanes=lanes)
        events, first, window = [], 0, [0]
        for count, broken in zip(counts, broken_reads, strict=True):
            loader = Unreliable(range(first, first + count), {k: error(k) for k, error in broken.items()})
            first += count
            if way == "plain":
                events += plain_events(model, optimizer, steps, loader, size, window)
            else:
                events += events_of(partial(pipeline.progress, loader), steps, loader)
        seen.append(events)
    assert seen[0] == seen[1]
