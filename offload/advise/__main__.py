"""The command line: ``python -m offload.advise WHAT --tokens N --memory 8GiB``."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Collection, Sequence
from typing import NoReturn

import torch
from torch import nn

from offload.advise.prediction import Situation, advise, shard_bytes
from offload.advise.profile import works_of
from offload.advise.rates import existing_folder, measure_rates
from offload.advise.report import Report
from offload.advise.sources import failing, source_of
from offload.arguments import compute_device
from offload.limits import AUTO_SHARE
from offload.machine import free_bytes, free_host_bytes
from offload.planning.budget import parse_bytes
from offload.planning.step_model import OutsideBytes

__all__ = ["main", "report_of"]

_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.bfloat16, torch.float16)}
_STATES = {"full": None, "bfloat16": torch.bfloat16, "8bit": "8bit"}
#: Tokens of a row, where neither is given.
_MOST_POSITIONS = 512


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are those of the arguments' values."""

    def error(self, message: str) -> NoReturn:
        """Raises ValueError."""
        raise ValueError(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m offload.advise",
        description="says what of a model fits in a memory, what a training step will cost here, and how to write it",
    )
    parser.add_argument(
        "what",
        metavar="WHAT",
        help="the config.json of a transformers model, the directory of one, or module:function, which returns the "
        "model and is called under torch.device('meta')",
    )
    parser.add_argument("--tokens", type=int, required=True, help="of one step")
    parser.add_argument("--memory", required=True, help="that training may use, such as 8GiB")
    parser.add_argument("--positions", type=int, help=f"tokens of a row (a divisor of --tokens to {_MOST_POSITIONS})")
    parser.add_argument("--input", help="shape of a batch of numbers, such as 8,3,224,224")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a batch (1)")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim (AdamW)")
    parser.add_argument("--states", choices=_STATES, default="full", help="how its states are stored (full)")
    parser.add_argument("--device", default="cpu", help="that computes (cpu)")
    parser.add_argument("--home", default="./home", help="directory for the files of the model (./home)")
    parser.add_argument("--dtype", choices=_DTYPES, help="in which layers compute, if not in that of the parameters")
    parser.add_argument("--stored-dtype", choices=_DTYPES, default="float32", help="of parameters in files (float32)")
    return parser


def report_of(given: argparse.Namespace) -> Report:
    """The advice for parsed arguments. Raises ValueError in one line, with the name of the argument."""
    limit = parse_bytes(given.memory, "--memory")
    rows, shape = _rows_and_shape(given)
    with failing("--device"):
        device = compute_device(given.device)
    source = source_of(given.what, _DTYPES[given.stored_dtype])
    stored = {p.dtype for p in source.model.parameters() if p.is_floating_point()}
    computes = _DTYPES.get(given.dtype)
    param_dtype = None if stored == {computes} else computes
    works = works_of(source, limit, rows[0], shape, is_given=given.input is not None, param_dtype=param_dtype)
    shards = shard_bytes(works, param_dtype)
    with failing(f"--optimizer={given.optimizer}, --states={given.states}, --home={given.home}"):
        rates = measure_rates(
            device,
            param_dtype or next(iter(stored)),
            home=given.home,
            home_bytes=sum(s.home + s.gradients for s in shards),
            trained_bytes=sum(s.own_gradients for s in shards),
            optimizer=given.optimizer,
            states=_STATES[given.states],
        )
    situation = Situation(
        shards,
        list(works.values()),
        rows,
        rates,
        casts=param_dtype is not None,
        apart="blocks=" in source.named,
        host_bytes=None if device.type == "cpu" else int(AUTO_SHARE * free_host_bytes()),
        outside=_outside(source.model, works, rates.states * rates.state_share),
    )
    return Report(
        given=given,
        source=source,
        situation=situation,
        advices=advise(situation, limit),
        device=str(device),
        param_dtype=param_dtype,
        free_bytes=free_bytes(device),
        disk_free_bytes=shutil.disk_usage(existing_folder(given.home)).free,
    )


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
        fitting = (k for k in range(min(tokens, _MOST_POSITIONS), 0, -1) if tokens % k == 0)
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


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the advice; returns the exit status: 0, or 2 for arguments that cannot be used."""
    try:
        parsed = _parser().parse_args(arguments)
        print(report_of(parsed))
    except ValueError as error:
        print(f"python -m offload.advise: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
