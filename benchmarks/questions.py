"""The questions, one line each, and where the script of each one is.

Listing them imports none of them: ``python -m benchmarks`` answers at once and without the extra ``bench``.
"""

from __future__ import annotations

import argparse
import importlib
from dataclasses import dataclass
from typing import Protocol, cast

__all__ = ["QUESTIONS", "Question", "Script"]


class Script(Protocol):
    """What the module of a question has."""

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the options that this question has besides ``--json`` and ``--plot``."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Answers the question; the exit status is 0 only if what must hold did hold.

        Raises:
            ValueError: if the options make no run possible.
        """


@dataclass(frozen=True)
class Question:
    """A name for the command line, the question in one line, and the module that answers it."""

    name: str
    summary: str
    module: str

    def load(self) -> Script:
        """Imports the script."""
        return cast(Script, importlib.import_module(self.module))


QUESTIONS = (
    Question(
        "retrieval",
        "train a text encoder on a contrastive batch three ways: what memory, what time, and the same losses?",
        "benchmarks.retrieval.question",
    ),
    Question(
        "offload-step",
        "what does streaming a model from disk cost in time, and does its peak grow with the number of shards?",
        "benchmarks.offload_step.question",
    ),
)
