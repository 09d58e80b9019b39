"""Runs a program in both worlds, statement by statement, and says how it ended.

Fine are: equal to the end; the plain loop raises, and ours raises too; ours refuses, in words of its own, before
anything differs and with parameters as they were. Everything else is a failure.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import tempfile
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import offload
from offload import OffloadModel
from pipe.nested import flatten
from tests.offload.fuzz.around import ChunkedStep, Regularised, TiedAround
from tests.offload.fuzz.blocks import REORDERED
from tests.offload.fuzz.hooks import Hook
from tests.offload.fuzz.layers import trip
from tests.offload.fuzz.models import WRITERS
from tests.offload.fuzz.passes import Backward, Grad, MutateInput, MutateOutput
from tests.offload.fuzz.program import Program, Statement
from tests.offload.fuzz.weights import Write
from tests.offload.fuzz.world import World
from tests.offload.late import LateLane, run_late

#: Where refusals are written: the packages beside this one's.
PACKAGES = tuple(str(Path(offload.__file__).parents[1] / name) for name in ("offload", "pipe", "gradcache"))


#: Equal bit by bit where both do the same arithmetic in the same order. Elsewhere (micro-batches and tied weights add
#: gradients in another order, an optimizer over pieces divides its work otherwise) within this of the largest number:
#: all is float64, whose last digit is 1e-16, and what a fault does is seen from 1e-6 on.
TOLERANCE = 1e-9
#: Where a layer computes in float32, whose last digit is 1e-7.
SINGLE_TOLERANCE = 1e-4
#: Beyond this a loop has diverged, and says nothing.
LARGEST = 1e8


class Diverged(Exception):
    """The plain loop left the numbers that can be compared."""


def first_difference(expected: Mapping[str, Any], actual: Mapping[str, Any], *, tolerance: float) -> str | None:
    """What differs first, in words; None if nothing does."""
    for name, value in expected.items():
        if name not in actual:
            return f"{name}: missing"
        found = difference(value, actual[name], tolerance=tolerance)
        if found is not None:
            return f"{name}: {found}"
    more = [name for name in actual if name not in expected]
    return f"{more[0]}: only in ours" if more else None


def difference(expected: Any, actual: Any, *, tolerance: float) -> str | None:
    """How a value differs from what it should be; None if it does not."""
    wanted, spec = flatten(expected)
    got, other = flatten(actual)
    if spec != other or len(wanted) != len(got):
        return f"expected {expected!r}, got {actual!r}"[:300]
    for x, y in zip(wanted, got, strict=True):
        found = _difference(x, y, tolerance=tolerance)
        if found is not None:
            return found
    return None


def _difference(x: Any, y: Any, *, tolerance: float) -> str | None:
    if not (isinstance(x, Tensor) and isinstance(y, Tensor)):
        return None if type(x) is type(y) and x == y else f"expected {_short(x)}, got {_short(y)}"
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        return f"expected {x.dtype} {tuple(x.shape)}, got {y.dtype} {tuple(y.shape)}"
    if x.is_sparse or y.is_sparse:
        x, y = x.to_dense(), y.to_dense()
    if torch.equal(x, y):
        return None
    if not x.is_floating_point():
        return "other numbers"
    if not bool(x.isfinite().all()) or float(x.abs().max()) > LARGEST:
        raise Diverged
    if not bool(y.isfinite().all()):
        return "NaN or infinite where the plain one is not"
    off = float((x - y).abs().max())
    allowed = tolerance * max(1.0, float(x.abs().max()))
    return None if off <= allowed else f"off by {off:.2g}"


def _short(value: Any) -> str:
    return f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:80]


@dataclass(frozen=True)
class Outcome:
    """How a program ended."""

    #: "equal", "refused", "raised" (the plain one, and ours too), "diverged" or "failed".
    kind: str
    #: At which statement; -1 if the model could not be made, the number of statements at the end.
    at: int
    words: str = ""


def check(program: Program) -> Outcome:
    """Runs a program.

    Raises:
        AssertionError: if it fails.
    """
    outcome = run(program)
    assert outcome.kind != "failed", f"{outcome.words}\n{program!r}"
    return outcome


def run(program: Program) -> Outcome:
    """Runs a program in both worlds."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(os, "fsync", lambda descriptor: None)  # no process is killed here
        if program.setup.device is not None:
            patch.setattr("offload.storage.buffer.IN_HOST_MEMORY", frozenset[str]())
        patch.setattr("offload.optim.update_blocks.MAX_BLOCK_BYTES", program.setup.block_bytes)
        if program.setup.late:
            run_late(patch, program.setup.late)
            patch.setattr("offload.optim.optimizer.open_update_lane", lambda device: LateLane(3))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        stack.callback(torch.set_rng_state, torch.get_rng_state())
        worlds = [World(program.setup, ours, folder / name) for ours, name in ((False, "plain"), (True, "ours"))]
        for world in worlds:
            world.folder.mkdir()
        try:
            return _Run(program, *worlds).outcome()
        except Diverged:
            return Outcome("diverged", 0)
        finally:
            trip.left.clear()
            worlds[1].end()
            if program.setup.home == "kept":
                gc.collect()  # what could not be made or closed says so here, and not in another test


