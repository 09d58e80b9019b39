"""``gpu``: everything that needs a GPU in one command: the CUDA tests, then training of larger and larger models.

Training is full AdamW over fp32 masters by each method: memory on device and host, and time. Forward and backward are
those of ``memory-latency``. Each case has a time limit; together the limits are under ten minutes. A case that fails,
hangs or is killed is reported, and the others still run. ``--dry-run`` runs the same cases on the CPU with tiny models,
so that a mistake in them is found without a GPU.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch

from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes
from benchmarks.models.transformer import Stack

MAXIMUM_DIFFERENCE = 0.05  # of first losses: weights are drawn alike, and bf16 has eight bits
PLANNED_AFTER = 4  # steps, in which plans are chosen
PATIENCE = 4  # on a laptop, which takes longer to start than a GPU to compute
TESTS, TESTS_SECONDS = "tests", 90
METHODS = "benchmarks.gpu.methods"
OTHERS: list[tuple[str, str, str]] = [  # name, method of ``memory-latency`` and optimizer, peer
    ("torch, all on the device", "plain", ""),
    ("torch, all on the device, checkpoint", "checkpointed", ""),
    ("torch, save_on_cpu", "saved_on_cpu", ""),
    ("torchao CPUOffloadOptimizer, checkpoint", "checkpointed torchao", "torchao"),
    ("fairscale OffloadModel", "fairscale_offload", "fairscale"),
]


class Size(NamedTuple):
    """A model, the seconds that each of its cases may take, and whether others than ours train it."""

    blocks: int
    dim: int
    seconds: float
    others: bool = True


SIZES = {"small": Size(16, 1024, 15), "1b": Size(24, 2048, 30), "7b": Size(32, 4096, 80, others=False)}


@dataclass(frozen=True)
class Settings:
    """Which cases, and how they train."""

    dry_run: bool = option(False, "on the CPU, with a tiny model")
    tests: tuple[str, ...] = option(("tests",), "where CUDA tests are looked for; none: not at all")
    sizes: tuple[str, ...] = option(tuple(SIZES), "which models are trained", choices=(*SIZES, "none"))
    dtype: str = option("bfloat16", "in which layers compute", choices=("bfloat16", "float32"))
    memory: tuple[str, ...] = option(("auto",), "ours plans with each of these as memory=, and homes in host memory")
    steps: int = option(8, "of which the first four are not timed, in which plans are chosen", least=5)

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: a GPU is needed."""
        if self.dry_run or torch.cuda.is_available():
            return ""
        return "expected a CUDA device, and there is none; --dry-run runs the same cases on the CPU"


def groups_of(settings: Settings) -> dict[str, list[Case]]:
    """The tests and a group for each size, in an order in which what is short comes first."""
    patience = PATIENCE if settings.dry_run else 1
    found = {}
    if "none" not in settings.tests:
        paths = {"paths": list(settings.tests)}
        found[TESTS] = [Case(TESTS, f"{METHODS}:run_tests", paths, seconds=patience * TESTS_SECONDS)]
    ours = [("ours: OffloadModel, OffloadOptimizer", "ours", "")]
    ours += [(f"ours, memory={memory!r}", "planned", "") for memory in settings.memory]
    for name, size in SIZES.items():
        if name in settings.sizes:
            how = {"stack": asdict(stack_of(settings, name)), "dtype": settings.dtype}
            how["device"] = "cpu" if settings.dry_run else "cuda"
            cases = []
            for title, method, peer in [*ours, *(OTHERS if size.others else ())]:
                arguments = {"method": method, **how}
                arguments |= {"memory": title.split("'")[1]} if method == "planned" else {}
                cases.append(Case(title, f"{METHODS}:train", arguments, peer=peer, seconds=patience * size.seconds))
            found[name] = cases
    return found


def stack_of(settings: Settings, size: str) -> Stack:
    """The blocks of a size, and their batch."""
    return Stack(4, 64, 4, 4) if settings.dry_run else Stack(SIZES[size].blocks, SIZES[size].dim, 8, 512)


def measure(run: Run) -> None:
    """Runs the cases one after the other."""
    for name, cases in groups_of(run.settings).items():
        run.group(name, cases, turns=run.settings.steps)


def report(run: Run) -> list[str]:
    """What the tests printed, and a table for each size."""
    sections = []
    for name, outcomes in run.groups.items():
        sections.append(f"## {name}")
        if name == TESTS:
            (tests,) = outcomes
            printed = [f"```\n{tail}\n```" for tail in tests.values("tail")]
            sections += [case_table(outcomes, {"outcome": lambda o: "passed"}, "part"), *printed]
        else:
            sections += _training(run.settings, name, outcomes)
    return sections


def _training(settings: Settings, size: str, outcomes: Sequence[Outcome]) -> list[str]:
    stack = stack_of(settings, size)
    columns = {
        "device peak": lambda o: mebibytes(o.result["device_peak"]),
        "host peak": lambda o: mebibytes(o.above()),
        "s/step": lambda o: f"{_seconds(o):.3g}",
        "tokens/s": lambda o: f"{stack.tokens / _seconds(o):,.0f}",
        "first loss": lambda o: f"{o.steps[0]['loss']:.4f}",
        "last loss": lambda o: f"{o.steps[-1]['loss']:.4f}",
    }
    words = (
        f"{stack.blocks} blocks, {stack.parameters / 1e6:,.0f} M parameters, {stack.rows} rows of {stack.positions} "
        f"tokens. {settings.dtype} arithmetic, fp32 masters, AdamW."
    )
    return [words, case_table(outcomes, columns, "method")]


def _seconds(outcome: Outcome) -> float:
    return float(statistics.median(outcome.values("seconds")[PLANNED_AFTER:]))


def bounds(run: Run) -> list[str]:
    """Losses are numbers, and the first ones of a size agree."""
    broken = []
    for name, outcomes in run.groups.items():
        done = [outcome for outcome in outcomes if outcome.result is not None and name != TESTS]
        for outcome in done:
            losses = outcome.values("loss")
            if not all(math.isfinite(loss) for loss in losses):
                broken.append(f"{outcome.name}: losses are {losses}")
            else:
                apart = abs(losses[0] / done[0].steps[0]["loss"] - 1)
                what = f"{outcome.name}: the difference of its first loss from that of {done[0].name}"
                broken += at_most(what, apart, MAXIMUM_DIFFERENCE, "{:.1%}".format)
    return broken


BENCHMARK = Benchmark(Settings, measure, report, bounds)
