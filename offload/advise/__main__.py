"""The command line: ``python -m offload.advise WHAT --tokens N --memory 8GiB``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from offload.advise.report import DTYPES, MOST_POSITIONS, STATES, Report

__all__ = ["main"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
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
    parser.add_argument("--positions", type=int, help=f"tokens of a row (a divisor of --tokens to {MOST_POSITIONS})")
    parser.add_argument("--input", help="shape of a batch of numbers, such as 8,3,224,224")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a batch (1)")
    parser.add_argument("--optimizer", default="AdamW", help="a class of torch.optim (AdamW)")
    parser.add_argument("--states", choices=STATES, default="full", help="how its states are stored (full)")
    parser.add_argument("--device", default="cpu", help="that computes (cpu)")
    parser.add_argument("--home", default="./home", help="directory for the files of the model (./home)")
    parser.add_argument("--dtype", choices=DTYPES, help="in which layers compute, if not in that of the parameters")
    parser.add_argument("--stored-dtype", choices=DTYPES, default="float32", help="of parameters in files (float32)")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the advice; exits with status 2 for arguments that cannot be used."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        print(Report(given))
    except ValueError as error:
        parser.error(" ".join(str(error).split()))


if __name__ == "__main__":
    main()
