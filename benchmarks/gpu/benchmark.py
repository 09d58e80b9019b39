"""``gpu``: all that a GPU can tell in some minutes: the CUDA tests, and AdamW training of models beside the peers.

Groups are in the order of their worth; each case has a process and a time limit of its own, and the results file is
written after each, so that a run that is cut off still counts. ``--dry-run`` runs the same cases on the CPU with tiny
models, so that a mistake in them is found without a GPU.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from benchmarks.gpu.work import QWEN3_4B, Qwen3, Work
from benchmarks.harness.benchmark import Benchmark, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, markdown_table, mebibytes

MAXIMUM_DIFFERENCE = 0.05  # of first losses: weights are drawn alike, and bfloat16 has eight bits
PATIENCE = 8  # on a laptop, which takes longer to start than a GPU to compute
TESTS, PRODUCTS, TESTS_SECONDS = "tests", "products", 110
CASES = "benchmarks.gpu.cases"
PLAIN, CHECKPOINTED = "torch, all on the device", "torch, all on the device, checkpoint"
PARTS = {"1/2": 1 / 2, "1/5": 1 / 5, "1/10": 1 / 10}


class Method(NamedTuple):
    """A row: its name, the method and its arguments, and the peer that it needs."""

    name: str
    method: str
    how: Mapping[str, Any] = MappingProxyType({})
    peer: str = ""


ALL_FITS = [
    Method(PLAIN, "plain"),
    Method("ours, memory='auto'", "ours", {"memory": "auto"}),
    Method(CHECKPOINTED, "checkpointed"),
    *(Method(f"ours, {name} of plain's memory", "ours", {"part": part}) for name, part in PARTS.items()),
    Method("ours, all streamed, two slots", "ours"),
]
PEERS = [
    Method("FSDP2 CPUOffloadPolicy, checkpoint", "fsdp2"),
    Method("RoundPipe", "roundpipe", {}, "roundpipe"),
    Method("RoundPipe, updates a step late", "roundpipe", {"stale": True}, "roundpipe"),
    Method("torchao CPUOffloadOptimizer, checkpoint, no clipping", "torchao", {}, "torchao"),
    Method("torch, save_on_cpu", "save_on_cpu"),
]
FAIRSCALE = Method("fairscale OffloadModel", "fairscale", {}, "fairscale")


def within(memory: str) -> list[Method]:
    """Methods that train what does not fit: ours within so much."""
    return [Method(f"ours, memory={memory!r}", "ours", {"memory": memory}), *PEERS[1:3], PEERS[0]]


class Size(NamedTuple):
    """What is trained, by which methods, in how many steps, and the seconds that each case may take."""

    work: Work
    methods: list[Method]
    seconds: float
    steps: int = 8
    traced: bool = False


CONTRASTIVE = [
    Method("ours, GradCache, memory='auto'", "contrast_ours", {"chunk": 256, "memory": "auto"}),
    Method("ours, GradCache, memory='8GiB'", "contrast_ours", {"chunk": 256, "memory": "8GiB"}),
    Method("sentence-transformers", "contrast_sentence_transformers", {"chunk": 256}, "sentence-transformers"),
]
SIZES = {
    "small": Size(Work(8, 512, 16, 1024), [*ALL_FITS, *PEERS, FAIRSCALE], 60, traced=True),
    "qwen3-0.6b": Size(Work(8, 1024, qwen3=asdict(Qwen3())), [*ALL_FITS, *PEERS[:3]], 40, steps=10, traced=True),
    "qwen3-4b": Size(Work(8, 1024, qwen3=asdict(QWEN3_4B)), within("16GiB"), 150, steps=7),
    "qwen3-4b-long": Size(Work(32, 1024, qwen3=asdict(QWEN3_4B)), within("16GiB")[:3], 180, steps=6),
    "contrastive": Size(Work(4096, 32, qwen3=asdict(Qwen3())), CONTRASTIVE, 60, steps=4),
    "1b": Size(Work(8, 512, 24, 2048), [*ALL_FITS, *PEERS], 40),
}


@dataclass(frozen=True)
class Settings:
    """Which cases."""

    dry_run: bool = option(False, "on the CPU, with tiny models")
    tests: tuple[str, ...] = option(("tests",), "where CUDA tests are looked for; none: not at all")
    sizes: tuple[str, ...] = option(tuple(SIZES), "which models are trained", choices=(*SIZES, "none"))
    methods: tuple[str, ...] = option((), "names of methods (or a part of them); all by default", kind=str)
    traces: str = option("", "a folder for the log of the tests and traces of torch.profiler; none: no step is traced")

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can: a GPU is needed."""
        if self.dry_run or torch.cuda.is_available():
            return ""
        return "expected a CUDA device, and there is none; --dry-run runs the same cases on the CPU"


