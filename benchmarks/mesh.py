"""``mesh``: ranks that train one model together, ours beside FSDP2 and DeepSpeed's ZeRO-3 with what they can offload.

Each method has its own processes, one a rank, and takes its steps in turn with ours on disk: the same model, rows,
clipping and AdamW. One process with everything in memory and all rows says what the losses are.

Memory is that of the rank that holds most, above the libraries. Bytes from others are those that the kernel counts at
the sockets of rank 0, whatever a library calls.
"""

import statistics
from dataclasses import asdict, dataclass

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread
from benchmarks.models.methods import DEEPSPEED, DISK, FSDP, HOST, NVME, RESIDENT, Training

NAMES = {
    DISK: "ours, disk",
    HOST: "ours, host memory",
    FSDP: "FSDP2, CPUOffloadPolicy",
    DEEPSPEED: "DeepSpeed ZeRO-3, CPU",
    NVME: "DeepSpeed ZeRO-3, NVMe",
    RESIDENT: "one process, in memory",
}
PEERS = {DEEPSPEED: "deepspeed", NVME: "deepspeed"}
OTHERS = (FSDP, DEEPSPEED, NVME)
TOLERANCE = 1e-5  # of a loss, relative to that of one process
MEMORY_SHARE = 1 / 3  # of the better of the others
#: Of what sockets receive: heads of messages, and the store of the process group.
OVERHEAD = 0.02
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18), "MALLOC_ARENA_MAX": "1"}


@dataclass(frozen=True)
class Settings:
    """The model, the batch of all ranks, and the number of steps."""

    ranks: int = option(2, "processes that train together", least=2)
    blocks: int = option(8, "transformer blocks; each is a shard, or a unit of what others shard")
    dim: int = option(768, "channels", least=64, multiple=64)
    rows: int = option(8, "rows of a batch, of all ranks together", least=2)
    positions: int = option(128, "tokens of a row")
    steps: int = option(7, "timed pairs of steps")
    methods: tuple[str, ...] = option((DISK, HOST, *OTHERS, RESIDENT), "which run", choices=tuple(NAMES))

    def wrong(self) -> str:
        """Why these settings cannot be run, or nothing: losses of unequal rows would need weights."""
        if self.rows % self.ranks == 0:
            return ""
        return f"expected as many rows on each rank, got rows={self.rows} with ranks={self.ranks}"

    @property
    def training(self) -> Training:
        """The stack and its batches."""
        return Training(self.blocks, self.dim, self.rows, self.positions, learning_rate=1e-3)


def measure(run: Run) -> None:
    """Runs all cases in turn with ours on disk."""
    settings, training = run.settings, run.settings.training
    run.facts["model"] = (
        f"{training.blocks} blocks of {training.dim} channels, {training.parameters / 1e6:.1f} M parameters, float32; "
        f"{training.tokens:,} tokens a step, {settings.ranks} ranks"
    )
    methods = [DISK, *(method for method in NAMES if method != DISK and method in settings.methods)]
    run.group("in turn", [_case(method, settings) for method in methods], "pairs", turns=settings.steps, warmup=1)


def _case(method: str, settings: Settings) -> Case:
    ranks = 1 if method == RESIDENT else settings.ranks
    arguments = {"method": method, "training": asdict(settings.training), "together": ranks > 1}
    target = "benchmarks.models.methods:train"
    return Case(NAMES[method], target, arguments, GIVE_BACK, peer=PEERS.get(method, ""), ranks=ranks)


def ratios_to_ours(outcome: Outcome) -> list[float]:
    """Times of ours on disk to those of a method, step by step."""
    return [1 / ratio for ratio in outcome.ratios()]


def report(run: Run) -> list[str]:
    """A table, and what its columns count."""
    found, settings = run.groups["in turn"], run.settings
    ours = run.find(NAMES[DISK])
    columns = {
        "memory a rank": lambda o: mebibytes(o.above()),
        "ours to theirs": lambda o: "-" if o is ours or ours is None else f"{_memory_ratio(ours, o):.2f}",
        "s/step": lambda o: f"{o.median():.2f}",
        "ours to theirs, time": lambda o: "-" if o is ours else spread(ratios_to_ours(o), 2),
        "CPU s": lambda o: f"{o.median('processor'):.2f}",
        "received": lambda o: mebibytes(o.median("received")) if o.case.ranks > 1 else "-",
        "files, read and written": lambda o: mebibytes(o.median("read") + o.median("written")),
        "loss": lambda o: f"{o.steps[0]['loss']:.5f} -> {o.steps[settings.steps - 1]['loss']:.5f}",
    }
    words = (
        "Memory is the peak of the steps of the rank that holds most, above the interpreter and torch. Time ratios are "
        "those of pairs of steps in turn: median (least to greatest); below 1 ours on disk is faster. `CPU s`, files "
        f"and what sockets received are those of rank 0. {settings.ranks} ranks share the cores of the machine; each "
        "has torch threads of its own."
    )
    sections = [case_table(found, columns, "method"), words]
    if ours is not None:
        counted = {kind: ours.median(f"bytes_{kind}") for kind in ("gathered", "reduced", "agreed")}
        listed = ", ".join(f"{amount:,.0f} {kind}" for kind, amount in counted.items())
        sections.append(f"Bytes that a rank of ours counts in a step: {listed}.")
    return sections


def _memory_ratio(ours: Outcome, other: Outcome) -> float:
    return ours.above() / other.above()


def bounds(run: Run) -> list[str]:
    """The losses of one process; what ours counts is what its sockets receive; memory at most a third of the others."""
    broken: list[str] = []
    outcomes = [outcome for outcome in run.groups["in turn"] if outcome.result is not None]
    alone, ours = run.find(NAMES[RESIDENT]), run.find(NAMES[DISK])
    for outcome in outcomes if alone is not None else ():
        what = f"{outcome.name}: the difference of losses"
        broken += at_most(what, outcome.differ(alone), TOLERANCE, "{:.1e}".format)
    for outcome in outcomes:
        if "bytes_gathered" in outcome.steps[0] and outcome.case.ranks > 1:
            counted = statistics.median(map(sum, zip(*(outcome.values(kind) for kind in _COUNTED), strict=True)))
            received = outcome.median("received")
            if received:
                difference = abs(received - counted) / counted
                broken += at_most(f"{outcome.name}: what sockets receive beyond what it counts", difference, OVERHEAD)
    others = [outcome.above() for outcome in outcomes if outcome.case.arguments["method"] in OTHERS]
    if ours is not None and others:
        broken += at_most("memory of ours on disk", ours.above(), MEMORY_SHARE * min(others), mebibytes)
    return broken


_COUNTED = ("bytes_gathered", "bytes_reduced", "bytes_agreed")


def claims(run: Run) -> list[Claim]:
    """Ours on disk beside each of the others."""
    ours = run.find(NAMES[DISK])
    found = [run.find(NAMES[method]) for method in OTHERS]
    size = run.settings.training.parameters / 1e6
    set_up = f"{run.settings.ranks} ranks train {size:.0f} M parameters with clipping and AdamW, all state on disk"
    return [
        Claim(set_up, other.title, ratios_to_ours(other), _memory_ratio(ours, other))
        for other in found
        if ours is not None and other is not None
    ]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
