"""``memory-latency``: what each method saves in memory and costs in time.

Every method trains the same ``nn.Sequential`` on the same batch: the whole in memory, PyTorch's own ways to use less,
peers, and ``OffloadModel`` with each of its settings changed in turn. Each has its own process and takes its steps in
turn with plain PyTorch. In another process glibc's heap returns freed blocks at once: there the peak of a step is what
the method needs.
"""

from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Claim, Run
from benchmarks.harness.case import Case
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, mebibytes, spread
from benchmarks.memory_latency.methods import FLOOR
from benchmarks.models.transformer import Stack

MAXIMUM_DIFFERENCE = 1e-4  # of gradients, relative to the greatest element of the tensor
REFERENCE = "torch, all in memory"
METHODS = "benchmarks.memory_latency.methods"
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": str(1 << 18)}  # so that a peak is what is in use

Named = tuple[str, str, dict[str, Any], str]
#: Methods beside ours: name, function of ``methods.py``, settings, peer.
OTHERS: list[Named] = [
    ("torch, 4 micro-batches", "plain", {"microbatches": 4}, ""),
    ("torch.utils.checkpoint", "checkpointed", {}, ""),
    ("torch.utils.checkpoint, 4 micro-batches", "checkpointed", {"microbatches": 4}, ""),
    ("save_on_cpu", "saved_on_cpu", {}, ""),
    ("FSDP2, CPUOffloadPolicy", "fsdp2", {}, ""),
    ("DeepSpeed ZeRO-3, offload_param", "deepspeed_zero3", {}, "deepspeed"),
    ("fairscale OffloadModel", "fairscale_offload", {}, "fairscale"),
]


@dataclass(frozen=True)
class Settings:
    """Sizes, the device, the number of pairs, and which cases."""

    device: str = option("cpu", "where layers compute")
    layers: int = option(12, "transformer blocks", least=4)
    dim: int = option(512, "channels, a multiple of 64", multiple=64)
    rows: int = option(16, "rows of the batch", least=4)
    positions: int = option(32, "tokens of a row")
    pairs: int = option(5, "steps in turn with plain PyTorch")
    only: tuple[str, ...] = option(("",), "only cases with one of these in their names")

    @property
    def stack(self) -> Stack:
        """The model and its batch."""
        return Stack(self.layers, self.dim, self.rows, self.positions)


def measure(run: Run) -> None:
    """Training in pairs with plain PyTorch; on a CPU the peaks in use."""
    settings, stack = run.settings, run.settings.stack
    layers = settings.layers
    named = [method for method in OTHERS + _ours(layers, 4 * stack.parameters // layers) if _chosen(method, settings)]

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


def _ours(most: int, layer_bytes: int) -> list[Named]:
    """The cases of OffloadModel: each changes one of home, slices, recomputation, micro-batches, slots and memory."""
    half, few = most // 2, most // 4
    chosen: dict[str, dict[str, Any]] = {}
    slices = {"host, keep": (few,), "host, checkpoint": (few, most), "disk, keep": (few, most)}
    for kind, counts in (slices | {"disk, checkpoint": (few, half, most)}).items():
        place, activations = kind.split(", ")
        how = {"disk": place == "disk", "checkpoint_activation": activations == "checkpoint"}
        chosen |= {f"{place}, {count} slices, {activations}": {"num_slices": count, **how} for count in counts}
    name, checkpoint = f"disk, {most} slices, checkpoint", {"checkpoint_activation": True}
    chosen[f"{name}, {half} slots"] = {"num_slices": most, "num_slots": half, **checkpoint}
    for count in (2, 4):
        chosen[f"{name}, {count} micro-batches"] = {"num_slices": most, "num_microbatches": count, **checkpoint}
    for layers in (5, 8, 16):  # two slots and two sets of gradients of one layer are 4; the rest is for activations
        memory = layers * layer_bytes
        chosen[f"disk, memory {memory >> 20} MiB"] = {"memory": memory}
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
    """Gradients are those of plain PyTorch, limits are kept."""
    broken = []
    for outcome in run.groups["training"]:
        if outcome.result is None:
            continue
        what = f"{outcome.name}: the difference from plain PyTorch"
        broken += at_most(what, outcome.result["difference"], MAXIMUM_DIFFERENCE, "{:.1e}".format)
        memory = outcome.case.arguments["settings"].get("memory")
        if memory is not None:
            held = outcome.result["statistics"]["peak_device_bytes"]
            broken += at_most(f"{outcome.name}: held by the engine", held, memory, "{:,} bytes".format)
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


BENCHMARK = Benchmark(Settings, measure, report, bounds, claims, points)
