"""``gpu``: everything that needs a GPU in one command: the CUDA tests, then the benchmarks, small models first.

Each part is a command with a time limit; together the limits are under ten minutes. A part that fails, hangs or is
killed is reported; the others still run, and of a part that did not end in time the cases that did are on its page.
``--dry-run`` runs the same parts on the CPU with tiny models, so that a mistake in them is found without a GPU.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.environment import shown_command
from benchmarks.harness.process import python_path
from benchmarks.harness.settings import option
from benchmarks.harness.table import case_table

PARTS = ("tests", "train-small", "train-1b", "memory-latency", "train-7b")
TINY = "--layers 4 --dim 64 --rows 4 --positions 4"
#: A test file that cannot be imported affects only itself, and what another version of torch deprecates is no failure.
TEST_OPTIONS = "-q -n 5 --dist load -k cuda -p no:cacheprovider -W default --continue-on-collection-errors"
LAST_LINES = 12  # of a part's output, for the page
ENDING = 20  # seconds for a part to end its processes


@dataclass(frozen=True)
class Settings:
    """Which parts, and where they run."""

    dry_run: bool = option(False, "on the CPU, with tiny models")
    tests: tuple[str, ...] = option(("tests",), "where CUDA tests are looked for")
    parts: tuple[str, ...] = option(PARTS, "only these parts", choices=PARTS)
    stem: str = option("gpu", "the parts write STEM-PART.md, .jsonl and .png")

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: a GPU is needed."""
        if self.dry_run or torch.cuda.is_available():
            return ""
        return "expected a CUDA device, and there is none; --dry-run runs the same parts on the CPU"


def parts_of(settings: Settings) -> list[Case]:
    """A case for each part, in an order in which what is short and what others build on comes first."""
    dry = settings.dry_run
    device, patience = ("cpu", 4) if dry else ("cuda", 1)  # a laptop takes longer to start than a GPU to compute

    def part(name: str, words: str, seconds: float) -> Case:
        out = [] if name == "tests" else ["--device", device, "--out", f"{settings.stem}-{name}"]
        return Case(name, "", {"words": ["-m", *words.split(), *out], "seconds": patience * seconds})

    def size(layers: int, dim: int, rows: int, positions: int, more: str = "") -> str:
        return TINY if dry else f"--layers {layers} --dim {dim} --rows {rows} --positions {positions}{more}"

    curve = f"--pairs {1 if dry else 3} --only torch save_on_cpu FSDP2 fairscale host budget"
    cases = [
        part("tests", f"pytest {TEST_OPTIONS} {' '.join(settings.tests)}", 90),
        part("train-small", f"benchmarks gpu-train {size(12, 1024, 8, 512)}", 80),
        part("train-1b", f"benchmarks gpu-train {size(24, 2048, 8, 512)} --steps 6", 160),
        part("memory-latency", f"benchmarks memory-latency {size(16, 1024, 16, 256)} {curve}", 120),
        part("train-7b", f"benchmarks gpu-train {size(32, 4096, 8, 512, ' --only ours: --steps 5')}", 140),
    ]
    return [case for case in cases if case.name in settings.parts]


def measure(run: Run) -> None:
    """Runs the parts one after the other, with their files below the folder of this run."""
    environment = {**os.environ, "PYTHONPATH": python_path(), "XDG_CACHE_HOME": str(run.folder)}
    run.groups["parts"] = [run_part(case, environment) for case in parts_of(run.settings)]


def run_part(case: Case, environment: dict[str, str] | None = None) -> Outcome:
    """Runs one part to its end or to its time limit; its only step holds the last lines that it printed."""
    outcome = Outcome(case)
    words, seconds = case.arguments["words"], case.arguments["seconds"]
    print(f"\n== {case.name}, at most {seconds:.0f} s: {shown_command(words)}", flush=True)
    started = time.perf_counter()
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as printed:
        # In a session of its own: the processes that a part starts end with it.
        with subprocess.Popen(
            [sys.executable, *words],
            stdout=printed,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        ) as process:
            try:
                status = process.wait(seconds)
                outcome.result, outcome.failure = ({}, None) if status == 0 else (None, f"exit status {status}")
            except subprocess.TimeoutExpired:
                outcome.failure = f"not done after {seconds:.0f} s"
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(ENDING)
            finally:
                if process.poll() is None or outcome.failure:  # also at an interrupt from outside
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
        printed.seek(0)
        lines = [line.rstrip() for line in printed.read().splitlines()]
    if outcome.failure and "--out" in words and (results := Path(f"{words[words.index('--out') + 1]}.jsonl")).exists():
        page = [sys.executable, "-m", "benchmarks", "report", str(results)]
        lines += subprocess.run(page, env=environment, capture_output=True, text=True, check=False).stdout.splitlines()
    outcome.seconds = time.perf_counter() - started
    outcome.steps.append({"tail": "\n".join([line for line in lines if line][-LAST_LINES:])})
    print(outcome.steps[0]["tail"], flush=True)
    return outcome


def report(run: Run) -> list[str]:
    """Outcome and output of each part."""
    columns = {"outcome": lambda o: "passed", "seconds": lambda o: f"{o.seconds:.0f}"}
    printed = [
        f"## {outcome.name}\n\n`{shown_command(outcome.case.arguments['words'])}`\n\n```\n{tail}\n```"
        for outcome in run.outcomes
        for tail in outcome.values("tail")
    ]
    return [case_table(run.outcomes, columns, "part"), *printed]


BENCHMARK = Benchmark(
    Settings,
    measure,
    report,
    bounds=lambda run: [],
    rates=lambda settings: {"file_bytes": 4 << 20, "side": 256, "tries": 1},
)
