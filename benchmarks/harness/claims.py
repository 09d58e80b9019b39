"""The table of claims in the README, computed from the JSON lines in ``benchmarks/results``: one row a claim.

``python -m benchmarks table`` prints it. Ratios are ours to the peer: below 1 ours is faster or smaller. Nothing here
needs torch, so that the documentation can be built without it.
"""

import json
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.case import FLOOR

RESULTS = Path(__file__).resolve().parents[1] / "results"

Line = Mapping[str, Any]
"""What a case reported: one JSON object of a results file."""
Lines = Sequence[Line]


def read_lines(path: Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The header of a results file (environment, limits, ratios) and a line for each case."""
    header, *lines = (json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())
    return header, lines


Ratios = Callable[[Lines], "list[float]"]
Memory = Callable[[Lines], float]


class Claim(NamedTuple):
    """One row: what was measured on which page, beside what, and how both ratios follow from the lines of that page.

    ``times`` gives the ratio of each pair of steps (or of each set-up) and ``memory`` that of the peaks; ``counted``
    says what a peak is counted above.
    """

    page: str
    set_up: str
    peer: str
    times: Ratios
    memory: Memory | None = None
    counted: str = ""
    middle: Callable[[list[float]], float] = statistics.median

    def row(self, directory: Path, links: str) -> list[str]:
        """The cells of the row."""
        _, lines = read_lines(directory / f"{self.page}.jsonl")
        times = self.times(lines)
        held = "-" if self.memory is None else f"{self.memory(lines):.2f}{self.counted}"
        time = f"{self.middle(times):.2f} ({min(times):.2f} to {max(times):.2f})"
        return [self.set_up, self.peer, time, held, f"[{self.page}]({links}{self.page}.md)"]


def _line(lines: Lines, name: str) -> Line:
    return next(line for line in lines if line["case"] == name)


def _ratios(steps: Iterable[Line], others: Iterable[Line]) -> list[float]:
    return [mine["seconds"] / theirs["seconds"] for mine, theirs in zip(steps, others, strict=False)]


def _in_rounds(ours: str, peer: str) -> Ratios:
    """Steps of two cases, one of each in a round."""
    return lambda lines: _ratios(_line(lines, ours)["steps"], _line(lines, peer)["steps"])


def _in_pairs(ours: str) -> Ratios:
    """Steps of a case in turn with those of the first one."""
    return lambda lines: _ratios(_line(lines, ours)["steps"], _line(lines, ours)["reference"])


def _peaks(ours: str, peer: str, phase: str = "", floor: str = "") -> Memory:
    """Peaks of two processes, of one phase or of all, as they are or above what was held at the moment ``floor``."""

    def peak(lines: Lines, name: str) -> float:
        # The last line of that name that has the phase: peaks are measured after times.
        line = next(line for line in reversed(lines) if line["case"] == name and (not phase or phase in line["peaks"]))
        whole = line["peaks"][phase] if phase else line["peak_bytes"]
        return float(whole - line["moments"][floor] if floor else whole)

    return lambda lines: peak(lines, ours) / peak(lines, peer)


def _ladder(lines: Lines, other: str) -> list[float]:
    """Processor time of our pipe to another one's: for each number of micro-batches the median of the rounds."""
    ours, theirs = "ours: processor", f"{other}: processor"
    timed = [line["steps"] for line in lines if line["case"].startswith("time, ")]
    return [statistics.median(step[ours] / step[theirs] for step in steps) for steps in timed]


def _above_model(other: str) -> Memory:
    return lambda lines: float(
        _line(lines, "ours")["result"]["above_model"] / _line(lines, other)["result"]["above_model"]
    )


def _overlapped(lines: Lines) -> list[float]:
    balances = [line for line in lines if not line["version"]]  # a line with a version is a peer's
    return [statistics.median(step["ratio"] for step in line["steps"]) for line in balances]


def _claims() -> Iterator[Claim]:
    ours, theirs = "on disk, from birth", "DeepSpeed ZeRO-3, NVMe"
    set_up = "AdamW steps of 1 billion parameters; parameters, gradients and moments on disk"
    peer = "DeepSpeed ZeRO-3 on NVMe, blocks checkpointed"
    yield Claim("optimizer-billion", set_up, peer, _in_rounds(ours, theirs), _peaks(ours, theirs, "steps"))
    kept, peer = f"{theirs}, activations kept", "DeepSpeed ZeRO-3 on NVMe, activations kept"
    yield Claim("optimizer-billion-kept", "the same", peer, _in_rounds(ours, kept), _peaks(ours, kept, "steps"))
    set_up = "AdamW steps of 101 M parameters, 2,048 tokens; parameters, gradients and moments on disk"
    peaks = _peaks("on disk", "resident, checkpointed, fused AdamW", "steps")
    yield Claim("optimizer", set_up, "all in memory, blocks checkpointed, fused AdamW", _in_pairs("on disk"), peaks)
    ours, theirs = "offloaded, capped", "resident, no cap"
    set_up = "build, load and train 1,153 MiB of parameters under a hard cap of 768 MiB"
    peer = "all in memory, no cap (dies under the cap)"
    yield Claim("build-huge", set_up, peer, _in_rounds(ours, theirs), _peaks(ours, theirs))
    set_up = "forward and backward of 25 M parameters, 2,048 tokens; parameters and gradients on disk"
    timed: Ratios = lambda lines: [step["ratio"] for step in _line(lines, "time, 8 shards")["steps"]]  # noqa: E731
    yield Claim("offload-step", set_up, "all in memory, `torch.utils.checkpoint`", timed)
    set_up = "forward and backward of 38 M parameters, 512 tokens; parameters and gradients on disk, activations "
    for words, setting in (("kept", "keep"), ("recomputed", "checkpoint")):
        ours = f"ours: disk, 12 slices, {setting}"
        peaks = _peaks(f"{ours}, in use", "torch, all in memory, in use", "steps", "after a step of two layers")
        yield Claim("memory-latency", set_up + words, "plain PyTorch", _in_pairs(ours), peaks, " above torch")
    ours, theirs = "GradCache + offload", "whole batch"
    for page, pairs, more in (
        ("retrieval-2048", "2,048", ""),
        ("retrieval", "48", "; under a cap only ours trains"),
    ):
        set_up = f"one contrastive batch of {pairs} pairs, 21 M parameters, all state on disk{more}"
        yield Claim(page, set_up, "the whole batch in memory", _in_rounds(ours, theirs), _peaks(ours, theirs))
    set_up = "gradients of a contrastive batch of 2,048 tokens, 113 M parameters in memory"
    for ours, words in (("ours", set_up), ("ours over OffloadModel", "the same, parameters and gradients on disk")):
        peaks = _peaks(ours, "upstream GradCache", "steps", FLOOR)
        peer = "GradCache over `torch.utils.checkpoint`"
        yield Claim("gradcache-batch", words, peer, _in_pairs(ours), peaks, " above torch")
    set_up, counted = "processor time of two CPU stages, 1 to 16 micro-batches", " above the model"
    for other, peer in (("torchgpipe", "torchgpipe 0.0.7"), ("fairscale", "fairscale 0.4.13 Pipe")):
        times: Ratios = partial(_ladder, other=other)
        yield Claim("pipe-ladder", set_up, peer, times, _above_model(other), counted, statistics.geometric_mean)
    set_up = "train pipeline with a slow loader and slow embedding rows, four balances"
    yield Claim("train-overlap", set_up, "its slowest part alone", _overlapped)


CLAIMS = tuple(_claims())


def claims_table(directory: Path = RESULTS, links: str = "benchmarks/results/") -> str:
    """The table in Markdown: set-up, peer, time ratio with range, memory ratio, link. ``links`` begins each link."""
    header = ["set-up", "beside", "time, ours to theirs", "memory, ours to theirs", "results"]
    rows = [header, ["---", "---", "---:", "---:", "---"], *(claim.row(directory, links) for claim in CLAIMS)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
