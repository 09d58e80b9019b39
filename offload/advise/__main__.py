"""The command line: ``python -m offload.advise WHAT --tokens N --memory 8GiB``."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch

from offload.advise.forms import STATES, advise_forms
from offload.advise.prediction import Situation, advise, shards_of
from offload.advise.rates import existing_folder, measure_optimizer, measure_rates
from offload.advise.report import Report
from offload.advise.sources import outline_of
from offload.advise.works import widest_product, works_of
from offload.arguments import compute_device
from offload.limits import AUTO_SHARE
from offload.machine import free_bytes, free_host_bytes
from offload.planning.budget import parse_bytes
from offload.planning.byte_forms import ByteForm

__all__ = ["main", "report_of"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
#: Tokens of a row, where neither is given.
_MOST_POSITIONS = 512


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Prints the message in one line and exits with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m offload.advise",
        description="says what of a model fits in a memory, what a training step will cost here, and how to write it",
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="a safetensors file or index, a transformers config.json, the directory of one, or module:function, which "
        "returns the layers and is called under torch.device('meta')",
    )
    parser.add_argument("--tokens", type=int, required=True, help="of one step")
    parser.add_argument("--memory", required=True, help="that training may use, such as 8GiB")
    parser.add_argument(
        "--positions", type=int, help=f"tokens of a row (a divisor of --tokens up to {_MOST_POSITIONS})"
    )
    parser.add_argument("--input", help="shape of a batch of numbers for module:function, such as 8,3,224,224")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a batch (1)")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim (AdamW)")
    parser.add_argument("--states", choices=STATES, default="full", help="how its states are stored (full)")
    parser.add_argument("--device", default="cpu", help="that computes (cpu)")
    parser.add_argument("--home", default="./home", help="directory for the files of the model (./home)")
    parser.add_argument("--dtype", choices=_DTYPES, help="in which layers compute, if not in that of the parameters")
    parser.add_argument(
        "--stored-dtype", choices=_DTYPES, default="float32", help="of parameters in files and configurations (float32)"
    )
    parser.add_argument("--json", action="store_true", help="for machines")
    return parser


def report_of(arguments: argparse.Namespace) -> Report:
    """The advice for parsed arguments. Raises ValueError in one line, with the name of the argument."""
    limit = _limit(arguments.memory)
    tokens, positions = arguments.tokens, arguments.positions
    if tokens < 1:
        raise ValueError(f"--tokens: expected a positive number, got {tokens}")
    shape = None if arguments.input is None else _shape(arguments.input, tokens)
    if shape is not None:
        positions = tokens // shape[0]
    elif positions is None:
        positions = max(k for k in range(1, min(tokens, _MOST_POSITIONS) + 1) if tokens % k == 0)
    if positions < 1 or tokens % positions:
        raise ValueError(f"--positions: expected a divisor of --tokens={tokens}, got {positions}")
    if not 1 <= arguments.microbatches <= tokens // positions:
        most, got = tokens // positions, arguments.microbatches
        raise ValueError(f"--microbatches: expected from 1 to {most}, the rows of a batch, got {got}")
    try:
        device = compute_device(arguments.device)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--device: {error}") from error
    outline = outline_of(arguments.what, _DTYPES[arguments.stored_dtype])
    stored = {p.dtype for layer in outline.layers for p in layer.own if p.dtype.is_floating_point}
    computes = None if arguments.dtype is None else _DTYPES[arguments.dtype]
    param_dtype = None if computes is None or stored == {computes} else computes
    shards = shards_of(outline, param_dtype, limit)
    batch = tokens // positions
    count = arguments.microbatches
    rows = [batch // count + (i < batch % count) for i in range(count)]
    works = works_of(outline, shards, rows=rows[0], positions=positions, row_shape=shape and shape[1:])
    shards = replace(shards, form=ByteForm(states=arguments.states))
    optimizer = measure_optimizer(arguments.optimizer, STATES[arguments.states])
    home = Path(arguments.home)
    try:
        rates = measure_rates(
            device,
            param_dtype or next(iter(stored)),
            width=widest_product(outline),
            tokens=rows[0] * positions,
            home=home,
            home_bytes=sum(shards.home_bytes) + sum(shards.gradient_bytes),
            state_bytes=sum(shards.state_bytes(optimizer.states)),
        )
    except OSError as error:
        raise ValueError(f"--home: cannot write in {arguments.home!r}: {error}; pass another directory") from error
    host_bytes = None if device.type == "cpu" else int(AUTO_SHARE * free_host_bytes())
    situation = Situation(shards, works, rows, optimizer, rates, host_bytes)
    advices = advise(situation, limit)
    named = dict(advices)
    offered = named["given"] if named["given"].prediction is not None else named["least"]
    forms = advise_forms(situation, offered, partial(measure_optimizer, arguments.optimizer))
    return Report(
        what=arguments.what,
        outline=outline,
        situation=situation,
        advices=advices,
        forms=forms,
        tokens=tokens,
        positions=positions,
        device=str(device),
        home=arguments.home if os.sep in arguments.home else f".{os.sep}{arguments.home}",
        memory=arguments.memory,
        param_dtype=None if param_dtype is None else str(param_dtype),
        optimizer=arguments.optimizer,
        free_bytes=free_bytes(device),
        disk_free_bytes=shutil.disk_usage(existing_folder(home)).free,
    )


def _shape(text: str, tokens: int) -> list[int]:
    sizes = [int(part) if part.isdecimal() else 0 for part in text.split(",")]
    if min(sizes) < 1:
        raise ValueError(f"--input: expected sizes such as 8,3,224,224, got {text!r}")
    if tokens % sizes[0]:
        raise ValueError(f"--input: expected a number of rows that divides --tokens={tokens}, got {sizes[0]}")
    return sizes


def _limit(text: str) -> int:
    try:
        return parse_bytes(int(text) if text.isdecimal() else text, "--memory")
    except ValueError as error:
        raise ValueError(f"--memory: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the advice; returns the exit status: 0, or 2 for arguments that cannot be used."""
    try:
        parsed = _parser().parse_args(arguments)
        report = report_of(parsed)
    except ValueError as error:
        print(f"python -m offload.advise: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(json.dumps(report.fields(), indent=2) if parsed.json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
