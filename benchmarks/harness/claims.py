"""The table of claims in the README, computed from the JSON lines in ``benchmarks/results``: one row a claim.

``python -m benchmarks table`` prints it. Ratios are ours to the peer: below 1 ours is faster or smaller. Nothing here
needs torch, so that the documentation can be built without it.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["CLAIMS", "RESULTS", "Claim", "benchmark_of", "claims_table", "pair_steps", "read_lines"]

RESULTS = Path(__file__).resolve().parents[1] / "results"
FLOOR = "interpreter and torch"

Line = Mapping[str, Any]
"""What a case reported: one JSON object of a results file."""
Lines = Sequence[Line]


def read_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header of a results file (environment, limits, ratios) and a line for each case."""
    header, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return header, [line | {"case": line.get("case", line.get("rung"))} for line in lines]


def benchmark_of(header: Mapping[str, Any]) -> str:
    """The name of the benchmark that wrote a results file."""
    return str(header.get("benchmark") or header["environment"]["command"].split()[3])


def pair_steps(lines: Lines, name: str) -> Iterator[tuple[Line, Line]]:
    """The steps of case ``name`` that were timed in turn with the reference, each with the reference's step.

    ``lines`` begin with the reference, followed by the cases in the order in which they were timed. A file of the first
    format holds all steps of the reference in one list, and a first step of every process that does not count.
    """
    reference, *others = lines
    begin = 1
    for line in others:
        if line["case"] != name:
            # Beside a case that ended before its time the reference took one step that has no partner.
            begin += max(len(line["steps"]) - 1, 0) + bool(line.get("skipped") or line.get("failure"))
        elif "reference" in line:
            return zip(line["steps"], line["reference"], strict=True)
        else:
            return zip(line["steps"][1:], reference["steps"][begin:], strict=False)
    raise KeyError(f"expected a case {name!r}, got {[line['case'] for line in lines]}")


@dataclass(frozen=True)
class Claim:
    """One row: what was measured, beside what, on which page, and how both ratios follow from the lines of that page.

    ``times`` gives the ratio of each pair of steps (or of each set-up), whose median is the claim unless ``middle``
    says otherwise; ``memory`` gives the ratio of the peaks and what they count, or None where no peak is compared.
    """

    page: str
    set_up: str
    peer: str
    times: Callable[[Lines], Sequence[float]]
    memory: Callable[[Lines], tuple[float, str]] | None = None
    middle: Callable[[Sequence[float]], float] = statistics.median

    def row(self, directory: Path, links: str) -> list[str]:
        """The cells of the row."""
        _, lines = read_lines(directory / f"{self.page}.jsonl")
        times = self.times(lines)
        held = "-" if self.memory is None else "{:.2f}{}".format(*self.memory(lines))
        time = f"{self.middle(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        return [self.set_up, self.peer, time, held, f"[{self.page}]({links}{self.page}.md)"]


def _line(lines: Lines, name: str) -> Line:
    return next(line for line in lines if line["case"] == name)


def _in_rounds(ours: str, peer: str) -> Callable[[Lines], list[float]]:
    """Steps of two cases, one of each in a round."""

    def times(lines: Lines) -> list[float]:
        rounds = zip(_line(lines, ours)["steps"], _line(lines, peer)["steps"], strict=False)
        return [mine["seconds"] / theirs["seconds"] for mine, theirs in rounds]

    return times


def _in_pairs(ours: str) -> Callable[[Lines], list[float]]:
    """Steps of a case in turn with those of the first one."""
    return lambda lines: [mine["seconds"] / theirs["seconds"] for mine, theirs in pair_steps(lines, ours)]


def _peaks(ours: str, peer: str, phase: str = "", floor: str = "") -> Callable[[Lines], tuple[float, str]]:
    """Peaks of two processes, of one phase or of all, as they are or above what was held at the moment ``floor``."""

    def peak(lines: Lines, name: str) -> float:
        # The last line of that name that has the phase: peaks are measured after times.
        line = next(line for line in reversed(lines) if line["case"] == name and (not phase or phase in line["peaks"]))
        whole = line["peaks"][phase] if phase else line["peak_bytes"]
        return float(whole - line["moments"][floor] if floor else whole)

    above = " above torch" if floor else ""
    return lambda lines: (peak(lines, ours) / peak(lines, peer), above)


def _ladder(other: str) -> Callable[[Lines], list[float]]:
    """Processor time of our pipe to another one's: for each number of micro-batches the median of the rounds."""
    ours, theirs = "ours: processor", f"{other}: processor"

    def times(lines: Lines) -> list[float]:
        timed = [line["steps"] for line in lines if line["case"].startswith("time, ")]
        return [statistics.median(step[ours] / step[theirs] for step in steps) for steps in timed]

    return times


def _above_model(other: str) -> Callable[[Lines], tuple[float, str]]:
    def memory(lines: Lines) -> tuple[float, str]:
        mine, theirs = (_line(lines, name)["result"]["above_model"] for name in ("ours", other))
        return mine / theirs, " above the model"

    return memory