class _Run:
    def __init__(self, program: Program, plain: World, ours: World) -> None:
        self.program, self.plain, self.ours = program, plain, ours
        setup = program.setup
        # Elsewhere sums are in another order; kernels choose theirs by where a weight lies, as a slice of a vector.
        exact = setup.microbatches == 1 and setup.updates == "plain" and setup.model not in ("tied", "table")
        exact &= setup.model not in REORDERED
        exact &= not any(isinstance(s, Write) and s.how == "vector" for s in program.statements)
        exact &= not any(isinstance(s, (Regularised, TiedAround)) for s in program.statements)
        # Plain towers add up chunk by chunk, one graph adds the last chunk first.
        exact &= not any(isinstance(s, ChunkedStep) for s in program.statements)
        # The graph of two forwards adds up their gradients before it adds them to what is there.
        exact &= not any(isinstance(s, (Backward, Grad)) and len(s.which) > 1 for s in program.statements)
        tolerance = SINGLE_TOLERANCE if setup.model == "mixed" else TOLERANCE
        self.tolerance = 0.0 if exact else tolerance

    def outcome(self) -> Outcome:
        for world in (self.plain, self.ours):
            with world.running():
                error = _error_of(world.begin)
        if error is not None:
            return self._ended(-1, "OffloadModel(...)", error)
        for k, statement in enumerate(self.program.statements):
            ended = self._step(k, statement)
            if ended is not None:
                return ended
        count = len(self.program.statements)
        return self._looked(count, "the end", closely=True) or Outcome("equal", count)

    def _step(self, k: int, statement: Statement) -> Outcome | None:
        name = type(statement).__name__
        looks = self.program.setup.looks
        before = self.ours.snapshot() if looks and not self.ours.steps_in_hooks else None
        results: list[Any] = []
        errors: list[BaseException | None] = []
        for world in (self.plain, self.ours):
            world.log.clear()
            with world.running():
                errors.append(_error_of(lambda w=world: results.append(statement.run(w))))
        if errors[0] is not None:
            words = _words(errors[0])
            if errors[1] is None and not self._more_than_torch(words):
                return _failed(k, name, f"does not raise: plain {words}")
            return Outcome("raised", k, words)
        if errors[1] is not None:
            return self._ended(k, name, errors[1], before)
        wrong = difference(results[0], results[1], tolerance=self.tolerance)
        if wrong is not None:
            return _failed(k, name, f"result: {wrong}")
        return self._looked(k, name, closely=looks or name == "Look")

    def _more_than_torch(self, words: str) -> bool:
        """Whether ours does what torch refuses: what leaves a shard is copied, so it is in no graph, and no parameter.

        Torch refuses an in-place write to the output of a layer with a backward hook, which is a view; behind a
        boundary it is none. The first forward of layers whose graph is kept runs on a copy of its input.
        """
        hooked = any(isinstance(s, Hook) and s.on.startswith("backward") for s in self.program.statements)
        if hooked and "BackwardHookFunction is a view and is being modified inplace" in words:
            return True
        written = any(isinstance(s, (MutateInput, MutateOutput)) for s in self.program.statements)
        refused = "modified by an inplace operation", "a leaf Variable that requires grad is being used in an in-place"
        return written and any(part in words for part in refused)

    def _looked(self, k: int, name: str, *, closely: bool) -> Outcome | None:
        """A failure if what can be seen differs, or cannot be seen."""
        try:
            expected = self.plain.seen(closely=closely)
            wrong = first_difference(expected, self.ours.seen(closely=closely), tolerance=self.tolerance)
        except Diverged:
            raise
        except Exception as error:
            return _failed(k, name, f"looking: {_words(error)}", _place(error))
        return _failed(k, name, wrong) if wrong else None

    def _ended(self, k: int, name: str, error: BaseException, before: dict[str, Any] | None = None) -> Outcome:
        """Ours raised alone: a refusal leaves parameters as they were, and the model usable."""
        if not _refuses(error):
            return _failed(k, name, f"crash: {_words(error)}", _place(error))
        words = _words(error)
        if before is not None:
            after = self.ours.snapshot()
            # A backward through two forwards may have finished one of them, as it may in torch.
            alone = name in ("Forward", "Grad") or len(getattr(self.program.statements[k], "which", (0, 1))) == 1
            writes = self.program.setup.model in WRITERS and not alone
            keys = [key for key in before if alone or (key.startswith("parameter") and not writes)]
            then, now = ({key: state.get(key) for key in keys} for state in (before, after))
            wrong = first_difference(then, now, tolerance=0.0)
            if wrong:
                return _failed(k, name, f"damage by a refusal: {wrong} ({words})")
        if isinstance(self.ours.model, OffloadModel) and k >= 0:
            with torch.no_grad():
                again = _error_of(lambda: self.ours.model(self.ours.input(0, 4)))
            if again is not None and not _refuses(again):
                return _failed(k, name, f"unusable after a refusal: {_words(again)} ({words})", _place(again))
        return Outcome("refused", k, words)


def _failed(k: int, name: str, what: str, trace: str = "") -> Outcome:
    return Outcome("failed", k, f"at statement {k} ({name}): {what} {trace}")


def _error_of(action: Any) -> BaseException | None:
    try:
        action()
    except Diverged:
        raise
    except Exception as error:
        return error
    except KeyboardInterrupt as error:
        if "in a" not in str(error):
            raise
        return error
    return None


def _frames(error: BaseException) -> Iterator[traceback.FrameSummary]:
    yield from reversed(traceback.extract_tb(error.__traceback__))


def _refuses(error: BaseException) -> bool:
    """Whether an error was raised by a statement of the packages, in words that say why."""
    if not isinstance(error, (RuntimeError, TypeError, ValueError)):
        return False
    frame = next(_frames(error))
    line = linecache.getline(frame.filename, frame.lineno or 0).strip()
    return frame.filename.startswith(PACKAGES) and line.startswith("raise ") and len(str(error)) >= 30


def _place(error: BaseException) -> str:
    """The innermost line of the packages that an error came through."""
    for frame in _frames(error):
        if frame.filename.startswith(PACKAGES):
            return f"[{'/'.join(Path(frame.filename).parts[-2:])}:{frame.name}]"
    return "[torch]"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:160]}"
