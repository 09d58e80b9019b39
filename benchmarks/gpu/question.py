"""Everything that needs a GPU, in one command: the CUDA tests, then the questions, small models first.

Each part is a command of its own with a time limit of its own, and together the limits are under ten minutes. A part
that fails, hangs or is killed is reported; the others still run, and what was written by then is kept. ``--dry-run``
runs the very same parts on the CPU with models of next to nothing, so that a mistake in them is found without a GPU.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.frame.cache import cache_directory
from benchmarks.frame.environment import Environment, here, shown_command
from benchmarks.frame.outcome import Outcome, Rung
from benchmarks.frame.plot import bars, new_figure, save
from benchmarks.frame.process import PACKAGE_ROOT
from benchmarks.frame.report import publish
from benchmarks.frame.table import markdown_table, reasons

__all__ = ["Part", "add_arguments", "parts_of", "run", "run_part"]

TINY = ["--dim", "64", "--rows", "4", "--positions", "4"]
#: A test file that cannot be imported there takes only itself along, and what another version of torch deprecates is
#: no failure: the suite is strict about the version that it is developed with.
TEST_OPTIONS = ("-q", "-k", "cuda", "-p", "no:cacheprovider", "-W", "default", "--continue-on-collection-errors")
LAST_LINES = 12  # of a part's output, for the page


@dataclass(frozen=True)
class Part:
    """A command, and the most seconds that it may take."""

    name: str
    words: tuple[str, ...]
    seconds: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where it runs, and which parts."""
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, with models of next to nothing")
    parser.add_argument("--tests", nargs="+", default=["tests"], metavar="PATH", help="where CUDA tests are looked for")
    parser.add_argument("--parts", nargs="+", default=[], metavar="NAME", help="only these parts")
    parser.add_argument("--home", type=Path, default=cache_directory(), help="a directory on disk for homes")


def run(arguments: argparse.Namespace) -> int:
    """Runs the parts one after the other; 0 if all of them passed."""
    import torch

    if not arguments.dry_run and not torch.cuda.is_available():
        raise ValueError("expected a CUDA device, and there is none; --dry-run runs the same parts on the CPU")
    stem = arguments.out or Path("gpu")
    parts = parts_of(arguments, stem)
    unknown = set(arguments.parts) - {part.name for part in parts}
    if unknown:
        raise ValueError(f"expected parts of {[part.name for part in parts]}, got parts={sorted(unknown)}")
    environment = here()
    print("\n".join(environment.lines()), flush=True)
    outcomes, sections = [], []
    for part in parts:
        if arguments.parts and part.name not in arguments.parts:
            continue
        print(f"\n== {part.name}, at most {part.seconds:.0f} s: {shown_command(part.words)}", flush=True)
        outcome, tail = run_part(part)
        outcomes.append(outcome)
        sections.append(f"## {part.name}\n\n`{shown_command(part.words)}`\n\n```\n{tail}\n```")
    return publish(
        arguments,
        environment,
        sections=[_table(outcomes), *filter(None, [reasons(outcomes)]), *sections],
        outcomes=outcomes,
        broken=[f"{outcome.rung.name}: {outcome.failure}" for outcome in outcomes if outcome.failure],
        draw=lambda path: _draw(path, outcomes, environment),
        may_fail=outcomes,
    )


def parts_of(arguments: argparse.Namespace, stem: Path) -> list[Part]:
    """The parts in their order: what is short, and what others build on, comes first."""
    dry = arguments.dry_run
    device, patience = ("cpu", 4) if dry else ("cuda", 1)  # a laptop takes longer to start than a GPU to compute

    def question(name: str, words: list[str], seconds: float, asked: str) -> Part:
        out = ["--out", str(stem.with_name(f"{stem.name}-{name}")), "--device", device, "--home", str(arguments.home)]
        return Part(name, ("-m", "benchmarks", asked, *words, *out), patience * seconds)

    def model(layers: int, dim: int, rows: int, *more: str) -> list[str]:
        return ["--layers", "4", *TINY, *more] if dry else _size(layers, dim, rows, 512, *more)

    curve = ["--layers", "4", *TINY, "--pairs", "1"] if dry else _size(16, 1024, 16, 256, "--pairs", "3")
    curve += ["--only", "torch", "save_on_cpu", "FSDP2", "fairscale", "host", "budget"]
    return [
        Part("tests", ("-m", "pytest", *TEST_OPTIONS, *arguments.tests), patience * 100),
        question("train-small", model(12, 1024, 8), 60, "gpu-train"),
        question("train-1b", model(24, 2048, 8), 110, "gpu-train"),
        question("memory-latency", curve, 150, "memory-latency"),
        question("train-7b", model(32, 4096, 8, "--only", "ours", "--steps", "3"), 165, "gpu-train"),
    ]


def _size(layers: int, dim: int, rows: int, positions: int, *more: str) -> list[str]:
    return ["--layers", str(layers), "--dim", str(dim), "--rows", str(rows), "--positions", str(positions), *more]


def run_part(part: Part) -> tuple[Outcome, str]:
    """Runs one part to its end or to its limit; its outcome, and the last lines that it printed."""
    outcome = Outcome(Rung(part.name, "", {"command": list(part.words)}))
    started = time.perf_counter()
    # A session of its own: a rung that hangs is a grandchild, and must end with the part.
    process = subprocess.Popen(
        [sys.executable, *part.words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        encoding="utf-8",
        errors="replace",
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGE_ROOT), os.environ.get("PYTHONPATH")))),
        },
    )
    try:
        printed, _ = process.communicate(timeout=part.seconds)
        if process.returncode == 0:
            outcome.result = {"status": 0}
        else:
            outcome.failure = f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        printed, _ = process.communicate()
        outcome.failure = f"not done after {part.seconds:.0f} s"
    finally:
        if process.poll() is None:  # an interrupt from outside
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    outcome.seconds = time.perf_counter() - started
    # Progress bars return to the beginning of their line: only what stands there at the end is a line.
    lines = [line.rpartition("\r")[2].rstrip() for line in printed.splitlines()]
    tail = "\n".join([line for line in lines if line][-LAST_LINES:])
    print(tail, flush=True)
    return outcome, tail


def _table(outcomes: Sequence[Outcome]) -> str:
    rows = [[outcome.rung.name, outcome.status or "passed", f"{outcome.seconds:.0f}"] for outcome in outcomes]
    return markdown_table(["part", "outcome", "seconds"], rows)


def _draw(path: Path, outcomes: Sequence[Outcome], environment: Environment) -> Path:
    figure, (axis,) = new_figure(1, "The parts of the command for a GPU")
    figure.set_size_inches(7, 4)
    names = [f"{outcome.rung.name} {outcome.status}".strip() for outcome in outcomes]
    bars(axis, names, [outcome.seconds for outcome in outcomes], "seconds")
    return save(figure, path, environment)
