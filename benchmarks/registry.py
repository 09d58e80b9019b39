"""The benchmarks by name, one line each. Listing them imports none of them."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from benchmarks.harness.extra import require

if TYPE_CHECKING:
    from benchmarks.harness.benchmark import Benchmark

__all__ = ["BENCHMARKS", "Entry", "find"]


@dataclass(frozen=True)
class Entry:
    """A name for the command line, the question in one line, and the packages that the benchmark needs."""

    name: str
    summary: str
    packages: tuple[str, ...] = ("tqdm", "matplotlib")

    def load(self) -> Benchmark[Any]:
        """Imports the benchmark.

        Raises:
            MissingExtraError: if a package that it needs is not installed; before anything is measured.
        """
        for package in self.packages:
            require(package)
        module = importlib.import_module(f"benchmarks.{self.name.replace('-', '_')}.benchmark")
        return cast("Benchmark[Any]", module.BENCHMARK)


BENCHMARKS = (
    Entry(
        "memory-latency",
        "slices, micro-batches, homes, budgets, and what others offer: what does each save in memory and cost in time?",
    ),
    Entry(
        "retrieval",
        "train a text encoder on a contrastive batch three ways: what memory, what time, and the same losses?",
        ("numpy", "tokenizers", "tqdm", "matplotlib"),
    ),
    Entry(
        "offload-step",
        "what does streaming a model from disk cost in time, and does its peak grow with the number of shards?",
    ),
    Entry(
        "optimizer",
        "clipping and AdamW with parameters, gradients and moments on disk: what do they cost in time and in memory?",
    ),
    Entry(
        "build-huge",
        "under a cap on its memory, can a process build, load and train a model whose parameters exceed the cap?",
        ("numpy", "tqdm", "matplotlib"),
    ),
    Entry(
        "train-overlap",
        "with a slow loader, slow embedding rows and compute in one loop: how near is a step to its slowest part?",
    ),
    Entry(
        "pipe-ladder",
        "beside torchgpipe and fairscale, what do time, memory and bubble of our pipe come to, part by part?",
    ),
    Entry(
        "gradcache-batch",
        "how large may an exact contrastive batch be in fixed memory, and what do a step and its chunks cost?",
    ),
    Entry(
        "gpu-train",
        "up to 7B parameters with full Adam on one GPU: what memory does each method need there and on the host?",
    ),
    Entry(
        "gpu",
        "all of it that needs a GPU, in under ten minutes: the CUDA tests, memory-latency, gpu-train small to 7B",
        ("tqdm", "matplotlib", "pytest"),
    ),
)


def find(name: str) -> Entry:
    """The benchmark of that name.

    Raises:
        ValueError: if there is none.
    """
    for entry in BENCHMARKS:
        if entry.name == name:
            return entry
    raise ValueError(f"expected one of {', '.join(entry.name for entry in BENCHMARKS)}, got {name!r}")
