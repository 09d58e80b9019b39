"""The processes of the cases of ``gpu``: the CUDA tests, the rate of matrix products, and a method that trains."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.methods import METHODS
from benchmarks.gpu.traced import trace
from benchmarks.gpu.work import Work
from benchmarks.harness.case import FLOOR, CannotRunError
from benchmarks.harness.io_counters import counts_of, measure
from benchmarks.harness.memory import memory_of
from benchmarks.harness.worker import Reporter

ROOT = Path(__file__).parents[2]
#: A test file that cannot be imported affects only itself, and what another version of torch deprecates is no failure.
TEST_OPTIONS = ["-q", "-n", "8", "--dist", "load", "-k", "cuda", "-p", "no:cacheprovider", "-W", "default"]
TEST_OPTIONS += ["--continue-on-collection-errors", "--tb", "short"]
LAST_LINES = 25  # of what the tests print, for the page
PEAK = Path("peak-of-plain")  # a case works in the folder of the run
WIDTH, PRODUCTS = 8192, 20  # of the products whose rate is measured


def run_tests(report: Reporter, paths: list[str], log: str | None) -> dict[str, Any]:
    """Runs the CUDA tests below ``paths``, from the root of the clone; its only step holds their last lines."""
    command = [sys.executable, "-m", "pytest", *TEST_OPTIONS, *paths]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if log is not None:
        Path(log).write_text(done.stdout, encoding="utf-8")
    lines = [line.rstrip() for line in done.stdout.splitlines() if line.strip()]
    report.step(tail="\n".join(lines[-LAST_LINES:]))
    if done.returncode:
        last = lines[-1] if lines else "it printed nothing"
        raise RuntimeError(f"pytest ended with status {done.returncode}: {last}")
    return {}


def products(report: Reporter, device: str, width: int = WIDTH) -> dict[str, Any]:
    """The rate of square products in bfloat16, which tells what a step could reach."""
    report.phase(FLOOR)
    left, right = (torch.randn(width, width, device=device).bfloat16() for _ in range(2))
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    for _ in range(3):
        left @ right
    wait()
    started = time.perf_counter()
    for _ in range(PRODUCTS):
        left @ right
    wait()
    return {"operations_per_second": PRODUCTS * 2 * width**3 / (time.perf_counter() - started)}


def train(
    report: Reporter,
    method: str,
    work: dict[str, Any],
    device: str,
    traced: bool = False,
    keep: str | None = None,
    part: float | None = None,
    **how: Any,
) -> dict[str, Any]:
    """A training step in each turn; the first ones also make plans and the states of the optimizer.

    ``part``: of the bytes that the method ``plain`` of this run holds, which ours plans with. ``traced``: one more step
    runs under the profiler; ``keep`` is a file for its trace.
    """
    chosen, on_gpu = Work(**work), torch.device(device).type == "cuda"
    if part is not None:
        if not PEAK.exists():
            raise CannotRunError("the plain method, of which this has a part, did not run")
        how["memory"] = int(part * int(PEAK.read_text()))
    report.phase(FLOOR)
    made = METHODS[method](chosen, device, **how)
    report.phase("steps")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    for _ in report.turns():
        loss, values = measure(made.step, made.model, device)
        report.step(loss=float(loss), **values)
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    if method == "plain":
        PEAK.write_text(str(peak or memory_of(os.getpid())[0]))
    gaps = trace(made.step, None if keep is None else Path(keep)) if traced and on_gpu else None
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    planned = how.get("memory") is not None
    return {
        "device_peak": peak,
        "gaps": gaps,
        "memory": how.get("memory"),
        "report": str(made.model.memory_report()) if planned else None,
        "statistics": counts_of(made.model),
    }
