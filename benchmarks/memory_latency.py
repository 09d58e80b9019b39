"""``memory-latency``: what each method saves in memory and costs in time, in turn with plain PyTorch.

With ``--work gradients`` a step is forward and backward of the same blocks on the same batch: PyTorch's own ways to use
less memory, and ``OffloadModel`` with each home, activations kept and recomputed. In another process glibc's heap
returns freed blocks at once: there the peak of a step is what the method needs.

With ``--work training``, ``training-2048`` or ``contrastive`` a step is a whole one, with clipping and AdamW, and ours
has ``memory=`` as its only setting. First the fastest way with everything in memory takes some steps alone. Its peak,
all of it and parts, is what ours gets as ``memory=``; so is the least that works. Ours has planned before the steps
that count.

A case warms its process with steps of two blocks by the same method, makes a batch, notes what it holds then, and
builds the model. What a method takes is the rise above that.
"""

import ctypes
import gc
import importlib
import math
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case, Outcome
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread
from benchmarks.harness.worker import Reporter
from benchmarks.models.contrastive import Texts
from benchmarks.models.deepspeed import ENVIRONMENT
from benchmarks.models.methods import (
    DEEPSPEED,
    DISK,
    FROM_META,
    FSDP,
    HOST,
    METHODS,
    NVME,
    RESIDENT,
    STEPS,
    Training,
    difference,
    save,
    take_turns,
    written_out,
)
from benchmarks.models.transformer import Stack

FLOOR, PLANNING = "after a step of two layers", "planning"
GRADIENTS, CONTRASTIVE = "gradients", "contrastive"
#: Of each work: transformer blocks, channels, rows (pairs of a contrastive batch), tokens of a row.
SIZES = {
    GRADIENTS: (12, 512, 16, 32),
    "training": (16, 320, 4, 128),
    "training-2048": (12, 192, 16, 128),
    CONTRASTIVE: (12, 192, 32, 32),
}
TARGET = "benchmarks.memory_latency:train"
T = TypeVar("T")


@dataclass(frozen=True)
class Settings:
    """What a step is, sizes (where none is given, those of the work), the number of pairs, and which cases."""

    work: str = option(GRADIENTS, "what a step is", choices=tuple(SIZES))
    layers: int | None = option(None, "transformer blocks", least=4, kind=int)
    dim: int | None = option(None, "channels, a multiple of 64", multiple=64, kind=int)
    rows: int | None = option(None, "rows of the batch; pairs of a contrastive one", least=4, kind=int)
    positions: int | None = option(None, "tokens of a row", kind=int)
    pairs: int = option(5, "steps in turn with plain PyTorch")
    only: tuple[str, ...] = option(("",), "only cases with one of these in their names")
    shares: tuple[int, ...] = option((1, 2, 3, 5, 10), "training: memory= is plain PyTorch's peak, by each of these")
    before: str = option("", "training: a checkout of another commit, whose ours runs, too")

    @property
    def stack(self) -> Stack:
        """The model and its batch."""
        given = (self.layers, self.dim, self.rows, self.positions)
        return Stack(*(size or usual for size, usual in zip(given, SIZES[self.work], strict=True)))

    def wrong(self) -> str:
        """Why these settings cannot be run; empty if they can."""
        there = not self.before or (Path(self.before) / "offload" / "__init__.py").exists()
        return "" if there else f"expected a checkout of this project, got --before {self.before}"

    def chosen(self, cases: list[Case]) -> list[Case]:
        """The first one, and those that were asked for."""
        return [cases[0], *(case for case in cases[1:] if any(word in case.name for word in self.only))]


# --- forward and backward --------------------------------------------------------------------------------------------

MAXIMUM_DIFFERENCE = 1e-4  # of gradients, relative
REFERENCE = "torch, all in memory"
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # so that a peak is what is in use


