"""Tables, bounds and picture of ``memory-latency``."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.harness.benchmark import Report, Run
from benchmarks.harness.case import Outcome, failures
from benchmarks.harness.io_counters import engine_bytes, medium_bytes
from benchmarks.harness.limits import Limits, gradient_bytes
from benchmarks.harness.plot import COLOURS, Panel
from benchmarks.harness.table import at_most, case_table, limit_columns, mebibytes, reasons, spread
from benchmarks.memory_latency.workload import FLOOR
from benchmarks.models.transformer import Stack

IN_USE = ", in use"  # ends the name of a case that measures a peak
MAXIMUM_DIFFERENCE = 1e-4  # of gradients and outputs, relative to the greatest element of the tensor
Peaks = Mapping[str, int]


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


def _curve(done: Sequence[Outcome], peaks: Peaks) -> Panel:
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
