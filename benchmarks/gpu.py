"""``gpu``: all that a GPU can tell in some minutes: the CUDA tests, and AdamW training of models beside the peers.

Groups are in the order of their worth; each case has a process and a time limit of its own, and the results file is
written after each, so that a run that is cut off still counts. ``--dry-run`` runs the same cases on the CPU with tiny
models, so that a mistake in them is found without a GPU.
"""

import importlib
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import FLOOR, CannotRunError, Case, Outcome
from benchmarks.harness.gaps import trace
from benchmarks.harness.io_counters import counts_of
from benchmarks.harness.memory import memory_of
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, markdown_table, mebibytes
from benchmarks.harness.worker import Reporter
from benchmarks.models.contrastive import SENTENCE_TRANSFORMERS, Qwen
from benchmarks.models.methods import FSDP, HOST, METHODS, RESIDENT, Method, Training, take_turns
from benchmarks.models.qwen3 import Qwen3, token_pairs
from benchmarks.models.transformer import Block, Stack

# --- what is trained ---------------------------------------------------------------------------------------------

SCORED = 1024  #: tokens whose scores over the vocabulary are in memory at once


class Scored(nn.Module):
    """A language model that tells the loss of predicting each next token; the scores are made again in backward."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, ids: Tensor) -> Tensor:
        """Tokens (rows, positions) to the mean cross entropy."""
        states: Tensor = self.body(input_ids=ids).last_hidden_state
        return next_token_loss(states, self.body.get_input_embeddings().weight, ids)


def next_token_loss(states: Tensor, embedding: Tensor, ids: Tensor) -> Tensor:
    """States (rows, positions, channels) and tokens (rows, positions) to the mean loss, in parts of rows."""
    rows, expected = states[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    parts = zip(rows.split(SCORED), expected.split(SCORED), strict=True)
    losses = [checkpoint(_summed_loss, part, embedding, labels, use_reentrant=False) for part, labels in parts]
    return torch.stack(losses).sum() / len(rows)


def _summed_loss(states: Tensor, embedding: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(states, embedding).float(), labels, reduction="sum")


@dataclass(frozen=True)
class Work(Training):
    """A stack of blocks, or a language model ``qwen3``, in bfloat16 over float32 masters."""

    qwen3: dict[str, int] | None = None
    device: str = "cuda"
    mixed: bool = True

    def build(self) -> nn.Module:
        """The model on its device, with the same weights each time."""
        torch.manual_seed(0)
        with torch.device(self.device):
            if self.qwen3 is not None:
                return Scored(Qwen3(**self.qwen3).build())
            return nn.Sequential(*(Block(self.dim) for _ in range(self.blocks)))

    @property
    def path(self) -> str | None:
        """Where in the model its blocks are; None for a sequence."""
        return None if self.qwen3 is None else "body.layers"

    def recomputed(self, model: Any) -> nn.Module:
        """A Qwen3 has checkpoints of its own."""
        if self.qwen3 is None:
            return super().recomputed(model)
        Qwen.recomputed(self, model.body)
        return model

    def example(self, step: int) -> tuple[Tensor, ...]:
        """Hidden states, or tokens; the same in each step."""
        generator = torch.Generator().manual_seed(0)
        if self.qwen3 is None:
            return (torch.randn(self.rows, self.positions, self.dim, generator=generator).to(self.device),)
        vocabulary = self.qwen3["vocab_size"]
        return (torch.randint(vocabulary, (self.rows, self.positions), generator=generator).to(self.device),)

    def loss(self, model: nn.Module, value: Tensor) -> Tensor:
        """That which the language model returns, or the mean square."""
        return self.loss_of(model(value))

    def loss_of(self, output: Tensor) -> Tensor:
        """Of what the model returned."""
        return output.float().square().mean() if self.qwen3 is None else output

    @property
    def parameters(self) -> int:
        """Elements of the matrices, and of the biases and norms of a stack."""
        return Stack(self.blocks, self.dim, 1, 1).parameters if self.qwen3 is None else Qwen3(**self.qwen3).matrices

    @property
    def operations(self) -> float:
        """Of a step, as papers count them: forward and backward without recomputation, products alone."""
        if self.qwen3 is None:
            attention = 12.0 * self.blocks * self.dim * self.positions
        else:  # causal: half of the scores
            sizes = Qwen3(**self.qwen3)
            attention = 6.0 * sizes.num_hidden_layers * sizes.num_attention_heads * sizes.head_dim * self.positions
        return self.tokens * (6.0 * self.parameters + attention)


@dataclass(frozen=True)
class Contrast(Qwen, Work):
    """The same of pairs of tokens, whose latter half is shared."""

    device: str = "cuda"
    mixed: bool = True
    path = "layers"

    def build(self) -> nn.Module:
        """The body alone."""
        body: nn.Module = super().build().body  # type: ignore[assignment]
        return body

    def example(self, step: int) -> tuple[Tensor, ...]:
        """Queries and passages (rows, positions); the same in each step."""
        vocabulary = (self.qwen3 or {})["vocab_size"]
        return tuple(side.to(self.device) for side in token_pairs(vocabulary, self.rows, self.positions, 0))


class _First(nn.Module):
    """Tokens to embedded tokens, and the tokens."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.embedding = body.get_input_embeddings()

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        return self.embedding(ids), ids


