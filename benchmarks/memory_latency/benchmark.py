"""``memory-latency``: what each method saves in memory and costs in time.

Every method trains the same ``nn.Sequential`` on the same batch: the whole in memory, PyTorch's own ways to use less,
peers, and ``OffloadModel`` with each of its settings changed in turn. Each has its own process and takes its steps in
turn with plain PyTorch. In another process glibc's heap returns freed blocks at once: there the peak of a step is what
the method needs. What ``estimate()`` predicts after half of the turns is shown beside what was measured.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness.benchmark import Benchmark, Plan, Report, Run
from benchmarks.harness.case import Case, Outcome, failures
from benchmarks.harness.io_counters import engine_bytes, medium_bytes
from benchmarks.harness.limits import Limits, gradient_bytes
from benchmarks.harness.plot import COLOURS, Panel
from benchmarks.harness.schedule import Group
from benchmarks.harness.settings import option
from benchmarks.harness.table import at_most, case_table, limit_columns, mebibytes, reasons, spread
from benchmarks.memory_latency.methods import FLOOR
from benchmarks.models.transformer import Stack

IN_USE = ", in use"  # ends the name of a case that measures a peak
MAXIMUM_DIFFERENCE = 1e-4  # of gradients and outputs, relative to the greatest element of the tensor
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
    ("fairscale OffloadModel", "fairscale_offload", {}, "fairscale-offload"),
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


def plan(settings: Settings, folder: str) -> Plan:
    """The groups: training in pairs with plain PyTorch; on a CPU the peaks in use; forward only."""
    stack = Stack(settings.layers, settings.dim, settings.rows, settings.positions)
    common = {"stack": asdict(stack), "home": folder, "device": settings.device}

    def cases(function: str, prefix: str, suffix: str, named: list[Named], **more: object) -> list[Case]:
        found = []
        for name, method, chosen, peer in ((REFERENCE, "plain", {}, ""), *named):
            if name == REFERENCE or any(word in prefix + name for word in settings.only):
                how = {"method": method, "settings": chosen, **common, **more}
                environment = GIVE_BACK if suffix else {}
                found.append(Case(f"{prefix}{name}{suffix}", f"{METHODS}:{function}", how, environment, peer))
        return found

    training = OTHERS + _ours(settings.layers, 4 * stack.parameters // settings.layers)
    forward: list[Named] = [
        (f"ours: disk, {settings.layers} slices", "ours", {"num_slices": settings.layers}, ""),
        ("accelerate disk_offload", "accelerate_disk", {}, "accelerate"),
        ("diffusers group offloading, disk", "diffusers_groups", {}, "diffusers"),
    ]
    asked_after = 1 + settings.pairs // 2
    yield Group("training", cases("train", "", "", training, asked_after=asked_after), "pairs", settings.pairs, 1)
    if settings.device == "cpu":
        yield Group("in use", cases("in_use", "", IN_USE, training))
    passes = cases("forward", "forward, ", "", forward)
    yield Group("forward", passes if len(passes) > 1 else [], "pairs", settings.pairs, 1)


def _ours(most: int, layer_bytes: int) -> list[Named]:
    """Each setting of OffloadModel changed in turn: home, slices, keep or checkpoint, micro-batches, slots, budget."""
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
    for layers in (5, 8, 16):  # two slots and two sets of gradients of one layer are 4; the rest is for boundaries
        budget = layers * layer_bytes
        chosen[f"disk, budget {budget >> 20} MiB"] = {"num_slices": None, "memory_budget": budget, **checkpoint}
    return [(f"ours: {name}", "ours", settings, "") for name, settings in chosen.items()]


def report(run: Run[Any]) -> Report:
    """Training, predictions, forward."""
    training, limits = run.groups["training"], run.limits
    forward = run.groups.get("forward", [])
    stack = _stack(training[0])
    peaks = peaks_of(run)
    done = [outcome for outcome in training if outcome.name in peaks and outcome.steps]
    kinds = ("peak in use", "heap as it comes") if limits.device == "cpu" else ("peak on the device", "on the host")
    columns = {
        kinds[0]: lambda o: mebibytes(peaks[o.name]) if o.name in peaks else "-",
        kinds[1]: lambda o: mebibytes(o.above(FLOOR)),
        "s/step": lambda o: f"{o.median():.2f}",
        "to torch": lambda o: spread(o.ratios(), 2),
        **limit_columns(limits, lambda o: limit_seconds(o, limits)),
        "gradients differ by": lambda o: f"{o.done['difference']:.0e}",
    }
    predictions = {
        "s/step": lambda o: f"{o.median():.2f}",
        "seconds predicted": lambda o: f"{o.done['estimate']['seconds']:.2f}",
        "error of seconds": lambda o: _error(o.done["estimate"]["seconds"], o.median()),
        "peak": lambda o: mebibytes(peaks[o.name]),
        "peak predicted": lambda o: mebibytes(o.done["estimate"]["memory_bytes"]),
        "error of peak": lambda o: _error(o.done["estimate"]["memory_bytes"], peaks[o.name]),
    }
    passes = {
        "peak": lambda o: mebibytes(o.above(FLOOR)),
        "s/pass": lambda o: f"{o.median():.2f}",
        "to torch": lambda o: spread(o.ratios(), 2),
        **limit_columns(limits, lambda o: limits.step_seconds(flops=stack.forward_flops)),
        "outputs differ by": lambda o: f"{o.done['difference']:.0e}",
    }
    words = (
        f"{stack.blocks} blocks, {stack.parameters / 1e6:.0f} M parameters in fp32, {stack.rows} rows of "
        f"{stack.positions} tokens. A step is forward, loss and backward, with gradients stored. Peaks are above a "
        "process that took a step of two such blocks with the same method. Predictions are made after half of the "
        "turns. Limits count a forward and a backward with nothing recomputed, parameters read and gradients written, "
        "the bytes of files, and of ours those of its copies. Ratios: to the step of "
        "plain PyTorch in the same pair, median (least to greatest)."
    )
    predicted = [outcome for outcome in done if outcome.done["estimate"]]
    sections = [
        case_table(training, columns, "training"),
        case_table(predicted, predictions, "prediction") if predicted else "",
        case_table(forward, passes, "forward only") if forward else "",
        reasons(outcome for outcome in run.outcomes if not outcome.name.endswith(IN_USE)),
        words,
    ]
    ratios = {f"{outcome.name}: time": outcome.ratio() for outcome in done[1:]}
    ratios |= {f"{outcome.name}: peak": peaks[outcome.name] / peaks[done[0].name] for outcome in done[1:]}
    ratios |= {f"{outcome.name}: time": outcome.ratio() for outcome in forward[1:] if outcome.steps}
    return Report(sections, broken_bounds(run), [_curve(done, peaks)], ratios)


def _stack(outcome: Outcome) -> Stack:
    return Stack(**outcome.case.arguments["stack"])


def peaks_of(run: Run[Any]) -> dict[str, int]:
    """Bytes in use by method: of an accelerator's allocator, or of the process above a step of two layers."""
    if run.limits.device != "cpu":
        return {o.name: int(o.done["device_peak"]) for o in run.groups["training"] if o.result is not None}
    measured = (outcome for outcome in run.groups["in use"] if outcome.result is not None)
    return {outcome.name.removesuffix(IN_USE): outcome.above(FLOOR) for outcome in measured}


