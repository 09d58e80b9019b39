"""``memory-latency``: what each method saves in memory and costs in time.

With ``--work training``, ``training-2048`` or ``contrastive`` a step is a whole one, with clipping and AdamW, and ours
has ``memory=`` as its only setting: :mod:`.frontier`.

With ``--work gradients`` a step is forward and backward of the same ``nn.Sequential`` on the same batch: the whole in
memory, PyTorch's own ways to use less, fairscale, and ``OffloadModel`` with each home, activations kept and recomputed.
Each has its own process and takes its steps in turn with plain PyTorch. In another process glibc's heap returns freed
blocks at once: there the peak of a step is what the method needs.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread
from benchmarks.memory_latency import frontier
from benchmarks.memory_latency.methods import FLOOR
from benchmarks.models.transformer import Stack

MAXIMUM_DIFFERENCE = 1e-4  # of gradients, relative to the greatest element of the tensor
REFERENCE = "torch, all in memory"
METHODS = "benchmarks.memory_latency.methods"
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # so that a peak is what is in use

GRADIENTS = "gradients"
#: Of each work: transformer blocks, channels, rows (pairs of a contrastive batch), tokens of a row.
SIZES = {
    GRADIENTS: (12, 512, 16, 32),
    "training": (16, 320, 4, 128),
    "training-2048": (12, 192, 16, 128),
    frontier.CONTRASTIVE: (12, 192, 32, 32),
}

T = TypeVar("T")
Named = tuple[str, str, dict[str, Any], str]
#: Methods beside ours: name, function of ``methods.py``, settings, peer.
OTHERS: list[Named] = [
    ("torch, 4 micro-batches", "plain", {"microbatches": 4}, ""),
    ("torch.utils.checkpoint", "checkpointed", {}, ""),
    ("torch.utils.checkpoint, 4 micro-batches", "checkpointed", {"microbatches": 4}, ""),
    ("save_on_cpu", "saved_on_cpu", {}, ""),
    ("fairscale OffloadModel", "fairscale_offload", {}, "fairscale"),
]


@dataclass(frozen=True)
class Settings:
    """What a step is, sizes (where none is given, those of the work), the number of pairs, and which cases."""

    work: str = option(GRADIENTS, "what a step is", choices=tuple(SIZES))
    device: str = option("cpu", "gradients: where layers compute")
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


def measure(run: Run) -> None:
    """Training in pairs with plain PyTorch; on a CPU the peaks in use."""
    settings, stack = run.settings, run.settings.stack
    named = [method for method in OTHERS + _ours(stack.blocks) if _chosen(method, settings)]

    def cases(function: str, environment: dict[str, str]) -> list[Case]:
        found = []
        for name, method, chosen, peer in [(REFERENCE, "plain", {}, ""), *named]:
            how = {"method": method, "settings": chosen, "stack": asdict(stack), "device": settings.device}
            found.append(Case(name, f"{METHODS}:{function}", how, environment, peer))
        return found

    run.group("training", cases("train", {}), "pairs", turns=settings.pairs, warmup=1)
    if settings.device == "cpu":
        run.group("in use", cases("in_use", GIVE_BACK))


def _chosen(method: Named, settings: Settings) -> bool:
    return any(word in method[0] for word in settings.only)


def _ours(layers: int) -> list[Named]:
    """The cases of OffloadModel, a layer a slice: what ``memory=`` leaves to the user changes, and activations."""
    chosen: dict[str, dict[str, Any]] = {}
    for place in ("host", "disk"):
        for words in ("keep", "checkpoint"):
            how = {"num_slices": layers, "disk": place == "disk", "checkpoint_activation": words == "checkpoint"}
            chosen[f"{place}, {layers} slices, {words}"] = how
    chosen[f"{place}, {layers} slices, {words}, 4 micro-batches"] = {**how, "num_microbatches": 4}
    return [(f"ours: {name}", "ours", settings, "") for name, settings in chosen.items()]


def report(run: Run) -> list[str]:
    """One table."""
    training, stack = run.groups["training"], run.settings.stack
    peaks = peaks_of(run)
    on_cpu = run.settings.device == "cpu"
    kinds = ("peak in use", "heap as it comes") if on_cpu else ("peak on the device", "on the host")
    columns = {
        kinds[0]: lambda o: mebibytes(peaks[o.name]) if o.name in peaks else "-",
        kinds[1]: lambda o: mebibytes(o.above(FLOOR)),
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
    return [case_table(training, columns, "training"), words]


def peaks_of(run: Run) -> dict[str, int]:
    """Bytes in use by method: of an accelerator's allocator, or of the process above a step of two layers."""
    if run.settings.device != "cpu":
        return {o.name: int(o.result["device_peak"]) for o in run.groups["training"] if o.result is not None}
    return {o.name: o.above(FLOOR) for o in run.groups["in use"] if o.result is not None}


def bounds(run: Run) -> list[str]:
    """Gradients are those of plain PyTorch."""
    broken = []
    for outcome in run.groups["training"]:
        if outcome.result is None:
            continue
        what = f"{outcome.name}: the difference from plain PyTorch"
        broken += at_most(what, outcome.result["difference"], MAXIMUM_DIFFERENCE, "{:.1e}".format)
    return broken


def claims(run: Run) -> list[Claim]:
    """The finest cut on disk, with activations kept and recomputed, beside plain PyTorch."""
    stack, peaks = run.settings.stack, peaks_of(run)
    set_up = (
        f"forward and backward of {stack.parameters / 1e6:.0f} M parameters, {stack.tokens} tokens; parameters and "
    )
    found = []
    for words, setting in (("kept", "keep"), ("recomputed", "checkpoint")):
        ours = run.find(f"ours: disk, {stack.blocks} slices, {setting}")
        what = f"{set_up}gradients on disk, activations {words}"
        memory = peaks[ours.name] / peaks[REFERENCE]
        found.append(Claim(what, "plain PyTorch", ours.ratios(), memory, " above torch"))
    return found


def points(run: Run) -> dict[str, tuple[float, float]]:
    """Peaks in use, and times to those of plain PyTorch."""
    peaks = peaks_of(run)
    return {o.name: (peaks[o.name] / 2**20, o.ratio()) for o in run.groups["training"] if o.name in peaks and o.steps}


def _or(of_gradients: Callable[[Run], T], of_training: Callable[[Run], T]) -> Callable[[Run], T]:
    return lambda run: (of_gradients if run.settings.work == GRADIENTS else of_training)(run)


BENCHMARK = Benchmark(
    Settings,
    _or(measure, frontier.measure),
    _or(report, frontier.report),
    _or(bounds, frontier.bounds),
    _or(claims, frontier.claims),
    _or(points, frontier.points),
)
