"""The benchmarks by name, one line each. Listing them imports none of them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from benchmarks.harness.peers import require

if TYPE_CHECKING:
    from benchmarks.harness.benchmark import Benchmark


class Entry(NamedTuple):
    """A name for the command line, the question in one line, and further packages that the benchmark needs."""

    name: str
    summary: str
    packages: tuple[str, ...] = ()

    def load(self) -> Benchmark[Any]:
        """Imports the benchmark.

        Raises:
            MissingExtraError: if a package that it needs is not installed; before anything is measured.
        """
        for package in ("tqdm", "matplotlib", *self.packages):
            require(package)
        module = importlib.import_module(f"benchmarks.{self.name.replace('-', '_')}.benchmark")
        return cast("Benchmark[Any]", module.BENCHMARK)


_SUMMARIES = {
    "memory-latency": "what each setting, and what others offer, saves in memory and costs in time",
    "retrieval": "train a text encoder on a contrastive batch three ways: what memory, what time, and the same losses?",
    "offload-step": "what does streaming a model from disk cost in time, and does its peak grow with the shards?",
    "optimizer": "clipping and AdamW with parameters, gradients and moments on disk: at what cost in time and memory?",
    "build-huge": "under a memory cap, can a process build, load and train a model whose parameters exceed the cap?",
    "train-overlap": "with a slow loader, slow embedding rows and compute: how near is a step to its slowest part?",
    "pipe-ladder": "beside torchgpipe and fairscale, what do time, memory and bubble of our pipe come to?",
    "gradcache-batch": "how large may an exact contrastive batch be in fixed memory, and what do its chunks cost?",
    "gpu-train": "up to 7B parameters with full Adam on one GPU: what memory does each method need?",
    "gpu": "all that needs a GPU, in under ten minutes: the CUDA tests, memory-latency, gpu-train small to 7B",
}
_PACKAGES = {"retrieval": ("numpy", "tokenizers"), "build-huge": ("numpy",), "gpu": ("pytest",)}
BENCHMARKS = tuple(Entry(name, summary, _PACKAGES.get(name, ())) for name, summary in _SUMMARIES.items())


def find(name: str) -> Entry:
    """The benchmark of that name.

    Raises:
        ValueError: if there is none.
    """
    for entry in BENCHMARKS:
        if entry.name == name:
            return entry
    raise ValueError(f"expected one of {', '.join(_SUMMARIES)}, got {name!r}")