def limit_seconds(outcome: Outcome, limits: Limits) -> float:
    """The least seconds for the arithmetic of every method, and for the bytes that this one moves."""
    arguments, stack = outcome.case.arguments, _stack(outcome)
    work = {"flops": stack.training_flops, "on_device_bytes": gradient_bytes(stack.parameters)}
    loaded, stored = engine_bytes(outcome.steps[-1]) if arguments["method"] == "ours" else (0.0, 0.0)
    copied = 0.0
    if limits.host_to_device_bytes is not None:
        work |= {"loaded_bytes": loaded, "drained_bytes": stored}
    elif not arguments["settings"].get("disk", True):
        copied = loaded + stored
    return limits.step_seconds(**work, **medium_bytes(outcome.steps, copied_bytes=copied))


def _error(predicted: float, measured: float) -> str:
    return f"{predicted / measured - 1:+.0%}" if measured > 0 else "-"


def broken_bounds(run: Run[Any]) -> list[str]:
    """Bounds that do not hold: cases run, gradients are those of plain PyTorch, budgets are kept."""
    broken = failures(run.outcomes)
    for outcome in (*run.groups["training"], *run.groups.get("forward", [])):
        if outcome.result is None:
            continue
        what = f"{outcome.name}: the difference from plain PyTorch"
        broken += at_most(what, outcome.done["difference"], MAXIMUM_DIFFERENCE, "{:.1e}".format)
        budget = outcome.case.arguments["settings"].get("memory_budget")
        if budget is not None:
            held = outcome.done["statistics"]["peak_device_bytes"]
            broken += at_most(f"{outcome.name}: held by the engine", held, budget, "{:,} bytes".format)
    return broken


FAMILIES = {  # of the picture: how the name of a method begins
    "PyTorch": ("torch", "save_on_cpu"),
    "peers": ("FSDP2", "DeepSpeed", "fairscale"),
    "ours, in host memory": ("ours: host",),
    "ours, on disk": tuple(f"ours: disk, {digit}" for digit in range(1, 10)),
    "ours, memory budget": ("ours: disk, budget",),
}


def _curve(done: Sequence[Outcome], peaks: Mapping[str, int]) -> Panel:
    """Peak against time; a line joins the methods that no other beats in both; predictions are hollow."""

    def point(outcome: Outcome) -> tuple[float, float]:
        return peaks[outcome.name] / 2**20, outcome.ratio()

    def panel(axis: Any) -> None:
        for (family, beginnings), colour in zip(FAMILIES.items(), COLOURS, strict=False):
            methods = [outcome for outcome in done if outcome.name.startswith(beginnings)]
            if not methods:
                continue
            axis.scatter(*zip(*map(point, methods), strict=True), color=colour, label=family, zorder=3)
            for outcome in methods:
                x, y = point(outcome)
                if estimate := outcome.done["estimate"]:
                    predicted = (estimate["memory_bytes"] / 2**20, y * estimate["seconds"] / outcome.median())
                    axis.plot(*zip((x, y), predicted, strict=True), color=colour, linewidth=0.6)
                    axis.scatter(*predicted, facecolors="none", edgecolors=colour, zorder=3)
                label = outcome.name.removeprefix("ours: ")
                axis.annotate(label, (x, y), xytext=(4, 3), textcoords="offset points", fontsize=6.5)
        front = pareto_front([point(outcome) for outcome in done])
        name = "no other is better in both"
        axis.plot(*zip(*front, strict=True), color="#999999", linestyle="--", linewidth=1, label=name)
        axis.set_xlabel("peak memory in use above the libraries, MiB (hollow: predicted)")
        axis.set_ylabel("time of a step, plain PyTorch = 1")
        axis.set_xlim(left=0)
        axis.set_ylim(bottom=0)
        axis.legend(fontsize=8, frameon=False)

    return panel


def pareto_front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other one beats in both coordinates, from left to right."""
    front: list[tuple[float, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


BENCHMARK = Benchmark(Settings, plan, report, rates=lambda settings: {"device": settings.device})
