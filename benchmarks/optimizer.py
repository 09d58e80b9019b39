"""``optimizer``: AdamW steps with clipping while parameters, gradients and moments are stored on disk.

Ours trains the same model in turn with the resident, checkpointed model under torch's fused AdamW. What is left in the
kernel's page cache is written out before the next turn; the table shows how long that takes. Ours spends a part of the
memory that it saves on graphs that are not recomputed.

With ``--parameters 1e9`` nothing is resident: ours trains a model whose parameters, gradients and moments are larger
than its memory, in turn with DeepSpeed. While DeepSpeed waits it holds memory that the page cache lacks for our files.
It recomputes each block; with ``--peer-keeps`` it keeps its activations, which takes less arithmetic and more memory.
"""

import math
import shutil
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.io_counters import file_work
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_least, at_most, case_table, mebibytes, spread
from benchmarks.models.deepspeed import ENVIRONMENT
from benchmarks.models.methods import DISK, FROM_META, NVME, RESIDENT, STEPS, Training

NAMES = {
    RESIDENT: "resident, checkpointed, fused AdamW",
    DISK: "on disk",
    FROM_META: "on disk, from birth",
    NVME: "DeepSpeed ZeRO-3, NVMe",
}

MAXIMUM_RATIO = 1.05  # of the step on disk to the resident one
MAXIMUM_DIFFERENCE = 1e-6  # of any parameter tensor at the end, relative
MINIMUM_SPEEDUP = 1.5  # over DeepSpeed
MAXIMUM_MEMORY_SHARE = 0.25  # of DeepSpeed's
MAXIMUM_LARGE_BYTES = 2 << 30  # for a billion parameters
WORDS = (
    "Ratios are medians of the steps in turn (least to greatest). `kernel` is the time in which the kernel wrote out "
    "afterwards what was left in its page cache. Bytes are what passed read and write (or reached the device, where "
    "that is more), for each parameter and step, boundaries between blocks included; what is read, but not from disk, "
    "is from the page cache. The default allocator is used."
)
TRAIN = "benchmarks.models.methods:train"
BYTES_AT_REST = 16  # of each parameter: itself, its gradient and two moments
WAYS = {"disk": DISK, "deepspeed": NVME}


@dataclass(frozen=True)
class Settings:
    """Sizes, methods, and the number of pairs."""

    blocks: int = option(8, "transformer blocks")
    dim: int = option(1024, "channels", multiple=64)
    rows: int = option(16, "rows of the batch")
    positions: int = option(128, "tokens of a row")
    slots: int = option(3, "blocks in memory at once, in ours: one computes, one is updated, one waits between the two")
    graphs: int = option(512, "MiB of graphs that ours keeps instead of recomputing", least=0)
    pairs: int = option(5, "pairs of steps of each method")
    ways: tuple[str, ...] = option(tuple(WAYS), "methods beside the resident one", choices=tuple(WAYS))
    parameters: float | None = option(None, "a model of about so many parameters, on disk from the start", kind=float)
    peer_keeps: bool = option(False, "DeepSpeed keeps its activations instead of recomputing each block")


def training_of(settings: Settings) -> Training:
    """The model and its batch."""
    sizes: dict[str, Any] = {name: getattr(settings, name) for name in ("dim", "rows", "positions", "slots", "graphs")}
    sizes["dropout"] = 0.1
    if settings.parameters is None:
        return Training(settings.blocks, **sizes)
    blocks = max(1, round(settings.parameters / Training(1, **sizes).parameters))
    # Every block moves the sum that the last one returns: in a deeper model each may move it less.
    rate = Training.learning_rate * min(1.0, Settings.blocks / blocks)
    return Training(blocks, **sizes, learning_rate=rate)


def measure(run: Run) -> None:
    """Methods in pairs with the resident one, or, of a large model, ours and DeepSpeed in rounds."""
    settings, training = run.settings, training_of(run.settings)
    needed, room = 1.2 * BYTES_AT_REST * training.parameters, shutil.disk_usage(run.folder).free
    if room < needed:
        raise ValueError(
            f"expected {needed / 1e9:.0f} GB of free disk for {training.parameters / 1e6:,.0f} M parameters, "
            f"got {room / 1e9:.0f} GB in home={run.folder.parent}"
        )

    def case(method: str) -> Case:
        # Parameters are compared after the first step, a turn that does not count, and the pairs.
        saved = 0 if settings.parameters else 2 + settings.pairs
        arguments = {"method": method, "training": asdict(training), "save_after": saved}
        if method != NVME:
            return Case(NAMES[method], TRAIN, arguments)
        arguments["how"] = {"checkpointed": not settings.peer_keeps}
        name = NAMES[method] + (", activations kept" if settings.peer_keeps else "")
        return Case(name, TRAIN, arguments, ENVIRONMENT, "deepspeed")

    ways = [WAYS[way] for way in settings.ways]
    if settings.parameters is None:
        cases = [case(method) for method in (RESIDENT, *ways)]
        run.group("beside the resident model", cases, "pairs", turns=settings.pairs, warmup=1)
    else:  # in the first turn a method makes the files of its moments
        cases = [case(method) for method in (FROM_META, *(way for way in ways if way == NVME))]
        run.group("larger than memory", cases, "rounds", turns=settings.pairs, warmup=1)


