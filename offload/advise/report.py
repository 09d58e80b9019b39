"""Shows advice: the memory of the plan as a model reports it, other limits, what was measured, and lines to paste."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from offload.advise.prediction import Situation, bound_of
from offload.advise.sources import Source
from offload.planning.budget import shown_bytes, table
from offload.planning.choose import Prediction
from offload.telemetry.memory_report import MemoryReport

__all__ = ["Report"]

_NAMES = {"given": "--memory", "least": "the least", "double": "twice --memory", "all": "all of use"}


#: Arguments of ``OffloadOptimizer`` for the form of its states.
_STATES = {"full": "", "bfloat16": "states=torch.bfloat16, ", "8bit": 'states="8bit", '}


@dataclass(frozen=True)
class Report:
    """The result of ``python -m offload.advise``."""

    #: The arguments of the command line.
    given: argparse.Namespace
    source: Source
    situation: Situation
    #: Limits by name, with the fastest plan of each; None where nothing fits.
    advices: Mapping[str, tuple[int, Prediction | None]]
    device: str
    param_dtype: torch.dtype | None
    #: Free bytes of the memory that layers compute in, and of the disk.
    free_bytes: int
    disk_free_bytes: int

    @property
    def memory_report(self) -> MemoryReport:
        """Of the given memory, or of the least where that is too small."""
        limit, predicted = next(advice for advice in self.advices.values() if advice[1] is not None)
        resting = None if self.situation.host_bytes is None else len(self.situation.resting)
        return MemoryReport(device=self.device, limit_bytes=limit, predicted=predicted, resting=resting)

    @property
    def lines(self) -> list[str]:
        """Python that makes model and optimizer, with the least memory where the given one is too small."""
        given, source, fits = self.given, self.source, self.advices["given"][1] is not None
        memory = given.memory if fits else f"{-(-self.advices['least'][0] >> 20)}MiB"
        home = given.home if os.sep in given.home else f".{os.sep}{given.home}"
        arguments = f'{source.given}, "{self.device}", {home!r}, memory={memory!r}{source.named}'
        if given.microbatches > 1:
            arguments += f", num_microbatches={given.microbatches}"
        if self.param_dtype is not None:
            arguments += f", param_dtype={self.param_dtype}"
        states = _STATES[given.states]
        return [
            *source.lines,
            *([] if fits else [f"# {given.memory} is too little: this is the least"]),
            f"model = {source.made_by}({arguments})",
            f"optimizer = OffloadOptimizer(model, torch.optim.{given.optimizer}, {states}lr=1e-3)",
        ]

    def __str__(self) -> str:
        situation, rates, given = self.situation, self.situation.rates, self.given
        home, free = sum(situation.home_bytes), self.disk_free_bytes
        lines = [
            f"{given.what}: {self.source.elements:,} parameters, {len(situation.shards)} shards of at most "
            f"{shown_bytes(max(s.slot for s in situation.shards))}; {given.tokens:,} tokens a step",
            f"home: {shown_bytes(home)} of files (parameters, gradients, {rates.states} states of {given.optimizer}); "
            f"{shown_bytes(free)} free in {given.home}{', which is too little' if home > free else ''}",
            f"measured here, per second: {rates.flops / 1e9:,.0f} Gflop, {shown_bytes(rates.read_bytes)} read and "
            f"{shown_bytes(rates.write_bytes)} written ({'direct' if rates.direct else 'page cache'}), "
            f"{shown_bytes(rates.touched_bytes)} in memory, {shown_bytes(rates.update_bytes)} of gradients in updates",
        ]
        if situation.host_bytes is not None:
            resting = shown_bytes(sum(situation.resting.values()))
            lines.append(f"host memory: {resting} of {shown_bytes(situation.host_bytes)} that may be used")
        assumed = [*self.source.assumptions, "without your loss, and with nothing else running"]
        lines += ["", str(self.memory_report), "", table(self._limits(), left=(1, 4)), ""]
        return "\n".join([*lines, *(f"assumed: {each}" for each in assumed), "", *self.lines])

    def _limits(self) -> Sequence[Sequence[str]]:
        """A row for each limit."""
        rows = [("memory", "", "s/step", "tokens/s", "bound by", "plan")]
        for name, (limit, predicted) in self.advices.items():
            if predicted is None:
                plan = f"does not fit; {shown_bytes(self.advices['least'][0] - limit)} short of the least"
                rows.append((shown_bytes(limit), _NAMES[name], "-", "-", "-", plan))
                continue
            plan = str(predicted.choice)
            if limit > self.free_bytes:
                plan += f"; only {shown_bytes(self.free_bytes)} are free here"
            seconds, speed = (
                f"{predicted.forecast.seconds:.3g}",
                f"{self.given.tokens / predicted.forecast.seconds:,.4g}",
            )
            rows.append((shown_bytes(limit), _NAMES[name], seconds, speed, bound_of(predicted), plan))
        return rows