def _geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(map(math.log, values)))


def _overlapped(lines: Lines) -> list[float]:
    balances = [line for line in lines if not line["version"]]  # a line with a version is a peer's
    return [statistics.median(step["ratio"] for step in line["steps"]) for line in balances]


_TINY_FLOOR = "after a step of two layers"
_CURVE = "forward and backward of 38 M parameters, 512 tokens: parameters and gradients on disk, "

CLAIMS = (
    Claim(
        "optimizer-billion",
        "AdamW steps of 1 billion parameters; parameters, gradients and moments on disk",
        "DeepSpeed ZeRO-3 on NVMe, blocks checkpointed",
        _in_rounds("on disk, from birth", "DeepSpeed ZeRO-3, NVMe"),
        _peaks("on disk, from birth", "DeepSpeed ZeRO-3, NVMe", "steps"),
    ),
    Claim(
        "optimizer-billion-kept",
        "the same",
        "DeepSpeed ZeRO-3 on NVMe, activations kept",
        _in_rounds("on disk, from birth", "DeepSpeed ZeRO-3, NVMe, activations kept"),
        _peaks("on disk, from birth", "DeepSpeed ZeRO-3, NVMe, activations kept", "steps"),
    ),
    Claim(
        "optimizer",
        "AdamW steps of 101 M parameters, 2,048 tokens; parameters, gradients and moments on disk",
        "all in memory, blocks checkpointed, fused AdamW",
        _in_pairs("on disk"),
        _peaks("on disk", "resident, checkpointed, fused AdamW", "steps"),
    ),
    Claim(
        "build-huge",
        "build, load and train 1,153 MiB of parameters under a hard cap of 768 MiB",
        "all in memory, no cap (dies under the cap)",
        _in_rounds("offloaded, capped", "resident, no cap"),
        _peaks("offloaded, capped", "resident, no cap"),
    ),
    Claim(
        "offload-step",
        "forward and backward of 25 M parameters, 2,048 tokens; parameters and gradients on disk",
        "all in memory, `torch.utils.checkpoint`",
        lambda lines: [step["ratio"] for step in _line(lines, "time, 8 shards")["steps"]],
    ),
    Claim(
        "memory-latency",
        _CURVE + "activations kept",
        "plain PyTorch",
        _in_pairs("ours: disk, 12 slices, keep"),
        _peaks("ours: disk, 12 slices, keep, in use", "torch, all in memory, in use", "steps", _TINY_FLOOR),
    ),
    Claim(
        "memory-latency",
        _CURVE + "activations recomputed",
        "plain PyTorch",
        _in_pairs("ours: disk, 12 slices, checkpoint"),
        _peaks("ours: disk, 12 slices, checkpoint, in use", "torch, all in memory, in use", "steps", _TINY_FLOOR),
    ),
    Claim(
        "retrieval-2048",
        "one contrastive batch of 2,048 pairs, 21 M parameters, all state on disk",
        "the whole batch in memory",
        _in_rounds("GradCache + offload", "whole batch"),
        _peaks("GradCache + offload", "whole batch"),
    ),
    Claim(
        "retrieval",
        "one contrastive batch of 48 pairs, 21 M parameters, all state on disk; under a hard cap only ours trains",
        "the whole batch in memory",
        _in_rounds("GradCache + offload", "whole batch"),
        _peaks("GradCache + offload", "whole batch"),
    ),
    Claim(
        "gradcache-batch",
        "gradients of a contrastive batch of 2,048 tokens, 113 M parameters in memory",
        "GradCache over `torch.utils.checkpoint`",
        _in_pairs("ours"),
        _peaks("ours", "upstream GradCache", "steps", FLOOR),
    ),
    Claim(
        "gradcache-batch",
        "the same, parameters and gradients on disk",
        "GradCache over `torch.utils.checkpoint`",
        _in_pairs("ours over OffloadModel"),
        _peaks("ours over OffloadModel", "upstream GradCache", "steps", FLOOR),
    ),
    Claim(
        "pipe-ladder",
        "processor time of two CPU stages, 1 to 16 micro-batches",
        "torchgpipe 0.0.7",
        _ladder("torchgpipe"),
        _above_model("torchgpipe"),
        _geometric_mean,
    ),
    Claim(
        "pipe-ladder",
        "processor time of two CPU stages, 1 to 16 micro-batches",
        "fairscale 0.4.13 Pipe",
        _ladder("fairscale"),
        _above_model("fairscale"),
        _geometric_mean,
    ),
    Claim(
        "train-overlap",
        "train pipeline with a slow loader and slow embedding rows, four balances",
        "its slowest part alone",
        _overlapped,
    ),
)


def claims_table(directory: Path = RESULTS, links: str = "benchmarks/results/") -> str:
    """The table in Markdown: set-up, peer, time ratio with range, memory ratio, link. ``links`` begins each link."""
    header = ["set-up", "beside", "time, ours to theirs", "memory, ours to theirs", "results"]
    rows = [header, ["---", "---", "---:", "---:", "---"], *(claim.row(directory, links) for claim in CLAIMS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