def report(run: Run) -> list[str]:
    """One table."""
    outcomes, training, large = run.outcomes, training_of(run.settings), run.settings.parameters is not None

    def of_parameters(outcome: Outcome, *kinds: str) -> str:
        moved = file_work(outcome.steps)
        return f"{sum(moved[kind] for kind in kinds) / training.parameters:.1f}"

    def losses(outcome: Outcome) -> str:
        return f"{outcome.result['first']['loss']:.1f} to {outcome.steps[-1]['loss']:.1f}" if outcome.steps else "-"

    def difference(outcome: Outcome) -> str:
        found = outcome.result.get("difference")
        return "-" if found is None else f"{found:.0e}" if found else "0"

    columns = {
        "s/step": lambda o: f"{o.median():.2f}",
        "to ours" if large else "to the resident": lambda o: spread(o.ratios()) if o is not outcomes[0] else "1",
        "kernel": lambda o: f"{o.median('kernel'):.2f} s",
        "waiting": lambda o: f"{_waited(o) / o.median():.1%}",
        "read B/parameter": lambda o: of_parameters(o, "read_bytes", "copied_bytes"),
        "of it from disk": lambda o: of_parameters(o, "read_bytes"),
        "written": lambda o: of_parameters(o, "written_bytes"),
        "peak memory": lambda o: mebibytes(o.peaks[STEPS]),
        "less torch": lambda o: mebibytes(o.above()),
        "losses" if large else "parameters differ": losses if large else difference,
    }
    words = (
        f"{training.parameters / 1e6:,.0f} M parameters in {training.blocks} blocks, fp32: "
        f"{16 * training.parameters / 1e9:.1f} GB of parameters, gradients and moments. {training.tokens:,} tokens a "
        f"step, AdamW, gradients clipped to a global norm of {training.max_norm:g}."
    )
    sections = [words, case_table(outcomes, columns, "method"), WORDS]
    ours, theirs = _pair(run)
    if ours and theirs:
        speedup, share = _advantage(ours, theirs)
        sections.append(f"Ours takes 1/{speedup:.2f} of the time of {theirs.title} and {share:.2f} of its memory.")
    return sections


def _waited(outcome: Outcome) -> float:
    """Seconds of a step in which it waits for copies; a model in memory has none."""
    return statistics.median(step.get("waited", step.get("wait_seconds", 0.0)) for step in outcome.steps)


def _pair(run: Run) -> tuple[Outcome | None, Outcome | None]:
    """The outcomes of ours and of DeepSpeed, where they ran."""
    theirs = next((outcome for outcome in run.outcomes if outcome.case.peer and outcome.result is not None), None)
    return run.find(NAMES[FROM_META]) or run.find(NAMES[DISK]), theirs


def _advantage(ours: Outcome, theirs: Outcome) -> tuple[float, float]:
    """How many times as fast ours is, and its share of the memory."""
    return theirs.ratio() / ours.ratio(), ours.peaks[STEPS] / theirs.peaks[STEPS]


def bounds(run: Run) -> list[str]:
    """Ours keeps up with the resident model, or within its memory; it beats DeepSpeed, where that runs."""
    broken: list[str] = []
    ours, theirs = _pair(run)
    if ours is None:
        return broken
    if (difference := ours.result.get("difference")) is not None:
        what = f"{ours.name}: the difference of parameters from the resident model's"
        broken += at_most(what, difference, MAXIMUM_DIFFERENCE, "{:.0e}".format)
    if run.settings.parameters is not None:
        losses = [ours.result["first"]["loss"], *ours.values("loss")]
        broken += [] if all(map(math.isfinite, losses)) else [f"{ours.name}: losses must be numbers, are {losses}"]
        broken += at_most(f"{ours.name}: the peak", ours.peak_bytes, MAXIMUM_LARGE_BYTES, mebibytes)
    else:
        broken += at_most(f"{ours.name}: the ratio of times", ours.ratio(), MAXIMUM_RATIO, "{:.3f}".format)
    if theirs is not None:
        speedup, share = _advantage(ours, theirs)
        broken += at_least(f"the speed-up over {theirs.name}", speedup, MINIMUM_SPEEDUP, "{:.2f}".format)
        broken += at_most(f"the share of the memory of {theirs.name}", share, MAXIMUM_MEMORY_SHARE, "{:.2f}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """A large model beside DeepSpeed, a smaller one beside the resident model."""
    training, where = training_of(run.settings), "parameters, gradients and moments on disk"
    ours, theirs = _pair(run)
    if run.settings.parameters is None:
        resident = run.find(NAMES[RESIDENT])
        set_up = f"AdamW steps of {training.parameters / 1e6:.0f} M parameters, {training.tokens:,} tokens; {where}"
        peer = "all in memory, blocks checkpointed, fused AdamW"
        return [Claim(set_up, peer, ours.ratios(), ours.peaks[STEPS] / resident.peaks[STEPS])]
    kept = run.settings.peer_keeps
    set_up = "the same" if kept else f"AdamW steps of {run.settings.parameters / 1e9:.0f} billion parameters; {where}"
    peer = f"DeepSpeed ZeRO-3 on NVMe, {'activations kept' if kept else 'blocks checkpointed'}"
    return [Claim(set_up, peer, [1 / ratio for ratio in theirs.ratios()], ours.peaks[STEPS] / theirs.peaks[STEPS])]


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims)