def measure(run: Run) -> None:
    """Steps in pairs with plain PyTorch; the peaks in use."""
    settings, training = run.settings, Training(**asdict(run.settings.stack), update=False)
    kept, cut = {"checkpointed": False}, {"num_slices": training.blocks}
    named: list[tuple[str, str, dict[str, Any], int]] = [
        (REFERENCE, RESIDENT, kept, 1),
        ("torch, 4 micro-batches", RESIDENT, kept, 4),
        ("torch.utils.checkpoint", RESIDENT, {}, 1),
        ("torch.utils.checkpoint, 4 micro-batches", RESIDENT, {}, 4),
        ("save_on_cpu", "save_on_cpu", {}, 1),
    ]
    slices = f"{training.blocks} slices"
    for place, method in (("host", HOST), ("disk", DISK)):
        named.append((f"ours: {place}, {slices}, keep", method, {**cut, "checkpoint_activation": False}, 1))
        named.append((f"ours: {place}, {slices}, checkpoint", method, cut, 1))
    named.append((f"ours: disk, {slices}, checkpoint, 4 micro-batches", DISK, {**cut, "num_microbatches": 4}, 1))

    def cases(environment: dict[str, str]) -> list[Case]:
        found = []
        for name, method, how, parts in named:
            arguments = {"method": method, "training": asdict(replace(training, microbatches=parts)), "how": how}
            arguments |= {"plans": 1, "reference": name == REFERENCE}
            found.append(Case(name, TARGET, arguments, environment))
        return settings.chosen(found)

    run.group("training", cases({}), "pairs", turns=settings.pairs, warmup=1)
    run.group("in use", cases(GIVE_BACK), turns=2)


def report(run: Run) -> list[str]:
    """One table."""
    stack, peaks = run.settings.stack, peaks_of(run)
    columns = {
        "peak in use": lambda o: mebibytes(peaks[o.name]) if o.name in peaks else "-",
        "heap as it comes": lambda o: mebibytes(o.above(FLOOR)),
        "s/step": lambda o: f"{o.median():.2f}",
        "to torch": lambda o: spread(o.ratios(), 2),
        "gradients differ by": lambda o: f"{o.result['difference']:.0e}",
    }
    words = (
        f"{stack.blocks} blocks, {stack.parameters / 1e6:.0f} M parameters in fp32, {stack.rows} rows of "
        f"{stack.positions} tokens. A step is forward, loss and backward, with gradients stored. Peaks are above a "
        "process that took a step of two such blocks with the same method. Ratios: to the step of plain PyTorch in the "
        "same pair, median (least to greatest)."
    )
    return [case_table(run.groups["training"], columns, "training"), words]


def peaks_of(run: Run) -> dict[str, int]:
    """Bytes in use by method, above a step of two layers."""
    return {o.name: o.above(FLOOR) for o in run.groups["in use"] if o.result is not None}


