"""Loaders that give out the same iterator object in every epoch: each batch runs once, however the loop is written."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset

from pipe.train import EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist
from tests.pipe.train.conftest import PIPELINES, Counting, numbers, pipeline_of

COUNT = 5
BATCHES = list(range(COUNT))


class Rows(Dataset[int]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, k: int) -> int:
        return k


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(BATCHES)


class InPlace:
    """A loader that is its own iterator, which it resets."""

    def __init__(self) -> None:
        self.k = COUNT
        self.threads: set[int] = set()

    def __iter__(self) -> InPlace:
        self.k = 0
        return self

    def __next__(self) -> Tensor:
        self.threads.add(threading.get_ident())
        if self.k == COUNT:
            raise StopIteration
        self.k += 1
        return torch.tensor(self.k - 1)


LOADERS: dict[str, Callable[[], Any]] = {
    "list": lambda: [*numbers(*BATCHES)],
    "workers": lambda: DataLoader(Rows(), num_workers=1),
    "IterableDataset": lambda: DataLoader(Stream()),
    "persistent": lambda: DataLoader(Rows(), num_workers=2, persistent_workers=True),
    "persistent IterableDataset": lambda: DataLoader(Stream(), num_workers=1, persistent_workers=True),
    "its own iterator": InPlace,
}
BY_LOADER = pytest.mark.parametrize("kind", LOADERS)


def by_range(pipeline: Any, batches: Any) -> None:
    for _ in range(COUNT):
        pipeline.progress(batches)


@BY_LOADER
@pytest.mark.parametrize("make", [*PIPELINES, EvalPipelineSparseDist])
def test_every_epoch_has_every_batch_once_in_both_loops_and_ends_its_window(lab: Any, make: Any, kind: str) -> None:
    model, loader = Counting(), LOADERS[kind]()
    pipeline = pipeline_of(make, model, **({"grad_accum": 3} if make in PIPELINES else {}))
    for number, epoch in enumerate((by_range, by_range, lab.run, by_range, lab.run, lab.run), 1):
        epoch(pipeline, iter(loader))
        assert pipeline.statistics().steps == (2 * number if make in PIPELINES else 0)
    assert model.ran == BATCHES * 6


@BY_LOADER
@pytest.mark.parametrize("make", [PrefetchTrainPipelineSparseDist, EvalPipelineSparseDist])
@pytest.mark.parametrize("early", [1, 4])
def test_after_an_epoch_left_early_each_batch_read_runs_once(lab: Any, make: Any, kind: str, early: int) -> None:
    model, loader = Counting(), LOADERS[kind]()
    pipeline = pipeline_of(make, model)
    for _ in range(2):
        batches = iter(loader)
        for _ in range(early):
            pipeline.progress(batches)
    lab.run(pipeline, iter(loader))
    # When an epoch is left, up to two batches are in flight; they run first in the next.
    in_flight = min(2, COUNT - early)
    passes = [BATCHES[: early + in_flight], BATCHES[: early - in_flight + 2], BATCHES]
    assert model.ran == list(itertools.chain(*passes))


@pytest.mark.parametrize(
    "wrap",
    [lambda loader: loader, lambda loader: map(torch.Tensor.clone, loader), lambda loader: (batch for batch in loader)],
    ids=["itself", "map", "generator"],
)
@pytest.mark.parametrize("make", PIPELINES)
def test_an_iterator_is_read_in_another_thread_but_never_between_two_calls(make: Any, wrap: Any) -> None:
    inside = threading.Event()

    class Slow(InPlace):
        seen = False

        def __next__(self) -> Tensor:
            assert inside.is_set()
            time.sleep(0.01)
            assert inside.is_set(), "read while the caller may reset it"
            return super().__next__()

    loader = Slow()
    pipeline, batches = pipeline_of(make, Counting()), wrap(iter(loader))
    for _ in range(COUNT):
        inside.set()
        pipeline.progress(batches)
        inside.clear()
        loader.seen = True  # what the loop writes on it hides no end
    inside.set()
    with pytest.raises(StopIteration):
        pipeline.progress(batches)
    assert threading.get_ident() not in loader.threads
    assert pipeline.statistics().wait_seconds["load"] > 0


@pytest.mark.parametrize("make", PIPELINES)
def test_after_a_failure_a_loader_goes_on_or_begins_again(lab: Any, make: Any) -> None:
    class Failing(InPlace):
        failed = False

        def __next__(self) -> Tensor:
            if self.k == 2 and not self.failed:
                self.failed = True
                raise OSError("unreadable")
            return super().__next__()

    model, loader = Counting(), Failing()
    pipeline = pipeline_of(make, model)
    with pytest.raises(OSError, match="unreadable"):
        lab.run(pipeline, iter(loader))
    lab.run(pipeline, iter(loader))
    loader.failed = False
    with pytest.raises(OSError, match="unreadable"):
        by_range(pipeline, iter(loader))
    assert [pipeline.progress(loader) for _ in range(3)] == [2, 3, 4]
    assert model.ran == [0, 1, *BATCHES, *BATCHES]
