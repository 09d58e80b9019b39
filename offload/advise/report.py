"""Shows advice: the memory of the plan as a model reports it, other limits, what was measured, and lines to paste."""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Collection, Sequence

import torch
from torch import nn

from offload.advise.prediction import UNLIMITED, Situation, bound_of, shard_bytes
from offload.advise.profile import works_of
from offload.advise.rates import existing_folder, measure_rates
from offload.advise.sources import failing, source_of
from offload.arguments import compute_device
from offload.limits import AUTO_SHARE
from offload.machine import free_bytes, free_host_bytes
from offload.planning.step_model import OutsideBytes
from offload.telemetry.memory_report import MemoryReport
from offload.units import parse_bytes, shown_bytes, table

__all__ = ["DTYPES", "MOST_POSITIONS", "STATES", "Report"]

_NAMES = {"given": "--memory", "least": "the least", "double": "twice --memory", "all": "all of use"}


DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
#: How states are stored, and the argument of ``OffloadOptimizer`` that says so.
STATES = {
    "full": (None, ""),
    "bfloat16": (torch.bfloat16, "states=torch.bfloat16, "),
    "8bit": ("8bit", 'states="8bit", '),
}
#: Tokens of a row, where neither is given.
MOST_POSITIONS = 512


class Report:
    """The result of ``python -m offload.advise`` for its parsed arguments.

    Raises ValueError in one line, with the name of the argument.
    """

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        limit = parse_bytes(given.memory, "--memory")
        rows, shape = _rows_and_shape(given)
        with failing("--device"):
            self.device = compute_device(given.device)
        self.source = source_of(given.what, DTYPES[given.stored_dtype])
        stored = {p.dtype for p in self.source.model.parameters() if p.is_floating_point()}
        computes = DTYPES.get(given.dtype)
        #: In which layers compute, if not in that of the parameters.
        self.param_dtype = param_dtype = None if stored == {computes} else computes
        is_given = given.input is not None
        works = works_of(self.source, limit, rows[0], shape, is_given=is_given, param_dtype=param_dtype)
        shards = shard_bytes(works, param_dtype)
        with failing(f"--optimizer={given.optimizer}, --states={given.states}, --home={given.home}"):
            rates = measure_rates(
                self.device,
                param_dtype or next(iter(stored)),
                home=given.home,
                home_bytes=sum(s.home + s.gradients for s in shards),
                trained_bytes=sum(s.own_gradients for s in shards),
                optimizer=given.optimizer,
                states=STATES[given.states][0],
            )
        self.situation = Situation(
            shards,
            list(works.values()),
            rows,
            rates,
            casts=param_dtype is not None,
            apart="blocks=" in self.source.named,
            host_bytes=None if self.device.type == "cpu" else int(AUTO_SHARE * free_host_bytes()),
            outside=_outside(self.source.model, works, rates.states * rates.state_share),
        )
        least, most = self.situation.least_bytes(), self.situation.at(UNLIMITED)
        assert most is not None
        limits = {"given": limit, "least": least, "double": 2 * limit, "all": max(least, most.memory_bytes)}
        #: Limits by name, with the fastest plan of each; None where nothing fits.
        self.advices = {name: (nbytes, self.situation.at(nbytes)) for name, nbytes in limits.items()}
        #: Free bytes of the memory that layers compute in, and of the disk.
        self.free_bytes = free_bytes(self.device)
        self.disk_free_bytes = shutil.disk_usage(existing_folder(given.home)).free

    @property
    def memory_report(self) -> MemoryReport:
        """Of the given memory, or of the least where that is too small."""
        limit, predicted = next(advice for advice in self.advices.values() if advice[1] is not None)
        resting = None if self.situation.host_bytes is None else len(self.situation.resting)
        return MemoryReport(device=str(self.device), limit_bytes=limit, predicted=predicted, resting=resting)

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
        states = STATES[given.states][1]
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


def _rows_and_shape(given: argparse.Namespace) -> tuple[list[int], list[int]]:
    """Rows of each micro-batch, and the shape of one row: of numbers if it is given, else of tokens."""
    tokens, count = given.tokens, given.microbatches
    if tokens < 1:
        raise ValueError(f"--tokens: expected a positive number, got {tokens}")
    if given.input is not None:
        batch, *shape = [int(part) if part.isdecimal() else 0 for part in given.input.split(",")]
        if min(batch, *shape, 1) < 1 or tokens % batch:
            raise ValueError(f"--input: expected sizes, the first a divisor of --tokens={tokens}, got {given.input!r}")
    else:
        fitting = (k for k in range(min(tokens, MOST_POSITIONS), 0, -1) if tokens % k == 0)
        shape = [next(fitting) if given.positions is None else given.positions]
        if shape[0] < 1 or tokens % shape[0]:
            raise ValueError(f"--positions: expected a divisor of --tokens={tokens}, got {shape[0]}")
        batch = tokens // shape[0]
    if not 1 <= count <= batch:
        raise ValueError(f"--microbatches: expected from 1 to {batch}, the rows of a batch, got {count}")
    return [batch // count + (i < batch % count) for i in range(count)], shape


def _outside(model: nn.Module, shards: Collection[nn.Module], states: float) -> OutsideBytes:
    """What is in no shard."""
    within = {p for shard in shards for p in shard.parameters()}
    others = [p for p in model.parameters() if p not in within]
    trained = sum(p.nbytes for p in others if p.requires_grad)
    made = {len(shards): trained} if trained else {}
    return OutsideBytes(values=sum(p.nbytes for p in others), states=int(states * trained), made_before=made)