def bounds(run: Run) -> list[str]:
    """Gradients are those of plain PyTorch."""
    broken = []
    for outcome in (outcome for outcome in run.groups["training"] if outcome.result is not None):
        what = f"{outcome.name}: the difference from plain PyTorch"
        broken += at_most(what, outcome.result["difference"], MAXIMUM_DIFFERENCE, "{:.1e}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """The finest cut on disk, with activations kept and recomputed, beside plain PyTorch."""
    stack, peaks = run.settings.stack, peaks_of(run)
    found = []
    for words, setting in (("kept", "keep"), ("recomputed", "checkpoint")):
        ours = run.find(f"ours: disk, {stack.blocks} slices, {setting}")
        what = (
            f"forward and backward of {stack.parameters / 1e6:.0f} M parameters, {stack.tokens} tokens; parameters and "
            f"gradients on disk, activations {words}"
        )
        memory = peaks[ours.name] / peaks[REFERENCE]
        found.append(Claim(what, "plain PyTorch", ours.ratios(), memory, " above torch"))
    return found


def points(run: Run) -> dict[str, tuple[float, float]]:
    """Peaks in use, and times to those of plain PyTorch."""
    peaks = peaks_of(run)
    return {o.name: (peaks[o.name] / 2**20, o.ratio()) for o in run.groups["training"] if o.name in peaks and o.steps}


# --- training under memory= ------------------------------------------------------------------------------------------

ALONE, IN_TURN = "alone", "in turn"
PLAIN, LEAST = "all in memory, fused AdamW", "the least"
PLANNED_AFTER = 6  #: turns in which plans are chosen, and margins of memory are learnt
ALL_OF_IT = 1.02  # time with all memory, to the plain step
MEMORY_ERROR, TIME_ERROR = 0.05, 0.15  # of predictions
SLOWER = 0.03  # than the commit before: what a median may be off
SLACK = 32 << 20  # of a peak above memory x 1.10, for the allocator
MAXIMUM_LOSS_DIFFERENCE = 1e-3  # relative, after all steps
WORDS = (
    "Times are medians of the steps in turn, to those of the first row (least to greatest). `peak` is the most that a "
    "process held in a step, above what it held with a batch before the model was made; `planning` the same from the "
    "first step to the last plan. `predicted peak` and `predicted s` are what the plan predicted before these steps, "
    "and how far that is off."
)


def work_of(run: Run) -> tuple[Training, bool]:
    """The model and its steps, and whether these are contrastive."""
    contrastive = run.settings.work == CONTRASTIVE
    sizes = asdict(run.settings.stack) | {"dropout": 0.1 if contrastive else 0.0}
    return training_of(sizes, contrastive), contrastive


def measure_training(run: Run) -> None:
    """The peak of the plain way and the least; then all methods, each in turn with the plain one."""
    settings, (training, contrastive) = run.settings, work_of(run)
    arguments = {"training": asdict(training), "contrastive": contrastive}

    def case(name: str, method: str, how: dict[str, Any], peer: str = "", **more: str) -> Case:
        environment = ENVIRONMENT if peer else {}
        return Case(name, TARGET, {**arguments, "method": method, "how": how, **more}, environment, peer)

    plain = case(PLAIN, RESIDENT, {"checkpointed": False})
    smallest = Case(LEAST, "benchmarks.memory_latency:least", arguments)
    sizes = run.group(ALONE, [plain, smallest], turns=PLANNED_AFTER + 2)
    if not sizes or any(outcome.result is None for outcome in sizes):
        return
    whole, fits = peak_of(sizes[0]), int(sizes[1].result["bytes"])
    memory = {f"1/{share}" if share > 1 else "all of it": whole // share for share in settings.shares}
    memory = {name: nbytes for name, nbytes in memory.items() if nbytes > fits} | {LEAST: fits}
    cases, method = [plain], DISK if contrastive else FROM_META
    for name, nbytes in memory.items():
        cases.append(case(f"ours: {name}", method, {"memory": nbytes}))
        if settings.before:
            there = str(Path(settings.before).resolve())
            cases.append(case(f"before: {name}", method, {"memory": nbytes}, before=there))
    cases.append(case("torch.utils.checkpoint", RESIDENT, {}))
    cases.append(case("FSDP2, CPUOffloadPolicy", FSDP, {"checkpointed": False}))
    if not contrastive:
        cases.append(case("DeepSpeed ZeRO-3, CPU", DEEPSPEED, {}, "deepspeed"))
        cases.append(case("DeepSpeed ZeRO-3, NVMe", NVME, {}, "deepspeed"))
    run.group(IN_TURN, settings.chosen(cases), "pairs", turns=settings.pairs, warmup=PLANNED_AFTER)


def peak_of(outcome: Outcome, phase: str = STEPS) -> int:
    """Bytes above what the process held before the model was made."""
    return outcome.above(FLOOR, phase)


def _measured(run: Run) -> list[Outcome]:
    """The cases that ran in turn, without those that gave no result."""
    return [outcome for outcome in run.groups.get(IN_TURN, ()) if outcome.result is not None and outcome.steps]


def _off(outcome: Outcome, kind: str) -> float:
    """How far a prediction is off, relative; NaN where there is none."""
    measured = outcome.median() if kind == "seconds" else peak_of(outcome)
    return float(outcome.result.get(kind, math.nan)) / measured - 1


def report_training(run: Run) -> list[str]:
    """One table."""
    training, contrastive = work_of(run)
    outcomes = run.groups.get(IN_TURN) or run.groups[ALONE]

    def told(kind: str, show: Callable[[float], str]) -> Callable[[Outcome], str]:
        return lambda o: f"{show(o.result[kind])} ({_off(o, kind):+.1%})" if kind in o.result and o.steps else "-"

    columns = {
        "memory": lambda o: mebibytes(memory) if (memory := o.case.arguments["how"].get("memory")) else "-",
        "peak": lambda o: mebibytes(peak_of(o)),
        "to the plain one's": lambda o: f"{peak_of(o) / peak_of(outcomes[0]):.2f}",
        "predicted peak": told("bytes", mebibytes),
        "planning": lambda o: mebibytes(peak_of(o, PLANNING)),
        "s/step": lambda o: f"{o.median():.3f}",
        "time": lambda o: spread(o.ratios()) if o is not outcomes[0] else "1",
        "predicted s": told("seconds", "{:.3f}".format),
        "kernel": lambda o: f"{o.median('kernel'):.2f} s",
    }
    words = (
        f"{training.blocks} blocks of {training.dim} channels, {training.tokens:,} tokens a step, fp32; "
        f"{'contrastive steps' if contrastive else 'training'} with AdamW and clipping; homes on disk."
    )
    if IN_TURN not in run.groups:
        return [words, case_table(outcomes, {"result": lambda o: "measured"}, "method")]
    fits, whole = int(run.find(LEAST, ALONE).result["bytes"]), peak_of(run.find(PLAIN, ALONE))
    alone = f"Alone, the plain way held {mebibytes(whole)}. The least that works for ours is {fits:,} bytes, "
    return [words, case_table(outcomes, columns, "method"), WORDS, f"{alone}1/{whole / fits:.1f} of it."]


def bounds_training(run: Run) -> list[str]:
    """The time with all memory, no row slower than before; memory that is kept, predictions, losses."""
    broken: list[str] = []
    outcomes = {outcome.name: outcome for outcome in _measured(run)}
    if PLAIN not in outcomes:
        return [f"{PLAIN}: no result"]
    for name, outcome in outcomes.items():
        both = list(zip(outcome.values("loss"), outcomes[PLAIN].values("loss"), strict=False))
        apart = abs(both[-1][0] / both[-1][1] - 1)
        broken += at_most(f"{name}: the difference of its loss", apart, MAXIMUM_LOSS_DIFFERENCE, "{:.1e}".format)
        if not name.startswith("ours: "):
            continue
        held = max(peak_of(outcome, phase) for phase in (PLANNING, STEPS))
        broken += at_most(f"{name}: the peak", held, 1.10 * outcome.case.arguments["how"]["memory"] + SLACK, mebibytes)
        for kind, limit in (("bytes", MEMORY_ERROR), ("seconds", TIME_ERROR)):
            what = f"{name}: the error of the predicted {kind}"
            broken += at_most(what, abs(_off(outcome, kind)), limit, "{:.1%}".format)
        if name == "ours: all of it":
            broken += at_most(f"{name}: the ratio of times", outcome.ratio(), ALL_OF_IT, "{:.3f}".format)
        if (before := outcomes.get(name.replace("ours", "before"))) is not None:
            slower = (1 + SLOWER) * before.ratio()
            broken += at_most(f"{name}: the ratio of times, as before,", outcome.ratio(), slower, "{:.3f}".format)
    return broken


def claims_training(run: Run) -> list[Claim]:
    """Half, a fifth and a tenth of the memory, beside the plain way."""
    training, contrastive = work_of(run)
    kind = "contrastive" if contrastive else "AdamW"
    found, plain = [], run.find(PLAIN, IN_TURN)
    for share in (2, 5, 10):
        if (ours := run.find(f"ours: 1/{share}", IN_TURN)) is not None:
            set_up = f"{kind} steps of {training.tokens:,} tokens with only `memory=` set, to 1/{share} of theirs"
            found.append(Claim(set_up, PLAIN, ours.ratios(), peak_of(ours) / peak_of(plain)))
    return found


def points_training(run: Run) -> dict[str, tuple[float, float]]:
    """Peaks, and times to those of the plain way."""
    return {o.name: (peak_of(o) / 2**20, 1.0 if o.name == PLAIN else o.ratio()) for o in _measured(run)}


def _or(of_gradients: Callable[[Run], T], of_training: Callable[[Run], T]) -> Callable[[Run], T]:
    return lambda run: (of_gradients if run.settings.work == GRADIENTS else of_training)(run)


BENCHMARK = Benchmark(
    Settings,
    _or(measure, measure_training),
    _or(report, report_training),
    _or(bounds, bounds_training),
    _or(claims, claims_training),
    _or(points, points_training),
)

# --- cases -----------------------------------------------------------------------------------------------------------

VOCABULARY = 4096
MOST_TRIES = 30  #: numbers of bytes that the search for the least tries: what the allocator keeps drifts
TOLD = re.compile(r"(?:pass|with|;) memory=([\d,]+)")  #: what an error of too little memory asks for
GRADIENT_FILE = "gradients.pt"  # of the reference


def training_of(training: dict[str, Any], contrastive: bool) -> Training:
    """The model and its steps."""
    return Texts(**{"vocabulary": VOCABULARY, **training}) if contrastive else Training(**training)


def train(
    report: Reporter,
    method: str,
    training: dict[str, Any],
    how: dict[str, Any],
    contrastive: bool = False,
    before: str = "",
    plans: int = PLANNED_AFTER,
    reference: bool = False,
) -> dict[str, Any]:
    """A step in each turn; from turn number ``plans`` on in the phase "steps".

    ``how``: arguments of the method. ``before``: the folder of another commit, whose packages run instead. Without
    updates, gradients are compared with those that the ``reference`` has left in a file.
    """
    if before:
        _import_from(before)
    chosen = training_of(training, contrastive)
    make, options = METHODS[method]
    if method not in (DEEPSPEED, NVME):  # it does not start twice in a process
        small = {"memory": "auto", "num_slices": 2}
        few = how | {name: value for name, value in small.items() if name in how}
        first = make(replace(chosen, blocks=2), folder(), None, **options, **few)
        for k in range(2):
            first.step(*replace(chosen, blocks=2).example(k))
        del first
        tidy()
    batch = [chosen.example(0)]  # belongs to no method
    report.phase(FLOOR)
    made = make(chosen, folder(), None, **options, **how)
    report.phase(PLANNING)
    predicted: dict[str, Any] = {}

    def example(k: int) -> tuple[Any, ...]:
        batch.clear()
        if k == plans:
            predicted.update(_predicted(made.model) if chosen.update else {})
            report.phase(STEPS)
        return chosen.example(0 if not chosen.update else k)

    def after(k: int) -> dict[str, float]:
        if reference and k == 0:
            save(gradients(), GRADIENT_FILE)
        return {"kernel": written_out()}

    def gradients() -> list[tuple[str, Tensor]]:
        return [(name, p.grad) for name, p in made.parameters() if p.grad is not None]

    take_turns(report, made, example, after=after)
    report.phase("end")
    if chosen.update:
        return predicted
    mine = folder() / GRADIENT_FILE
    save(gradients(), mine)
    return {"difference": difference(GRADIENT_FILE, mine)}


def folder() -> Path:
    """A new one, on the disk that the case works on."""
    return Path(tempfile.mkdtemp(dir=".")).absolute()


def tidy() -> None:
    """Drops what is unreachable, and lets glibc return its free heap pages to the kernel."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
    if trim is not None:
        trim(0)


def _import_from(path: str) -> None:
    """Imports ours from another commit: this process has not imported it yet."""
    sys.path.insert(0, path)
    found = importlib.import_module("offload").__file__ or ""
    if not Path(found).resolve().is_relative_to(Path(path).resolve()):
        raise RuntimeError(f"expected the packages of {path}, got {found}")


def _predicted(model: Any) -> dict[str, float]:
    """What the present plan of an OffloadModel predicts of a step; nothing of other models."""
    found = model.memory_report() if model is not None else None
    if found is None or found.predicted is None:
        return {}
    predicted = found.predicted
    return {"seconds": predicted.forecast.seconds, "bytes": predicted.memory_bytes, "counted": predicted.peak.memory}


def least(report: Reporter, training: dict[str, Any], contrastive: bool) -> dict[str, Any]:
    """The least ``memory`` with which a plan fits, as the errors and warnings of smaller ones tell it."""
    chosen, nbytes = training_of(training, contrastive), 1
    make, options = METHODS[DISK if contrastive else FROM_META]
    for _ in range(MOST_TRIES):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", f".*{TOLD.pattern}", RuntimeWarning)
                made = make(chosen, folder(), None, **options, memory=nbytes)
                for k in range(PLANNED_AFTER + 1):
                    made.step(*chosen.example(k))
            return {"bytes": nbytes}
        except (ValueError, RuntimeWarning) as error:
            if not (told := TOLD.search(str(error))):
                raise
            nbytes = max(nbytes + 1, int(told[1].replace(",", "")))
        made = None
        tidy()
    raise RuntimeError(f"each least that an error told was refused; the last was {nbytes}")