class _Inner(nn.Module):
    """A block of the body; the tokens pass through."""

    def __init__(self, body: Any, block: nn.Module) -> None:
        super().__init__()
        self.block, self.rotary = block, body.rotary_emb

    def forward(self, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        hidden, ids = state
        turned = self.rotary(hidden, torch.arange(hidden.shape[1], device=hidden.device)[None])
        return self.block(hidden, position_embeddings=turned), ids


class _Last(nn.Module):
    """The loss."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.norm, self.embedding = body.norm, body.get_input_embeddings()

    def forward(self, state: tuple[Tensor, Tensor]) -> Tensor:
        hidden, ids = state
        return next_token_loss(self.norm(hidden), self.embedding.weight, ids)


def roundpipe(work: Work, home: Path, ranks: object, stale: bool = False) -> Method:
    """RoundPipe over a sequence of blocks in bfloat16, two micro-batches; ``stale``: updates are a step late."""
    if work.device == "cpu":
        raise CannotRunError("RoundPipe needs a GPU")
    theirs = importlib.import_module("roundpipe")
    model: Any = work.build().to(torch.bfloat16).cpu()
    if work.path is not None:
        body = model.body
        model = nn.Sequential(_First(body), *(_Inner(body, block) for block in body.layers), _Last(body))
    parts = 2
    config = theirs.RoundPipeRunConfig(num_microbatch=parts)
    model = theirs.RoundPipe(model, optim_dtype=torch.float32, model_run_config=config, pin_model="register")
    adamw = {"lr": work.learning_rate, "weight_decay": work.weight_decay, "decoupled_weight_decay": True}
    optimizer = theirs.optim.Adam(model.optim_parameters(), **adamw)
    (batch,) = work.example(0)
    batch = batch.cpu().to(torch.bfloat16) if batch.is_floating_point() else batch.cpu()

    def update() -> None:
        nn.utils.clip_grad_norm_(model.optim_parameters(), work.max_norm)
        optimizer.step()
        optimizer.zero_grad()

    def step(_: Tensor) -> Any:
        loss = model.forward_backward((batch,), loss_fn=lambda output, _: work.loss_of(output) / parts)
        model.step(update, is_async=stale)
        return loss

    return Method(step)


ROUNDPIPE = "roundpipe"

# --- the benchmark ---------------------------------------------------------------------------------------------------

MAXIMUM_DIFFERENCE = 0.05  # of first losses: weights are drawn alike, and bfloat16 has eight bits
PATIENCE = 8  # on a laptop, which takes longer to start than a GPU to compute
TESTS, RATE, TESTS_SECONDS = "tests", "products", 110
PLAIN, CHECKPOINTED = "torch, all on the device", "torch, all on the device, checkpoint"
PARTS = {"1/2": 1 / 2, "1/5": 1 / 5, "1/10": 1 / 10}
KEPT = {"checkpointed": False}
#: Of ours, what the table of claims has.
CLAIMED = {"ours, memory='auto'": "memory='auto'", "ours, 1/5 of plain's memory": "a fifth of its memory"}


class Row(NamedTuple):
    """A row of a table: its name, the method and its arguments, and the peer that it needs."""

    name: str
    method: str
    how: Mapping[str, Any] = MappingProxyType({})
    peer: str = ""


ALL_FITS = [
    Row(PLAIN, RESIDENT, KEPT),
    Row("ours, memory='auto'", HOST, {"memory": "auto"}),
    Row(CHECKPOINTED, RESIDENT),
    *(Row(f"ours, {name} of plain's memory", HOST, {"part": part}) for name, part in PARTS.items()),
    Row("ours, all streamed, two slots", HOST),
]
PEERS = [
    Row("FSDP2 CPUOffloadPolicy, checkpoint", FSDP),
    Row("RoundPipe", ROUNDPIPE, {}, "roundpipe"),
    Row("RoundPipe, updates a step late", ROUNDPIPE, {"stale": True}, "roundpipe"),
    Row("torchao CPUOffloadOptimizer, checkpoint, no clipping", "torchao", {}, "torchao"),
    Row("torch, save_on_cpu", "save_on_cpu"),
]
FAIRSCALE = Row("fairscale OffloadModel", "fairscale", {}, "fairscale")


def within(memory: str) -> list[Row]:
    """Methods that train what does not fit: ours within so much."""
    return [Row(f"ours, memory={memory!r}", HOST, {"memory": memory}), *PEERS[1:3], PEERS[0]]


class Size(NamedTuple):
    """What is trained, by which methods, in how many steps, and the seconds that each case may take."""

    work: Any
    methods: list[Row]
    seconds: float
    steps: int = 8
    traced: bool = False


CONTRASTED = "contrastive"
QWEN3_4B = Qwen3(2560, 36, 9728, 32, 8)
CONTRASTIVE = [
    Row("ours, GradCache, memory='auto'", HOST, {"memory": "auto"}),
    Row("ours, GradCache, memory='8GiB'", HOST, {"memory": "8GiB"}),
    Row("sentence-transformers", RESIDENT, KEPT, "sentence-transformers"),
]
SIZES = {
    "small": Size(Work(16, 1024, 8, 512), [*ALL_FITS, *PEERS, FAIRSCALE], 60, traced=True),
    "qwen3-0.6b": Size(Work(0, 0, 8, 1024, qwen3=asdict(Qwen3())), [*ALL_FITS, *PEERS[:3]], 40, steps=10, traced=True),
    "qwen3-4b": Size(Work(0, 0, 8, 1024, qwen3=asdict(QWEN3_4B)), within("16GiB"), 150, steps=7),
    "qwen3-4b-long": Size(Work(0, 0, 32, 1024, qwen3=asdict(QWEN3_4B)), within("16GiB")[:3], 180, steps=6),
    CONTRASTED: Size(
        Contrast(0, 0, 4096, 32, chunk=256, way=SENTENCE_TRANSFORMERS, qwen3=asdict(Qwen3())), CONTRASTIVE, 60, steps=4
    ),
    "1b": Size(Work(24, 2048, 8, 512), [*ALL_FITS, *PEERS], 40),
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
        found[TESTS] = [Case(TESTS, "benchmarks.gpu:run_tests", how, seconds=patience * TESTS_SECONDS)]
    width = {"width": 64} if settings.dry_run else {}
    found[RATE] = [Case(RATE, "benchmarks.gpu:products", {"device": device, **width}, seconds=patience * 20)]
    for name in (name for name in SIZES if name in settings.sizes):
        size, cases = SIZES[name], []
        for k, method in enumerate(size.methods):
            if settings.methods and not any(part in method.name for part in settings.methods):
                continue
            how = {"method": method.method, "work": asdict(work_of(settings, name)), **method.how}
            how |= {"contrastive": True} if name == CONTRASTED else {}
            if size.traced and traces:
                how |= {"traced": True, "keep": f"{traces}/{name}-{k}.json"}
            target = "benchmarks.gpu:train"
            cases.append(Case(method.name, target, how, {}, method.peer, seconds=patience * size.seconds))
        found[name] = cases
    return found


def work_of(settings: Settings, name: str) -> Any:
    """The model of a size, and its batch."""
    work = SIZES[name].work
    if not settings.dry_run:
        return work
    tiny = {"hidden_size": 64, "num_hidden_layers": 3, "intermediate_size": 64, "num_attention_heads": 2}
    tiny |= {"num_key_value_heads": 1, "head_dim": 32, "vocab_size": 128}
    sizes = {"qwen3": tiny} if work.qwen3 else {"blocks": 4, "dim": 64}
    return replace(work, rows=8, positions=8, device="cpu", **sizes)


def measure(run: Run) -> None:
    """Runs the cases one after the other."""
    if run.settings.traces:
        Path(run.settings.traces).mkdir(parents=True, exist_ok=True)
    for name, cases in groups_of(run.settings).items():
        # A dry run asks whether it trains at all.
        turns = 0 if name not in SIZES else 3 if run.settings.dry_run else SIZES[name].steps
        run.group(name, cases, turns=turns)


def report(run: Run) -> list[str]:
    """What the tests printed, the rate of products, and for each size a table of training and one of gaps."""
    sections = []
    for name, outcomes in run.groups.items():
        if name == TESTS:
            printed = [f"```\n{tail}\n```" for tail in outcomes[0].values("tail")]
            sections += ["## CUDA tests", case_table(outcomes, {"outcome": lambda o: "passed"}, "part"), *printed]
        elif name != RATE:
            sections += [f"## {name}", *_training(run, name, outcomes)]
    return sections


def _training(run: Run, name: str, outcomes: Sequence[Outcome]) -> list[str]:
    work, products, plain = work_of(run.settings, name), run.find(RATE), run.find(PLAIN, name)
    rate = float(products.result["operations_per_second"]) if products else math.nan
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
    if name == CONTRASTED:  # both sides are encoded, and the first time without a graph
        del columns["of products"], columns["tokens/s"]
        columns["pairs/s"] = lambda o: f"{work.rows / _seconds(o):,.0f}"
    what = "Qwen3" if work.qwen3 else f"{work.blocks} blocks"
    rows = f"{work.rows:,} rows of {work.positions:,} tokens"
    words = f"{what}, {work.parameters / 1e6:,.0f} M parameters, {rows}: bfloat16 over float32 masters, AdamW."
    if not math.isnan(rate) and name != CONTRASTED:
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


def claims(run: Run) -> list[Claim]:
    """What of ours fits, and what streams, beside the plain model on the same device."""
    found = []
    device = run.facts["machine"].split(", ")[-2]  # before the load
    for name, outcomes in ((name, outcomes) for name, outcomes in run.groups.items() if name in SIZES):
        plain, work = run.find(PLAIN, name), work_of(run.settings, name)
        what = "Qwen3-0.6B" if work.qwen3 else f"{work.parameters / 1e6:.0f} M parameters"
        for ours in outcomes:
            if plain and ours.name in CLAIMED and ours.result is not None:
                pairs = [*zip(ours.values("seconds"), plain.values("seconds"), strict=True)]
                later = [one / other for one, other in pairs[len(pairs) // 2 :]]
                set_up = f"AdamW steps of {what}, {work.tokens:,} tokens, on one {device}; {CLAIMED[ours.name]}"
                memory = ours.result["device_peak"] / plain.result["device_peak"]
                found.append(Claim(set_up, "plain PyTorch, all on the device", later, memory))
    return found


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)

# --- cases -----------------------------------------------------------------------------------------------------------

ROOT = Path(__file__).parents[1]
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
    contrastive: bool = False,
    traced: bool = False,
    keep: str | None = None,
    part: float | None = None,
    **how: Any,
) -> dict[str, Any]:
    """A training step in each turn; the first ones also make plans and the states of the optimizer.

    ``part``: of the bytes that the reference of this run holds, which ours plans with. ``traced``: one more step runs
    under the profiler; ``keep`` is a file for its trace.
    """
    chosen: Any = (Contrast if contrastive else Work)(**work)
    on_gpu = torch.device(chosen.device).type == "cuda"
    if part is not None:
        if not PEAK.exists():
            raise CannotRunError("the plain method, of which this has a part, did not run")
        how["memory"] = int(part * int(PEAK.read_text()))
    report.phase(FLOOR)
    make, options = (roundpipe, {}) if method == ROUNDPIPE else METHODS[method]
    made = make(chosen, Path(), None, **options, **how)
    report.phase("steps")
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(chosen.device)
    take_turns(report, made, chosen.example, chosen.device)
    peak = torch.cuda.max_memory_allocated(chosen.device) if on_gpu else 0
    if (method, how) == (RESIDENT, KEPT):
        PEAK.write_text(str(peak or memory_of(os.getpid())[0]))
    batch = chosen.example(0)
    gaps = trace(lambda: made.step(*batch), None if keep is None else Path(keep)) if traced and on_gpu else None
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
