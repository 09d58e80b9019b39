"""The questions, one line each, and where the script of each one is.

Listing them imports none of them: ``python -m benchmarks`` answers at once and without the extra ``bench``.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

from benchmarks.frame.extra import require

__all__ = ["QUESTIONS", "Question", "Script"]


class Script(Protocol):
    """What the module of a question has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options that this question has besides those that say where results go."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Answers the question; the exit status is 0 only if what must hold did hold.

        Raises:
            ValueError: if the options make no run possible.
        """


@dataclass(frozen=True)
class Question:
    """A name for the command line, the question in one line, the module that answers it, and what that one needs."""

    name: str
    summary: str
    module: str
    packages: tuple[str, ...] = ("numpy", "tokenizers", "tqdm", "matplotlib")

    def load(self) -> Script:
        """Imports the script.

        Raises:
            MissingExtraError: if a package it needs is not installed; now, and not after minutes of measuring.
        """
        for package in self.packages:
            require(package)
        return cast(Script, importlib.import_module(self.module))


QUESTIONS = (
    Question(
        "memory-latency",
        "slices, micro-batches, homes, budgets, and what others offer: what does each save in memory and cost in time?",
        "benchmarks.memory_latency.question",
        ("tqdm", "matplotlib"),
    ),
    Question(
        "retrieval",
        "train a text encoder on a contrastive batch three ways: what memory, what time, and the same losses?",
        "benchmarks.retrieval.question",
    ),
    Question(
        "offload-step",
        "what does streaming a model from disk cost in time, and does its peak grow with the number of shards?",
        "benchmarks.offload_step.question",
        ("numpy", "tqdm", "matplotlib"),
    ),
    Question(
        "optimizer",
        "clipping and AdamW with parameters, gradients and moments on disk: what do they cost in time and in memory?",
        "benchmarks.optimizer.question",
        ("numpy", "tqdm", "matplotlib"),
    ),
    Question(
        "build-huge",
        "under a cap on its memory, can a process build, load and train a model whose parameters exceed the cap?",
        "benchmarks.build_huge.question",
        ("tqdm", "matplotlib"),
    ),
    Question(
        "train-overlap",
        "with a slow loader, slow embedding rows and compute in one loop: how near is a step to its slowest part?",
        "benchmarks.train_overlap.question",
    ),
    Question(
        "pipe-ladder",
        "beside torchgpipe and fairscale, what do time, memory and bubble of our pipe come to, part by part?",
        "benchmarks.pipe_ladder.question",
        ("tqdm", "matplotlib"),
    ),
    Question(
        "gradcache-batch",
        "how large may an exact contrastive batch be in fixed memory, and what does a step cost, way by way?",
        "benchmarks.gradcache_batch.question",
        ("numpy", "tqdm", "matplotlib"),
    ),
    Question(
        "gpu-train",
        "up to 7B parameters with full Adam on one GPU: what memory does each way need there and on the host?",
        "benchmarks.gpu_train.question",
        ("tqdm", "matplotlib"),
    ),
    Question(
        "gpu",
        "all of it that needs a GPU, in under ten minutes: the CUDA tests, memory-latency, gpu-train small to 7B",
        "benchmarks.gpu.question",
        ("tqdm", "matplotlib", "pytest"),
    ),
)
