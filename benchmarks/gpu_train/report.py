"""Table, bounds and picture of ``gpu-train``."""

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.harness.benchmark import Report, Run
from benchmarks.harness.case import Outcome, failures
from benchmarks.harness.limits import Limits, adamw_bytes
from benchmarks.harness.table import at_most, case_table, limit_columns, mebibytes, reasons
from benchmarks.models.transformer import Stack

MAXIMUM_DIFFERENCE = 0.05  # of first losses: weights are drawn alike, and bf16 has eight bits
HOST_UPDATES = ("ours", "checkpointed torchao", "fairscale_offload")  # their optimizers work in host memory


def report(run: Run[Any]) -> Report:
    """One table."""
    outcomes, limits = run.outcomes, run.limits
    stack = Stack(**outcomes[0].case.arguments["stack"])
    columns = {
        "device peak": lambda o: mebibytes(o.done["device_peak"]),
        "host peak": lambda o: mebibytes(o.above()),
        "s/step": lambda o: f"{_seconds(o):.3g}",
        "tokens/s": lambda o: f"{stack.tokens / _seconds(o):,.0f}",
        **limit_columns(limits, lambda o: limit_seconds(o, stack, limits), _seconds),
        "first loss": lambda o: f"{o.steps[0]['loss']:.4f}",
        "last loss": lambda o: f"{o.steps[-1]['loss']:.4f}",
    }
    words = (
        f"{stack.blocks} blocks, {stack.parameters / 1e6:,.0f} M parameters, {stack.rows} rows of {stack.positions} "
        "tokens. bf16 arithmetic, fp32 masters, AdamW. Limits count a forward and a backward with nothing recomputed, "
        "AdamW's reads and writes where the method has its states, and what must move between host and device then."
    )
    return Report([case_table(outcomes, columns, "method"), reasons(outcomes), words], broken_bounds(outcomes))


def _seconds(outcome: Outcome) -> float:
    return float(statistics.median(step["seconds"] for step in outcome.steps[1:]))


def broken_bounds(outcomes: Sequence[Outcome]) -> list[str]:
    """Bounds that do not hold: cases run, losses are numbers, and the first ones agree."""
    broken = failures(outcomes)
    done = [outcome for outcome in outcomes if outcome.result is not None and outcome.steps]
    for outcome in done:
        losses = [step["loss"] for step in outcome.steps]
        if not all(math.isfinite(loss) for loss in losses):
            broken.append(f"{outcome.name}: losses are {losses}")
        else:
            apart = abs(losses[0] / done[0].steps[0]["loss"] - 1)
            what = f"{outcome.name}: the difference of its first loss from that of {done[0].name}"
            broken += at_most(what, apart, MAXIMUM_DIFFERENCE, "{:.1%}".format)
    return broken


def limit_seconds(outcome: Outcome, stack: Stack, limits: Limits) -> float:
    """The least seconds for the arithmetic of every method, for AdamW where this one runs it, and for what must move.

    With the optimizer in host memory gradients move there and parameters back: ours counts these bytes; of peers they
    are those of the fp32 parameters.
    """
    work = {"flops": stack.training_flops}
    if outcome.case.arguments["method"] not in HOST_UPDATES:
        return limits.step_seconds(**work, on_device_bytes=adamw_bytes(stack.parameters))
    masters = 4.0 * stack.parameters
    step = outcome.steps[-1]
    loaded, stored = step.get("bytes_loaded", masters), step.get("bytes_stored", masters)
    work["copied_bytes"] = adamw_bytes(stack.parameters)
    if limits.host_to_device_bytes is None:
        work["copied_bytes"] += loaded + stored
    else:
        work |= {"loaded_bytes": loaded, "drained_bytes": stored}
    return limits.step_seconds(**work)