def groups_of(settings: Settings) -> dict[str, list[Case]]:
    """The tests and a group for each size, in an order in which what is worth most comes first."""
    patience = PATIENCE if settings.dry_run else 1
    device = "cpu" if settings.dry_run else "cuda"
    traces = str(Path(settings.traces).absolute()) if settings.traces else None
    found = {}
    if "none" not in settings.tests:
        how = {"paths": list(settings.tests), "log": traces and f"{traces}/tests.txt"}
        found[TESTS] = [Case(TESTS, f"{CASES}:run_tests", how, seconds=patience * TESTS_SECONDS)]
    width = {"width": 64} if settings.dry_run else {}
    found[PRODUCTS] = [Case(PRODUCTS, f"{CASES}:products", {"device": device, **width}, seconds=patience * 20)]
    for name in (name for name in SIZES if name in settings.sizes):
        size, cases = SIZES[name], []
        for k, method in enumerate(size.methods):
            if settings.methods and not any(part in method.name for part in settings.methods):
                continue
            how = {"method": method.method, "work": asdict(work_of(settings, name)), "device": device, **method.how}
            if size.traced and traces:
                how |= {"traced": True, "keep": f"{traces}/{name}-{k}.json"}
            target = f"{CASES}:train"
            cases.append(Case(method.name, target, how, {}, method.peer, seconds=patience * size.seconds))
        found[name] = cases
    return found


def work_of(settings: Settings, name: str) -> Work:
    """The model of a size, and its batch."""
    work = SIZES[name].work
    if not settings.dry_run:
        return work
    tiny = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128}
    small = replace(work, rows=8, positions=8, qwen3=tiny if work.qwen3 else None)
    return small if work.qwen3 else replace(small, blocks=4, dim=64)


def measure(run: Run) -> None:
    """Runs the cases one after the other."""
    if run.settings.traces:
        Path(run.settings.traces).mkdir(parents=True, exist_ok=True)
    for name, cases in groups_of(run.settings).items():
        run.group(name, cases, turns=SIZES[name].steps if name in SIZES else 0)


def report(run: Run) -> list[str]:
    """What the tests printed, the rate of products, and for each size a table of training and one of gaps."""
    sections = []
    for name, outcomes in run.groups.items():
        if name == TESTS:
            printed = [f"```\n{tail}\n```" for tail in outcomes[0].values("tail")]
            sections += ["## CUDA tests", case_table(outcomes, {"outcome": lambda o: "passed"}, "part"), *printed]
        elif name != PRODUCTS:
            sections += [f"## {name}", *_training(run, name, outcomes)]
    return sections


def _rate(run: Run) -> float:
    products = run.find(PRODUCTS)
    return float(products.result["operations_per_second"]) if products and products.result else math.nan


def _training(run: Run, name: str, outcomes: Sequence[Outcome]) -> list[str]:
    work, rate, plain = work_of(run.settings, name), _rate(run), run.find(PLAIN, name)
    columns = {
        "device peak": lambda o: mebibytes(o.result["device_peak"]),
        "host peak": lambda o: mebibytes(o.above()),
        "s/step": lambda o: f"{_seconds(o):.3g}",
        "to plain": lambda o: f"{_seconds(o) / _seconds(plain):.2f}" if plain else "-",
        "tokens/s": lambda o: f"{work.tokens / _seconds(o):,.0f}",
        "of products": lambda o: f"{work.operations / _seconds(o) / rate:.0%}",
        "first loss": lambda o: f"{o.steps[0]['loss']:.4f}",
        "last loss": lambda o: f"{o.steps[-1]['loss']:.4f}",
    }
    if name == "contrastive":  # both sides are encoded, and the first time without a graph
        del columns["of products"], columns["tokens/s"]
        columns["pairs/s"] = lambda o: f"{work.rows / _seconds(o):,.0f}"
    what = "Qwen3" if work.qwen3 else f"{work.blocks} blocks"
    rows = f"{work.rows:,} rows of {work.positions:,} tokens"
    words = f"{what}, {work.parameters / 1e6:,.0f} M parameters, {rows}: bfloat16 over float32 masters, AdamW."
    if not math.isnan(rate) and name != "contrastive":
        words += f" Of products: operations of the model in a second, to {rate / 1e12:,.0f} TFLOP/s of a large product."
    return [words, case_table(outcomes, columns, "method"), *_gaps(outcomes)]


def _gaps(outcomes: Sequence[Outcome]) -> list[str]:
    header = ["one traced step, ms", "step", "kernels", "host runs", "host waits", "copies", "other"]
    header += ["to device", "to host", "launches"]
    rows = []
    for outcome in outcomes:
        if outcome.result and (gaps := outcome.result["gaps"]):
            values = [gaps[name.replace(" ", "_")] for name in header[1:-1]]
            rows.append([outcome.title, *(f"{value:.1f}" for value in values), f"{gaps['launches']:,.0f}"])
    if not rows:
        return []
    words = (
        "A step is kernels and gaps: the host runs or waits, a kernel waits for a copy, other. Copies may be hidden."
    )
    return [words, markdown_table(header, rows)]


def _seconds(outcome: Outcome) -> float:
    """Of the later half of the steps: in the first ones plans are chosen."""
    seconds = outcome.values("seconds")
    return float(statistics.median(seconds[len(seconds) // 2 :]))


def bounds(run: Run) -> list[str]:
    """Losses are numbers, and the first ones of a size agree."""
    broken = []
    for outcomes in (outcomes for name, outcomes in run.groups.items() if name in SIZES):
        done = [outcome for outcome in outcomes if outcome.result is not None]
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
